"""The testing kit: deliver what was staged on the test's own connection, and assert what was staged."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from outbox import (
    Bury,
    Discard,
    NotInTransaction,
    Retry,
    Snooze,
    Unavailable,
    UnknownTopic,
    handler,
    signals,
    stage,
    testing,
)
from outbox.exceptions import LeakedTransaction, NotConfirmed
from outbox.models import Message
from outbox.testing import (
    assert_not_staged,
    assert_staged,
    capture_staged,
    drain,
    isolated_registry,
    staged_messages,
)
from tests.testapp.models import Effect, Order

ROOT = Path(__file__).resolve().parent.parent
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _registry(outbox_registry):
    """Every test registers its own handlers."""


@pytest.fixture
def in_test_case(db):
    """Run the test inside a transaction, as `TestCase` does."""


@pytest.fixture(
    params=[
        pytest.param("in a transaction", marks=pytest.mark.django_db),
        pytest.param("in autocommit", marks=pytest.mark.django_db(transaction=True)),
    ]
)
def anyhow(request):
    """Run the test inside a transaction, as `TestCase` does, and again without one."""


def stage_alone(topic, payload=None, **options):
    with transaction.atomic(using=options.get("using")):
        return stage(topic, payload, **options)


def roll_back(topic, **options):
    with suppress(ZeroDivisionError), transaction.atomic():
        stage(topic, None, **options)
        raise ZeroDivisionError


def record(message):
    Effect.objects.create(key=message.event_key, attempt=message.attempt)


def effects():
    return list(Effect.objects.order_by("pk").values_list("key", flat=True))


def misspelt_insert():
    """Fail outside any atomic block, which spoils the transaction of a test case."""
    Order(pk=Order.objects.create(reference="taken").pk).save(force_insert=True)


# --- drain ------------------------------------------------------------------------------------------------------------


def test_what_is_due_is_delivered(anyhow):
    handler("a")(record)
    stage_alone("a", event_key="one")
    stage_alone("a", event_key="two")
    report = drain()
    assert (report.delivered, report.processed, report.errors) == (2, 2, {})
    assert effects() == ["one", "two"]
    assert Message.objects.delivered().count() == 2
    assert drain().processed == 0


def fail(message):
    raise ValueError("no")


def verdict(error):
    def raises(message):
        raise error

    return raises


@pytest.mark.parametrize(
    ("function", "counted", "error"),
    [
        (record, "delivered", type(None)),
        (fail, "retried", ValueError),
        (lambda message: False, "retried", NotConfirmed),
        (verdict(Retry("later")), "retried", Retry),
        (verdict(Bury("never")), "dead", Bury),
        (verdict(Discard("not needed")), "discarded", Discard),
        (verdict(Snooze(for_=60)), "snoozed", type(None)),
        (verdict(Unavailable("down", after=60)), "snoozed", Unavailable),
        (verdict(SystemExit(1)), "retried", SystemExit),
    ],
)
def test_each_outcome_is_counted_with_its_error(in_test_case, function, counted, error):
    handler("a")(function)
    [pk] = stage_alone("a").ids
    report = drain()
    assert (getattr(report, counted), report.processed) == (1, 1)
    assert isinstance(report.errors.get(pk), error)


def test_a_result_that_somebody_else_overtook_counts_as_skipped(in_test_case):
    @handler("a")
    def lose_the_lease(message):
        Message.objects.update(lease_token=1)

    stage_alone("a")
    report = drain()
    assert (report.skipped, report.processed) == (1, 1)


def test_a_message_that_expired_counts_as_discarded(in_test_case):
    handler("a")(record)
    stage_alone("a", expires_at=timedelta(hours=1))
    Message.objects.update(expires_at=timezone.now() - HOUR)
    report = drain()
    assert (report.discarded, report.processed, effects()) == (1, 1, [])


def test_what_handlers_stage_is_delivered_too(anyhow):
    @handler("order.paid")
    def go_on(message):
        with transaction.atomic():
            stage("receipt.due", None, event_key="follow-up")

    handler("receipt.due")(record)
    stage_alone("order.paid")
    assert drain().delivered == 2
    assert effects() == ["follow-up"]


def test_lanes_keep_their_order_and_a_dead_head_is_skipped(anyhow):
    @handler("a", max_attempts=1)
    def fail_at_first(message):
        record(message)
        if message.event_key == "1":
            raise ValueError

    for key in "123":
        stage_alone("a", event_key=key, ordering_key="lane")
    report = drain()
    assert (report.dead, report.delivered) == (1, 2)
    assert effects() == ["1", "2", "3"]


def test_every_handler_of_a_topic_gets_its_own_message(in_test_case):
    handler("a")(record)
    handler("a", name="a.second")(fail)
    [first, second] = stage_alone("a").ids
    report = drain()
    assert (report.delivered, report.retried, list(report.errors)) == (1, 1, [second])
    assert Message.objects.get(pk=first).state == "delivered"


def test_everything_happens_in_the_thread_of_the_test(in_test_case):
    threads = []

    @handler("a")
    def look(message):
        threads.append((threading.current_thread(), threading.active_count()))

    stage_alone("a")
    before = threading.active_count()
    drain()
    assert threads == [(threading.current_thread(), before)]


def test_async_handlers_use_the_connection_of_the_test(anyhow):
    @handler("a")
    async def deliver(message):
        await Effect.objects.acreate(key=message.event_key)

    stage_alone("a", event_key="one")
    assert drain().delivered == 1
    assert effects() == ["one"]


def test_signals_are_sent_as_in_production(in_test_case):
    told = []

    def listen(event, **_):
        told.append(event.message.event_key)

    handler("a")(record)
    stage_alone("a", event_key="one")
    signals.delivered.connect(listen)
    try:
        drain()
    finally:
        signals.delivered.disconnect(listen)
    assert told == ["one"]


def test_the_isolation_level_is_never_touched(in_test_case):
    handler("a")(record)
    stage_alone("a")
    with CaptureQueriesContext(connection) as queries:
        drain()
    assert not [query for query in queries if "ISOLATION" in query["sql"].upper()]


@pytest.mark.django_db(databases=["default", "other"])
def test_another_database_is_drained_on_demand():
    handler("a")(record)
    stage_alone("a", event_key="elsewhere", using="other")
    assert drain().processed == 0
    assert drain(using="other").delivered == 1
    assert_staged("a", using="other", count=1)
    assert_not_staged("a")


# --- drain: what is selected ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "delivered"),
    [
        ({}, ["a", "b", "b"]),
        ({"topics": "a"}, ["a"]),
        ({"topics": ["b"]}, ["b", "b"]),
        ({"handlers": "b.second"}, ["b"]),
        ({"handlers": ["b", "b.second"]}, ["b", "b"]),
        ({"topics": "a", "handlers": "b"}, []),
        ({"limit": 1}, 1),
        ({"limit": 0}, []),
    ],
)
def test_a_drain_can_be_restricted(in_test_case, selection, delivered):
    for topic, name in (("a", "a"), ("b", "b"), ("b", "b.second")):
        handler(topic, name=name)(record)
    stage_alone("a", event_key="a")
    stage_alone("b", event_key="b")
    drain(**selection)
    assert sorted(effects()) == delivered or len(effects()) == delivered


def test_names_that_nobody_knows_are_refused(in_test_case):
    handler("order.paid")(record)
    with pytest.raises(UnknownTopic, match=r"order\.paid"):
        drain(topics="order.payd")
    with pytest.raises(LookupError, match=r"order\.paid"):
        drain(handlers="order.payd")


# --- drain: time ------------------------------------------------------------------------------------------------------


def test_what_is_not_due_stays(in_test_case):
    handler("a")(record)
    stage_alone("a", deliver_at=HOUR)
    assert drain().processed == 0


@pytest.mark.parametrize("until", [2 * HOUR, lambda: timezone.now() + 2 * HOUR])
def test_time_can_be_moved_on_instead_of_waiting(anyhow, until):
    handler("a")(record)
    stage_alone("a", event_key="late", deliver_at=3 * HOUR)
    stage_alone("a", event_key="later today", deliver_at=1.5 * HOUR)
    stage_alone("a", event_key="soon", deliver_at=HOUR)
    assert drain(until=until() if callable(until) else until).delivered == 2
    assert effects() == ["soon", "later today"]
    remaining = Message.objects.get(event_key="late").due_at - timezone.now()
    assert 1.4 * HOUR < remaining < 1.6 * HOUR, "an hour and a half have passed for this one, too"


def test_an_expiry_time_passes_with_the_others(in_test_case):
    handler("a")(record)
    stage_alone("a", deliver_at=2 * HOUR, expires_at=HOUR)
    assert drain(until=3 * HOUR).discarded == 1


def test_retries_run_within_the_time_that_is_given(in_test_case, settings):
    settings.OUTBOX = {"BACKOFF_BASE": 60.0, "BACKOFF_FACTOR": 1.0}
    handler("a")(fail)
    stage_alone("a")
    with mock.patch("random.random", return_value=1.0):
        report = drain(until=timedelta(seconds=150))
    assert report.retried == 3, "at once, after one minute, after two"


def test_without_delays_everything_comes_to_its_end(anyhow):
    handler("a", max_attempts=5)(fail)
    handler("b")(record)
    stage_alone("a")
    stage_alone("b", deliver_at=1000 * HOUR)
    report = drain(ignore_delays=True)
    assert (report.retried, report.dead, report.delivered) == (4, 1, 1)


def test_a_drain_without_end_gives_up(in_test_case, monkeypatch):
    monkeypatch.setattr(testing, "MOST", 5)
    handler("a")(verdict(Snooze(for_=1)))
    stage_alone("a")
    with pytest.raises(AssertionError, match="snooze for ever"):
        drain(ignore_delays=True)
    assert drain(ignore_delays=True, limit=3).snoozed == 3


# --- drain: what handlers do to transactions --------------------------------------------------------------------------


def test_a_handler_may_insist_on_a_durable_transaction(anyhow):
    """Scenario 54: a savepoint isolates it, for inside an atomic() block it would be refused."""

    @handler("a")
    def deliver(message):
        with transaction.atomic(durable=True):
            record(message)

    stage_alone("a", event_key="one")
    assert drain().delivered == 1
    assert effects() == ["one"]


def test_an_atomic_handler_commits_with_its_completion_or_not_at_all(anyhow):
    @handler("a", atomic=True, max_attempts=2)
    def deliver(message):
        record(message)
        if message.attempt == 1:
            raise ValueError

    stage_alone("a", event_key="one")
    report = drain(ignore_delays=True)
    assert (report.retried, report.delivered) == (1, 1)
    assert list(Effect.objects.values_list("attempt", flat=True)) == [2]


def test_the_writes_of_a_failing_handler_stay_as_they_do_in_production(anyhow):
    @handler("a")
    def fail_late(message):
        record(message)
        raise ValueError

    stage_alone("a", event_key="one")
    assert drain().retried == 1
    assert effects() == ["one"]


def test_a_database_error_of_a_handler_spoils_neither_the_test_nor_the_next_handler(anyhow):
    """Scenario 54."""

    @handler("a")
    def fail_once(message):
        if message.attempt == 1 and message.event_key == "bad":
            misspelt_insert()
        record(message)

    stage_alone("a", event_key="bad")
    stage_alone("a", event_key="good")
    report = drain()
    assert (report.delivered, report.retried) == (1, 1)
    assert isinstance(next(iter(report.errors.values())), IntegrityError)
    assert drain(ignore_delays=True).delivered == 1
    assert effects() == ["good", "bad"]


@pytest.mark.django_db
def test_a_handler_that_hides_a_broken_transaction_fails():
    hooks = []

    @handler("a")
    def hide(message):
        record(message)
        transaction.on_commit(lambda: hooks.append("of a handler that was rolled back"))
        with suppress(IntegrityError):
            misspelt_insert()

    stage_alone("a")
    before = len(connection.run_on_commit)
    report = drain()
    assert (report.retried, effects()) == (1, [])
    assert isinstance(next(iter(report.errors.values())), LeakedTransaction)
    assert len(connection.run_on_commit) == before


def test_a_transaction_that_a_handler_leaves_open_is_rolled_back(anyhow):
    @handler("a")
    def leak(message):
        transaction.atomic().__enter__()
        record(message)

    stage_alone("a")
    depth = len(connection.atomic_blocks)
    report = drain()
    assert (report.retried, effects()) == (1, [])
    assert isinstance(next(iter(report.errors.values())), LeakedTransaction)
    assert len(connections["default"].atomic_blocks) == depth


def test_errors_can_be_let_through_once_they_are_settled(in_test_case):
    handler("a")(fail)
    [pk] = stage_alone("a").ids
    with pytest.raises(ValueError, match="no"):
        drain(raise_errors=True)
    assert Message.objects.get(pk=pk).error_text == "no"
    assert Message.objects.retrying().count() == 1


def test_verdicts_are_not_let_through(in_test_case):
    handler("a")(verdict(Bury("as it should be")))
    stage_alone("a")
    assert drain(raise_errors=True).dead == 1


# --- assertions -------------------------------------------------------------------------------------------------------


def test_staged_intents_are_found_by_any_of_their_parts(anyhow):
    handler("a")(record)
    handler("a", name="a.second")(record)
    stage_alone("a", {"id": 1}, event_key="k1", ordering_key="lane", headers={"trace": "t"})
    stage_alone("a", {"id": 2}, event_key="k2")
    assert [row.event_key for row in assert_staged("a")] == ["k1", "k2"]
    assert_staged("a", count=2)
    assert_staged("a", {"id": 1}, event_key="k1", ordering_key="lane", headers={"trace": "t"}, count=1)
    assert_staged("a", ordering_key=None, headers={}, count=1)
    assert_staged("a", {"id": mock.ANY}, count=2)
    assert_not_staged("a", payload={"id": 3})
    drain()
    assert_staged("a", {"id": 1})


def test_a_payload_is_compared_as_json_makes_it(in_test_case):
    handler("a")(record)
    payload = {"at": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.50"), "pair": (1, 2), "none": None}
    stage_alone("a", payload)
    stage_alone("a", None)
    assert_staged("a", payload, count=1)
    assert_staged("a", {"at": "2026-01-02T00:00:00Z", "price": "1.50", "pair": [1, 2], "none": None}, count=1)
    assert_staged("a", None, count=1)


@pytest.mark.parametrize("parts", [{"payload": {"id": 2}}, {"event_key": "k2"}, {"headers": {"a": 1}}, {"count": 2}])
def test_an_assertion_that_fails_tells_what_is_there(in_test_case, parts):
    handler("a")(record)
    handler("b")(record)
    stage_alone("a", {"id": 1}, event_key="k1")
    stage_alone("b", {"secret": 1})
    with pytest.raises(AssertionError) as failure:
        assert_staged("a", **parts)
    assert "{'id': 1} (event_key='k1')" in str(failure.value)
    assert "of other topics: b" in str(failure.value)


def test_what_was_rolled_back_was_not_staged(anyhow):
    handler("a")(record)
    roll_back("a")
    assert_not_staged("a")
    assert_not_staged()


@pytest.mark.parametrize("arguments", [{}, {"topic": "a"}, {"topic": "a", "payload": {"id": 1}}])
def test_what_was_staged_is_not_denied(in_test_case, arguments):
    handler("a")(record)
    stage_alone("a", {"id": 1})
    with pytest.raises(AssertionError, match="'id': 1"):
        assert_not_staged(**arguments)


def test_the_absence_of_a_topic_that_nobody_declares_proves_nothing(in_test_case):
    handler("order.paid")(record)
    with pytest.raises(UnknownTopic, match=r"Did you mean 'order\.paid'"):
        assert_not_staged("order.payd")


def test_a_block_captures_what_is_staged_in_it(anyhow):
    handler("a")(record)
    handler("a", name="a.second")(record)
    stage_alone("a", event_key="before")
    with capture_staged() as staged:
        stage_alone("a", {"id": 1}, event_key="first")
        stage_alone("a", event_key="before")
        roll_back("a", event_key="rolled back")
        stage_alone("a", event_key="second")
    stage_alone("a", event_key="after")
    assert [(row.event_key, row.payload) for row in staged] == [("first", {"id": 1}), ("second", None)]


@pytest.mark.django_db
def test_the_transaction_of_a_test_case_does_not_stand_in_for_a_missing_atomic_block():
    handler("a")(record)
    with pytest.raises(NotInTransaction):
        stage("a", None)


# --- Django's own test cases ------------------------------------------------------------------------------------------


class KitInside:
    """The same tests for both of Django's test cases."""

    def setUp(self):
        self.enterContext(isolated_registry())
        handler("a")(record)

    def test_drain_and_assert(self):
        with capture_staged() as staged:
            stage_alone("a", {"id": 1}, event_key="one")
        assert_staged("a", {"id": 1}, count=1)
        assert len(staged) == 1
        assert drain().delivered == 1
        assert effects() == ["one"]

    def test_nothing_is_left_of_another_test(self):
        assert staged_messages() == []
        assert drain().processed == 0


