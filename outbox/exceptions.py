"""Everything the outbox raises, and the verdicts a handler may raise.

::

    Exception
    ├── OutboxError
    │   ├── NotInTransaction        stage() without the caller's open atomic block, astage() within one
    │   ├── EventKeyConflict        the event key exists with different content
    │   ├── InvalidIntent           (ValueError) a key, header or time that cannot be stored
    │   │   ├── InvalidPayload      a payload that JSON or a database cannot hold
    │   │   └── UnknownTopic        a topic that nobody declared
    │   ├── LeaseLost               the claim is somebody else's now
    │   ├── LeakedTransaction       a handler left a transaction open
    │   ├── HandlerTimeout          a handler ran longer than its timeout
    │   ├── NotConfirmed            a handler returned False
    │   └── PostCommitEffectError   committed, but an immediate delivery failed
    └── Verdict
        ├── Retry                   failed; try again (after a given delay)
        ├── Snooze                  not now; costs no budget
        ├── Unavailable             the other side is down; costs no budget
        ├── Bury                    dead now
        └── Discard                 settled without delivery
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.durable import PostCommitResult


LONGEST = 36525 * 86400.0  # seconds: a century


class OutboxError(Exception):
    """Base of every error of this app."""


class NotInTransaction(OutboxError):
    """``stage()`` outside an ``atomic()`` block of the caller, or ``astage()`` and durable commands inside one."""


class EventKeyConflict(OutboxError):
    """The event key is taken by a message with different content."""


class InvalidIntent(OutboxError, ValueError):
    """Part of an intent cannot be stored the same way on every database."""


class InvalidPayload(InvalidIntent):
    """The payload (or headers) hold a value that JSON or a database cannot hold; the text names its path."""


class UnknownTopic(InvalidIntent):
    """No handler and no ``Topic(...)`` declares this topic."""


class LeaseLost(OutboxError):
    """The lease ran out and the message was claimed again, settled or deleted by somebody else."""


class LeakedTransaction(OutboxError):
    """The handler returned while a transaction of its own was still open; it was rolled back."""


class HandlerTimeout(OutboxError):
    """The handler did not return within its timeout."""


class NotConfirmed(OutboxError):
    """The handler returned ``False``: the effect is not confirmed."""


class PostCommitEffectError(OutboxError):
    """The business transaction committed, but at least one immediate delivery failed.

    ``result`` is the `PostCommitResult`, ``errors`` the exceptions by event key. A dispatcher delivers what is pending;
    what is not pending either is dead, or expired.
    """

    def __init__(self, result: PostCommitResult, errors: dict[str, BaseException]) -> None:
        self.result = result
        self.errors = errors
        failed = ", ".join(f"{key!r} ({type(error).__name__})" for key, error in errors.items())
        over = [f"{key!r} ({error})" for key, error in errors.items() if key not in result.pending_effects]
        fate = "These messages stay pending: the dispatcher delivers them."
        if over:
            fate = f"Nothing more is done for {', '.join(over)} until somebody acts."
            if len(over) < len(errors):
                fate += " The others stay pending: the dispatcher delivers them."
        super().__init__(f"The transaction is committed, but the immediate delivery of {failed} failed. {fate}")


class Verdict(Exception):
    """What a handler raises to say how its message shall be settled."""

    def __init__(self, reason: str = "", code: str = "") -> None:
        self.reason = reason
        self.code = code
        super().__init__(reason)


class Retry(Verdict):
    """Count a failure and try again ``after`` seconds (or a timedelta); by default after the handler's backoff."""

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None, code: str = "") -> None:
        super().__init__(reason, code)
        self.after = None if after is None else _seconds(after, "Retry(after=…)")


class Snooze(Verdict):
    """Come back later without counting a failure: ``until`` an aware datetime, or ``for_`` seconds or a timedelta."""

    def __init__(
        self, reason: str = "", *, until: datetime | None = None, for_: float | timedelta | None = None
    ) -> None:
        if (until is None) == (for_ is None):
            raise ValueError("Snooze takes either until=… or for_=…, and exactly one of them.")
        if until is not None and not isinstance(until, datetime):
            raise TypeError(f"Snooze(until=…) must be a datetime, not {type(until).__name__}; a duration is for_=….")
        super().__init__(reason)
        self.until = until
        self.for_ = None if for_ is None else _seconds(for_, "Snooze(for_=…)")


class Unavailable(Verdict):
    """The other side is down, which is not this message's fault: try again without counting a failure."""

    def __init__(self, reason: str = "", after: float | timedelta | None = None, *, code: str = "") -> None:
        super().__init__(reason, code)
        self.after = None if after is None else _seconds(after, "Unavailable(after=…)")


class Bury(Verdict):
    """Dead now: no more automatic attempts, kept until a person acts."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason, code)


class Discard(Verdict):
    """Settled without delivery: nothing needs to be done any more."""

    def __init__(self, reason: str = "", code: str = "") -> None:
        super().__init__(reason, code)


def _seconds(value: float | timedelta, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise TypeError(f"{what} must be a number of seconds or a timedelta, not {value!r}.")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{what} must be a finite number of seconds, zero or more, not {value!r}.")
    return float(min(seconds, LONGEST))
