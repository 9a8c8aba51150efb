"""One call of a handler, with one message or a list of them, and what came of it.

The verdict is judged once, here. Whatever a handler does to its database connections is undone before anything is
written: the outcome never goes through a transaction that the handler may have spoilt.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from asgiref.sync import async_to_sync
from django.db import Error, connections

from outbox.database import close_quietly, is_loss, is_race, short_transaction
from outbox.exceptions import HandlerTimeout, LeakedTransaction, LeaseLost
from outbox.isolation import bookmark, left_open, restore
from outbox.leases import Lease, Settled, Settlement, settle
from outbox.models import Message, State
from outbox.verdicts import judge, judge_list, release

PAUSE = 0.1  # seconds between two looks whether a COMMIT took place
REOPENED_AFTER = 1.0  # seconds until an atomic handler is tried again whose transaction could not be opened

Function = Callable[..., Any]
Ended = Settlement | Settled


class Call:
    """One call of a handler, with one message or a list of them."""

    __slots__ = ("function", "handler", "leases", "own", "using")

    def __init__(self, leases: Sequence[Lease], function: Function) -> None:
        self.leases = leases
        self.function = function
        self.using = leases[0].using
        self.handler = leases[0].handler
        self.own = function is self.handler.function

    def make(self) -> Any:
        """Call it in a context of its own: no time zone, language or log context is handed on to the next message."""
        function: Any = async_to_sync(self.function) if self.own and self.handler.is_async else self.function
        of_list = self.own and self.handler.batch is not None
        given = [lease.envelope for lease in self.leases] if of_list else self.leases[0].envelope
        return contextvars.copy_context().run(function, given)

    def judge(self, result: object, duration: float) -> list[Settlement]:
        if self.own and self.handler.batch is not None:
            return judge_list(self.leases, result, duration)
        return [judge(self.leases[0], result, duration)]


class _RolledBack(Exception):
    """Ends the transaction of an atomic handler whose verdicts are known."""

    def __init__(self, ends: Sequence[Settlement]) -> None:
        self.ends = list(ends)


def perform(call: Call, watched: Sequence[Any] | None) -> list[Ended]:
    """Make a call and judge it; returns the ends of its leases, and raises nothing.

    ``watched``: this thread's connections, if they are known.
    """
    marks = bookmark(watched)
    started = time.monotonic()
    ends: list[Ended] | None = None
    result: object = None
    try:
        if call.handler.atomic:
            ends = _make_atomic(call, set(marks))
        else:
            result = call.make()
    except BaseException as error:
        result = error
    leaked = restore(marks, watched)
    try:
        if ends is not None:
            return ends
        if leaked and not isinstance(result, BaseException):
            result = _leak(call, leaked)
        return [*call.judge(result, time.monotonic() - started)]
    finally:
        result = None  # an exception refers to this frame: nothing of it shall wait for the garbage collector


def _leak(call: Call, aliases: set[str]) -> LeakedTransaction:
    return LeakedTransaction(
        f"Handler {call.handler.name!r} left a transaction open on {', '.join(sorted(aliases))}, or closed the "
        "connection inside it: it was rolled back. Use transaction.atomic() as a context manager."
    )


def _make_atomic(call: Call, before: set[str]) -> list[Ended]:
    """Commit the handler's own writes and the completions in one transaction, or nothing: then it raises why.

    ``before``: aliases whose transactions were open before. A database that is away when the transaction shall be
    opened is not the messages' fault: they are given back, for their handler has not run.
    """
    settled: list[Settled] = []
    begun = False
    try:
        with short_transaction(call.using):
            begun = True
            settlements = _judge_within(call, before)
            settled = settle(call.using, settlements)
            if any(each.status != "settled" or each.settlement.state == State.PENDING for each in settled):
                if len(settled) > 1:  # of one of them: its writes cannot be told from those of the others
                    raise _RolledBack([release(lease) for lease in call.leases])
                raise LeaseLost("The lease was lost while the handler ran: its writes are rolled back.")
        return [*settled]
    except _RolledBack as back:
        return [*back.ends]
    except Error as error:
        lost = is_loss(connections[call.using], error)
        if settled and lost and _was_committed(call.leases[0]):
            return [*settled]
        if not begun and (lost or is_race(connections[call.using], error)):
            return [replace(release(lease, wait=REOPENED_AFTER), cause=error) for lease in call.leases]
        raise


def _judge_within(call: Call, before: set[str]) -> list[Settlement]:
    """Call the handler inside the transaction; returns the settlements if all is well, or raises what ends it.

    One message that is not delivered rolls back all: the others of its list, delivered or not, are given back.
    """
    started = time.monotonic()
    depth = len(connections[call.using].atomic_blocks)
    result = call.make()
    duration = time.monotonic() - started
    settlements = call.judge(result, duration)
    if any(each.cause is not None for each in settlements):
        raise _RolledBack([each if each.cause is not None else release(each.lease) for each in settlements])
    if leaked := left_open(before, within=call.using, depth=depth):
        raise _leak(call, leaked)
    if duration > call.handler.timeout:
        raise HandlerTimeout(f"Handler {call.handler.name!r} took {duration:.1f} s and was rolled back.")
    return settlements


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
