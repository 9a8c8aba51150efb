"""What the next claim shall bring, by what is held: what can start at once, full lists, a stock for quick handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outbox.handlers import Handler

PREFETCH_SHARE = 0.25  # of the lease that the queue may take to run dry
LEARN = 0.2  # weight of the newest duration in a handler's mean
QUICK = 1e-3  # seconds: in the time of a statement a slot is free many times
SHORTEST = 1e-4  # seconds: a mean below this says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What the next claim shall bring; ``room`` by handler name; ``start``: how many of them start at once."""

    limit: int
    start: int
    room: dict[str, int]


class Wants:
    """``waiting`` and ``busy``, here, are the queued messages and the occupied slots by handler name."""

    def __init__(
        self, *, concurrency: int, handlers: Sequence[Handler], batch: int, lease_seconds: float, prefetch: bool
    ) -> None:
        self._concurrency = concurrency
        self._handlers = handlers
        self._batch = batch
        self._lease_seconds = lease_seconds
        self._prefetch = prefetch
        self._means: dict[str, float] = {}

    def cap(self, handler: Handler) -> int:
        """How many slots one handler may fill: its share, or all of them when it is the only one."""
        if len(self._handlers) < 2:
            return self._concurrency
        return max(1, int(self._concurrency * handler.share))

    def learn(self, handler: Handler, duration: float) -> None:
        """Learn how long a call took."""
        known = self._means.get(handler.name, duration)
        self._means[handler.name] = known + LEARN * (duration - known)

    def are_quick(self, busy: Mapping[str, int]) -> bool:
        """Whether all that occupies a slot is expected to leave it at once: in a lane it stays until it is settled."""
        names = {name for name, count in busy.items() if count}
        slow = {each.name for each in self._handlers if each.ordering != "none" or each.batch}
        return bool(names) and not names & slow and all(self._means.get(name, QUICK) < QUICK for name in names)

    def now(self, waiting: Mapping[str, int], busy: Mapping[str, int], occupied: int) -> Want:
        """What to claim now: what can start at once, or also a stock for handlers that are known to be quick."""
        total = sum(waiting.values())
        now = {each.name: max(0, self._room(each, busy) - waiting[each.name]) for each in self._handlers}
        calls = sum(-(-waiting[each.name] // each.size) for each in self._handlers)
        free = max(0, self._concurrency - occupied - calls)
        stock = {each.name: self._stock(each) for each in self._handlers}
        if total <= self._batch // 2 and any(stock.values()):
            room = {name: count + max(0, stock[name] - waiting[name]) for name, count in now.items()}
            # Whichever handlers they belong to: so many of them have a slot, and need no charge of their own.
            start = min((free, *(now[name] for name, count in room.items() if count)))
            return self._with_lists(Want(limit=self._batch - total, start=0 if total else start, room=room), free)
        return self._with_lists(Want(limit=free, start=free, room=now), free)

    def for_others(self, waiting: Mapping[str, int], busy: Mapping[str, int], occupied: int) -> Want:
        """What can start at once of those handlers of which nothing is queued."""
        room = {each.name: 0 if waiting[each.name] else self._room(each, busy) for each in self._handlers}
        free = self._concurrency - occupied if any(room.values()) else 0
        return self._with_lists(Want(limit=free, start=free, room=room), free)

    def _room(self, handler: Handler, busy: Mapping[str, int]) -> int:
        """How many messages of a handler could run besides those that do."""
        return max(0, self.cap(handler) - busy[handler.name]) * handler.size

    def _with_lists(self, want: Want, free: int) -> Want:
        """Enough to fill a list, if a handler takes lists and has a slot; they are charged when lists are formed."""
        sizes = [each.size for each in self._handlers if each.batch and want.room[each.name]]
        if not sizes or free <= 0:
            return want
        enough = min(max(self._batch, *sizes), free * max(sizes))
        return Want(limit=max(want.limit, enough), start=0, room=want.room)

    def _stock(self, handler: Handler) -> int:
        """How many messages of a handler to hold ready: what it does in a part of the lease, if more than its slots."""
        mean = self._means.get(handler.name)
        if not self._prefetch or mean is None or handler.batch:
            return 0
        stock = int(PREFETCH_SHARE * self._lease_seconds / max(mean, SHORTEST)) * self.cap(handler)
        return min(self._batch, stock) if stock > self.cap(handler) else 0
