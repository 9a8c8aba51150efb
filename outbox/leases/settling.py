"""Write how an attempt ended, under the fence of its lease, and let the next message of its lane go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any, Literal

from django.db.models import Q
from django.dispatch import Signal

from outbox import lanes
from outbox.database import ServerNow, Stale, again, locked
from outbox.errors import NO_ERROR, ErrorRecord
from outbox.handlers import Handler, LeaseView, registry
from outbox.leases.lease import Lease, draw_token, envelope, grant, hold
from outbox.models import Attempt, Message, Outcome, Reason, State
from outbox.signals import (
    Event,
    buried,
    delivered,
    discarded,
    lease_lost,
    released,
    retried,
    send,
    snoozed,
)

LONGEST_RUN = 20  # messages of one lane handed over in a row
LONGEST_RUN_SECONDS = 5.0  # then other processes get their chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How the attempt of one lease ended.

    ``state`` pending means: again in ``wait`` seconds, or at ``until``. ``refund`` gives the attempt back to the budget,
    if it was charged. ``error`` is stored, ``cause`` is what it was made of. ``duration`` is in seconds, None when the
    handler never ran.
    """

    lease: Lease
    outcome: Outcome
    state: State = State.PENDING
    reason: Reason = Reason.NONE
    wait: float = 0.0
    until: datetime | None = None
    refund: bool = False
    error: ErrorRecord = NO_ERROR
    cause: BaseException | None = None
    duration: float | None = None


Status = Literal["settled", "lost", "busy"]


@dataclass(slots=True, kw_only=True)
class Settled:
    """What became of a settlement: written, lost (fenced off), or busy (somebody has locked the row: try again)."""

    settlement: Settlement
    status: Status
    due_at: datetime | None = None
    next: Lease | None = None


@dataclass(slots=True, kw_only=True)
class Closing:
    """One row and what is written to it. ``token`` is the fence: the token that the row must still carry."""

    row: Message
    token: int | None
    state: State
    outcome: Outcome
    reason: Reason = Reason.NONE
    due_at: datetime | None = None
    spent: int = 0
    lapses: int = 0
    error: ErrorRecord = NO_ERROR
    keeps_lane: bool = False
    started_at: datetime | None = None
    ended_at: datetime


def write(using: str, closings: Sequence[Closing]) -> None:
    """Write outcomes to rows that this transaction has locked, with an Attempt for all but a success at the first."""
    done = [each for each in closings if each.state == State.DELIVERED]
    if done:
        changed = _fenced(using, done).update(
            state=State.DELIVERED, settled_at=ServerNow(), due_at=None, lease_token=None, holder=None, lane=None, lapses=0
        )
        if changed != len(done):
            raise Stale("rows changed under their lock")
    for each in closings:
        if each.state != State.DELIVERED:
            _write_one(using, each)
    record(using, [each for each in closings if each.outcome != Outcome.DELIVERED or each.row.attempt > 1])


def record(using: str, closings: Sequence[Closing]) -> None:
    """Write the Attempt of each closing."""
    if closings:
        Attempt.objects.using(using).bulk_create([_attempt(each) for each in closings])


def _fenced(using: str, closings: Sequence[Closing]) -> Any:
    by_token: dict[int | None, list[int]] = {}
    for each in closings:
        by_token.setdefault(each.token, []).append(each.row.pk)
    pairs = reduce(or_, (Q(pk__in=ids, lease_token=token) for token, ids in by_token.items()))
    return Message.objects.using(using).filter(pairs, state=State.PENDING)


def _write_one(using: str, closing: Closing) -> None:
    pending = closing.state == State.PENDING
    values: dict[str, Any] = {
        "state": closing.state,
        "settled_at": None if pending else ServerNow(),
        "due_at": closing.due_at if pending else None,
        "lease_token": None,
        "holder": None,
        "spent": closing.spent,
        "lapses": closing.lapses,
        "reason": closing.reason,
    }
    if not pending and not closing.keeps_lane:
        values["lane"] = None
    if closing.error is not NO_ERROR:
        error = closing.error
        values |= {"error_type": error.type, "error_code": error.code, "error_text": error.text}
    if not _fenced(using, [closing]).update(**values):
        raise Stale("a row changed under its lock")


def _attempt(closing: Closing) -> Attempt:
    return Attempt(
        message_id=closing.row.pk,
        number=closing.row.attempt,
        outcome=closing.outcome,
        worker=closing.row.leased_by,
        started_at=closing.started_at,
        ended_at=closing.ended_at,
        error_type=closing.error.type,
        error_code=closing.error.code,
        error_text=closing.error.text,
        traceback=closing.error.traceback,
    )


