"""`outbox_dispatch --processes`: children are killed, frozen and recycled, parents die; and the probes tell of it."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from outbox.models import Dispatcher, State
from tests import rows
from tests.conftest import ROOT
from tests.processes import jobs
from tests.running import fresh, outcomes, put, settled, state
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.django_db(transaction=True)]

NOWHERE = {
    "sqlite": "sqlite:////nowhere/db.sqlite3",
    "postgresql": "postgres://nobody@127.0.0.1:1/nothing",
    "mysql": "mysql://nobody@127.0.0.1:1/nothing",
}


def wait_for_exit(process, seconds=30):
    return wait_until(lambda: process.poll() is not None, seconds) and process.returncode


def started(parent):
    """The process ids of all children so far, in the order in which they were started."""
    return [int(pid) for pid in re.findall(r"process \d+ started, pid (\d+)", parent.output())]


def children(parent, count=2):
    """Wait until so many children were started, and work."""
    wait_until(lambda: Dispatcher.objects.filter(pid__in=started(parent)).count() >= count)
    return started(parent)


def is_there(pid):
    """Whether a process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def port_of(parent):
    """Where it answers probes, having been told to take a free port."""
    return int(wait_until(lambda: re.search(r"Probes are answered at http://127\.0\.0\.1:(\d+)\.", parent.output()))[1])


