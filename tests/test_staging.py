"""stage() and stage_many(): what becomes of an intent in the caller's transaction, the same on every database."""

import dataclasses
import json
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import connection, connections, models, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.translation import gettext_lazy

from outbox import Intent, InvalidPayload, NotInTransaction, Topic, UnknownTopic, handler, inserting, stage, stage_many
from outbox.exceptions import InvalidIntent
from outbox.handlers import lane_of
from outbox.intents import TABLE
from outbox.models import Message
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("statement_path")]


@pytest.fixture(autouse=True)
def mail(outbox_registry):
    """The one handler of the topic "order.paid"."""

    @handler("order.paid")
    def mail(message): ...

    return outbox_registry.by_name("order.paid")


@contextmanager
def no_sql(using="default"):
    def refuse(execute, sql, params, many, context):
        pytest.fail(f"SQL was executed: {sql}")

    with connections[using].execute_wrapper(refuse):
        yield


def only_message():
    return Message.objects.get()


# --- the row ---


def test_a_staged_message_is_due_at_once_and_holds_everything_that_was_said():
    with transaction.atomic():
        staged = stage(
            "order.paid",
            {"order_id": 7, "total": Decimal("1.20")},
            event_key="order:7:paid",
            payload_version=2,
            ordering_key="order:7",
            headers={"trace": "t1"},
        )
    message = only_message()
    assert staged.ids == (message.pk,)
    assert (staged.event_key, staged.topic, staged.created) == ("order:7:paid", "order.paid", True)
    assert (message.event_key, message.position, message.topic) == ("order:7:paid", 0, "order.paid")
    assert (message.handler, message.route, message.payload_version) == ("order.paid", "order.paid@2", 2)
    assert message.payload == {"order_id": 7, "total": "1.20"}
    assert message.headers == {"trace": "t1"}
    assert (message.ordering_key, message.lane) == ("order:7", lane_of("order.paid", "=order:7"))
    assert message.due_at == message.staged_at
    assert abs(message.staged_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert (message.deliver_at, message.expires_at) == (None, None)
    assert Message.objects.due().count() == 1


def test_a_staged_message_is_like_a_new_row_of_the_model_in_all_that_staging_does_not_set():
    with transaction.atomic():
        stage("order.paid", None)
    message = only_message()
    for field in Message._meta.concrete_fields:
        if field.column not in TABLE.columns and not field.primary_key:
            assert getattr(message, field.attname) == field.get_default(), field.name


def test_every_column_that_must_not_be_null_is_filled():
    filled = {*TABLE.columns, *TABLE.constants}
    assert {
        field.column for field in Message._meta.concrete_fields if not field.null and not field.primary_key
    } <= filled


def test_a_message_without_ordering_key_belongs_to_no_lane():
    with transaction.atomic():
        stage("order.paid", None)
    assert (only_message().ordering_key, only_message().lane) == (None, None)


def test_each_handler_of_a_topic_gets_a_message_in_the_order_of_registration():
    handler("order.paid", name="zz-invoice", ordering="topic")(lambda message: None)
    handler("order.paid", name="aa-report", ordering="none")(lambda message: None)
    with transaction.atomic():
        staged = stage("order.paid", {}, event_key="k", ordering_key="o", payload_version=3)
    rows = Message.objects.order_by("position").values_list("id", "position", "handler", "route", "lane", "event_key")
    assert [row[1:] for row in rows] == [
        (0, "order.paid", "order.paid@3", lane_of("order.paid", "=o"), "k"),
        (1, "zz-invoice", "zz-invoice@3", lane_of("zz-invoice", ""), "k"),
        (2, "aa-report", "aa-report@3", None, "k"),
    ]
    assert staged.ids == tuple(row[0] for row in rows)
    assert staged.created


def test_a_declared_topic_without_handler_waits_under_its_own_name_in_the_lane_of_a_later_handler(outbox_registry):
    shipped = Topic("order.shipped")
    with transaction.atomic():
        staged = stage(shipped, {}, ordering_key="o")
    assert staged.topic == "order.shipped"
    message = only_message()
    assert (message.handler, message.route) == ("order.shipped", "order.shipped")
    assert list(Message.objects.unroutable()) == [message]
    handler(shipped)(lambda message: None)
    assert outbox_registry.by_name("order.shipped").lane("o") == message.lane
    assert not Message.objects.unroutable().exists()


def test_an_undeclared_topic_is_refused_with_the_nearest_names():
    with transaction.atomic(), no_sql(), pytest.raises(UnknownTopic, match=r"order\.payed.*Did you mean 'order\.paid'"):
        stage("order.payed", {})


@pytest.mark.parametrize("topic", [None, 7, b"order.paid", "", "order.paid ", "ORDER.PAID", "x" * 101, ["order.paid"]])
def test_what_is_no_topic_is_refused(topic):
    """Scenario 11."""
    with transaction.atomic(), no_sql(), pytest.raises(UnknownTopic):
        stage(topic, {})


def test_topic_and_key_of_the_greatest_length_are_stored_exactly():
    """Scenario 11."""
    topic = "t" * 100
    handler(topic, payload_versions=(2**31 - 1,))(lambda message: None)
    with transaction.atomic():
        stage(topic, {}, event_key="🍎" * 255, ordering_key="🍏" * 255, payload_version=2**31 - 1)
    message = only_message()
    assert (message.topic, message.event_key, message.ordering_key) == (topic, "🍎" * 255, "🍏" * 255)
    assert message.route == f"{topic}@2147483647"


def test_staging_is_one_insert_and_nothing_else_with_a_second_one_for_further_handlers():
    with transaction.atomic(), CaptureQueriesContext(connection) as one:
        stage("order.paid", {}, event_key="k", ordering_key="o", headers={"a": "b"}, deliver_at=timedelta(1))
    handler("order.paid", name="second")(lambda message: None)
    handler("order.paid", name="third")(lambda message: None)
    with transaction.atomic(), CaptureQueriesContext(connection) as two:
        stage("order.paid", {})
    assert [query["sql"].split()[0] for query in one] == ["INSERT"]
    assert [query["sql"].split()[0] for query in two] == ["INSERT", "INSERT"]


def test_the_statement_is_the_same_text_whatever_the_values():
    texts = set()

    def remember(execute, sql, params, many, context):
        texts.add(sql)
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(remember):
        stage("order.paid", {"a": 1}, event_key="k1", ordering_key="o", headers={"a": "b"})
        stage("order.paid", None)
        stage("order.paid", "100 % 'quoted' \"%s\" \\", event_key="k%s'2\"\\")
    assert len(texts) == 1
    assert Message.objects.get(event_key="k%s'2\"\\").payload == "100 % 'quoted' \"%s\" \\"


def test_a_message_may_have_an_id_beyond_32_bits(database_kind):
    """Scenario 61."""
    assert isinstance(Message._meta.pk, models.BigAutoField)
    far = 2**31 + 5
    with transaction.atomic():
        if database_kind == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT setval(pg_get_serial_sequence('outbox_message', 'id'), %s)", [far])
        else:  # an explicit id moves the counter
            Message.objects.create(pk=far, event_key="far", digest=b"", staged_at=0)
        assert stage("order.paid", {}).ids[0] > far


# --- payloads ---


@pytest.mark.parametrize(
    "value", [None, "", 0, False, [], {}, "text", {"id": 1970670598291982290, "h": 2**70}, 0.1, "ü🍎\u2028"]
)
def test_every_json_value_is_read_back_identical(value):
    """Scenarios 9 and 13."""
    with transaction.atomic():
        stage("order.paid", value)
    payload = only_message().payload
    assert payload == value
    assert type(payload) is type(value)


def test_the_stored_text_is_compact_json_with_the_keys_in_their_order():
    with transaction.atomic():
        stage("order.paid", {"b": 2**70, "a": "é"})
    with connection.cursor() as cursor:
        cursor.execute("SELECT payload FROM outbox_message")
        assert cursor.fetchone()[0] == f'{{"b":{2**70},"a":"é"}}'


def test_uuids_dates_and_decimals_are_encoded_before_the_first_statement():
    """P14."""
    key = uuid.uuid4()
    with transaction.atomic():
        stage("order.paid", [key, Decimal("0.10"), datetime(2030, 1, 1, tzinfo=UTC)])
    assert only_message().payload == [str(key), "0.10", "2030-01-01T00:00:00Z"]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), "\0", {"\0": 1}, "\ud800", b"x", {1}, object(), {1: 0, "1": 0}, 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_an_unstorable_payload_harms_nothing(value):
    """Scenario 8."""
    with transaction.atomic():
        Order.objects.create(reference="1")
        with no_sql(), pytest.raises(InvalidPayload, match=r"^payload\.items\[1\]"):
            stage("order.paid", {"items": [0, value]})
        Order.objects.create(reference="2")
    assert Order.objects.count() == 2
    assert not Message.objects.exists()


