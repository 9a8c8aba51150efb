"""When a process makes room for a message that must run alone, because its leases ran out time and again."""

from __future__ import annotations

import time

from outbox.leases import ALONE_FROM, Claim

QUIET = 5.0  # seconds without a claim, doubled each time, for what is held to come to its end
LONGEST_QUIET = 320.0
COMPANY = 0.2  # seconds at least that the other messages have after each one that ran alone


class Solitude:
    """A lonely message is claimed only by a process that holds nothing, and then nothing else is claimed.

    A busy process stops claiming for a while to become empty; if that is not enough it works on as long, and tries
    again with more patience. After a lonely message the others have as much time as it took, so that many lonely ones
    cannot bring everything to a stop.
    """

    def __init__(self) -> None:
        self._alone_since: float | None = None
        self._company_until = 0.0
        self._quiet = QUIET
        self._quiet_until = self._patient_from = 0.0

    @property
    def occupied(self) -> bool:
        """Whether a message that must run alone is running."""
        return self._alone_since is not None

    def may_claim(self, *, empty: bool) -> bool:
        """Whether to claim now; ``empty``: the process holds nothing."""
        now = time.monotonic()
        if not empty:
            return self._alone_since is None and now >= self._quiet_until
        if self._alone_since is not None:
            self._company_until = now + max(COMPANY, now - self._alone_since)
            self._alone_since = None
        return True

    def is_welcome(self, *, empty: bool) -> bool:
        """Whether the next claim may bring a lonely message."""
        return empty and time.monotonic() >= self._company_until

    def note(self, claim: Claim) -> None:
        """Learn what a claim brought."""
        now = time.monotonic()
        if any(lease.message.lapses >= ALONE_FROM for lease in claim.leases):
            self._alone_since = now
            self._quiet, self._patient_from = QUIET, now
        elif claim.lonely:
            if not claim.leases:
                self._company_until = now  # nobody else is there
            if now >= max(self._patient_from, self._company_until):
                self._quiet_until = now + self._quiet
                self._patient_from = now + 2 * self._quiet
                self._quiet = min(LONGEST_QUIET, 2 * self._quiet)
        elif now >= self._patient_from:
            self._quiet = QUIET
