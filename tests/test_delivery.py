"""One lease, its handler, and what is made of the result."""

import asyncio
import contextvars
import threading
import time
from datetime import UTC, date, datetime, timedelta
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, IntegrityError, OperationalError, connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from outbox import Bury, Discard, Retry, RetryPolicy, Snooze, Unavailable, handler, signals
from outbox import calls as calls_module
from outbox.delivery import run
from outbox.leases import Settled, announce, claim, settle
from outbox.models import Message, Outcome, Reason, State
from outbox.registry import registry
from outbox.verdicts import LONGEST_WAIT, judge, release, timed_out
from tests import rows
from tests.running import outcomes, put
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)

BACKOFF = 60.0
STEADY = RetryPolicy(max_attempts=3, base=BACKOFF, factor=1, jitter=False)


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


def take(function, **options):
    """The lease of one message whose handler is this function."""
    handler("job", **({"retry": STEADY} | options))(function)
    put("job", {"n": 1}, event_key="the-job")
    return claim(using="default", worker="worker", seconds=60)[0]


def deliver(function, **options):
    """Deliver one message; returns the row and what was to be written."""
    lease = take(function, **options)
    outcome = run(lease)
    settled = outcome if isinstance(outcome, Settled) else settle("default", [outcome])[0]
    announce([settled])
    return Message.objects.get(event_key="the-job"), settled


def raising(error):
    def function(message):
        raise error

    return function


def returning(value):
    return lambda message: value


def seconds_until(instant):
    return (instant - rows.now()).total_seconds()


# --- what a handler gets ----------------------------------------------------------------------------------------------


def test_a_handler_gets_the_message_as_it_was_staged():
    got = []
    handler("order.paid", payload_versions=(3,))(got.append)
    put(
        "order.paid",
        {"items": [1, None, "ä"]},
        event_key="order:1:paid",
        payload_version=3,
        ordering_key="order:1",
        headers={"trace": "abc"},
    )
    (lease,) = claim(using="default", worker="worker", seconds=60)
    run(lease)
    (message,) = got
    assert (message.topic, message.event_key, message.ordering_key) == ("order.paid", "order:1:paid", "order:1")
    assert (message.payload, message.payload_version) == ({"items": [1, None, "ä"]}, 3)
    assert (message.headers, message.attempt, message.id) == ({"trace": "abc"}, 1, Message.objects.get().pk)
    assert abs(seconds_until(message.staged_at)) < 30
    assert not message.lease.lost
    assert message.lease.attempt == 1


@pytest.mark.parametrize("payload", [None, "", 0, False, [], {}, "text"])
def test_a_falsy_payload_arrives_as_it_is(payload):
    """Scenario 9."""
    got = []
    handler("job")(got.append)
    put("job", payload)
    run(claim(using="default", worker="worker", seconds=60)[0])
    assert got[0].payload == payload
    assert type(got[0].payload) is type(payload)


def test_an_async_handler_runs_to_its_end():
    async def function(message):
        await asyncio.sleep(0)
        await Effect.objects.acreate(key=message.event_key)

    row, _ = deliver(function)
    assert row.state == State.DELIVERED
    assert Effect.objects.get().key == "the-job"


def test_an_object_with_an_async_call_is_an_async_handler():
    class Sender:
        async def __call__(self, message):
            await Effect.objects.acreate(key="sent")

    deliver(Sender())
    assert Effect.objects.get().key == "sent"


def test_an_async_handler_cannot_be_atomic():
    async def function(message): ...

    with pytest.raises(ImproperlyConfigured, match="no async transaction"):
        handler("job", atomic=True)(function)


def test_no_language_time_zone_or_context_is_handed_on_to_the_next_message():
    variable = contextvars.ContextVar("variable", default="clean")

    def function(message):
        variable.set("dirty")
        translation.activate("de")
        timezone.activate("Asia/Kathmandu")

    before = translation.get_language(), timezone.get_current_timezone_name()
    deliver(function)
    assert (translation.get_language(), timezone.get_current_timezone_name()) == before
    assert variable.get() == "clean"


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, True, 0, "", {"sent": 1}, []])
def test_returning_is_success(result):
    row, _ = deliver(returning(result))
    assert (row.state, row.lease_token, row.due_at, row.spent) == (State.DELIVERED, None, None, 1)
    assert outcomes(row) == []  # a success at the first attempt leaves no further row


