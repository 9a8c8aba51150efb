"""The dispatcher as a whole, in this process: what starts when, what ends how, and what no fault may stop."""

import gc
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.test import override_settings

from outbox import Bury, Retry, RetryPolicy, Snooze, handler, outages, signals, solitude, stage
from outbox import dispatcher as dispatcher_module
from outbox import heartbeat as heartbeat_module
from outbox.heartbeat import Heartbeat
from outbox.leases import claim
from outbox.models import Dispatcher as Registered
from outbox.models import Message, State
from outbox.operations import requeue
from outbox.registration import LOST_AFTER
from outbox.registry import registry
from outbox.retention import prune
from tests import rows
from tests.running import (
    DEADLINE,
    Gate,
    cut_sessions,
    dispatching,
    drain,
    fresh,
    outcomes,
    put,
    sessions,
    settled,
    state,
)
from tests.specimens import locked_elsewhere, rows_can_be_locked
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NOW = RetryPolicy(max_attempts=3, base=0, jitter=False)  # a failed message is due again at once
both_databases = pytest.mark.django_db(transaction=True, databases=["default", "other"])
servers_only = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no sessions to cut")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    monkeypatch.setattr(outages, "_told_at", {})
    with registry.isolated():
        yield


@pytest.fixture
def log():
    """What handlers did, in order; appended to from any thread."""
    return []


def noting(log, topic="job", **options):
    """Register a handler that notes each payload."""
    handler(topic, **options)(lambda message: log.append(message.payload))


# --- the ways to run --------------------------------------------------------------------------------------------------


def test_a_drain_delivers_all_that_is_due_and_ends(log):
    noting(log, ordering="none")
    found = [put("job", n) for n in range(50)]
    dispatcher = drain()
    assert sorted(log) == list(range(50))
    assert settled(*found)
    assert dispatcher.counts == {
        "processed": 50,
        "delivered": 50,
        "retried": 0,
        "dead": 0,
        "discarded": 0,
        "skipped": 0,
    }


def test_a_drain_waits_for_no_backoff_no_schedule_and_no_foreign_lease(log):
    handler("failing", retry=RetryPolicy(base=600, jitter=False))(lambda message: 1 / 0)
    noting(log)
    failing = put("failing")
    put("job", "tomorrow", deliver_at=timedelta(days=1))
    put("job", "theirs")
    (theirs,) = claim(using="default", worker="somebody", seconds=600, handlers=[registry.by_name("job")])
    dispatcher = drain()
    assert log == []
    assert dispatcher.counts["retried"] == 1
    assert (state(failing), fresh(theirs.message).lease_token) == (State.PENDING, theirs.token)


@rows_can_be_locked
def test_a_drain_waits_for_a_lane_that_was_put_off_since_somebody_had_locked_it(log, second_connection):
    noting(log)
    found = [put("job", n, ordering_key="a") for n in range(3)]
    unlock = threading.Event()

    def hold():
        with locked_elsewhere(second_connection, found[0]):
            locked.set()
            unlock.wait(DEADLINE)

    locked = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(DEADLINE)
    threading.Timer(0.8, unlock.set).start()
    drain()
    holder.join()
    assert log == [0, 1, 2]


def test_a_drain_delivers_what_becomes_due_meanwhile(log):
    def first(message):
        log.append("first")
        put("second")

    handler("first")(first)
    handler("second", retry=NOW)(lambda message: log.append("second") if message.attempt > 1 else 1 / 0)
    put("first")
    drain()
    assert log == ["first", "second"]


def test_once_makes_one_claim(log):
    noting(log, ordering="none")
    put("job", count=30)
    dispatcher = drain(mode="once", batch=20)
    assert (len(log), dispatcher.counts["delivered"]) == (20, 20)


def test_once_hands_nothing_over(log):
    noting(log)
    for n in range(5):
        put("job", n, ordering_key="k")
    drain(mode="once")
    assert log == [0]


@pytest.mark.parametrize("ordering_key", [None, "k"])
def test_a_limit_starts_no_more_than_that(log, ordering_key):
    noting(log)
    for n in range(10):
        put("job", n, ordering_key=ordering_key)
    drain(mode="run", limit=3)
    assert log == [0, 1, 2] if ordering_key else len(log) == 3
    assert Message.objects.pending().count() == 7
    drain(mode="drain", limit=100)
    assert sorted(log) == list(range(10))


def test_expired_messages_are_counted_as_discarded(log):
    noting(log)
    put("job", expires_at=timedelta(0))
    dispatcher = drain()
    assert log == []
    assert (dispatcher.counts["discarded"], dispatcher.counts["processed"]) == (1, 1)


@both_databases
def test_each_database_has_its_own_dispatcher(log):
    noting(log)
    put("job", "here")
    put("job", "there", using="other")
    drain(using="other")
    assert log == ["there"]
    drain()
    assert log == ["there", "here"]


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_version_or_topic_that_this_process_does_not_know_is_left_alone(log):
    """Scenarios 51 and P6."""
    with registry.isolated():
        handler("job", payload_versions=(1, 2))(lambda message: None)
        handler("new.topic")(lambda message: None)
        foreign = [put("new.topic", n) for n in range(3)] + [put("job", "v2", payload_version=2)]
    noting(log)
    known = put("job", "v1")
    drain()
    assert log == ["v1"]
    assert settled(known)
    assert {(each.attempt, each.spent, each.state) for each in map(fresh, foreign)} == {(0, 0, State.PENDING)}
    assert Message.objects.unroutable().count() == 4
    handler("new.topic")(lambda message: log.append("new"))
    with registry.isolated():
        noting(log, payload_versions=(1, 2))
        noting(log, "new.topic")
        drain()
    assert settled(*foreign)


