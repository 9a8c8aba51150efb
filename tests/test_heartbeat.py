"""Renewal: of all that is held, through anything that happens to the database, and the end when it fails alone."""

import logging
import threading
import time

import pytest
from django.db import OperationalError, connection, connections

from outbox import handler, outages
from outbox import heartbeat as heartbeat_module
from outbox.heartbeat import Heartbeat
from outbox.leases import claim
from outbox.models import Message
from outbox.registry import registry
from tests.running import DEADLINE, Gate, cut_sessions, dispatching, fresh, put, settled
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

servers_only = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has neither sessions nor row locks")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    monkeypatch.setattr(outages, "_told_at", {})
    with registry.isolated():
        handler("job", ordering="none")(lambda message: None)
        yield


@pytest.fixture
def beating():
    """Start heartbeats that are stopped at the end; each beats at once and then every third of its lease."""
    started = []

    def start(leases, seconds=3.0, **options):
        given_up = []
        heartbeat = Heartbeat(
            using="default",
            seconds=seconds,
            held=lambda: list(leases),
            report=options.pop("report", lambda: True),
            worked_at=options.pop("worked_at", time.monotonic),
            window=options.pop("window", 0.2),
            give_up=given_up.append,
        )
        heartbeat.given_up = given_up
        heartbeat.start()
        started.append(heartbeat)
        return heartbeat

    yield start
    for heartbeat in started:
        heartbeat.stop(20)


def hold(count=1, seconds=60.0):
    put("job", count=count)
    return claim(using="default", worker="worker", seconds=seconds, limit=count)


def due(lease):
    return fresh(lease.message).due_at


def test_everything_that_is_held_is_renewed_by_its_token(beating):
    leases = hold(3, seconds=1)
    before = {lease.id: due(lease) for lease in leases}
    beating(leases, seconds=600)
    wait_until(lambda: all(due(lease) > before[lease.id] for lease in leases))
    assert all(lease.deadline > time.monotonic() + 500 for lease in leases)
    assert all(not lease.view.lost for lease in leases)


def test_more_leases_than_one_statement_takes_are_renewed(beating, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "GROUP", 2)
    leases = hold(5, seconds=1)
    beating(leases, seconds=600)
    wait_until(lambda: all(lease.deadline > time.monotonic() + 500 for lease in leases))


def test_a_lease_of_somebody_else_is_told_to_its_handler_and_not_renewed(beating):
    mine, stolen = hold(2, seconds=1)
    Message.objects.filter(pk=stolen.id).update(lease_token=5)
    before = due(stolen)
    beating([mine, stolen], seconds=600)
    wait_until(lambda: stolen.view.lost)
    assert due(stolen) == before
    assert not mine.view.lost


