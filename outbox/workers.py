"""The threads that run handlers: as many as there are slots, and one more for each that is stuck in a handler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import close_old_connections, connections, reset_queries

from outbox import delivery
from outbox.leases import Lease, Settled, Settlement
from outbox.slots import Slots

logger = logging.getLogger("outbox")

Report = Callable[[Lease, Settlement | Settled], None]


class Workers:
    """Daemon threads (a pool's exit hook would hold the process until a stuck handler returns)."""

    def __init__(self, slots: Slots, report: Report) -> None:
        self._slots = slots
        self._report = report
        self._started = 0

    def start(self) -> None:
        for _ in range(self._slots.concurrency):
            self.add()

    def add(self) -> None:
        """Start one more thread."""
        self._started += 1
        threading.Thread(target=self._work, name=f"outbox-worker-{self._started}", daemon=True).start()

    def _work(self) -> None:
        try:
            while (lease := self._slots.take()) is not None:
                outcome = delivery.run(lease)
                reset_queries()
                if not self._slots.finished(lease):
                    self._report_late(lease)
                    return  # another thread has taken this one's place
                self._report(lease, outcome)
                close_old_connections()
        finally:
            connections.close_all()

    def _report_late(self, lease: Lease) -> None:
        """An abandoned handler returned. In a lane only now may its attempt be settled; elsewhere that is done."""
        logger.warning("Message %s: its handler returned long after its timeout.", lease.id)
        if lease.message.lane is not None:
            self._report(lease, delivery.timed_out(lease))
        else:
            self._slots.end(lease)