def test_a_handler_takes_over_the_messages_of_its_former_name(log):
    with registry.isolated():
        handler("receipt")(lambda message: None)
        old = put("receipt", "old")
    noting(log, "receipt.send", aliases=["receipt"])
    new = put("receipt.send", "new")
    drain()
    assert sorted(log) == ["new", "old"]
    assert settled(old, new)


def test_several_handlers_of_a_topic_each_get_their_own_message(log):
    handler("paid", name="mail")(lambda message: log.append("mail"))
    handler("paid", name="stock", max_attempts=1)(lambda message: 1 / 0)
    mail, stock = put("paid")
    drain()
    assert (log, state(mail), state(stock)) == (["mail"], State.DELIVERED, State.DEAD)


def test_async_and_atomic_handlers_work_beside_plain_ones(log):
    async def asynchronous(message):
        await Effect.objects.acreate(key="async")

    handler("async", ordering="none")(asynchronous)
    handler("atomic", ordering="none", atomic=True)(lambda message: Effect.objects.create(key="atomic"))
    noting(log, ordering="none")
    for topic in ("async", "atomic", "job"):
        put(topic, count=5)
    drain()
    assert Message.objects.delivered().count() == 15
    assert Effect.objects.filter(key="async").count() == Effect.objects.filter(key="atomic").count() == len(log) == 5


def test_a_message_is_retried_until_its_budget_is_spent_and_then_dead(log):
    def failing(message):
        log.append(message.attempt)
        raise ValueError(message.attempt)

    handler("job", retry=NOW)(failing)
    row = put("job")
    dispatcher = drain()
    row = fresh(row)
    assert log == [1, 2, 3]
    assert (row.state, row.reason, row.spent, row.error_text) == (State.DEAD, "exhausted", 3, "3")
    assert outcomes(row) == ["failed", "failed", "failed"]
    assert (dispatcher.counts["retried"], dispatcher.counts["dead"]) == (2, 1)


def test_a_requeued_message_starts_with_a_fresh_budget_and_higher_attempts(log):
    handler("job", retry=NOW)(lambda message: log.append(message.attempt) or 1 / 0)
    row = put("job")
    drain()
    requeue("default", [row.pk])
    drain()
    assert log == [1, 2, 3, 4, 5, 6]
    assert (state(row), fresh(row).spent) == (State.DEAD, 3)


def test_a_snooze_costs_nothing(log):
    handler("job", max_attempts=1)(lambda message: log.append(1) or (Snooze(for_=0) if len(log) < 5 else None))
    row = put("job")
    drain()
    assert (len(log), state(row), fresh(row).spent, fresh(row).attempt) == (5, State.DELIVERED, 1, 5)


def test_one_poison_message_in_a_batch_spoils_no_other(log):
    """Scenario P10."""
    handler("job", ordering="none", retry=NOW)(lambda message: log.append(message.payload) or message.payload != 3)
    found = [put("job", n) for n in range(6)]
    drain()
    assert sorted(log) == [0, 1, 2, 3, 3, 3, 4, 5]
    assert [state(each) for each in found].count(State.DEAD) == 1


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_exception_of_a_handler_stops_the_dispatcher(log, concurrency):
    """Scenario 24; P12: live threads."""
    errors = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError(), RecursionError(), BaseException("x")]

    def hostile(message):
        raise errors[message.payload % len(errors)]

    async def hostile_too(message):
        raise errors[message.payload % len(errors)]

    handler("sync", ordering="none", max_attempts=1)(hostile)
    handler("async", ordering="none", max_attempts=1)(hostile_too)
    found = [put(topic, n) for n in range(12) for topic in ("sync", "async")]
    noting(log, ordering="none")
    with dispatching(concurrency=concurrency) as dispatcher:
        wait_until(lambda: settled(*found))
        last = put("job", "still here")
        wait_until(lambda: settled(last))
    assert log == ["still here"]
    assert dispatcher.counts["dead"] == 24
    assert {state(each) for each in found} == {State.DEAD}


# --- slots and fairness -----------------------------------------------------------------------------------------------


def test_no_more_handlers_run_at_once_than_there_are_slots():
    gate = Gate()
    handler("job", ordering="none")(gate)
    put("job", count=12)
    with dispatching(concurrency=3) as dispatcher:
        gate.wait(3)
        gate.open.set()
        wait_until(lambda: dispatcher.counts["delivered"] == 12)
    assert gate.most == 3


def test_a_slow_topic_does_not_delay_the_others(log):
    """A handler fills its share of the slots and no more, even when the rest is idle."""
    slow = Gate()
    handler("slow", ordering="none")(slow)
    noting(log, "quick", ordering="none")
    put("slow", count=10)
    with dispatching(concurrency=4):
        slow.wait(2)
        quick = put("quick", "now", count=20)
        wait_until(lambda: settled(*quick))
        assert len(slow.runs) == 2
        slow.open.set()
        wait_until(lambda: not Message.objects.pending().exists())
    assert slow.most == 2


