"""The database goes away, turns read-only, ends sessions or refuses them; dispatchers go on by themselves.

OUTBOX_TEST_OUTAGE   seconds that the longest outage lasts; 8
"""

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import Error, connection, connections

from outbox.models import Attempt, Message
from tests.processes.private import PRIVATE, Load
from tests.running import fresh
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

OUTAGE = float(os.environ.get("OUTBOX_TEST_OUTAGE", "8"))
SOON = 5.0  # seconds within which work must be resumed; in tests with a margin for a crowded machine
MARGIN = 3.0

postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL's own trouble")
mariadb = pytest.mark.skipif(connection.vendor != "mysql", reason="MariaDB's own trouble")


def complaints(process):
    """What a dispatcher complained of, by line."""
    levels = (" WARNING ", " ERROR ", " CRITICAL ", "Traceback")
    return [line for line in process.output().splitlines() if any(level in line for level in levels)]


def check_each_ran_once(journal, *found):
    for row in found:
        assert len(journal.lines("start", key=row.event_key)) == 1
        assert (fresh(row).attempt, fresh(row).spent, fresh(row).state) == (1, 1, "delivered")


# --- the server is down -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_long_outage_costs_neither_processor_time_nor_attempts_and_is_over_within_seconds(site, journal, gate):
    """Scenarios 30, 31 and 32: idle slots, a handler that ends meanwhile, and one that goes on."""
    process = site.dispatch()
    before = site.put("work")
    wait_until(lambda: site.settled(before))
    ends = site.put("work", {"do": [["sleep", 1]]})
    goes_on = site.put("work", {"do": [["wait", gate.path]]})
    journal.wait("start", 3)
    site.server.stop()
    journal.wait("end", 2)
    load = Load(process)
    time.sleep(OUTAGE)  # the length of the outage is what this is about
    busy = load()
    site.server.start()
    back = time.monotonic()
    site.close()
    after = site.put("work")
    [line] = journal.wait("start", key=after.event_key)
    first = line["at"] - back
    gate()
    wait_until(lambda: site.settled(ends, goes_on, after))
    print(f"{OUTAGE:.0f} s without {connection.vendor}: first delivery {first:.2f} s after, {busy:.2%} of a processor")
    assert first < SOON + MARGIN
    assert busy < 0.05
    check_each_ran_once(journal, before, ends, goes_on, after)
    assert len(complaints(process)) == 1, "one warning per outage"
    assert process.poll() is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"CONN_MAX_AGE": 0, "CONN_HEALTH_CHECKS": False}, id="new connections"),
        pytest.param({"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": False}, id="connections for ever"),
        pytest.param(
            {"CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 1, "max_size": 9}}}, id="pool", marks=postgresql
        ),
    ],
)
def test_idle_and_working_dispatchers_outlive_every_kind_of_restart(site, journal, changes):
    """Scenario 30: whatever connections the project keeps."""
    process = site.dispatch(changes={"default": changes})
    first = site.put("work")
    wait_until(lambda: site.settled(first))
    for end in (site.server.stop, site.server.stop_immediately, site.server.kill):
        working = site.put("work", {"do": ["ask", ["sleep", 0.5]]})
        journal.wait("start", key=working.event_key)
        end()
        site.server.start()
        back = time.monotonic()
        site.close()
        later = site.put("work")
        wait_until(lambda rows=(working, later): site.settled(*rows))
        assert time.monotonic() - back < SOON + MARGIN
        check_each_ran_once(journal, working, later)
    assert process.poll() is None
    assert not [line for line in complaints(process) if " WARNING " not in line]


def test_a_dispatcher_that_starts_without_its_server_waits_for_it(site, journal):
    """Scenario 31."""
    row = site.put("work")
    site.server.stop()
    process = site.dispatch()
    wait_until(lambda: "is away" in process.output())
    load = Load(process)
    time.sleep(2.0)  # what it does meanwhile is what this is about
    assert load() < 0.1
    site.server.start()
    back = time.monotonic()
    site.close()
    wait_until(lambda: site.settled(row))
    assert time.monotonic() - back < SOON + MARGIN
    assert process.output().count("is away") == 1
    assert not [line for line in complaints(process) if " WARNING " not in line]


def test_a_server_that_hangs_for_less_than_a_lease_is_invisible(site, journal):
    process = site.dispatch(lease=15)
    held = site.put("work", {"do": [["sleep", 1]]})
    journal.wait("start")
    site.server.freeze()
    journal.wait("end")
    time.sleep(2.0)  # the length of the freeze
    site.server.thaw()
    later = site.put("work")
    wait_until(lambda: site.settled(held, later))
    check_each_ran_once(journal, held, later)
    assert complaints(process) == []


# --- the server refuses -----------------------------------------------------------------------------------------------


