"""Handlers that do what their payload says, and note in a journal outside the database what they did.

Payload: ``{"do": [step, ...]}``. A step is a name, or a list of a name and its argument. See `STEPS`.
"""

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path

from django.db import connections, transaction

from outbox import RetryPolicy, handler, stage

REAL_PID = os.getpid()
JOURNAL = "OUTBOX_TEST_JOURNAL"
PATIENCE = 150.0


def note(event, message, **more):
    """Append a line to the journal, in one write, so that it survives a SIGKILL in the next moment."""
    line = {
        "event": event,
        "key": message.event_key,
        "lane": message.ordering_key,
        "id": message.id,
        "attempt": message.attempt,
        "pid": REAL_PID,
        "at": time.monotonic(),  # the same clock for all processes of a machine
        **more,
    }
    descriptor = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def read(path):
    """The lines of a journal."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(message, path):
    """Wait until somebody makes a file."""
    end = time.monotonic() + PATIENCE
    while not Path(path).exists():
        assert time.monotonic() < end, f"nobody made {path}"
        threading.Event().wait(0.02)  # a sleep fails now and then under libfaketime


def spin(message, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def fail(message, times):
    if message.attempt <= times:
        raise ValueError(f"attempt {message.attempt} fails")


def check(message, _):
    note("lost" if message.lease.lost else "held", message)


STEPS = {
    "sleep": lambda message, seconds: time.sleep(seconds),
    "spin": spin,
    "wait": wait_for,
    "fail": fail,
    "check": check,
    "kill": lambda message, _: os.kill(REAL_PID, signal.SIGKILL),
    "exit": lambda message, _: os._exit(1),
    "crash": lambda message, _: ctypes.string_at(0),
    "sys.exit": lambda message, _: exit_thread(),
    "forever": lambda message, _: threading.Event().wait(),
    "stage": lambda message, topic: stage_next(message, topic),
    "shout": lambda message, length: shout(length),
    "ask": lambda message, _: ask("default"),
    "ask other": lambda message, _: ask("other"),
}


def shout(length):
    raise ValueError("".join(map(chr, range(65, 91))) * (length // 26))


def exit_thread():
    raise SystemExit(3)


def stage_next(message, topic):
    """An effect in the database that can be counted."""
    with transaction.atomic():
        stage(topic, {}, event_key=f"{message.event_key}:next")


def ask(alias):
    """Use a database, as most handlers do."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")


def deliver(message):
    note("start", message)
    for step in message.payload.get("do", ()):
        name, argument = step if isinstance(step, list) else (step, None)
        STEPS[name](message, argument)
    note("end", message)


QUICKLY = RetryPolicy(max_attempts=3, base=0.2, factor=1, jitter=False)

TOPICS = {
    "work": {"ordering": "none"},
    "lane": {"ordering": "key"},
    "killer": {"ordering": "none", "retry": QUICKLY},
    "slow": {"ordering": "none", "timeout": 1.0, "retry": QUICKLY},
    "atomic": {"ordering": "none", "atomic": True},
}


def register(without=()):
    for topic, options in TOPICS.items():
        if topic not in without:
            handler(topic, **options)(deliver)
