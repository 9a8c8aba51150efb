"""Claim and settle by single statements, where there are such, what needs no look: plain messages in no lane."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from django.db import DatabaseError, connections

from outbox.database import deliver_unlocked, is_race, lease_free
from outbox.lanes import pending
from outbox.leases.holding import renew
from outbox.leases.lease import Lease, hold
from outbox.leases.outcomes import Settled, Settlement
from outbox.leases.terms import Terms
from outbox.models import Message, State

LATE = 0.2  # of a lease: a claim that took longer renews it


def lease_at_once(chosen: Sequence[int], terms: Terms) -> list[Lease]:
    """Lease what can be leased without a look; the rest of the rows is left to `take`.

    The time of a statement is that of its start. One that waited for a lock (of the table, or of SQLite's file) grants
    leases that are partly, or wholly, over: they are renewed at once.
    """
    started = time.monotonic()
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
    leases = _held(rows, chosen, terms, started + terms.seconds)
    if leases and 0 < terms.seconds * LATE < time.monotonic() - started:
        try:
            lost = renew(terms.using, leases, terms.seconds).lost
        except (
            DatabaseError
        ) as error:  # the leases stand all the same; those of a lost session are found by their token
            if not is_race(connections[terms.using], error):
                raise
            return leases
        return [lease for lease in leases if lease not in lost]
    return leases


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


def deliver_at_once(using: str, settlements: Sequence[Settlement]) -> dict[int, Settled]:
    """Settle plain deliveries by a single statement where there is one, by their places; the rest needs a look.

    Plain: in no lane, so nobody waits for it; at the first attempt, so there is no Attempt to write; and named once.
    """
    named = Counter(each.lease.id for each in settlements)
    plain = {
        each.lease.id: (place, each)
        for place, each in enumerate(settlements)
        if each.state == State.DELIVERED and each.lease.message.lane is None and each.lease.attempt == 1
        if named[each.lease.id] == 1
    }
    if not plain:
        return {}
    rows = [(pk, each.lease.token) for pk, (_, each) in plain.items()]
    try:
        done = deliver_unlocked(using, Message._meta.db_table, rows)
    except DatabaseError as error:
        if not is_race(connections[using], error):
            raise
        return {}
    return {place: Settled(settlement=each, status="settled") for place, each in map(plain.__getitem__, done)}