def test_false_is_a_failure():
    row, _ = deliver(returning(False))
    assert (row.state, row.spent, outcomes(row)) == (State.PENDING, 1, ["failed"])
    assert row.error_type == "outbox.exceptions.NotConfirmed"
    assert BACKOFF - 30 < seconds_until(row.due_at) <= BACKOFF


def test_an_exception_is_a_failure_with_its_traceback():
    row, _ = deliver(raising(ValueError("no such customer")))
    assert (row.state, row.error_type, row.error_text) == (State.PENDING, "ValueError", "no such customer")
    attempt = row.attempts.get()
    assert "raise error" in attempt.traceback
    assert attempt.worker == "worker"


@pytest.mark.parametrize("how", [raising, returning], ids=["raised", "returned"])
@pytest.mark.parametrize(
    ("verdict", "state", "outcome", "spent"),
    [
        (Retry("later"), State.PENDING, "failed", 1),
        (Snooze(for_=30), State.PENDING, "snoozed", 0),
        (Unavailable("down"), State.PENDING, "unavailable", 0),
        (Bury("no such card", code="E1"), State.DEAD, "buried", 1),
        (Discard("cancelled", code="C1"), State.DISCARDED, "discarded", 1),
        (ValueError("x"), State.PENDING, "failed", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_verdict_counts_whether_raised_or_returned(how, verdict, state, outcome, spent):
    row, _ = deliver(how(verdict))
    assert (row.state, row.spent, outcomes(row)) == (state, spent, [outcome])
    assert row.lease_token is None


def test_a_permanent_failure_is_dead_at_the_first_attempt_and_kept():
    """Scenario 55."""
    row, _ = deliver(raising(Bury("the card was stolen", code="41")))
    assert (row.state, row.reason, row.attempt) == (State.DEAD, Reason.BURIED, 1)
    assert (row.error_text, row.error_code, row.due_at) == ("the card was stolen", "41", None)


def test_a_discarded_message_says_why():
    row, _ = deliver(raising(Discard("the order was cancelled", code="C")))
    assert (row.state, row.reason, row.error_text, row.error_code) == (
        State.DISCARDED,
        Reason.HANDLER,
        "the order was cancelled",
        "C",
    )


@pytest.mark.parametrize(
    ("verdict", "wait"),
    [
        (Retry(after=7), 7),
        (Retry(after=timedelta(hours=2)), 7200),
        (Retry(), BACKOFF),
        (Snooze(for_=timedelta(minutes=3)), 180),
        (Unavailable(after=9), 9),
        (Unavailable("down"), BACKOFF),
        (Retry(after=1e300), LONGEST_WAIT),
        (Snooze(for_=1e300), LONGEST_WAIT),
    ],
    ids=repr,
)
def test_a_verdict_says_when(verdict, wait):
    row, _ = deliver(raising(verdict))
    assert wait - 30 < seconds_until(row.due_at) <= wait


def test_a_snooze_may_name_a_moment():
    moment = datetime(2040, 5, 17, 12, tzinfo=UTC)
    row, _ = deliver(raising(Snooze(until=moment)))
    assert row.due_at == moment


def test_a_snooze_to_the_end_of_time_is_stored():
    row, _ = deliver(raising(Snooze(until=datetime.max.replace(tzinfo=UTC))))
    assert row.due_at.year == 9999


def test_a_snooze_to_the_beginning_of_time_is_due_now():
    row, _ = deliver(raising(Snooze(until=datetime.min.replace(tzinfo=UTC))))
    assert -30 < seconds_until(row.due_at) <= 0


@pytest.mark.parametrize(
    "verdict", [Snooze(for_=0), Snooze(until=datetime(2020, 1, 1, tzinfo=UTC)), Unavailable(after=0)], ids=repr
)
def test_who_is_put_off_until_now_again_and_again_has_to_rest(verdict):
    """Else the message would keep a process busy for ever, and --drain would not end."""
    handler("job")(raising(verdict))
    row = put("job")
    for number in range(1, 13):
        Message.objects.filter(pk=row.pk).update(due_at=1)
        (lease,) = claim(using="default", worker="w", seconds=60)
        settle("default", [run(lease)])
        rests = seconds_until(Message.objects.get().due_at) > 0.3
        assert rests == (number > 10), number


def test_a_naive_moment_is_refused_where_time_zones_are_used():
    row, _ = deliver(raising(Snooze(until=datetime(2040, 5, 17))))
    assert (row.error_type, outcomes(row)) == ("ValueError", ["failed"])
    assert "has no time zone" in row.error_text


def test_a_naive_moment_is_read_in_the_time_zone_of_the_project():
    with override_settings(USE_TZ=False, TIME_ZONE="America/New_York"):
        row, _ = deliver(raising(Snooze(until=datetime(2040, 5, 17, 8))))
    assert row.due_at == datetime(2040, 5, 17, 12, tzinfo=UTC)


@pytest.mark.parametrize("until", ["2030-01-01", 5, timedelta(1), date(2030, 1, 1)], ids=repr)
def test_a_snooze_says_what_it_takes(until):
    with pytest.raises(TypeError, match=r"Snooze\(until=…\) must be a datetime, not "):
        Snooze(until=until)


@pytest.mark.parametrize("wait", ["5", True, [5]], ids=repr)
def test_a_wait_is_a_number_or_a_timedelta(wait):
    for verdict in (lambda: Retry(after=wait), lambda: Snooze(for_=wait), lambda: Unavailable(after=wait)):
        with pytest.raises(TypeError, match="must be a number of seconds or a timedelta"):
            verdict()


def spoilt(verdict, **values):
    for name, value in values.items():
        setattr(verdict, name, value)
    return verdict


class NoBase(Snooze):
    def __init__(self):
        pass


class BadPolicy(RetryPolicy):
    def delay(self, *args):
        raise RuntimeError("no plan")


@pytest.mark.parametrize(
    "verdict",
    [
        spoilt(Snooze(for_=1), until="tomorrow"),
        spoilt(Retry(), after="soon"),
        spoilt(Unavailable(), after=[]),
        NoBase(),
    ],
    ids=["until", "after", "unavailable", "without-base"],
)
def test_a_verdict_that_cannot_be_read_is_a_failure(verdict):
    row, _ = deliver(raising(verdict))
    assert (row.state, outcomes(row), row.spent) == (State.PENDING, ["failed"], 1)
    assert row.due_at > rows.now()


def test_a_retry_policy_that_raises_is_replaced():
    row, _ = deliver(raising(ValueError("x")), retry=BadPolicy())
    assert (row.state, row.error_type) == (State.PENDING, "RuntimeError")


async def coroutine(message): ...


async def stream(message):
    yield


def generator(message):
    yield


@pytest.mark.parametrize(
    "function",
    [
        partial(lambda message: coroutine(message)),
        lambda message: stream(message),
        generator,
        returning(Retry),
        returning(KeyboardInterrupt),
    ],
    ids=["coroutine", "async-generator", "generator", "verdict-class", "exception-class"],
)
def test_a_result_that_shows_that_nothing_was_done_is_a_failure(function):
    row, _ = deliver(function)
    assert (row.state, row.error_type) == (State.PENDING, "TypeError")
    assert "'job' returned" in row.error_text


def test_the_last_failure_kills():
    lease = take(raising(ValueError("x")))
    Message.objects.update(spent=3)
    lease.message.spent = 3
    settle("default", [run(lease)])
    row = Message.objects.get()
    assert (row.state, row.reason, row.due_at) == (State.DEAD, Reason.EXHAUSTED, None)


# --- hostile handlers -------------------------------------------------------------------------------------------------


def recurse(message):
    return recurse(message)


def exhaust(message):
    raise MemoryError


BASE_EXCEPTIONS = [
    SystemExit(3),
    KeyboardInterrupt("not real"),
    GeneratorExit(),
    asyncio.CancelledError("by itself"),
    ExceptionGroup("several", [ValueError("one")]),
    BaseExceptionGroup("worse", [SystemExit(1)]),
    StopIteration(1),
]


@pytest.mark.parametrize("error", BASE_EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["sync", "async", "atomic"])
def test_whatever_a_handler_raises_is_a_failed_attempt(error, kind):
    """Scenario 24."""

    async def async_handler(message):
        raise error

    if kind == "async" and isinstance(error, StopIteration):
        pytest.skip("Python itself turns StopIteration in a coroutine into a RuntimeError")
    function = async_handler if kind == "async" else raising(error)
    row, _ = deliver(function, atomic=kind == "atomic")
    assert (row.state, row.spent, outcomes(row)) == (State.PENDING, 1, ["failed"])
    assert row.error_type.split(".")[-1] == type(error).__name__


@pytest.mark.parametrize("function", [recurse, exhaust], ids=["RecursionError", "MemoryError"])
def test_an_exhausted_interpreter_is_a_failed_attempt(function):
    """Scenario 24."""
    row, _ = deliver(function)
    assert (row.state, row.error_type) == (State.PENDING, {recurse: "RecursionError", exhaust: "MemoryError"}[function])


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [ValueError("a\0b"), ValueError("\udcff"), ValueError("x" * 5_000_000), Unspeakable()],
    ids=["nul", "surrogate", "long", "str-raises"],
)
def test_an_error_that_could_not_be_recorded_is_recorded(error):
    """Scenario 25."""
    row, _ = deliver(raising(error))
    assert (row.state, outcomes(row)) == (State.PENDING, ["failed"])
    assert row.error_text
    assert len(row.error_text) <= 4000


def test_nothing_of_a_failed_message_waits_for_the_garbage_collector():
    """Scenario 63: memory is flat."""
    import gc
    import weakref

    class Big:
        pass

    held = []

    def function(message):
        big = Big()
        held.append(weakref.ref(big))
        raise ValueError("x")

    lease = take(function)
    gc.disable()
    try:
        outcome = run(lease)
        assert outcome.cause is not None
        del outcome
        assert held[0]() is None
    finally:
        gc.enable()


# --- connections ------------------------------------------------------------------------------------------------------


def swallow(message):
    with transaction.atomic():
        order = Order.objects.create(reference="x")
        try:
            Order(pk=order.pk).save(force_insert=True)
        except IntegrityError:
            pass


def refuse(message):
    with transaction.atomic():
        order = Order.objects.create(reference="x")
        Order(pk=order.pk).save(force_insert=True)


def close(message):
    connection.close()


def close_all(message):
    connections.close_all()


def close_inside(message):
    with transaction.atomic():
        Order.objects.create(reference="x")
        connection.close()


def close_beneath(message):
    Order.objects.count()
    connection.connection.close()


def leak(message):
    transaction.atomic().__enter__()
    Order.objects.create(reference="leaked")


def switch_autocommit_off(message):
    transaction.set_autocommit(False)
    Order.objects.create(reference="leaked")


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (swallow, State.DELIVERED),  # Django rolls such a block back without a word
        (refuse, State.PENDING),
        (close, State.DELIVERED),
        (close_all, State.DELIVERED),
        (close_inside, State.PENDING),
        (close_beneath, State.PENDING),  # nobody can tell whether a transaction was open
        (leak, State.PENDING),
        (switch_autocommit_off, State.PENDING),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_handler_that_breaks_its_connection_is_judged_all_the_same(function, state):
    """Scenario 26, a to d."""
    row, _ = deliver(function)
    assert (row.state, row.lease_token) == (state, None)
    assert not connection.in_atomic_block
    assert Order.objects.filter(reference="leaked").count() == 0
    Order.objects.create(reference="afterwards")


def test_a_leaked_transaction_is_named():
    row, _ = deliver(leak)
    assert row.error_type == "outbox.exceptions.LeakedTransaction"
    assert "'job' left a transaction open on default" in row.error_text


def test_a_handler_that_leaks_and_fails_keeps_its_own_error():
    def function(message):
        leak(message)
        raise ValueError("mine")

    row, _ = deliver(function)
    assert (row.error_type, row.error_text) == ("ValueError", "mine")
    assert not connection.in_atomic_block


def test_a_commit_hook_of_a_handler_that_raises_is_a_failed_attempt_and_its_work_stays():
    """Scenario 27."""

    def function(message):
        with transaction.atomic():
            Order.objects.create(reference="committed")
            transaction.on_commit(lambda: 1 / 0)

    row, _ = deliver(function)
    assert (row.state, row.error_type) == (State.PENDING, "ZeroDivisionError")
    assert Order.objects.get().reference == "committed"


def test_a_handler_may_stage():
    def function(message):
        with transaction.atomic():
            put("job", {"n": 2}, event_key="follow-up")

    deliver(function)
    assert Message.objects.get(event_key="follow-up").state == State.PENDING


# --- transactional handlers -------------------------------------------------------------------------------------------


def test_an_atomic_handler_commits_its_writes_and_the_completion_together():
    def function(message):
        assert connection.in_atomic_block
        Order.objects.create(reference=message.event_key)

    row, settled = deliver(function, atomic=True)
    assert (row.state, settled.status) == (State.DELIVERED, "settled")
    assert Order.objects.get().reference == "the-job"


def test_an_atomic_handler_costs_one_statement_beside_its_own():
    lease = take(lambda message: Order.objects.create(reference=message.event_key), atomic=True)
    with CaptureQueriesContext(connection) as queries:
        settled = run(lease)
    assert settled.status == "settled"
    verbs = [query["sql"].split()[0] for query in queries]
    assert [verb for verb in verbs if verb not in ("BEGIN", "COMMIT")] == ["INSERT", "UPDATE"]


@pytest.mark.parametrize(
    "end",
    [raising(ValueError("x")), returning(False), raising(Snooze(for_=1)), returning(Bury("no")), leak],
    ids=["raise", "false", "snooze", "bury", "leak"],
)
def test_an_atomic_handler_that_does_not_succeed_leaves_nothing(end):
    """Scenario P8."""

    def function(message):
        Order.objects.create(reference="partial")
        return end(message)

    row, _ = deliver(function, atomic=True)
    assert row.state != State.DELIVERED
    assert row.lease_token is None
    assert not Order.objects.exists()
    assert not connection.in_atomic_block


def test_an_atomic_handler_fails_three_times_and_leaves_nothing():
    """Scenario P8: seen three rows."""

    def function(message):
        Order.objects.create(reference="partial")
        raise ValueError("x")

    lease = take(function, atomic=True)
    for _ in range(3):
        settle("default", [run(lease)])
        Message.objects.update(due_at=rows.ago(1))
        lease = next(iter(claim(using="default", worker="worker", seconds=60)), None)
    assert Message.objects.get().state == State.DEAD
    assert not Order.objects.exists()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_an_atomic_handler_that_leaks_on_another_database_fails():
    def function(message):
        Order.objects.create(reference="here")
        transaction.atomic(using="other").__enter__()
        Order.objects.using("other").create(reference="leaked")

    row, _ = deliver(function, atomic=True)
    assert (row.state, row.error_type) == (State.PENDING, "outbox.exceptions.LeakedTransaction")
    assert not Order.objects.exists()
    assert not Order.objects.using("other").exists()
    assert not connections["other"].in_atomic_block


def test_an_atomic_handler_that_lost_its_lease_leaves_nothing():
    def function(message):
        Order.objects.create(reference="partial")
        Message.objects.update(lease_token=lease.token + 1)

    lease = take(function, atomic=True)
    outcome = run(lease)
    assert outcome.error.type == "outbox.exceptions.LeaseLost"
    assert not Order.objects.exists()
    assert Message.objects.get().lease_token == lease.token  # that was rolled back, too


def test_an_atomic_handler_that_took_too_long_leaves_nothing():
    def function(message):
        Order.objects.create(reference="partial")
        time.sleep(0.05)

    row, _ = deliver(function, atomic=True, timeout=0.01)
    assert (row.state, row.error_type) == (State.PENDING, "outbox.exceptions.HandlerTimeout")
    assert not Order.objects.exists()


def test_an_atomic_handler_that_is_marked_for_rollback_fails():
    def function(message):
        Order.objects.create(reference="partial")
        transaction.set_rollback(True)

    row, _ = deliver(function, atomic=True)
    assert (row.state, outcomes(row)) == (State.PENDING, ["failed"])
    assert not Order.objects.exists()


def test_an_atomic_handler_that_closes_the_connection_fails():
    def function(message):
        Order.objects.create(reference="partial")
        connection.close()

    row, _ = deliver(function, atomic=True)
    assert (row.state, outcomes(row)) == (State.PENDING, ["failed"])
    assert not Order.objects.exists()


def test_an_atomic_handler_whose_commit_hook_raises_has_committed():
    """Scenario 27."""

    def function(message):
        Order.objects.create(reference="committed")
        transaction.on_commit(lambda: 1 / 0)

    row, _ = deliver(function, atomic=True)
    assert Order.objects.get().reference == "committed"
    assert row.state == State.DELIVERED


@pytest.mark.parametrize("committed", [True, False])
def test_an_atomic_handler_whose_commit_got_no_answer_asks_what_happened(monkeypatch, committed):
    """Scenario 32, for transactional handlers."""
    lease = take(lambda message: Order.objects.create(reference="x"), atomic=True)
    inner = calls_module.short_transaction

    from contextlib import contextmanager

    @contextmanager
    def unanswered(using):
        with inner(using):
            yield
            if not committed:
                transaction.set_rollback(True, using=using)
        raise OperationalError("the server closed the connection unexpectedly")

    monkeypatch.setattr(calls_module, "short_transaction", unanswered)
    monkeypatch.setattr(calls_module, "is_loss", lambda connection, error: True)
    outcome = run(lease)
    assert isinstance(outcome, Settled) is committed
    assert Order.objects.count() == int(committed)


def test_an_atomic_handler_whose_transaction_cannot_be_opened_has_not_run_and_costs_nothing(monkeypatch):
    """An outage is not poison: the budget is for what a handler does."""
    ran = []
    lease = take(ran.append, atomic=True)
    connection.close()

    def refuse(*arguments):
        raise OperationalError("the server is not there")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "get_new_connection", refuse)
        outcome = run(lease)
    settle("default", [outcome])
    row = Message.objects.get()
    assert ran == []
    assert (row.state, row.attempt, row.spent) == (State.PENDING, 1, 0)
    assert outcomes(row) == [Outcome.RELEASED]
    assert row.due_at > rows.now()


def test_a_refusal_at_the_commit_of_an_atomic_handler_is_a_failed_attempt(monkeypatch):
    lease = take(lambda message: Order.objects.create(reference="x"), atomic=True)
    inner = calls_module.short_transaction

    from contextlib import contextmanager

    @contextmanager
    def refusing(using):
        with inner(using):
            yield
            raise DataError("a deferred constraint")

    monkeypatch.setattr(calls_module, "short_transaction", refusing)
    outcome = run(lease)
    assert (outcome.outcome, outcome.error.type) == (Outcome.FAILED, "django.db.utils.DataError")
    assert not Order.objects.exists()


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_was_lost_before_the_start_is_given_back_unstarted():
    started = []
    lease = take(started.append)
    lease.view.revoke()
    outcome = run(lease)
    assert started == []
    assert (outcome.outcome, outcome.refund) == (Outcome.RELEASED, True)


def test_a_handler_learns_from_the_clock_that_its_lease_may_be_lost():
    """Scenario 17: even when the heartbeat hangs in a statement."""
    lease = take(lambda message: message.lease.raise_if_lost())
    lease.view.safe_until = time.monotonic() - 1
    assert lease.view.lost
    lease.view.safe_until = time.monotonic() + 60
    assert not lease.view.lost
    lease.view.revoke()
    assert lease.view.lost


def test_a_release_costs_nothing_and_a_timeout_costs_an_attempt():
    lease = take(lambda message: None)
    settle("default", [release(lease)])
    assert (Message.objects.get().spent, Message.objects.get().attempt) == (0, 1)
    (lease,) = claim(using="default", worker="worker", seconds=60)
    settle("default", [timed_out(lease)])
    row = Message.objects.get()
    assert (row.spent, row.attempt, outcomes(row)) == (1, 2, ["released", "timed_out"])
    assert lease.view.lost


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def receive():
    """Connect a receiver to a signal until the end of the test."""
    connected = []

    def connect(signal, receiver):
        signal.connect(receiver, weak=False)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), GeneratorExit()], ids=repr)
