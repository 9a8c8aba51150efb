"""Fixtures: a database server of this test's own, known in this process as "private", and dispatchers on it."""

import json
import os
import signal
import sys
import time
from contextlib import suppress

import pytest
from django.core.management import call_command
from django.db import Error, connections

from example_project.settings import database
from outbox.models import Attempt, Breaker, Dispatcher, Intervention, Message
from tests.conftest import ROOT, ManagedProcess
from tests.processes import jobs
from tests.processes.servers import cpu_seconds, private_server
from tests.running import fresh, put
from tests.waiting import wait_until

PRIVATE = "private"


class Site:
    """A server with the outbox's tables on it, and what the tests ask of it again and again."""

    def __init__(self, server, journal, directory):
        self.server = server
        self._journal = journal
        self._directory = directory
        self._processes = []

    def dispatch(self, *options, url=None, query="", lease=5, poll=0.1, grace=10, concurrency=4, **more):
        """Start a dispatcher process on this server; `query` ends its database's URL."""
        always = ("--lease", lease, "--poll", poll, "--grace", grace, "--concurrency", concurrency)
        return self.spawn("outbox_dispatch", *always, *options, url=(url or self.server.url()) + query, **more)

    def spawn(self, *arguments, url=None, changes=None, options=None, environment=None, before=()):
        """Start `manage.py` on this server; `before`: the words of a command that starts it.

        `changes` of the databases by alias, `options` of the outbox: see the settings.
        """
        process = ManagedProcess(
            [*map(str, before), sys.executable, str(ROOT / "manage.py"), *map(str, arguments)],
            log=self._directory / f"process-{len(self._processes)}.log",
            env={
                **os.environ,
                "DATABASE_URL": url or self.server.url(),
                "DJANGO_SETTINGS_MODULE": "tests.processes.settings",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "DATABASE_CHANGES": json.dumps(changes or {}),
                "OUTBOX_OPTIONS": json.dumps(options or {}),
                jobs.JOURNAL: str(self._journal.path),
                **(environment or {}),
            },
        )
        self._processes.append(process)
        return process

    def put(self, topic, payload=None, **options):
        return put(topic, payload if payload is not None else {}, using=PRIVATE, **options)

    def end(self):
        """Kill what still runs, with its children."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.close()

    def close(self):
        """Forget this process's own session, which the server may have ended."""
        with suppress(Error):
            connections[PRIVATE].close()
        connections[PRIVATE].connection = None

    def settled(self, *found):
        """Whether all these messages are settled; False while nobody can tell."""
        try:
            return all(fresh(each).state != "pending" for each in found)
        except Error:
            self.close()
            return False

    def alive(self):
        """The rows of the dispatchers that have reported themselves."""
        return list(Dispatcher.objects.using(PRIVATE).order_by("id"))

    def wait_for_dispatchers(self, count=1):
        return wait_until(lambda: (found := self.alive())[count - 1 :] and found)


@pytest.fixture
def own_server(django_db_blocker):
    """A running server of the kind that these tests run on, with the outbox's empty tables."""
    vendor = connections["default"].vendor
    if vendor == "sqlite":
        pytest.skip("SQLite has no server")
    server = private_server(vendor)
    with django_db_blocker.unblock():
        heal(server)
        complete = connections.configure_settings({"default": {}, PRIVATE: database(server.url())})
        connections.databases[PRIVATE] = complete[PRIVATE]
        call_command("migrate", database=PRIVATE, verbosity=0)
        for model in (Attempt, Message, Intervention, Dispatcher, Breaker):
            model.objects.using(PRIVATE).all().delete()
        yield server
        heal(server)
        connections[PRIVATE].close()
        del connections[PRIVATE], connections.databases[PRIVATE]


def heal(server):
    """Undo what a test did to the server."""
    if server.is_running():
        server.thaw()
    else:
        server.start()
    server.reset()


@pytest.fixture
def site(own_server, journal, tmp_path):
    site = Site(own_server, journal, tmp_path)
    yield site
    site.end()


class Load:
    """How busy a process keeps a processor, in parts of one."""

    def __init__(self, process):
        self._pid = process.pid
        self._since, self._used = time.monotonic(), cpu_seconds(self._pid)

    def __call__(self):
        return (cpu_seconds(self._pid) - self._used) / (time.monotonic() - self._since)