def test_a_fail_over_to_a_read_only_server_and_back(site, journal):
    """Scenario 31: it answers, but writes nothing. Nothing is charged for a claim that was not written."""
    process = site.dispatch()
    ends = site.put("work", {"do": [["sleep", 1]]})
    journal.wait("start")
    due = site.put("work", deliver_at=timedelta(seconds=1))
    site.server.set_read_only(True)
    journal.wait("end")
    load = Load(process)
    time.sleep(4.0)  # meanwhile it is tried again and again
    assert load() < 0.1
    assert journal.lines("start", key=due.event_key) == []
    assert (fresh(due).attempt, fresh(due).spent) == (0, 0)
    site.server.set_read_only(False)
    back = time.monotonic()
    wait_until(lambda: site.settled(ends, due))
    assert time.monotonic() - back < SOON + MARGIN
    check_each_ran_once(journal, ends, due)
    assert len(complaints(process)) == 1
    assert process.poll() is None


def test_a_server_that_takes_no_more_connections_is_waited_for(site, journal):
    """Scenario 37: "too many clients"; the dispatcher has lost its own sessions meanwhile."""
    process = site.dispatch()
    held = site.put("work", {"do": [["sleep", 1]]})
    journal.wait("start")
    later = site.put("work", deliver_at=timedelta(seconds=1))
    site.close()
    with crowded(site):
        journal.wait("end")
        time.sleep(3.0)  # meanwhile it is refused
        assert journal.lines("start", key=later.event_key) == []
    back = time.monotonic()
    wait_until(lambda: site.settled(held, later))
    assert time.monotonic() - back < SOON + MARGIN
    check_each_ran_once(journal, held, later)
    assert len(complaints(process)) == 1


@contextmanager
def crowded(site):
    """All connections that the tests' user may have are taken by somebody else."""
    server, taken = site.server, []
    if connection.vendor == "postgresql":
        server.say("ALTER ROLE outbox CONNECTION LIMIT 0")
    else:
        server.set("max_connections", 10)
    for pid, *_ in server.sessions():
        server.end_session(pid)
    try:
        while len(taken) < 10:
            other = connections.create_connection(PRIVATE)
            try:
                other.ensure_connection()
            except Error:
                if connection.vendor == "postgresql":
                    break
                time.sleep(0.05)  # the dispatcher was quicker: throw it out
                for pid, *_ in server.sessions("command = 'Sleep'"):
                    if pid not in {str(each.connection.thread_id()) for each in taken}:
                        server.end_session(pid)
            else:
                taken.append(other)
        yield
    finally:
        for other in taken:
            other.close()
        server.reset()


def test_sessions_that_are_ended_one_by_one_cost_nothing(site, journal):
    """Scenarios 30, 32 and 34: each thread's session in turn, the listener's too."""
    process = site.dispatch(lease=3, poll=0.3, options={"SWEEP_EVERY": 1})
    found = [site.put("work")]
    wait_until(lambda: site.settled(*found))
    ended = 0
    for _ in range(2):
        working = [site.put("work", {"do": ["ask", ["sleep", 0.7], "ask"]}) for _ in range(2)]
        wait_until(lambda rows=working: all(journal.lines("start", key=each.event_key) for each in rows))
        site.close()
        for pid, *_ in site.server.sessions():
            site.server.end_session(pid)
            ended += 1
            found.append(site.put("work"))
            site.close()
        found += working
    wait_until(lambda: site.settled(*found))
    assert ended >= 8  # loop, settler, heartbeat, workers; and the listener
    assert process.poll() is None
    attempts = {each.event_key: fresh(each).attempt for each in found}
    failed = set(Attempt.objects.using(PRIVATE).filter(outcome="failed").values_list("message__event_key", flat=True))
    assert {key for key, attempt in attempts.items() if attempt > 1} == failed  # a handler's own session was ended
    assert not [line for line in complaints(process) if " WARNING " not in line and "Message" not in line]
    if connection.vendor == "postgresql":
        wait_until(lambda: any("LISTEN" in said for _, _, state, said in site.server.sessions("state = 'idle'")))


# --- locks ------------------------------------------------------------------------------------------------------------


def test_lock_timeouts_during_claim_renewal_and_settlement_cost_nothing(site, journal):
    """Scenarios 17 and 43: the table is locked by somebody for longer than a statement waits."""
    if connection.vendor == "postgresql":
        site.server.set("lock_timeout", "200ms")
    else:
        site.server.set("innodb_lock_wait_timeout", 1)
        site.server.set("lock_wait_timeout", 1)
    site.close()
    process = site.dispatch(lease=6)
    ends = site.put("work", {"do": [["sleep", 1]]})
    journal.wait("start")
    due = site.put("work", deliver_at=timedelta(seconds=1))
    with locked_table():
        journal.wait("end")
        load = Load(process)
        time.sleep(3.0)  # meanwhile each statement is refused
        assert load() < 0.3
        assert journal.lines("start", key=due.event_key) == []
    wait_until(lambda: site.settled(ends, due))
    check_each_ran_once(journal, ends, due)
    assert process.poll() is None
    assert not [line for line in complaints(process) if " WARNING " not in line]


