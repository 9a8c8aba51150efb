"""The claim by a single statement, where there is one, for rows that need no look: in no lane, and never lapsed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outbox.database import lease_free
from outbox.lanes import pending
from outbox.leases.lease import Lease, hold
from outbox.leases.taking import Terms
from outbox.models import Message


def lease_at_once(chosen: Sequence[int], terms: Terms) -> list[Lease]:
    """Lease what can be leased without a look; the rest of the rows is left to `take`."""
    deadline = time.monotonic() + terms.seconds
    rows = lease_free(
        terms.using,
        Message,
        chosen,
        charged=chosen[: terms.start],
        token=terms.token,
        worker=terms.worker,
        micros=int(terms.seconds * 1_000_000),
        budget=min(handler.max_attempts for handler in terms.routes.values()),
    )
    return _held(rows, chosen, terms, deadline)


def leased_unanswered(chosen: Sequence[int], terms: Terms) -> list[Lease]:
    """What that statement has leased, when its answer was lost: the rows that carry its token."""
    rows = pending(terms.using, chosen).filter(lease_token=terms.token)
    return _held(rows, chosen, terms, time.monotonic())


def _held(rows: Sequence[Message], chosen: Sequence[int], terms: Terms, deadline: float) -> list[Lease]:
    place = {pk: number for number, pk in enumerate(chosen)}
    return [
        hold(
            terms.using,
            row,
            terms.routes[row.route],
            deadline=deadline,
            charged=place[row.pk] < terms.start,
        )
        for row in sorted(rows, key=lambda row: place[row.pk])
    ]
