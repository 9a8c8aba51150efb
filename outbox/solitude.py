"""When a process makes room for a message that must run alone, because its leases ran out time and again."""

from __future__ import annotations

import time

from outbox.leases import ALONE_FROM, Claim

QUIET = 5.0  # seconds without a claim, doubled each time, for what is held to come to its end
LONGEST_QUIET = 320.0


class Solitude:
    """A lonely message is claimed only by a process that holds nothing, and then nothing else is claimed.

    A busy process stops claiming for a while to become empty; if that is not enough it works on as long, and tries
    again with more patience.
    """

    def __init__(self) -> None:
        self._occupied = False
        self._quiet = QUIET
        self._quiet_until = self._patient_from = 0.0

    @property
    def occupied(self) -> bool:
        """Whether a message that must run alone is running."""
        return self._occupied

    def may_claim(self, *, empty: bool) -> bool:
        """Whether to claim now; ``empty``: the process holds nothing."""
        if empty:
            self._occupied = False
            return True
        return not self._occupied and time.monotonic() >= self._quiet_until

    def note(self, claim: Claim) -> None:
        """Learn what a claim brought."""
        now = time.monotonic()
        self._occupied = any(lease.message.lapses >= ALONE_FROM for lease in claim.leases)
        if claim.lonely and now >= self._patient_from:
            self._quiet_until = now + self._quiet
            self._patient_from = now + 2 * self._quiet
            self._quiet = min(LONGEST_QUIET, 2 * self._quiet)
        elif not claim.lonely and now >= self._patient_from:
            self._quiet = QUIET
