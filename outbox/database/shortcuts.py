"""Single statements of PostgreSQL for what takes a transaction elsewhere; correctness never rests on them."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections


def increment_unlocked(using: str, table: str, column: str, rows: Sequence[tuple[int, int, int]]) -> set[int]:
    """Add one to a column of rows given as (id, lease token, present value); returns the ids of those it changed.

    Rows that carry another token or value, or that somebody has locked, are left alone: the caller must look at them.
    One round trip, instead of the four of a transaction that locks first. Does nothing on other databases.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return set()
    name, column = connection.ops.quote_name(table), connection.ops.quote_name(column)
    # An array, not a join: with a join the planner would read the whole table for large groups.
    found = (
        f"SELECT p.id FROM {name} p JOIN unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS w(id, token, value) "
        f"ON p.id = w.id AND p.lease_token = w.token AND p.{column} = w.value "
        f"WHERE p.id = ANY(%s::bigint[]) AND p.state = 'pending' ORDER BY p.id FOR UPDATE OF p SKIP LOCKED"
    )
    ids, tokens, values = (list(part) for part in zip(*rows, strict=True))
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {name} SET {column} = {column} + 1 WHERE id = ANY(ARRAY({found})) RETURNING id",
            [ids, tokens, values, ids],
        )
        return {pk for (pk,) in cursor.fetchall()}
