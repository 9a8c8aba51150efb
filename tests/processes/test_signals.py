"""Stop signals to a real dispatcher process."""

import signal
import time

import pytest
from django.db import connection

from outbox.models import Dispatcher, Message, State
from tests.running import fresh, outcomes, put, settled, state
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.django_db(transaction=True)]


def wait_for_exit(process, seconds=20):
    return wait_until(lambda: process.poll() is not None, seconds) and process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_dispatcher_ends_at_once(dispatch, number):
    """Scenario 28, a and f."""
    process = dispatch(poll=30)
    wait_until(lambda: Dispatcher.objects.exists())
    sent = time.monotonic()
    process.send_signal(number)
    assert wait_for_exit(process) == 0
    assert time.monotonic() - sent < 3
    assert not Dispatcher.objects.exists()
    assert "processed 0" in process.output()


def test_a_running_handler_finishes_and_nothing_new_starts(dispatch, journal, gate):
    """Scenario 28 b."""
    running = put("lane", {"do": [["wait", gate.path]]}, ordering_key="k")
    behind = put("lane", {}, ordering_key="k")
    process = dispatch()
    journal.wait("start")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Stopping" in process.output())
    late = put("work", {})
    gate()
    assert wait_for_exit(process) == 0
    assert (state(running), state(behind), state(late)) == (State.DELIVERED, State.PENDING, State.PENDING)
    assert journal.keys("start") == [running.event_key]
    assert "processed 1, delivered 1" in process.output()


@pytest.mark.slow
def test_what_outlasts_the_grace_is_given_back_and_taken_up_at_once(dispatch, journal):
    """Scenario 28 c: the attempt is counted once, and costs nothing."""
    row = put("work", {"do": ["forever"]})
    process = dispatch(grace=0.5, lease=60)
    journal.wait("start")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process) == 0
    assert time.monotonic() - sent < 5
    row = fresh(row)
    assert (row.state, row.lease_token, row.attempt, row.spent) == (State.PENDING, None, 1, 0)
    assert outcomes(row) == ["interrupted"]
    Message.objects.filter(pk=row.pk).update(payload={})
    dispatch("--drain")
    wait_until(lambda: settled(row))
    assert fresh(row).attempt == 2


def test_the_second_signal_ends_it_at_once(dispatch, journal):
    """Scenarios 28 d and P12."""
    put("work", {"do": ["forever"]})
    process = dispatch(grace=60)
    journal.wait("start")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Stopping" in process.output())
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process, 5) == 128 + signal.SIGTERM


def test_a_dispatcher_without_its_database_ends(dispatch, tmp_path):
    """Scenario 28 e."""
    urls = {
        "sqlite": f"sqlite:///{tmp_path}/missing/db.sqlite3",
        "postgresql": "postgres://nobody@127.0.0.1:1/nothing",
        "mysql": "mysql://nobody@127.0.0.1:1/nothing",
    }
    process = dispatch(environment={"DATABASE_URL": urls[connection.vendor]})
    wait_until(lambda: "is away" in process.output())
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process) == 0
    assert time.monotonic() - sent < 8
    assert process.output().count("is away") == 1


@pytest.mark.slow
def test_a_dispatcher_that_may_not_wait_for_its_database_ends_with_1(dispatch, tmp_path):
    urls = {
        "sqlite": f"sqlite:///{tmp_path}/missing/db.sqlite3",
        "postgresql": "postgres://nobody@127.0.0.1:1/nothing",
        "mysql": "mysql://nobody@127.0.0.1:1/nothing",
    }
    process = dispatch("--exit-on-db-error", environment={"DATABASE_URL": urls[connection.vendor]})
    assert wait_for_exit(process) == 1


@pytest.mark.slow
def test_usage_errors_exit_with_2(dispatch):
    assert wait_for_exit(dispatch("--topic", "nothing.*")) == 2
    assert wait_for_exit(dispatch("--once", "--drain")) == 2


def test_a_stuck_handler_does_not_hold_the_process(dispatch, journal):
    """Scenario 18: other topics progress, and the stop ends within its grace."""
    stuck = [put("slow", {"do": ["forever"]}) for _ in range(2)]
    quick = [put("work", {}) for _ in range(10)]
    process = dispatch(concurrency=4, grace=2)
    wait_until(lambda: settled(*quick))
    wait_until(lambda: all("timed_out" in outcomes(each) for each in stuck))
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process, 10) in (0, 1)  # 1: all threads were stuck by then
    assert all(fresh(each).lease_token is None for each in stuck)
