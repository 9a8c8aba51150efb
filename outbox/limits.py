"""When a process has worked enough, and makes room for a fresh one."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

JITTER = 0.1  # of the seconds, added at random: processes started together shall not end together
LONGEST = 36525 * 86400.0
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """After how many messages, at how many MB of memory in use, and after how many seconds a process ends."""

    max_messages: int | None = None
    max_rss: float | None = None
    max_seconds: float | None = None
    _drawn: float = field(default_factory=lambda: 1 + random.uniform(0, JITTER))  # noqa: S311 - jitter, not secrecy

    def __post_init__(self) -> None:
        """Refuse what makes no sense, by ValueError."""
        if self.max_messages is not None and (type(self.max_messages) is not int or self.max_messages < 1):
            raise ValueError(f"max-messages is {self.max_messages!r}; it must be a whole number, 1 or more.")
        for name in ("max_rss", "max_seconds"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST:
                raise ValueError(f"{name.replace('_', '-')} is {value!r}; it must be a number greater than 0.")
        if self.max_rss is not None and not STATM.exists():
            raise ValueError("max-rss needs /proc/self/statm, which only Linux has: elsewhere nothing tells honestly.")

    def reached(self, *, processed: int, age: float) -> str:
        """Which limit a process has reached that is so many seconds old; empty while it has reached none."""
        if self.max_messages is not None and processed >= self.max_messages:
            return f"{processed} messages processed"
        if self.max_seconds is not None and age >= self.max_seconds * self._drawn:
            return f"{age:.0f} s old"
        if self.max_rss is not None and (used := rss()) >= self.max_rss:
            return f"{used:.0f} MB of memory in use"
        return ""


def rss() -> float:
    """The memory that this process uses now, in MB; not the most that it ever used."""
    pages = int(STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2
