"""The three outboxes that this app replaces, row by row: their ids A1 to C10 stand in the names of the tests.

Only public names are imported, and the example apps. `start` and `dispatch` run the dispatcher as a process of its own,
`dispatch_here` runs the same command, with its threads and claims, in this process: where a test looks inside a handler
that is running, or where one process more would show nothing more.
"""

import asyncio
import dataclasses
import io
import json
import logging
import os
import re
import signal
import threading
import time
import uuid
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connections, transaction

from example_project import world
from example_project.ai_jobs import services as ai_jobs
from example_project.ai_jobs.models import Job
from example_project.ai_jobs.outbox_handlers import PATIENCE as JOB_PATIENCE
from example_project.ai_jobs.queues import job_queue
from example_project.live import mirror, views
from example_project.live.models import Delivery
from example_project.media import services as media
from example_project.media import topics
from example_project.media.models import Item
from example_project.media.outbox_handlers import PATIENCE as MEDIA_PATIENCE
from example_project.media.outbox_handlers import notify
from example_project.tasks import services as tasks
from example_project.tasks.engine import engine
from example_project.tasks.outbox_handlers import PATIENCE as TASK_PATIENCE
from example_project.tasks.routes import Task
from outbox import (
    DurableCommand,
    Effect,
    EventKeyConflict,
    Intent,
    NotInTransaction,
    PostCommitEffectError,
    RetryPolicy,
    UnknownTopic,
    astage,
    stage,
    stage_many,
)
from outbox.signals import buried, retried
from outbox.testing import drain, staged_messages
from tests.waiting import wait_until

# A process looks at all databases of the settings when it starts.
pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.process]


# --- what the tests stand on ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def outside(settings, tmp_path):
    """A world of this test's own: a fresh journal, names on the brokers that nobody else uses, fair weather."""
    settings.WORLD_JOURNAL = str(tmp_path / "journal.jsonl")
    settings.WORLD_NAMESPACE = f"test-{uuid.uuid4().hex[:8]}"
    settings.WORLD_LATENCY, settings.WORLD_FAULTS, settings.WORLD_DOWN = {}, 0.0, []
    yield settings
    engine().forget()
    job_queue().forget()


@pytest.fixture
def start(spawn, outside):
    """Start a dispatcher process in this test's world: `latency` and `down` say how that behaves."""

    def start(*options, latency="", down=""):
        environment = {
            "WORLD_JOURNAL": outside.WORLD_JOURNAL,
            "WORLD_NAMESPACE": outside.WORLD_NAMESPACE,
            "WORLD_LATENCY": latency,
            "WORLD_DOWN": down,
        }
        return spawn("outbox_dispatch", "--poll", "0.1", *options, environment=environment)

    return start


@pytest.fixture
def dispatch(start):
    """Run a dispatcher process to its end; returns what it printed."""

    def dispatch(*options, **weather):
        return finish(start(*options, **weather))

    return dispatch


def finish(process):
    assert process.wait(timeout=60) == 0, process.output()
    return process.output()


def stop(process):
    process.send_signal(signal.SIGTERM)
    return finish(process)


def dispatch_here(*options):
    """Run a dispatcher in this process to its end; returns what it printed."""
    output = io.StringIO()
    call_command("outbox_dispatch", "--poll", "0.1", *options, stdout=output)
    return output.getvalue()


def run_async(awaitable):
    """Run it like an asynchronous program, and close the connection of the thread that its synchronous code used."""

    async def program():
        try:
            return await awaitable
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(program())


def message(key):
    (found,) = [each for each in staged_messages() if each.event_key == key]
    return found


def is_leased(key):
    return message(key).lease_token is not None


def is_delivered(key):
    return message(key).state == "delivered"


def states(topic=None):
    return [each.state for each in staged_messages(topic)]


def received(place=None):
    return [line["key"] for line in world.received(place)]


def stage_now(topic, payload=None, **options):
    with transaction.atomic():
        return stage(topic, {} if payload is None else payload, **options)


# --- A. Media manager: durable application events ---------------------------------------------------------------------


