"""Undo what a handler did to the database connections of its thread, before anything is written about it.

A transaction that the handler left open is rolled back, a spoilt connection is dropped. A transaction that was open
before, which only the test case of a project's tests is, must stay usable: it gets a savepoint. A plain one, not
``atomic()``: a handler may open ``atomic(durable=True)``, which refuses to run inside a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections

from outbox.database import close_quietly, has_open_transaction, is_cheap_to_open

# Statements whose effect outlasts their transaction. Taking one for another costs a new connection, no more.
_LASTING = re.compile(
    r"(?:\A|;)\s*(?:SET\b(?!\s+(?:LOCAL|TRANSACTION|CONSTRAINTS)\b)|RESET\b|PRAGMA\b|ATTACH\b|USE\b|LISTEN\b|PREPARE\b"
    r"|DECLARE\b|LOCK\s+TABLES\b|CREATE\s+(?:LOCAL\s+|GLOBAL\s+)?TEMP)"
    r"|\b(?:set_config|pg_(?:try_)?advisory_lock\w*|get_lock)\s*\(",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """An open transaction: a savepoint in it, if it is Django's, and how much Django remembered of it then."""

    savepoint: str | None
    blocks: int
    savepoints: int
    hooks: int


def bookmark(watched: Sequence[Any] | None = None) -> dict[str, Bookmark]:
    """Mark every transaction that is open in this thread, by alias; a dispatcher's threads have none.

    ``watched``: the connections of this thread, as a `SessionWatch` knows them; looking them up costs more than this.
    """
    marks = {}
    for connection in connections.all(initialized_only=True) if watched is None else watched:
        with suppress(Error):
            if has_open_transaction(connection):
                usable = connection.in_atomic_block and not connection.needs_rollback
                marks[connection.alias] = Bookmark(
                    savepoint=connection.savepoint() if usable else None,
                    blocks=len(connection.atomic_blocks),
                    savepoints=len(connection.savepoint_ids),
                    hooks=len(connection.run_on_commit),
                )
    return marks


def restore(marks: dict[str, Bookmark], watched: Sequence[Any] | None = None) -> set[str]:
    """Undo what happened to the connections since then; returns the aliases where something had to be rolled back.

    In a marked transaction the writes of a handler stay unless it spoilt the transaction, even if it failed: without
    the test case they would have been committed.
    """
    found = connections.all(initialized_only=True) if watched is None else watched
    return {each.alias for each in found if not _as_before(each, marks.get(each.alias))}


def left_open(before: Collection[str], *, within: str, depth: int) -> set[str]:
    """Aliases on which a handler left a transaction open that runs inside one of ours, on ``within``.

    ``before``: aliases whose transactions were open before; ``depth``: how many blocks were open on ours.
    """
    found = set()
    for each in connections.all(initialized_only=True):
        if each.alias == within:
            leaked = len(each.atomic_blocks) != depth
        else:
            leaked = each.alias not in before and has_open_transaction(each)
        if leaked:
            found.add(each.alias)
    return found


def _as_before(connection: Any, mark: Bookmark | None) -> bool:
    if mark is not None:
        return mark.savepoint is None or _back_to(connection, mark, mark.savepoint)
    if connection.closed_in_transaction:  # at the end of such a block Django says nothing
        connection.in_atomic_block = connection.closed_in_transaction = False
        _forget_blocks(connection, blocks=0, savepoints=0, hooks=0)
        connection.connection = None
        return False
    try:
        if not has_open_transaction(connection):
            _close_if_unusable(connection)
            return True
    except Error:
        pass  # it cannot even be asked
    _forget_blocks(connection, blocks=0, savepoints=0, hooks=0)
    connection.in_atomic_block = connection.closed_in_transaction = False
    with suppress(Error):  # closing would roll back, too, but a database in memory is never closed
        connection.rollback()
        connection.set_autocommit(True)
    _end_pooled(connection)
    with suppress(Error):  # a connection that cannot be closed is gone already
        connection.close()
    return False


def _close_if_unusable(connection: Any) -> None:
    """Close what statements failed on and what answers no more; whether it is too old is asked by others, later.

    An old connection would go back to its pool, and take along what the handler has set in its session.
    """
    if connection.errors_occurred and connection.connection is not None:
        if connection.is_usable():
            connection.errors_occurred = False
        else:
            connection.close()


def _end_pooled(connection: Any) -> None:
    """End the session of a pooled connection: the pool would hand it on as a handler has left it."""
    if getattr(connection, "pool", None) is not None and connection.connection is not None:
        with suppress(Exception):
            connection.connection.close()


def _back_to(connection: Any, mark: Bookmark, savepoint: str) -> bool:
    if len(connection.atomic_blocks) == mark.blocks and not connection.needs_rollback:
        try:
            connection.savepoint_commit(savepoint)
            return True
        except Error:
            pass  # a statement failed, which spoils the whole transaction on PostgreSQL
    if not connection.closed_in_transaction:
        _forget_blocks(connection, blocks=mark.blocks, savepoints=mark.savepoints, hooks=mark.hooks)
        connection.savepoint_rollback(savepoint)
        connection.savepoint_commit(savepoint)
    return False


def _forget_blocks(connection: Any, *, blocks: int, savepoints: int, hooks: int) -> None:
    """Let Django forget the atomic blocks that the handler left open, with their commit hooks."""
    del connection.atomic_blocks[blocks:]
    del connection.savepoint_ids[savepoints:]
    del connection.run_on_commit[hooks:]
    connection.needs_rollback = False


class SessionWatch:
    """Notices what handlers of this thread leave behind in their sessions, so that no later message meets it."""

    def __init__(self) -> None:
        self.connections = connections.all()
        self._changed: set[str] = set()
        self._cheap: set[str] = set()
        for connection in self.connections:
            connection.execute_wrappers.append(self._note)
            if is_cheap_to_open(connection):
                self._cheap.add(connection.alias)

    def _note(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        alias = context["connection"].alias
        if alias in self._cheap or not isinstance(sql, str) or _LASTING.search(sql):
            self._changed.add(alias)
        return execute(sql, params, many, context)

    def renew(self) -> None:
        """Drop the connections whose sessions were changed, that cost nothing, that are unusable or too old."""
        while self._changed:
            alias = self._changed.pop()
            _end_pooled(connections[alias])
            close_quietly(alias)
        for connection in self.connections:
            connection.close_if_unusable_or_obsolete()
            connection.queries_log.clear()
