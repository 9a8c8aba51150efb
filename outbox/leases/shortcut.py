"""Claim and settle by single statements, where there are such, what needs no look."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from django.db import DatabaseError, connections

from outbox.database import deliver_and_lease_next, deliver_patiently, deliver_unlocked, is_race, lease_free
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
    return _renewed_if_late(terms.using, leases, terms.seconds, started)


def _renewed_if_late(using: str, leases: list[Lease], seconds: float, started: float) -> list[Lease]:
    """The leases of a statement that began at that monotonic time, as far as they stand."""
    if not leases or not 0 < seconds * LATE < time.monotonic() - started:
        return leases
    try:
        lost = renew(using, leases, seconds).lost
    except DatabaseError as error:  # the leases stand all the same; those of a lost session are found by their token
        if not is_race(connections[using], error):
            raise
        return leases
    return [lease for lease in leases if lease not in lost]


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


def deliver_at_once(using: str, settlements: Sequence[Settlement], *, patient: bool) -> dict[int, Settled]:
    """Settle plain deliveries by a single statement where there is one, by their places; the rest needs a look.

    Plain: in no lane, so nobody waits for it; at the first attempt, so there is no Attempt to write; and named once.
    ``patient``: in a transaction that cannot be done again. There it waits for a lock, for one delivery alone: several
    would have to be locked in order.
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
    table, rows = Message._meta.db_table, [(pk, each.lease.token) for pk, (_, each) in plain.items()]
    if patient:
        done = {pk for pk, token in rows if len(settlements) == 1 and deliver_patiently(using, table, pk, token)}
        return {place: Settled(settlement=each, status="settled") for place, each in map(plain.__getitem__, done)}
    try:
        done = deliver_unlocked(using, table, rows)
    except DatabaseError as error:
        if not is_race(connections[using], error):
            raise
        return {}
    return {place: Settled(settlement=each, status="settled") for place, each in map(plain.__getitem__, done)}


def go_on_at_once(
    using: str, settlements: Sequence[Settlement], *, token: int, seconds: float, may_follow: Callable[[Lease], bool]
) -> dict[int, Settled]:
    """Settle plain deliveries in lanes and lease the next messages, by one statement per handler if there is such.

    Returns those that were settled, with what was handed over to them, by their places; the rest needs a look.
    """
    place = {each.lease: number for number, each in enumerate(settlements)}
    by_handler: dict[str, list[Settlement]] = {}
    for each in settlements:
        in_lane = each.lease.message.lane is not None and not each.lease.handler.batch
        if in_lane and each.state == State.DELIVERED and each.lease.attempt == 1 and may_follow(each.lease):
            by_handler.setdefault(each.lease.handler.name, []).append(each)
    results: dict[int, Settled] = {}
    for group in by_handler.values():
        for settled in _go_on(using, group, token, seconds):
            results[place[settled.settlement.lease]] = settled
    return results


def _go_on(using: str, settlements: Sequence[Settlement], token: int, seconds: float) -> list[Settled]:
    handler, worker = settlements[0].lease.handler, settlements[0].lease.worker
    mine = {each.lease.id: each for each in settlements}
    started = time.monotonic()
    try:
        found = deliver_and_lease_next(
            using,
            Message,
            [(pk, each.lease.token) for pk, each in mine.items()],
            routes=handler.routes,
            token=token,
            worker=worker,
            micros=int(seconds * 1_000_000),
            budget=handler.max_attempts,
        )
    except DatabaseError as error:
        if not is_race(connections[using], error):
            raise
        return []
    deadline = started + seconds
    next_of = {pk: hold(using, row, handler, deadline=deadline, charged=True) for pk, row in found}
    stand = set(_renewed_if_late(using, list(next_of.values()), seconds, started))
    results = []
    for pk, lease in next_of.items():
        lease.follow(mine[pk].lease)
        results.append(Settled(settlement=mine[pk], status="settled", next=lease if lease in stand else None))
    return results
