"""One event key, one event: what staging does about a key that is there already."""

from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.test.utils import CaptureQueriesContext

from outbox import EventKeyConflict, Intent, OutboxError, handler, inserting, stage, stage_many
from outbox.intents import TABLE, draft
from outbox.models import Message, State
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("statement_path")]


@pytest.fixture(autouse=True)
def _handlers(outbox_registry):
    handler("order.paid", payload_versions=(1, 2))(lambda message: None)
    handler("order.sent")(lambda message: None)


def stage_committed(*arguments, **keywords):
    with transaction.atomic():
        return stage(*arguments, **keywords)


# --- repetition ---


def test_a_key_that_is_neither_new_nor_taken_is_an_error_and_not_believed(monkeypatch):
    """Somebody stages and deletes it in a loop, so that each look misses it."""
    monkeypatch.setattr(inserting, "insert_or_find", lambda using, table, rows: ({}, {}))
    with pytest.raises(OutboxError, match="taken whenever it was inserted and free whenever it was looked up"):
        stage_committed("order.paid", {"a": 1}, event_key="k")


def test_a_repeated_key_in_one_transaction_is_a_no_op_and_the_transaction_goes_on():
    """P7."""
    with transaction.atomic():
        first = stage("order.paid", {"a": 1}, event_key="k")
        second = stage("order.paid", {"a": 1}, event_key="k")
        Order.objects.create(reference="1")
    assert (first.created, second.created) == (True, False)
    assert first.ids == second.ids
    assert Order.objects.count() == Message.objects.count() == 1


def test_a_repeated_key_in_a_later_transaction_is_a_no_op_and_both_orders_commit():
    """Scenario 3."""
    first = stage_committed("order.paid", {"a": 1}, event_key="k")
    with transaction.atomic():
        Order.objects.create(reference="1")
        second = stage("order.paid", {"a": 1}, event_key="k")
        Order.objects.create(reference="2")
    assert not second.created
    assert second.ids == first.ids
    assert (Order.objects.count(), Message.objects.count()) == (2, 1)


def test_a_duplicate_among_many_is_reported_and_the_rest_goes_in():
    """Scenario 3."""
    stage_committed("order.paid", 1, event_key="k1")
    with transaction.atomic():
        results = stage_many([Intent("order.paid", n, event_key=f"k{n}") for n in range(4)])
        Order.objects.create(reference="1")
    assert [staged.created for staged in results] == [True, False, True, True]
    assert Message.objects.count() == 4


