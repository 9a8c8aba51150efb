"""What one of the dispatchers must do now and then, on a thread of its own: free stranded lanes, and prune."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from django.db import Error, connections, reset_queries

from outbox import retention
from outbox.conf import options
from outbox.database import ServerNow, close_quietly, is_loss
from outbox.models import Dispatcher
from outbox.outages import Outage

logger = logging.getLogger("outbox")

AGAIN_AFTER = 3.0  # seconds until what a database that is away prevented is tried again


class Housekeeping:
    """Runs each duty when it is due, in the one process that has been alive longest; its connection is not kept."""

    def __init__(self, *, using: str, name: str) -> None:
        self.using = using
        self.name = name
        current = options()
        self._duties: list[tuple[Callable[[], object], float]] = [
            (self._sweep, current.SWEEP_EVERY),
            (self._prune, current.PRUNE_EVERY),
        ]
        self._outage = Outage(using, "Housekeeping")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="outbox-housekeeping", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _loop(self) -> None:
        now = time.monotonic()
        duties = [(duty, every) for duty, every in self._duties if every > 0]
        due = {duty: now + every * random.uniform(0.5, 1.0) for duty, every in duties}  # noqa: S311 - spread, not secrecy
        while due and not self._stopped.wait(max(0.0, min(due.values()) - time.monotonic())):
            for duty, every in duties:
                if due[duty] <= time.monotonic():
                    due[duty] = time.monotonic() + (every if self._do(duty) else min(every, AGAIN_AFTER))
            reset_queries()
            close_quietly(self.using)

    def _do(self, duty: Callable[[], object]) -> bool:
        """Returns False when the database was away: then it is not put off for its whole interval."""
        try:
            if self._is_eldest():
                duty()
        except Error as error:
            if is_loss(connections[self.using], error):
                self._outage.note(error)
                return False
            logger.warning("Housekeeping on database %r is put off: %s", self.using, error)
        except Exception:
            logger.exception("Housekeeping on database %r failed; it goes on.", self.using)
        else:
            self._outage.over()
        return True

    def _is_eldest(self) -> bool:
        alive = Dispatcher.objects.using(self.using).filter(lost_at__gt=ServerNow(), stopping=False)
        eldest = alive.order_by("id").values_list("name", flat=True).first()
        return eldest is None or eldest == self.name

    def _sweep(self) -> None:
        retention.sweep(self.using)

    def _prune(self) -> None:
        retention.prune(self.using, stopping=self._stopped)
