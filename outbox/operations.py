"""What people do to messages: requeue, discard, make due; guarded by the state, audited, and counted exactly.

Each batch is one short transaction that locks its rows in the order of their ids, judges each under its lock, repeats
that judgement in the WHERE of its UPDATE, and leaves an `Intervention` per changed row. So of two people who act on the
same messages at once, each message obeys exactly one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.db import models, transaction
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from outbox import lanes, wakeup
from outbox.database import ServerNow, Stale, again, locked, with_clock
from outbox.handlers import LeaseView, registry
from outbox.leases.lease import envelope
from outbox.models import Intervention, Message, MessageQuerySet, Outcome, Reason, State, Verb
from outbox.signals import Event, discarded, send
from outbox.texts import storable

BATCH = 100  # messages in one transaction
_COLUMNS = ("state", "due_at", "lease_token", "lane", "route", "ordering_key", "payload_pruned")


class Refusal(models.TextChoices):
    """Why a message was left alone; each fits behind "message 12 is"."""

    NOT_FOUND = "not found", _("not found")
    IN_FLIGHT = "in flight", _("in flight")
    PENDING = "pending already", _("pending already")
    DELIVERED = "delivered", _("delivered")
    DEAD = "dead", _("dead")
    DISCARDED = "discarded", _("discarded")
    DUE = "due already", _("due already")
    WAITING = "waiting in its lane", _("waiting in its lane")
    PRUNED = "without its pruned payload", _("without its pruned payload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What an operation did: the ids it changed, and for each other id why it was left alone (a `Refusal`)."""

    done: tuple[int, ...] = ()
    skipped: dict[int, str] = field(default_factory=dict)

    def __add__(self, other: Done) -> Done:
        return Done(done=self.done + other.done, skipped=self.skipped | other.skipped)


def requeue(using: str, ids: Iterable[int], *, actor: str = "", note: str = "") -> Done:
    """Give dead or discarded messages a fresh budget and make them due now.

    The last error and the attempts stay; an expiry time is cleared. Where the lane went on without it, its order is
    given up: it knocks, and runs when nobody of the lane is in flight.
    """
    return _operate(_REQUEUE, using, ids, actor, note)


def discard(using: str, ids: Iterable[int], *, actor: str = "", note: str = "") -> Done:
    """Settle pending or dead messages without delivery, and let their lanes go on. Never one that is in flight."""
    return _operate(_DISCARD, using, ids, actor, note)


def make_due(using: str, ids: Iterable[int], *, actor: str = "", note: str = "") -> Done:
    """End the wait of scheduled, snoozed and retrying messages; their budget stays as it is."""
    return _operate(_MAKE_DUE, using, ids, actor, note)


# --- the frame --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """``judge`` says why a locked row is left alone, or None; ``write`` changes the others in one transaction."""

    verb: Verb
    judge: Callable[[Message], Refusal | None]
    write: Callable[[str, Sequence[Message]], None]


def _operate(operation: _Operation, using: str, ids: Iterable[int], actor: str, note: str) -> Done:
    total = Done()
    wanted = sorted({int(each) for each in ids})
    audit = partial(Intervention, verb=operation.verb, actor=storable(actor, 255), note=storable(note))
    for start in range(0, len(wanted), BATCH):
        batch = partial(_batch, operation, using, wanted[start : start + BATCH], audit)
        result = again(using, batch)
        if result.done:
            _tell_after_commit(operation, using, result.done)
        total += result
    return total


def _batch(operation: _Operation, using: str, ids: Sequence[int], audit: Callable[..., Intervention]) -> Done:
    query = with_clock(Message.objects.using(using).filter(pk__in=ids).order_by("pk").only(*_COLUMNS))
    rows = {row.pk: row for row in locked(query, skip=False)}
    chosen: list[Message] = []
    skipped: dict[int, str] = {}
    for pk in ids:
        refusal = operation.judge(rows[pk]) if pk in rows else Refusal.NOT_FOUND
        if refusal is None:
            chosen.append(rows[pk])
        else:
            skipped[pk] = refusal
    if chosen:
        operation.write(using, chosen)
        Intervention.objects.using(using).bulk_create(audit(message_id=row.pk, at=row.clock) for row in chosen)
    return Done(done=tuple(row.pk for row in chosen), skipped=skipped)


def _change(rows: MessageQuerySet, ids: Collection[int], **values: Any) -> None:
    if rows.filter(pk__in=ids).update(**values) != len(ids):
        raise Stale("rows changed under their lock")


