"""What one dispatcher process holds, and what may start next: bookkeeping in memory, without a database.

A lease is *queued* (claimed, not charged: its handler has not started), *ready* (charged, waits for a worker thread),
*running*, or *ending* (its outcome is being settled). The heartbeat renews all of them. A slot is occupied from the
charge to the end of the handler; in a lane to the settlement, so that the next message of the lane finds it free.

Of the leases that a list handler gets in one call, the first stands for all of them here (`Lease.call`) from the moment
when they are ready until the handler has returned; each ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from outbox.handlers import Handler
from outbox.heartbeat import promise
from outbox.leases import Lease, unbroken
from outbox.queues import Queues
from outbox.ready import Ready
from outbox.wants import Want, Wants

STILL_BUSY = 0.1  # of the slots
MOMENT = 0.005  # seconds
OTHERS_EVERY = 0.1  # seconds, while messages are queued, between two looks for those of other handlers


@dataclass(slots=True, eq=False)
class Running:
    """A handler that is running; ``abandoned`` once it ran out of time: its slot is somebody else's now."""

    lease: Lease
    started: float
    abandoned: bool = False


class Slots:
    """The slots of a process. Every method may be called by any thread."""

    def __init__(
        self, *, concurrency: int, handlers: Sequence[Handler], batch: int, lease_seconds: float, prefetch: bool
    ) -> None:
        self.concurrency = concurrency
        self.handlers = handlers
        self._lease_seconds = lease_seconds
        self._wants = Wants(
            concurrency=concurrency, handlers=handlers, batch=batch, lease_seconds=lease_seconds, prefetch=prefetch
        )
        self._queued = Queues((each.name, deque()) for each in handlers)
        self._forming: list[list[Lease]] = []
        self._running: dict[Lease, Running] = {}
        self._ending: set[Lease] = set()
        self._occupied: set[Lease] = set()
        self._busy: Counter[str] = Counter()
        self._turns = OrderedDict.fromkeys(self._queued)  # whose turn it is: the latest to start comes last
        self._others_at = time.monotonic()
        self._withdrawn = False
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._ready = Ready(self._lock)

    def cap(self, handler: Handler) -> int:
        """How many slots one handler may fill."""
        return self._wants.cap(handler)

    def await_room(self) -> None:
        """Wait a moment for quick handlers to leave their slots, so that few statements charge whatever is next."""
        with self._lock:
            if self._wants.are_quick(self._busy):
                self._room.wait_for(self._is_roomy, timeout=MOMENT)

    def want(self) -> Want:
        """What to claim now: what can start at once, or also a stock for handlers that are known to be quick."""
        with self._lock:
            return self._wants.now(self._queued.counts(), self._busy, len(self._occupied))

    def want_for_others(self) -> Want:
        """What to claim before queued messages fill the free slots: now and then, those of which nothing is queued.

        So no topic waits until the stock of another is gone.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._others_at < OTHERS_EVERY or not any(self._queued.values()):
                return Want(limit=0, start=0, room={})
            self._others_at = now
            return self._wants.for_others(self._queued.counts(), self._busy, len(self._occupied))

    def load(self) -> dict[str, int]:
        """By handler name how many messages are held."""
        with self._lock:
            return {name: self._busy[name] + len(leases) for name, leases in self._queued.items()}

    def unqueue(self, name: str) -> list[Lease]:
        """Take back what is queued of one handler, to give it back to the database."""
        with self._lock:
            leases = list(self._queued[name])
            self._queued[name].clear()
            self._ending.update(leases)
            return leases

    def add(self, leases: Iterable[Lease]) -> None:
        """Take new leases: charged ones start as soon as a thread is free, the others are queued."""
        with self._lock:
            for lease in leases:
                promise(lease, self._lease_seconds)
                if lease.charged:
                    self._occupy(lease)
                    self._ready.put([lease])
                else:
                    self._queued[lease.handler.name].append(lease)

    def hand_over(self, ended: Lease, successor: Lease) -> bool:
        """Give the slot of a settled lease to the next message of its lane, before anybody else.

        False after `withdraw`: the successor is held, but it must be given back.
        """
        with self._lock:
            self.end(ended)
            promise(successor, self._lease_seconds)
            if self._withdrawn:
                self._ending.add(successor)
                return False
            self._occupy(successor)
            self._ready.put_first(successor)
            return True

    def startable(self) -> list[Lease]:
        """Queued leases, in turn one call of each handler, for which there is a slot; the slots are taken, turns kept.

        They must be charged, and then given to `start`, or to `put_back` if that failed.
        """
        with self._lock:
            found: list[Lease] = []
            caps = {each.name: self.cap(each) for each in self.handlers}
            names = deque(name for name in self._turns if self._queued[name])
            while names and len(self._occupied) < self.concurrency:
                name = names.popleft()
                if self._busy[name] >= caps[name]:
                    continue
                call = self._queued.pop_call(name)
                if len(call) > 1:
                    self._forming.append(call)
                self._occupy(call[0])
                self._ending.update(call)
                self._turns.move_to_end(name)
                found += call
                if self._queued[name]:
                    names.append(name)
            return found

    def start(self, charged: Collection[Lease]) -> list[Lease]:
        """Make charged leases ready for the worker threads, but for those behind a gap in a lane, which it returns."""
        with self._lock:
            left: list[Lease] = []
            self._ending.difference_update(charged)
            for call in self._take_forming():
                missing = set(call).difference(charged)
                held = unbroken(call, missing)
                left += set(call).difference(missing, held)
                charged = [each for each in charged if each not in call]
                if held:
                    self._vacate(call[0])
                    self._occupy(held[0])
                    held[0].company = held[1:]
                    self._ready.put(held[:1])
            self._ending.update(left)
            self._ready.put(charged)
            return left

    def put_back(self, leases: Sequence[Lease]) -> None:
        """Queue leases again that could not be charged."""
        with self._lock:
            self._take_forming()
            for lease in reversed(leases):
                self.end(lease)
                self._queued[lease.handler.name].appendleft(lease)

    def _take_forming(self) -> list[list[Lease]]:
        forming, self._forming = self._forming, []
        return forming

    def take(self) -> Lease | None:
        """The next lease to run, with its company, for a worker thread; waits for one. None: there will be no more."""
        with self._lock:
            lease = self._ready.take()
            if lease is None:
                return None
            self._running[lease] = Running(lease, time.monotonic())
            return lease

    def finished(self, lease: Lease) -> bool:
        """A handler returned. False when it had been abandoned for running out of time."""
        with self._lock:
            ran = self._running.pop(lease)
            self._wants.learn(lease.handler, time.monotonic() - ran.started)
            self._ending.add(lease)
            self._ending.update(lease.company)
            if lease.message.lane is None or lease.handler.batch:
                self._vacate(lease)
            return not ran.abandoned

    def end(self, lease: Lease) -> None:
        """The outcome of a lease is settled, or it is lost: it is held no more."""
        with self._lock:
            self._ending.discard(lease)
            self._vacate(lease)

    def abandon_overdue(self) -> list[Lease]:
        """Running leases whose handlers are out of time; their slots are free now, their threads are not."""
        now = time.monotonic()
        with self._lock:
            active = [ran for ran in self._running.values() if not ran.abandoned]
            overdue = [ran for ran in active if now - ran.started > ran.lease.handler.timeout]
            for ran in overdue:
                ran.abandoned = True
                self._vacate(ran.lease)
            return [ran.lease for ran in overdue]

    def next_timeout(self) -> float:
        """Seconds until a running handler is out of time or a queue has to stand back; infinite if neither will be."""
        now = time.monotonic()
        with self._lock:
            ends = [ran.started + ran.lease.handler.timeout for ran in self._running.values() if not ran.abandoned]
            if any(self._queued.values()):
                ends.append(self._others_at + OTHERS_EVERY)
        return max(0.0, min(ends) - now) if ends else float("inf")

    def held(self) -> list[Lease]:
        """Every lease to renew; an abandoned one only in a lane, where nobody may start before its thread has ended."""
        with self._lock:
            ready = [lease for first in self._ready for lease in first.call]
            running = [
                lease
                for ran in self._running.values()
                for lease in ran.lease.call
                if not ran.abandoned or lease.message.lane is not None
            ]
            return [*self._queued.all(), *ready, *running, *self._ending]

    def lanes(self) -> set[int]:
        """The lanes of what is held."""
        return {lease.message.lane for lease in self.held() if lease.message.lane is not None}

    def unfinished(self) -> list[Running]:
        """Every handler that still runs."""
        with self._lock:
            return list(self._running.values())

    def abandoned(self) -> int:
        """How many threads are stuck in handlers that ran out of time."""
        with self._lock:
            return sum(ran.abandoned for ran in self._running.values())

    def withdraw(self) -> list[Lease]:
        """Take back everything that has not started, to give it back to the database."""
        with self._lock:
            self._withdrawn = True
            leases = [lease for first in self._ready.clear() for lease in first.call] + list(self._queued.all())
            for queue in self._queued.values():
                queue.clear()
            self._ending.update(leases)
            return leases

    def is_empty(self) -> bool:
        """Whether nothing is held that will still be settled (abandoned threads do not count)."""
        with self._lock:
            waiting = self._ready or self._ending or any(self._queued.values())
            return not waiting and all(ran.abandoned for ran in self._running.values())

    def is_quiet(self) -> bool:
        """Whether no handler runs and none is held that will (abandoned threads do not count)."""
        with self._lock:
            waiting = self._ready or any(self._queued.values())
            return not waiting and all(ran.abandoned for ran in self._running.values())

    def close(self) -> None:
        """Let the worker threads end once nothing is ready."""
        with self._lock:
            self._ready.close()

    def _occupy(self, lease: Lease) -> None:
        self._occupied.add(lease)
        self._busy[lease.handler.name] += 1

    def _vacate(self, lease: Lease) -> None:
        if lease in self._occupied:
            self._occupied.remove(lease)
            self._busy[lease.handler.name] -= 1
            if self._is_roomy():
                self._room.notify()

    def _is_roomy(self) -> bool:
        return len(self._occupied) <= self.concurrency * STILL_BUSY
