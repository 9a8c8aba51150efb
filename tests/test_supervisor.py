"""The parent's part alone: its children are small scripts that speak the protocol of the pipe."""

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest

from outbox import limits, posts, supervisor
from outbox.lifeline import Lifeline
from outbox.limits import Limits
from outbox.offspring import how, was_told_to_stop
from outbox.posts import Terms
from outbox.supervisor import Supervisor
from tests.waiting import wait_until

CHILD = """
import json, os, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(os.environ["OUTBOX_LIFELINE"]))
def tell(**news):
    pipe.send_bytes(json.dumps(news).encode())
def wait_for_stop():
    try:
        assert pipe.recv_bytes() == b"stop"
    except EOFError:
        pass
def well(**more):
    return {"using": "default", "silent": 0.1, "patience": 9.0, "slots": 4, "claimed": True, **more}
"""
GOOD = "tell(dispatchers=[well()], counts={'processed': 1}); wait_for_stop(); tell(counts={'processed': 2})"


@pytest.fixture
def quick(monkeypatch):
    """Short pauses."""
    monkeypatch.setattr(posts, "FIRST_PAUSE", 0.05)


@contextmanager
def supervising(script, processes=1, patience=20.0, leaving=20.0, strict=False):
    """A supervisor that looks after its children in a thread meanwhile."""
    parent = Supervisor(
        Terms(
            command=[sys.executable, "-S", "-c", CHILD + script],
            processes=processes,
            patience=patience,
            leaving=leaving,
            strict=strict,
        )
    )
    stop = threading.Event()
    parent.ended = threading.Event()

    def look_after_them():
        parent.start()
        while parent.go_on():
            if stop.wait(0.01):
                parent.stop()
        parent.ended.set()

    thread = threading.Thread(target=look_after_them)
    thread.start()
    try:
        yield parent
    finally:
        stop.set()
        thread.join(30)
        parent.kill()
        assert not thread.is_alive()


def starts(parent):
    return [detail["starts"] for detail in parent.verdict().details]


def kinds(problems):
    return [each.kind for each in problems]


def test_children_are_started_counted_and_stopped():
    with supervising(GOOD, processes=3) as parent:
        wait_until(lambda: not parent.verdict().started)
        assert parent.verdict().is_live
        assert not parent.verdict().ready
        assert parent.counts["processed"] == 3
    assert parent.counts["processed"] == 6
    assert parent.failures == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("sys.exit(1)", "exited with 1"),
        ("sys.exit(0)", "exited with 0"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL (out of memory?)"),
        ("os.abort()", "was ended by SIGABRT"),
        ("tell(dispatchers=[well()]); os._exit(2)", "exited with 2"),  # a handler's doing, not a usage error
        ("tell(failures=['renewal failed']); sys.exit(1)", "exited with 1: renewal failed"),
    ],
)
def test_a_child_that_ends_is_replaced_and_the_log_says_why(script, what, caplog):
    with supervising(script) as parent:
        wait_until(lambda: starts(parent) >= [3])
    assert what in caplog.text
    assert "It is replaced in" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_child_that_cannot_be_started_is_tried_again(caplog, monkeypatch):
    def fail(command):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(posts, "Child", fail)
    with supervising(GOOD) as parent:
        wait_until(lambda: starts(parent) >= [3])
        assert kinds(parent.verdict().live) == ["process_down"]
    assert "could not be started: no more processes" in caplog.text


def pauses(records):
    return [record.args[-1] for record in records if "It is replaced" in record.msg]


