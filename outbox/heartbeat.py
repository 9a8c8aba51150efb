"""Renew what this process holds, on a thread and a connection of its own, so that no handler can starve it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable

from django.db import Error, connections, reset_queries

from outbox.database import close_quietly, is_loss, is_race
from outbox.leases import Lease, renew

logger = logging.getLogger("outbox")

BEATS_PER_LEASE = 3
GROUP = 500  # leases renewed by one statement pair
BUSY_PAUSE = 1.0  # seconds until rows that somebody has locked are tried again
GIVE_UP_AFTER = 3  # leases without a successful renewal, while other statements succeed
WARN_BEFORE = 0.1  # of a lease: handlers are told so long before their lease may run out


class Heartbeat:
    """Renews ``held()`` every third of a lease.

    ``report`` is called after each beat (the registration), ``works()`` tells when another statement of this process
    last succeeded (monotonic), ``give_up(reason)`` is called when renewal alone keeps failing.
    """

    def __init__(
        self,
        *,
        using: str,
        seconds: float,
        held: Callable[[], list[Lease]],
        report: Callable[[], None],
        works: Callable[[], float],
        give_up: Callable[[str], None],
    ) -> None:
        self.using = using
        self.seconds = seconds
        self._held = held
        self._report = report
        self._works = works
        self._give_up = give_up
        self._succeeded = time.monotonic()
        self._failing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="outbox-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        self._stopped.set()
        self._thread.join(timeout)

    def _loop(self) -> None:
        pause = 0.0
        try:
            while not self._stopped.wait(pause):
                try:
                    busy = self._beat()
                    self._report()
                    pause = min(BUSY_PAUSE, self.seconds / BEATS_PER_LEASE) if busy else self.seconds / BEATS_PER_LEASE
                except Error as error:
                    pause = self._failed(error)
                except Exception:
                    logger.exception("The heartbeat failed; it goes on.")
                    pause = self.seconds / (4 * BEATS_PER_LEASE)
                self._warn(self._held())
                reset_queries()
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
            _tell_lost(part, renewal.lost)
        self._succeeded = time.monotonic()
        if self._failing:
            logger.info("Leases are renewed again on database %r.", self.using)
            self._failing = False
        return busy

    def _failed(self, error: Error) -> float:
        """Note a failed renewal; returns how long to wait before the next try."""
        if not self._failing:
            logger.warning("Leases cannot be renewed on database %r; trying again: %s", self.using, error)
            self._failing = True
        if is_loss(connections[self.using], error):
            close_quietly(self.using)
        silent = time.monotonic() - self._succeeded
        others_work = time.monotonic() - self._works() < self.seconds
        if silent > GIVE_UP_AFTER * self.seconds and others_work and not is_race(connections[self.using], error):
            self._give_up(f"leases could not be renewed for {silent:.0f} s while other statements succeed: {error}")
        return min(1.0, self.seconds / 10) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not secrecy

    def _warn(self, leases: Iterable[Lease]) -> None:
        """Tell handlers whose lease may run out before the next beat can help."""
        soon = time.monotonic() + self.seconds * WARN_BEFORE
        for lease in leases:
            if lease.deadline < soon:
                lease.view.revoke()


def _tell_lost(leases: Iterable[Lease], lost: frozenset[int]) -> None:
    for lease in leases:
        if lease.id in lost:
            lease.view.revoke()  # its outcome will be refused, and that is when the loss is told
