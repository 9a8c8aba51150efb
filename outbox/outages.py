"""How a thread gets through the absence of its database: one warning, growing pauses with jitter, a new connection."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter

from django.db import Error, connections

from outbox.database import close_quietly, is_loss, is_race, is_unwritable

logger = logging.getLogger("outbox")

FIRST_PAUSE = 0.1  # seconds, doubled with each failure in a row
LONGEST_PAUSE = 3.0  # seconds: work must be resumed within seconds of the database's return
TOLD_FOR = 60.0  # seconds in which all threads of a process tell of one outage once
CROWDED = 3  # failures in a row for somebody else's lock, before that is told

_told_at: dict[str, float] = {}
_losses: Counter[str] = Counter()  # how often a thread of this process has lost its session, by alias


class Freshness:
    """Whether a thread's session may still stand: when another thread has lost its own, it does not either.

    A handler must not be the one to find out, for that would be a failed attempt.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter(_losses)

    def renew(self, using: str) -> None:
        """Drop this thread's session if the database was lost since the last call."""
        if _losses[using] != self._seen[using]:
            self._seen[using] = _losses[using]
            close_quietly(using)


class Outage:
    """The failures in a row of one loop. ``who`` is told in the log.

    ``trouble`` is what goes on: "away", "locked", "failing", or nothing. ``error``: the type of the last failure.
    """

    def __init__(self, using: str, who: str) -> None:
        self.using = using
        self.who = who
        self.failures = 0
        self._told = False
        self.trouble = self.error = ""
        self.noted_at = 0.0

    def note(self, error: Exception) -> float:
        """Log a failure, drop the connection, and return how many seconds to wait before the next try.

        A database that is away is told once per outage, by whichever thread notices it first, and a lock that lasts
        once; anything else is a fault and is told each time. That a session has ended is no outage yet: a server may
        have found it idle for too long, and the next try opens a new one.
        """
        self.failures += 1
        self.error = type(error).__name__
        self.noted_at = time.monotonic()
        if isinstance(error, Error):
            self._tell(error)
            close_quietly(self.using)
        else:
            self.trouble = "failing"
            logger.error("%s: a round failed; it goes on.", self.who, exc_info=error)
        pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 10))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not secrecy

    def _tell(self, error: Error) -> None:
        connection = connections[self.using]
        if is_loss(connection, error):
            _losses[self.using] += 1
            if self.failures == 1 and connection.connection is not None and not is_unwritable(connection, error):
                logger.debug("%s: its session on the database %r has ended: %s", self.who, self.using, error)
                return
            self.trouble = "away"
            now = time.monotonic()
            known = self._told or now - _told_at.get(self.using, float("-inf")) < TOLD_FOR
            self._told, _told_at[self.using] = True, now
            level = logging.DEBUG if known else logging.WARNING
            logger.log(level, "%s: the database %r is away and is waited for: %s", self.who, self.using, error)
        elif is_race(connection, error):
            self.trouble = "locked" if self.failures >= CROWDED else ""
            level = logging.WARNING if self.failures == CROWDED else logging.DEBUG
            logger.log(level, "%s: database %r is kept locked by somebody: %s", self.who, self.using, error)
        else:
            self.trouble = "failing"
            logger.error("%s: a round failed; it goes on.", self.who, exc_info=error)

    def over(self) -> None:
        """The loop works (again)."""
        if self.failures:
            level = logging.INFO if self._told else logging.DEBUG
            logger.log(level, "%s: the database %r answers again.", self.who, self.using)
            self.failures, self._told, self.trouble = 0, False, ""