def test_a_payload_of_twenty_megabytes_harms_nothing():
    """Scenario 12."""
    with transaction.atomic():
        Order.objects.create(reference="1")
        with no_sql(), pytest.raises(InvalidPayload, match=r"20000002 bytes .*MAX_PAYLOAD_BYTES"):
            stage("order.paid", "x" * 20_000_000)
        Order.objects.create(reference="2")
    assert Order.objects.count() == 2


def test_a_payload_of_a_megabyte_is_stored_intact():
    """Scenario 12."""
    payload = {"text": '"' * (512 * 1024 - 20)}
    with transaction.atomic():
        stage("order.paid", payload)
    assert only_message().payload == payload


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2**26})
def test_a_statement_that_the_server_would_answer_by_hanging_up_is_never_sent():
    """Scenario 12: here the project has raised the limit beyond what its server takes."""
    with transaction.atomic():
        Order.objects.create(reference="1")
        limit = inserting.largest_statement("default")
        payload = "x" * ((limit or 2**24) - 100)
        if limit is None:
            stage("order.paid", payload)
        else:
            with pytest.raises(InvalidPayload, match=f"accepts {limit} in all"):
                stage("order.paid", payload)
            payload = "x" * (limit // 2)
            stage("order.paid", payload)
    assert Order.objects.count() == 1
    assert only_message().payload == payload


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"event_key": ""}, "event_key has 0 characters"),
        ({"event_key": "x" * 256}, "event_key has 256 characters"),
        ({"event_key": 7}, "event_key must be a string"),
        ({"ordering_key": ""}, "ordering_key has 0 characters"),
        ({"ordering_key": "a\0"}, "ordering_key .* control character"),
        ({"ordering_key": 7}, "ordering_key must be a string"),
        ({"payload_version": 0}, "payload_version must be"),
        ({"headers": {"a": float("nan")}}, r"headers\.a is nan"),
        ({"headers": ["a"]}, "headers must be a dict"),
        ({"deliver_at": datetime(2030, 1, 1)}, "deliver_at .* without a time zone"),
        ({"deliver_at": -timedelta(1)}, "deliver_at .* negative"),
        ({"expires_at": -timedelta(1)}, "expires_at .* negative"),
        ({"expires_at": 5}, "expires_at must be"),
        ({"deliver_now": True, "deliver_at": timedelta(1)}, "deliver_now and deliver_at"),
    ],
    ids=str,
)
@override_settings(USE_TZ=True)
def test_a_bad_argument_is_refused_by_name_and_harms_nothing(arguments, fact):
    with transaction.atomic():
        with no_sql(), pytest.raises(InvalidIntent, match=fact) as caught:
            stage("order.paid", {}, **arguments)
        assert isinstance(caught.value, ValueError)
        Order.objects.create(reference="1")
        with no_sql(), pytest.raises(InvalidIntent, match=rf"intents\[1\]\.{fact}"):
            stage_many([Intent("order.paid", {}), Intent("order.paid", {}, **arguments)])
    assert Order.objects.count() == 1
    assert not Message.objects.exists()