def test_a01_an_intent_is_a_frozen_value_and_reaches_its_handler_as_it_was_staged(dispatch):
    intent = Intent(topics.RENAMED, {"item": "42", "title": "é"}, event_key="renamed:42")
    assert (intent.topic, intent.event_key, intent.payload_version) == (topics.RENAMED, "renamed:42", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        intent.event_key = "other"
    with transaction.atomic():
        stage_many([intent, Intent(topics.RENAMED, {}, event_key="from the future", payload_version=2)])
    dispatch("--drain")
    assert world.received() == [
        {"place": "listeners", "key": "renamed:42", "event": "media.renamed", "item": "42", "title": "é"}
    ]
    assert message("from the future").attempt == 0  # no handler knows its version: it waits


def test_a02_staging_joins_the_callers_transaction_and_never_commits_it(dispatch):
    with transaction.atomic():
        media.request("Rolled back")
        stage_many([Intent(topics.RATED, {}, event_key="rolled back")])
        transaction.set_rollback(True)
    with transaction.atomic():
        item = media.request("Committed")
        stage_many([Intent(topics.RATED, {}, event_key="rated"), Intent(topics.WATCHED, {}, event_key="watched")])
    run_async(astage(topics.SCANNED, {}, event_key="scanned"))
    with pytest.raises(NotInTransaction):
        stage(topics.MOVED, {})
    dispatch("--drain")
    assert sorted(received()) == sorted([f"media.requested:{item.pk}", "rated", "watched", "scanned"])


def test_a03_eleven_events_and_three_effects_are_registered_and_nothing_else_can_be_staged(dispatch):
    assert len(topics.EVENTS) == 11
    assert len(topics.EFFECTS) == 3
    with transaction.atomic():
        item = Item.objects.create(title="A film")
        for topic in (*topics.EVENTS, *topics.EFFECTS):
            media.happened(topic, item)
        with pytest.raises(UnknownTopic, match=r"media\.removed"):
            stage("media.remove", {})
    dispatch("--drain")
    assert len(received("listeners")) == 11
    assert [len(received(place)) for place in ("notifications", "media server", "subtitles")] == [1, 1, 1]


def test_a04_a_dispatcher_refuses_to_start_while_required_topics_have_no_handler(spawn, tmp_path):
    app = tmp_path / "incomplete"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "outbox_handlers.py").write_text(
        "from outbox import Topic\n"
        "LATER = Topic('zebra.seen', required=True)\n"
        "SOONER = Topic('ant.seen', required=True)\n"
        "OPTIONAL = Topic('bee.seen')\n"
    )
    (tmp_path / "incomplete_settings.py").write_text(
        "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'incomplete']\n"
    )
    environment = {
        "DJANGO_SETTINGS_MODULE": "incomplete_settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]),
    }
    checked = spawn("outbox_dispatch", "--once", environment=environment)
    assert checked.wait(timeout=60) == 1
    assert re.findall("required topic '(.+?)'", checked.output()) == ["ant.seen", "zebra.seen"]
    unchecked = spawn("outbox_dispatch", "--once", "--skip-checks", environment=environment)
    assert unchecked.wait(timeout=60) == 1
    assert "ant.seen, zebra.seen." in unchecked.output()


def test_a05_a_claim_may_be_for_one_topic_or_leave_some_out_or_be_by_key():
    with transaction.atomic():
        for topic in (topics.RATED, topics.MOVED, topics.WATCHED, topics.NOTIFICATION):
            stage(topic, {"title": "A film"}, event_key=topic.name)
    dispatch_here("--drain", "--topic", "media.rated")
    assert received() == ["media.rated"]
    dispatch_here("--drain", "--exclude-topic", "media.moved", "--exclude-topic", "media.notif*")
    assert received() == ["media.rated", "media.watched"]
    item = media.request("Another film")
    media.finish_download(item.pk)  # claims its own notification by key, not the older one
    assert received("notifications") == [f"media.notification:{item.pk}"]
    assert states(topics.MOVED) == ["pending"]


def test_a06_the_attempt_is_the_fence_and_a_lost_lease_overwrites_nothing(start):
    stage_now(topics.MODULE, {"item": "42"}, event_key="scan")
    frozen = start("--lease", "0.5", latency="media server=0.5")
    wait_until(world.visits)
    frozen.send_signal(signal.SIGSTOP)
    try:
        successor = start("--lease", "0.5", latency="media server=1.5")
        newer = wait_until(lambda: message("scan").attempt == 2 and message("scan"))
    finally:
        frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: "lost its lease" in frozen.output())
    meanwhile = message("scan")
    assert (meanwhile.state, meanwhile.attempt, meanwhile.lease_token) == ("pending", 2, newer.lease_token)
    wait_until(lambda: is_delivered("scan"))
    for process in (frozen, successor):
        stop(process)
    assert message("scan").attempt == 2
    # Both did it (the event key tells the media server), unless the first was frozen before its handler began.
    assert received() in (["scan"], ["scan", "scan"])


