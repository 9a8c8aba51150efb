"""The thread that settles: no outcome is given up while it may stand, and none spoils another."""

import logging
import threading

import pytest
from django.db import DataError, IntegrityError, OperationalError, connection, transaction
from django.db.backends.signals import connection_created

from outbox import handler, outages
from outbox import settler as settler_module
from outbox.errors import ErrorRecord
from outbox.leases import Settled, claim, settle
from outbox.models import Message, State
from outbox.registry import registry
from outbox.settler import Settler
from outbox.slots import Slots
from outbox.verdicts import judge
from tests.running import cut_sessions, fresh, outcomes, put, state
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

servers_only = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has neither sessions nor row locks")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(outages, "_told_at", {})
    monkeypatch.setattr(outages, "LONGEST_PAUSE", 0.1)
    with registry.isolated():
        yield


@pytest.fixture
def work():
    """The slots and the settler of a process; the settler is stopped at the end, and has settled everything then."""
    handler("job")(lambda message: None)
    slots = Slots(concurrency=10, handlers=registry.handlers(), batch=100, lease_seconds=60, prefetch=False)
    settler = Settler(
        using="default", slots=slots, batch=100, seconds=60, may_continue=lambda lease: True, woke=lambda: None
    )
    yield slots, settler
    settler.stop(20)
    assert not settler._thread.is_alive()


def hold(slots, count=1, **options):
    """Leases of so many messages, whose handlers have just returned."""
    put("job", count=count, **options)
    leases = claim(using="default", worker="worker", seconds=60, limit=count)
    slots.add(leases)
    for _ in leases:
        slots.finished(slots.take())
    return leases


def running(slots, count=1):
    """Leases of so many messages, whose handlers are running."""
    put("job", count=count)
    slots.add(claim(using="default", worker="worker", seconds=60, limit=count))
    return [slots.take() for _ in range(count)]


def run(settler, results):
    """Let the settler settle these outcomes, all in one group."""
    for lease, result in results:
        settler.put(lease, judge(lease, result, 0.1))
    settler.start()


def test_outcomes_are_settled_together_each_with_its_own_verdict(work):
    slots, settler = work
    leases = hold(slots, 3)
    run(settler, zip(leases, [None, ValueError("x"), False], strict=True))
    wait_until(slots.is_empty)
    assert [state(each.message) for each in leases] == [State.DELIVERED, State.PENDING, State.PENDING]
    assert settler.counts == {"delivered": 1, "retried": 2}


def test_one_stolen_lease_among_many_is_reported_and_the_others_stand(work, caplog):
    """Scenario P10."""
    slots, settler = work
    leases = hold(slots, 20)
    Message.objects.filter(pk=leases[7].id).update(lease_token=5)
    run(settler, [(lease, None) for lease in leases])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 19, "skipped": 1}
    assert state(leases[7].message) == State.PENDING
    lost = [record.getMessage() for record in caplog.records if "lost its lease" in record.getMessage()]
    assert len(lost) == 1
    assert f"Message {leases[7].id} " in lost[0]


def test_an_error_text_that_the_database_refuses_spoils_no_other_outcome(work, monkeypatch):
    """Scenario 25, if cleaning ever failed."""
    slots, settler = work
    leases = hold(slots, 5)
    real = settler_module.settle

    def refusing(using, settlements, **options):
        if any("poison" in each.error.text for each in settlements):
            raise DataError("cannot contain NUL")
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", refusing)
    run(settler, [(lease, ValueError("poison") if n == 2 else None) for n, lease in enumerate(leases)])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 4, "retried": 1}
    row = fresh(leases[2].message)
    assert (row.error_type, outcomes(row)) == ("ValueError", ["failed"])
    assert row.error_text == "The text of this error could not be stored."


