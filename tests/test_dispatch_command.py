"""`outbox_dispatch` as a command: its options, its report, its refusals, its exit codes."""

import io
import json
import logging
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import OperationalError, connections

from outbox import Topic, crew, handler
from outbox.management.commands import outbox_dispatch
from outbox.management.stopping import SIGNALS, StopSignals
from outbox.models import Attempt
from outbox.registry import registry
from tests.running import DEADLINE, Gate, put, settled, state
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

both_databases = pytest.mark.django_db(transaction=True, databases=["default", "other"])

QUICK = ("--poll", "0.05", "--lease", "5", "--grace", "5", "--concurrency", "4")


@pytest.fixture(autouse=True)
def log():
    """What handlers delivered."""
    done = []
    with registry.isolated():
        for topic in ("order.paid", "order.sent", "mail.welcome"):
            handler(topic, ordering="none")(lambda message: done.append(message.topic))
        yield done


def run(*arguments, **options):
    """What the command prints."""
    out = io.StringIO()
    call_command("outbox_dispatch", *QUICK, *map(str, arguments), stdout=out, **options)
    return out.getvalue()


def fails(*arguments, code):
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert caught.value.returncode == code
    return str(caught.value)


@contextmanager
def in_a_thread(*arguments, **options):
    """The command, meanwhile, with its stop event; the list gets its output or its error."""
    stop, result = threading.Event(), []

    def work():
        try:
            result.append(run(*arguments, stop_event=stop, **options))
        except BaseException as error:
            result.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield stop, result
    finally:
        stop.set()
        thread.join(DEADLINE)
        assert not thread.is_alive()


# --- what it delivers -------------------------------------------------------------------------------------------------


def test_a_drain_reports_what_it_did(log):
    put("order.paid", count=3)
    put("mail.welcome")
    assert run("--drain") == "processed 4, delivered 4, retried 0, dead 0, discarded 0, skipped 0\n"


def test_the_report_may_be_json():
    put("order.paid", count=3)
    assert json.loads(run("--drain", "--format", "json")) == {
        "processed": 3,
        "delivered": 3,
        "retried": 0,
        "dead": 0,
        "discarded": 0,
        "skipped": 0,
    }


def test_it_ends_well_whatever_the_handlers_did():
    handler("bad", max_attempts=1)(lambda message: 1 / 0)
    put("bad")
    assert json.loads(run("--once", "--format", "json"))["dead"] == 1