class TestInTransactionTestCase(KitInside, TransactionTestCase):
    pass


class TestInTestCase(KitInside, TestCase):
    @classmethod
    def setUpTestData(cls):
        cls.order = Order.objects.create(reference="kept")

    def test_commit_hooks_deliver_at_once_and_follow_ups_are_captured_too(self):
        """Scenario 54."""

        @handler("order.paid")
        def deliver(message):
            with transaction.atomic(durable=True):
                record(message)
                stage("a", None, event_key="follow-up", deliver_now=True)

        with self.captureOnCommitCallbacks(execute=True):
            stage_alone("order.paid", event_key="paid", deliver_now=True)
        assert effects(), ["paid" == "follow-up"]
        assert Message.objects.delivered().count() == 2

    def test_an_immediate_delivery_that_fails_leaves_the_transaction_usable(self):
        """Scenario 54."""

        @handler("order.paid")
        def fail_once(message):
            if message.attempt == 1:
                misspelt_insert()
            record(message)

        with self.captureOnCommitCallbacks(execute=True):
            stage_alone("order.paid", event_key="paid", deliver_now=True)
        assert effects() == []
        assert drain().delivered == 1
        assert effects() == ["paid"]
        self.order.refresh_from_db()


# --- the pytest plugin, and other projects ----------------------------------------------------------------------------


