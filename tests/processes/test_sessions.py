"""What dispatchers do in the database: how many sessions they have, in what state, and how often they ask."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from tests.processes.private import Load
from tests.processes.test_outages import check_each_ran_once, complaints
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no list of sessions"),
]

postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="pg_stat_activity is PostgreSQL's")


@postgresql
def test_no_transaction_is_open_while_a_handler_runs(site, journal):
    """Scenario 36: sessions idle in a transaction for 2 s are ended here, and a handler takes 5 s."""
    site.server.set("idle_in_transaction_session_timeout", "2s")
    process = site.dispatch(lease=3)
    found = [site.put("work", {"do": ["ask", ["sleep", 5], "ask"]}) for _ in range(3)]
    journal.wait("start", 3)
    seen = []
    while len(journal.lines("end")) < 3:
        seen += site.server.sessions(
            "application_name = '' AND pid <> pg_backend_pid() AND now() - state_change > interval '500 ms' "
            "AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL)"
        )
        time.sleep(0.2)  # it is sampled
    assert seen == []
    wait_until(lambda: site.settled(*found))
    check_each_ran_once(journal, *found)
    assert complaints(process) == []


@postgresql
@pytest.mark.parametrize("concurrency", [2, 8])
def test_a_dispatcher_has_a_bounded_number_of_sessions_and_leaves_none_behind(site, journal, concurrency):
    """Scenario 37: counted by application name; a second alias is used by the handlers only."""
    mine = "application_name = 'counted'"
    process = site.dispatch(
        query="?application_name=counted",
        concurrency=concurrency,
        changes={"default": {"CONN_MAX_AGE": 0}, "other": {"CONN_MAX_AGE": 0, "NAME": "outbox"}},
    )
    found = [row for topic in ("work", "lane") for row in site.put(topic, {"do": ["ask", "ask other"]}, count=100)]
    most = 0
    while not site.settled(*found[-1:], *found[:1]) or not site.settled(*found):
        most = max(most, len(site.server.sessions(mine)))
    print(f"{concurrency} slots: {most} sessions at most")
    assert most <= 2 * concurrency + 5  # a worker's two; loop, settler, heartbeat, housekeeping, listener
    wait_until(lambda: len(site.server.sessions(mine)) <= 5, 5)
    process.terminate()
    assert process.wait(20) == 0
    wait_until(lambda: site.server.sessions(mine) == [])


def statements(server):
    """How many statements the server has executed so far; PostgreSQL counts transactions, with a delay."""
    if connection.vendor == "postgresql":
        [[count]] = server.say("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'outbox'")
    else:
        [[_, count]] = server.say("SHOW GLOBAL STATUS LIKE 'Questions'")
    return int(count)


def test_doing_nothing_costs_a_statement_a_poll_and_hardly_any_processor_time(site, journal):
    """Scenario 62: and what is scheduled meanwhile is on time."""
    poll, seconds = 1.0, 6.0
    process = site.dispatch(poll=poll, lease=60)
    first = site.put("work")
    wait_until(lambda: site.settled(first))
    scheduled = site.put("work", deliver_at=timedelta(seconds=seconds + 1))
    site.close()
    time.sleep(1.0)  # the listener proves itself
    before, load = statements(site.server), Load(process)
    time.sleep(seconds)  # what it does meanwhile is what this is about
    busy, asked = load(), statements(site.server) - before
    print(
        f"idle: {asked / seconds:.1f} statements a second at a poll interval of {poll:.0f} s, {busy:.2%} of a processor"
    )
    assert asked <= 2 * seconds / poll + 6
    assert busy < 0.03
    [line] = journal.wait("start", key=scheduled.event_key)
    wait_until(lambda: site.settled(scheduled))
    assert line["attempt"] == 1