def test_an_async_handler_cannot_deliver_now():
    async def arrive(message): ...

    handler("order.paid", name="async")(arrive)
    with transaction.atomic(), no_sql(), pytest.raises(InvalidIntent, match="'async' is async"):
        stage("order.paid", {}, deliver_now=True)


# --- times ---


def test_relative_times_become_absolute_at_staging_by_the_servers_clock():
    """P14."""
    with transaction.atomic():
        stage("order.paid", {}, deliver_at=timedelta(minutes=5), expires_at=timedelta(hours=1))
    message = only_message()
    assert message.deliver_at == message.staged_at + timedelta(minutes=5)
    assert message.expires_at == message.staged_at + timedelta(hours=1)
    assert message.due_at == message.deliver_at
    assert Message.objects.scheduled().count() == 1


def test_absolute_times_are_kept_to_the_microsecond():
    at = datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
    with transaction.atomic():
        stage("order.paid", {}, deliver_at=at, expires_at=at + timedelta(microseconds=1))
    message = only_message()
    assert (message.deliver_at, message.due_at, message.expires_at) == (at, at, at + timedelta(microseconds=1))


@pytest.mark.parametrize("use_tz", [True, False])
def test_the_zone_of_the_project_does_not_move_any_time(use_tz):
    at = datetime(2031, 2, 3, tzinfo=UTC)
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Kolkata"), transaction.atomic():
        stage("order.paid", {}, deliver_at=at)
    message = only_message()
    assert message.due_at == at
    assert abs(message.staged_at - datetime.now(UTC)) < timedelta(minutes=5)