def test_a07_failures_wait_longer_and_longer_are_told_each_time_and_the_fifth_is_the_last(monkeypatch, caplog):
    assert [MEDIA_PATIENCE.delay(n) for n in range(1, 6)] == [1, 2, 4, 8, None]
    assert RetryPolicy(max_attempts=50, base=1, cap=3600, jitter=False).delay(20) == 3600
    told, waits = [], []

    def observe(event, **_):
        told.append((event.message.attempt, event.died))
        waits.append(event.due_at and event.due_at - event.message.staged_at)

    def refuse(place, key, content):
        raise world.Unreachable("x" * 5000)

    monkeypatch.setattr(world, "deliver", refuse)
    retried.connect(observe)
    buried.connect(observe)
    number = stage_now(topics.NOTIFICATION, {"title": "A film"}, event_key="doomed").ids[0]
    with caplog.at_level(logging.WARNING, "outbox"):
        dispatch_here("--drain")
        drain(ignore_delays=True)
    assert told == [(1, False), (2, False), (3, False), (4, False), (5, True)]
    assert timedelta(seconds=1) <= waits[0] < timedelta(seconds=60)
    assert waits[-1] is None
    lines = [record.getMessage() for record in caplog.records if f"Message {number} " in record.getMessage()]
    assert len(lines) == 5
    assert all("media.notification" in line and f"attempt {n}" in line for n, line in enumerate(lines, 1))
    assert "retried" in lines[0]
    assert "dead" in lines[4]
    assert message("doomed").state == "dead"
    assert 3900 < len(message("doomed").error_text) <= 4000


def test_a08_one_topic_is_serial_different_topics_are_parallel_and_a_slow_one_takes_no_places(monkeypatch):
    with transaction.atomic():
        for number in range(3):
            stage(topics.MODULE, {"item": str(number)}, event_key=f"slow {number}")
            for topic in topics.EVENTS:
                stage(topic, {}, event_key=f"{topic} {number}")
    others = 3 * len(topics.EVENTS)
    lock, all_topics, others_done = threading.Lock(), threading.Barrier(12), threading.Event()
    running, most, order = {}, {}, []

    def deliver(place, key, content):
        topic = key.rpartition(" ")[0]
        with lock:
            running[topic] = running.get(topic, 0) + 1
            most[topic] = max(most.get(topic, 0), running[topic])
        if key.endswith(" 0"):
            all_topics.wait(30)  # the first of each of twelve topics, all at once
        if topic == "slow":
            assert others_done.wait(30)  # it blocks until everything else is through
        with lock:
            running[topic] -= 1
            order.append(key)
            if len([each for each in order if not each.startswith("slow")]) == others:
                others_done.set()

    monkeypatch.setattr(world, "deliver", deliver)
    dispatch_here("--drain", "--concurrency", "20")
    assert set(states()) == {"delivered"}
    assert set(most.values()) == {1}
    for topic in ("slow", *map(str, topics.EVENTS)):
        assert [key for key in order if key.rpartition(" ")[0] == topic] == [f"{topic} {n}" for n in range(3)]


@pytest.mark.slow
def test_a08_what_is_in_flight_is_renewed(start):
    stage_now(topics.MODULE, {"item": "42"}, event_key="long scan")
    processes = [start("--lease", "0.4", latency="media server=1.3") for _ in range(2)]
    wait_until(lambda: is_delivered("long scan"))
    for process in processes:
        process.kill()
    assert message("long scan").attempt == 1
    assert received() == ["long scan"]


def test_a09_work_that_is_given_back_is_due_again_and_its_topic_is_free(start):
    with transaction.atomic():
        stage(topics.MODULE, {"item": "1"}, event_key="first")
        stage(topics.MODULE, {"item": "2"}, event_key="second")
    process = start("--grace", "0.2", latency="media server=60")
    wait_until(world.visits)
    stop(process)
    given_back = message("first")
    assert (given_back.state, given_back.lease_token, given_back.spent) == ("pending", None, 0)
    successor = start()
    wait_until(lambda: is_delivered("second"))
    stop(successor)
    assert received() == ["first", "second"]