def test_two_busy_topics_do_not_starve_a_third(log):
    """One fills its slot for long, the other has a backlog and a stock: the third has its turn all the same."""
    slow = Gate()
    handler("quick", ordering="none")(lambda message: time.sleep(0.002) or log.append("quick"))
    handler("slow", ordering="none")(slow)
    noting(log, "third", ordering="none")
    put("slow", count=3)
    put("quick", count=500)
    with dispatching(concurrency=2, batch=100):
        slow.wait()
        wait_until(lambda: len(log) > 50)
        put("third", "third", count=3)
        wait_until(lambda: log.count("third") == 3)
        assert len(log) < 450
        slow.open.set()


@pytest.mark.parametrize(("share", "most"), [(0.25, 1), (1.0, 4), (0.01, 1)])
def test_a_share_is_a_part_of_the_slots_and_at_least_one(share, most):
    gate = Gate()
    handler("slow", ordering="none", share=share)(gate)
    handler("other")(lambda message: None)
    put("slow", count=10)
    with dispatching(concurrency=4):
        gate.wait(most)
        marker = put("other")
        if share < 1:
            wait_until(lambda: settled(marker))
        assert len(gate.runs) == most
        gate.open.set()
    assert gate.most == most


def test_the_only_handler_may_fill_all_slots():
    gate = Gate()
    handler("slow", ordering="none")(gate)
    put("slow", count=10)
    with dispatching(concurrency=4):
        gate.wait(4)
        gate.open.set()


def test_a_finished_handler_makes_room_at_once():
    """A free slot is filled long before the next look at the table would come."""
    gates = {n: Gate() for n in range(4)}
    handler("job", ordering="none")(lambda message: gates[message.payload](message))
    for n in range(4):
        put("job", n)
    with dispatching(concurrency=2, poll=60.0):
        gates[0].wait()
        gates[1].wait()
        gates[1].open.set()
        gates[2].wait()
        for gate in gates.values():
            gate.open.set()


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_lane_is_delivered_in_order_and_one_at_a_time(log):
    """Scenario 40, in one process."""
    running = []

    def ordered(message):
        running.append(message.ordering_key)
        assert running.count(message.ordering_key) == 1
        log.append((message.ordering_key, message.payload))
        running.remove(message.ordering_key)

    handler("job")(ordered)
    for n in range(20):
        for key in "abc":
            put("job", n, ordering_key=key)
    drain(concurrency=8)
    for key in "abc":
        assert [n for found, n in log if found == key] == list(range(20))


def test_a_retrying_message_holds_its_own_lane_only(log):
    """Scenario 46."""
    failed = threading.Event()

    def handle(message):
        if message.payload == "A" and message.attempt < 3:
            failed.set()
            raise Retry(after=0.3)
        log.append(message.payload)

    handler("t", ordering="topic")(handle)
    handler("u")(handle)
    found = [put("t", name) for name in "ABC"]
    with dispatching(concurrency=8):
        assert failed.wait(DEADLINE)
        others = [put("u", f"u{n}", ordering_key=str(n)) for n in range(20)]
        wait_until(lambda: settled(*found, *others))
    assert [name for name in log if name in "ABC"] == ["A", "B", "C"]
    assert len(log) == 23


@pytest.mark.parametrize(("dead_head", "done"), [("skip", ["B"]), ("block", [])])
def test_a_dead_head_lets_its_lane_go_on_or_blocks_it(log, dead_head, done):
    """Scenario 47."""

    def handle(message):
        if message.payload == "A" and message.attempt == 1:
            raise Bury("no")
        log.append(message.payload)

    handler("job", dead_head=dead_head)(handle)
    head, follower = put("job", "A", ordering_key="k"), put("job", "B", ordering_key="k")
    drain()
    assert log == done
    assert (state(head), settled(follower)) == (State.DEAD, bool(done))
    requeue("default", [head.pk])
    drain()
    assert sorted(log) == ["A", "B"]
    assert settled(head, follower)


def test_two_dispatchers_run_each_message_once_and_each_lane_in_order(log):
    """Scenario 40."""
    running = set()
    overlaps = []

    def handle(message):
        key = message.ordering_key
        if key in running:
            overlaps.append(key)
        running.add(key)
        log.append((key, message.payload, message.attempt))
        running.discard(key)

    handler("job")(handle)
    for n in range(10):
        with transaction.atomic():
            for key in range(10):
                stage("job", n, ordering_key=str(key))
    with dispatching(), dispatching():
        wait_until(lambda: not Message.objects.pending().exists())
    assert overlaps == []
    assert len(log) == 100
    for key in range(10):
        assert [(n, attempt) for found, n, attempt in log if found == str(key)] == [(n, 1) for n in range(10)]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_handler_longer_than_its_lease_runs_once_beside_a_second_dispatcher():
    """Scenarios 16 and P2."""
    gate = Gate()
    handler("job", ordering="none")(gate)
    found = put("job", count=4)
    with dispatching(lease=0.6), dispatching(lease=0.6):
        gate.wait(4)
        renewed = fresh(found[0]).due_at
        wait_until(lambda: fresh(found[0]).due_at > renewed + timedelta(seconds=1))
        assert not any(message.lease.lost for message in gate.runs)
        gate.open.set()
        wait_until(lambda: settled(*found))
    assert len(gate.runs) == 4
    assert {fresh(each).attempt for each in found} == {1}


