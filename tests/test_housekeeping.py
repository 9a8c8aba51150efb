"""Housekeeping survives the absence of its database, and makes up for it soon."""

import logging

import pytest
from django.db import OperationalError

from outbox import housekeeping, outages
from outbox.housekeeping import Housekeeping
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def keeping(monkeypatch):
    """Housekeeping with one duty, due every 100 s and now."""
    monkeypatch.setattr(outages, "_told_at", {})
    monkeypatch.setattr(housekeeping, "AGAIN_AFTER", 0.02)
    monkeypatch.setattr(housekeeping.random, "uniform", lambda first, last: 0.0)
    started = []

    def start(duty):
        keeper = Housekeeping(using="default", name="worker")
        keeper._duties = [(duty, 100.0)]
        keeper.start()
        started.append(keeper)
        return keeper

    yield start
    for keeper in started:
        keeper.stop(20)
        assert not keeper._thread.is_alive()


def test_what_an_outage_prevented_is_done_soon_after_and_told_once(keeping, caplog):
    """Scenario 30: and not only when the duty is due again."""
    failures = [OperationalError("connection refused") for _ in range(4)]
    done = []

    def duty():
        if failures:
            raise failures.pop()
        done.append(1)

    with caplog.at_level(logging.INFO, "outbox"):
        keeping(duty)
        wait_until(lambda: done)
    assert [record.levelname for record in caplog.records if record.name == "outbox"][:1] == ["WARNING"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_another_fault_is_told_and_put_off(keeping, caplog):
    def duty():
        raise ValueError("a fault of ours")

    keeper = keeping(duty)
    wait_until(lambda: any(record.exc_info for record in caplog.records))
    assert keeper._thread.is_alive()
