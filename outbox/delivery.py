"""One lease → its handler → a verdict → a settlement; also the immediate delivery right after a commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from django.db import Error, connections

from outbox import wakeup
from outbox.calls import Call, Ended, Function, perform
from outbox.database import close_quietly, is_loss, is_race
from outbox.exceptions import Bury, LeaseLost, OutboxError, Retry, Snooze
from outbox.fields import Unreadable
from outbox.handlers import registry
from outbox.leases import Lease, Settled, Settlement, announce, claim, draw_token, settle, unbroken
from outbox.models import Message, Outcome, Reason, State
from outbox.registration import worker_name
from outbox.verdicts import judge, release

logger = logging.getLogger("outbox")

IMMEDIATE_MARGIN = 10.0  # seconds of lease beyond the handler's timeout, for there is no heartbeat
PAUSE = 0.1  # seconds between two tries to write what a handler has done


def run(lease: Lease, function: Function | None = None, *, watched: Sequence[Any] | None = None) -> Ended:
    """Call the handler of a lease (or ``function`` in its place) in this thread and judge what came of it.

    ``watched``: this thread's connections, if they are known. Returns what shall be written; an ``atomic`` handler that
    succeeded has written it itself. Raises nothing: whatever a handler raises, even SystemExit, is a failed attempt.
    """
    return run_list([lease], function, watched=watched)[0]


def run_list(
    leases: Sequence[Lease], function: Function | None = None, *, watched: Sequence[Any] | None = None
) -> list[Ended]:
    """The same for all leases of one call of a list handler; returns their ends in the same order.

    A message that cannot be handed over stays out, and those behind it in its lane are given back.
    """
    out: dict[Lease, Ended] = {lease: end for lease in leases if (end := _refused(lease)) is not None}
    function = function or leases[0].handler.function
    if not out:
        return perform(Call(leases, function), watched)
    if fit := unbroken(leases, out):
        out.update(zip(fit, perform(Call(fit, function), watched), strict=True))
    return [out.get(lease) or release(lease) for lease in leases]


def _refused(lease: Lease) -> Settlement | None:
    """The end of a lease whose handler must not run."""
    if lease.view.lost:
        return release(lease)
    for part in (lease.message.payload, lease.message.headers):
        unreadable: Any = part
        if isinstance(unreadable, Unreadable):
            return judge(lease, Bury(f"What is stored is no JSON: {unreadable.why}.", code="unreadable"), None)
    return None


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
