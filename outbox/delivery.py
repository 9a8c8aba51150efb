"""One lease → its handler → a verdict → a settlement; also the immediate delivery right after a commit.

The verdict is judged once, here. Whatever a handler does to its database connections is undone before anything is
written: the outcome never goes through a transaction that the handler may have spoilt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from asgiref.sync import async_to_sync
from django.db import DatabaseError, Error, connections
from django.utils import timezone

from outbox import wakeup
from outbox.database import close_quietly, is_loss, short_transaction
from outbox.errors import describe
from outbox.exceptions import (
    Bury,
    Discard,
    HandlerTimeout,
    LeakedTransaction,
    LeaseLost,
    NotConfirmed,
    Retry,
    Snooze,
    Unavailable,
    Verdict,
)
from outbox.handlers import Envelope, registry
from outbox.isolation import bookmark, restore
from outbox.leases import Lease, Settled, Settlement, announce, claim, settle
from outbox.models import Message, Outcome, Reason, State
from outbox.registration import worker_name

logger = logging.getLogger("outbox")

IMMEDIATE_MARGIN = 10.0  # seconds of lease beyond the handler's timeout, for there is no heartbeat


def run(lease: Lease, function: Callable[[Envelope], Any] | None = None) -> Settlement | Settled:
    """Call the handler of a lease (or ``function`` in its place) in this thread and judge what came of it.

    Returns what shall be written; an ``atomic`` handler that succeeded has written it itself. Raises nothing: whatever
    a handler raises, even SystemExit, is a failed attempt.
    """
    marks = bookmark()
    started = time.monotonic()
    try:
        if lease.view.lost:
            raise LeaseLost("The lease was lost before the handler started.")
        if lease.handler.atomic:
            return _run_atomic(lease, function or lease.handler.function, started)
        result = _call(lease, function or lease.handler.function)
    except BaseException as error:
        result = error
    leaked = restore(marks)
    if leaked and not isinstance(result, BaseException):
        result = LeakedTransaction(
            f"Handler {lease.handler.name!r} left a transaction open on {', '.join(sorted(leaked))}, which was rolled "
            "back. Use transaction.atomic() as a context manager."
        )
    return judge(lease, result, time.monotonic() - started)


def _call(lease: Lease, function: Callable[[Envelope], Any]) -> Any:
    if lease.handler.is_async and function is lease.handler.function:
        return async_to_sync(function)(lease.envelope)
    return function(lease.envelope)


def _run_atomic(lease: Lease, function: Callable[[Envelope], Any], started: float) -> Settlement | Settled:
    """Commit the handler's own writes and the completion in one transaction, or neither."""
    settled: Settled | None = None
    try:
        with short_transaction(lease.using):
            settlement = judge(lease, function(lease.envelope), time.monotonic() - started)
            if settlement.state != State.DELIVERED:
                raise _NotDelivered(settlement)
            settled = settle(lease.using, [settlement])[0]
            if settled.status != "settled":
                raise LeaseLost("The lease was lost while the handler ran: its writes are rolled back.")
        return settled
    except _NotDelivered as verdict:
        return verdict.settlement
    except DatabaseError as error:
        if settled is not None and is_loss(connections[lease.using], error) and _was_committed(lease):
            return settled
        raise


class _NotDelivered(Exception):
    """Rolls the transaction of an atomic handler back."""

    def __init__(self, settlement: Settlement) -> None:
        self.settlement = settlement


def _was_committed(lease: Lease) -> bool:
    """Whether the COMMIT whose reply was lost took place; asks until the lease is over."""
    while time.monotonic() < lease.deadline:
        close_quietly(lease.using)
        try:
            row = Message.objects.using(lease.using).filter(pk=lease.id, attempt=lease.attempt, lease_token=None)
            return row.delivered().exists()
        except Error:
            time.sleep(0.2)
    return False


def judge(lease: Lease, result: object, duration: float | None) -> Settlement:
    """The settlement that a handler's result or exception asks for."""
    wait: float
    match result:
        case Retry(after=after):
            return _failure(lease, result, duration, wait=after)
        case Snooze(until=until, for_=for_):
            return Settlement(
                lease=lease,
                outcome=Outcome.SNOOZED,
                until=None if until is None else _aware(until),
                wait=for_ or 0.0,
                refund=True,
                error=describe(result, with_traceback=False),
                cause=result,
                duration=duration,
            )
        case Unavailable(after=after):
            policy = lease.handler.policy
            wait = replace(policy, max_attempts=lease.attempt + 1).delay(lease.attempt) or 0.0
            return Settlement(
                lease=lease,
                outcome=Outcome.UNAVAILABLE,
                wait=wait if after is None else after,
                refund=True,
                error=describe(result, with_traceback=False),
                cause=result,
                duration=duration,
            )
        case Bury():
            return _final(lease, result, duration, State.DEAD, Outcome.BURIED, Reason.BURIED)
        case Discard():
            return _final(lease, result, duration, State.DISCARDED, Outcome.DISCARDED, Reason.HANDLER)
        case BaseException():
            return _failure(lease, result, duration)
        case False:
            return _failure(lease, NotConfirmed("The handler returned False: not confirmed."), duration)
    return Settlement(lease=lease, outcome=Outcome.DELIVERED, state=State.DELIVERED, duration=duration)