def test_a10_a_stop_waits_for_what_runs_and_starts_nothing_more(start):
    with transaction.atomic():
        stage(topics.MODULE, {"item": "1"}, event_key="running")
        stage(topics.MODULE, {"item": "2"}, event_key="not started")
    process = start("--grace", "30", latency="media server=1")
    wait_until(world.visits)  # its handler has started
    stop(process)
    assert received() == ["running"]
    assert is_delivered("running")
    assert (message("not started").state, message("not started").spent) == ("pending", 0)


@pytest.mark.slow
def test_a10_a_stop_with_a_time_limit_leaves_what_still_runs_to_others(start):
    stage_now(topics.MODULE, {"item": "1"}, event_key="running")
    process = start("--grace", "0.2", latency="media server=60")
    wait_until(world.visits)  # its handler has started
    began = time.monotonic()
    stop(process)
    assert time.monotonic() - began < 30
    assert received() == []
    assert message("running").state == "pending"


def test_a11_chosen_effects_are_delivered_right_after_the_commit():
    item = media.request("A film")
    result = media.finish_download(item.pk)
    assert result.completed_effects == (f"media.notification:{item.pk}",)
    assert received() == [f"media.notification:{item.pk}"]
    dispatch_here("--drain")
    assert received("notifications") == [f"media.notification:{item.pk}"]  # not again
    assert set(states()) == {"delivered"}


def test_a11_an_immediate_delivery_that_fails_is_due_again_at_once_and_not_dead(outside):
    outside.WORLD_DOWN = ["notifications"]
    item = media.request("A film")
    with pytest.raises(PostCommitEffectError):
        media.finish_download(item.pk)
    key = f"media.notification:{item.pk}"
    assert (message(key).state, message(key).spent, message(key).lease_token) == ("pending", 0, None)
    outside.WORLD_DOWN = []
    dispatch_here("--drain")
    assert received("notifications") == [key]


def test_a11_a_function_that_returns_false_has_not_confirmed():
    effect = Effect(Intent(topics.NOTIFICATION, {"title": "A film"}, event_key="unsure"), deliver=lambda message: False)
    with pytest.raises(PostCommitEffectError) as caught:
        DurableCommand().execute(lambda: None, (effect,))
    assert caught.value.result.pending_effects == ("unsure",)
    assert message("unsure").state == "pending"


@pytest.mark.slow
def test_a11_what_somebody_else_holds_is_skipped(start):
    intent = Intent(topics.NOTIFICATION, {"title": "A film"}, event_key="taken")
    with transaction.atomic():
        stage_many([intent])
    process = start(latency="notifications=1.5")
    wait_until(lambda: is_leased("taken"))
    result = DurableCommand().execute(lambda: None, (Effect(intent, deliver=notify),))
    assert (result.completed_effects, result.pending_effects) == ((), ("taken",))
    wait_until(lambda: is_delivered("taken"))
    stop(process)
    assert received() == ["taken"]


def effects_of(item):
    return (
        Effect(Intent(topics.NOTIFICATION, media.facts(item), event_key="told"), deliver=notify),
        Effect(Intent(topics.SUBTITLE, media.facts(item), event_key="later")),
    )


def check_command(execute):
    """What A12 asks for; `execute` runs a command, synchronously or not."""
    result = execute(lambda: Item.objects.create(title="A film"), effects_of)
    assert result.value == Item.objects.get()
    assert result.business_committed
    assert (result.completed_effects, result.pending_effects) == (("told",), ("later",))

    def fail():
        Item.objects.create(title="Never")
        raise LookupError

    with pytest.raises(LookupError):
        execute(fail, effects_of)
    twice = Effect(Intent(topics.RATED, {}, event_key="twice"))
    with pytest.raises(ValueError, match="twice"):
        execute(lambda: Item.objects.create(title="Never"), (twice, twice))
    conflict = Effect(Intent(topics.SUBTITLE, {"title": "Another film"}, event_key="later"))
    with pytest.raises(EventKeyConflict):
        execute(lambda: Item.objects.create(title="Never"), (conflict,))
    assert Item.objects.count() == 1


