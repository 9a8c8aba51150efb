"""While a lease is held: prolong it, and charge its attempt to the budget; neither waits for a row somebody locked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from django.db import DatabaseError, connections
from django.db.models import F

from outbox.database import ServerNow, again, increment_unlocked, is_race, locked
from outbox.lanes import pending
from outbox.leases.lease import Lease, fence
from outbox.models import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Ids by what became of their leases; ``busy`` rows were locked by somebody: try again soon."""

    renewed: frozenset[int]
    lost: frozenset[int]
    busy: frozenset[int]


def renew(using: str, leases: Sequence[Lease], seconds: float) -> Renewal:
    """Prolong leases to ``seconds`` from now, in two statements for all of them."""
    if not leases:
        return Renewal(renewed=frozenset(), lost=frozenset(), busy=frozenset())
    started = time.monotonic()
    micros = int(seconds * 1_000_000)

    def work() -> set[int]:
        held = set(_held(using, leases))
        _update(using, [lease for lease in leases if lease.id in held], due_at=ServerNow() + micros)
        return held

    held = again(using, work)
    for lease in leases:
        if lease.id in held:
            lease.deadline = started + seconds
    rest = [lease for lease in leases if lease.id not in held]
    busy = _still_ours(using, rest)
    return Renewal(
        renewed=frozenset(held),
        busy=frozenset(busy),
        lost=frozenset(lease.id for lease in rest if lease.id not in busy),
    )


def charge(using: str, leases: Sequence[Lease]) -> list[Lease]:
    """Take one attempt from the budget of claimed messages that are about to start; returns those that may start.

    The others are lost or locked by somebody: give them back by `settle`, which tells the two apart. Charging again
    after a lost reply to COMMIT charges nothing twice.
    """
    if not leases:
        return []
    held = _charge_at_once(using, leases)
    rest = [lease for lease in leases if lease.id not in held]

    def work() -> set[int]:
        ours = _held(using, rest)
        due = [lease for lease in rest if ours.get(lease.id) == lease.message.spent]
        _update(using, due, spent=F("spent") + 1)
        return set(ours)

    held |= again(using, work) if rest else set()
    charged = [lease for lease in leases if lease.id in held]
    for lease in charged:
        lease.charged = True
        lease.message.spent += 1
    return charged


def _charge_at_once(using: str, leases: Sequence[Lease]) -> set[int]:
    """Charge by a single statement where there is one; returns the ids of what it charged, the rest needs a look."""
    if connections[using].in_atomic_block:
        return set()  # a statement that fails would spoil the transaction that is open
    rows = [(lease.id, lease.token, lease.message.spent) for lease in leases]
    try:
        return increment_unlocked(using, Message._meta.db_table, "spent", rows)
    except DatabaseError as error:
        if not is_race(connections[using], error):
            raise
        return set()


def _held(using: str, leases: Sequence[Lease]) -> dict[int, int]:
    """Of the rows that are still ours and that we could lock: what each has spent."""
    tokens = {lease.id: lease.token for lease in leases}
    rows = locked(pending(using, tokens).order_by("pk"))
    return {pk: spent for pk, token, spent in rows.values_list("pk", "lease_token", "spent") if token == tokens[pk]}


def _update(using: str, leases: Sequence[Lease], **values: object) -> None:
    if leases:
        mine = fence((lease.id, lease.token) for lease in leases)
        Message.objects.using(using).filter(mine).update(**values)


def _still_ours(using: str, leases: Sequence[Lease]) -> set[int]:
    if not leases:
        return set()
    mine = fence((lease.id, lease.token) for lease in leases)
    return set(Message.objects.using(using).filter(mine).values_list("pk", flat=True))
