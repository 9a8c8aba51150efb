"""The file of a SQLite database is locked by another process for longer than a statement waits, and than a lease."""

import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection, connections

from outbox.models import Attempt, Message
from tests.running import fresh, put, settled
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="the lock is SQLite's"),
]

LOCK = """
import sqlite3, sys
session = sqlite3.connect(sys.argv[1], isolation_level=None)
session.execute("PRAGMA busy_timeout = 20000")
session.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
session.execute("ROLLBACK")
"""


@contextmanager
def locked(seconds):
    """Another process holds the database meanwhile."""
    connections["default"].close()
    name = connections["default"].settings_dict["NAME"]
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    until = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, until - time.monotonic()))  # the length of the lock is what this is about
    process.communicate()


@pytest.mark.parametrize("timeout", [1, 20], ids=["impatient", "patient"])
def test_a_file_that_is_locked_for_twelve_seconds_costs_time_and_nothing_else(dispatch, journal, timeout):
    """Scenarios 17 and 39: during a claim, a renewal and a settlement; the lease is shorter than that."""
    changes = f'{{"default": {{"OPTIONS": {{"timeout": {timeout}}}}}}}'
    process = dispatch(lease=4, environment={"DATABASE_CHANGES": changes})
    ends = put("work", {"do": [["sleep", 1]]})
    goes_on = put("work", {"do": [["sleep", 13]]})
    journal.wait("start", 2)
    due = put("work", {}, deliver_at=timedelta(seconds=1))
    with locked(12):
        pass
    back = time.monotonic()
    wait_until(lambda: settled(ends, due, goes_on))
    print(f"locked for 12 s, statements wait {timeout} s: all settled {time.monotonic() - back:.1f} s after")
    for row in (ends, goes_on, due):
        assert len(journal.lines("start", key=row.event_key)) == 1
        state = (fresh(row).state, fresh(row).attempt, fresh(row).spent)
        assert state == ("delivered", 1, 1), list(Attempt.objects.values("message", "number", "outcome", "ended_at"))
    assert not Message.objects.pending().exists()
    assert process.poll() is None
    assert " ERROR " not in process.output()
    assert "Traceback" not in process.output()