@dataclass(slots=True, kw_only=True)
class _Group:
    """One settlement of several leases, as it is tried (again)."""

    using: str
    settlements: Sequence[Settlement]
    token: int
    seconds: float
    hand_over: Callable[[Lease], bool] | None
    recheck: bool
    results: list[Settled] = field(default_factory=list)


def settle(
    using: str,
    settlements: Sequence[Settlement],
    *,
    token: int | None = None,
    seconds: float = 60.0,
    hand_over: Callable[[Lease], bool] | None = None,
    recheck: bool = False,
) -> list[Settled]:
    """Settle a group of leases in one transaction, each fenced on its own. Sends no signals: see `announce`.

    ``hand_over(lease)`` says whether the same worker may go on with the next message of that lease's lane; it is then
    leased under ``token`` for ``seconds``; without it the next one is woken. ``recheck`` after a lost reply to COMMIT,
    with the token of that try: what that commit did is recognised as our own doing.
    """
    group = _Group(
        using=using,
        settlements=settlements,
        token=token or draw_token(),
        seconds=seconds,
        hand_over=hand_over,
        recheck=recheck,
    )
    if settlements:
        again(using, lambda: _settle(group))
    return group.results


def _settle(group: _Group) -> None:
    group.results = []
    mine, rows = _sort(group)
    if not mine:
        return
    laned = [row.pk for row in rows.values() if row.lane is not None]
    nexts = lanes.heads(group.using, laned, without_self=True) if laned else {}
    heads = _lock(group.using, [head for head, _ in nexts.values() if head])
    closings = [_closing(each.settlement, rows[each.settlement.lease.id]) for each in mine]
    write(group.using, closings)
    for each, closing in zip(mine, closings, strict=True):
        each.due_at = closing.due_at if closing.state == State.PENDING else None
    _go_on(group, mine, closings, {lane: head for lane, (head, _) in nexts.items()}, heads)


def _sort(group: _Group) -> tuple[list[Settled], dict[int, Message]]:
    """Lock the rows and compare the tokens; leaves the verdict on each in ``group.results``."""
    ids = [each.lease.id for each in group.settlements]
    columns = ("pk", "state", "lease_token", "lane", "attempt", "spent", "leased_by", "due_at")
    query = Message.objects.using(group.using).filter(pk__in=ids).order_by("pk").annotate(clock=ServerNow())
    rows = {row.pk: row for row in locked(query.only(*columns))}
    missing = [pk for pk in ids if pk not in rows]
    there = set(Message.objects.using(group.using).filter(pk__in=missing).values_list("pk", flat=True)) if missing else ()
    mine = []
    for each in group.settlements:
        row = rows.get(each.lease.id)
        status: Status = "lost"
        if row is None:
            status = "busy" if each.lease.id in there else "lost"
        elif row.state == State.PENDING and row.lease_token == each.lease.token:
            status = "settled"
        elif group.recheck and row.lease_token is None and (row.attempt, row.state) == (each.lease.attempt, each.state):
            group.results.append(_recognised(group, each, row))
            continue
        result = Settled(settlement=each, status=status)
        group.results.append(result)
        if status == "settled":
            mine.append(result)
    return mine, rows


def _recognised(group: _Group, settlement: Settlement, row: Message) -> Settled:
    """A settlement that our own lost commit has written, and the lease it may have handed over."""
    result = Settled(settlement=settlement, status="settled", due_at=row.due_at)
    lane = settlement.lease.message.lane
    if lane is not None:
        held = Message.objects.using(group.using).filter(holder=lane, lease_token=group.token, state=State.PENDING).first()
        handler = registry.by_route(held.route) if held else None
        if held and handler:
            renewed = Message.objects.using(group.using).filter(pk=held.pk, lease_token=group.token)
            renewed.update(due_at=ServerNow() + int(group.seconds * 1_000_000))
            lease = hold(group.using, held, handler, deadline=time.monotonic() + group.seconds, charged=True)
            result.next = _continue(settlement.lease, lease)
    return result


def _continue(before: Lease, after: Lease) -> Lease:
    after.run, after.run_since = before.run + 1, before.run_since
    return after


def _lock(using: str, ids: Sequence[int]) -> dict[int, Message]:
    if not ids:
        return {}
    query = Message.objects.using(using).filter(pk__in=ids).order_by("pk").annotate(clock=ServerNow())
    return {row.pk: row for row in locked(query)}


