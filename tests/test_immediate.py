"""Delivery right after the commit: one attempt by the same claim, at no cost, and nothing of it reaches the caller."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.test import TestCase

from outbox import Bury, Discard, Retry, Snooze, Unavailable, delivery, handler, stage
from outbox.delivery import deliver_now
from outbox.leases import claim
from outbox.models import Message, State
from outbox.registry import registry
from outbox.testing import drain as drain_here
from tests import rows
from tests.running import cut_sessions, dispatching, drain, fresh, outcomes, put, settled, state
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

transactional = pytest.mark.django_db(transaction=True)
servers_only = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has neither sessions nor row locks")


@pytest.fixture
def log():
    """An empty registry, and what handlers did."""
    with registry.isolated():
        yield []


def raising(error):
    def function(message):
        raise error

    return function


# --- what is delivered ------------------------------------------------------------------------------------------------


@transactional
def test_a_message_is_delivered_before_the_caller_goes_on(log):
    handler("job")(lambda message: log.append((message.payload, threading.current_thread())))
    row = put("job", 1, deliver_now=True)
    assert log == [(1, threading.current_thread())]
    assert (state(row), row.attempt) == (State.DELIVERED, 1)


@transactional
def test_a_rollback_delivers_nothing(log):
    """Invariant 3."""
    handler("job")(log.append)

    def business():
        with transaction.atomic():
            stage("job", 1, deliver_now=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        business()
    assert log == []


@transactional
def test_each_handler_of_the_topic_gets_one_attempt(log):
    handler("job", name="one")(lambda message: log.append("one"))
    handler("job", name="two")(raising(ValueError("x")))
    one, two = put("job", deliver_now=True)
    assert (log, state(one), state(two)) == (["one"], State.DELIVERED, State.PENDING)


@transactional
def test_an_atomic_handler_commits_with_its_completion(log):
    handler("job", atomic=True)(lambda message: Order.objects.create(reference="x"))
    row = put("job", deliver_now=True)
    assert (state(row), Order.objects.count()) == (State.DELIVERED, 1)


@transactional
def test_only_the_head_of_a_lane_is_delivered(log):
    """Scenario 53: no overtaking of the earlier message."""
    handler("job")(lambda message: log.append(message.payload))
    put("job", "first", ordering_key="k")
    second = put("job", "second", ordering_key="k", deliver_now=True)
    assert (log, state(second)) == ([], State.PENDING)
    drain()
    assert log == ["first", "second"]


@transactional
def test_what_somebody_holds_is_skipped(log):
    handler("job")(lambda message: log.append(1))
    row = put("job")
    claim(using="default", worker="somebody", seconds=60)
    (immediate,) = deliver_now("default", [row.pk])
    assert (immediate.status, immediate.error, log) == ("skipped", None, [])


@transactional
@pytest.mark.parametrize("missing", ["row", "handler", "due"])
def test_what_cannot_be_claimed_is_skipped(log, missing):
    handler("job")(lambda message: log.append(1))
    row = put("job", deliver_at=timedelta(hours=1) if missing == "due" else None)
    if missing == "row":
        Message.objects.all().delete()
    if missing == "handler":
        registry.__init__()
    (immediate,) = deliver_now("default", [row.pk])
    assert (immediate.status, log) == ("skipped", [])


# --- failures ---------------------------------------------------------------------------------------------------------


@transactional
@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), Retry("later"), GeneratorExit()], ids=lambda error: type(error).__name__
)
def test_a_failure_costs_nothing_and_the_caller_sees_nothing(log, error, caplog):
    """Scenarios 6 c and 53: the raise is recorded, not shown."""
    handler("job", max_attempts=1)(raising(error))
    row = put("job", deliver_now=True)
    row = fresh(row)
    assert (row.state, row.spent, row.lease_token, row.error_type.split(".")[-1]) == (
        State.PENDING,
        0,
        None,
        type(error).__name__,
    )
    assert row.due_at <= rows.now()
    assert outcomes(row) == ["released"]
    assert "failed in its immediate delivery" in caplog.text


@transactional
def test_false_is_a_failure(log):
    handler("job")(lambda message: False)
    row = put("job", deliver_now=True)
    assert (state(row), fresh(row).spent) == (State.PENDING, 0)


@transactional
def test_a_retry_that_says_when_is_heeded(log):
    handler("job")(raising(Retry(after=600)))
    row = put("job", deliver_now=True)
    assert timedelta(minutes=9) < fresh(row).due_at - rows.now()
    assert fresh(row).spent == 0


@transactional
@pytest.mark.parametrize(
    ("verdict", "expected", "status"),
    [
        (Bury("no"), State.DEAD, "failed"),
        (Discard("no"), State.DISCARDED, "delivered"),
        (Snooze(for_=60), State.PENDING, "skipped"),
        (Unavailable("down"), State.PENDING, "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_verdicts_count_here_too(log, verdict, expected, status):
    handler("job")(raising(verdict))
    row = put("job")
    (immediate,) = deliver_now("default", [row.pk])
    assert (state(row), immediate.status) == (expected, status)


@transactional
def test_a_real_interrupt_at_the_terminal_goes_through_once_it_is_recorded(log):
    handler("job")(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        put("job", deliver_now=True)
    row = Message.objects.get()
    assert (row.state, row.spent, row.lease_token) == (State.PENDING, 0, None)


@transactional
def test_a_handler_that_leaks_a_transaction_leaves_the_callers_connection_usable(log):
    handler("job")(lambda message: transaction.atomic().__enter__())
    put("job", deliver_now=True)
    assert not connection.in_atomic_block
    Order.objects.create(reference="afterwards")


@transactional
@pytest.mark.parametrize("where", ["claim", "hint"])
def test_a_broken_wake_up_or_claim_reaches_nobody(log, monkeypatch, where):
    """Scenario 6 b."""

    def broken(*args, **kwargs):
        raise OperationalError("no")

    handler("job")(lambda message: None)
    if where == "claim":
        monkeypatch.setattr(delivery, "claim", broken)
    else:
        monkeypatch.setattr("outbox.wakeup.may_notify", broken)
    row = put("job", deliver_now=where == "claim")
    assert state(row) == State.PENDING
    monkeypatch.undo()
    drain()
    assert state(row) == State.DELIVERED


@transactional
def test_a_hook_of_somebody_else_that_fails_leaves_the_message_to_the_dispatcher(log):
    """Scenario 6 a."""
    handler("job")(lambda message: log.append(1))

    def business():
        with transaction.atomic():
            transaction.on_commit(lambda: 1 / 0)
            stage("job", 1)

    with dispatching():
        with pytest.raises(ZeroDivisionError):
            business()
        wait_until(lambda: log == [1])


@servers_only
@transactional
def test_the_effect_comes_once_although_the_connection_is_lost_meanwhile(log):
    """Scenario 32."""

    def handle(message):
        log.append(1)
        connections.close_all()
        cut_sessions()

    handler("job")(handle)
    row = put("job")
    (immediate,) = deliver_now("default", [row.pk])
    assert (immediate.status, state(row), log) == ("delivered", State.DELIVERED, [1])


@transactional
def test_a_settlement_that_fails_for_a_moment_is_done_again(log, monkeypatch):
    """Scenario 32."""
    failures = [OperationalError("server closed the connection unexpectedly"), OperationalError("still away")]
    real = delivery.settle

    def away(*args, **options):
        found = real(*args, **options)
        if failures:
            raise failures.pop()
        return found

    monkeypatch.setattr(delivery, "settle", away)
    handler("job")(lambda message: log.append(1))
    row = put("job")
    (immediate,) = deliver_now("default", [row.pk])
    assert (immediate.status, state(row), log, failures) == ("delivered", State.DELIVERED, [1], [])


@servers_only
@transactional
def test_a_row_that_somebody_has_locked_for_a_moment_is_settled_all_the_same(log, second_connection):
    other = second_connection()

    def handle(message):
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {Message._meta.db_table} WHERE id = %s FOR UPDATE", [message.id])
        threading.Timer(0.3, other.rollback).start()

    handler("job")(handle)
    row = put("job")
    (immediate,) = deliver_now("default", [row.pk])
    assert (immediate.status, state(row)) == ("delivered", State.DELIVERED)


@transactional
def test_a_lease_lost_meanwhile_is_a_failure_that_is_named(log):
    handler("job")(lambda message: Message.objects.update(lease_token=5))
    row = put("job")
    (immediate,) = deliver_now("default", [row.pk])
    assert immediate.status == "failed"
    assert "somebody else has it now" in str(immediate.error)


# --- beside dispatchers -----------------------------------------------------------------------------------------------


@transactional
def test_beside_polling_dispatchers_each_message_is_executed_once(log):
    """Scenario 52."""

    def handle(message):
        time.sleep(0.01)
        log.append(message.payload)

    handler("job", ordering="none")(handle)

    def request(n):
        try:
            return put("job", n, deliver_now=True)
        finally:
            connections.close_all()

    with dispatching(poll=0.05), dispatching(poll=0.05), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(request, range(60)))
        wait_until(lambda: settled(*found))
    assert sorted(log) == list(range(60))
    assert {fresh(each).spent for each in found} == {1}  # a claim that found its row locked was given back


@transactional
def test_dispatchers_wait_for_a_lease_without_heartbeat(log):
    """Its lease is the handler's timeout and a margin."""
    handler("job", timeout=30)(lambda message: log.append(Message.objects.get().due_at))
    put("job", deliver_now=True)
    assert timedelta(seconds=30) < log[0] - rows.now() < timedelta(seconds=41)


