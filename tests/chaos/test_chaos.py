"""The short form of the chaos suite on the kind of database that these tests run on, with a server of its own."""

import json
import subprocess
import sys

import pytest
from django.db import connection

from tests.chaos import journal
from tests.chaos.troupe import FAKETIME, ROOT
from tests.processes import servers

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

NAMES = {"postgresql": "postgres", "mysql": "mariadb", "sqlite": "sqlite"}
PROGRAMS = {"postgresql": ("initdb", "postgres"), "mysql": ("mariadb-install-db", "mariadbd"), "sqlite": ()}
SHORT = ("--minutes", "0.6", "--messages", "350", "--kill-every", "2", "--restart-every", "12")


def chaos(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def database():
    """Its name for the command line; skipped where programs are missing, in CI a failure."""
    for name in PROGRAMS[connection.vendor]:
        servers.program(name)
    if connection.vendor != "sqlite":
        servers.library(FAKETIME)
    return NAMES[connection.vendor]


def test_all_promises_are_kept_whatever_happens(database, tmp_path):
    """Scenarios 14, 15, 19, 23, 24, 26, 28 to 32, P1, P4 and the invariants 1, 4 to 11, all at the same time.

    The seed is printed; what the run leaves behind passes, and the same with a lost message does not.
    """
    done = chaos("--database", database, *SHORT, "--directory", tmp_path)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    tables = json.loads((tmp_path / journal.TABLES).read_text())
    lost = tables["messages"].pop()
    (tmp_path / journal.TABLES).write_text(json.dumps(tables))
    judged = chaos("--judge", tmp_path)
    assert judged.returncode == 1, judged.stdout
    assert f"{lost['event_key']} was committed and has 0 rows: LOST" in judged.stdout