def test_the_fixtures_hand_out_the_functions_of_the_kit(anyhow, outbox_drain, outbox_staged, outbox_registry):
    handler("a")(record)
    assert [each.name for each in outbox_registry.handlers()] == ["a"]
    stage_alone("a", event_key="one")
    assert [row.event_key for row in outbox_staged("a")] == ["one"]
    assert outbox_drain().delivered == 1


def test_no_fixture_takes_the_name_of_the_package(request):
    with pytest.raises(pytest.FixtureLookupError):
        request.getfixturevalue("outbox")


TINY_SETTINGS = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django.contrib.contenttypes", "outbox", "shop"]
USE_TZ = True
"""
TINY_HANDLERS = """
from outbox import handler
seen = []

@handler("order.paid")
def deliver(message):
    seen.append(message.payload)
"""
TINY_TESTS = """
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from outbox import stage
from outbox.testing import assert_staged, drain
from shop import outbox_handlers

class Kit:
    def test_drain(self):
        assert connection.is_in_memory_db()
        with transaction.atomic():
            stage("order.paid", {"id": 1})
        assert_staged("order.paid", {"id": 1})
        assert drain().delivered == 1
        assert outbox_handlers.seen.pop() == {"id": 1}

class InTestCase(Kit, TestCase): pass
class InTransactionTestCase(Kit, TransactionTestCase): pass
"""
TINY_PYTEST = """
import pytest
from django.db import connection, transaction
from outbox import stage

