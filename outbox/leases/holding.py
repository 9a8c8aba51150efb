"""While a lease is held: prolong it, and charge its attempt to the budget; neither waits long for a locked row."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from django.db import DatabaseError, connections
from django.db.models import F

from outbox.database import ServerNow, again, increment_unlocked, is_race, locked
from outbox.lanes import pending
from outbox.leases.lease import Lease, fence
from outbox.models import Message

PAUSES = (0.0, 0.002, 0.01)  # before each try to charge: a claim that looks at a lane is gone in a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What became of leases; the rows of ``busy`` ones were locked by somebody: try again soon.

    Leases, not ids: a process that was frozen may have claimed a message anew while it still holds the old lease.
    """

    renewed: frozenset[Lease]
    lost: frozenset[Lease]
    busy: frozenset[Lease]


def renew(using: str, leases: Sequence[Lease], seconds: float) -> Renewal:
    """Prolong leases to ``seconds`` from now, in two statements for all of them."""
    if not leases:
        return Renewal(renewed=frozenset(), lost=frozenset(), busy=frozenset())
    started = time.monotonic()
    micros = int(seconds * 1_000_000)

    def work() -> frozenset[Lease]:
        held = _held(using, leases)
        _update(using, list(held), due_at=ServerNow() + micros)
        return frozenset(held)

    held = again(using, work)
    for lease in held:
        lease.deadline = started + seconds
    rest = [lease for lease in leases if lease not in held]
    busy = _still_ours(using, rest)
    return Renewal(renewed=held, busy=busy, lost=frozenset(rest) - busy)


def charge(using: str, leases: Sequence[Lease]) -> list[Lease]:
    """Take one attempt from the budget of claimed messages that are about to start; returns those that may start.

    The others are lost or locked by somebody: give them back by `settle`, which tells the two apart. Charging again
    after a lost reply to COMMIT charges nothing twice.
    """
    if not leases:
        return []
    held = _charge_at_once(using, leases)
    rest: Collection[Lease] = [lease for lease in leases if lease not in held]
    for pause in PAUSES:
        if not rest:
            break
        time.sleep(pause)
        held |= again(using, partial(_charge, using, rest))
        rest = _still_ours(using, [lease for lease in rest if lease not in held])
    charged = [lease for lease in leases if lease in held]
    for lease in charged:
        lease.charged = True
        lease.message.spent += 1
    return charged


def _charge(using: str, leases: Collection[Lease]) -> set[Lease]:
    ours = _held(using, leases)
    _update(using, [lease for lease, spent in ours.items() if spent == lease.message.spent], spent=F("spent") + 1)
    return set(ours)


def _charge_at_once(using: str, leases: Sequence[Lease]) -> set[Lease]:
    """Charge by a single statement where there is one; returns what it charged, the rest needs a look."""
    if connections[using].in_atomic_block:
        return set()  # a statement that fails would spoil the transaction that is open
    rows = [(lease.id, lease.token, lease.message.spent) for lease in leases]
    try:
        done = increment_unlocked(using, Message._meta.db_table, "spent", rows)
    except DatabaseError as error:
        if not is_race(connections[using], error):
            raise
        return set()
    return {lease for lease in leases if (lease.id, lease.token) in done}


def _held(using: str, leases: Collection[Lease]) -> dict[Lease, int]:
    """The leases that still stand and whose rows we could lock, with what each row has spent."""
    rows = locked(pending(using, {lease.id for lease in leases}).order_by("pk"))
    spent = {(pk, token): spent for pk, token, spent in rows.values_list("pk", "lease_token", "spent")}
    return {lease: spent[lease.id, lease.token] for lease in leases if (lease.id, lease.token) in spent}


def _update(using: str, leases: Sequence[Lease], **values: object) -> None:
    if leases:
        mine = fence((lease.id, lease.token) for lease in leases)
        Message.objects.using(using).filter(mine).update(**values)


def _still_ours(using: str, leases: Collection[Lease]) -> frozenset[Lease]:
    if not leases:
        return frozenset()
    mine = fence((lease.id, lease.token) for lease in leases)
    rows = set(Message.objects.using(using).filter(mine).values_list("pk", "lease_token"))
    return frozenset(lease for lease in leases if (lease.id, lease.token) in rows)
