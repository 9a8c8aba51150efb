"""One lease → its handler → a verdict → a settlement; also the immediate delivery right after a commit.

The verdict is judged once, here. Whatever a handler does to its database connections is undone before anything is
written: the outcome never goes through a transaction that the handler may have spoilt.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asgiref.sync import async_to_sync
from django.db import Error, connections

from outbox import wakeup
from outbox.database import close_quietly, is_loss, is_race, short_transaction
from outbox.exceptions import Bury, HandlerTimeout, LeakedTransaction, LeaseLost, OutboxError, Retry, Snooze
from outbox.fields import Unreadable
from outbox.handlers import Envelope, registry
from outbox.isolation import bookmark, left_open, restore
from outbox.leases import Lease, Settled, Settlement, announce, claim, draw_token, settle
from outbox.models import Message, Outcome, Reason, State
from outbox.registration import worker_name
from outbox.verdicts import judge, release

logger = logging.getLogger("outbox")

IMMEDIATE_MARGIN = 10.0  # seconds of lease beyond the handler's timeout, for there is no heartbeat
PAUSE = 0.1  # seconds between two tries to write what a handler has done
REOPENED_AFTER = 1.0  # seconds until an atomic handler is tried again whose transaction could not be opened

Function = Callable[[Envelope], Any]


def run(
    lease: Lease, function: Function | None = None, *, watched: Sequence[Any] | None = None
) -> Settlement | Settled:
    """Call the handler of a lease (or ``function`` in its place) in this thread and judge what came of it.

    ``watched``: this thread's connections, if they are known. Returns what shall be written; an ``atomic`` handler that
    succeeded has written it itself. Raises nothing: whatever a handler raises, even SystemExit, is a failed attempt.
    """
    if lease.view.lost:
        return release(lease)
    stored: tuple[Any, ...] = (lease.message.payload, lease.message.headers)
    for part in stored:
        if isinstance(part, Unreadable):
            return judge(lease, Bury(f"What is stored is no JSON: {part.why}.", code="unreadable"), None)
    marks = bookmark(watched)
    started = time.monotonic()
    result: object
    try:
        if lease.handler.atomic:
            result = _call_atomic(lease, function or lease.handler.function, set(marks))
        else:
            result = _call(lease, function or lease.handler.function)
    except BaseException as error:
        result = error
    leaked = restore(marks, watched)
    try:
        if isinstance(result, (Settled, Settlement)):
            return result
        if leaked and not isinstance(result, BaseException):
            result = _leak(lease, leaked)
        return judge(lease, result, time.monotonic() - started)
    finally:
        result = None  # an exception refers to this frame: nothing of it shall wait for the garbage collector


def _call(lease: Lease, function: Function) -> Any:
    """Call it in a context of its own: no time zone, language or log context is handed on to the next message."""
    if lease.handler.is_async and function is lease.handler.function:
        function = async_to_sync(function)
    return contextvars.copy_context().run(function, lease.envelope)


def _leak(lease: Lease, aliases: set[str]) -> LeakedTransaction:
    return LeakedTransaction(
        f"Handler {lease.handler.name!r} left a transaction open on {', '.join(sorted(aliases))}, or closed the "
        "connection inside it: it was rolled back. Use transaction.atomic() as a context manager."
    )


def _call_atomic(lease: Lease, function: Function, before: set[str]) -> Settled | Settlement:
    """Commit the handler's own writes and the completion in one transaction, or neither: then it raises why.

    ``before``: aliases whose transactions were open before. A database that is away when the transaction shall be
    opened is not the message's fault: it is given back, for its handler has not run.
    """
    settled: Settled | None = None
    begun = False
    started = time.monotonic()
    try:
        with short_transaction(lease.using):
            begun = True
            depth = len(connections[lease.using].atomic_blocks)
            result = _call(lease, function)
            duration = time.monotonic() - started
            settlement = judge(lease, result, duration)
            if settlement.cause is not None:  # returned, not raised: it must roll back all the same
                raise settlement.cause
            if leaked := left_open(before, within=lease.using, depth=depth):
                raise _leak(lease, leaked)
            if duration > lease.handler.timeout:
                raise HandlerTimeout(f"Handler {lease.handler.name!r} took {duration:.1f} s and was rolled back.")
            settled = settle(lease.using, [settlement])[0]
            if settled.status != "settled":
                raise LeaseLost("The lease was lost while the handler ran: its writes are rolled back.")
        return settled
    except Error as error:
        lost = is_loss(connections[lease.using], error)
        if settled is not None and lost and _was_committed(lease):
            return settled
        if not begun and (lost or is_race(connections[lease.using], error)):
            return replace(release(lease, wait=REOPENED_AFTER), cause=error)
        raise


def _was_committed(lease: Lease) -> bool:
    """Whether the COMMIT whose reply was lost took place; asks until the lease is over."""
    while time.monotonic() < lease.deadline:
        close_quietly(lease.using)
        try:
            row = Message.objects.using(lease.using).filter(pk=lease.id, attempt=lease.attempt, lease_token=None)
            return row.delivered().exists()
        except Error:
            time.sleep(PAUSE)
    return False


# --- immediate delivery -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Immediate:
    """What an immediate delivery did.

    Skipped: somebody else has the message, an earlier one of its lane comes first, or the handler put it off.
    """

    message_id: int
    status: Literal["delivered", "failed", "skipped"]
    error: BaseException | None = None


def deliver_now(using: str, ids: Sequence[int], *, deliver: Function | None = None) -> list[Immediate]:
    """Deliver messages in this thread, right after their commit, through the same claim as any dispatcher.

    One attempt each, in place of the handler by ``deliver`` if given. A failure makes the message due again at once (or
    when a Retry says), at no cost to its budget. Raises nothing but a real KeyboardInterrupt: the dispatcher delivers
    what is left.
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


