"""The charged leases that wait for a thread, and the threads that wait for leases."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from outbox.leases import Lease


class Ready:
    """A queue under the lock of the slots, which every caller holds.

    One thread is woken at a time, and wakes the next one when it has taken a lease: a hundred at once would only fight
    for the interpreter, and quick handlers are done before most of them are awake. A thread that blocks in its handler
    lets the next one run at once.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._leases: deque[Lease] = deque()
        self._work = threading.Condition(lock)
        self._idle = 0  # threads that wait
        self._waking = False  # one of them was told and is not up yet
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def put(self, leases: Iterable[Lease]) -> None:
        self._leases.extend(leases)
        self._wake_one()

    def put_first(self, lease: Lease) -> None:
        self._leases.appendleft(lease)
        self._wake_one()

    def take(self) -> Lease | None:
        """The next lease; waits for one. None: there will be no more."""
        while not self._leases:
            if self._closed:
                return None
            self._idle += 1
            self._work.wait()
            self._idle -= 1
            self._waking = False
        lease = self._leases.popleft()
        self._wake_one()
        return lease

    def clear(self) -> list[Lease]:
        """Take back what no thread has taken."""
        leases = list(self._leases)
        self._leases.clear()
        return leases

    def close(self) -> None:
        """Let the threads end once nothing is left."""
        self._closed = True
        self._work.notify_all()

    def _wake_one(self) -> None:
        if self._leases and self._idle and not self._waking:
            self._waking = True
            self._work.notify()
