"""Sleep until polled, notified or woken; and wake those who sleep.

Wake-ups are only speed: each may be lost, and the next poll finds what it told of. So nothing here ever raises, and no
NOTIFY is sent inside a transaction.
"""

from __future__ import annotations

import hashlib
import logging
import random
import selectors
import socket
import threading
from math import ceil
from time import monotonic

from django.db import connections

from outbox import database
from outbox.conf import options
from outbox.listening import SILENT, ChangeCounter, Deaf, Ear, Listener, may_notify, notify
from outbox.models import Message

logger = logging.getLogger("outbox")

SHARE = 0.08  # of its time that a process may spend on notifying
SAVED = 0.005  # seconds of it that can be saved up, so that the first of a few commits are all told at once
CHEAPEST = 0.0002  # seconds that a notification is taken to cost at least: the receivers pay, too
SILENCE = 0.25  # seconds without a notification, at most, however long one takes
QUIET = 1.0  # seconds without another try after one failed
COMPLAIN_EVERY = 60.0  # seconds between two warnings about the same thing
REOPEN_AFTER = 0.5  # seconds, doubled with each failure
REOPEN_CAP = 5.0
PATIENT = 10.0  # a try to listen that hung is followed by a pause so many times as long: the owner must work, too
DEAF_PAUSE = 60.0  # the same for a listener that hears nothing
DEAF_CAP = 600.0

_lock = threading.Lock()
_waiters: dict[str, tuple[Waiter, ...]] = {}
_allowances: dict[str, Allowance] = {}
_complained_at: dict[str, float] = {}


class Allowance:
    """How much time one process may still spend on notifying about a database.

    What a notification costs is learned from those before: next to nothing on a server with time to spare, much where
    many clients commit as fast as they can. So none of them loses more than `SHARE` of its rate.
    """

    def __init__(self) -> None:
        self.price = 0.0005  # seconds
        self._left = SAVED
        self._at = monotonic()

    def take(self) -> float | None:
        """Seconds of silence after the notification that may be sent now, or None: none may be sent."""
        with _lock:
            now = monotonic()
            self._left = min(SAVED, self._left + (now - self._at) * SHARE)
            self._at = now
            if self._left <= 0:
                return None
            self._left = max(self._left - self.price, -SILENCE * SHARE)
            return max(0.0, -self._left / SHARE)

    def learn(self, took: float) -> None:
        self.price = max(CHEAPEST, self.price + (took - self.price) / 5)

    def suspend(self, seconds: float) -> None:
        self._left = -seconds * SHARE


def hint(using: str) -> None:
    """Wake the dispatchers of a database, after messages became due there. Call it after the commit; never raises.

    Other processes are told as often as the `Allowance` permits, and how long they will not be told: they look a
    second time when that is over.
    """
    for waiter in _waiters.get(using, ()):
        waiter.wake()
    allowance = _allowances.get(using) or _allowances.setdefault(using, Allowance())
    try:
        connection = connections[using]
        if not may_notify(connection) or not options().WAKEUP:
            return
        silence = allowance.take()
        if silence is None:
            return
        start = monotonic()
        notify(connection, channel(), f"{SILENT}{ceil(silence * 1000)}" if silence else "")
        allowance.learn(monotonic() - start)
    except Exception as error:
        allowance.suspend(QUIET)
        _complain(f"notify {using}", "Dispatchers of database %r could not be notified; they poll: %s", using, error)
        _drop_if_lost(using, error)


def channel() -> str:
    """The name under which changes of the message table are notified; a database takes at most 63 characters."""
    table = Message._meta.db_table
    if len(table.encode()) <= 63:
        return table
    return f"outbox_{hashlib.blake2b(table.encode(), digest_size=16).hexdigest()}"


