"""The thread that settles: it groups the outcomes that come in meanwhile, and never gives one up while it may stand."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from django.db import Error, connections, reset_queries

from outbox import wakeup
from outbox.database import close_quietly, give_back, is_loss, is_race, is_unwritable
from outbox.errors import NO_ERROR, ErrorRecord
from outbox.leases import Lease, Settled, Settlement, announce, draw_token, settle
from outbox.leases.runs import end_of_part
from outbox.models import Outcome, State
from outbox.outages import Outage
from outbox.slots import Slots
from outbox.verdicts import release

logger = logging.getLogger("outbox")

LINGER = 0.02  # seconds that an outcome may wait for company while handlers run
BUSY_PAUSE = 0.2  # seconds until a row that somebody has locked is tried again
MOST_FATAL = 3  # sessions that a group may cost before it is split, and written without its texts
LONGEST_PAUSE = 5.0  # seconds between two tries of what the database refuses, at most
MOST_DUE = 1000  # retries whose time is remembered; more are found by polling
NAMES = {State.DELIVERED: "delivered", State.DEAD: "dead", State.DISCARDED: "discarded", State.PENDING: "retried"}


@dataclass(slots=True, kw_only=True)
class Group:
    """Outcomes that are written in one transaction. ``token`` leases what they hand over.

    ``doubtful``: a COMMIT of theirs was not answered; ``bare``: without the error texts, which the database refused.
    ``fatal``: how often this cost the session, though the database answered a new one at once.
    """

    outcomes: list[Settlement]
    token: int = field(default_factory=draw_token)
    doubtful: bool = False
    bare: bool = False
    fatal: int = 0


class Settler:
    """Settles what the workers report. ``woke`` is called when slots are free: there may be something to start."""

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
        self._due: list[float] = []  # a heap of monotonic times at which retries are due
        self._slots = slots
        self._batch = batch
        self._seconds = seconds
        self._may_continue = may_continue
        self._woke = woke
        self._outcomes: list[Settlement] = []
        self._done: list[Settled] = []
        self._since = 0.0
        self._urgent = False  # an outcome of a lane is among them
        self._again: deque[Group] = deque()
        self._later: list[tuple[float, Group]] = []
        self._refused_since: dict[Lease, float] = {}
        self.outage = Outage(using, "The settler")
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="outbox-settler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, lease: Lease, outcome: Settlement | Settled) -> None:
        """Settle this when possible."""
        self.put_all([outcome])

    def put_all(self, outcomes: Sequence[Settlement | Settled]) -> None:
        """Settle what one call came to, together; an atomic handler brings outcomes that are settled already."""
        with self._news:
            before = len(self._outcomes)
            for each in outcomes:
                if isinstance(each, Settled):
                    self._done.append(each)
                else:
                    self._outcomes.append(each)
                    self._urgent = self._urgent or each.lease.message.lane is not None
            if not before:
                self._since = time.monotonic()
            elif len(self._outcomes) > before and self._linger(time.monotonic()) > 0:
                return  # the thread sleeps until these have company; each time that it wakes in vain costs
            self._news.notify()

    def stop(self, timeout: float | None = None) -> None:
        """Settle what is there, then end the thread."""
        with self._news:
            self._stopped = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def next_due(self) -> float:
        """The monotonic time at which the first of the known retries is due; infinite if there is none."""
        with self._news:
            return self._due[0] if self._due else float("inf")

    def forget_due(self) -> None:
        """Retries that are due by now: the claim that follows looks for them."""
        now = time.monotonic()
        with self._news:
            while self._due and self._due[0] <= now:
                heappop(self._due)

    def _loop(self) -> None:
        try:
            while (group := self._next()) is not None:
                try:
                    self._write(group)
                except BaseException:  # this thread must never end, whatever foreign code it meets
                    logger.exception("The settler failed; it goes on.")
                reset_queries()
                give_back(self.using)
        finally:
            close_quietly(self.using)

    def _next(self) -> Group | None:
        """The next group: all there is, once it is worth a transaction. None: stopped and nothing left."""
        with self._news:
            while True:
                now = time.monotonic()
                self._ripen(now)
                if self._again:
                    return self._again.popleft()
                if self._done:
                    done, self._done = self._done, []
                    break
                wait = self._linger(now)
                if self._outcomes and wait <= 0:
                    end = end_of_part(self._outcomes, self._batch)
                    group, self._outcomes = self._outcomes[:end], self._outcomes[end:]
                    self._urgent = bool(self._outcomes)
                    return Group(outcomes=group)
                if self._stopped and not self._outcomes and not self._later:
                    return None
                if not self._outcomes:
                    wait = min((at for at, _ in self._later), default=now + 60.0) - now
                self._news.wait(max(0.0, wait))
        self._finish(done)
        return Group(outcomes=[])

    def _ripen(self, now: float) -> None:
        """Take up again what was put off until now: what is in doubt by itself, under its token, the rest together."""
        ripe = [each for at, each in self._later if at <= now]
        if ripe:
            self._later = [(at, each) for at, each in self._later if at > now]
            self._again += [each for each in ripe if each.doubtful]
            self._outcomes += [outcome for each in ripe if not each.doubtful for outcome in each.outcomes]
            self._urgent = True

    def _linger(self, now: float) -> float:
        """Seconds that the outcomes may still wait for company: none in a lane, and none when no handler runs."""
        if self._stopped or self._urgent or len(self._outcomes) >= self._batch or self._slots.is_quiet():
            return 0.0
        return self._since + LINGER - now

    def _write(self, group: Group) -> None:
        """Settle a group; what fails is done again, until it stands or its lease is over and this process stops."""
        if not group.outcomes:
            return
        try:
            results = settle(
                self.using,
                group.outcomes,
                token=group.token,
                seconds=self._seconds,
                hand_over=self._may_continue,
                recheck=group.doubtful,
            )
        except Error as error:
            if is_loss(connections[self.using], error):
                self._wait_for_the_database(group, error)
            else:
                self._refused(group, error)
        except Exception as error:
            self._refused(group, error)
        else:
            self.outage.over()
            self._finish([each for each in results if each.status != "busy"])
            busy = [each.settlement for each in results if each.status == "busy"]
            if busy:
                self._put_off(group, busy, BUSY_PAUSE)

    def _wait_for_the_database(self, group: Group, error: Error) -> None:
        pause = self.outage.note(error)
        group.doubtful = True
        group.fatal += not is_unwritable(connections[self.using], error) and self._is_answered()
        if group.fatal >= MOST_FATAL:  # no outage: these statements end their session, as a packet that is too large
            self._refused(group, error)
        elif not (self._stopped and all(each.lease.deadline < time.monotonic() for each in group.outcomes)):
            self._again.appendleft(group)
            time.sleep(pause)

    def _is_answered(self) -> bool:
        """Whether the database opens a new session just now, and works."""
        try:
            connections[self.using].ensure_connection()
            return bool(connections[self.using].is_usable())  # a pooler may answer for a server that is away
        except Error:
            return False

    def _refused(self, group: Group, error: Exception) -> None:
        """One outcome that the database refuses must not spoil the others; at last it is written without its texts."""
        if len(group.outcomes) > 1:
            alone = [Group(outcomes=[each], token=group.token, doubtful=group.doubtful) for each in group.outcomes]
            self._again.extendleft(reversed(alone))
            return
        [outcome] = group.outcomes
        if isinstance(error, Error) and is_race(connections[self.using], error):
            self.outage.note(error)
            self._put_off(group, [outcome], BUSY_PAUSE)
        elif outcome.error is not NO_ERROR and not group.bare:
            bare = ErrorRecord(type=outcome.error.type, text="The text of this error could not be stored.")
            outcome = replace(outcome, error=bare)
            self._again.appendleft(Group(outcomes=[outcome], token=group.token, doubtful=group.doubtful, bare=True))
        else:
            self._try_later(group, outcome, error)

    def _put_off(self, group: Group, outcomes: list[Settlement], seconds: float) -> None:
        again = Group(outcomes=outcomes, token=group.token, doubtful=group.doubtful)
        self._later.append((time.monotonic() + seconds, again))

    def _try_later(self, group: Group, outcome: Settlement, error: Exception) -> None:
        """Keep what is refused for a reason unknown, for a lease at least: whoever runs the database may mend it."""
        now, lease = time.monotonic(), outcome.lease
        if lease not in self._refused_since:
            self._refused_since[lease] = now
            logger.error("Message %s cannot be settled; it is tried again.", lease.id, exc_info=error)
        refused_for = now - self._refused_since[lease]
        if refused_for < self._seconds and not (self._stopped and refused_for > LONGEST_PAUSE / 2):
            self._put_off(group, [outcome], min(LONGEST_PAUSE, max(BUSY_PAUSE, refused_for)))
            return
        logger.error("Message %s cannot be settled; its lease will run out.", lease.id, exc_info=error)
        del self._refused_since[lease]
        self._slots.end(lease)

    def _finish(self, results: list[Settled]) -> None:
        now = time.monotonic()
        woken = False
        for each in results:
            done, lease = each.settlement, each.settlement.lease
            self._count(each)
            self._refused_since.pop(lease, None)
            if each.next is not None:
                if not self._slots.hand_over(lease, each.next):
                    self.put(each.next, release(each.next))
                continue
            self._slots.end(lease)
            again_soon = done.state == State.PENDING and done.until is None
            if again_soon and len(self._due) < MOST_DUE:
                with self._news:
                    heappush(self._due, now + done.wait)
            woken = woken or lease.message.lane is not None or (again_soon and done.wait == 0)
        if any(each.next is None for each in results):
            self._woke()
        if woken:
            wakeup.hint(self.using)
        announce(results)

    def _count(self, result: Settled) -> None:
        """Count what became of attempts; what was given back is none."""
        if result.status == "lost":
            self.counts["skipped"] += 1
        elif result.settlement.outcome not in (Outcome.RELEASED, Outcome.INTERRUPTED):
            self.counts[NAMES[result.settlement.state]] += 1
