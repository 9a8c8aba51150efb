"""How long a dispatcher works and how much it takes: until stopped, once, until nothing is due, or a given number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from outbox.conf import checked
from outbox.handlers import Handler
from outbox.leases import Claim
from outbox.models import Outcome
from outbox.wants import Want

CONTENDED_LOOKS = 40  # without progress, until --drain leaves rows to those who have locked them
NOTHING = Want(limit=0, start=0, room={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one dispatcher works. Durations are seconds; ``limit``: start at most so many messages, then stop."""

    using: str
    handlers: Sequence[Handler]
    concurrency: int
    lease: float
    poll: float
    grace: float
    batch: int
    mode: Literal["run", "once", "drain"] = "run"
    limit: int | None = None
    exit_on_database_error: bool = False

    def __post_init__(self) -> None:
        """Refuse what the settings would refuse, and a limit below 1, by ValueError."""
        for name in ("concurrency", "lease", "poll", "grace", "batch"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, checked(name.upper(), value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} is {value!r}; it must be {error}.") from None
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit is {self.limit!r}; it must be a whole number, 1 or more.")

    @property
    def ends_by_itself(self) -> bool:
        return self.mode != "run" or self.limit is not None


class Progress:
    """How far a plan is fulfilled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._left = plan.limit
        self._claims = 0
        self._misses = 0

    @property
    def may_hand_over(self) -> bool:
        """Whether messages may start that no claim has counted."""
        return self.plan.mode != "once" and self._left is None

    def within(self, want: Want) -> Want:
        """What to claim of what the slots want."""
        if want.limit <= 0:
            return NOTHING
        if self.plan.mode == "once":
            if self._claims:
                return NOTHING
            most = self.plan.batch if self._left is None else min(self.plan.batch, self._left)
            return Want(limit=most, start=0, room=dict.fromkeys(want.room, most))
        if self._left is not None:
            most = min(want.limit, self._left)
            return Want(limit=most, start=min(most, want.start), room=want.room)
        return want

    def note(self, claim: Claim) -> None:
        """Count a claim that was made."""
        self._claims += 1
        if self._left is not None:
            self._left -= len(claim.leases)
        self._misses = self._misses + 1 if (claim.contended or claim.snoozed) and not claim.leases else 0

    def is_fulfilled(self, claim: Claim, *, was_empty: bool, is_empty: bool) -> bool:
        """Whether the work is done. ``was_empty``: nothing was held when the claim, the latest, was made."""
        if not self.plan.ends_by_itself:
            return False
        if (self.plan.mode == "once" and self._claims) or self._left == 0:
            return is_empty
        if self.plan.mode != "drain" or claim.leases or claim.more or claim.lonely:
            return False
        return was_empty and (not (claim.contended or claim.snoozed) or self._misses >= CONTENDED_LOOKS)


def closed(claim: Claim) -> Iterator[str]:
    """What a claim itself has settled: messages that expired, or crashed too often."""
    for _, event in claim.events:
        if event.outcome == Outcome.DISCARDED:
            yield "discarded"
        elif event.died:
            yield "dead"
