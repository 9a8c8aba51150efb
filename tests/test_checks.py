"""System checks find what would cost a message, and name the way out."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import connection, connections

from outbox.checks import CHECKS, FURTHER_CONNECTIONS, anchor
from outbox.conf import Options
from outbox.database import OLDEST, tables_without_transactions, unsupported
from outbox.handlers import Topic, handler, registry
from tests import rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "checks.md"


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        yield


def found(tag="outbox", **kwargs):
    """id -> messages of our checks, each of which has a hint that leads to its documentation."""
    result = {}
    for message in checks.run_checks(tags=[tag], **kwargs):
        if not message.id.startswith("outbox."):
            continue
        assert message.id in CHECKS
        assert message.hint.endswith(f"({anchor(message.id)})")
        assert message.level == {"E": checks.ERROR, "W": checks.WARNING, "I": checks.INFO}[message.id[7]]
        result.setdefault(message.id, []).append(message)
    return result


def only(check_id, **kwargs):
    (message,) = found(**kwargs)[check_id]
    return f"{message.msg} {message.hint}"


def deliver(message):
    pass


def deliver_too(message):
    pass


def test_a_sound_project_passes():
    handler("order.paid")(deliver)
    assert found() == {}


# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_named_with_the_nearest_one(settings):
    settings.OUTBOX = {"LEAZE": 30, "POLL": 2}
    text = only("outbox.E001")
    assert "'LEAZE'" in text
    assert "'LEASE'" in text


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"LEASE": -1}, "OUTBOX['LEASE'] is -1"),
        ({"POLL": "2"}, "a number of seconds or a timedelta"),
        ({"SHARE": 2}, "at most 1"),
        ({"SHARE": "half"}, "It must be a number. "),
        ({"SHARE": timedelta(seconds=0.5)}, "It must be a number. "),
        ({"BACKOFF_FACTOR": 0.5}, "1 or more"),
        ({"BACKOFF_FACTOR": float("nan")}, "1 or more"),
        ({"LEASE": 1e308}, "at most a century"),
        ({"POLL": 10**400}, "at most a century"),
        ({"PRUNE_AFTER": timedelta.max}, "at most a century"),
        ({"BATCH": 10_001}, "at most 10,000"),
        ({"MAX_ERROR_CHARS": 2**31}, "at most 2,147,483,647"),
        ([], "must be a dict, not list"),
        ({"LISTEN_DATABASE": "nowhere"}, "'nowhere'"),
    ],
)
def test_a_bad_value_is_named(settings, given, part):
    settings.OUTBOX = given
    assert part in only("outbox.E002")


def test_every_problem_is_told_at_once(settings):
    settings.OUTBOX = {"LEAZE": 30, "POL": 1, "LEASE": -1}
    result = found()
    assert len(result["outbox.E001"]) == 2
    assert len(result["outbox.E002"]) == 1


@pytest.mark.parametrize(("lease", "short"), [(2.9, True), (3, False)])
def test_a_lease_leaves_time_for_three_renewals(settings, lease, short):
    settings.OUTBOX = {"LEASE": lease}
    assert ("outbox.W002" in found()) == short


@pytest.mark.parametrize("name", ["PRUNE_AFTER", "PRUNE_DEAD_AFTER"])
@pytest.mark.parametrize(("age", "short"), [(3599, True), (3600, False), (0, False)])
def test_messages_are_kept_for_the_dedupe_window(settings, name, age, short):
    settings.OUTBOX = {name: age, "DEDUPE_WINDOW": 3600}
    assert ("outbox.W006" in found()) == short


def test_a_backoff_that_cannot_grow_is_named(settings):
    settings.OUTBOX = {"BACKOFF_CAP": 4, "BACKOFF_BASE": 5}
    assert "4 s" in only("outbox.W009")


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_topic_without_a_handler_is_a_warning():
    Topic("order.paid")
    assert "'order.paid'" in only("outbox.W001")


def test_a_required_topic_without_a_handler_is_an_error():
    """A4."""
    Topic("order.paid", required=True)
    assert "refuse to start" in only("outbox.E003")
    assert "outbox.W001" not in found()
    handler("order.paid")(deliver)
    assert found() == {}


def test_two_handlers_of_one_name_are_named():
    handler("order.paid")(deliver)
    handler("order.paid")(deliver_too)
    text = only("outbox.E004")
    assert "tests.test_checks.deliver and tests.test_checks.deliver_too" in text


def test_two_handlers_that_claim_the_same_messages_are_named():
    handler("order.paid", aliases=["order.settled"])(deliver)
    handler("order.settled")(deliver_too)
    assert "'order.settled'" in only("outbox.E005")


def test_one_slot_is_not_shared(settings):
    settings.OUTBOX = {"CONCURRENCY": 1}
    handler("order.paid")(deliver)
    assert found() == {}
    handler("order.shipped")(deliver)
    assert "2 handlers" in only("outbox.W007")


def test_a_share_below_one_slot_is_named(settings):
    settings.OUTBOX = {"CONCURRENCY": 4}
    handler("order.paid", share=0.2)(deliver)
    handler("order.shipped", share=0.25)(deliver)
    assert "'order.paid'" in only("outbox.W008")


def test_handlers_are_checked_even_where_the_settings_are_bad(settings):
    settings.OUTBOX = {"CONCURRENCY": 0}
    Topic("order.paid", required=True)
    assert set(found()) == {"outbox.E002", "outbox.E003"}


# --- routers and connections ------------------------------------------------------------------------------------------


class Router:
    """Sends the outbox's models where it is told; everything else goes to default."""

    write = "default"
    read = None
    attempts = None
    allowed = ("default", "other")
    business = "default"

    def db_for_write(self, model, **hints):
        if model._meta.app_label != "outbox":
            return self.business
        return self.attempts if self.attempts and model.__name__ == "Attempt" else self.write

    def db_for_read(self, model, **hints):
        return self.read or self.db_for_write(model)

    def allow_migrate(self, db, app_label, **hints):
        return db in self.allowed if app_label == "outbox" else None