def timed_out(lease: Lease) -> Settlement:
    """The settlement of a handler that did not return in time; the handler is told, its thread cannot be stopped."""
    lease.view.revoke()
    error = HandlerTimeout(f"Handler {lease.handler.name!r} did not return within {lease.handler.timeout:g} s.")
    return replace(_failure(lease, error, lease.handler.timeout), outcome=Outcome.TIMED_OUT)


def release(lease: Lease, outcome: Outcome = Outcome.RELEASED, *, duration: float | None = None) -> Settlement:
    """Give a message back at once, at no cost to its budget."""
    return Settlement(lease=lease, outcome=outcome, refund=True, duration=duration)


def _failure(lease: Lease, error: BaseException, duration: float | None, *, wait: float | None = None) -> Settlement:
    delay = lease.handler.policy.delay(max(lease.message.spent, 1))
    settlement = Settlement(lease=lease, outcome=Outcome.FAILED, error=describe(error), cause=error, duration=duration)
    if delay is None:
        return replace(settlement, state=State.DEAD, reason=Reason.EXHAUSTED)
    return replace(settlement, wait=delay if wait is None else wait)


def _final(
    lease: Lease, verdict: Verdict, duration: float | None, state: State, outcome: Outcome, reason: Reason
) -> Settlement:
    return Settlement(
        lease=lease,
        outcome=outcome,
        state=state,
        reason=reason,
        error=describe(verdict, with_traceback=False),
        cause=verdict,
        duration=duration,
    )


def _aware(moment: datetime) -> datetime:
    return (moment if timezone.is_aware(moment) else timezone.make_aware(moment)).astimezone(UTC)


# --- immediate delivery -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Immediate:
    """What an immediate delivery did. Skipped: somebody else has it, or an earlier one of its lane comes first."""

    message_id: int
    status: Literal["delivered", "failed", "skipped"]
    error: BaseException | None = None


def deliver_now(using: str, ids: Sequence[int], *, deliver: Callable[[Envelope], Any] | None = None) -> list[Immediate]:
    """Deliver messages in this thread, right after their commit, through the same claim as any dispatcher.

    One attempt each, in place of the handler by ``deliver`` if given. A failure makes the message due again at once, at
    no cost to its budget. Never raises: the dispatcher delivers what is left.
    """
    results = []
    for pk in ids:
        try:
            results.append(_deliver_one(using, pk, deliver))
        except Exception as error:
            logger.warning("Message %s could not be delivered immediately; a dispatcher will: %r", pk, error)
            results.append(Immediate(message_id=pk, status="failed", error=error))
    if any(each.status != "delivered" for each in results):
        wakeup.hint(using)
    return results


def _deliver_one(using: str, pk: int, deliver: Callable[[Envelope], Any] | None) -> Immediate:
    route = Message.objects.using(using).filter(pk=pk).values_list("route", flat=True).first()
    handler = registry.by_route(route) if route else None
    if handler is None:
        return Immediate(message_id=pk, status="skipped")
    seconds = handler.timeout + IMMEDIATE_MARGIN
    leases = claim(using=using, worker=worker_name(), seconds=seconds, handlers=[handler], ids=[pk])
    if not leases:
        return Immediate(message_id=pk, status="skipped")
    outcome = run(leases[0], deliver)
    if isinstance(outcome, Settled):
        announce([outcome])
        return Immediate(message_id=pk, status="delivered")
    if outcome.outcome == Outcome.FAILED:
        released = replace(outcome, outcome=Outcome.RELEASED, state=State.PENDING, reason=Reason.NONE)
        outcome = replace(released, wait=0.0, refund=True)
    settled = settle(using, [outcome])
    announce(settled)
    if settled[0].status == "settled" and outcome.state in (State.DELIVERED, State.DISCARDED):
        return Immediate(message_id=pk, status="delivered")
    return Immediate(message_id=pk, status="failed", error=outcome.cause or LeaseLost("The lease was lost."))
