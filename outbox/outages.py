"""How a thread gets through the absence of its database: one warning, growing pauses with jitter, a new connection."""

from __future__ import annotations

import logging
import random

from django.db import Error, connections

from outbox.database import close_quietly, is_loss

logger = logging.getLogger("outbox")

FIRST_PAUSE = 0.1  # seconds, doubled with each failure in a row
LONGEST_PAUSE = 5.0  # seconds: work must be resumed within seconds of the database's return


class Outage:
    """The failures in a row of one loop. ``who`` is told in the log."""

    def __init__(self, using: str, who: str) -> None:
        self.using = using
        self.who = who
        self.failures = 0

    def note(self, error: Exception) -> float:
        """Log a failure, drop the connection, and return how many seconds to wait before the next try.

        A database that is away is told once per outage; anything else is a fault and is told each time.
        """
        self.failures += 1
        if isinstance(error, Error) and is_loss(connections[self.using], error):
            if self.failures == 1:
                logger.warning("%s: the database %r is away and is waited for: %s", self.who, self.using, error)
        else:
            logger.error("%s: a round failed; it goes on.", self.who, exc_info=error)
        if isinstance(error, Error):
            close_quietly(self.using)
        pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 10))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not secrecy

    def over(self) -> None:
        """The loop works (again)."""
        if self.failures:
            logger.info("%s: the database %r answers again.", self.who, self.using)
            self.failures = 0
