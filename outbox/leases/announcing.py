"""The signals that tell how attempts ended; sent after the commit, so they can change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from django.dispatch import Signal

from outbox.handlers import LeaseView
from outbox.leases.lease import envelope
from outbox.leases.outcomes import Closing, Settled
from outbox.models import Message, Outcome, State
from outbox.signals import Event, buried, delivered, discarded, lease_lost, released, retried, send, snoozed

_BY_STATE = {State.DELIVERED: delivered, State.DEAD: buried, State.DISCARDED: discarded}
_BY_OUTCOME = {
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
        signal = lease_lost if each.status == "lost" else _signal(done.state, done.outcome)
        if not signal.has_listeners(Event):
            continue  # of most messages nobody wants to hear: their event need not even be made
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
        send(signal, event)


def event_of(using: str, row: Message, closing: Closing) -> tuple[Signal, Event]:
    """The signal of what a claim settled itself: a message that expired, or whose lease ran out."""
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
        worker=closing.worker,
    )
    return _signal(closing.state, closing.outcome), event


def _signal(state: State, outcome: Outcome) -> Signal:
    return _BY_STATE.get(state) or _BY_OUTCOME.get(outcome) or retried
