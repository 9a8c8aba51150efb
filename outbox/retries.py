"""How long a failed message waits before its next attempt, as a pure function of its failures."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


class RandomSource(Protocol):
    def random(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    The n-th failure waits a random time between 0 and ``min(cap, base * factor ** (n - 1))`` seconds, or exactly that
    bound with ``jitter=False``; after ``max_attempts`` failures the message is dead. With the defaults an outage of an
    hour kills nothing. Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("full jitter").
    """

    max_attempts: int = 20
    base: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name in ("max_attempts", "base", "factor", "cap"):
            value, whole = getattr(self, name), name == "max_attempts"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value != value:
                raise ValueError(f"{name} must be a {'whole number' if whole else 'number'}, not {value!r}.")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}.")
        if self.base < 0 or self.cap < 0 or self.factor < 1:
            raise ValueError("A retry policy needs base >= 0, cap >= 0 and factor >= 1.")

    def bound(self, failures: int) -> float:
        """Seconds that the n-th failure waits at most; never overflows, whatever n is."""
        delay = self.base
        for _ in range(failures - 1):
            if delay >= self.cap or self.factor == 1 or delay == 0:
                break
            delay *= self.factor
        return min(delay, self.cap)

    def delay(self, failures: int, source: RandomSource = random) -> float | None:
        """Seconds to wait after so many failures, or None: the budget is spent."""
        if failures >= self.max_attempts:
            return None
        return self.bound(failures) * (source.random() if self.jitter else 1.0)