def check_failing_command(execute):
    def refuse(message):
        raise LookupError(message.event_key)

    keys = ("one", "two")
    effects = tuple(Effect(Intent(topics.NOTIFICATION, {"title": key}, event_key=key), deliver=refuse) for key in keys)
    fine = Effect(Intent(topics.NOTIFICATION, {"title": "fine"}, event_key="fine"), deliver=notify)
    with pytest.raises(PostCommitEffectError) as caught:
        execute(lambda: "value", (*effects, fine))
    result = caught.value.result
    assert (result.value, result.business_committed) == ("value", True)
    assert (result.completed_effects, result.pending_effects) == (("fine",), keys)
    assert {key: error.args for key, error in caught.value.errors.items()} == {"one": ("one",), "two": ("two",)}


def test_a12_one_command_commits_business_and_effects_or_neither():
    check_command(DurableCommand().execute)
    check_failing_command(DurableCommand().execute)
    dispatch_here("--drain")
    assert set(states()) == {"delivered"}


def test_a13_the_same_from_asynchronous_code():
    def execute(business, effects):
        return run_async(DurableCommand().aexecute(business, effects))

    check_command(execute)
    check_failing_command(execute)
    item = media.request("Another film")
    assert run_async(media.afinish_download(item.pk)).completed_effects == (f"media.notification:{item.pk}",)
    dispatch_here("--drain")
    assert set(states()) == {"delivered"}


def test_a14_up_to_so_many_due_messages_are_processed_now_and_counted():
    with transaction.atomic():
        stage_many(Intent(topics.NOTIFICATION, {"title": str(n)}, event_key=str(n)) for n in range(5))
    assert counts(dispatch_here("--limit", "2", "--format", "json"))["processed"] == 2
    assert drain(limit=1).processed == 1
    assert counts(dispatch_here("--once", "--format", "json"))["processed"] == 2
    assert sorted(received()) == ["0", "1", "2", "3", "4"]


def counts(output):
    return json.loads(output.strip().splitlines()[-1])


# --- B. UHD media tool: relay into a task engine ----------------------------------------------------------------------


def recordings(count, height=1080):
    return [tasks.import_recording(f"Recording {number}", height) for number in range(count)]


def test_b01_relays_claim_what_they_have_routes_for_oldest_first_and_never_the_same(dispatch, start):
    oldest, *others = recordings(40)
    stage_now("recording.imported", {}, event_key="of a later version", payload_version=2)
    dispatch("--limit", "1")
    assert is_delivered(f"recording:{oldest.pk}:imported")
    relays = [start("--drain", "--batch", "5") for _ in range(3)]
    for relay in relays:
        finish(relay)
    assert len(engine().tasks()) == 40
    assert {message(f"recording:{each.pk}:imported").attempt for each in others} == {1}
    assert (message("of a later version").state, message("of a later version").attempt) == ("pending", 0)


def test_b02_a_route_makes_a_task_or_says_that_there_is_none():
    uhd, hd = tasks.import_recording("UHD", 2160), tasks.import_recording("HD", 1080)
    tasks.finish_probe(uhd)
    tasks.finish_probe(hd)
    dispatch_here("--drain")
    wanted = [task for task in engine().tasks() if task["name"] == "transcode"]
    assert [(task["input"], task["priority"]) for task in wanted] == [
        ({"recording": str(uhd.pk), "height": 2160}, 5),
    ]
    assert set(states()) == {"delivered"}  # that of HD, too, and all the progress


def test_b03_the_event_key_makes_a_crash_between_enqueueing_and_recording_harmless(start, dispatch):
    (recording,) = recordings(1)
    key = f"recording:{recording.pk}:imported"
    task = Task(name="probe", input={"recording": str(recording.pk)})
    process = start("--lease", "0.5", latency="task engine=60")
    wait_until(lambda: is_leased(key))
    engine().enqueue(task, idempotency_key=key, trace_id="before the crash")  # this far the process had come
    process.kill()
    process.wait()
    wait_until(lambda: dispatch("--drain") and is_delivered(key))
    assert [(each["idempotency_key"], each["trace_id"]) for each in engine().tasks()] == [(key, "before the crash")]


def test_b04_the_trace_comes_from_the_route_else_from_the_message_else_it_is_new():
    recording = tasks.import_recording("A lake", 2160, trace_id="of the request")
    tasks.finish_probe(recording)
    tasks.delete(recording)
    stage_now("recording.imported", {"recording": "x", "traceId": "of the payload"}, event_key="payload")
    dispatch_here("--drain")
    traces = {task["idempotency_key"]: task["trace_id"] for task in engine().tasks()}
    assert traces[f"recording:{recording.pk}:imported"] == "of the request"
    assert traces[f"recording:{recording.pk}:deleted"] == f"deletion-{recording.pk}"
    assert traces["payload"] == "of the payload"
    assert re.fullmatch("[0-9a-f]{32}", traces[f"recording:{recording.pk}:probed"])


