"""Behind a transaction pooler, and out of a pool that is too small. PostgreSQL only."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from outbox.models import Message
from tests.processes.private import PRIVATE
from tests.processes.servers import NAME, USER, PgBouncer, program
from tests.processes.test_outages import check_each_ran_once, complaints
from tests.running import fresh
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="PgBouncer and psycopg's pool are PostgreSQL's"),
]

POLL = 0.5


@pytest.fixture
def pooler(own_server):
    pooler = PgBouncer(own_server)
    yield pooler
    pooler.remove()


def latencies(site, journal, count):
    """Seconds from the commit to the start of so many messages, staged one after another."""
    found = []
    for _ in range(count):
        row = site.put("work", {"do": ["ask"]})
        committed = time.monotonic()
        [line] = journal.wait("start", key=row.event_key)
        found.append(line["at"] - committed)
        wait_until(lambda row=row: site.settled(row))
        check_each_ran_once(journal, row)
    return found


def test_behind_a_transaction_pooler_everything_is_delivered_within_the_poll_interval(site, pooler, journal):
    """Scenario 33: LISTEN succeeds and hears nothing; that is found out, and polling goes on."""
    options = {"DISABLE_SERVER_SIDE_CURSORS": True}
    process = site.dispatch(url=pooler.url(), poll=POLL, lease=2, changes={"default": options})
    wait_until(lambda: "transaction pooler" in process.output())
    found = latencies(site, journal, 10)
    print(f"behind PgBouncer: {max(found):.2f} s at most, with a poll interval of {POLL} s")
    assert max(found) < 1.3 * POLL + 1.0
    assert site.alive()[0].wakeup == "poll"
    held = site.put("work", {"do": [["sleep", 3]]})  # longer than its lease
    lane = [site.put("lane", {"do": [["fail", 1]]}, ordering_key="k") for _ in range(3)]
    atomic = site.put("atomic", {"do": [["stage", "work"]]}, event_key="atomic")
    wait_until(lambda: site.settled(held, atomic, *lane))
    check_each_ran_once(journal, held, atomic)
    assert len(complaints(process)) == 1 + len(lane)


def test_no_session_state_leaks_through_a_transaction_pooler(site, pooler, journal):
    """Scenario 33: no setting, no advisory lock, no open cursor, no subscription is left to the next client."""
    ask = (
        "SELECT (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name NOT IN "
        "('TimeZone', 'client_encoding', 'DateStyle', 'application_name')), "
        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'), (SELECT count(*) FROM pg_cursors), "
        "(SELECT count(*) FROM pg_prepared_statements)"
    )
    site.dispatch(url=pooler.url(), poll=0.1, changes={"default": {"DISABLE_SERVER_SIDE_CURSORS": True}})
    found = [site.put("work") for _ in range(20)] + [site.put("lane", ordering_key="k") for _ in range(10)]
    site.spawn("outbox_prune", url=pooler.url()).wait(30)
    wait_until(lambda: site.settled(*found))
    shell = (program("psql"), "-X", "-A", "-t", "-h", "127.0.0.1", "-p", pooler.port, "-U", USER, NAME, "-c", ask)
    answers = {pooler.run(*shell).strip() for _ in range(10)}
    assert answers == {"0|0|0|0"}


def test_a_listener_of_its_own_alias_is_as_quick_behind_a_pooler_as_without(site, pooler, journal):
    """Scenario 33: the way out."""
    direct = {"HOST": "127.0.0.1", "PORT": site.server.port}
    process = site.dispatch(
        url=pooler.url(),
        poll=10,
        changes={"default": {"DISABLE_SERVER_SIDE_CURSORS": True}, "direct": direct},
        options={"LISTEN_DATABASE": "direct"},
    )
    first = site.put("work")
    wait_until(lambda: site.settled(first))
    wait_until(lambda: any("LISTEN" in said for *_, said in site.server.sessions()))
    found = latencies(site, journal, 10)
    print(f"behind PgBouncer with LISTEN_DATABASE: {max(found):.3f} s at most")
    assert sorted(found)[7] < 2.0, "most of them are not left to the poll"
    assert complaints(process) == []


def test_a_pooler_that_loses_its_server_is_an_outage_like_any_other(site, pooler, journal):
    """Scenarios 30 and 33."""
    process = site.dispatch(
        url=pooler.url(),
        poll=POLL,
        changes={"default": {"DISABLE_SERVER_SIDE_CURSORS": True}},
        options={"WAKEUP": False},
    )
    held = site.put("work", {"do": [["sleep", 1]]})
    journal.wait("start")
    due = site.put("work", deliver_at=timedelta(seconds=1))
    site.server.kill()
    journal.wait("end")
    time.sleep(2.0)  # the length of the outage
    site.server.start()
    back = time.monotonic()
    site.close()
    wait_until(lambda: site.settled(held, due))
    assert time.monotonic() - back < 8
    check_each_ran_once(journal, held, due)
    assert len(complaints(process)) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_pool_that_is_too_small_slows_down_and_stops_nothing(site, journal, size):
    """Scenario 37: no thread of ours keeps to itself what another one needs."""
    pool = {"CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 1, "max_size": size, "timeout": 3}}}
    process = site.dispatch(changes={"default": pool}, lease=6, poll=0.2, concurrency=4)
    found = [site.put("work", {"do": [["sleep", 0.2]]}) for _ in range(10)]
    found += [site.put("lane", ordering_key="k") for _ in range(5)]
    wait_until(lambda: not Message.objects.using(PRIVATE).pending().exists(), 40)
    assert {fresh(each).state for each in found} == {"delivered"}
    check_each_ran_once(journal, *found)
    assert process.poll() is None
    busy = [row for row in site.server.sessions(f"usename = '{USER}'") if "LISTEN" not in row[3]]
    assert len(busy) <= size + 1  # and the one of this test