@pytest.mark.django_db
def test_in_a_transaction(outbox_drain, outbox_staged):
    assert connection.is_in_memory_db()
    with transaction.atomic():
        stage("order.paid", {"id": 1})
    assert len(outbox_staged()) == 1
    assert outbox_drain().delivered == 1

@pytest.mark.django_db(transaction=True)
def test_in_autocommit(outbox_drain, outbox_staged):
    test_in_a_transaction(outbox_drain, outbox_staged)
"""


# The entry point of an installed distribution loads the plugin already.
PLUGIN = [] if entry_points(group="pytest11", name="outbox") else ["-p", "outbox.pytest_plugin"]


def run_in(directory, *arguments, **environment):
    paths = os.pathsep.join([str(directory), str(ROOT)])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DJANGO"))}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env={**clean, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("runner", [pytest.param("django", marks=pytest.mark.slow), "pytest"])
def test_a_small_project_tests_on_sqlite_in_memory(tmp_path, runner):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "outbox_handlers.py").write_text(TINY_HANDLERS)
    (tmp_path / "tiny_settings.py").write_text(TINY_SETTINGS)
    (tmp_path / "tests.py").write_text(TINY_TESTS)
    (tmp_path / "test_tiny.py").write_text(TINY_PYTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    commands = {
        "django": ["-m", "django", "test", "tests"],
        "pytest": ["-m", "pytest", *PLUGIN, "test_tiny.py", "tests.py"],
    }
    process = run_in(tmp_path, *commands[runner], DJANGO_SETTINGS_MODULE="tiny_settings")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.process
def test_the_plugin_leaves_a_project_without_the_app_in_peace(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_passes():\n"
        "    assert 'outbox.pytest_plugin' in sys.modules and 'outbox.models' not in sys.modules\n"
        "def test_asks_for_the_app(outbox_drain):\n"
        "    pass\n"
    )
    process = run_in(tmp_path, "-m", "pytest", "-p", "no:django", *PLUGIN)
    assert "1 passed, 1 error" in process.stdout, process.stdout + process.stderr
    assert "needs 'outbox' in INSTALLED_APPS" in process.stdout