def test_b05_a_bad_row_waits_longer_and_longer_dies_the_tenth_time_and_spoils_nothing(capsys):
    assert [TASK_PATIENCE.delay(n) for n in range(1, 11)] == [2, 4, 8, 16, 32, 64, 128, 256, 300, None]
    stage_now("recording.imported", {"no": "recording"}, event_key="bad")
    good = recordings(5)
    report = counts(dispatch_here("--drain", "--format", "json"))
    assert (report["delivered"], report["retried"]) == (5, 1)
    assert len(engine().tasks()) == len(good)
    call_command("outbox_show", "bad", "--format", "json")
    assert "KeyError" in json.dumps(json.loads(capsys.readouterr().out))
    drain(ignore_delays=True)
    assert (message("bad").state, message("bad").attempt) == ("dead", 10)


def test_b06_deliveries_are_shown_live_in_order_after_they_have_committed(dispatch, client, monkeypatch):
    recording = tasks.import_recording("A lake", 1080)
    tasks.finish_probe(recording)
    dispatch("--drain")  # another process delivers; this one serves the page
    monkeypatch.setattr(views, "LENGTH", -1)
    stream = b"".join(client.get("/live/stream?after=0").streaming_content).decode()
    told = [json.loads(line.removeprefix("data: "))["key"] for line in stream.splitlines() if line.startswith("data")]
    assert sorted(told) == sorted(each.event_key for each in staged_messages())
    progress = [key for key in told if "progress" in key]
    assert progress == [f"recording:{recording.pk}:progress:{percent}" for percent in (25, 50, 75, 100)]
    assert [task["name"] for task in engine().tasks()] == ["probe"]  # the others were only shown


def test_b06_a_mirror_that_fails_is_logged_and_changes_nothing(monkeypatch, caplog):
    def fail(**_):
        raise LookupError("the mirror is broken")

    monkeypatch.setattr(mirror.Delivery.objects, "create", fail)
    recordings(2)
    with caplog.at_level(logging.ERROR, "outbox"):
        dispatch_here("--drain")
    assert states() == ["delivered", "delivered"]
    assert not Delivery.objects.exists()
    assert "the mirror is broken" in caplog.text


def test_b07_starting_twice_is_harmless_and_a_stop_waits(start):
    recordings(40)
    processes = [start(latency="task engine=0.5") for _ in range(2)]
    # Both are at work, five handlers each: one topic may fill half of the ten slots.
    wait_until(lambda: len({row.leased_by for row in staged_messages() if row.lease_token is not None}) == 2)
    for process in processes:
        stop(process)
    rows = staged_messages()
    assert all(row.lease_token is None for row in rows)
    done = [row for row in rows if row.state == "delivered"]
    assert {row.attempt for row in done} == {1}
    assert {task["idempotency_key"] for task in engine().tasks()} == {row.event_key for row in done}


# --- C. AI job service: dispatcher into a job queue -------------------------------------------------------------------


def created(job):
    return f"job:{job.pk}:created"


def stage_event(key, **payload):
    stage_now("ai_job.event", payload, event_key=key)


def test_c01_who_loses_the_race_for_a_claim_skips(start):
    job = ai_jobs.submit("Why?")
    winner_and_loser = [start("--drain", latency="job queue=1") for _ in range(2)]
    for process in winner_and_loser:
        finish(process)
    row = message(created(job))
    assert (row.state, row.attempt) == ("delivered", 1)


def test_c02_the_claims_of_a_dead_process_are_freed_with_a_warning_and_counted(start):
    job = ai_jobs.submit("Why?")
    victim = start("--lease", "0.5", latency="job queue=60")
    wait_until(lambda: is_leased(created(job)))
    victim.kill()
    victim.wait()
    successor = start("--lease", "0.5")
    wait_until(lambda: is_delivered(created(job)))
    output = stop(successor)
    (line,) = [line for line in output.splitlines() if "lost its lease" in line]
    assert "WARNING" in line
    assert str(victim.pid) in line
    assert message(created(job)).attempt == 2


