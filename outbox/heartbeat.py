"""Renew what this process holds, on a thread and a connection of its own, so that no handler can starve it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import Error, connections, reset_queries

from outbox.database import close_quietly, give_back, is_race, is_unwritable
from outbox.leases import Lease, renew
from outbox.outages import Outage
from outbox.registration import REPORT_EVERY

logger = logging.getLogger("outbox")

BEATS_PER_LEASE = 3
GROUP = 500  # leases renewed by one statement pair
BUSY_PAUSE = 1.0  # seconds until rows that somebody has locked are tried again
REPORT_PAUSE = 2.0  # seconds until a report that failed is tried again
GIVE_UP_AFTER = 3  # leases without a renewal, while other statements succeed
WARN_BEFORE = 0.1  # of a lease: handlers are told so long before their lease may run out


class Heartbeat:
    """Renews ``held()`` every third of a lease.

    ``report`` is called after each beat (the registration), and sooner again if it says that it failed.
    ``worked_at()`` tells when another statement of this process last succeeded (monotonic), as one does every
    ``window`` seconds at least while the database is there; ``give_up(reason)`` is called when renewal alone keeps
    failing.
    """

    def __init__(
        self,
        *,
        using: str,
        seconds: float,
        held: Callable[[], list[Lease]],
        report: Callable[[], bool],
        worked_at: Callable[[], float],
        window: float,
        give_up: Callable[[str], None],
    ) -> None:
        self.using = using
        self.seconds = seconds
        self.pause = min(seconds / BEATS_PER_LEASE, REPORT_EVERY)
        self._held = held
        self._report = report
        self._worked_at = worked_at
        self._window = window
        self._give_up = give_up
        self.outage = Outage(using, "The heartbeat")
        self._alone_since: float | None = None
        self._beaten_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="outbox-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def catch_up(self) -> None:
        """Renew at once, in the caller's thread, when beats were missed: after an outage, or a freeze of the process.

        Else a claim would take over, from this very process, what it holds and has perhaps delivered already.
        """
        if time.monotonic() - self._beaten_at > self.pause + self.seconds / BEATS_PER_LEASE:
            self._beat()

    def _loop(self) -> None:
        pause = 0.0
        try:
            while not self._stopped.wait(pause):
                try:
                    busy = self._beat()
                    reported = self._report()
                    pause = min(self.pause, BUSY_PAUSE if busy else self.pause if reported else REPORT_PAUSE)
                except Exception as error:
                    pause = self._failed(error)
                reset_queries()
                give_back(self.using)
        finally:
            close_quietly(self.using)

    def _beat(self) -> bool:
        """Renew everything; returns whether some rows were locked by somebody else."""
        leases = self._held()
        busy = False
        for first in range(0, len(leases), GROUP):
            part = leases[first : first + GROUP]
            renewal = renew(self.using, part, self.seconds)
            busy = busy or bool(renewal.busy)
            for lease in part:
                promise(lease, self.seconds)
            for lease in renewal.lost:
                lease.view.revoke()  # its outcome will be refused, and that is when the loss is told
        self._alone_since = None
        self._beaten_at = time.monotonic()
        if leases:  # else nothing was asked, and nothing is known
            self.outage.over()
        return busy

    def _failed(self, error: Exception) -> float:
        """Note a failed renewal; returns how long to wait before the next try."""
        now = time.monotonic()
        connection = connections[self.using]
        passing = isinstance(error, Error) and (is_race(connection, error) or is_unwritable(connection, error))
        pause = min(self.outage.note(error), self.seconds / 10)
        if passing or now - self._worked_at() > self._window:  # the database is slow or away, for everybody
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > GIVE_UP_AFTER * self.seconds + self._window:
            silent = now - self._alone_since
            self._give_up(f"leases could not be renewed for {silent:.0f} s while other statements succeed: {error}")
        return pause


def promise(lease: Lease, seconds: float) -> None:
    """Tell a handler how long its lease of ``seconds`` is safe: to shortly before its end."""
    lease.view.safe_until = lease.deadline - WARN_BEFORE * seconds
