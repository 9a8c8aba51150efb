"""Real dispatchers on the test database, their journal, and files that let their handlers go on."""

import pytest

from outbox.registry import registry
from tests.processes import jobs
from tests.processes.private import own_server, site  # noqa: F401  (fixtures)
from tests.waiting import wait_until


class Journal:
    """What handlers noted, of all processes, in the order in which they wrote."""

    def __init__(self, path):
        self.path = path

    def lines(self, event=None, **parts):
        return [
            line
            for line in jobs.read(self.path)
            if (event is None or line["event"] == event) and all(line[name] == value for name, value in parts.items())
        ]

    def keys(self, event):
        return [line["key"] for line in self.lines(event)]

    def wait(self, event, count=1, seconds=30, **parts):
        """Wait until so many lines are there, and return them."""
        return wait_until(lambda: (found := self.lines(event, **parts))[count - 1 :] and found, seconds)


@pytest.fixture(autouse=True)
def _handlers():
    with registry.isolated():
        jobs.register()
        yield


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal")


@pytest.fixture
def gate(tmp_path):
    """The path of a file for which a handler can wait; calling it makes the file."""

    class Gate:
        path = str(tmp_path / "gate")

        def __call__(self):
            (tmp_path / "gate").touch()

    return Gate()


@pytest.fixture
def dispatch(spawn, journal):
    """Start a dispatcher process; options are its command line, `environment` adds variables."""

    def start(*options, environment=None, lease=2, poll=0.1, grace=10, concurrency=4):
        return spawn(
            "outbox_dispatch",
            *("--lease", lease, "--poll", poll, "--grace", grace, "--concurrency", concurrency),
            *options,
            environment={
                "DJANGO_SETTINGS_MODULE": "tests.processes.settings",
                jobs.JOURNAL: str(journal.path),
                **(environment or {}),
            },
        )

    return start