@contextmanager
def locked_table():
    other = connections.create_connection(PRIVATE)
    table = other.ops.quote_name(Message._meta.db_table)
    with other.cursor() as cursor:
        if other.vendor == "mysql":
            cursor.execute(f"LOCK TABLES {table} WRITE")
        else:
            cursor.execute("SET lock_timeout TO 0; BEGIN")
            cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
    yield
    other.close()


@pytest.mark.timeout(180)
def test_somebody_who_locks_rows_in_the_wrong_order_all_the_time_stops_nothing(site, journal):
    """Scenario 43: who waits for no row that somebody has locked is hardly ever part of a deadlock."""
    before = site.server.deadlocks()
    found = [row for key in range(15) for row in site.put("lane", {}, count=20, ordering_key=str(key))]
    adversary = Adversary()
    processes = [site.dispatch(lease=10, concurrency=8) for _ in range(3)]
    try:
        wait_until(lambda: not Message.objects.using(PRIVATE).pending().exists(), 120)
    finally:
        adversary.stop()
    seen = site.server.deadlocks() - before
    print(f"{seen} deadlocks in {adversary.rounds} rounds, of which the adversary lost {adversary.lost}")
    assert adversary.rounds > 0
    starts = journal.keys("start")
    assert sorted(starts) == sorted(each.event_key for each in found)
    assert set(Message.objects.using(PRIVATE).values_list("state", "spent")) == {("delivered", 1)}
    assert all(each.poll() is None for each in processes)
    assert not [line for each in processes for line in complaints(each) if " WARNING " not in line]


class Adversary:
    """Locks the first rows in work, the last one first, for as long as it is let."""

    def __init__(self):
        self.lost = self.rounds = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self):
        self._stopped.set()
        self._thread.join()

    def _work(self):
        other = connections.create_connection(PRIVATE)
        table = other.ops.quote_name(Message._meta.db_table)
        first = f"SELECT id FROM {table} WHERE state = 'pending' AND due_at IS NOT NULL ORDER BY id LIMIT 8"
        other.ensure_connection()
        while not self._stopped.wait(0.002):
            try:
                with other.cursor() as cursor:
                    cursor.execute(first)
                    ids = [pk for (pk,) in cursor.fetchall()]
                other.set_autocommit(False)
                for pk in reversed(ids):
                    with other.cursor() as cursor:
                        cursor.execute(f"SELECT id FROM {table} WHERE id = %s FOR UPDATE", [pk])
                self.rounds += bool(ids)
            except Error:
                self.lost += 1
            finally:
                other.rollback()
                other.set_autocommit(True)
        other.close()


# --- MariaDB's own ----------------------------------------------------------------------------------------------------


@mariadb
def test_sessions_that_end_when_idle_are_opened_again_without_a_word(site, journal):
    """Scenario 32: wait_timeout=2 with a handler of 5 s."""
    site.server.set("wait_timeout", 2)
    process = site.dispatch(lease=20, poll=4)
    found = [site.put("work", {"do": ["ask", ["sleep", 5]]}), site.put("atomic", {"do": [["stage", "work"]]})]
    wait_until(lambda: site.settled(*found))
    time.sleep(2.5)  # now all sessions are gone
    found.append(site.put("work", {"do": ["ask"]}))
    wait_until(lambda: site.settled(*found))
    check_each_ran_once(journal, *found)
    assert complaints(process) == []


@mariadb
def test_a_packet_limit_lowered_meanwhile_stops_nothing_but_what_exceeds_it(site, journal):
    """Scenario 12: what was staged stays deliverable, and errors too long for the server are recorded without text."""
    big = site.put("work", {"text": "x" * 300_000})
    site.server.set("max_allowed_packet", 16 * 1024)
    process = site.dispatch(lease=5, options={"MAX_TRACEBACK_CHARS": 60_000, "MAX_ERROR_CHARS": 60_000})
    fails = [site.put("killer", {"do": [["shout", 50_000]]}) for _ in range(3)]
    small = [site.put("work") for _ in range(5)]
    wait_until(lambda: site.settled(*small, big))
    wait_until(lambda: site.settled(*fails))
    assert {(fresh(each).state, fresh(each).attempt, fresh(each).spent) for each in fails} == {("dead", 3, 3)}
    check_each_ran_once(journal, *small, big)
    assert process.poll() is None
