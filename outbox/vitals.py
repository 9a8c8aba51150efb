"""What the loops of one dispatcher saw last: written by them, read by whoever wants to know how it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from django.db import Error

from outbox import schema
from outbox.outages import LONGEST_PAUSE, Outage
from outbox.plans import Plan
from outbox.slots import Slots

PATIENCE = 3.0  # times the longest wait of a loop that it may be silent
LONG = 0.5  # of its timeout, after which a handler runs for very long


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How one dispatcher is. Durations are seconds.

    ``silent``: since the loop ticked last, ``patience``: how long it may be. ``running``: handlers in slots, ``slow``
    of them for more than half of their timeout; ``stuck``: threads beyond it. ``trouble``: what the latest statements
    met, "away", "locked" or "failing"; ``error`` is its type, never its text, for that may tell secrets.
    """

    using: str
    silent: float
    patience: float
    slots: int
    running: int = 0
    slow: int = 0
    stuck: int = 0
    claimed: bool = False
    stopping: bool = False
    trouble: str = ""
    error: str = ""
    missing: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"silent": round(self.silent, 1)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Condition:
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class Vitals:
    """The loop ticks with each round; the loops that talk to the database let their outages be watched."""

    def __init__(self, plan: Plan, slots: Slots, is_stopping: Callable[[], bool]) -> None:
        self.worked_at = time.monotonic()  # when a statement succeeded last
        self._plan = plan
        self._slots = slots
        self._is_stopping = is_stopping
        self._outages: Sequence[Outage] = ()
        self._ticked_at = self.worked_at
        self._claimed = False
        self._missing: list[str] = []

    def watch(self, *outages: Outage) -> None:
        self._outages = outages

    def tick(self) -> None:
        self._ticked_at = time.monotonic()

    def work(self, *, claimed: bool = False) -> None:
        """A statement succeeded."""
        self.worked_at = time.monotonic()
        if claimed and not self._claimed:
            self._claimed = True
        if claimed and self._missing:
            self._missing = []

    def look_for_tables(self, error: Exception) -> None:
        """After an error that no outage explains: are the tables there? For the loop only, on its own connection."""
        if isinstance(error, Error) and any(each.trouble == "failing" for each in self._outages):
            try:
                self._missing = schema.missing(self._plan.using)
            except Error:
                self._missing = []

    def condition(self) -> Condition:
        """How the dispatcher is now. Any thread may ask; no statement is made."""
        now = time.monotonic()
        ran = self._slots.unfinished()
        active = [now - each.started > LONG * each.lease.handler.timeout for each in ran if not each.abandoned]
        trouble = self._trouble()
        return Condition(
            using=self._plan.using,
            silent=now - self._ticked_at,
            patience=PATIENCE * max(self._plan.lease, 2 * self._plan.poll, LONGEST_PAUSE),
            slots=self._plan.concurrency,
            running=len(active),
            slow=sum(active),
            stuck=len(ran) - len(active),
            claimed=self._claimed,
            stopping=self._is_stopping(),
            trouble=trouble.trouble if trouble else "",
            error=trouble.error if trouble else "",
            missing=self._missing,
        )

    def _trouble(self) -> Outage | None:
        """The outage that was noted last, unless another loop succeeded since."""
        latest = max((each for each in self._outages if each.trouble), key=lambda each: each.noted_at, default=None)
        return latest if latest is not None and latest.noted_at > self.worked_at else None
