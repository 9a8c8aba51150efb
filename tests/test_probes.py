"""What the probes say of a dispatcher that is well, stuck, hung, or without its database or tables."""

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
from django.db import OperationalError, ProgrammingError, connections

from outbox import handler, schema, vitals
from outbox.dispatcher import Dispatcher
from outbox.health import Verdict, judge, within
from outbox.leases import Claimer
from outbox.outages import Outage
from outbox.probes import LivenessFile, Probes
from outbox.registry import registry
from outbox.vitals import Condition
from tests.running import Gate, dispatching, plan, put
from tests.waiting import wait_until

WELL = Condition(using="default", silent=0.2, patience=9.0, slots=4, claimed=True)
NAMES = ("live", "ready", "started")


@pytest.fixture(autouse=True)
def _handlers():
    with registry.isolated():
        handler("quick", ordering="none")(lambda message: None)
        yield


@contextmanager
def probing(verdict):
    probes = Probes("127.0.0.1", 0, verdict)
    try:
        yield probes.address
    finally:
        probes.close()


def ask(address, path, method="GET"):
    """Status and body."""
    request = urllib.request.Request(address + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def answers(condition):
    """The problems that speak against each answer."""
    verdict = judge([condition])
    return tuple({each.kind for each in getattr(verdict, name)} for name in NAMES)


# --- what the conditions mean -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "live", "ready", "started"),
    [
        ({}, set(), set(), set()),
        ({"running": 4}, set(), set(), set()),
        ({"running": 4, "slow": 3}, set(), set(), set()),
        ({"silent": 10.0}, {"loop_stuck"}, {"loop_stuck"}, set()),
        ({"silent": 10.0, "stopping": True}, set(), {"stopping"}, set()),
        ({"running": 4, "slow": 4}, set(), {"slots_hung"}, set()),
        ({"running": 2, "stuck": 4}, {"slots_stuck"}, {"slots_stuck"}, set()),
        ({"trouble": "away"}, set(), {"database_away"}, set()),
        ({"trouble": "locked"}, set(), {"database_locked"}, set()),
        ({"trouble": "failing"}, set(), {"claims_fail"}, set()),
        ({"trouble": "failing", "missing": ["outbox_message"]}, set(), {"tables_missing"}, set()),
        ({"claimed": False}, set(), {"not_started"}, {"not_started"}),
        ({"claimed": False, "trouble": "away"}, set(), {"database_away"}, {"database_away"}),
        (
            {"claimed": False, "trouble": "failing", "missing": ["outbox_message"]},
            set(),
            {"tables_missing"},
            {"tables_missing"},
        ),
    ],
    ids=str,
)
def test_each_trouble_has_an_answer_of_its_own(changes, live, ready, started):
    """Scenario 59."""
    assert answers(replace(WELL, **changes)) == (live, ready, started)


def test_the_worst_of_several_databases_decides():
    verdict = judge([WELL, replace(WELL, using="other", trouble="away", error="OperationalError")])
    assert [(each.kind, each.where) for each in verdict.ready] == [("database_away", "other")]
    assert "OperationalError" in verdict.ready[0].text
    assert within(verdict, "process 2").ready[0].where == "process 2, other"


def test_a_condition_survives_the_pipe():
    condition = replace(WELL, missing=["outbox_message.holder"])
    assert Condition.from_json(json.loads(json.dumps(condition.as_json()))) == condition


# --- a real dispatcher ------------------------------------------------------------------------------------------------


def kinds(dispatcher, name="ready"):
    return {each.kind for each in getattr(judge([dispatcher.vitals.condition()]), name)}


@pytest.mark.django_db(transaction=True)
def test_an_idle_dispatcher_is_all_well():
    """Scenario 59: an empty queue is no trouble."""
    with dispatching() as dispatcher:
        wait_until(lambda: not kinds(dispatcher, "started"))
        assert not kinds(dispatcher, "live")
        assert not kinds(dispatcher)
    assert kinds(dispatcher) == {"stopping"}


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_handlers_that_run_for_very_long_in_all_slots_are_told():
    """Scenario 59: all slots hung."""
    gate = Gate()
    handler("hangs", ordering="none", timeout=8)(gate)
    handler("stays", ordering="none", timeout=1000)(gate)
    put("hangs", count=2)
    with dispatching(concurrency=2, handlers=[each for each in registry.handlers() if each.name == "hangs"]) as hung:
        gate.wait(2)
        assert not kinds(hung)
        assert hung.vitals.condition().running == 2
        wait_until(lambda: kinds(hung) == {"slots_hung"})
        assert not kinds(hung, "live")
        gate.open.set()
        wait_until(lambda: not kinds(hung))