@pytest.mark.slow
def test_renewal_is_not_starved_by_a_busy_interpreter():
    """Scenario 16, a and b."""

    def spin(message):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(1000))

    async def block(message):
        spin(message)

    handler("sync", ordering="none")(spin)
    handler("async", ordering="none")(block)
    found = [put("sync"), put("async")]
    with dispatching(lease=0.9), dispatching(lease=0.9):
        wait_until(lambda: settled(*found))
    assert [fresh(each).attempt for each in found] == [1, 1]


def test_waiting_in_the_local_queue_costs_no_lease(log):
    """Scenario P3: ten messages that take longer than a lease together."""

    def slow(message):
        log.append(message.id)
        time.sleep(0.15)

    handler("job", ordering="none")(slow)
    found = put("job", count=10)
    with dispatching(concurrency=1, lease=0.6, batch=10), dispatching(concurrency=1, lease=0.6, batch=10):
        wait_until(lambda: settled(*found))
    assert len(log) == 10


def test_a_row_deleted_while_its_handler_runs_is_only_told_of(caplog):
    """Scenario 58."""
    gate = Gate()
    handler("job", ordering="none", max_attempts=1)(lambda message: gate(message) or message.payload == "ok")
    put("job", "ok")
    put("job", "fails")
    with dispatching(lease=0.6) as dispatcher:
        gate.wait(2)
        Message.objects.all().delete()
        gate.open.set()
        wait_until(lambda: dispatcher.counts["skipped"] == 2)
        last = put("job", "ok")
        wait_until(lambda: settled(last))
    assert Message.objects.count() == 1
    assert dispatcher.counts["dead"] == 0
    assert len([record for record in caplog.records if "lost its lease" in record.getMessage()]) == 2


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_handler_out_of_time_ends_its_attempt_and_frees_its_slot(log):
    """Scenario 18."""
    stuck = Gate()
    handler("stuck", ordering="none", timeout=0.3, max_attempts=1)(stuck)
    noting(log, ordering="none")
    hanging = put("stuck", count=2)
    with dispatching(concurrency=3) as dispatcher:
        stuck.wait(1)
        quick = put("job", count=10)
        wait_until(lambda: settled(*quick))
        wait_until(lambda: state(hanging[0]) == State.DEAD)
        assert stuck.runs[0].lease.lost
        assert dispatcher.vitals.condition().stuck >= 1
        wait_until(lambda: state(hanging[1]) == State.DEAD)
        stuck.open.set()
        wait_until(lambda: dispatcher.vitals.condition().stuck == 0)
        last = put("job", "last")
        wait_until(lambda: settled(last))
    assert outcomes(hanging[0]) == ["timed_out"]
    assert fresh(hanging[0]).error_type == "outbox.exceptions.HandlerTimeout"
    assert len(stuck.runs) == 2
    assert dispatcher.failure is None


def test_in_a_lane_nobody_starts_before_the_thread_that_ran_out_of_time_has_ended(log):
    stuck = Gate()

    def handle(message):
        log.append(message.payload)
        if message.payload == "A":
            stuck(message)

    handler("job", timeout=0.3, max_attempts=1)(handle)
    first, second = put("job", "A", ordering_key="k"), put("job", "B", ordering_key="k")
    with dispatching(concurrency=2, lease=0.9) as dispatcher:
        wait_until(lambda: dispatcher.vitals.condition().stuck == 1)
        held = fresh(first).due_at
        wait_until(lambda: fresh(first).due_at > held + timedelta(seconds=0.5))  # renewed, beyond its timeout
        assert (log, state(first), state(second)) == (["A"], State.PENDING, State.PENDING)
        stuck.open.set()
        wait_until(lambda: settled(first, second))
    assert (log, outcomes(first)) == (["A", "B"], ["timed_out"])


def test_a_process_whose_threads_are_all_stuck_gives_up():
    """Scenario 18: the process is to be recycled."""
    stuck = Gate()
    handler("job", ordering="none", timeout=0.2, max_attempts=1)(stuck)
    put("job", count=2)
    with dispatching(concurrency=2, stop=False) as dispatcher:
        pass
    assert "2 handlers are stuck" in dispatcher.failure
    assert dispatcher.left_running == 2
    stuck.open.set()


def test_a_stuck_lane_spends_its_budget_when_the_process_is_recycled():
    stuck = Gate()
    handler("job", timeout=0.2, retry=NOW)(stuck)
    row = put("job", ordering_key="k")
    for _ in range(3):
        with dispatching(concurrency=1, stop=False):
            pass
        assert outcomes(row)[-1] == "timed_out"
        Message.objects.filter(state=State.PENDING).update(due_at=rows.ago(1))
    assert (state(row), fresh(row).reason, len(stuck.runs)) == (State.DEAD, "exhausted", 3)
    stuck.open.set()


def test_an_atomic_handler_out_of_time_is_rolled_back(log):
    if connection.vendor == "sqlite":
        pytest.skip("on SQLite an atomic handler holds the write lock, so its timeout waits for its end")
    gate = Gate()

    def slow(message):
        Order.objects.create(reference="partial")
        gate(message)

    handler("job", atomic=True, timeout=0.3, max_attempts=1)(slow)
    row = put("job")
    with dispatching() as dispatcher:
        wait_until(lambda: state(row) == State.DEAD)
        gate.open.set()
        wait_until(lambda: dispatcher.vitals.condition().stuck == 0)
    assert not Order.objects.exists()


# --- the stop ---------------------------------------------------------------------------------------------------------