def test_a_receiver_that_raises_after_a_success_changes_nothing(receive, error, caplog):
    """Scenario P8."""

    def receiver(event, **kwargs):
        raise error

    receive(signals.delivered, receiver)
    row, _ = deliver(lambda message: None)
    assert row.state == State.DELIVERED
    assert any("receiver" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda message: None, "delivered"),
        (raising(ValueError("x")), "retried"),
        (raising(Snooze(for_=1)), "snoozed"),
        (raising(Unavailable("down")), "snoozed"),
        (raising(Bury("no")), "buried"),
        (raising(Discard("no")), "discarded"),
    ],
    ids=["delivered", "retried", "snoozed", "unavailable", "buried", "discarded"],
)
def test_each_outcome_is_told_once(receive, function, name):
    told = []
    for each in ("delivered", "retried", "snoozed", "buried", "discarded", "released", "lease_lost"):
        receive(getattr(signals, each), lambda event, each=each, **kwargs: told.append((each, event)))
    deliver(function)
    ((told_by, event),) = told
    assert told_by == name
    assert event.message.event_key == "the-job"
    assert event.duration is not None
    assert (event.due_at is None) is (name in ("delivered", "buried", "discarded"))


def test_judging_names_no_thread():
    """A handler may be judged in any thread."""
    lease = take(lambda message: None)
    found = []
    thread = threading.Thread(target=lambda: found.append(judge(lease, None, 0.0).state))
    thread.start()
    thread.join()
    assert found == [State.DELIVERED]