def ask(port, name):
    """Status and body of a probe; None while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return None, {"problems": []}


def problems(port, name="readyz"):
    return {each["problem"] for each in ask(port, name)[1]["problems"]}


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stop_ends_all_processes_and_the_report_counts_for_all(dispatch, journal):
    """Scenario 28."""
    parent = dispatch("--processes", 2)
    pids = children(parent)
    found = [put("work", {"do": [["sleep", 0.1]]}) for _ in range(20)]
    wait_until(lambda: settled(*found))
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()
    assert "processed 20, delivered 20" in parent.output()
    assert {line["pid"] for line in journal.lines("start")} <= set(pids)
    assert not Dispatcher.objects.exists()
    assert not any(is_there(pid) for pid in pids)


@pytest.mark.slow
def test_what_runs_may_finish_and_nothing_new_starts(dispatch, journal, gate):
    """Scenario 28 b."""
    running = [put("work", {"do": [["wait", gate.path]]}) for _ in range(3)]
    parent = dispatch("--processes", 2)
    children(parent)
    journal.wait("start", 3)
    parent.send_signal(signal.SIGTERM)
    wait_until(lambda: parent.output().count("Stopping:") == 2)
    late = put("work", {})
    gate()
    assert wait_for_exit(parent) == 0, parent.output()
    assert {state(each) for each in running} == {State.DELIVERED}
    assert state(late) == State.PENDING


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_kills_all_of_them(dispatch, journal, number):
    """Scenario 28 d. It reaches the whole group, as Ctrl-C does: only the parent counts them."""
    put("work", {"do": ["forever"]})
    parent = dispatch("--processes", 2, grace=60)
    pids = children(parent)
    journal.wait("start")
    os.killpg(parent.pid, number)
    wait_until(lambda: parent.output().count("Stopping:") == 2)
    os.killpg(parent.pid, number)
    assert wait_for_exit(parent, 10) == 128 + number
    wait_until(lambda: not any(is_there(pid) for pid in pids), 10)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.4])
def test_a_stop_of_the_whole_group_in_the_middle_of_the_start_is_a_stop(dispatch, after):
    """As a service manager does that knows nothing of parents: some children care for signals already, some do not."""
    parent = dispatch("--processes", 2)
    wait_until(lambda: len(started(parent)) == 2)
    time.sleep(after)
    os.killpg(parent.pid, signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "sqlite", reason="the file of SQLite can be seen among the open ones")
def test_the_parent_keeps_no_database_open(dispatch):
    parent = dispatch("--processes", 2)
    pids = children(parent)

    def opened(pid):
        return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}

    name = str(connection.settings_dict["NAME"])
    assert any(each == name for each in opened(pids[0]))
    assert name not in opened(parent.pid)


@pytest.mark.slow
def test_in_a_child_all_signals_count_as_one(dispatch, journal, gate):
    held = put("work", {"do": [["wait", gate.path]]})
    parent = dispatch("--processes", 2)
    children(parent)
    pid = journal.wait("start")[0]["pid"]
    for _ in range(3):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)  # else they may become one on the way
    gate()
    wait_until(lambda: settled(held))
    assert state(held) == State.DELIVERED
    wait_until(lambda: len(started(parent)) == 3)


@pytest.mark.slow
def test_what_outlasts_the_grace_is_given_back(dispatch, journal):
    """Scenario 28 c."""
    row = put("work", {"do": ["forever"]})
    parent = dispatch("--processes", 2, grace=0.5, lease=60)
    journal.wait("start")
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()
    assert (fresh(row).lease_token, outcomes(row)) == (None, ["interrupted"])


@pytest.mark.slow
def test_when_the_parent_is_killed_the_children_finish_and_leave(dispatch, journal, gate):
    running = put("work", {"do": [["wait", gate.path]]})
    parent = dispatch("--processes", 2)
    pids = children(parent)
    journal.wait("start")
    parent.kill()
    parent.wait()
    wait_until(lambda: parent.output().count("Stopping:") == 2)
    assert parent.output().count("The parent process is gone") == 2
    never = put("work", {})
    gate()
    wait_until(lambda: not any(is_there(pid) for pid in pids))
    assert (state(running), state(never)) == (State.DELIVERED, State.PENDING)
    assert not Dispatcher.objects.exists()


# --- replacements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_child_that_dies_is_replaced_and_what_it_held_is_delivered(dispatch, journal, gate, number):
    """Scenario 29."""
    held = put("work", {"do": [["wait", gate.path]]})
    parent = dispatch("--processes", 2, lease=1)
    children(parent)
    victim = journal.wait("start")[0]["pid"]
    os.kill(victim, number)
    wait_until(lambda: len(started(parent)) == 3)
    assert f"(pid {victim}) was ended by {number.name}" in parent.output()
    assert not is_there(victim)
    gate()
    wait_until(lambda: settled(held))
    assert outcomes(held) == ["lapsed", "delivered"]
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()


@pytest.mark.slow
def test_a_frozen_child_is_told_by_the_probes_killed_and_replaced(dispatch, tmp_path):
    """Scenario 59: SIGSTOP. The parent lives; what is wrong is said."""
    file = tmp_path / "alive"
    parent = dispatch("--processes", 2, "--probe-port", 0, "--liveness-file", file, lease=1)
    port = port_of(parent)
    victim = children(parent)[0]
    wait_until(lambda: ask(port, "startupz")[0] == 200)
    wait_until(lambda: ask(port, "readyz")[0] == 200)
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: problems(port) == {"process_silent"})
    assert ask(port, "livez")[0] == 200
    wait_until(lambda: len(started(parent)) == 3)
    assert re.search(rf"\(pid {victim}\) has not reported for \d+ s; it is killed", parent.output())
    wait_until(lambda: ask(port, "readyz")[0] == 200)
    assert not is_there(victim)
    touched = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns > touched)
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()
    assert not file.exists()


@pytest.mark.slow
def test_children_are_recycled_after_so_many_messages_and_none_is_lost_or_miscounted(dispatch, journal):
    parent = dispatch("--processes", 2, "--max-messages", 5, concurrency=1)
    found = [put("work", {"do": [["sleep", 0.1]]}) for _ in range(30)]
    wait_until(lambda: settled(*found), 60)
    assert len({line["pid"] for line in journal.lines("start")}) >= 3
    assert sorted(journal.keys("start")) == sorted(each.event_key for each in found)
    assert {fresh(each).spent for each in found} <= {0, 1}  # what had not started was given back at no cost
    wait_until(lambda: "makes room" in parent.output())
    assert "It is replaced in" not in parent.output()
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()
    assert "processed 30, delivered 30" in parent.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", [("--max-messages", 3), ("--max-seconds", "0.5"), ("--max-rss", 1)], ids=lambda limit: limit[0]
)
def test_a_single_process_ends_at_its_limit_with_0(dispatch, limit):
    found = [put("work", {}) for _ in range(3)]
    process = dispatch(*limit)
    assert wait_for_exit(process) == 0
    assert "makes room for a fresh one" in process.output()
    if limit[0] == "--max-messages":
        assert settled(*found)


@pytest.mark.slow
def test_a_child_whose_slots_are_all_stuck_is_replaced(dispatch, journal):
    """Scenario 18: threads cannot be killed, so the process is."""
    stuck = put("slow", {"do": ["forever"]})
    healthy = put("work", {"do": [["sleep", 0.1]]})
    parent = dispatch("--processes", 2, concurrency=1)
    wait_until(lambda: fresh(stuck).state == State.DEAD, 60)
    wait_until(lambda: settled(healthy))
    assert "1 handlers are stuck beyond their timeout" in parent.output()
    assert len({line["pid"] for line in journal.lines("start", key=stuck.event_key)}) == 3
    wait_until(lambda: len(started(parent)) == 5)
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["kill", pytest.param("exit", marks=pytest.mark.slow), pytest.param("crash", marks=pytest.mark.slow)]
)
def test_a_message_that_kills_its_process_dies_of_its_budget_and_its_neighbours_live(dispatch, journal, end):
    """Scenarios 23 and P1: from the second lapse on it runs in a process that holds nothing else."""
    healthy = [put("killer", {"do": [["sleep", 1.5]]}, event_key=f"healthy-{n}") for n in range(3)]
    killers = [put("killer", {"do": [["sleep", 0.2], end]}, event_key=f"killer-{n}") for n in range(2)]
    parent = dispatch("--processes", 2, lease=0.8, concurrency=12)
    wait_until(lambda: settled(*healthy, *killers), 90)
    assert {state(each) for each in healthy} == {State.DELIVERED}
    assert {(fresh(each).state, fresh(each).reason, fresh(each).spent) for each in killers} == {
        (State.DEAD, "crashed", 3)
    }
    for each in killers:
        starts = journal.lines("start", key=each.event_key)
        assert len(starts) == 3
        assert starts[-1]["pid"] not in {line["pid"] for line in others_at(journal, starts[-1])}
    assert parent.poll() is None
    last = put("work", {})
    wait_until(lambda: settled(last))


def others_at(journal, start):
    """Starts of other messages in the same process that had not ended when this one started, or came later."""
    ended = {(line["key"], line["attempt"]): line["at"] for line in journal.lines("end")}
    return [
        line
        for line in journal.lines("start")
        if line["pid"] == start["pid"]
        and line["key"] != start["key"]
        and ended.get((line["key"], line["attempt"]), float("inf")) > start["at"]
    ]


# --- other systems ----------------------------------------------------------------------------------------------------

WITHOUT_UNIX = """
import os, signal
for module, names in ((signal, ("SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGHUP")), (os, ("fork", "forkpty", "waitid"))):
    for name in names:
        delattr(module, name)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "outbox_dispatch", "--processes", "2", "--poll", "0.1"])