def test_a_stop_lets_handlers_finish_and_gives_back_what_has_not_started():
    """Scenarios 28 b and P12."""
    gate = Gate()
    handler("job", ordering="none", max_attempts=1)(gate)
    found = put("job", count=10)
    with dispatching(concurrency=2, batch=10) as dispatcher:
        gate.wait(2)
        dispatcher.stop()
        gate.open.set()
    assert len(gate.runs) == 2
    ended = [each for each in map(fresh, found) if each.state == State.DELIVERED]
    rest = [each for each in map(fresh, found) if each.state == State.PENDING]
    assert (len(ended), len(rest)) == (2, 8)
    assert {(each.spent, each.lease_token) for each in rest} == {(0, None)}
    assert all(each.due_at <= rows.now() for each in rest)


def test_what_outlasts_the_grace_is_given_back_and_costs_nothing():
    """Scenario 28 c."""
    gate = Gate()
    handler("job", ordering="none", max_attempts=1)(gate)
    row = put("job")
    with dispatching(grace=0.2) as dispatcher:
        gate.wait()
        dispatcher.stop()
    row = fresh(row)
    assert (row.state, row.spent, row.lease_token, outcomes(row)) == (State.PENDING, 0, None, ["interrupted"])
    assert row.due_at <= rows.now()
    assert dispatcher.left_running == 1
    assert gate.runs[0].lease.lost
    gate.open.set()


def test_what_outlasts_the_grace_in_a_lane_rests_until_the_process_is_gone():
    gate = Gate()
    handler("job")(gate)
    first, second = put("job", "A", ordering_key="k"), put("job", "B", ordering_key="k")
    with dispatching(grace=0.2) as dispatcher:
        gate.wait()
        dispatcher.stop()
    assert rows.now() < fresh(first).due_at < rows.ahead(2)
    assert fresh(second).due_at is None or fresh(second).due_at <= rows.now()
    assert claim(using="default", worker="next", seconds=60) == []
    gate.open.set()


def test_a_stop_starts_no_successor_in_a_lane():
    gate = Gate()
    handler("job")(gate)
    for n in range(3):
        put("job", n, ordering_key="k")
    with dispatching() as dispatcher:
        gate.wait()
        dispatcher.stop()
        gate.open.set()
    assert [message.payload for message in gate.runs] == [0]
    (lease,) = claim(using="default", worker="next", seconds=60)
    assert lease.message.payload == 1


def test_an_idle_dispatcher_stops_at_once():
    """Scenario 28 a and f."""
    handler("job")(lambda message: None)
    with dispatching(poll=60.0) as dispatcher:
        wait_until(lambda: Registered.objects.exists())
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert dispatcher.failure is None


@both_databases
def test_a_stop_releases_every_connection(log):
    """Scenario 37."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no list of sessions")
    before = sessions()

    def both(message):
        Effect.objects.create(key="x")
        Effect.objects.using("other").create(key="x")
        log.append(1)

    handler("job", ordering="none")(both)
    put("job", count=40)
    most = 0
    with dispatching(concurrency=4) as dispatcher:
        while dispatcher.counts["delivered"] < 40:
            most = max(most, sessions() - before)
    assert most <= 4 + 5  # one per slot; loop, settler, heartbeat, housekeeping, listener
    wait_until(lambda: sessions() <= before)


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_dispatcher_reports_itself_and_signs_off():
    """Scenario 22: nothing depends on that row."""
    gate = Gate()
    handler("job")(gate)
    row = put("job")
    with dispatching() as dispatcher:
        gate.wait()
        wait_until(lambda: Registered.objects.exists())
        registered = Registered.objects.get()
        assert (registered.name, registered.handlers) == (dispatcher.name, ["job"])
        assert registered.lost_at > rows.ahead(10)
        Registered.objects.all().delete()
        gate.open.set()
        wait_until(lambda: settled(row))
    assert not Registered.objects.exists()


@servers_only
def test_an_idle_dispatcher_reports_itself_again_after_an_outage(monkeypatch):
    """Nothing but the report itself would notice that the heartbeat's session is gone."""
    for module in (dispatcher_module, heartbeat_module):
        monkeypatch.setattr(module, "REPORT_EVERY", 0.1)
    handler("job")(lambda message: None)
    with dispatching():
        wait_until(Registered.objects.exists)
        cut_sessions()
        cut_at = rows.now()
        wait_until(lambda: Registered.objects.filter(seen_at__gt=cut_at).exists())


def test_a_long_lease_keeps_the_report_fresh():
    """The row is refreshed more often than it is believed lost, however long the lease."""
    heartbeat = Heartbeat(
        using="default",
        seconds=3600,
        held=list,
        report=lambda: True,
        worked_at=time.monotonic,
        window=5,
        give_up=print,
    )
    assert heartbeat.pause < LOST_AFTER / 2


# --- faults -----------------------------------------------------------------------------------------------------------


@servers_only
def test_a_dispatcher_survives_the_loss_of_all_its_sessions(log, caplog):
    """Scenarios 30 and 32: one warning, the same process, and no second run."""
    gate = Gate()
    handler("slow", ordering="none")(gate)
    noting(log, ordering="none")
    slow = put("slow", count=2)
    with dispatching(lease=3.0) as dispatcher, caplog.at_level(logging.DEBUG, "outbox"):
        gate.wait(2)
        quick = put("job", "before")
        wait_until(lambda: settled(quick))
        assert cut_sessions() >= 3
        late = put("job", "after")
        wait_until(lambda: settled(late))
        gate.open.set()
        wait_until(lambda: settled(*slow))
        assert cut_sessions() >= 1
        last = put("job", "again")
        wait_until(lambda: settled(last))
    assert log == ["before", "after", "again"]
    assert [fresh(each).attempt for each in slow] == [1, 1]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "is away" in r.getMessage()]
    assert len(warnings) <= 1
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert dispatcher.failure is None