def test_a_repetition_within_one_call_is_reported_and_stored_once():
    with transaction.atomic():
        results = stage_many([Intent("order.paid", n // 2, event_key=f"k{n // 2}") for n in range(4)])
    assert [staged.created for staged in results] == [True, False, True, False]
    assert results[0].ids == results[1].ids
    assert Message.objects.count() == 2


def test_the_repetition_returns_the_messages_that_are_there_even_if_handlers_came_and_went(outbox_registry):
    handler("order.paid", name="second")(lambda message: None)
    first = stage_committed("order.paid", {}, event_key="k")
    handler("order.paid", name="third")(lambda message: None)
    assert stage_committed("order.paid", {}, event_key="k").ids == first.ids
    with outbox_registry.isolated():
        handler("order.paid", name="only")(lambda message: None)
        again = stage_committed("order.paid", {}, event_key="k")
    assert (again.ids, again.created) == (first.ids, False)
    assert Message.objects.count() == 2


@pytest.mark.parametrize("state", [State.DELIVERED, State.DEAD, State.DISCARDED])
def test_a_settled_message_is_not_staged_again_even_after_its_payload_was_pruned(state):
    first = stage_committed("order.paid", {"a": 1}, event_key="k")
    Message.objects.update(state=state, due_at=None, payload=None, headers=None, payload_pruned=True)
    assert stage_committed("order.paid", {"a": 1}, event_key="k").ids == first.ids
    with transaction.atomic(), pytest.raises(EventKeyConflict):
        stage("order.paid", {"a": 2}, event_key="k")


def test_a_pruned_key_is_new_again_though_a_dead_message_of_a_later_handler_remains():
    handler("order.paid", name="second")(lambda message: None)
    first = stage_committed("order.paid", {}, event_key="k")
    Message.objects.filter(position=0).delete()
    again = stage_committed("order.paid", {}, event_key="k")
    assert again.created
    assert again.ids[0] not in first.ids
    assert again.ids[1] == first.ids[1]


def test_headers_times_and_immediacy_are_no_content():
    first = stage_committed("order.paid", {}, event_key="k", headers={"a": "b"})
    again = stage_committed(
        "order.paid", {}, event_key="k", deliver_at=timedelta(1), expires_at=datetime(2040, 1, 1, tzinfo=UTC)
    )
    assert again.ids == first.ids
    assert not stage_committed("order.paid", {}, event_key="k", deliver_now=True).created


def test_the_order_of_keys_in_the_payload_is_no_content():
    stage_committed("order.paid", {"a": 1, "b": (1, 2)}, event_key="k")
    assert not stage_committed("order.paid", {"b": [1, 2], "a": 1}, event_key="k").created


def test_without_a_key_nothing_is_ever_a_duplicate():
    with transaction.atomic():
        results = [stage("order.paid", {}), stage("order.paid", {}), *stage_many([Intent("order.paid", {})] * 2)]
    assert len({staged.event_key for staged in results}) == 4
    assert all(staged.created for staged in results)


# --- conflict ---


@pytest.mark.parametrize(
    ("topic", "arguments", "difference"),
    [
        ("order.sent", {}, r"another topic \('order\.paid', here 'order\.sent'\)\."),
        ("order.paid", {"payload_version": 2}, r"another payload version \(1, here 2\)\."),
        ("order.paid", {"ordering_key": "p"}, r"another ordering key \('o', here 'p'\)\."),
        ("order.paid", {"ordering_key": None}, r"another ordering key \('o', here None\)\."),
        ("order.paid", {"payload": {"a": 2}}, r"another payload\."),
        ("order.sent", {"payload": 1}, r"another topic \(.*\), payload\."),
    ],
)
def test_other_content_under_the_same_key_is_a_conflict_that_says_what_differs(topic, arguments, difference):
    given = {"payload": {"a": 1}, "ordering_key": "o", "event_key": "k"}
    with transaction.atomic():
        [pk] = stage("order.paid", **given).ids
    since = f"{Message.objects.get().staged_at:%Y-%m-%d %H:%M:%S} UTC"
    with transaction.atomic():
        Order.objects.create(reference="1")
        with pytest.raises(EventKeyConflict, match=difference) as caught:
            stage(topic, **(given | arguments))
        Order.objects.create(reference="2")
    assert f"'k' is taken since {since} by message {pk}" in str(caught.value)
    assert (Order.objects.count(), Message.objects.count()) == (2, 1)


def test_a_conflict_among_many_leaves_none_of_them_and_the_transaction_goes_on():
    stage_committed("order.paid", "old", event_key="z")
    with transaction.atomic():
        kept = stage("order.paid", 0, event_key="kept")
        intents = [Intent("order.paid", n, event_key=f"k{n:03}") for n in range(200)]
        with pytest.raises(EventKeyConflict, match="'z'"):
            stage_many([*intents, Intent("order.paid", "new", event_key="z")])
        Order.objects.create(reference="1")
    assert set(Message.objects.values_list("event_key", flat=True)) == {"z", "kept"}
    assert kept.created
    assert Order.objects.count() == 1


def test_two_contents_under_one_key_in_one_call_are_a_conflict_before_any_statement():
    twice = [Intent("order.paid", 1, event_key="k"), Intent("order.paid", 2, event_key="k")]
    fact = "'k' stands twice in this call, with another payload"
    with (
        transaction.atomic(),
        CaptureQueriesContext(connection) as queries,
        pytest.raises(EventKeyConflict, match=fact),
    ):
        stage_many(twice)
    assert not [query for query in queries if "INSERT" in query["sql"]]
    assert not Message.objects.exists()


def test_a_key_is_unique_across_topics():
    stage_committed("order.paid", {}, event_key="k")
    with transaction.atomic(), pytest.raises(EventKeyConflict, match="topic"):
        stage("order.sent", {}, event_key="k")


# --- exactness ---


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order-A", "order-a"),
        ("t1", "t1\u200b"),
        ("resume", "résumé"),
        ("🍎", "🍏"),
        ("ß", "ss"),
        ("e\u0301", "é"),
        ("a b", "a  b"),
    ],
)
def test_keys_that_only_look_alike_are_two_events(one, other):
    """Scenario 10."""
    assert stage_committed("order.paid", {}, event_key=one).created
    assert stage_committed("order.paid", {}, event_key=other).created
    assert set(Message.objects.values_list("event_key", flat=True)) == {one, other}
    assert Message.objects.get(event_key=other).ordering_key is None


def test_ordering_keys_and_topics_that_only_look_alike_are_told_apart():
    """Scenario 10."""
    handler("Order.Paid")(lambda message: None)
    stage_committed("order.paid", {}, ordering_key="Kunde")
    stage_committed("Order.Paid", {}, ordering_key="kunde")
    assert Message.objects.filter(topic="order.paid").count() == 1
    assert Message.objects.filter(ordering_key="kunde").count() == 1
    assert len(set(Message.objects.values_list("lane", flat=True))) == 2


# --- what it takes ---


def test_duplicate_detection_reads_and_inserts_and_does_nothing_else():
    with transaction.atomic():
        stage("order.paid", {}, event_key="k1")
        statements = []

        def remember(execute, sql, params, many, context):
            statements.append(sql)
            return execute(sql, params, many, context)

        with connection.execute_wrapper(remember):
            stage("order.paid", {}, event_key="k1")
    assert {sql.split()[0] for sql in statements} == {"INSERT", "SELECT"}
    assert not [sql for sql in statements if "UPDATE" in sql or "IGNORE" in sql]


def test_the_rights_to_insert_and_select_suffice(database_kind):
    if database_kind != "postgresql":
        pytest.skip("roles can be taken on inside a transaction only on PostgreSQL")
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("CREATE ROLE outbox_test_stager")
            cursor.execute("GRANT SELECT, INSERT ON outbox_message TO outbox_test_stager")
            cursor.execute("GRANT USAGE ON SEQUENCE outbox_message_id_seq TO outbox_test_stager")
            cursor.execute("SET LOCAL ROLE outbox_test_stager")
        handler("order.paid", name="second")(lambda message: None)
        first = stage("order.paid", {}, event_key="k")
        assert stage("order.paid", {}, event_key="k").ids == first.ids
        assert [staged.created for staged in stage_many([Intent("order.paid", {}, event_key=k) for k in "kl"])] == [
            False,
            True,
        ]
        transaction.set_rollback(True)


def test_rows_can_be_found_where_an_insert_does_not_return_them(database_kind, monkeypatch):
    """As on MySQL."""
    if database_kind != "mysql":
        pytest.skip("only MySQL lacks INSERT … RETURNING, and MariaDB stands in for it")
    monkeypatch.setattr(type(connection.features), "can_return_rows_from_bulk_insert", False)
    handler("order.paid", name="second")(lambda message: None)
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        first = stage("order.paid", {}, event_key="k2")
        results = stage_many([Intent("order.paid", {}, event_key=f"k{n}") for n in range(5)])
    assert "RETURNING" not in str(queries.captured_queries)
    assert [staged.created for staged in results] == [True, True, False, True, True]
    assert results[2].ids == first.ids
    assert {staged.ids for staged in results} == {
        tuple(Message.objects.filter(event_key=f"k{n}").order_by("position").values_list("id", flat=True))
        for n in range(5)
    }


@contextmanager
def unique_topics():
    """A second unique index, which a duplicate key has nothing to do with."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE UNIQUE INDEX outbox_test_topic ON outbox_message (topic)")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            on_table = " ON outbox_message" if connection.vendor == "mysql" else ""
            cursor.execute(f"DROP INDEX outbox_test_topic{on_table}")


@pytest.mark.django_db(transaction=True)
def test_a_refusal_for_another_reason_is_never_taken_for_a_duplicate():
    """Invariant 2."""
    with unique_topics():
        stage_committed("order.paid", {}, event_key="k1")
        with pytest.raises(IntegrityError, match="topic") as caught, transaction.atomic():
            stage("order.paid", {}, event_key="k2")
        assert isinstance(caught.value.__cause__, connection.Database.IntegrityError)
        assert Message.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_after_an_error_of_the_database_django_insists_on_the_rollback():
    """A deadlock has undone the business rows on some servers: to commit the rest would be worse than to fail."""

    def swallow_the_error():
        with transaction.atomic():
            Order.objects.create(reference="1")
            with pytest.raises(IntegrityError):
                stage("order.paid", {}, event_key="k2")
            Order.objects.create(reference="2")

    with unique_topics():
        stage_committed("order.paid", {}, event_key="k1")
        with pytest.raises(transaction.TransactionManagementError):
            swallow_the_error()
        with transaction.atomic():
            Order.objects.create(reference="3")
            with pytest.raises(IntegrityError), transaction.atomic():
                stage("order.paid", {}, event_key="k2")
            Order.objects.create(reference="4")
    assert set(Order.objects.values_list("reference", flat=True)) == {"3", "4"}


def test_only_the_rows_of_the_repeated_keys_are_read():
    for key in "abc":
        stage_committed("order.paid", {}, event_key=key)
    row = draft(Intent("order.paid", {}, event_key="b")).row(0)
    with transaction.atomic():
        new, taken = inserting.insert_or_find("default", TABLE, [row])
    assert (set(new), set(taken)) == (set(), {("b", 0)})


def test_a_row_that_is_there_when_inserted_and_gone_when_read_is_inserted_again(monkeypatch):
    """It was pruned between the two statements."""
    stage_committed("order.paid", {}, event_key="k")
    real = inserting._find
    looks = []

    def find_after_a_prune(connection, table, keys, **options):
        looks.append(keys)
        if len(looks) == 1 and connection.features.supports_update_conflicts_with_target:
            Message.objects.all().delete()
        return real(connection, table, keys, **options)

    monkeypatch.setattr(inserting, "_find", find_after_a_prune)
    with transaction.atomic():
        staged = stage("order.paid", {}, event_key="k")
    # InnoDB locks what refused the INSERT until the transaction ends, so there nothing can be pruned in between.
    assert staged.created == connection.features.supports_update_conflicts_with_target
    assert Message.objects.count() == 1


@pytest.fixture
def latin1(database_kind, transactional_db):
    """The alias of a database whose default character set knows no emoji, with the outbox's tables."""
    if database_kind != "mysql":
        pytest.skip("only MySQL and MariaDB have a character set per database that is not Unicode")
    other = connections["other"]
    usual = other.settings_dict["NAME"]
    name = f"{usual}_latin1"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE OR REPLACE DATABASE `{name}` CHARACTER SET latin1")
    other.close()
    other.settings_dict["NAME"] = name
    executor = MigrationExecutor(other)
    executor.migrate([node for node in executor.loader.graph.leaf_nodes() if node[0] == "outbox"])
    yield "other"
    other.close()
    other.settings_dict["NAME"] = usual
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE `{name}`")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_any_text_can_be_staged_in_a_latin1_database(latin1):
    """Scenario 10."""
    with transaction.atomic(using=latin1):
        for key in ("🍎", "🍏", "a", "A"):
            staged = stage("order.paid", {key: "🍎"}, event_key=key, headers={"n": "🍎"}, using=latin1)
            assert staged.created
            assert not stage("order.paid", {key: "🍎"}, event_key=key, using=latin1).created
    rows = Message.objects.using(latin1).order_by("id")
    assert [(row.event_key, row.payload, row.headers) for row in rows] == [
        (key, {key: "🍎"}, {"n": "🍎"}) for key in ("🍎", "🍏", "a", "A")
    ]
