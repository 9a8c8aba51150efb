"""The lanes that this process holds: a claim keeps off them mostly, for it locks what their settlements need."""

from __future__ import annotations

import time
from collections.abc import Collection

FACTOR = 2.0  # of its own duration a claim leaves those lanes alone, once it has put followers of them to sleep


class Courtesy:
    """Whether the followers in our own lanes are to be left alone now, due as they are.

    They cannot be leased before the lane goes on, and they are put to sleep when a claim leases its next message. But
    they may hide other lanes from the look meanwhile: so now and then a claim does it at once.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def spared(self, ours: Collection[int]) -> Collection[int]:
        """Which of these lanes the claim shall leave alone: all or none."""
        return ours if time.monotonic() < self._until else ()

    def disturbed(self, since: float) -> None:
        """A claim that began at that monotonic time did not leave them alone."""
        now = time.monotonic()
        self._until = now + FACTOR * (now - since)