@pytest.mark.parametrize(
    ("choices", "ids"),
    [
        ({}, set()),
        ({"write": "other"}, {"outbox.W004"}),
        ({"write": "other", "business": "other"}, set()),
        ({"write": "other", "business": "other", "allowed": ("default",)}, {"outbox.E006"}),
        ({"attempts": "other"}, {"outbox.E007"}),
        ({"read": "other"}, {"outbox.I001"}),
    ],
)
def test_routers_that_separate_the_outbox_are_named(settings, choices, ids):
    """Scenarios 2 and 38."""
    settings.DATABASE_ROUTERS = [type("ThisRouter", (Router,), choices)()]
    result = found()
    assert set(result) == ids
    if ids:
        assert "'other'" in str(result) or "other" in only(*ids)


def options_of(monkeypatch, **given):
    for alias in ("default", "other"):
        monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", given)


@pytest.mark.parametrize(
    ("mode", "fails"), [(None, True), ("DEFERRED", True), ("IMMEDIATE", False), ("exclusive", False)]
)
def test_sqlite_without_immediate_transactions_is_named(monkeypatch, database_kind, mode, fails):
    """Scenario 39."""
    options_of(monkeypatch, transaction_mode=mode)
    assert len(found().get("outbox.W003", [])) == (2 if fails and database_kind == "sqlite" else 0)


@pytest.mark.parametrize(
    ("pool", "small"),
    [
        (None, False),
        (True, True),
        ({"min_size": 2}, True),
        ({"max_size": 10 + FURTHER_CONNECTIONS - 1}, True),
        ({"max_size": 10 + FURTHER_CONNECTIONS}, False),
        ({"min_size": 50}, False),
    ],
)
def test_a_pool_that_is_too_small_is_named(settings, monkeypatch, pool, small):
    """Scenario 37."""
    settings.OUTBOX = {"CONCURRENCY": 10}
    options_of(monkeypatch, transaction_mode="IMMEDIATE", pool=pool)
    assert ("outbox.W005" in found()) == small