# --- many at once ---


def test_many_intents_are_staged_in_a_few_statements_with_results_in_their_order():
    keys = [f"k{number}" for number in range(500)]
    with transaction.atomic():
        before = stage("order.paid", {"n": "k7"}, event_key="k7")
        with CaptureQueriesContext(connection) as queries:
            results = stage_many(Intent("order.paid", {"n": key}, event_key=key) for key in keys)
    assert [staged.event_key for staged in results] == keys
    assert [staged.event_key for staged in results if not staged.created] == ["k7"]
    assert results[7].ids == before.ids
    assert len(queries) < 20
    assert {pk: payload["n"] for pk, payload in Message.objects.values_list("id", "payload")} == {
        staged.ids[0]: staged.event_key for staged in results
    }


def test_no_intents_make_no_statement():
    with transaction.atomic(), no_sql():
        assert stage_many([]) == []


def test_ids_follow_the_order_of_the_call_within_each_lane():
    handler("order.paid", name="serial", ordering="topic")(lambda message: None)
    intents = [Intent("order.paid", n, event_key=f"k{99 - n}", ordering_key=f"o{n % 3}") for n in range(60)]
    with transaction.atomic():
        stage_many(intents)
    lanes = {}
    for lane, payload in Message.objects.order_by("id").values_list("lane", "payload"):
        lanes.setdefault(lane, []).append(payload)
    assert len(lanes) == 4
    assert all(payloads == sorted(payloads) for payloads in lanes.values())


def test_rows_without_a_lane_go_in_by_key_whatever_their_order_in_the_call():
    """Scenario 5: so two calls with the same keys cannot wait for one another."""
    with transaction.atomic():
        stage_many([Intent("order.paid", {}, event_key=key) for key in "cabed"])
    assert list(Message.objects.order_by("id").values_list("event_key", flat=True)) == list("abcde")


def test_a_topic_with_several_handlers_can_be_among_many():
    handler("order.paid", name="second")(lambda message: None)
    handler("order.sent")(lambda message: None)
    with transaction.atomic():
        known = stage("order.paid", 0, event_key="k0")
        results = stage_many(
            [Intent("order.paid" if n % 2 == 0 else "order.sent", n, event_key=f"k{n}") for n in range(6)]
        )
    assert [len(staged.ids) for staged in results] == [2, 1, 2, 1, 2, 1]
    assert [staged.created for staged in results] == [False, True, True, True, True, True]
    assert results[0].ids == known.ids
    assert Message.objects.count() == 9


def test_large_rows_are_cut_into_statements_by_their_size():
    """Scenario 12: no statement comes near what a server accepts."""
    sizes = []

    def measure(execute, sql, params, many, context):
        sizes.append(sum(len(value) for value in params or () if isinstance(value, str)))
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(measure):
        results = stage_many([Intent("order.paid", "x" * 100_000, event_key=f"k{n}") for n in range(30)])
    assert len({staged.ids for staged in results}) == 30
    assert max(sizes) < 300_000


