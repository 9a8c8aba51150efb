"""Dispatchers in containers: each in a process namespace of its own, with one host name, and with process id 1."""

import os
import signal
import time

import pytest
from django.db import connection

from outbox.models import Dispatcher
from tests.processes.private import PRIVATE
from tests.processes.servers import family, program
from tests.running import fresh, outcomes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(connection.vendor == "sqlite", reason="containers do not share a file"),
]


@pytest.fixture
def contain(site):
    """Start a dispatcher as process 1 of a namespace; whoever kills the command kills all of it."""
    words = (program("unshare"), "--fork", "--pid", "--mount-proc", "--kill-child")

    def start(**options):
        return site.dispatch(before=words, **options)

    return start


def test_dispatchers_with_one_host_name_and_process_id_share_the_work_and_inherit(site, contain, journal, gate):
    """Scenario 22: a hundred messages; one is killed in a handler and comes back at once under the same name and id."""
    held = site.put("work", {"do": [["wait", gate.path]]}, event_key="held")
    first = contain(lease=3)
    [start] = journal.wait("start")
    taken = fresh(held)
    second = contain(lease=3)
    site.wait_for_dispatchers(2)
    found = site.put("work", {"do": [["sleep", 0.01]]}, count=100)
    wait_until(lambda: site.settled(*found))
    assert {(each.host, each.pid) for each in site.alive()} == {(taken.leased_by.split(":")[0], 1)}
    first.kill()
    first.wait()
    contain(lease=3)
    Dispatcher.objects.using(PRIVATE).all().delete()  # nothing depends on the rows of the registry
    gate()
    wait_until(lambda: site.settled(held))
    again = journal.lines("start", key="held")
    assert len(again) == 2
    assert again[1]["at"] - start["at"] > 1.9, "not before its lease was over"
    assert outcomes(held) == ["lapsed", "delivered"]
    assert fresh(held).leased_by != taken.leased_by
    assert all(len(journal.lines("start", key=each.event_key)) == 1 for each in found)
    assert second.poll() is None


def test_process_1_of_a_container_obeys_the_stop_signal(site, contain, journal):
    """Scenarios 22 and 28: the kernel shields process 1 from signals without a handler."""
    held = site.put("work", {"do": [["sleep", 1]]})
    process = contain()
    journal.wait("start")
    [_, first, *_] = family(process.pid)  # unshare itself comes before
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: process.poll() is not None)
    assert site.settled(held)
    assert "delivered 1" in process.output()
    began = time.monotonic()
    assert site.alive() == []
    assert time.monotonic() - began < 5
