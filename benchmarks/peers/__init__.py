"""The peers to compare with: each is installed in an environment of its own, outside the repository, and driven there.

A driver beside this file is run by the interpreter of that environment: it stages no-op messages in an empty database,
drains them, and prints the seconds. A peer that cannot be installed or started ends the run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "outbox-benchmarks"
LONGEST = 300.0  # seconds of one drive


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``messages``: so many are drained in a few seconds; ``faster``: how many times as fast the outbox should be.

    ``stages_singly``: its driver stages by one call per message, in one transaction of Django.
    """

    name: str
    driver: str
    requirements: tuple[str, ...]
    messages: int
    faster: float
    stages_singly: bool = False

    def interpreter(self) -> Path:
        """The Python of the peer's environment, which is made when it is not there yet."""
        contents = hashlib.blake2b(repr((sys.version, self.requirements)).encode(), digest_size=4).hexdigest()
        home = CACHE / f"{self.driver}-{contents}"
        python = home / "bin" / "python"
        if (home / "complete").exists():
            return python
        print(f"Installing {self.name} in {home}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements]
        done = subprocess.run(install, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{self.name} cannot be installed with {sys.executable}:\n{done.stderr}")
        (home / "complete").touch()
        return python

    def drive(self, url: str, messages: int, *, only_stage: bool = False) -> dict[str, Any]:
        """Seconds of staging and of draining so many messages in the empty database at ``url``."""
        return self._run(f"on_{self.driver}.py", url, messages, *(["--only-stage"] if only_stage else []))

    def latency(self, url: str, messages: int) -> list[float]:
        """Milliseconds from commit to handler at a steady rate, of so many messages; sorted."""
        found = self._run(f"latency_of_{self.driver}.py", url, messages)
        return sorted(found["waits"])

    def _run(self, driver: str, url: str, messages: int, *more: str) -> dict[str, Any]:
        script = Path(__file__).with_name(driver)
        command = [self.interpreter(), script, "--database", url, "--messages", str(messages), *more]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST)
        if done.returncode:
            raise SystemExit(f"{self.name} cannot be driven:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def by_name(name: str) -> Peer:
    [found] = [peer for peer in PEERS if peer.name == name]
    return found


PSYCOPG = "psycopg[binary]==3.3.9"
PEERS = [
    Peer(
        name="pgqueuer",
        driver="pgqueuer",
        requirements=("pgqueuer[asyncpg]==1.6.0",),
        messages=20_000,
        faster=1.5,
    ),
    Peer(
        name="django-reliable-outbox",
        driver="reliable_outbox",
        requirements=("django-reliable-outbox==0.1.1", PSYCOPG),
        messages=3_000,
        faster=12,
        stages_singly=True,
    ),
    Peer(
        name="procrastinate",
        driver="procrastinate",
        requirements=("procrastinate==3.10.0", PSYCOPG),
        messages=1_000,
        faster=50,
    ),
    Peer(
        name="django-tasks-db",
        driver="tasks_db",
        requirements=("django-tasks-db==0.13.0", "django>=6.0,<6.1", PSYCOPG),
        messages=500,
        faster=150,
        stages_singly=True,
    ),
    Peer(name="oban", driver="oban", requirements=("oban==0.7.0", PSYCOPG), messages=5_000, faster=6),
    Peer(
        name="django-celery-outbox",
        driver="celery_outbox",
        requirements=("django-celery-outbox==0.4.3", "django>=6.0,<6.1", PSYCOPG),
        messages=3_000,
        faster=1,
        stages_singly=True,
    ),
    Peer(
        name="faststream-outbox",
        driver="faststream_outbox",
        requirements=("faststream-outbox[asyncpg]==0.19.0",),
        messages=10_000,
        faster=1,
    ),
    Peer(
        name="django-domain-events",
        driver="domain_events",
        requirements=("django-domain-events==0.14.1", "django>=6.0,<6.1", PSYCOPG),
        messages=1_000,
        faster=1,
        stages_singly=True,
    ),
]
