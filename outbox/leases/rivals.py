"""Several processes that claim at once: each tries for a random part of what is due, not all for the oldest rows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")
BLOCKS = 4  # parts of what a look reads where rivals were met; the oldest rows are tried for by every fourth claim
CALM = 50  # claims without a rival after which all begin at the oldest row again
CROWD = 4  # one row in so many that somebody else took shows a rival; fewer may be a lock that lasts


@dataclass(slots=True)
class Rivals:
    """Whether others claimed the same rows at the same moment, not long ago."""

    _left: int = 0

    def meet(self, missed: int, *, tried: int) -> None:
        """Note how many of the rows that a claim tried for somebody else had."""
        self._left = CALM if missed * CROWD >= max(tried, 1) else max(0, self._left - 1)

    @property
    def just_met(self) -> bool:
        return self._left == CALM

    @property
    def blocks(self) -> int:
        """How many times its limit a look should read, to choose one part."""
        return BLOCKS if self._left else 1


def begin_anywhere(rows: list[Row], size: int, blocks: int) -> list[Row]:
    """The rows from a random one of the first ``blocks`` parts of ``size`` rows on, as far as such parts are whole."""
    whole = min(len(rows) // size, blocks)
    first = size * random.randrange(whole) if whole > 1 else 0  # noqa: S311 - spreading, not secrecy
    return rows[first:]