def test_c03_what_can_never_succeed_dies_at_once_with_a_code_that_the_admin_shows(admin_client):
    stage_event("unknown type", type="job.exploded", jobId=str(uuid.uuid4()))
    stage_event("no id", type="job.created")
    stage_event("no such id", type="job.created", jobId="forty-two")
    stage_event("no job", type="job.created", jobId=str(uuid.uuid4()))
    job = ai_jobs.submit("Why?", queue="experimental")
    dispatch_here("--drain")
    codes = {each.event_key: (each.state, each.attempt, each.error_code) for each in staged_messages()}
    assert codes == {
        "unknown type": ("dead", 1, "UNKNOWN_EVENT_TYPE"),
        "no id": ("dead", 1, "INVALID_PAYLOAD"),
        "no such id": ("dead", 1, "INVALID_PAYLOAD"),
        "no job": ("dead", 1, "JOB_NOT_FOUND"),
        created(job): ("dead", 1, "QUEUE_NOT_ALLOWED"),
    }
    page = admin_client.get(f"/admin/outbox/message/{message(created(job)).pk}/change/").content.decode()
    assert "QUEUE_NOT_ALLOWED" in page


def test_c04_a_passing_failure_is_tried_three_times_and_keeps_code_and_text(outside):
    assert [JOB_PATIENCE.delay(n) for n in range(1, 4)] == [2, 4, None]
    job = ai_jobs.submit("Why?")
    outside.WORLD_DOWN = ["job queue"]
    dispatch_here("--drain")
    assert (message(created(job)).state, message(created(job)).error_code) == ("pending", "QUEUE_UNREACHABLE")
    drain(ignore_delays=True)
    row = message(created(job))
    assert (row.state, row.attempt) == ("dead", 3)
    assert (row.error_code, row.error_text) == ("QUEUE_UNREACHABLE", "job queue is down")


def test_c05_the_queue_knows_a_job_by_its_own_id_so_a_second_add_is_a_no_op():
    job = ai_jobs.submit("Why?", queue="gpu")
    ai_jobs.restart(job)
    dispatch_here("--drain")
    assert states() == ["delivered", "delivered"]
    assert job_queue().waiting() == {str(job.pk): "gpu"}


def test_c06_a_finished_job_is_still_delivered():
    job = ai_jobs.submit("Why?")
    Job.objects.update(state=Job.State.FINISHED)
    dispatch_here("--drain")
    assert str(job.pk) in job_queue().waiting()


def test_c07_the_queue_comes_from_the_business_row_within_what_is_allowed():
    wanted = {"": "standard", "standard": "standard", "gpu": "gpu", "batch": "batch", "experimental": None}
    jobs = {name: ai_jobs.submit("Why?", queue=name) for name in wanted}
    dispatch_here("--drain")
    waiting = job_queue().waiting()
    assert {name: waiting.get(str(job.pk)) for name, job in jobs.items()} == wanted


def test_c08_a_pass_reports_what_it_did_and_an_empty_one_is_silent(start, dispatch):
    ai_jobs.submit("Why?")
    ai_jobs.submit("How?", queue="experimental")
    stage_now("recording.imported", {"no": "recording"})
    report = counts(dispatch("--once", "--format", "json"))
    assert report == {"processed": 3, "delivered": 1, "retried": 1, "dead": 1, "discarded": 0, "skipped": 0}
    assert "delivered" in dispatch("--once")  # for people
    idle = start("--exclude-topic", "recording.*")
    job = ai_jobs.submit("When?")
    wait_until(lambda: is_delivered(created(job)))
    before = idle.output()
    time.sleep(0.5)  # five more passes over nothing
    assert idle.output() == before
    stop(idle)


def test_c09_only_a_dispatcher_delivers_and_its_first_look_is_at_once(start):
    job = ai_jobs.submit("Why?")
    assert message(created(job)).attempt == 0
    process = start("--poll", "300")
    wait_until(lambda: is_delivered(created(job)), seconds=60)
    stop(process)


def test_c10_each_dispatcher_has_a_name_of_its_own_that_the_claimed_row_keeps(start):
    job, other = ai_jobs.submit("Why?"), ai_jobs.submit("How?")
    processes = [start("--drain", "--limit", "1") for _ in range(2)]
    for process in processes:
        finish(process)
    names = [message(created(each)).leased_by for each in (job, other)]
    assert names[0] != names[1]
    assert {int(name.split(":")[1]) for name in names} == {process.pid for process in processes}
    assert all(re.search(r":[0-9a-f]{8}$", name) for name in names)
