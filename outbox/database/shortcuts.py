"""Single statements, where UPDATE can return rows, for what takes a transaction elsewhere; nothing rests on them.

On PostgreSQL they leave alone what somebody has locked; SQLite has one writer, and no row locks to meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import connections, models

from outbox.database.clock import now_sql
from outbox.database.direct import fetch


def increment_unlocked(
    using: str, table: str, column: str, rows: Sequence[tuple[int, int, int]]
) -> set[tuple[int, int]]:
    """Add one to a column of rows given as (id, lease token, present value); returns (id, token) of those it changed.

    Rows that carry another token or value, or that somebody has locked, are left alone: the caller must look at them.
    One round trip, instead of the four of a transaction that locks first. Does nothing on other databases.
    """
    connection = connections[using]
    if not _can_return_rows(connection):
        return set()
    name, column, still = connection.ops.quote_name(table), connection.ops.quote_name(column), _still(connection)
    where, params = _unlocked(connection, name, ("lease_token", column), rows, f"{still}state = 'pending'")
    sql = f"UPDATE {name} SET {column} = {column} + 1 WHERE {where} RETURNING id, lease_token"
    return set(fetch(connection, sql, params))


def deliver_unlocked(using: str, table: str, rows: Sequence[tuple[int, int]]) -> set[int]:
    """Write down the delivery of rows in no lane, given as (id, lease token); returns the ids of those it changed.

    The others are left alone, and so are rows that somebody has locked. Does nothing on other databases.
    """
    connection = connections[using]
    if not _can_return_rows(connection):
        return set()
    name, now, still = connection.ops.quote_name(table), _now(connection), _still(connection)
    where, params = _unlocked(
        connection, name, ("lease_token",), rows, f"{still}state = 'pending' AND {still}lane IS NULL"
    )
    changes = f"state = 'delivered', settled_at = {now}, due_at = NULL, lease_token = NULL, lapses = 0"
    return {pk for (pk,) in fetch(connection, f"UPDATE {name} SET {changes} WHERE {where} RETURNING id", params)}


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
    if not _can_return_rows(connection):
        return []
    name, now, still = connection.ops.quote_name(model._meta.db_table), _now(connection), _still(connection)
    columns = ", ".join(connection.ops.quote_name(each.column or "") for each in model._meta.concrete_fields)
    free = (
        f"{still}state = 'pending' AND {still}due_at <= {now} AND {still}lane IS NULL AND {still}lease_token IS NULL "
        f"AND {still}lapses = 0 AND {still}spent < {int(budget)} "
        f"AND ({still}expires_at IS NULL OR {still}expires_at > {now})"
    )
    where, params = _unlocked(connection, name, (), [(pk,) for pk in ids], free)
    sql = (
        f"UPDATE {name} SET lease_token = {int(token)}, leased_by = %s, leased_at = {now}, "
        f"due_at = {now} + {int(micros)}, attempt = attempt + 1, "
        f"spent = spent + CASE WHEN id IN ({_listed(charged)}) THEN 1 ELSE 0 END "
        f"WHERE {where} RETURNING {columns}"
    )
    return _instances(model, connection, fetch(connection, sql, [worker, *params]))


def _can_return_rows(connection: Any) -> bool:
    return connection.vendor in ("postgresql", "sqlite")


def _now(connection: Any) -> str:
    sql, params = now_sql(connection)
    return sql % tuple(params)


def _still(connection: Any) -> str:
    """What stands before a column by which no row shall be looked up: SQLite's planner would prefer any other index."""
    return "+" if connection.vendor == "sqlite" else ""


def _unlocked(
    connection: Any, name: str, columns: Sequence[str], rows: Sequence[tuple[int, ...]], guard: str
) -> tuple[str, list[Any]]:
    """A condition and its parameters: rows given as (id, value of each column, …) that are not locked by anybody.

    Each id is paired with its own values: two independent lists would let a result through after a second claim.
    """
    if connection.vendor == "sqlite":
        ids: dict[tuple[int, ...], list[int]] = {}
        for pk, *values in rows:
            ids.setdefault(tuple(values), []).append(pk)
        groups = []
        for held, mine in ids.items():
            same = [f"{column} = {int(value)}" for column, value in zip(columns, held, strict=True)]
            groups.append(" AND ".join([f"id IN ({_listed(mine)})", *same]))
        return f"({' OR '.join(groups)}) AND {guard}", []
    names = [f"w{number}" for number in range(len(columns) + 1)]
    same = [f"p.{column} = w.{one}" for column, one in zip(("id", *columns), names, strict=True)]
    # An array, not a join: with a join the planner would read the whole table for large groups.
    found = (
        f"SELECT p.id FROM {name} p JOIN unnest({', '.join(['%s::bigint[]'] * len(names))}) AS w({', '.join(names)}) "
        f"ON {' AND '.join(same)} WHERE p.id = ANY(%s::bigint[]) AND {guard} ORDER BY p.id FOR UPDATE OF p SKIP LOCKED"
    )
    arrays = [f"{{{_listed(part)}}}" for part in zip(*rows, strict=True)]  # adapting lists would take ten times as long
    return f"id = ANY(ARRAY({found}))", [*arrays, arrays[0]]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, map(int, numbers))) or "NULL"


def _instances(model: type[models.Model], connection: Any, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Instances of rows that have every column, in the order of the fields. A raw queryset takes twice as long."""
    known = connection.__dict__.setdefault("_outbox_converters", {})
    if model not in known:
        known[model] = _converters(model, connection)
    names, converters = known[model]
    found = []
    for row in rows:
        values = list(row)
        for place, convert in converters:
            values[place] = convert(values[place], None, connection)
        found.append(model.from_db(connection.alias, names, values))
    return found


def _converters(model: type[models.Model], connection: Any) -> tuple[list[str], list[tuple[int, Any]]]:
    """The names of a model's columns, and what turns their values into Python's, in turn, by place."""
    fields = model._meta.concrete_fields
    backend = connection.ops.get_db_converters
    backends = [(place, backend(each.get_col(model._meta.db_table))) for place, each in enumerate(fields)]
    own = [(place, each.get_db_converters(connection)) for place, each in enumerate(fields)]
    converters = [(place, function) for place, functions in [*backends, *own] for function in functions]
    return [each.attname for each in fields], converters