def test_an_outcome_that_costs_its_session_each_time_spoils_no_other(work, monkeypatch):
    """Scenario 12: a packet that is too large looks like an outage, and was tried for ever in front of all others."""
    slots, settler = work
    leases = hold(slots, 5)
    real = settler_module.settle

    def cutting(using, settlements, **options):
        if any("poison" in each.error.text for each in settlements):
            raise OperationalError("server has gone away")
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", cutting)
    run(settler, [(lease, ValueError("poison") if n == 2 else None) for n, lease in enumerate(leases)])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 4, "retried": 1}
    assert outcomes(fresh(leases[2].message)) == ["failed"]


def test_a_real_outage_costs_no_error_text(work, monkeypatch):
    slots, settler = work
    (lease,) = hold(slots)
    failures = [OperationalError("connection refused") for _ in range(6)]
    real = settler_module.settle

    def away(using, settlements, **options):
        if failures:
            raise failures.pop()
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", away)
    monkeypatch.setattr(Settler, "_is_answered", lambda self: not failures)
    run(settler, [(lease, ValueError("the reason"))])
    wait_until(slots.is_empty)
    assert fresh(lease.message).error_text == "the reason"


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL alone refuses NUL in a text")
def test_a_text_that_was_not_cleaned_spoils_no_other_outcome(work):
    slots, settler = work
    leases = hold(slots, 3)
    for n, lease in enumerate(leases):
        outcome = judge(lease, ValueError("x"), 0.1)
        if n == 1:
            outcome = settler_module.replace(outcome, error=ErrorRecord(type="E", text="a\0b"))
        settler.put(lease, outcome)
    settler.start()
    wait_until(slots.is_empty)
    assert settler.counts == {"retried": 3}


@pytest.mark.parametrize("error", [IntegrityError("refused"), OverflowError("year 10000")], ids=repr)
def test_an_outcome_that_cannot_be_written_at_all_costs_no_other_and_no_thread(work, monkeypatch, caplog, error):
    slots, settler = work
    leases = hold(slots, 3)
    real = settler_module.settle

    def refusing(using, settlements, **options):
        if any(each.lease is leases[0] for each in settlements):
            raise error
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", refusing)
    monkeypatch.setattr(settler, "_seconds", 0.5)
    run(settler, [(lease, None) for lease in leases])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 2}
    assert fresh(leases[0].message).lease_token == leases[0].token  # it runs out, and the message is delivered again
    assert any("cannot be settled" in record.getMessage() for record in caplog.records)


def test_what_is_refused_for_a_reason_unknown_is_tried_again_and_told_once(work, monkeypatch, caplog):
    """Somebody may mend the database meanwhile, and the effect has happened: it must not come twice."""
    monkeypatch.setattr(settler_module, "BUSY_PAUSE", 0.01)
    slots, settler = work
    leases = hold(slots, 1)
    refusals = [IntegrityError("a trigger of the project's says no")] * 3
    real = settler_module.settle

    def refusing(*args, **options):
        if refusals:
            raise refusals.pop()
        return real(*args, **options)

    monkeypatch.setattr(settler_module, "settle", refusing)
    run(settler, [(lease, None) for lease in leases])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 1}
    assert settler._refused_since == {}
    assert [record.getMessage().partition(";")[2] for record in caplog.records if record.exc_info] == [
        " it is tried again."
    ]


def test_an_outage_is_waited_for_and_told_once(work, monkeypatch, caplog):
    """Scenario 32: completion is tried again under the same token."""
    slots, settler = work
    leases = hold(slots, 2)
    failures = [OperationalError("server closed the connection unexpectedly") for _ in range(4)]
    real = settler_module.settle

    def away(using, settlements, **options):
        if failures:
            raise failures.pop()
        assert options["recheck"]
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", away)
    with caplog.at_level(logging.INFO, "outbox"):
        run(settler, [(lease, None) for lease in leases])
        wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 2}
    told = [record.levelname for record in caplog.records if record.name == "outbox"]
    assert told == ["WARNING", "INFO"]