# --- in test cases ----------------------------------------------------------------------------------------------------


class InATestCase(TestCase):
    """Scenario 54."""

    def setUp(self):
        isolation = registry.isolated()
        isolation.__enter__()
        self.addCleanup(isolation.__exit__, None, None, None)
        self.runs = []
        handler("job")(self.handle)
        handler("follow-up")(lambda message: self.runs.append("follow-up"))

    def handle(self, message):
        self.runs.append(message.attempt)
        with transaction.atomic(durable=True):
            Effect.objects.create(key="durable")
        if message.attempt == 1:
            order = Order.objects.create(reference="x")
            Order(pk=order.pk).save(force_insert=True)
        with transaction.atomic():
            stage("follow-up", 1, deliver_now=True)

    def test_captured_callbacks_deliver_and_the_transaction_stays_usable(self):
        with self.captureOnCommitCallbacks(execute=True) as callbacks, transaction.atomic():
            (pk,) = stage("job", 1, deliver_now=True).ids
        assert callbacks
        row = Message.objects.get(pk=pk)
        assert (row.state, row.error_type, row.spent) == (State.PENDING, "django.db.utils.IntegrityError", 0)
        Order.objects.create(reference="afterwards")
        with self.captureOnCommitCallbacks(execute=True):
            report = drain_here(limit=1)
        assert report.delivered == 1
        assert self.runs == [1, 2, "follow-up"]
        assert set(Message.objects.values_list("state", flat=True)) == {State.DELIVERED}

    def test_an_integrity_error_of_a_handler_leaves_nothing_open(self):
        depth = len(connection.savepoint_ids)
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            stage("job", 1, deliver_now=True)
        assert len(connection.savepoint_ids) == depth
        order = Order.objects.create(reference="x")
        with pytest.raises(IntegrityError), transaction.atomic():
            Order(pk=order.pk).save(force_insert=True)
        assert Message.objects.count() == 1