@pytest.mark.slow
def test_the_pause_grows_with_each_failure(caplog, monkeypatch):
    monkeypatch.setattr(posts, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(posts.random, "uniform", lambda low, high: high)
    with supervising("sys.exit(1)") as parent:
        wait_until(lambda: starts(parent) >= [5])
    assert pauses(caplog.records)[:4] == pytest.approx([0.02, 0.04, 0.08, 0.16])


def test_the_pause_has_a_bound_and_is_jittered(monkeypatch, caplog):
    monkeypatch.setattr(posts, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(posts, "LONGEST_PAUSE", 0.02)
    with supervising("sys.exit(1)") as parent:
        wait_until(lambda: starts(parent) >= [5])
    found = pauses(caplog.records)
    assert all(0.01 <= each <= 0.02 for each in found)
    assert len(set(found)) > 1


def test_after_a_good_while_a_failure_counts_as_the_first_again(monkeypatch, caplog):
    monkeypatch.setattr(posts, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(posts, "GOOD_WHILE", -1)
    monkeypatch.setattr(posts.random, "uniform", lambda low, high: high)
    with supervising("sys.exit(1)") as parent:
        wait_until(lambda: starts(parent) >= [4])
    assert pauses(caplog.records)[:3] == pytest.approx([0.02, 0.02, 0.02])


def test_a_child_that_recycles_itself_is_replaced_at_once(monkeypatch, caplog):
    monkeypatch.setattr(posts, "FIRST_PAUSE", 1000)
    monkeypatch.setattr(posts, "LONGEST_PAUSE", 1000)
    caplog.set_level(logging.INFO, "outbox")
    script = "tell(dispatchers=[well()], counts={'processed': 5}, recycling='5 messages processed')"
    with supervising(script) as parent:
        wait_until(lambda: starts(parent) >= [4])
        assert parent.counts["processed"] >= 15
    assert "makes room: 5 messages processed" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_limit_that_no_child_can_keep_is_no_dead_loop(caplog):
    script = "tell(dispatchers=[well()], counts={'processed': 0}, recycling='90 MB of memory in use')"
    with supervising(script) as parent:
        wait_until(lambda: starts(parent) >= [3])
    assert len(pauses(caplog.records)) >= 2
    assert "90 MB of memory in use" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_child_that_reports_no_more_is_killed_and_replaced(caplog):
    """Scenario 59: it hangs, or was stopped."""
    script = "tell(dispatchers=[well()]); time.sleep(1000)"
    with supervising(script, patience=0.3) as parent:
        wait_until(lambda: starts(parent) >= [2])
    assert "has not reported for" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_child_that_never_reports_is_killed_and_replaced(monkeypatch):
    monkeypatch.setattr(posts, "STARTUP", 0.3)
    with supervising("time.sleep(1000)", patience=0.1) as parent:
        wait_until(lambda: starts(parent) >= [2])
        assert kinds(parent.verdict().started) in (["process_changing"], ["process_down"])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("condition", "text"),
    [("silent=99", "the loop has been silent for 99 s"), ("stuck=4", "4 handlers are stuck beyond their timeouts")],
)
def test_a_child_whose_loop_is_stuck_is_told_to_stop_and_replaced(condition, text, caplog):
    with supervising(f"tell(dispatchers=[well({condition})]); wait_for_stop()") as parent:
        wait_until(lambda: starts(parent) >= [2])
    assert text in caplog.text
    assert "is killed" not in caplog.text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("told", ["silent=99", "claimed=True"])
def test_a_child_that_does_not_leave_is_killed(told, caplog):
    script = f"""
tell(dispatchers=[well({told})], recycling={"'old'" if told != "silent=99" else "''"})
while True:
    time.sleep(0.05)
    tell(x=1)
"""
    with supervising(script, leaving=0.3) as parent:
        wait_until(lambda: starts(parent) >= [2])
    assert "did not stop within its grace; it is killed" in caplog.text


def test_a_stop_that_a_child_does_not_heed_is_a_failure():
    with supervising("tell(dispatchers=[well()]); time.sleep(1000)", leaving=0.3) as parent:
        wait_until(lambda: not parent.verdict().started)
    assert parent.failures == ["process 1 did not stop within its grace and was killed"]
    assert parent.code == 1


def test_a_child_that_fails_in_a_stop_is_a_failure():
    script = "tell(dispatchers=[well()]); wait_for_stop(); tell(failures=['it hangs']); sys.exit(1)"
    with supervising(script) as parent:
        wait_until(lambda: not parent.verdict().started)
    assert parent.failures == ["process 1 exited with 1: it hangs"]


def test_a_child_that_a_signal_ends_before_it_can_care_is_none():
    """A service manager, or Ctrl-C, signals the whole group."""
    with supervising("os.kill(os.getpid(), 15) if pipe.recv_bytes() else None") as parent:
        wait_until(lambda: starts(parent) == [1])
    assert parent.failures == []


def test_a_stop_while_nobody_runs_ends_at_once(monkeypatch):
    monkeypatch.setattr(posts, "FIRST_PAUSE", 1000)
    monkeypatch.setattr(posts, "LONGEST_PAUSE", 1000)
    with supervising("sys.exit(1)") as parent:
        wait_until(lambda: starts(parent) == [1] and kinds(parent.verdict().live) == ["process_down"])
    assert parent.failures == []


@pytest.mark.parametrize(
    ("script", "text", "code"),
    [
        ("tell(refused='No handler matches.', code=2); sys.exit(2)", "No handler matches.", 2),
        ("tell(refused='The database lacks tables.', code=1); sys.exit(1)", "The database lacks tables.", 1),
        ("sys.exit(2)", "a usage error", 2),
    ],
)
def test_what_no_restart_mends_ends_all(script, text, code, tmp_path):
    with supervising(first(tmp_path, script, otherwise=GOOD), processes=2) as parent:
        assert parent.ended.wait(30)
    assert text in parent.failures[0]
    assert parent.code == code


def first(path, script, *, otherwise):
    """A script for the first child, and another one for the rest."""
    return f"""
try:
    os.mkdir({str(path / "taken")!r})
except FileExistsError:
    {otherwise}
else:
    {script}
"""


def test_under_strict_terms_any_failure_ends_the_parent():
    with supervising("tell(failures=['the database failed']); sys.exit(1)", processes=2, strict=True) as parent:
        assert parent.ended.wait(30)
    assert "the database failed" in parent.failures[0]
    assert parent.code == 1


def test_a_child_of_newer_code_is_understood_as_far_as_possible():
    script = (
        "tell(dispatchers=[well(mood='fine')], more=1); time.sleep(0.3); tell(dispatchers=[{'using': 'default'}]); "
    )
    with supervising(script + "wait_for_stop()") as parent:
        wait_until(lambda: not parent.verdict().started)
        time.sleep(0.6)  # what it tells then must have been read
        assert parent.verdict().is_live
        assert starts(parent) == [1]
    assert parent.failures == []


def test_garbage_in_the_pipe_harms_nobody():
    with supervising("os.write(pipe.fileno(), b'\\0\\0\\0\\2{['); time.sleep(0.3); " + GOOD) as parent:
        wait_until(lambda: starts(parent) == [1])
        time.sleep(0.5)  # what it writes must have been read
        assert parent.verdict().is_live
    assert parent.failures == []


@pytest.mark.slow
def test_a_parent_that_slept_does_not_blame_its_children(monkeypatch):
    """Ctrl-Z stops the whole group: nobody could report."""
    monkeypatch.setattr(supervisor, "ASLEEP", 0.5)
    parent = Supervisor(
        Terms(command=[sys.executable, "-S", "-c", CHILD + GOOD], processes=1, patience=0.8, leaving=20, strict=False)
    )
    parent.start()
    wait_until(lambda: parent.go_on() and not parent.verdict().started)
    time.sleep(1.0)
    for _ in range(10):
        parent.go_on()
        time.sleep(0.02)
    assert starts(parent) == [1]
    assert parent.verdict().details[0]["state"] == "working"
    parent.stop()
    wait_until(lambda: not parent.go_on())


def test_a_parent_that_looks_after_nobody_says_so(monkeypatch):
    monkeypatch.setattr(supervisor, "STUCK", 0.0)
    parent = Supervisor(Terms(command=["none"], processes=1, patience=1, leaving=1, strict=False))
    time.sleep(0.01)
    assert kinds(parent.verdict().live)[0] == "parent_stuck"


def test_one_that_lives_is_enough_to_live_but_not_to_be_ready(tmp_path):
    with supervising(first(tmp_path, GOOD, otherwise="sys.exit(1)"), processes=2) as parent:
        wait_until(lambda: kinds(parent.verdict().ready) == ["process_down"])
        assert parent.verdict().is_live
        assert kinds(parent.verdict().started) == ["process_down"]


def test_one_that_is_ready_excuses_those_that_are_just_changing(tmp_path):
    with supervising(first(tmp_path, GOOD, otherwise="wait_for_stop()"), processes=2) as parent:
        wait_until(lambda: not parent.verdict().ready)
        assert kinds(parent.verdict().started) == ["process_changing"]


def test_while_all_are_just_changing_none_is_ready():
    with supervising("wait_for_stop()", processes=2) as parent:
        wait_until(lambda: kinds(parent.verdict().ready) == ["process_changing"] * 2)
        assert parent.verdict().is_live


def test_what_handlers_start_does_not_take_itself_for_a_child(monkeypatch):
    ours, theirs = Pipe()
    number = os.dup(theirs.fileno())
    os.set_inheritable(number, True)
    monkeypatch.setenv("OUTBOX_LIFELINE", str(number))
    lifeline = Lifeline.inherited()
    assert "OUTBOX_LIFELINE" not in os.environ
    assert not os.get_inheritable(number)
    assert Lifeline.inherited() is None
    lifeline.tell(counts={"processed": 1})
    assert json.loads(ours.recv_bytes()) == {"counts": {"processed": 1}}
    lifeline._pipe.close()
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_a_report_that_fails_is_told_and_the_next_one_is_made(caplog):
    ours, theirs = Pipe()
    lifeline = Lifeline(theirs)
    reports = iter([{"n": 1}])
    lifeline.watch(lambda: next(reports))
    assert json.loads(ours.recv_bytes()) == {"n": 1}
    wait_until(lambda: "could not be told" in caplog.text)
    ours.send_bytes(b"stop")
    assert lifeline.stopped.wait(10)
    lifeline.end(n=2)
    assert json.loads(ours.recv_bytes()) == {"n": 2}
    ours.close()
    theirs.close()


def test_a_parent_that_is_gone_is_a_stop():
    ours, theirs = Pipe()
    lifeline = Lifeline(theirs)
    ours.close()
    lifeline.tell(n=1)
    assert lifeline.stopped.is_set()
    theirs.close()


# --- the small print --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with 0"), (3, "exited with 3"), (-11, "was ended by SIGSEGV"), (-200, "was ended by signal 200")],
)
def test_exit_codes_are_told_in_words(code, text):
    assert how(code) == text


def test_stop_signals_are_told_from_others():
    assert all(was_told_to_stop(code) for code in (-signal.SIGTERM, -signal.SIGINT, 130, 143))
    assert not any(was_told_to_stop(code) for code in (0, 1, -signal.SIGKILL, -signal.SIGSEGV))


@pytest.mark.parametrize(
    "given",
    [
        {"max_messages": 0},
        {"max_messages": True},
        {"max_messages": 1.5},
        {"max_rss": 0},
        {"max_rss": float("nan")},
        {"max_seconds": -1},
        {"max_seconds": float("inf")},
        {"max_seconds": True},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError):
        Limits(**given)


def test_memory_cannot_be_limited_where_nothing_tells_it(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "STATM", tmp_path / "nothing")
    with pytest.raises(ValueError, match="only Linux"):
        Limits(max_rss=100)


def test_a_limit_is_reached_and_not_before():
    assert Limits(max_messages=5).reached(processed=4, age=0) == ""
    assert "5 messages" in Limits(max_messages=5).reached(processed=5, age=0)
    assert Limits(max_rss=1_000_000).reached(processed=0, age=0) == ""
    assert "MB" in Limits(max_rss=1).reached(processed=0, age=0)
    assert Limits().reached(processed=10**9, age=1e9) == ""


def test_processes_of_one_start_reach_their_age_at_different_times():
    drawn = [Limits(max_seconds=100) for _ in range(20)]
    ends = [sum(not each.reached(processed=0, age=age) for age in range(100, 111)) for each in drawn]
    assert len(set(ends)) > 1
    assert not any(each.reached(processed=0, age=99.9) for each in drawn)
    assert all(each.reached(processed=0, age=110.1) for each in drawn)


def test_the_memory_in_use_is_what_is_used_now():
    before = limits.rss()
    held = bytearray(64 * 1024**2)
    with_it = limits.rss()
    assert with_it - before > 50
    del held
    assert limits.rss() < with_it - 50


def test_the_verdict_can_be_told_as_json():
    with supervising(GOOD) as parent:
        wait_until(lambda: not parent.verdict().started)
        assert json.loads(json.dumps(parent.verdict().details))[0]["dispatchers"][0]["slots"] == 4