def test_what_is_in_doubt_stays_so_while_its_row_is_locked(work, monkeypatch):
    """A COMMIT of which no answer came has settled it: who forgot the doubt would take the lease for lost."""
    slots, settler = work
    leases = hold(slots, 1)
    real = settler_module.settle
    tries = []

    def unanswered(using, settlements, **options):
        tries.append((options["token"], options["recheck"]))
        if len(tries) == 2:
            return [Settled(settlement=each, status="busy") for each in settlements]
        results = real(using, settlements, **options)
        if len(tries) == 1:
            raise OperationalError("server closed the connection unexpectedly")
        return results

    monkeypatch.setattr(settler_module, "settle", unanswered)
    run(settler, [(lease, None) for lease in leases])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 1}
    assert tries == [(tries[0][0], False), (tries[0][0], True), (tries[0][0], True)]


class Refusal(Exception):
    """What a driver raises, with the code where the driver has it."""

    def __init__(self, code):
        super().__init__(code, "no space left on device")
        if isinstance(code, str):
            self.sqlstate = code


# Full, read-only and failing disks, and a server that is out of memory.
UNWRITABLE = {
    "postgresql": ["53100", "53200", "58030", "25006"],
    "mysql": [1021, 1114, 1180, 1290],
    "sqlite": [8, 10, 13, 14],
}


@pytest.mark.parametrize("code", UNWRITABLE[connection.vendor])
def test_an_outcome_outlasts_a_full_disk(work, monkeypatch, caplog, code):
    slots, settler = work
    leases = hold(slots, 2)
    failures = [OperationalError("no space left on device") for _ in range(4)]
    real = settler_module.settle

    def full(using, settlements, **options):
        if failures:
            connection.ensure_connection()
            raise failures.pop() from Refusal(code)
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", full)
    with caplog.at_level(logging.INFO, "outbox"):
        run(settler, [(lease, None) for lease in leases])
        wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 2}
    assert [record.levelname for record in caplog.records if record.name == "outbox"] == ["WARNING", "INFO"]


@pytest.mark.parametrize("in_lane", [False, True])
def test_a_commit_without_an_answer_is_recognised_as_our_own(work, monkeypatch, in_lane):
    """A delivered message is not called lost, and what was handed over is held."""
    slots, settler = work
    (lease,) = hold(slots, ordering_key="k" if in_lane else None)
    if in_lane:
        put("job", ordering_key="k")
    real = settler_module.settle
    calls = []

    def unanswered(using, settlements, **options):
        calls.append(options["token"])
        found = real(using, settlements, **options)
        if len(calls) == 1:
            raise OperationalError("server closed the connection unexpectedly")
        return found

    monkeypatch.setattr(settler_module, "settle", unanswered)
    run(settler, [(lease, None)])
    wait_until(lambda: settler.counts["delivered"])
    assert settler.counts == {"delivered": 1}
    assert calls[0] == calls[1]
    if in_lane:
        successor = slots.take()
        assert (successor.token, successor.message.ordering_key) == (calls[0], "k")
        slots.finished(successor)
        settler.put(successor, judge(successor, None, 0.1))
    wait_until(slots.is_empty)


@servers_only
def test_a_session_that_is_cut_costs_no_outcome(work):
    """Scenario 32."""
    slots, settler = work
    leases = hold(slots, 3)
    run(settler, [(leases[0], None)])
    wait_until(lambda: settler.counts["delivered"] == 1)
    assert cut_sessions() >= 1
    for lease in leases[1:]:
        settler.put(lease, judge(lease, None, 0.1))
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 3}


@servers_only
def test_a_row_that_somebody_has_locked_delays_no_other(work, second_connection):
    slots, settler = work
    leases = hold(slots, 3)
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM {Message._meta.db_table} WHERE id = %s FOR UPDATE", [leases[1].id])
    run(settler, [(lease, None) for lease in leases])
    wait_until(lambda: settler.counts["delivered"] == 2)
    assert state(leases[1].message) == State.PENDING
    other.rollback()
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 3}


