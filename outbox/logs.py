"""Every log line about the life of a message; the receivers here are the only ones that write them.

Logger ``outbox``. WARNING: one line per failed attempt, lost lease and failed immediate delivery. INFO: discarded, the
other side unavailable. DEBUG: staged, delivered, snoozed, released. For structured logs each record carries
``message_id``, ``event_key``, ``topic``, ``handler``, ``attempt``, ``database`` and ``fate`` as attributes. The payload
is never logged, and every line of the logger, whoever writes it, passes `redaction`.
"""

from __future__ import annotations

import logging
from datetime import UTC
from typing import Any

from django.dispatch import receiver

from outbox import signals
from outbox.models import Outcome, Reason
from outbox.redaction import RedactingFilter
from outbox.signals import Event
from outbox.texts import one_line

logger = logging.getLogger("outbox")
logger.addFilter(RedactingFilter())

FAILED: dict[str, str] = {
    Outcome.TIMED_OUT: "timed out",
    Outcome.CRASHED: "crashed its worker or was abandoned by it",
    Outcome.LAPSED: "lost its lease: the worker died or hung",
}


def _write(level: int, event: Event, fact: str, fate: str = "") -> None:
    """One line: which message, what happened to it, what happens next."""
    if not logger.isEnabledFor(level):
        return
    message = event.message
    logger.log(
        level,
        "Message %s (topic %s, attempt %s, key %s) %s%s",
        message.id,
        message.topic,
        message.attempt,
        one_line(message.event_key),
        fact,
        f"; {fate}." if fate else ".",
        extra={
            "message_id": message.id,
            "event_key": message.event_key,
            "topic": message.topic,
            "handler": event.handler,
            "attempt": message.attempt,
            "database": event.using,
            "fate": fate,
        },
    )


def _error(event: Event) -> str:
    code = f" [{one_line(event.error_code, 100)}]" if event.error_code else ""
    name = one_line(event.error_type, 100) + code
    text = one_line(event.error_text).rstrip(".")
    return f"{name}: {text}" if name and text else name or text


def _failure(event: Event) -> str:
    fact = FAILED.get(event.outcome, "failed")
    error = _error(event)
    worker = f" at {one_line(event.worker)}" if event.worker else ""
    return f"{fact}{worker}: {error}" if error else f"{fact}{worker}"


def _due(event: Event) -> str:
    return f"due {event.due_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if event.due_at else "due now"


@receiver(signals.staged)
def staged(event: Event, **kwargs: Any) -> None:
    _write(logging.DEBUG, event, "was staged")


@receiver(signals.delivered)
def delivered(event: Event, **kwargs: Any) -> None:
    took = "" if event.duration is None else f" in {event.duration * 1000:.0f} ms"
    _write(logging.DEBUG, event, f"was delivered{took}")


@receiver(signals.retried)
def retried(event: Event, **kwargs: Any) -> None:
    _write(logging.WARNING, event, _failure(event), f"it will be retried, {_due(event)}")


@receiver(signals.buried)
def buried(event: Event, **kwargs: Any) -> None:
    _write(
        logging.WARNING, event, _failure(event), f"it is dead ({event.reason or 'buried'}) and kept until somebody acts"
    )


@receiver(signals.snoozed)
def snoozed(event: Event, **kwargs: Any) -> None:
    if event.outcome == Outcome.UNAVAILABLE:
        _write(logging.INFO, event, f"found the other side unavailable: {_error(event)}", _due(event))
    else:
        _write(logging.DEBUG, event, "was snoozed", _due(event))


@receiver(signals.discarded)
def discarded(event: Event, **kwargs: Any) -> None:
    reason = f"{event.reason or 'handler'}{': ' if event.error_text else ''}{one_line(event.error_text)}"
    # What people discard by the thousand is on record already, as interventions.
    _write(logging.DEBUG if event.reason == Reason.OPERATOR else logging.INFO, event, f"was discarded ({reason})")


@receiver(signals.released)
def released(event: Event, **kwargs: Any) -> None:
    if event.error_type:
        _write(logging.WARNING, event, f"failed in its immediate delivery: {_error(event)}", "a dispatcher delivers it")
    else:
        _write(logging.DEBUG, event, "was given back", _due(event))


@receiver(signals.lease_lost)
def lease_lost(event: Event, **kwargs: Any) -> None:
    _write(
        logging.WARNING,
        event,
        "lost its lease",
        "what this attempt did may be done again, and its outcome was not recorded",
    )