def _closing(settlement: Settlement, row: Message) -> Closing:
    due_at = settlement.until or row.clock + timedelta(seconds=settlement.wait)
    lease = settlement.lease
    refund = settlement.refund and lease.charged and row.spent > 0
    started = None if settlement.duration is None else row.clock - timedelta(seconds=settlement.duration)
    return Closing(
        row=row,
        token=lease.token,
        state=settlement.state,
        outcome=settlement.outcome,
        reason=settlement.reason,
        due_at=due_at,
        spent=row.spent - int(refund),
        error=settlement.error,
        keeps_lane=settlement.state == State.DEAD and lease.handler.dead_head == "block",
        started_at=started,
        ended_at=row.clock,
    )


def _go_on(
    group: _Group, mine: list[Settled], closings: list[Closing], nexts: dict[int, int | None], heads: dict[int, Message]
) -> None:
    """Lease or wake the next message of each lane; one that somebody has locked is waited for."""
    over: list[tuple[Settled, Message, Handler]] = []
    wake: list[int] = []
    for each, closing in zip(mine, closings, strict=True):
        lane = closing.row.lane
        if lane is None:
            continue
        first = nexts.get(lane)
        stays = closing.state == State.PENDING or closing.keeps_lane
        if stays and (first is None or closing.row.pk < first):
            continue  # the row itself is still the head, and it is ours until we commit
        if first is None:
            continue
        head = heads.get(first)
        if head is None or head.lane != lane:
            lanes.advance(group.using, lane)
            continue
        if head.state != State.PENDING or (head.due_at is not None and head.due_at > head.clock):
            continue  # blocking or waiting: locked by us, so it stays until we have committed
        handler = _may_follow(group, each.settlement.lease, head)
        if handler is not None:
            over.append((each, head, handler))
        elif head.due_at is None:
            wake.append(head.pk)
    lanes.wake(group.using, wake)
    pairs = [(head, handler) for _, head, handler in over]
    worker = group.settlements[0].lease.worker
    granted = grant(group.using, pairs, token=group.token, worker=worker, seconds=group.seconds, charged=True)
    for (each, _, _), lease in zip(over, granted, strict=True):
        each.next = _continue(each.settlement.lease, lease)


def _may_follow(group: _Group, lease: Lease, head: Message) -> Handler | None:
    """The handler of a locked, due head, if it may be handed over: what a claim would take, within a bounded run."""
    handler = registry.by_route(head.route)
    if group.hand_over is None or handler is None or handler.name != lease.handler.name:
        return None
    if head.lease_token is not None or head.lapses >= 2 or head.spent >= handler.max_attempts:
        return None
    if head.expires_at is not None and head.expires_at <= head.clock:
        return None
    fresh = lease.run + 1 < LONGEST_RUN and time.monotonic() - lease.run_since < LONGEST_RUN_SECONDS
    return handler if fresh and group.hand_over(lease) else None


_SIGNALS = {
    State.DELIVERED: delivered,
    State.DEAD: buried,
    State.DISCARDED: discarded,
    Outcome.SNOOZED: snoozed,
    Outcome.UNAVAILABLE: snoozed,
    Outcome.RELEASED: released,
    Outcome.INTERRUPTED: released,
}


def announce(results: Sequence[Settled]) -> None:
    """Send the signals of a committed settlement. A lost lease is told once, and nothing else is told of it."""
    for each in results:
        done, lease = each.settlement, each.settlement.lease
        if each.status == "busy":
            continue
        event = Event(
            message=lease.envelope,
            handler=lease.handler.name,
            using=lease.using,
            outcome=done.outcome,
            reason=done.reason,
            error_type=done.error.type,
            error_code=done.error.code,
            error_text=done.error.text,
            duration=done.duration,
            due_at=each.due_at,
            worker=lease.worker,
        )
        if each.status == "lost":
            send(lease_lost, event)
        else:
            send(_SIGNALS.get(done.state) or _SIGNALS.get(done.outcome) or retried, event)


def event_of(using: str, closing: Closing) -> tuple[Signal, Event]:
    """The signal of what a claim settled itself: a message that expired, or whose lease ran out."""
    row = closing.row
    event = Event(
        message=envelope(row, LeaseView(row.attempt)),
        handler=row.handler,
        using=using,
        outcome=closing.outcome,
        reason=closing.reason,
        error_type=closing.error.type,
        error_code=closing.error.code,
        error_text=closing.error.text,
        due_at=closing.due_at if closing.state == State.PENDING else None,
        worker=row.leased_by,
    )
    return _SIGNALS.get(closing.state) or retried, event
