"""The thread that settles: it groups the outcomes that come in meanwhile, and never gives one up while it may stand."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from django.db import Error, connections, reset_queries

from outbox import wakeup
from outbox.database import close_quietly, is_loss
from outbox.errors import ErrorRecord
from outbox.leases import Lease, Settled, Settlement, announce, draw_token, settle
from outbox.models import State
from outbox.outages import Outage
from outbox.slots import Slots

logger = logging.getLogger("outbox")

LINGER = 0.02  # seconds that an outcome may wait for company while handlers run
BUSY_PAUSE = 0.2  # seconds until a row that somebody has locked is tried again


class Settler:
    """Settles what the workers report. ``woke`` is called after each group: there may be something to start."""

    def __init__(
        self,
        *,
        using: str,
        slots: Slots,
        batch: int,
        seconds: float,
        may_continue: Callable[[Lease], bool],
        woke: Callable[[], None],
    ) -> None:
        self.using = using
        self.counts: Counter[str] = Counter()
        self.soonest = float("inf")  # monotonic time at which the first of the retries is due
        self._slots = slots
        self._batch = batch
        self._seconds = seconds
        self._may_continue = may_continue
        self._woke = woke
        self._outcomes: list[Settlement] = []
        self._done: list[Settled] = []
        self._since = 0.0
        self._later: list[tuple[float, Settlement]] = []
        self._outage = Outage(using, "The settler")
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="outbox-settler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, lease: Lease, outcome: Settlement | Settled) -> None:
        """Settle this when possible; an atomic handler brings an outcome that is settled already."""
        with self._news:
            if isinstance(outcome, Settled):
                self._done.append(outcome)
            else:
                if not self._outcomes:
                    self._since = time.monotonic()
                self._outcomes.append(outcome)
            self._news.notify()

    def stop(self, timeout: float | None = None) -> None:
        """Settle what is there, then end the thread."""
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join(timeout)

    def _loop(self) -> None:
        try:
            while (group := self._next()) is not None:
                try:
                    self._write(group)
                except Exception:
                    logger.exception("The settler failed; %d messages are delivered again.", len(group))
                    for each in group:
                        self._slots.end(each.lease)
                reset_queries()
        finally:
            close_quietly(self.using)

    def _write(self, group: list[Settlement]) -> None:
        """Settle a group, through any outage: until the last lease is over if this process stops, else for ever."""
        token = draw_token()
        while True:
            try:
                self._settle(group, token, recheck=self._outage.failures > 0)
                return self._outage.over()
            except Error as error:
                if not is_loss(connections[self.using], error):
                    return self._one_by_one(group, error)
                pause = self._outage.note(error)
                if self._stopped and all(each.lease.deadline < time.monotonic() for each in group):
                    return None
                time.sleep(pause)

    def _next(self) -> list[Settlement] | None:
        """The next group: all there is, once it is worth a transaction. None: stopped and nothing left."""
        with self._news:
            while True:
                done, self._done = self._done, []
                if done:
                    break
                now = time.monotonic()
                ripe = [each for at, each in self._later if at <= now]
                if ripe:
                    self._later = [(at, each) for at, each in self._later if at > now]
                    self._outcomes += ripe
                wait = self._linger(now)
                if self._outcomes and wait <= 0:
                    group, self._outcomes = self._outcomes[: self._batch], self._outcomes[self._batch :]
                    return group
                if self._stopped and not self._outcomes and not self._later:
                    return None
                if not self._outcomes:
                    wait = min((at for at, _ in self._later), default=now + 60.0) - now
                self._news.wait(max(0.0, wait))
        self._finish(done)
        return []

    def _linger(self, now: float) -> float:
        """Seconds that the outcomes may still wait for company: none in a lane, and none when no handler runs."""
        if self._stopped or len(self._outcomes) >= self._batch or self._slots.is_quiet():
            return 0.0
        if any(each.lease.message.lane is not None for each in self._outcomes):
            return 0.0
        return self._since + LINGER - now

    def _settle(self, group: list[Settlement], token: int, *, recheck: bool) -> None:
        if not group:
            return
        self._finish(
            settle(
                self.using,
                group,
                token=token,
                seconds=self._seconds,
                hand_over=self._may_continue,
                recheck=recheck,
            )
        )

    def _one_by_one(self, group: list[Settlement], cause: Error) -> None:
        """One outcome that the database refuses must not spoil the others; it is written without its texts."""
        for each in group:
            bare = replace(each, error=ErrorRecord(type=each.error.type, text="The error could not be stored."))
            for settlement in (each, bare):
                try:
                    self._settle([settlement], draw_token(), recheck=False)
                    break
                except Error as error:
                    cause = error
                    if is_loss(connections[self.using], error):
                        close_quietly(self.using)
                        self._later.append((time.monotonic() + BUSY_PAUSE, settlement))
                        break
            else:
                logger.error("Message %s cannot be settled; its lease will run out: %s", each.lease.id, cause)
                self._slots.end(each.lease)

    def _finish(self, results: list[Settled]) -> None:
        now = time.monotonic()
        woken = False
        for each in results:
            done, lease = each.settlement, each.settlement.lease
            if each.status == "busy":
                self._later.append((now + BUSY_PAUSE, done))
                continue
            self.counts[_name(each)] += 1
            if each.next is not None:
                self._slots.hand_over(lease, each.next)
                continue
            self._slots.end(lease)
            again_soon = done.state == State.PENDING and done.until is None
            if again_soon:
                self.soonest = min(self.soonest, now + done.wait)
            woken = woken or lease.message.lane is not None or (again_soon and done.wait == 0)
        self._woke()
        announce(results)
        if woken:
            wakeup.hint(self.using)


def _name(result: Settled) -> str:
    if result.status == "lost":
        return "skipped"
    names = {State.DELIVERED: "delivered", State.DEAD: "dead", State.DISCARDED: "discarded", State.PENDING: "retried"}
    return names[result.settlement.state]
