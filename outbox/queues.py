"""The leases of a process that are claimed and not charged yet, and which of them go into one call together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile

from outbox.leases import Lease


class Queues(dict[str, deque[Lease]]):
    """By handler name its leases, in the order in which they were claimed."""

    def all(self) -> Iterator[Lease]:
        for queue in self.values():
            yield from queue

    def counts(self) -> dict[str, int]:
        return {name: len(leases) for name, leases in self.items()}

    def pop_call(self, name: str) -> list[Lease]:
        """Take what the next call of a handler gets: one lease, or as many as may go into one list.

        Those of one route, and all or none of a run of a lane: nobody else may start in that lane meanwhile. A message
        with a failure, an outage or a lapse behind it goes alone, so that it can take no others along.
        """
        queue = self[name]
        first = queue[0]
        if first.handler.size == 1:
            return [queue.popleft()]
        call: list[Lease] = []
        while queue:
            unit = _unit(queue)
            alone = not unit[0].is_blameless or unit[0].message.route != first.message.route
            if call and (alone or len(call) + len(unit) > first.handler.size):
                break
            for _ in unit:
                call.append(queue.popleft())
            if alone or len(call) >= first.handler.size:
                break
        return call


def _unit(queue: deque[Lease]) -> list[Lease]:
    """The first lease, with the others of its lane that follow it at once."""
    lane = queue[0].message.lane
    if lane is None:
        return [queue[0]]
    return list(takewhile(lambda lease: lease.message.lane == lane, queue))


def calls(leases: Iterable[Lease]) -> list[list[Lease]]:
    """These leases as calls of their handlers, in their order."""
    queues = Queues()
    for lease in leases:
        queues.setdefault(lease.handler.name, deque()).append(lease)
    found = []
    for name, queue in queues.items():
        while queue:
            found.append(queues.pop_call(name))
    return found
