"""The connection breaks exactly at a COMMIT: before the server hears of it, or before its answer arrives.

A proxy between dispatcher and server does that once at each kind of write.
"""

import time

import pytest
from django.db import Error, connection, connections, transaction

from outbox import stage
from outbox.models import Message
from tests.processes.private import PRIVATE
from tests.processes.proxy import Proxy
from tests.running import fresh
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]

CLAIM = rb"UPDATE\W+outbox_message\W.*leased_by"
CHARGE = rb"SET\W+spent\W+=\W+(outbox_message\W+)?spent\W+\+ 1\b"
SETTLE = rb"UPDATE\W+outbox_message\W.*settled_at"
HAND_OVER = rb"settled_at.*leased_by"
ATOMIC = rb"INSERT INTO\W+outbox_message.*settled_at"
STAGE = rb"INSERT INTO\W+outbox_message"

lost = pytest.mark.parametrize("reply", [True, False], ids=["answer lost", "request lost"])


@pytest.fixture
def proxy(own_server):
    proxy = Proxy(own_server.port)
    yield proxy
    proxy.close()


def check(site, process, found):
    """Everything is as if nothing had happened, and nobody speaks of lost leases."""
    wait_until(lambda: site.settled(*found))
    assert {(fresh(each).state, fresh(each).spent) for each in found} == {("delivered", 1)}
    assert "lost its lease" not in process.output()
    assert process.poll() is None


@lost
@pytest.mark.parametrize("write", [CLAIM, SETTLE], ids=["claim", "settlement"])
@pytest.mark.parametrize("topic", ["work", "lane"])
def test_a_claim_or_a_settlement_that_breaks_at_its_commit_is_charged_and_done_once(
    site, proxy, journal, write, topic, reply
):
    """Scenario 32: nothing is charged for a claim that was not written, and a settlement is recognised."""
    cut = proxy.cut(write, reply=reply)
    key = {"ordering_key": "k"} if topic == "lane" else {}
    found = [site.put(topic, event_key=f"{n}", **key) for n in range(3)]
    process = site.dispatch(url=site.server.url(port=proxy.port))
    check(site, process, found)
    assert cut.done == 1
    starts = journal.keys("start")
    assert (starts if topic == "lane" else sorted(starts)) == ["0", "1", "2"]
    assert {fresh(each).attempt for each in found} == {1}


@lost
def test_a_hand_over_that_breaks_at_its_commit_keeps_its_lane_going(site, proxy, journal, reply):
    """Scenario 32: what was handed over is held, by the process that settled its predecessor."""
    cut = proxy.cut(HAND_OVER, reply=reply)
    found = [site.put("lane", event_key=f"{n}", ordering_key="k") for n in range(4)]
    began = time.monotonic()
    process = site.dispatch(url=site.server.url(port=proxy.port), lease=20)
    check(site, process, found)
    assert cut.done == 1
    assert journal.keys("start") == ["0", "1", "2", "3"]
    assert time.monotonic() - began < 20, "nobody waited for the end of a lease"


@lost
def test_a_charge_that_breaks_at_its_commit_charges_once(site, proxy, journal, reply):
    """Scenario 32: of messages that were claimed ahead."""
    cut = proxy.cut(CHARGE, reply=reply)
    found = site.put("work", {"do": [["sleep", 0.02]]}, count=30)
    process = site.dispatch(url=site.server.url(port=proxy.port), concurrency=2)
    check(site, process, found)
    assert cut.done == 1
    assert len(journal.lines("start")) == 30


@lost
def test_an_atomic_handler_whose_commit_breaks_has_its_effect_once(site, proxy, journal, reply):
    """Scenario 32: committed, it is not done again; not committed, it is, and leaves one effect."""
    row = site.put("atomic", {"do": [["stage", "work"]]}, event_key="atomic")
    cut = proxy.cut(ATOMIC, reply=reply)
    process = site.dispatch(url=site.server.url(port=proxy.port))
    wait_until(lambda: site.settled(row))
    wait_until(lambda: not Message.objects.using(PRIVATE).pending().exists())
    assert cut.done == 1
    assert fresh(row).state == "delivered"
    assert len(journal.lines("start", key="atomic")) == (1 if reply else 2)
    assert len(journal.lines("start", key="atomic:next")) == 1
    assert Message.objects.using(PRIVATE).count() == 2
    assert process.poll() is None


@lost
def test_staging_whose_commit_breaks_can_be_done_again_under_its_key(site, proxy, journal, reply):
    """Scenario 32, for the caller: the error is its own, and the event key makes a second try safe."""
    site.close()
    settings = connections[PRIVATE].settings_dict
    settings["PORT"] = proxy.port
    cut = proxy.cut(STAGE, reply=reply)
    with pytest.raises(Error), transaction.atomic(using=PRIVATE):
        stage("work", {}, event_key="once", using=PRIVATE)
    site.close()
    with transaction.atomic(using=PRIVATE):
        second = stage("work", {}, event_key="once", using=PRIVATE)
    assert cut.done == 1
    assert second.created is not reply
    assert Message.objects.using(PRIVATE).count() == 1
