"""The processes of a run: writers and dispatchers, started, watched and replaced; every death is noted."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos import journal, plan, terms

ROOT = Path(__file__).resolve().parent.parent.parent
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
YOUNG = 10.0  # seconds in which a process may not yet know what to do at a stop
AGAIN_AFTER = 0.3  # seconds until a dispatcher that has ended is started again
ZONE = 3600  # seconds by which single dispatchers believe the time to be later, or earlier


def processes():
    """(pid, parent) of every process that lives; zombies do not."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            yield int(entry.parent.name), int(parent)


class Part:
    """One process that the run keeps alive: a dispatcher (perhaps with children), or a writer."""

    def __init__(self, name, arguments, environment):
        self.name = name
        self.process = None
        self.started_at = 0.0
        self.members = []  # its process and the children of it, as last seen
        self.done = False
        self._arguments = arguments
        self._environment = environment
        self._start_at = 0.0

    def keep(self, log):
        """Start it if it has ended, after a moment."""
        now = time.monotonic()
        if self.process is not None and (code := self.process.poll()) is not None:
            journal.note("ended", part=self.name, pid=self.process.pid, code=code)
            self.process, self._start_at = None, now + AGAIN_AFTER
            self.done = self.name.startswith("writer") and code == 0
        if self.process is None and not self.done and now >= self._start_at:
            self.start(log)

    def start(self, log):
        self.started_at = time.monotonic()
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, self._arguments())],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        journal.note("started", part=self.name, pid=self.process.pid)


class Troupe:
    """All processes of a run. Call `look` often: a death is noted as between two looks."""

    def __init__(self, given, directory, faketime):
        self.writers = [
            Part(f"writer {number}", lambda number=number: self._writer(number), {}) for number in range(plan.WRITERS)
        ]
        self.dispatchers = [
            Part("single", lambda: dispatch(), {}),
            Part("pair", lambda: dispatch("--processes", 2), {}),
            Part("ahead", lambda: dispatch(), skewed(faketime, ZONE)),
            Part("behind", lambda: dispatch(), skewed(faketime, -ZONE)),
        ]
        self._journal = directory / journal.LINES
        self._logs = directory
        self._alive = set()
        self._looked_at = time.monotonic()

    def _writer(self, number):
        """It goes on after the last transaction that it began."""
        lines = [each for each in journal.read(self._journal, "begun") if each["writer"] == number]
        first = max((each["transaction"] for each in lines), default=0) + 1
        return ["-m", "tests.chaos.writer", number, first]

    def keep(self):
        for each in [*self.writers, *self.dispatchers]:
            each.keep(self._logs / f"{each.name}.log")

    def look(self):
        """See who lives, and note who has died since."""
        parents = dict(processes())
        alive = set()
        for each in [*self.writers, *self.dispatchers]:
            each.members = []
            if each.process is not None:
                children = [pid for pid, parent in parents.items() if parent == each.process.pid]
                each.members = [pid for pid in (each.process.pid, *children) if pid in parents]
            alive.update(each.members)
        now = time.monotonic()
        for pid in self._alive:  # children of a dead parent live on for a while
            if pid not in parents:
                journal.note("died", pid=pid, after=self._looked_at)
        self._alive = {pid for pid in self._alive if pid in parents} | alive
        self._looked_at = now

    def victims(self):
        """The processes of all dispatchers."""
        return [pid for each in self.dispatchers for pid in each.members]

    def stop(self):
        """Ask all dispatchers to stop; returns their exit codes by name, None for one that does not end."""
        found = [each for each in self.dispatchers if each.process is not None]
        grown = [each.name for each in found if time.monotonic() - each.started_at > YOUNG]
        for each in found:
            each.process.send_signal(signal.SIGTERM)
        codes = {}
        for each in found:
            with suppress(subprocess.TimeoutExpired):
                codes[each.name] = each.process.wait(terms.GRACE + 15)
        return {name: codes.get(name) for name in grown}

    def end(self):
        """Kill what is left, with its children."""
        self.look()
        for each in [*self.writers, *self.dispatchers]:
            if each.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()
        for pid in self._alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def dispatch(*options):
    times = ("--lease", terms.LEASE, "--poll", terms.POLL, "--grace", terms.GRACE)
    return [
        "manage.py",
        "outbox_dispatch",
        *times,
        "--concurrency",
        terms.CONCURRENCY,
        "--batch",
        terms.BATCH,
        *options,
    ]


def skewed(library, seconds):
    """The environment in which a process believes the time to be another; its monotonic clock stays right."""
    if not library:
        return {}
    return {
        "LD_PRELOAD": library,
        "FAKETIME": f"{seconds:+d}s",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
