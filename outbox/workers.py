"""The threads that run handlers: as many as there are slots, and one more for each that is stuck in a handler."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from django.db import Error, connections

from outbox import delivery
from outbox.calls import Ended
from outbox.isolation import SessionWatch
from outbox.leases import Lease, Settled
from outbox.outages import Freshness
from outbox.slots import Slots
from outbox.verdicts import judge, timed_out

logger = logging.getLogger("outbox")

Report = Callable[[Sequence[Ended]], None]  # the ends of one call


class Workers:
    """Daemon threads (a pool's exit hook would hold the process until a stuck handler returns)."""

    def __init__(self, slots: Slots, report: Report) -> None:
        self._slots = slots
        self._report = report
        self._started = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for _ in range(self._slots.concurrency):
            self.add()

    def add(self) -> None:
        """Start one more thread."""
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"outbox-worker-{self._started}", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def stop(self, timeout: float) -> None:
        """Let the threads end, with their connections; those that are stuck in a handler are left behind."""
        self._slots.close()
        end = time.monotonic() + timeout
        stuck = len(self._slots.unfinished())
        while time.monotonic() < end and sum(each.is_alive() for each in self._threads) > stuck:
            time.sleep(0.005)

    def _work(self) -> None:
        sessions, freshness = SessionWatch(), Freshness()
        try:
            while (first := self._slots.take()) is not None:
                ends = _deliver(first.call, sessions, freshness)
                if not self._slots.finished(first):
                    self._report_late(first.call, ends)
                    return  # another thread has taken this one's place
                self._report(ends)
        finally:
            with suppress(Error):  # what cannot be closed is gone
                connections.close_all()

    def _report_late(self, call: Sequence[Lease], ends: Sequence[Ended]) -> None:
        """An abandoned handler returned. In a lane only now may its attempt be settled; elsewhere that is done."""
        logger.warning("Message %s: its handler returned long after its timeout.", call[0].id)
        report: list[Ended] = []
        for lease, end in zip(call, ends, strict=True):
            if isinstance(end, Settled):
                report.append(end)  # committed in the very moment when the time was up
            elif lease.message.lane is not None:
                report.append(timed_out(lease))
            else:
                self._slots.end(lease)
        self._report(report)


def _deliver(call: Sequence[Lease], sessions: SessionWatch, freshness: Freshness) -> list[Ended]:
    """Run the handler, and clear up after it. Whatever goes wrong with the latter, the outcome stands."""
    ends: list[Ended]
    try:
        freshness.renew(call[0].using)
        ends = delivery.run_list(call, watched=sessions.connections)
    except BaseException as error:  # a fault of ours, or connections that a handler has mangled
        logger.exception("Message %s: its handler could not be judged.", call[0].id)
        ends = [judge(lease, error, None) for lease in call]
    try:
        sessions.renew()
    except BaseException:
        logger.exception("Message %s: what its handler left behind could not be cleared away.", call[0].id)
    return ends
