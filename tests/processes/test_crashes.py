"""Dispatchers that die, freeze, or lie about who they are and what time it is."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from django.db import connection

from outbox.models import Dispatcher, Message, State
from tests import rows
from tests.conftest import ROOT
from tests.processes import jobs
from tests.running import fresh, outcomes, put, settled, state
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.django_db(transaction=True)]

servers_only = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has no clock but that of the process that asks"
)


def test_what_a_killed_dispatcher_held_is_delivered_by_the_next(dispatch, journal, gate):
    """Scenario 29: all slots full, kill -9, one new dispatcher; within lease and poll, at attempt 2."""
    found = [put("work", {"do": [["wait", gate.path]]}) for _ in range(2)]
    found += [put("lane", {"do": [["wait", gate.path]]}, ordering_key=key) for key in "ab"]
    behind = put("lane", {}, ordering_key="a")
    first = dispatch(lease=1)
    journal.wait("start", 4)
    first.kill()
    first.wait()
    gate()
    dispatch(lease=1)
    wait_until(lambda: settled(*found, behind))
    assert {fresh(each).attempt for each in found} == {2}
    assert [outcomes(each) for each in found] == [["lapsed", "delivered"]] * 4
    assert fresh(behind).attempt == 1
    assert len(journal.lines("start")) == 9


@pytest.mark.parametrize(
    "end", ["kill", pytest.param("exit", marks=pytest.mark.slow), pytest.param("crash", marks=pytest.mark.slow)]
)
def test_a_message_that_kills_its_worker_dies_after_its_budget_and_takes_nobody_along(dispatch, journal, end):
    """Scenarios 23 and P1."""
    killer = put("killer", {"do": [end]}, event_key="killer")
    healthy = [put("work", {}) for _ in range(10)]
    starts = 0
    process = None
    deadline = time.monotonic() + 60
    while not settled(killer):
        assert time.monotonic() < deadline
        if process is None or process.poll() is not None:
            starts += 1
            assert starts < 9, "it is started for ever"
            process = dispatch(lease=0.6)
        time.sleep(0.05)
    wait_until(lambda: settled(*healthy))
    killer = fresh(killer)
    assert (killer.state, killer.reason, killer.spent) == (State.DEAD, "crashed", 3)
    assert len(journal.lines("start", key="killer")) == 3
    assert outcomes(killer)[-1] == "crashed"
    assert {fresh(each).state for each in healthy} == {State.DELIVERED}


def freeze(process):
    """Stop a process, and wait until each of its threads has stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: all(") T " in (each / "stat").read_text() for each in tasks.iterdir()))


@pytest.mark.slow
def test_a_frozen_worker_that_wakes_up_changes_nothing(dispatch, journal, gate):
    """Scenarios 15 and P4: SIGSTOP beyond the lease; one terminal state, that of the other."""
    steps = [["wait", gate.path], "check"]
    found = {
        "succeeds": put("work", {"do": steps}, event_key="succeeds"),
        "fails": put("work", {"do": [*steps, ["fail", 1]]}, event_key="fails"),
        "ordered": put("lane", {"do": steps}, event_key="ordered", ordering_key="k"),
    }
    frozen = dispatch(lease=1)
    journal.wait("start", 3)
    freeze(frozen)
    gate()
    other = dispatch(lease=1)
    wait_until(lambda: settled(*found.values()))
    before = {key: Message.objects.filter(pk=row.pk).values().get() for key, row in found.items()}
    frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: frozen.output().count("lost its lease") >= 3)
    assert {key: Message.objects.filter(pk=row.pk).values().get() for key, row in found.items()} == before
    assert {state(row) for row in found.values()} == {State.DELIVERED}
    assert len(journal.lines("lost")) == 3  # it was told, in the moment it woke up
    assert frozen.output().count("lost its lease") == 3
    other.send_signal(signal.SIGTERM)
    wait_until(lambda: other.poll() is not None)
    last = put("work", {}, event_key="last")
    wait_until(lambda: settled(last))
    assert journal.lines("end", key="last")[0]["pid"] == frozen.pid
    frozen.send_signal(signal.SIGTERM)
    wait_until(lambda: frozen.poll() is not None)
    assert "skipped 3" in frozen.output()


