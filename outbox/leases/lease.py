"""What a process holds: a lease, and how it is granted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Case, F, Q, When

from outbox.database import Among, ServerNow, Stale, Still
from outbox.exceptions import Snooze
from outbox.handlers import Envelope, Handler, LeaseView
from outbox.lanes import lapses_of, pending
from outbox.models import Message, State

_NO_BLAME = ("", f"{Snooze.__module__}.{Snooze.__qualname__}")
ALONE_FROM = 2  # lapses in a row after which a message runs alone


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One message that this process may deliver until ``deadline`` (monotonic seconds), unless renewed.

    ``charged``: the attempt has been taken from the budget. ``run`` counts the hand-overs in a row since ``run_since``.
    ``company``: the others of the list that is handed to the handler; only the first one has them.
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
    company: Sequence[Lease] = ()
    id: int = field(init=False)
    _envelope: Envelope | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.id = self.message.pk

    @property
    def attempt(self) -> int:
        return self.message.attempt

    def follow(self, before: Lease) -> None:
        """Go on with the run of a lane."""
        self.run, self.run_since = before.run + 1, before.run_since

    @property
    def call(self) -> list[Lease]:
        """What one call of the handler is given: this one, and its company."""
        return [self, *self.company]

    @property
    def is_blameless(self) -> bool:
        """Whether it may go into a list with others."""
        return is_blameless(self.message, spent=int(self.charged))

    @property
    def envelope(self) -> Envelope:
        if self._envelope is None:
            self._envelope = envelope(self.message, self.view)
        return self._envelope


def envelope(message: Message, view: LeaseView) -> Envelope:
    """The frozen value that handlers and signal receivers get."""
    headers: Any = message.headers
    return Envelope(
        id=message.pk,
        event_key=message.event_key,
        topic=message.topic,
        payload=message.payload,
        payload_version=message.payload_version,
        attempt=message.attempt,
        headers=headers or {},
        ordering_key=message.ordering_key,
        staged_at=message.staged_at,
        lease=view,
    )


def is_blameless(row: Message, *, spent: int = 0) -> bool:
    """Whether no attempt has failed, none found the other side away, and no lease ran out: only such go into lists.

    Whatever else is to blame for that, it cannot happen again to a whole list because of one message. A snooze is fine.
    """
    return row.spent == spent and not row.lapses and row.error_type in _NO_BLAME


def unbroken(call: Sequence[Lease], missing: Collection[Lease]) -> list[Lease]:
    """The leases of a call that can go on without the missing ones: no lane is left with a gap."""
    gaps: set[int | None] = set()
    found = []
    for lease in call:
        if lease in missing:
            gaps.add(lease.message.lane)
        elif lease.message.lane is None or lease.message.lane not in gaps:
            found.append(lease)
    return found


def draw_token() -> int:
    """A random 63-bit number, never 0."""
    return secrets.randbits(63) or 1


def fence(pairs: Iterable[tuple[int, int | None]]) -> Q:
    """Rows that still carry their token: each id is paired with its own (None: none).

    Two independent lists would let a result through after the same process has claimed one of the rows again.
    """
    by_token: dict[int | None, list[int]] = {}
    for pk, token in pairs:
        by_token.setdefault(token, []).append(pk)
    parts = (Q(Among(ids), lease_token=token) for token, ids in by_token.items())
    return Q(Still("state", State.PENDING)) & reduce(or_, parts)


def grant(
    using: str, rows: Sequence[tuple[Message, Handler]], *, token: int, worker: str, seconds: float, charged: bool
) -> list[Lease]:
    """Lease rows that this transaction has locked and found free. Raises Stale when one is not free after all.

    The first of each lane holds it. A row that already carries the ``holder`` of its lane makes the unique constraint
    refuse a second one.
    """
    if not rows:
        return []
    started = time.monotonic()
    free = Q(lease_token=None) | Q(due_at__lte=ServerNow())
    micros = int(seconds * 1_000_000)
    first: dict[int | None, Message] = {}
    company = {row.pk for row, _ in rows if row.lane is not None and first.setdefault(row.lane, row) is not row}
    holder: Any = Case(When(Among(company), then=None), default=F("lane")) if company else F("lane")
    changed = (
        pending(using, [row.pk for row, _ in rows])
        .filter(free)
        .update(
            lapses=lapses_of(),
            lease_token=token,
            holder=holder,
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
        row.lease_token, row.holder, row.leased_by = token, None if row.pk in company else row.lane, worker
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
