"""The one seam for logs, metrics, tracing and mirrors: what happened to a message, told after it was committed.

Every signal is sent with ``send_robust``: a receiver that raises is logged and changes nothing. Receivers get
``sender`` (the `Event` class) and ``event``. They run in the thread that settled the message, so they must be quick.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from django.dispatch import Signal

if TYPE_CHECKING:
    from outbox.handlers import Envelope

logger = logging.getLogger("outbox")

staged = Signal()  # a message was committed (never sent for what was rolled back)
delivered = Signal()  # its handler succeeded
retried = Signal()  # an attempt failed; due_at says when the next one may start
snoozed = Signal()  # put off without a failure
buried = Signal()  # dead
discarded = Signal()  # settled without delivery
released = Signal()  # given back unstarted, or an immediate delivery that failed
lease_lost = Signal()  # an outcome was thrown away: the message belongs to somebody else, or is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a signal tells.

    ``outcome`` is one of `Outcome`; ``reason`` says why a message is dead or discarded (`Reason`); ``duration`` is in
    seconds and None where no handler ran; ``due_at`` is set when there will be another attempt.
    """

    message: Envelope
    handler: str
    using: str
    outcome: str = ""
    reason: str = ""
    error_type: str = ""
    error_code: str = ""
    error_text: str = ""
    duration: float | None = None
    due_at: datetime | None = None
    worker: str = ""

    @property
    def died(self) -> bool:
        """Whether the message is dead now."""
        return self.due_at is None and self.outcome in ("failed", "timed_out", "buried", "crashed")


def send(signal: Signal, event: Event) -> None:
    """Tell all receivers; what one of them raises is logged and goes no further, SystemExit included."""
    try:
        responses = signal.send_robust(sender=Event, event=event)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # somebody at the terminal wants to stop
        logger.exception("A receiver of an outbox signal ended the round (message %s).", event.message.id)
        return
    for receiver, response in responses:
        if isinstance(response, Exception):
            logger.error(
                "A receiver of an outbox signal failed: %r (message %s).",
                receiver,
                event.message.id,
                exc_info=response,
            )
