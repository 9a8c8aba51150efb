"""Which dispatchers are alive: each reports itself in a row now and then. Correctness never depends on that row."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from django.db import Error

from outbox.database import ServerNow, close_quietly
from outbox.fields import JsonText
from outbox.models import Dispatcher
from outbox.texts import storable
from outbox.version import __version__

logger = logging.getLogger("outbox")

REPORT_EVERY = 15.0  # seconds
LOST_AFTER = 4 * REPORT_EVERY  # seconds without a report


def worker_name() -> str:
    """Host, process and a random part: unique even among containers that share a host name and process id 1."""
    return _name_of(os.getpid())


@lru_cache(maxsize=2)
def _name_of(pid: int) -> str:
    host = storable(socket.gethostname(), 80) or "localhost"
    return f"{host}:{pid}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The row of one dispatcher on one database."""

    using: str
    name: str
    handlers: Sequence[str]
    concurrency: int

    def report(self, *, in_flight: int, wakeup: str, stopping: bool = False) -> bool:
        """Say that this process is alive; returns whether that worked. Delivery goes on without the row."""
        now, until = ServerNow(), ServerNow() + int(LOST_AFTER * 1_000_000)
        changing = {"seen_at": now, "lost_at": until, "in_flight": in_flight, "wakeup": wakeup, "stopping": stopping}
        rows = Dispatcher.objects.using(self.using)
        try:
            if rows.filter(name=self.name).update(**changing):
                return True
            rows.create(
                name=self.name,
                host=storable(socket.gethostname(), 255),
                pid=os.getpid(),
                version=__version__,
                handlers=JsonText(json.dumps(list(self.handlers))),
                concurrency=self.concurrency,
                started_at=now,
                **changing,
            )
        except Error as error:
            logger.debug("Dispatcher %s could not report itself: %s", self.name, error)
            close_quietly(self.using)  # it may be lost, and an idle process would not notice otherwise
            return False
        return True

    def leave(self) -> None:
        """Remove the row: this process stopped by itself."""
        try:
            Dispatcher.objects.using(self.using).filter(name=self.name).delete()
        except Error as error:
            logger.debug("Dispatcher %s could not sign off: %s", self.name, error)