class Waiter:
    """How one dispatcher thread sleeps. `wake` may be called by any thread, the rest only by the owner.

    ``poll`` is the longest sleep, in seconds.
    """

    def __init__(self, using: str, poll: float) -> None:
        self.using = using
        self.poll = poll
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._ear = _ear_for(using)
        self._open = False
        self._fileno: int | None = None
        self._failures = 0
        self._reopen_at = 0.0
        self._look_again_at = float("inf")
        with _lock:
            _waiters[using] = (*_waiters.get(using, ()), self)

    @property
    def mode(self) -> str:
        """How commits of other processes are noticed: "notify", "data_version" or only by "poll"."""
        return self._ear.mode if self._ear is not None and self._ear.proven else "poll"

    def wait(self, timeout: float) -> bool:
        """Sleep, at most so many seconds; return True when it is worth looking at the table before that."""
        deadline = monotonic() + min(timeout, self.poll)
        while True:
            if self._was_woken() or self._heard():
                return True
            now = monotonic()
            if now >= deadline:
                return False
            self._selector.select(max(0.0, min(deadline, self._next_duty()) - now))

    def wake(self) -> None:
        """End the present `wait`, or else the next one, at once."""
        try:
            self._button.send(b"\0")
        except OSError:
            pass  # full: it rings already; or closed: nobody waits

    def close(self) -> None:
        with _lock:
            _waiters[self.using] = tuple(each for each in _waiters.get(self.using, ()) if each is not self)
        self._close_ear()
        self._selector.close()
        self._bell.close()
        self._button.close()

    def _was_woken(self) -> bool:
        try:
            return bool(self._bell.recv(4096))
        except BlockingIOError:
            return False

    def _heard(self) -> bool:
        now = monotonic()
        if now >= self._look_again_at:
            self._look_again_at = float("inf")
            return True
        if self._ear is None or (not self._open and now < self._reopen_at):
            return False
        try:
            if not self._open:
                self._open_ear(self._ear)
                return True  # for what was committed while nobody listened
            heard = self._ear.heard(now)
        except Exception as error:
            self._lose_ear(error, hung=monotonic() - now)
            return False
        if self._ear.proven:
            self._failures = 0
        if self._ear.silence:
            waits = self._look_again_at < float("inf")
            self._look_again_at = max(self._look_again_at if waits else 0.0, now + self._ear.silence)
        return heard

    def _next_duty(self) -> float:
        if self._ear is None:
            return float("inf")
        return min(self._look_again_at, self._ear.due if self._open else self._reopen_at)

    def _open_ear(self, ear: Ear) -> None:
        ear.open()
        self._open = True
        self._fileno = ear.fileno()
        if self._fileno is not None:
            self._selector.register(self._fileno, selectors.EVENT_READ)

    def _close_ear(self) -> None:
        if self._fileno is not None:
            self._selector.unregister(self._fileno)
            self._fileno = None
        self._open = False
        if self._ear is not None:
            self._ear.close()

    def _lose_ear(self, error: Exception, *, hung: float) -> None:
        """Close the ear, and try again later; that a session has ended is nothing to complain of yet."""
        self._close_ear()
        first, cap = (DEAF_PAUSE, DEAF_CAP) if isinstance(error, Deaf) else (REOPEN_AFTER, REOPEN_CAP)
        pause = min(cap, first * 2 ** min(self._failures, 10))
        self._failures += 1
        pause = max(pause * random.uniform(0.5, 1.0), PATIENT * hung)  # noqa: S311 - jitter, not secrecy
        self._reopen_at = monotonic() + pause
        if self._failures == 1 and not isinstance(error, Deaf):
            logger.debug("The session that listens for commits on database %r has ended: %s", self.using, error)
            return
        _complain(
            f"hear {self.using}",
            "Commits of other processes on database %r are only noticed by polling every %s s until this is over: %s",
            self.using,
            self.poll,
            error,
        )


def _ear_for(using: str) -> Ear | None:
    """How to hear of commits on a database, or None where only polling helps."""
    try:
        listen_on = options().LISTEN_DATABASE or using
        if options().WAKEUP and database.can_notify(connections[using]) and database.can_listen(connections[listen_on]):
            return Listener(using=using, listen_on=listen_on, channel=channel())
        if database.has_data_version(connections[using]):
            return ChangeCounter(using=using)
    except Exception as error:
        _complain(f"hear {using}", "Commits on database %r are only noticed by polling: %s", using, error)
    return None


def _drop_if_lost(using: str, error: Exception) -> None:
    """Close a dead connection, so that the caller's next statement opens a new one."""
    try:
        if database.is_loss(connections[using], error):
            database.close_quietly(using)
    except Exception:
        logger.debug("The connection to %r could not be examined.", using, exc_info=True)


def _complain(about: str, text: str, *values: object) -> None:
    now = monotonic()
    if now >= _complained_at.get(about, 0.0):
        _complained_at[about] = now + COMPLAIN_EVERY
        logger.warning(text, *values)