def test_a_database_that_is_locked_for_long_loses_nothing(work, monkeypatch, caplog):
    slots, settler = work
    leases = hold(slots, 2)
    code = {"postgresql": "40P01", "mysql": 1205, "sqlite": 5}[connection.vendor]
    failures = 6
    real = settler_module.settle

    def locked(using, settlements, **options):
        nonlocal failures
        if failures:
            failures -= 1
            error = OperationalError(code, "locked")
            error.__cause__ = RuntimeError(code)
            if isinstance(code, str) or connection.vendor == "sqlite":
                setattr(error.__cause__, "sqlstate" if isinstance(code, str) else "sqlite_errorcode", code)
            raise error
        return real(using, settlements, **options)

    monkeypatch.setattr(settler_module, "settle", locked)
    run(settler, [(lease, None) for lease in leases])
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 2}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@servers_only
def test_a_statement_that_ran_out_of_time_is_done_again(work, second_connection, monkeypatch, caplog):
    """Where a role has a statement timeout, a table that a migration keeps locked loses nothing either."""
    slots, settler = work
    leases = hold(slots, 2)
    begin, limit, lock = {
        "postgresql": ("BEGIN", "SET statement_timeout TO '50ms'", "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"),
        "mysql": ("SET autocommit = 1", "SET SESSION max_statement_time = 0.05", "LOCK TABLES {} WRITE"),
    }[connection.vendor]
    tries = []
    real = settler_module.settle
    monkeypatch.setattr(settler_module, "settle", lambda *args, **options: tries.append(1) or real(*args, **options))

    def hurry(connection, **_):
        with connection.cursor() as cursor:
            cursor.execute(limit)

    migration = second_connection()
    with migration.cursor() as cursor:
        cursor.execute(begin)
        cursor.execute(lock.format(Message._meta.db_table))
    connection_created.connect(hurry)
    try:
        run(settler, [(lease, None) for lease in leases])
        wait_until(lambda: len(tries) > 3)
    finally:
        connection_created.disconnect(hurry)
        migration.close()
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 2}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_outcome_of_an_atomic_handler_is_only_told(work, monkeypatch):
    slots, settler = work
    (lease,) = hold(slots)
    with transaction.atomic():
        (done,) = settle("default", [judge(lease, None, 0.1)])
    told = []
    monkeypatch.setattr(settler_module, "announce", told.extend)
    settler.put(lease, done)
    settler.start()
    wait_until(slots.is_empty)
    assert told == [done]
    assert settler.counts == {"delivered": 1}


def test_what_a_successor_gets_after_the_stop_is_given_back(work):
    slots, settler = work
    (lease,) = hold(slots, ordering_key="k")
    successor = put("job", ordering_key="k")
    slots.withdraw()
    run(settler, [(lease, None)])
    wait_until(slots.is_empty)
    row = fresh(successor)
    assert (row.state, row.spent, row.attempt, row.lease_token) == (State.PENDING, 0, 1, None)
    assert settler.counts == {"delivered": 1}


def test_a_stopping_settler_gives_up_only_when_the_leases_are_over(work, monkeypatch):
    slots, settler = work
    (lease,) = hold(slots)

    def away(using, settlements, **options):
        raise OperationalError("connection refused")

    monkeypatch.setattr(settler_module, "settle", away)
    run(settler, [(lease, None)])
    settler.stop(0.3)
    assert settler._thread.is_alive()
    lease.deadline = 0.0
    settler.stop(20)
    assert not settler._thread.is_alive()


def test_the_settler_waits_for_company_only_while_handlers_run(work, monkeypatch):
    slots, settler = work
    first, second = hold(slots, 2)
    settled = threading.Event()
    settler._woke = settled.set
    monkeypatch.setattr(settler_module, "LINGER", 3600.0)
    run(settler, [(first, None)])
    assert settled.wait(20)  # nothing runs: at once
    (third,) = running(slots)
    settler.put(second, judge(second, None, 0.1))
    slots.finished(third)
    settler.put(third, judge(third, None, 0.1))
    wait_until(slots.is_empty)
    assert settler.counts == {"delivered": 3}


def test_a_lost_result_is_a_settled_one_for_the_slots(work):
    slots, settler = work
    (lease,) = hold(slots)
    Message.objects.all().delete()
    run(settler, [(lease, None)])
    wait_until(slots.is_empty)
    assert settler.counts == {"skipped": 1}