# --- databases --------------------------------------------------------------------------------------------------------


def in_databases(*aliases):
    return found(tag="database", databases=list(aliases))


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_database_with_due_messages_and_no_dispatcher_is_named():
    rows.message(), rows.message(using="other"), rows.dispatcher()
    result = in_databases("default", "other")
    assert set(result) == {"outbox.W010"}
    assert "'other'" in result["outbox.W010"][0].msg
    rows.dispatcher(using="other")
    assert in_databases("default", "other") == {}


@pytest.mark.django_db(transaction=True)
def test_scheduled_and_settled_messages_need_no_dispatcher():
    rows.scheduled(), rows.delivered(), rows.dead()
    assert in_databases("default") == {}


@pytest.mark.django_db(transaction=True)
def test_databases_are_only_asked_when_they_are_to_be_checked(django_assert_num_queries):
    rows.message()
    with django_assert_num_queries(0):
        assert found() == {}


@pytest.mark.django_db(transaction=True)
def test_this_database_is_supported():
    assert unsupported(connection) == ""


@pytest.mark.django_db(transaction=True)
def test_an_old_database_is_named(monkeypatch):
    monkeypatch.setattr(connections["default"], "get_database_version", lambda: (3, 4))
    (message,) = in_databases("default")["outbox.E008"]
    assert "3.4 is not supported: it takes" in message.msg
    monkeypatch.setattr(connections["default"], "get_database_version", lambda: (99, 0))
    assert in_databases("default") == {}


@pytest.mark.django_db  # what MySQL it is, its features ask
def test_a_foreign_database_is_named(monkeypatch):
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    assert unsupported(connection).endswith("is not supported")
    assert set(OLDEST) == {"postgresql", "mariadb", "mysql", "sqlite"}


@pytest.mark.django_db(transaction=True)
def test_a_table_that_cannot_roll_back_is_named(monkeypatch, database_kind):
    assert tables_without_transactions(connection, ["outbox_message"]) == []
    if database_kind == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE check_myisam (id INT) ENGINE = MyISAM")
        try:
            tables = ["check_myisam", "outbox_message"]
            assert tables_without_transactions(connection, tables) == ["check_myisam"]
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE check_myisam")
    monkeypatch.setattr("outbox.checks.tables_without_transactions", lambda connection, tables: ["outbox_attempt"])
    (message,) = in_databases("default")["outbox.E009"]
    assert "'outbox_attempt'" in message.msg
    assert "ALTER TABLE outbox_attempt" in message.hint


@pytest.mark.django_db(transaction=True)
def test_a_database_without_the_tables_is_left_alone(monkeypatch):
    monkeypatch.setattr("outbox.overview.Message._meta.db_table", "no_such_table")
    assert in_databases("default") == {}


@pytest.mark.django_db(transaction=True)
def test_the_check_command_runs_them():
    handler("order.paid")(deliver)
    call_command("check", "--database", "default", "--tag", "outbox", "--tag", "database")


# --- documentation ----------------------------------------------------------------------------------------------------


def test_ids_are_of_one_form_and_sorted_by_level():
    assert all(re.fullmatch(r"outbox\.[EWI]\d{3}", each) for each in CHECKS)
    assert anchor("outbox.E001") == "docs/reference/checks.md#outbox-e001"


@pytest.mark.skipif(not PAGE.exists(), reason="the page of the checks is not written yet")
def test_every_check_has_its_place_in_the_documentation():
    page = PAGE.read_text(encoding="utf-8").lower()
    missing = [
        each for each in CHECKS if f"({each.lower().replace('.', '-')})=" not in page and each.lower() not in page
    ]
    assert not missing


def test_every_option_has_a_default_that_passes(settings):
    settings.OUTBOX = {name: getattr(Options(), name) for name in Options.__slots__}
    assert found() == {}