@pytest.mark.slow
def test_equal_names_and_process_ids_are_told_apart(dispatch, journal, gate):
    """Scenario 22: pid 1 and one host name, as in containers; no state depends on a registry row."""
    pretend = {"PRETEND_IDENTITY": "web"}
    held = put("work", {"do": [["wait", gate.path]]})
    first = dispatch(lease=2, environment=pretend)
    journal.wait("start")
    taken = fresh(held)
    first.kill()
    first.wait()
    second, third = (dispatch(lease=2, environment=pretend) for _ in range(2))
    found = [put("work", {}) for _ in range(20)]
    wait_until(lambda: settled(*found))
    Dispatcher.objects.all().delete()
    gate()
    wait_until(lambda: settled(held))
    again = fresh(held)
    assert taken.leased_by.startswith("web:1:")
    assert again.leased_by.startswith("web:1:")
    assert again.leased_by != taken.leased_by
    assert again.attempt == 2
    assert journal.lines("start", key=held.event_key)[1]["at"] - journal.lines("start")[0]["at"] > 1.5
    assert all(len(journal.lines("start", key=each.event_key)) == 1 for each in found)
    assert second.poll() is third.poll() is None


@pytest.mark.slow
@servers_only
@pytest.mark.parametrize("offset", [3600, pytest.param(-3600, marks=pytest.mark.slow)])
def test_a_wrong_clock_steals_nothing_and_delays_nothing(dispatch, journal, gate, offset):
    """Scenario 19: the database's clock decides."""
    row = put("work", {"do": [["wait", gate.path], ["fail", 1]]})
    dispatch(lease=1.2)
    journal.wait("start")
    dispatch(lease=1.2, environment={"PRETEND_CLOCK": str(offset)})
    wait_until(lambda: Dispatcher.objects.count() == 2)
    other = put("work", {"do": [["fail", 1]]})
    wait_until(lambda: settled(other))
    assert fresh(row).attempt == 1
    gate()
    wait_until(lambda: settled(row))
    assert [fresh(each).attempt for each in (row, other)] == [2, 2]
    assert all(abs((fresh(each).settled_at - rows.now()).total_seconds()) < 60 for each in (row, other))


@pytest.mark.slow
def test_several_processes_share_lanes_in_order(dispatch, journal):
    """Scenario 40."""
    found = [put("lane", {}, ordering_key=str(key), event_key=f"{key}:{n}") for n in range(6) for key in range(20)]
    for _ in range(3):
        dispatch(lease=5)
    wait_until(lambda: not Message.objects.pending().exists(), 60)
    starts = journal.keys("start")
    assert sorted(starts) == sorted(each.event_key for each in found)
    for key in range(20):
        assert [start for start in starts if start.split(":")[0] == str(key)] == [f"{key}:{n}" for n in range(6)]
    spans = {line["key"]: line["at"] for line in journal.lines("end")}
    for line in journal.lines("start"):
        key, n = line["key"].split(":")
        if n != "0":
            assert spans[f"{key}:{int(n) - 1}"] <= line["at"]


@pytest.mark.slow
def test_an_old_process_leaves_a_new_topic_alone(dispatch, journal):
    """Scenario 51."""
    new = [put("slow", {}) for _ in range(10)]
    old = dispatch(environment={"WITHOUT_TOPICS": "slow"})
    known = put("work", {})
    wait_until(lambda: settled(known))
    assert {(fresh(each).attempt, state(each)) for each in new} == {(0, State.PENDING)}
    new_process = dispatch()
    wait_until(lambda: settled(*new))
    assert {line["pid"] for line in journal.lines("start") if line["key"] != known.event_key} == {new_process.pid}
    assert old.poll() is None


@pytest.mark.slow
def test_a_broken_deployment_touches_no_message(dispatch):
    """Scenario 55: a handler module that cannot be imported is no fault of the message."""
    row = put("work", {})
    process = dispatch(environment={"BROKEN_DEPLOYMENT": "1"})
    wait_until(lambda: process.poll() is not None)
    assert process.returncode != 0
    assert "a module that this deployment forgot" in process.output()
    assert (fresh(row).attempt, state(row)) == (0, State.PENDING)