@pytest.mark.parametrize(
    ("arguments", "delivered"),
    [
        (["--topic", "order.*"], {"order.paid", "order.sent"}),
        (["--topic", "order.paid", "--topic", "mail.*"], {"order.paid", "mail.welcome"}),
        (["--exclude-topic", "order.*"], {"mail.welcome"}),
        (["--topic", "order.*", "--exclude-topic", "*.sent"], {"order.paid"}),
        (["--topic", "ORDER.*", "--topic", "mail.welcome"], {"mail.welcome"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_topics_are_chosen_by_globs(log, arguments, delivered):
    for topic in ("order.paid", "order.sent", "mail.welcome"):
        put(topic)
    run("--drain", *arguments)
    assert set(log) == delivered


def test_a_caller_may_pass_single_values_as_keywords(log):
    for topic in ("order.paid", "mail.welcome"):
        put(topic)
    run("--drain", topic="order.*", database="default")
    assert log == ["order.paid"]


def test_a_limit_ends_the_run(log):
    put("order.paid", count=5)
    run("--limit", 2)
    assert len(log) == 2


@both_databases
def test_several_databases_are_served_at_once(log):
    put("order.paid")
    put("order.paid", using="other")
    report = json.loads(run("--drain", "--database", "other", "--database", "default", "--format", "json"))
    assert report["delivered"] == 2


@both_databases
def test_a_database_named_twice_is_served_once(log, monkeypatch):
    made = []
    real = outbox_dispatch.Dispatcher

    def counted(plan):
        made.append(plan.using)
        return real(plan)

    monkeypatch.setattr(outbox_dispatch, "Dispatcher", counted)
    run("--drain", "--database", "other", "--database", "other")
    assert made == ["other"]


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_required_topics_without_a_handler_are_all_named():
    for name in ("z.last", "a.first"):
        Topic(name, required=True)
    Topic("optional")
    text = fails("--drain", code=1)
    assert "a.first, z.last" in text
    assert "optional" not in text


def test_two_handlers_of_one_name_are_refused():
    handler("order.paid")(lambda message: "another")
    assert "order.paid" in fails("--drain", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--topic", "nothing.*"],
        ["--exclude-topic", "*"],
        ["--database", "nowhere"],
        ["--lease", "0"],
        ["--poll", "0"],
        ["--poll", "-1"],
        ["--limit", "0"],
        ["--concurrency", "0"],
        ["--concurrency", "10001"],
        ["--batch", "1000000"],
        ["--grace", "-1"],
        ["--lease", "nan"],
        ["--lease", "inf"],
        ["--lease", "1e308"],
        ["--processes", "0"],
        ["--processes", "1001"],
        ["--processes", "2"],
        ["--max-messages", "0"],
        ["--max-rss", "0"],
        ["--max-rss", "nan"],
        ["--max-seconds", "-1"],
        ["--probe-port", "65536"],
        ["--probe-port", "-1"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_a_usage_error(arguments):
    assert fails("--drain", *arguments, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--once", "--drain"],
        ["--limit", "some"],
        ["--poll", "soon"],
        ["--format", "xml"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_is_refused(arguments):
    with pytest.raises(CommandError):
        run(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": None},
        {"concurrency": 0},
        {"concurrency": True},
        {"lease": float("nan")},
        {"lease": "soon"},
        {"limit": 0},
        {"once": True},
        {"database": "nowhere"},
        {"processes": None},
        {"processes": True},
        {"processes": "2"},
        {"processes": 2, "drain": False},  # no process of its own
        {"max_messages": True},
        {"probe_port": True},
    ],
    ids=str,
)
def test_call_command_is_held_to_the_same(options):
    with pytest.raises(CommandError) as caught:
        call_command("outbox_dispatch", **{"drain": True} | options)
    assert caught.value.returncode == 2


def test_durations_may_have_units_and_be_strings(log):
    put("order.paid")
    call_command(
        "outbox_dispatch", drain=True, lease="1m", poll="0.1s", grace="5", topic="order.*", stdout=io.StringIO()
    )
    assert log == ["order.paid"]


def test_a_glob_without_a_topic_is_told(caplog):
    run("--drain", "--topic", "order.*", "--topic", "emial.*")
    assert "'emial.*'" in caplog.text


def test_a_database_without_tables_is_refused(monkeypatch):
    monkeypatch.setattr(Attempt._meta, "db_table", "not_migrated")
    assert "manage.py migrate outbox --database default" in fails("--drain", code=1)


def test_a_database_that_does_not_answer_is_waited_for(monkeypatch, log, caplog):
    def refuse(self, *args):
        raise OperationalError("connection refused")

    monkeypatch.setattr(type(connections["default"].introspection), "table_names", refuse)
    put("order.paid")
    run("--drain")
    assert log == ["order.paid"]
    assert "does not answer yet" in caplog.text


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_in_a_thread_it_takes_no_signals_and_stops_by_its_event(log, caplog):
    """Scenario 60."""
    caplog.set_level(logging.DEBUG, "outbox")
    before = signal.getsignal(signal.SIGTERM)
    with in_a_thread() as (_, result):
        row = put("order.paid")
        wait_until(lambda: settled(row))
        assert signal.getsignal(signal.SIGTERM) is before
    assert result[0].startswith("processed 1, delivered 1")
    assert "takes no signals" in caplog.text


def test_in_the_main_thread_it_brings_the_former_handlers_back():
    former = {number: signal.getsignal(number) for number in SIGNALS}
    run("--drain")
    assert {number: signal.getsignal(number) for number in SIGNALS} == former


def test_a_signal_stops_it_gently(log):
    gate = Gate()
    handler("slow", ordering="none")(gate)
    row = put("slow")

    def interrupt():
        gate.wait()
        signal.raise_signal(signal.SIGINT)
        gate.open.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run().startswith("processed 1, delivered 1")
    thread.join()
    assert state(row) == "delivered"


def test_a_hangup_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_limit_ends_it_in_a_thread_too(log):
    put("order.paid", count=3)
    assert (
        run("--max-messages", 3, "--format", "json")
        == json.dumps({"processed": 3, "delivered": 3, "retried": 0, "dead": 0, "discarded": 0, "skipped": 0}) + "\n"
    )


def test_probes_are_answered_while_it_runs(caplog, tmp_path):
    caplog.set_level(logging.INFO, "outbox")
    file = tmp_path / "alive"
    with in_a_thread("--probe-port", 0, "--liveness-file", str(file)):
        address = wait_until(lambda: re.search(r"Probes are answered at (http\S+)\.$", caplog.text, re.MULTILINE))[1]
        wait_until(lambda: status_of(f"{address}/startupz") == 200)
        assert status_of(f"{address}/livez") == 200
        assert file.exists()
    assert not file.exists()


def status_of(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_liveness_file_that_cannot_be_written_is_an_error(tmp_path):
    assert "cannot be served" in fails("--liveness-file", tmp_path / "missing" / "alive", code=1)


def test_inside_another_program_stuck_handlers_do_not_end_the_process():
    """Scenario 60: only a process of its own is left by os._exit."""
    gate = Gate()
    handler("slow", ordering="none")(gate)
    row = put("slow")
    with in_a_thread("--grace", "0.1") as (stop, result):
        gate.wait()
        stop.set()
        wait_until(lambda: result)
    assert result[0].startswith("processed 0")
    assert state(row) == "pending"
    gate.open.set()


def test_a_process_that_gives_up_exits_with_1():
    gate = Gate()
    handler("slow", ordering="none", timeout=0.2)(gate)
    put("slow")
    text = fails("--concurrency", "1", code=1)
    assert "stuck beyond their timeout" in text
    gate.open.set()


@both_databases
def test_when_one_database_gives_up_all_dispatchers_stop(monkeypatch):
    real = outbox_dispatch.Dispatcher

    def failing(plan):
        dispatcher = real(plan)
        if plan.using == "other":
            monkeypatch.setattr(dispatcher, "_loop", lambda: dispatcher._give_up("the other one is broken"))
        return dispatcher

    monkeypatch.setattr(outbox_dispatch, "Dispatcher", failing)
    assert "the other one is broken" in fails("--database", "default", "--database", "other", code=1)


def test_a_dispatcher_that_hangs_in_a_statement_is_left_behind(monkeypatch):
    """Scenario 28 e: a stop ends, even when the database never answers."""
    hanging = threading.Event()
    real = outbox_dispatch.Dispatcher

    def hang(plan):
        dispatcher = real(plan)
        monkeypatch.setattr(dispatcher, "_loop", hanging.wait)
        return dispatcher

    monkeypatch.setattr(outbox_dispatch, "Dispatcher", hang)
    monkeypatch.setattr(crew, "LAST_WRITES", 0.1)
    monkeypatch.setattr(crew, "MARGIN", 0.1)
    with in_a_thread("--grace", "0.1") as (stop, result):
        stop.set()
        wait_until(lambda: result)
        assert "did not stop within its grace" in str(result[0])
        hanging.set()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "outbox-loop"])


def test_a_process_of_its_own_leaves_although_threads_are_stuck(monkeypatch, capsys):
    left = []
    monkeypatch.setattr(outbox_dispatch.os, "_exit", left.append)
    monkeypatch.setattr(outbox_dispatch.logging, "shutdown", lambda: None)
    gate = Gate()
    handler("slow", ordering="none")(gate)
    put("slow")

    def interrupt():
        gate.wait()
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    command = outbox_dispatch.Command()
    monkeypatch.setattr(sys, "argv", ["manage.py"])
    command.run_from_argv(["manage.py", "outbox_dispatch", *QUICK, "--grace", "0.1", "--skip-checks"])
    thread.join()
    assert left == [0]
    assert capsys.readouterr().out.startswith("processed 0")
    gate.open.set()
