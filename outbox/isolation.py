"""Keep transactions that were open before a handler usable after it, whatever the handler did to them.

Only tests run handlers inside a transaction: that of the test case. A dispatcher has none open, and nothing happens.
Plain savepoints, not ``atomic()``: a handler may open ``atomic(durable=True)``, which refuses to run inside a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db import Error, connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """A savepoint, and how much Django remembered of the transaction when it was set."""

    alias: str
    savepoint: str
    blocks: int
    savepoints: int
    hooks: int


def bookmark() -> list[Bookmark]:
    """Set a savepoint in every transaction that is open in this thread."""
    marks = []
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block and not connection.needs_rollback:
            savepoint = connection.savepoint()
            if savepoint is not None:
                mark = Bookmark(
                    alias=connection.alias,
                    savepoint=savepoint,
                    blocks=len(connection.atomic_blocks),
                    savepoints=len(connection.savepoint_ids),
                    hooks=len(connection.run_on_commit),
                )
                marks.append(mark)
    return marks


def restore(marks: Iterable[Bookmark]) -> set[str]:
    """Make each transaction usable again; returns the aliases where that took a rollback to the savepoint.

    Elsewhere the handler's writes stay, even if it failed, as they would have been committed without the test case.
    """
    return {mark.alias for mark in marks if not _released(mark)}


def _released(mark: Bookmark) -> bool:
    connection = connections[mark.alias]
    if len(connection.atomic_blocks) == mark.blocks and not connection.needs_rollback:
        try:
            connection.savepoint_commit(mark.savepoint)
            return True
        except Error:
            pass  # a statement failed, which spoils the whole transaction on PostgreSQL
    del connection.atomic_blocks[mark.blocks :]
    del connection.savepoint_ids[mark.savepoints :]
    del connection.run_on_commit[mark.hooks :]
    if not connection.closed_in_transaction:
        connection.needs_rollback = False
        connection.savepoint_rollback(mark.savepoint)
        connection.savepoint_commit(mark.savepoint)
    return False