"""


@pytest.mark.slow
def test_processes_need_no_fork_and_a_program_of_ones_own_may_start_them(process_environment, journal, tmp_path):
    """Scenario 60: children run the command line of the parent, whatever it is."""
    log = tmp_path / "log"
    environment = {"DJANGO_SETTINGS_MODULE": "tests.processes.settings", jobs.JOURNAL: str(journal.path)}
    with log.open("wb") as stream:
        parent = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_UNIX],
            cwd=ROOT,
            env={**process_environment, **environment},
            stdout=stream,
            stderr=stream,
        )
    try:
        found = [put("work", {}) for _ in range(3)]
        wait_until(lambda: settled(*found))
        wait_until(lambda: log.read_text().count("started, pid") == 2)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) == 0, log.read_text()
    finally:
        parent.kill()
        parent.wait()
    assert "processed 3, delivered 3" in log.read_text()


# --- orphans ----------------------------------------------------------------------------------------------------------

AS_PROCESS_1 = """
import os, subprocess, time
import django
django.setup()
from outbox.supervisor import reap_orphans
assert os.getpid() == 1
ours = subprocess.Popen(["sh", "-c", "exit 7"])
assert subprocess.Popen(["sh", "-c", "sleep 0.05 & exit 0"]).wait() == 0
time.sleep(0.5)
reap_orphans({ours.pid})
assert ours.wait() == 7
reap_orphans(set())
try:
    left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