def test_a_failed_charge_leaves_the_queue_as_it_was(log, monkeypatch):
    """Nothing that was claimed is forgotten: it would be renewed for ever and never run."""
    failures = [OperationalError("server closed the connection"), OperationalError("again")]
    real = dispatcher_module.charge

    def charge(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(dispatcher_module, "charge", charge)
    noting(log, ordering="none")
    found = put("job", count=8)
    with dispatching(concurrency=2):
        wait_until(lambda: settled(*found))
        more = put("job", count=30)
        wait_until(lambda: settled(*more))
    assert failures == []
    assert len(log) == 38


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)], ids=repr)
def test_a_receiver_that_raises_stops_no_thread(log, error):
    """Scenario P8."""

    def receiver(event, **kwargs):
        raise error

    names = (signals.delivered, signals.discarded, signals.retried)
    for signal in names:
        signal.connect(receiver)
    noting(log, ordering="none")
    try:
        with dispatching() as dispatcher:
            put("job", 1, expires_at=timedelta(0))
            for n in range(5):
                row = put("job", n)
                wait_until(lambda row=row: settled(row))
    finally:
        for signal in names:
            signal.disconnect(receiver)
    assert log == list(range(5))
    assert dispatcher.counts["delivered"] == 5


def test_a_fault_in_a_round_is_told_and_survived(log, monkeypatch, caplog):
    noting(log)
    faults = [ValueError("a fault of ours")]

    def claim_or_fail(self, *args, **kwargs):
        if faults:
            raise faults.pop()
        return real(self, *args, **kwargs)

    real = dispatcher_module.Claimer.claim
    monkeypatch.setattr(dispatcher_module.Claimer, "claim", claim_or_fail)
    row = put("job", 1)
    with dispatching():
        wait_until(lambda: settled(row))
    assert [r for r in caplog.records if r.exc_info and "a round failed" in r.getMessage()]


def test_a_short_run_does_not_wait_for_a_database_that_is_away(monkeypatch):
    def away(self, *args, **kwargs):
        raise OperationalError("connection refused")

    monkeypatch.setattr(dispatcher_module.Claimer, "claim", away)
    handler("job")(lambda message: None)
    dispatcher = drain()
    assert "connection refused" in dispatcher.failure


def test_a_dispatcher_that_may_not_wait_for_the_database_ends(monkeypatch):
    def away(self, *args, **kwargs):
        raise OperationalError("connection refused")

    monkeypatch.setattr(dispatcher_module.Claimer, "claim", away)
    handler("job")(lambda message: None)
    with dispatching(exit_on_database_error=True, stop=False) as dispatcher:
        pass
    assert "connection refused" in dispatcher.failure


