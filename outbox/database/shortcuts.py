"""Single statements of PostgreSQL for what takes a transaction elsewhere; correctness never rests on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections, models

from outbox.database.clock import now_sql


def increment_unlocked(
    using: str, table: str, column: str, rows: Sequence[tuple[int, int, int]]
) -> set[tuple[int, int]]:
    """Add one to a column of rows given as (id, lease token, present value); returns (id, token) of those it changed.

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
    ids, tokens, values = zip(*rows, strict=True)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {name} SET {column} = {column} + 1 WHERE id = ANY(ARRAY({found})) RETURNING id, lease_token",
            [_array(ids), _array(tokens), _array(values), _array(ids)],
        )
        return set(cursor.fetchall())


def deliver_unlocked(using: str, table: str, rows: Sequence[tuple[int, int]]) -> set[int]:
    """Write down the delivery of rows in no lane, given as (id, lease token); returns the ids of those it changed.

    The others are left alone, and so are rows that somebody has locked. Does nothing on other databases.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return set()
    name = connection.ops.quote_name(table)
    now, _ = now_sql(connection)
    found = (
        f"SELECT p.id FROM {name} p JOIN unnest(%s::bigint[], %s::bigint[]) AS w(id, token) "
        f"ON p.id = w.id AND p.lease_token = w.token "
        f"WHERE p.id = ANY(%s::bigint[]) AND p.state = 'pending' AND p.lane IS NULL "
        f"ORDER BY p.id FOR UPDATE OF p SKIP LOCKED"
    )
    ids, tokens = zip(*rows, strict=True)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {name} SET state = 'delivered', settled_at = {now}, due_at = NULL, lease_token = NULL, lapses = 0 "
            f"WHERE id = ANY(ARRAY({found})) RETURNING id",
            [_array(ids), _array(tokens), _array(ids)],
        )
        return {pk for (pk,) in cursor.fetchall()}


def lease_free(
    using: str,
    model: type[models.Model],
    ids: Sequence[int],
    *,
    charged: Sequence[int],
    token: int,
    worker: str,
    micros: int,
    budget: int,
) -> list[Any]:
    """Lease those rows that are due, unlocked, in no lane, and were never leased in vain; returns them as leased.

    The others are left alone, and so is a row that has spent ``budget`` attempts or has expired: the caller must look
    at them. ``charged``: ids whose attempt is taken from the budget now. Finds nothing on other databases.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return []
    name = connection.ops.quote_name(model._meta.db_table)
    now, _ = now_sql(connection)
    columns = ", ".join(connection.ops.quote_name(each.column or "") for each in model._meta.concrete_fields)
    free = (
        f"SELECT p.id FROM {name} p WHERE p.id = ANY(%s::bigint[]) AND p.state = 'pending' AND p.due_at <= {now} "
        f"AND p.lane IS NULL AND p.lease_token IS NULL AND p.lapses = 0 AND p.spent < %s "
        f"AND (p.expires_at IS NULL OR p.expires_at > {now}) ORDER BY p.id FOR UPDATE SKIP LOCKED"
    )
    sql = (
        f"UPDATE {name} SET lease_token = %s, leased_by = %s, leased_at = {now}, due_at = {now} + %s, "
        f"attempt = attempt + 1, spent = spent + CASE WHEN id = ANY(%s::bigint[]) THEN 1 ELSE 0 END "
        f"WHERE id = ANY(ARRAY({free})) RETURNING {columns}"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [token, worker, micros, _array(charged), _array(ids), budget])
        return _instances(model, connection, cursor.fetchall())


def _array(numbers: Sequence[int]) -> str:
    """An array as PostgreSQL writes it. The driver takes ten times as long to adapt a list of integers."""
    return f"{{{','.join(map(str, numbers))}}}"


def _instances(model: type[models.Model], connection: Any, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Instances of rows that have every column, in the order of the fields. A raw queryset takes twice as long."""
    fields = model._meta.concrete_fields
    names = [each.attname for each in fields]
    converters = [(place, each.get_db_converters(connection)) for place, each in enumerate(fields)]
    converters = [(place, functions) for place, functions in converters if functions]
    found = []
    for row in rows:
        values = list(row)
        for place, functions in converters:
            for convert in functions:
                values[place] = convert(values[place], None, connection)
        found.append(model.from_db(connection.alias, names, values))
    return found