except ChildProcessError:
    left = None
assert left is None, left
"""


@pytest.mark.slow
def test_process_1_of_a_container_reaps_what_others_left_behind(process_environment):
    apart = ["unshare", "--fork", "--pid", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no process id namespace can be made here")
    environment = {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.processes.settings"}
    subprocess.run([*apart, sys.executable, "-c", AS_PROCESS_1], check=True, cwd=ROOT, env=environment, timeout=60)


# --- what the database tells ------------------------------------------------------------------------------------------


def status(*conditions):
    """The exit code of `outbox_status` here, beside the dispatchers, and what it prints."""
    out = io.StringIO()
    try:
        call_command("outbox_status", *(f"--fail-if={each}" for each in conditions), stdout=out)
    except CommandError as error:
        return error.returncode, out.getvalue() + str(error)
    return 0, out.getvalue()


WELL = ("dispatchers<1", "abandoned>0", "oldest>1s")


@pytest.mark.slow
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_status_tells_idle_hung_and_frozen_dispatchers_apart(dispatch, journal):
    """Scenario 59: its source is the database, not the process that is asked."""
    process = dispatch(concurrency=1, lease=60)
    wait_until(lambda: Dispatcher.objects.exists())
    assert status(*WELL)[0] == 0  # an empty queue
    put("work", {"do": ["forever"]})
    journal.wait("start")
    put("work", {})
    code, text = wait_until(lambda: (found := status(*WELL))[0] and found)  # all slots hung
    assert code == 3
    assert "oldest>1s" in text.splitlines()[-1]
    assert "dispatchers<1" not in text
    process.send_signal(signal.SIGSTOP)
    Dispatcher.objects.update(lost_at=rows.ahead(-1))  # a minute later, if it does not report
    code, text = status(*WELL)
    assert code == 3
    assert "dispatchers<1" in text
    assert "abandoned>0" in text
    assert "has 1 due messages but no live dispatcher" in text


# --- refusals and trouble ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--topic", "nothing.*"), ("--once",), ("--drain",), ("--limit", 3)], ids=lambda given: given[0]
)
def test_what_makes_no_sense_starts_no_process(dispatch, options):
    parent = dispatch("--processes", 2, *options)
    assert wait_for_exit(parent) == 2
    assert not started(parent)


@pytest.mark.slow
def test_without_a_database_all_wait_live_but_not_ready(dispatch):
    """Scenarios 28 e and 59."""
    parent = dispatch("--processes", 2, "--probe-port", 0, environment={"DATABASE_URL": NOWHERE[connection.vendor]})
    port = port_of(parent)
    wait_until(lambda: problems(port) == {"database_away"})
    assert problems(port, "startupz") == {"database_away"}
    assert ask(port, "livez")[0] == 200
    parent.send_signal(signal.SIGTERM)
    assert wait_for_exit(parent) == 0, parent.output()


@pytest.mark.slow
def test_processes_that_may_not_wait_for_their_database_end_with_1(dispatch):
    parent = dispatch("--processes", 2, "--exit-on-db-error", environment={"DATABASE_URL": NOWHERE[connection.vendor]})
    assert wait_for_exit(parent) == 1


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error(dispatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = dispatch("--probe-port", taken.getsockname()[1])
        assert wait_for_exit(process) == 1
    assert "The probes cannot be served" in process.output()