def test_a_dispatcher_whose_threads_cannot_start_fails_loudly(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(dispatcher_module.Workers, "start", refuse)
    handler("job")(lambda message: None)
    with dispatching(stop=False) as dispatcher:
        pass
    assert dispatcher.failure == "RuntimeError: can't start new thread"


def test_a_session_setting_of_a_handler_ends_with_its_message(log):
    """Scenario 26 e."""
    statements = {
        "postgresql": ("SET statement_timeout TO '1ms'", "SHOW statement_timeout", "0"),
        "mysql": ("SET SESSION sql_mode = ''", "SELECT @@sql_mode <> ''", 1),
        "sqlite": ("PRAGMA case_sensitive_like = ON", "SELECT 'a' LIKE 'A'", 1),
    }
    change, ask, usual = statements[connection.vendor]

    def handle(message):
        with connections["default"].cursor() as cursor:
            if message.payload == "change":
                cursor.execute(change)
            cursor.execute(ask)
            log.append(cursor.fetchone()[0])

    handler("job")(handle)
    for payload in ("change", "ask"):
        put("job", payload, ordering_key="k")
    drain(concurrency=1)
    assert log[0] != usual
    assert log[1] == usual


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Django closes a cursor that is gone
def test_a_cursor_left_half_read_harms_no_later_message(log):
    """Scenario 26 f."""
    kept = []

    def handle(message):
        if message.payload == "leave":
            iterator = Effect.objects.iterator(chunk_size=1)
            next(iterator)
            kept.append(iterator)
        else:
            with transaction.atomic():
                Effect.objects.create(key="later")
            log.append("done")

    handler("job", max_attempts=1)(handle)
    for n in range(10):
        Effect.objects.create(key=str(n))
    for payload in ("leave", "write", "write"):
        put("job", payload, ordering_key="k")
    drain(concurrency=1)
    assert log == ["done", "done"]
    assert Message.objects.delivered().count() == 3
    kept.clear()
    gc.collect()


@override_settings(DEBUG=True)
def test_the_query_log_does_not_grow(log):
    """Scenario 63."""
    sizes = []

    def handle(message):
        sizes.append(len(connections["default"].queries_log))
        Effect.objects.create(key="x")

    handler("job", ordering="none")(handle)
    put("job", "x" * 10_000, count=60)
    with dispatching(concurrency=2) as dispatcher:
        wait_until(lambda: dispatcher.counts["delivered"] == 60)
        logs = [len(each.queries_log) for each in _all_connections()]
    assert max(sizes) < 10
    assert max(logs, default=0) < 400


def _all_connections():
    here = connections["default"]
    return [each for each in gc.get_objects() if isinstance(each, BaseDatabaseWrapper) and each is not here]


# --- messages that crash their workers --------------------------------------------------------------------------------


def put_suspect(crashes):
    """A message with which so many workers have died."""
    with transaction.atomic():
        row = put("suspect")
        Message.objects.filter(pk=row.pk).update(lapses=crashes, attempt=crashes, spent=crashes)
    return row


def test_a_message_whose_workers_crashed_runs_alone():
    """Scenario 23: a repeat offender takes no neighbour along."""
    gate, alone = Gate(), Gate()
    handler("job", ordering="none")(gate)
    handler("suspect", ordering="none")(alone)
    suspect = put_suspect(2)
    with dispatching(concurrency=4):
        alone.wait()
        healthy = put("job", count=4)
        assert not gate.entered.acquire(timeout=0.5)
        alone.open.set()
        gate.wait(2)
        gate.open.set()
        wait_until(lambda: settled(suspect, *healthy))
    assert fresh(suspect).lapses == 0


def test_a_busy_process_becomes_empty_for_a_message_that_must_run_alone(monkeypatch):
    monkeypatch.setattr(solitude, "QUIET", 0.5)
    busy, alone = Gate(), Gate()
    handler("job", ordering="none")(busy)
    handler("suspect", ordering="none")(alone)
    put("job")
    with dispatching(concurrency=4):
        busy.wait()
        suspect = put_suspect(2)
        marker = put("job")
        busy.wait()  # what was due before goes on until the suspect is seen
        busy.open.set()
        alone.wait()
        assert not Message.objects.in_flight().exclude(pk=suspect.pk).exists()
        alone.open.set()
        wait_until(lambda: settled(suspect, marker))


@pytest.mark.slow
def test_messages_that_must_run_alone_do_not_bring_everything_to_a_stop(log):
    """However many they are, the others have as much time."""

    def slow(message):
        log.append("suspect")
        time.sleep(0.2)

    handler("suspect", ordering="none")(slow)
    noting(log, ordering="none")
    for _ in range(12):
        put_suspect(2)
    put("job", "healthy", count=30)
    with dispatching(concurrency=4):
        wait_until(lambda: log.count("healthy") == 30)
        assert log.count("suspect") < 6
        wait_until(lambda: not Message.objects.pending().exists())
    assert log.count("suspect") == 12


def test_a_stuck_handler_does_not_keep_a_message_from_running_alone():
    stuck, alone = Gate(), Gate()
    alone.open.set()
    handler("stuck", ordering="none", timeout=0.2, max_attempts=1)(stuck)
    handler("suspect", ordering="none")(alone)
    put("stuck")
    with dispatching(concurrency=4) as dispatcher:
        wait_until(lambda: dispatcher.vitals.condition().stuck == 1)
        suspect = put_suspect(2)
        wait_until(lambda: settled(suspect))
        stuck.open.set()


def test_a_message_that_ran_alone_and_hangs_does_not_stop_the_dispatcher(log):
    stuck = Gate()
    handler("suspect", ordering="none", timeout=0.2, max_attempts=9)(stuck)
    noting(log, ordering="none")
    put_suspect(2)
    with dispatching(concurrency=4) as dispatcher:
        wait_until(lambda: dispatcher.vitals.condition().stuck == 1)
        row = put("job", "goes on")
        wait_until(lambda: settled(row))
        stuck.open.set()
    assert log == ["goes on"]


# --- the cost of doing nothing ----------------------------------------------------------------------------------------


def test_an_idle_dispatcher_asks_once_per_poll_whatever_the_number_of_topics(monkeypatch):
    """Scenario 62."""
    asked = []
    real = dispatcher_module.Claimer.claim

    def counting(self, *args, **kwargs):
        def note(execute, sql, params, many, context):
            if Message._meta.db_table in sql:
                asked.append(sql)
            return execute(sql, params, many, context)

        with connections["default"].execute_wrapper(note):
            return real(self, *args, **kwargs)

    monkeypatch.setattr(dispatcher_module.Claimer, "claim", counting)
    for n in range(200):
        handler(f"topic{n}")(lambda message: None)
    claims = []

    def counted(self, *args, **kwargs):
        claims.append(1)
        return counting(self, *args, **kwargs)

    monkeypatch.setattr(dispatcher_module.Claimer, "claim", counted)
    with dispatching(poll=0.1):
        wait_until(lambda: len(claims) >= 6)
    assert len(asked) <= len(claims)


def test_a_scheduled_message_starts_in_time(log):
    """Scenario 62."""
    noting(log)
    row = put("job", 1, deliver_at=timedelta(seconds=0.7))
    with dispatching(poll=0.2):
        wait_until(lambda: settled(row))
    late = fresh(row).settled_at - row.due_at
    assert timedelta(0) <= late < timedelta(seconds=2)


def test_a_retry_starts_when_it_is_due_and_not_at_the_next_poll(log):
    """Scenario 34: the retry runs at its time."""
    started = []

    def handle(message):
        started.append(time.monotonic())
        if message.attempt == 1:
            raise Retry(after=0.3)

    handler("job")(handle)
    row = put("job")
    with dispatching(poll=60.0):
        wait_until(lambda: settled(row))
    assert 0.25 < started[1] - started[0] < 5


def test_all_retries_start_when_they_are_due(log):
    """Scenario 34: not only the first of them."""

    def handle(message):
        if message.attempt == 1:
            raise Retry(after=message.payload)
        log.append(message.payload)

    handler("job", ordering="none")(handle)
    for wait in (600, 0.3, 0.6):
        put("job", wait)
    with dispatching(poll=60.0):
        wait_until(lambda: log == [0.3, 0.6], 20)


def test_what_ends_during_a_look_at_the_slots_ends_the_next_wait(log, monkeypatch):
    """A slot that becomes free in that moment is filled at once, not at the next poll."""
    gate = Gate()
    handler("job", ordering="none")(lambda message: gate(message) if message.payload == 1 else log.append(2))
    put("job", 1)
    put("job", 2)
    with dispatching(poll=60.0, concurrency=1) as dispatcher:
        gate.wait()
        real = dispatcher._slots.want

        def slowly():
            want = real()
            gate.open.set()
            wait_until(lambda: Message.objects.delivered().exists())
            return want

        monkeypatch.setattr(dispatcher._slots, "want", slowly)
        dispatcher._nudge()
        wait_until(lambda: log == [2], 10)


def test_a_commit_wakes_the_dispatchers_of_the_same_process(log):
    noting(log)
    with dispatching(poll=60.0):
        wait_until(lambda: Registered.objects.exists())
        row = put("job", 1)
        wait_until(lambda: settled(row), 10)


# --- no transaction is open while a handler runs ----------------------------------------------------------------------


@pytest.mark.skipif(connection.vendor != "postgresql", reason="pg_stat_activity is PostgreSQL's")
def test_no_session_is_in_a_transaction_while_handlers_run():
    """Scenario 36."""
    gate = Gate()

    def touch(message):
        Effect.objects.count()
        gate(message)

    handler("job", ordering="none")(touch)
    found = put("job", count=3)
    with dispatching(concurrency=3, lease=1.2):
        gate.wait(3)
        seen = set()
        end = time.monotonic() + 1.0
        with connection.cursor() as cursor:
            while time.monotonic() < end:
                cursor.execute(
                    "SELECT pid, state, backend_xmin::text FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                    "AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL) "
                    "AND now() - state_change > interval '500 ms'"
                )
                seen.update(cursor.fetchall())
        assert seen == set()
        gate.open.set()
        wait_until(lambda: settled(*found))


