"""How attempts end, as values, and the one place that writes an end to its row, under the fence of the lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from outbox.database import ServerNow, Stale
from outbox.errors import NO_ERROR, ErrorRecord
from outbox.leases.lease import Lease, fence
from outbox.models import Attempt, Message, Outcome, Reason, State

Status = Literal["settled", "lost", "busy"]


class Row(NamedTuple):
    """What a settlement reads of a row under its lock."""

    pk: int
    state: str
    lease_token: int | None
    lane: int | None
    holder: int | None
    attempt: int
    spent: int
    lapses: int
    reason: str
    staged_at: datetime
    deliver_at: datetime | None
    clock: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How the attempt of one lease ended.

    ``state`` pending means: again at ``until``, or in ``wait`` seconds if that is None or past. ``refund`` gives the
    attempt back to the budget, if it was charged. ``error`` is stored, ``cause`` is what it was made of. ``duration``
    is in seconds, None when the handler never ran.
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

    @property
    def stays(self) -> bool:
        """Whether the message keeps its place in its lane: it will be tried again, or it is dead and blocks."""
        blocks = self.state == State.DEAD and self.lease.handler.dead_head == "block"
        return self.state == State.PENDING or blocks


@dataclass(slots=True, kw_only=True)
class Settled:
    """What became of a settlement.

    Written; lost (fenced off); or busy: somebody has locked the row, or the next one of its lane. Try that again.
    """

    settlement: Settlement
    status: Status
    due_at: datetime | None = None
    next: Lease | None = None


@dataclass(slots=True, kw_only=True)
class Closing:
    """What is written to one row. ``token`` is the fence: the token that the row must still carry.

    ``attempt`` and ``worker`` tell whose end this is; ``stays``: the row keeps its place in its lane.
    """

    pk: int
    token: int | None
    attempt: int
    worker: str
    state: State
    outcome: Outcome
    stays: bool
    ended_at: datetime
    reason: Reason = Reason.NONE
    due_at: datetime | None = None
    spent: int = 0
    lapses: int = 0
    error: ErrorRecord = NO_ERROR
    started_at: datetime | None = None


def write(using: str, closings: Sequence[Closing]) -> None:
    """Write outcomes to rows that this transaction has locked, with an Attempt for all but a success at the first."""
    delivered = [each for each in closings if each.state == State.DELIVERED]
    if delivered:
        values = {"state": State.DELIVERED, "settled_at": ServerNow(), "due_at": None, "lane": None}
        _update(using, delivered, values | {"lapses": 0})
    alike: dict[tuple[object, ...], list[Closing]] = {}
    for each in closings:
        if each.state != State.DELIVERED:
            same = (each.state, each.due_at, each.spent, each.lapses, each.reason, each.stays, each.error)
            alike.setdefault(same, []).append(each)
    for group in alike.values():
        _update(using, group, _values(group[0]))
    record(using, [each for each in closings if each.outcome != Outcome.DELIVERED or each.attempt > 1])


def record(using: str, closings: Sequence[Closing]) -> None:
    """Write the Attempt of each closing."""
    if closings:
        Attempt.objects.using(using).bulk_create([_attempt(each) for each in closings])


def _update(using: str, closings: Sequence[Closing], values: dict[str, Any]) -> None:
    ours = Message.objects.using(using).filter(fence((each.pk, each.token) for each in closings))
    if ours.update(**values, lease_token=None, holder=None) != len(closings):
        raise Stale("rows changed under their lock")


def _values(closing: Closing) -> dict[str, Any]:
    pending = closing.state == State.PENDING
    values: dict[str, Any] = {
        "state": closing.state,
        "settled_at": None if pending else ServerNow(),
        "due_at": closing.due_at if pending else None,
        "spent": closing.spent,
        "lapses": closing.lapses,
        "reason": closing.reason,
    }
    if not closing.stays:
        values["lane"] = None
    if closing.error is not NO_ERROR:
        error = closing.error
        values |= {"error_type": error.type, "error_code": error.code, "error_text": error.text}
    return values


def _attempt(closing: Closing) -> Attempt:
    return Attempt(
        message_id=closing.pk,
        number=closing.attempt,
        outcome=closing.outcome,
        worker=closing.worker,
        started_at=closing.started_at,
        ended_at=closing.ended_at,
        error_type=closing.error.type,
        error_code=closing.error.code,
        error_text=closing.error.text,
        traceback=closing.error.traceback,
    )
