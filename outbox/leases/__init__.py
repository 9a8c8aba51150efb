"""Claim, renew, settle: with `lanes`, `operations` and `retention` the only writers of delivery state.

The fence: every claim draws a random token and stores it with ``attempt + 1``, and every later write to the row repeats
that token in its WHERE clause. No row matched: the lease is lost, and the result is thrown away. The token decides, not
the clock: a lease that ran out but was not claimed again still settles.

Each function is one short transaction. What a process that dies leaves behind:

=====================  ==========================================================================================
dies after             what is there
=====================  ==========================================================================================
claim, before commit   nothing happened
claim                  a lease that runs out: the row is due by itself at ``due_at``
handler, before settle the same: delivered again (at least once)
settle, before commit  the same
settle                 the outcome, and the next row of the lane leased (as after a claim) or woken
=====================  ==========================================================================================
"""

from outbox.leases.announcing import announce
from outbox.leases.claiming import Claim, Claimer, claim
from outbox.leases.holding import Renewal, charge, renew
from outbox.leases.lease import ALONE_FROM, Lease, draw_token, unbroken
from outbox.leases.outcomes import Settled, Settlement
from outbox.leases.settling import settle

__all__ = [
    "ALONE_FROM",
    "Claim",
    "Claimer",
    "Lease",
    "Renewal",
    "Settled",
    "Settlement",
    "announce",
    "charge",
    "claim",
    "draw_token",
    "renew",
    "settle",
    "unbroken",
]