# --- under the weight of other work -----------------------------------------------------------------------------------


def test_pruning_and_staging_go_on_beside_the_dispatchers(log):
    """Scenario 49, light."""
    noting(log, ordering="none")
    old = [rows.delivered(age=40 * 86400) for _ in range(60)]
    found = []
    with dispatching(), dispatching():
        for n in range(3):
            found += put("job", n, count=20)
            prune("default")
        wait_until(lambda: settled(*found))
    assert not Message.objects.filter(pk__in=[each.pk for each in old]).exists()
    assert len(log) == 60


@pytest.mark.slow
def test_a_slow_database_costs_no_lease(log, monkeypatch):
    """Scenario 16 d: latency in every statement."""
    real = CursorWrapper.execute

    def slowly(self, *args):
        time.sleep(0.03)
        return real(self, *args)

    monkeypatch.setattr(CursorWrapper, "execute", slowly)
    gate = Gate()
    handler("job", ordering="none")(gate)
    found = put("job", count=6)
    with dispatching(lease=1.5, concurrency=6), dispatching(lease=1.5, concurrency=6):
        gate.wait(6)
        renewed = fresh(found[0]).due_at
        wait_until(lambda: fresh(found[0]).due_at > renewed + timedelta(seconds=1))
        gate.open.set()
        wait_until(lambda: settled(*found))
    assert {fresh(each).attempt for each in found} == {1}


@pytest.mark.slow
def test_many_handlers_at_once_keep_their_leases():
    """Scenario 16 c."""
    gate = Gate()
    handler("job", ordering="none")(gate)
    found = put("job", count=20)
    with dispatching(lease=0.9, concurrency=20), dispatching(lease=0.9, concurrency=20):
        gate.wait(20)
        renewed = fresh(found[-1]).due_at
        wait_until(lambda: fresh(found[-1]).due_at > renewed + timedelta(seconds=1))
        gate.open.set()
        wait_until(lambda: settled(*found))
    assert {fresh(each).attempt for each in found} == {1}


@pytest.mark.slow
@override_settings(DEBUG=True)
def test_memory_stays_flat(caplog):
    """Scenario 63."""

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def fail_sometimes(message):
        Effect.objects.count()
        if message.id % 10 == 0 and message.attempt == 1:
            raise Retry(after=0)

    handler("job", ordering="none")(fail_sometimes)
    caplog.set_level(logging.ERROR, "outbox")  # else the test would keep every line
    text = "x" * 100_000
    sizes = []
    with dispatching(concurrency=4) as dispatcher:
        for n in range(1, 7):
            put("job", text, count=200)
            wait_until(lambda: Message.objects.delivered().count() == 200, 120)
            Message.objects.all().delete()
            connections["default"].queries_log.clear()
            if n > 2:
                sizes.append(resident())
    assert dispatcher.counts["delivered"] == 1200
    assert sizes[-1] - sizes[0] < 20_000_000
