"""Processes whose clocks are wrong, or change while they run, by libfaketime: only the database's clock counts."""

import time
from datetime import timedelta

import pytest
from django.db import connection

from outbox.fields import from_micros
from outbox.models import Message
from tests.processes.private import PRIVATE
from tests.processes.servers import library
from tests.running import fresh, outcomes, put, settled
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

servers_only = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has no clock but that of the process that asks"
)
sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="the clock of a server is its own")

HOUR = 3600
# Two seconds before the clocks of New York change, in 2026.
NIGHTS = {"autumn": 1793512798, "spring": 1772953198}


def faked(offset=0, file=None):
    """The environment of a process whose clock is off by so many seconds, or as a file says that may change."""
    moment = {"FAKETIME_TIMESTAMP_FILE": str(file)} if file else {"FAKETIME": f"{offset:+f}"}
    return {
        "LD_PRELOAD": library("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1"),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # setting a clock does not change how long a second is
        "FAKETIME_NO_CACHE": "1",
        **moment,
    }


@servers_only
@pytest.mark.parametrize("offset", [HOUR, -HOUR], ids=["fast", "slow"])
def test_a_dispatcher_whose_clock_is_an_hour_off_steals_nothing_and_delays_nothing(site, journal, gate, offset):
    """Scenario 19: a handler longer than its lease beside it, a retry and a scheduled message of its own."""
    held = site.put("work", {"do": [["wait", gate.path]]})
    site.dispatch(lease=2)
    journal.wait("start")
    site.dispatch(lease=2, environment=faked(offset))
    site.wait_for_dispatchers(2)
    retried = site.put("work", {"do": [["fail", 1]]})
    scheduled = site.put("work", deliver_at=timedelta(seconds=3))
    staged = time.monotonic()
    wait_until(lambda: site.settled(retried, scheduled))
    [start] = journal.lines("start", key=scheduled.event_key)
    assert 2.5 < start["at"] - staged < 8
    assert (fresh(held).attempt, len(journal.lines("start", key=held.event_key))) == (1, 1)
    gate()
    wait_until(lambda: site.settled(held))
    assert fresh(held).attempt == 1
    ages = Message.objects.using(PRIVATE).values_list("settled_at", "staged_at")
    assert all(0 <= (end - start).total_seconds() < 60 for end, start in ages)


@servers_only
def test_a_clock_that_is_set_while_the_process_runs_changes_nothing(site, journal, gate, tmp_path):
    """Scenario 19: it jumps an hour ahead and back again."""
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    process = site.dispatch(lease=2, environment=faked(file=clock))
    held = site.put("work", {"do": [["wait", gate.path]]})
    journal.wait("start")
    other = site.dispatch(lease=2)
    site.wait_for_dispatchers(2)
    for offset in ("+1h", "-1h", "+0"):
        clock.write_text(f"{offset}\n")
        found = [site.put("work", {"do": [["fail", 1]]}) for _ in range(4)]
        began = time.monotonic()
        wait_until(lambda rows=found: site.settled(*rows))
        assert time.monotonic() - began < 10
        assert {fresh(each).attempt for each in found} == {2}
        renewed = fresh(held).due_at
        wait_until(lambda since=renewed: fresh(held).due_at > since)
    assert fresh(held).attempt == 1
    gate()
    wait_until(lambda: site.settled(held))
    assert process.poll() is other.poll() is None


@sqlite
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("night", NIGHTS)
def test_in_the_nights_when_clocks_change_a_killed_dispatcher_is_inherited_after_its_lease(
    dispatch, journal, gate, night
):
    """Scenario 21: USE_TZ=False; killed just before the change; lease 4 s, and a retry after it."""
    started = time.time()
    environment = {
        **faked(NIGHTS[night] - started - 1),
        "USE_TZ": "False",
        "TIME_ZONE": "America/New_York",
        "OUTBOX_OPTIONS": '{"BACKOFF_BASE": 2.0}',
    }
    row = put("work", {"do": [["wait", gate.path], ["fail", 2]]}, event_key="orphan")
    Message.objects.update(due_at=from_micros((NIGHTS[night] - HOUR) * 1_000_000))
    first = dispatch(lease=4, environment=environment)
    [start] = journal.wait("start")
    first.kill()
    killed = time.monotonic()
    first.wait()
    gate()
    dispatch(lease=4, environment=environment | faked(NIGHTS[night] - started - 1))
    takeover = journal.wait("start", 2)[1]
    assert 2.0 < takeover["at"] - start["at"] < 15, "neither at once nor an hour late"
    retry = journal.wait("start", 3, seconds=30)[2]
    assert retry["at"] - takeover["at"] < 15
    wait_until(lambda: settled(row))
    assert outcomes(row) == ["lapsed", "failed", "delivered"]
    assert killed - start["at"] < 2
