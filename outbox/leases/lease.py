"""What a process holds: a lease, how it is granted, charged and renewed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Case, F, Q, When

from outbox.database import ServerNow, Stale, again, locked
from outbox.handlers import Envelope, Handler, LeaseView
from outbox.models import Message, State


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One message that this process may deliver until ``deadline`` (monotonic seconds), unless renewed.

    ``charged``: the attempt has been taken from the budget. ``run`` counts the hand-overs in a row since ``run_since``.
    """

    using: str
    message: Message
    handler: Handler
    token: int
    worker: str
    deadline: float
    charged: bool
    view: LeaseView
    run: int = 0
    run_since: float = 0.0

    @property
    def id(self) -> int:
        return self.message.pk

    @property
    def attempt(self) -> int:
        return self.message.attempt

    @property
    def envelope(self) -> Envelope:
        return envelope(self.message, self.view)


def envelope(message: Message, view: LeaseView) -> Envelope:
    """The frozen value that handlers and signal receivers get."""
    return Envelope(
        id=message.pk,
        event_key=message.event_key,
        topic=message.topic,
        payload=message.payload,
        payload_version=message.payload_version,
        attempt=message.attempt,
        headers=message.headers or {},
        ordering_key=message.ordering_key,
        staged_at=message.staged_at,
        lease=view,
    )


def draw_token() -> int:
    """A random 63-bit number, never 0."""
    return secrets.randbits(63) or 1


def guard(leases: Iterable[Lease]) -> Q:
    """Each id with its own token: the same process may have claimed one of them again meanwhile."""
    by_token: dict[int, list[int]] = {}
    for lease in leases:
        by_token.setdefault(lease.token, []).append(lease.id)
    return reduce(or_, (Q(pk__in=ids, lease_token=token) for token, ids in by_token.items()))


def grant(
    using: str, rows: Sequence[tuple[Message, Handler]], *, token: int, worker: str, seconds: float, charged: bool
) -> list[Lease]:
    """Lease rows that this transaction has locked and found free. Raises Stale when one is not free after all.

    A row that already carries the ``holder`` of its lane makes the unique constraint refuse the second one.
    """
    if not rows:
        return []
    started = time.monotonic()
    free = Q(lease_token=None) | Q(due_at__lte=ServerNow())
    micros = int(seconds * 1_000_000)
    changed = (
        Message.objects.using(using)
        .filter(free, pk__in=[row.pk for row, _ in rows], state=State.PENDING)
        .update(
            # MySQL assigns from left to right and reads what it has just assigned: lapses before lease_token.
            lapses=Case(When(lease_token=None, then=F("lapses")), default=F("lapses") + 1),
            lease_token=token,
            holder=F("lane"),
            attempt=F("attempt") + 1,
            spent=F("spent") + int(charged),
            due_at=ServerNow() + micros,
            leased_at=ServerNow(),
            leased_by=worker,
        )
    )
    if changed != len(rows):
        raise Stale(f"{len(rows) - changed} of {len(rows)} rows were not free any more")
    leases = []
    for row, handler in rows:
        row.lapses += row.lease_token is not None
        row.lease_token, row.holder, row.leased_by = token, row.lane, worker
        row.attempt += 1
        row.spent += int(charged)
        leases.append(hold(using, row, handler, deadline=started + seconds, charged=charged))
    return leases


def hold(using: str, row: Message, handler: Handler, *, deadline: float, charged: bool) -> Lease:
    """The lease that a row in the database carries."""
    assert row.lease_token is not None
    return Lease(
        using=using,
        message=row,
        handler=handler,
        token=row.lease_token,
        worker=row.leased_by,
        deadline=deadline,
        charged=charged,
        view=LeaseView(row.attempt),
        run_since=time.monotonic(),
    )


def charge(using: str, leases: Sequence[Lease]) -> list[Lease]:
    """Take one attempt from the budget of claimed messages that are about to start; returns those still held."""
    ids = {lease.id for lease in leases}

    def work() -> set[int]:
        held = _held(using, leases)
        _mine(using, [lease for lease in leases if lease.id in held]).update(spent=F("spent") + 1)
        return held

    held = again(using, work) if ids else set()
    for lease in leases:
        if lease.id in held:
            lease.charged = True
            lease.message.spent += 1
    return [lease for lease in leases if lease.id in held]


def _held(using: str, leases: Sequence[Lease]) -> set[int]:
    """Ids of the rows that are still ours and that we could lock; never waits for anybody's lock."""
    tokens = {lease.id: lease.token for lease in leases}
    rows = Message.objects.using(using).filter(pk__in=tokens, state=State.PENDING).order_by("pk")
    return {pk for pk, token in locked(rows).values_list("pk", "lease_token") if token == tokens[pk]}


def _mine(using: str, leases: Collection[Lease]) -> Any:
    if not leases:
        return Message.objects.none()
    return Message.objects.using(using).filter(guard(leases), state=State.PENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Ids by what became of their leases; ``busy`` rows were locked by somebody: try again soon."""

    renewed: frozenset[int]
    lost: frozenset[int]
    busy: frozenset[int]


def renew(using: str, leases: Sequence[Lease], seconds: float) -> Renewal:
    """Prolong leases to ``seconds`` from now, in two statements for all of them, never waiting for a locked row."""
    started = time.monotonic()
    micros = int(seconds * 1_000_000)

    def work() -> set[int]:
        held = _held(using, leases)
        _mine(using, [lease for lease in leases if lease.id in held]).update(due_at=ServerNow() + micros)
        return held

    held = again(using, work) if leases else set()
    for lease in leases:
        if lease.id in held:
            lease.deadline = started + seconds
    rest = [lease for lease in leases if lease.id not in held]
    busy = set(_mine(using, rest).values_list("pk", flat=True)) if rest else set()
    return Renewal(
        renewed=frozenset(held),
        busy=frozenset(busy),
        lost=frozenset(lease.id for lease in rest if lease.id not in busy),
    )