def _deliver_one(using: str, pk: int, deliver: Function | None) -> Immediate:
    route = Message.objects.using(using).filter(pk=pk).values_list("route", flat=True).first()
    handler = registry.by_route(route) if route else None
    if handler is None:
        return Immediate(message_id=pk, status="skipped")
    seconds = handler.timeout + IMMEDIATE_MARGIN
    leases = claim(using=using, worker=worker_name(), seconds=seconds, handlers=[handler], ids=[pk])
    if not leases:
        return Immediate(message_id=pk, status="skipped")
    lease = leases[0]
    lease.view.safe_until = lease.deadline
    outcome = run(lease, deliver)
    settled = outcome if isinstance(outcome, Settled) else _settle_now(lease, _at_no_cost(outcome))
    announce([settled])
    return _conclude(settled)


def _at_no_cost(outcome: Settlement) -> Settlement:
    """A failure in front of the user costs nothing, not even the last attempt: the dispatcher has its whole budget."""
    if outcome.outcome != Outcome.FAILED:
        return outcome
    asked = isinstance(outcome.cause, Retry) and outcome.cause.after is not None
    wait = outcome.wait if asked else 0.0
    return replace(outcome, outcome=Outcome.RELEASED, state=State.PENDING, reason=Reason.NONE, wait=wait, refund=True)


def _settle_now(lease: Lease, outcome: Settlement) -> Settled:
    """Settle through locks and lost connections while the lease lasts: the effect must not come twice."""
    end = min(lease.deadline, time.monotonic() + IMMEDIATE_MARGIN)
    token, lost = draw_token(), False
    while True:
        connection = connections[lease.using]
        try:
            settled = settle(lease.using, [outcome], token=token, recheck=lost)[0]
            if settled.status != "busy" or time.monotonic() > end:
                return settled
        except Error as error:
            lost = lost or is_loss(connection, error)
            passing = lost or is_race(connection, error)
            if connection.in_atomic_block or not passing or time.monotonic() > end:
                raise
            close_quietly(lease.using)
        time.sleep(PAUSE)


def _conclude(settled: Settled) -> Immediate:
    done, pk = settled.settlement, settled.settlement.lease.id
    if isinstance(done.cause, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise done.cause  # somebody at the terminal wants to stop; handlers of a dispatcher run in other threads
    if settled.status == "lost":
        error = LeaseLost(f"The lease of message {pk} was lost: somebody else has it now.")
        return Immediate(message_id=pk, status="failed", error=error)
    if settled.status == "busy":
        locked = OutboxError(f"Message {pk} stayed locked by somebody: it may be delivered again.")
        return Immediate(message_id=pk, status="failed", error=locked)
    if done.state in (State.DELIVERED, State.DISCARDED):
        return Immediate(message_id=pk, status="delivered")
    if isinstance(done.cause, Snooze):
        return Immediate(message_id=pk, status="skipped")
    return Immediate(message_id=pk, status="failed", error=done.cause)
