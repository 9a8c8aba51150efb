"""The dispatchers of one process, one for each database, each in a thread of its own.

So the main thread is free for signals, whatever the databases do. When one of them gives up, all stop: whoever watches
the process must see it end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from outbox.dispatcher import LAST_WRITES, Dispatcher
from outbox.health import Verdict, judge
from outbox.limits import Limits
from outbox.redaction import redacted

logger = logging.getLogger("outbox")

MARGIN = 5.0  # seconds beyond the grace and the last writes, after which a stop does not wait for its threads any more


class Crew:
    """Works until it is stopped, until a limit is reached, or until all dispatchers have ended by themselves.

    One thread calls `start`, `stop` and `go_on`; the others may be called by any.
    """

    code = 1  # when there are failures

    def __init__(self, dispatchers: Sequence[Dispatcher], limits: Limits) -> None:
        self.dispatchers = dispatchers
        self.recycling = ""  # which limit was reached
        self._limits = limits
        self._threads = {
            each: threading.Thread(target=each.run, name="outbox-loop", daemon=True) for each in dispatchers
        }
        self._born = time.monotonic()
        self._leave_at: float | None = None

    @property
    def counts(self) -> Counter[str]:
        """What became of the messages."""
        counts: Counter[str] = Counter()
        for each in self.dispatchers:
            counts.update(each.counts)
        return counts

    @property
    def failures(self) -> list[str]:
        """Why dispatchers gave up."""
        return [redacted(each.failure, "error") for each in self.dispatchers if each.failure]

    @property
    def left_running(self) -> bool:
        """Whether threads are stuck, so that an orderly end of the interpreter would wait for them."""
        return any(each.left_running for each in self.dispatchers)

    def verdict(self) -> Verdict:
        return judge([each.vitals.condition() for each in self.dispatchers])

    def report(self) -> dict[str, Any]:
        """What a parent wants to know."""
        return {
            "dispatchers": [each.vitals.condition().as_json() for each in self.dispatchers],
            "counts": self.counts,
            "failures": self.failures,
            "recycling": self.recycling,
        }

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def stop(self) -> None:
        """Let all stop, once."""
        if self._leave_at is not None:
            return
        grace = max(each.plan.grace for each in self.dispatchers)
        self._leave_at = time.monotonic() + grace + LAST_WRITES + MARGIN
        for each in self.dispatchers:
            each.stop()
        logger.info("Stopping: nothing more is claimed, and what runs may finish.")

    def go_on(self) -> bool:
        """Look after the threads once; False when they have ended, or hang although they were told to stop."""
        alive = [each for each, thread in self._threads.items() if thread.is_alive()]
        if self._leave_at is None:
            self._check()
        elif time.monotonic() > self._leave_at:
            for each in alive:
                each.abandon()
            return False
        return bool(alive)

    def _check(self) -> None:
        if any(each.failure for each in self.dispatchers):
            self.stop()
            return
        age = time.monotonic() - self._born
        self.recycling = self._limits.reached(processed=self.counts["processed"], age=age)
        if self.recycling:
            logger.info("This process makes room for a fresh one: %s.", self.recycling)
            self.stop()