@pytest.mark.django_db(transaction=True)
def test_threads_beyond_their_timeout_in_all_slots_end_its_life():
    """Scenario 59: all slots stuck; it gives up, and says so meanwhile."""
    gate = Gate()
    handler("stuck", ordering="none", timeout=0.2)(gate)
    put("stuck", count=2)
    with dispatching(concurrency=1) as dispatcher:
        wait_until(lambda: "slots_stuck" in kinds(dispatcher, "live"))
        gate.open.set()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("error", "kind"),
    [(OperationalError("connection refused"), "database_away"), (RuntimeError("a fault of ours"), "claims_fail")],
    ids=lambda value: str(value),
)
def test_trouble_begins_with_the_failure_and_ends_with_the_next_claim(monkeypatch, error, kind):
    real = Claimer.claim

    def fail(*arguments, **options):
        connections["default"].close()  # as when the server is gone
        raise error

    with dispatching() as dispatcher:
        wait_until(lambda: not kinds(dispatcher))
        monkeypatch.setattr(Claimer, "claim", fail)
        wait_until(lambda: kinds(dispatcher) == {kind})
        assert not kinds(dispatcher, "live")
        assert not kinds(dispatcher, "started")
        assert type(error).__name__ in judge([dispatcher.vitals.condition()]).ready[0].text
        assert str(error) not in judge([dispatcher.vitals.condition()]).ready[0].text  # it may tell secrets
        monkeypatch.setattr(Claimer, "claim", real)
        wait_until(lambda: not kinds(dispatcher))


@pytest.mark.django_db(transaction=True)
def test_trouble_of_one_loop_is_over_when_another_one_succeeds():
    """A renewal failed, and then there was nothing to renew: the claims know better."""
    dispatcher = Dispatcher(plan())
    dispatcher.stop()
    assert dispatcher.run() == 0  # at once: only what it saw is of interest here
    outage = Outage("default", "The heartbeat")
    dispatcher.vitals.watch(outage)
    for _ in range(2):
        outage.note(OperationalError("gone"))
    assert dispatcher.vitals.condition().trouble == "away"
    dispatcher.vitals.work()
    assert dispatcher.vitals.condition().trouble == ""
    outage.note(OperationalError("gone again"))
    assert dispatcher.vitals.condition().trouble == "away"
    outage.over()
    assert dispatcher.vitals.condition().trouble == ""


@pytest.mark.django_db(transaction=True)
def test_missing_tables_are_named_until_they_are_there(monkeypatch):
    real = Claimer.claim

    def fail(*arguments, **options):
        raise ProgrammingError("no such table")

    monkeypatch.setattr(Claimer, "claim", fail)
    monkeypatch.setattr(schema, "missing", lambda using: ["outbox_message.holder"])
    with dispatching() as dispatcher:
        wait_until(lambda: kinds(dispatcher) == {"tables_missing"})
        assert kinds(dispatcher, "started") == {"tables_missing"}
        text = judge([dispatcher.vitals.condition()]).ready[0].text
        assert "outbox_message.holder" in text
        assert "manage.py migrate outbox --database default" in text
        monkeypatch.setattr(Claimer, "claim", real)
        wait_until(lambda: not kinds(dispatcher))


@pytest.mark.django_db(transaction=True)
def test_a_loop_that_does_not_come_back_is_stuck(monkeypatch):
    """Scenario 59: the process is there, and delivers nothing."""
    monkeypatch.setattr(vitals, "PATIENCE", 0.1)
    hang, real = threading.Event(), Claimer.claim

    def wait(*arguments, **options):
        hang.wait(30)
        return real(*arguments, **options)

    with dispatching(lease=3) as dispatcher:
        wait_until(lambda: not kinds(dispatcher))
        monkeypatch.setattr(Claimer, "claim", wait)
        wait_until(lambda: kinds(dispatcher, "live") == {"loop_stuck"})
        hang.set()
        wait_until(lambda: not kinds(dispatcher, "live"))


@pytest.mark.django_db(transaction=True)
def test_tables_and_columns_that_lack_are_found(monkeypatch):
    assert schema.missing("default") == []
    field = schema.apps.get_model("outbox", "Message")._meta.get_field("holder")
    monkeypatch.setattr(field, "column", "no_such_column")
    monkeypatch.setattr(schema.apps.get_model("outbox", "Attempt")._meta, "db_table", "not_migrated")
    assert schema.missing("default") == ["not_migrated", "outbox_message.no_such_column"]