def run_script(process_environment, journal, script, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={
            **process_environment,
            "DJANGO_SETTINGS_MODULE": "tests.processes.settings",
            jobs.JOURNAL: str(journal.path),
            **environment,
        },
    )


DIE_AFTER_COMMIT = """
import django, os, signal
django.setup()
from django.db import transaction
from outbox import stage
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    stage("work", {}, event_key="orphan", deliver_now=True)
"""

DIE_WHILE_DELIVERING = """
import django
django.setup()
from django.db import transaction
from outbox import stage
with transaction.atomic():
    stage("killer", {"do": ["kill"]}, event_key="orphan", deliver_now=True)
"""


def test_a_process_that_dies_between_commit_and_delivery_loses_nothing(dispatch, process_environment, journal):
    """Scenario 53."""
    process = run_script(process_environment, journal, DIE_AFTER_COMMIT)
    assert process.wait(30) == -signal.SIGKILL
    row = Message.objects.get()
    assert (row.state, row.attempt) == (State.PENDING, 0)
    dispatch()
    wait_until(lambda: settled(row))
    assert journal.keys("start") == ["orphan"]


def test_a_process_that_dies_in_its_immediate_delivery_loses_nothing(process_environment, journal):
    """Scenario 53: the lease of the dead process runs out like any other."""
    process = run_script(process_environment, journal, DIE_WHILE_DELIVERING)
    assert process.wait(30) == -signal.SIGKILL
    row = Message.objects.get()
    assert (row.state, row.attempt) == (State.PENDING, 1)
    assert rows.now() < row.due_at < rows.ahead(400)


WITHOUT_UNIX = """
import os, signal, threading
for module, names in ((signal, ("SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGHUP")), (os, ("fork", "forkpty"))):
    for name in names:
        delattr(module, name)
import django
django.setup()
from django.core.management import call_command
stop = threading.Event()
thread = threading.Thread(
    target=call_command, args=("outbox_dispatch", "--poll", "0.1"), kwargs={"stop_event": stop}
)
thread.start()
from outbox.models import Message
import time
end = time.monotonic() + 30
while Message.objects.pending().exists() and time.monotonic() < end:
    time.sleep(0.05)
stop.set()
thread.join()
"""


@pytest.mark.slow
def test_it_runs_in_a_thread_where_unix_signals_and_fork_are_missing(process_environment, journal):
    """Scenario 60: Windows."""
    row = put("work", {})
    assert run_script(process_environment, journal, WITHOUT_UNIX).wait(40) == 0
    assert state(row) == State.DELIVERED


UNDER_AUTORELOAD = """
import os, sys
import django
django.setup()
from django.core.management import call_command
from django.utils import autoreload
autoreload.run_with_reloader(call_command, "outbox_dispatch", "--drain", "--poll", "0.1")
"""


@pytest.mark.slow
def test_it_runs_under_the_autoreloader(process_environment, journal):
    """Scenario 60: there the command is not in the main thread."""
    row = put("work", {})
    process = run_script(process_environment, journal, UNDER_AUTORELOAD, RUN_MAIN="true")
    try:
        wait_until(lambda: settled(row))
    finally:
        process.kill()
        process.wait()
    assert state(row) == State.DELIVERED


@pytest.mark.slow
@pytest.mark.parametrize("after", ["succeeds", "fails"])
def test_a_row_that_is_deleted_while_its_handler_runs_costs_a_line_in_the_log(dispatch, journal, gate, after):
    """Scenario 58."""
    row = put("work", {"do": [["wait", gate.path], *([["fail", 1]] if after == "fails" else [])]})
    process = dispatch()
    journal.wait("start")
    Message.objects.filter(pk=row.pk).delete()
    gate()
    wait_until(lambda: "lost its lease" in process.output())
    later = put("work", {})
    wait_until(lambda: settled(later))
    assert process.output().count("lost its lease") == 1
    assert not Message.objects.filter(pk=row.pk).exists()
    assert process.poll() is None
