"""What the next claim may bring: what the slots want, as far as the plan, a lonely message and open breakers allow."""

from __future__ import annotations

from outbox.breakers import Breakers
from outbox.leases import Claim, Lease
from outbox.plans import NOTHING, Plan, Progress
from outbox.slots import Slots
from outbox.solitude import Solitude
from outbox.wants import Want


class Appetite:
    """Asked before each claim, and told what it brought. Asking may cost a statement while a breaker is open."""

    def __init__(self, plan: Plan, slots: Slots, breakers: Breakers) -> None:
        self.progress = Progress(plan)
        self._slots = slots
        self._breakers = breakers
        self._solitude = Solitude()

    @property
    def alone(self) -> bool:
        """Whether the next claim may bring a message that must run alone."""
        return self._solitude.is_welcome(empty=self._slots.is_empty())

    def for_others(self) -> Want:
        """What to claim before what is queued is started, so that no topic waits for the stock of another."""
        return self._within(self._slots.want_for_others())

    def now(self) -> Want:
        """What to claim now that all has started that could."""
        return self._within(self._slots.want())

    def may_continue(self, lease: Lease) -> bool:
        """Whether the next message of a settled lease's lane may start in this process at once."""
        free = self.progress.may_hand_over and not self._solitude.occupied
        return free and self._breakers.is_closed(lease.handler.name)

    def note(self, claim: Claim) -> None:
        """Learn what a claim brought."""
        self.progress.note(claim)
        self._solitude.note(claim)

    def _within(self, want: Want) -> Want:
        if not self._solitude.may_claim(empty=self._slots.is_empty()):
            return NOTHING
        return self.progress.within(self._breakers.admit(want, self._slots.load))