@pytest.mark.django_db(transaction=True)
def test_asking_makes_no_statement(django_assert_num_queries):
    with dispatching() as dispatcher:
        wait_until(lambda: not kinds(dispatcher))
        with (
            probing(lambda: judge([dispatcher.vitals.condition()])) as address,
            django_assert_num_queries(0),
        ):
            assert ask(address, "/readyz")[0] == 200


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/livez?verbose=1"])
def test_all_well_is_200_with_what_was_seen(path):
    with probing(lambda: judge([WELL])) as address:
        status, body = ask(address, path)
    body = json.loads(body)
    assert (status, body["ok"], body["problems"]) == (200, True, [])
    assert body["seen"][0]["using"] == "default"


def test_trouble_is_503_with_the_reason():
    with probing(lambda: judge([replace(WELL, trouble="away", error="OperationalError")])) as address:
        assert ask(address, "/livez")[0] == 200
        status, body = ask(address, "/readyz")
    problem = json.loads(body)["problems"][0]
    assert status == 503
    assert problem == {
        "problem": "database_away",
        "where": "default",
        "text": "the database is away and is waited for (OperationalError)",
    }


def test_other_paths_are_404_and_name_the_known_ones():
    with probing(lambda: judge([WELL])) as address:
        status, body = ask(address, "/healthz")
    assert (status, json.loads(body)["known"]) == (404, ["/livez", "/readyz", "/startupz"])


def test_a_head_request_has_no_body_and_others_are_refused():
    with probing(lambda: judge([WELL])) as address:
        assert ask(address, "/livez", "HEAD") == (200, b"")
        assert ask(address, "/livez", "POST")[0] == 501


def test_a_verdict_that_fails_is_500_and_is_told(caplog):
    def fail():
        raise RuntimeError("broken")

    with probing(fail) as address:
        assert ask(address, "/livez") == (500, b'{"ok": false}\n')
    assert "could not be answered" in caplog.text


def test_a_client_that_says_nothing_holds_up_nobody():
    with probing(lambda: judge([WELL])) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            assert ask(address, "/livez")[0] == 200


def test_a_client_that_goes_away_is_no_news(caplog):
    with probing(lambda: judge([WELL])) as address:
        host, port = address.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
                client.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert ask(address, "/livez")[0] == 200
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_port_that_is_taken_is_an_error():
    with probing(lambda: Verdict()) as address, pytest.raises(OSError):
        Probes("127.0.0.1", int(address.rsplit(":", 1)[1]), lambda: Verdict())


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_it_listens_on_ipv6_too():
    try:
        probes = Probes("::1", 0, lambda: judge([WELL]))
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        assert probes.address.startswith("http://[::1]:")
        assert ask(probes.address, "/livez")[0] == 200
    finally:
        probes.close()


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The probes' clock, which moves by hand."""

    class Clock:
        now = 100.0

    monkeypatch.setattr("outbox.probes.time.monotonic", lambda: Clock.now)
    return Clock


def touched(path):
    """Whether a file was touched since it was last asked for."""
    before = path.stat().st_mtime
    os.utime(path, (1, 1))
    return before > 1


def test_the_file_is_touched_once_a_second_while_the_process_lives(tmp_path, clock):
    path = tmp_path / "alive"
    file, verdict = LivenessFile(path), judge([WELL])
    assert touched(path)
    file.note(lambda: verdict)
    assert touched(path)
    file.note(lambda: verdict)
    assert not touched(path)
    clock.now += 1.1
    file.note(lambda: verdict)
    assert touched(path)
    clock.now += 1.1
    file.note(lambda: judge([replace(WELL, silent=99)]))
    assert not touched(path)
    file.close()
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError):
        LivenessFile(tmp_path / "missing" / "alive")


def test_a_file_that_cannot_be_touched_any_more_is_told_once(tmp_path, clock, caplog):
    directory = tmp_path / "run"
    directory.mkdir()
    path = directory / "alive"
    file = LivenessFile(path)
    path.unlink()
    directory.rmdir()
    for _ in range(3):
        clock.now += 2
        file.note(lambda: judge([WELL]))
    file.close()
    assert caplog.text.count("cannot be touched") == 1


def test_the_probes_leave_no_thread_behind():
    with probing(lambda: judge([WELL])) as address:
        ask(address, "/livez")
    end = time.monotonic() + 10
    while any(each.name == "outbox-probes" for each in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