@servers_only
def test_a_locked_row_delays_no_renewal_but_its_own(beating, second_connection, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BUSY_PAUSE", 0.1)
    locked, free = hold(2, seconds=1)
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM {Message._meta.db_table} WHERE id = %s FOR UPDATE", [locked.id])
    before = due(locked)
    beating([locked, free], seconds=600)
    wait_until(lambda: free.deadline > time.monotonic() + 500)
    assert due(locked) == before
    other.rollback()
    wait_until(lambda: due(locked) > before)


@servers_only
def test_a_heartbeat_that_loses_its_session_goes_on(beating, caplog):
    (lease,) = hold()
    beating([lease], seconds=0.6)
    before = due(lease)
    wait_until(lambda: due(lease) != before)
    with caplog.at_level(logging.INFO, "outbox"):
        assert cut_sessions() >= 1
        cut_at = lease.deadline
        wait_until(lambda: lease.deadline > cut_at + 0.5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # no outage yet


def failing(monkeypatch, failures, error=OperationalError):
    """Let renewals fail for as long as the list is not empty."""
    real = heartbeat_module.renew

    def renew(*args):
        if failures:
            failures.pop()
            raise error("server closed the connection unexpectedly")
        return real(*args)

    monkeypatch.setattr(heartbeat_module, "renew", renew)


def test_a_short_outage_is_invisible(beating, monkeypatch):
    """Scenario 17."""
    failing(monkeypatch, [1, 1, 1])
    (lease,) = hold(seconds=3)
    heartbeat = beating([lease])
    wait_until(lambda: lease.deadline > time.monotonic() + 2.5)
    assert not lease.view.lost
    assert heartbeat.given_up == []


def test_a_handler_is_told_before_its_lease_is_over(beating, monkeypatch):
    """Scenario 17."""
    failing(monkeypatch, [1] * 10_000)
    (lease,) = hold(seconds=1.0)
    heartbeat_module.promise(lease, 1.0)
    beating([lease], seconds=1.0)
    wait_until(lambda: lease.view.lost)
    assert lease.view.safe_until < lease.deadline - 0.05


def test_renewal_that_fails_alone_ends_the_process(beating, monkeypatch):
    """Invariant 6."""
    failing(monkeypatch, [1] * 10_000)
    heartbeat = beating(hold(seconds=0.3), seconds=0.3)
    wait_until(lambda: heartbeat.given_up)
    assert "while other statements succeed" in heartbeat.given_up[0]


@pytest.mark.slow
def test_renewal_that_fails_with_everything_else_is_waited_for(beating, monkeypatch):
    """Invariant 6: with the database away it waits."""
    failures = [1] * 10_000
    failing(monkeypatch, failures)
    (lease,) = hold(seconds=0.2)
    long_ago = time.monotonic() - 100
    heartbeat = beating([lease], seconds=0.2, worked_at=lambda: long_ago)
    wait_until(lambda: len(failures) < 9_940)
    assert heartbeat.given_up == []
    failures.clear()
    wait_until(lambda: lease.deadline > time.monotonic())


@pytest.mark.slow
def test_a_database_that_can_write_nothing_is_waited_for_though_it_answers(beating, monkeypatch):
    """A full disk: claims that find nothing go on succeeding, renewals fail for longer than any lease."""
    failures = [1] * 10_000
    failing(monkeypatch, failures)
    monkeypatch.setattr(heartbeat_module, "is_unwritable", lambda connection, error: True)
    (lease,) = hold(seconds=0.2)
    heartbeat = beating([lease], seconds=0.2)
    wait_until(lambda: len(failures) < 9_940)
    assert heartbeat.given_up == []


def test_a_fault_is_told_and_survived(beating, monkeypatch, caplog):
    failing(monkeypatch, [1], error=ValueError)
    (lease,) = hold(seconds=3)
    beating([lease], seconds=600)
    wait_until(lambda: lease.deadline > time.monotonic() + 500)
    assert any(record.exc_info for record in caplog.records)


def test_the_report_goes_on_after_an_outage(beating):
    """An idle process notices by its report alone that its session is gone."""
    reports = []
    beating([], seconds=0.3, report=lambda: reports.append(1))
    wait_until(lambda: len(reports) >= 3)


def test_all_threads_of_a_process_tell_of_an_outage_once(caplog):
    """Scenario 30: one warning per outage, whoever notices it first."""
    connections["default"].close()  # or the first failure would say no more than that its session has ended
    lost = OperationalError("server closed the connection unexpectedly")
    one, other = outages.Outage("default", "One"), outages.Outage("default", "Other")
    with caplog.at_level(logging.INFO, "outbox"):
        for _ in range(3):
            one.note(lost)
            other.note(lost)
        one.over()
        other.over()
        one.over()
    told = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert told == [("WARNING", "One"), ("INFO", "One"), ("INFO", "Other")]


def test_pauses_grow_and_end_at_a_few_seconds():
    """Scenario 31: no busy loop, and work resumes within seconds."""
    outage = outages.Outage("default", "One")
    pauses = [outage.note(OperationalError("connection refused")) for _ in range(40)]
    assert 0 < pauses[0] <= outages.FIRST_PAUSE
    assert outages.LONGEST_PAUSE / 2 <= pauses[-1] <= outages.LONGEST_PAUSE


# --- the whole table is locked ----------------------------------------------------------------------------------------


@pytest.fixture
def table_lock(second_connection):
    """Lock the whole message table; the returned function opens the lock again."""
    other = second_connection()

    def lock():
        table = other.ops.quote_name(Message._meta.db_table)
        if other.vendor == "mysql":
            other.ensure_connection()
            statements = [f"LOCK TABLES {table} WRITE"]
        elif other.vendor == "postgresql":
            other.set_autocommit(False)
            statements = [f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"]
        else:
            statements = ["BEGIN EXCLUSIVE"]
        with other.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def unlock():
        with other.cursor() as cursor:
            cursor.execute("UNLOCK TABLES" if other.vendor == "mysql" else "ROLLBACK")
        if other.vendor == "postgresql":
            other.rollback()

    return lock, unlock


def test_a_lock_on_the_table_shorter_than_the_lease_is_invisible(table_lock):
    """Scenario 17: 3 s of 6."""
    lock, unlock = table_lock
    gate = Gate()
    with registry.isolated():
        handler("job", ordering="none")(gate)
        row = put("job")
        with dispatching(lease=3.0):
            gate.wait()
            lock()
            assert not gate.runs[0].lease.lost
            time.sleep(1.0)  # the length of the lock is what this is about
            assert not gate.runs[0].lease.lost
            unlock()
            gate.open.set()
            wait_until(lambda: settled(row))
    assert (len(gate.runs), fresh(row).attempt) == (1, 1)


def test_a_lock_on_the_table_longer_than_the_lease_is_told_to_the_handler_and_survived(table_lock):
    """Scenario 17: 10 s of 6. Even the heartbeat hangs in its statement meanwhile."""
    lock, unlock = table_lock
    gate = Gate()
    with registry.isolated():
        handler("job", ordering="none")(gate)
        row = put("job")
        with dispatching(lease=0.9) as dispatcher, dispatching(lease=0.9):
            gate.wait()
            lock()
            wait_until(lambda: gate.runs[0].lease.lost)
            gate.open.set()
            unlock()
            wait_until(lambda: settled(row))
            last = put("job")
            wait_until(lambda: settled(last))
    assert fresh(row).state == "delivered"
    assert dispatcher.failure is None


def test_the_heartbeat_has_a_thread_of_its_own(beating):
    """Invariant 6."""
    threads = []
    beating([], report=lambda: threads.append(threading.current_thread().name))
    wait_until(lambda: threads, DEADLINE)
    assert threads[0] == "outbox-heartbeat"


def test_missed_beats_are_caught_up_with(beating):
    """Before a claim, for after an outage it would find what this process itself holds."""
    (lease,) = hold()
    heartbeat = beating([lease], seconds=600)
    wait_until(lambda: lease.deadline > time.monotonic() + 500)
    deadline = lease.deadline
    heartbeat.catch_up()
    assert lease.deadline == deadline, "no beat was missed"
    heartbeat._beaten_at -= 600
    heartbeat.catch_up()
    assert lease.deadline > deadline


def test_a_loss_that_one_thread_notices_renews_the_sessions_of_the_others():
    """Scenario 30: else the next handler would find its session dead, whatever health checks the project has."""
    freshness, outage = outages.Freshness(), outages.Outage("default", "One")
    connection.ensure_connection()
    session = connection.connection
    freshness.renew("default")
    assert connection.connection is session
    threading.Thread(target=outage.note, args=[OperationalError("server closed the connection")]).start()
    wait_until(lambda: outage.failures)
    wait_until(lambda: freshness.renew("default") or connection.connection is not session)
