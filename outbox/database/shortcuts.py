"""Single statements for what takes several, where they suffice and the database has them; nothing rests on them.

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
    name, still = connection.ops.quote_name(table), _still(connection)
    where, params = _unlocked(
        connection, name, ("lease_token",), rows, f"{still}state = 'pending' AND {still}lane IS NULL"
    )
    sql = f"UPDATE {name} SET {_delivered(connection)} WHERE {where} RETURNING id"
    return {pk for (pk,) in fetch(connection, sql, params)}


def deliver_patiently(using: str, table: str, pk: int, token: int) -> bool:
    """Write down the delivery of one row in no lane, as soon as nobody has it locked; whether that was done.

    If not, the caller must look at it. For open transactions, on every database.
    """
    connection = connections[using]
    where = f"id = {int(pk)} AND lease_token = {int(token)} AND state = 'pending' AND lane IS NULL"
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {connection.ops.quote_name(table)} SET {_delivered(connection)} WHERE {where}")
        return bool(cursor.rowcount)


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


def deliver_and_lease_next(
    using: str,
    model: type[models.Model],
    rows: Sequence[tuple[int, int]],
    *,
    routes: Iterable[str],
    token: int,
    worker: str,
    micros: int,
    budget: int,
) -> list[tuple[int, Any]]:
    """Write down deliveries in lanes, given as (id, lease token), and lease the next message of each of these lanes.

    Returns pairs: the id of a delivered row, and the next one as it is leased now, charged. Both or nothing: where no
    next one is due, on one of ``routes``, within the ``budget``, free of lapses and locks, the caller must look at the
    lane; above all where there is none, for one that has been put to sleep just now would sleep for ever.

    It is the older version of a row that is ordered, the newer one that is judged: a statement sees what was committed
    at its start, and reads a row that it locks again. Does nothing but on PostgreSQL.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return []
    name, now = connection.ops.quote_name(model._meta.db_table), _now(connection)
    columns = [connection.ops.quote_name(each.column or "") for each in model._meta.concrete_fields]
    own = "p.state = 'pending' AND p.lane IS NOT NULL"
    mine, params = _unlocked(connection, name, ("lease_token",), rows, own)
    free = (
        "p.lane = n.lane AND p.state = 'pending' AND p.lease_token IS NULL "
        f"AND (p.due_at IS NULL OR p.due_at <= {now}) AND p.lapses = 0 AND p.spent < {int(budget)} "
        f"AND (p.expires_at IS NULL OR p.expires_at > {now}) "
        "AND p.route = ANY(%s)"
    )
    sql = (
        # "h.lane >= " for the reason that `lane_heads` gives
        f"WITH own AS MATERIALIZED (SELECT id, lane FROM {name} WHERE {mine}), "
        f"n AS MATERIALIZED (SELECT own.id AS before, own.lane, (SELECT CASE WHEN h.lane = own.lane THEN h.id END "
        f"FROM {name} h WHERE h.lane >= own.lane AND h.id <> own.id ORDER BY h.lane, h.id LIMIT 1) AS id FROM own), "
        f"turns AS MATERIALIZED (SELECT p.id, n.before FROM {name} p JOIN n ON p.id = n.id "
        f"WHERE p.id = ANY(ARRAY(SELECT n.id FROM n)) AND {free} ORDER BY p.id FOR UPDATE OF p SKIP LOCKED), "
        f"done AS (UPDATE {name} SET {_delivered(connection)}, lane = NULL, holder = NULL "
        f"WHERE id = ANY(ARRAY(SELECT before FROM turns)) RETURNING id), "
        # the first of the two must be over, or two rows of a lane would hold it
        f"leased AS (UPDATE {name} SET lease_token = {int(token)}, holder = lane, leased_by = %s, leased_at = {now}, "
        f"due_at = {now} + {int(micros)}, attempt = attempt + 1, spent = spent + 1 "
        f"WHERE id = ANY(ARRAY(SELECT turns.id FROM turns JOIN done ON done.id = turns.before)) "
        f"RETURNING {', '.join(columns)}) "
        f"SELECT turns.before, {', '.join(f'leased.{each}' for each in columns)} FROM leased JOIN turns USING (id)"
    )
    found = fetch(connection, sql, [*params, list(routes), worker])
    return list(zip([row[0] for row in found], _instances(model, connection, [row[1:] for row in found]), strict=True))


def _delivered(connection: Any) -> str:
    return f"state = 'delivered', settled_at = {_now(connection)}, due_at = NULL, lease_token = NULL, lapses = 0"


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