def _tell_after_commit(operation: _Operation, using: str, ids: Sequence[int]) -> None:
    # A lambda, for Django names a robust callback that failed by its __qualname__, and a partial has none.
    transaction.on_commit(lambda: _tell(operation, using, ids), using=using, robust=True)


def _tell(operation: _Operation, using: str, ids: Sequence[int]) -> None:
    wakeup.hint(using)
    if operation.verb != Verb.DISCARD:
        return
    for row in Message.objects.using(using).filter(pk__in=ids).order_by("pk"):
        view = LeaseView(row.attempt)
        view.revoke()
        event = Event(
            message=envelope(row, view), handler=row.handler, using=using, outcome=Outcome.DISCARDED, reason=row.reason
        )
        send(discarded, event)


def _in_flight(row: Message) -> bool:
    return row.state == State.PENDING and row.lease_token is not None and not _is_due(row)


def _is_due(row: Message) -> bool:
    return row.due_at is not None and row.due_at <= row.clock


# --- the verbs --------------------------------------------------------------------------------------------------------


def _judge_requeue(row: Message) -> Refusal | None:
    if _in_flight(row):
        return Refusal.IN_FLIGHT
    if row.state in (State.PENDING, State.DELIVERED):
        return Refusal.PENDING if row.state == State.PENDING else Refusal.DELIVERED
    return Refusal.PRUNED if row.payload_pruned else None


def _write_requeue(using: str, rows: Sequence[Message]) -> None:
    settled = Message.objects.using(using).filter(state__in=(State.DEAD, State.DISCARDED))
    by_lane: dict[int | None, list[int]] = {}
    for row in rows:
        by_lane.setdefault(_lane_to_return_to(row), []).append(row.pk)
    for lane, ids in by_lane.items():
        _change(
            settled,
            ids,
            state=State.PENDING,
            due_at=ServerNow(),
            lane=lane,
            spent=0,
            lapses=0,
            expires_at=None,
            settled_at=None,
            reason=Reason.NONE,
        )


def _lane_to_return_to(row: Message) -> int | None:
    """A row that blocks its lane stays in it, for others sleep behind it; any other joins the lane of its handler."""
    handler = registry.by_route(row.route)
    if row.lane is not None or handler is None:
        return row.lane
    return handler.lane(row.ordering_key)


def _judge_discard(row: Message) -> Refusal | None:
    if _in_flight(row):
        return Refusal.IN_FLIGHT
    return {State.DELIVERED: Refusal.DELIVERED, State.DISCARDED: Refusal.DISCARDED}.get(State(row.state))


def _write_discard(using: str, rows: Sequence[Message]) -> None:
    unheld = Q(state=State.PENDING) & (Q(lease_token=None) | Q(due_at__lte=ServerNow()))
    _change(
        Message.objects.using(using).filter(unheld | Q(state=State.DEAD)),
        [row.pk for row in rows],
        state=State.DISCARDED,
        reason=Reason.OPERATOR,
        settled_at=ServerNow(),
        due_at=None,
        lane=None,
        holder=None,
        lease_token=None,
        lapses=0,
    )
    for lane in sorted({row.lane for row in rows if row.lane is not None}):
        lanes.advance(using, lane)


def _judge_make_due(row: Message) -> Refusal | None:
    if row.state != State.PENDING:
        return {
            State.DELIVERED: Refusal.DELIVERED,
            State.DEAD: Refusal.DEAD,
            State.DISCARDED: Refusal.DISCARDED,
        }[State(row.state)]
    if row.due_at is None:
        return Refusal.WAITING
    if _is_due(row):
        return Refusal.DUE
    return Refusal.IN_FLIGHT if row.lease_token is not None else None


def _write_make_due(using: str, rows: Sequence[Message]) -> None:
    waiting = Message.objects.using(using).filter(state=State.PENDING, lease_token=None, due_at__isnull=False)
    _change(waiting, [row.pk for row in rows], due_at=ServerNow())


_REQUEUE = _Operation(verb=Verb.REQUEUE, judge=_judge_requeue, write=_write_requeue)
_DISCARD = _Operation(verb=Verb.DISCARD, judge=_judge_discard, write=_write_discard)
_MAKE_DUE = _Operation(verb=Verb.MAKE_DUE, judge=_judge_make_due, write=_write_make_due)