def test_more_rows_than_a_statement_has_parameters_for_are_cut():
    counts = []

    def measure(execute, sql, params, many, context):
        counts.append(len(params or ()))
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(measure):
        results = stage_many([Intent("order.paid", n) for n in range(2500)])
    assert len({staged.ids for staged in results}) == Message.objects.count() == 2500
    assert max(counts) <= (connection.features.max_query_params or 1000 * len(TABLE.columns))


def test_what_is_no_intent_is_named_by_its_place():
    with (
        transaction.atomic(),
        no_sql(),
        pytest.raises(InvalidIntent, match=r"intents\[1\] is not an Intent but a dict"),
    ):
        stage_many([Intent("order.paid", {}), {"topic": "order.paid"}])


# --- the values ---


def test_an_intent_has_the_arguments_of_stage_and_cannot_be_changed():
    intent = Intent("order.paid", {}, event_key="k")
    with pytest.raises(dataclasses.FrozenInstanceError):
        intent.event_key = "other"
    with pytest.raises(TypeError):
        Intent("order.paid", {}, "k")
    assert Intent("order.paid", {}, event_key="k") == intent


def test_the_result_cannot_be_changed():
    with transaction.atomic():
        staged = stage("order.paid", {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        staged.created = False


# --- where the row goes ---


def test_staging_is_refused_without_an_atomic_block_of_the_caller():
    """Invariant 1. The block that the test case opened does not count, or it would hide that one is missing."""
    assert connection.in_atomic_block
    with no_sql():
        with pytest.raises(NotInTransaction, match=r"needs an atomic\(\) block of yours on database 'default'"):
            stage("order.paid", {})
        with pytest.raises(NotInTransaction):
            stage_many([Intent("order.paid", {})])


@pytest.mark.django_db(databases=["default", "other"])
def test_the_message_goes_where_using_says():
    """Scenario 2."""
    with transaction.atomic(using="other"):
        staged = stage("order.paid", {}, event_key="k", using="other")
        again = stage_many([Intent("order.paid", {}, event_key="k")], using="other")
    assert not Message.objects.exists()
    assert Message.objects.using("other").get().pk == staged.ids[0]
    assert again[0].ids == staged.ids


@pytest.mark.django_db(databases=["default", "other"])
def test_staging_is_refused_when_only_another_database_has_a_transaction():
    """Scenario 2."""
    fact = "is open on 'other': say which one with using="
    with transaction.atomic(using="other"), no_sql(), no_sql("other"), pytest.raises(NotInTransaction, match=fact):
        stage("order.paid", {})


class ToOther:
    """Writes go to "other"; whoever asks where to read is at fault."""

    def db_for_write(self, model, **hints):
        return "other"

    def db_for_read(self, model, **hints):
        pytest.fail("staging read where a replica might answer")


@pytest.mark.django_db(databases=["default", "other"])
@override_settings(DATABASE_ROUTERS=[ToOther()])
def test_the_router_decides_where_to_write_and_the_duplicate_is_read_there_too():
    """Scenario 2."""
    with pytest.raises(NotInTransaction, match="'other'"), transaction.atomic(using="default"):
        stage("order.paid", {})
    with transaction.atomic(using="other"):
        first = stage("order.paid", {}, event_key="k")
        assert stage("order.paid", {}, event_key="k").ids == first.ids


def test_the_exact_digits_reach_the_database():
    """Scenario 13."""
    with transaction.atomic():
        stage("order.paid", {"id": 2**53 + 1})
    assert json.dumps(only_message().payload) == '{"id": 9007199254740993}'


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: stage_many(None), InvalidIntent, "intents must be several, in a list or the like, not a NoneType"),
        (lambda: stage("order.paid", 1, using=5), InvalidIntent, "using must be the alias of a database, not 5"),
        (
            lambda: stage(gettext_lazy("order.paid"), 1),
            UnknownTopic,
            "A topic is a string or a Topic, not 'order.paid' of",
        ),
        (lambda: stage("Order.Paid", 1), UnknownTopic, "Did you mean 'order.paid'?"),
    ],
)
def test_what_cannot_be_meant_is_told_in_our_words(call, error, text):
    with transaction.atomic(), no_sql(), pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_stage_many_is_called_by_its_own_name():
    with pytest.raises(NotInTransaction, match=r"^stage_many\(\) needs an atomic\(\) block"):
        stage_many([Intent("order.paid", 1)])
