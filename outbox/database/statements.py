"""Row locks, and the statements for which one portable form would be wrong or slow."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.models.lookups import Lookup

from outbox.database.clock import now_sql
from outbox.database.direct import fetch

QS = TypeVar("QS", bound="models.QuerySet[Any]")

NO_FLOOR = (-(2**62), 0)  # (due_at, id) before all others
ROUTES_PER_STATEMENT = 200  # SQLite refuses a union of 500


class Among(Lookup):
    """Whether a row has one of these primary keys, which are written into the SQL.

    Parsing, binding and checking a hundred placeholders takes longer than all the database does with them.
    """

    lookup_name = "among"
    prepare_rhs = False

    def __init__(self, keys: Iterable[int]) -> None:
        super().__init__(models.F("pk"), tuple(int(key) for key in keys))

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        if not self.rhs:
            raise EmptyResultSet
        column, params = self.process_lhs(compiler, connection)
        return f"{column} IN ({', '.join(map(str, self.rhs))})", params


class Still(Lookup):
    """Whether a column still has this value, in rows that are found by their key.

    A plain comparison would invite MariaDB to find the rows by an index on that column instead, and then it locks, or
    waits for, every other row with the value.
    """

    lookup_name = "still"
    prepare_rhs = False

    def __init__(self, name: str, value: str | None) -> None:
        super().__init__(models.F(name), None if value is None else str(value))

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        column, params = self.process_lhs(compiler, connection)
        if self.rhs is None:
            return f"CASE WHEN {column} IS NULL THEN 1 ELSE 0 END = 1", params
        return f"COALESCE({column}, '') = %s", [*params, self.rhs]


def locked(rows: QS, *, skip: bool = True) -> QS:
    """Lock the rows of a queryset, leaving out those that others have locked.

    Where rows cannot be locked (SQLite) our short transaction already keeps every other writer out.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=skip and features.has_select_for_update_skip_locked)


def due_routes(using: str, table: str, routes: Sequence[str]) -> set[str]:
    """Which of these routes, however many, have a due row: one statement, one probe of the index for each.

    A join would let the planner read all due rows (PostgreSQL) or all rows of a route (MariaDB) instead, and without
    its ORDER BY the probe might search the whole table for its first match.
    """
    connection = connections[using]
    now, params = now_sql(connection)
    due = f"FROM {connection.ops.quote_name(table)} m WHERE m.due_at <= {now} AND m.route ="
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            probe = f"CROSS JOIN LATERAL (SELECT 1 {due} w.route ORDER BY m.due_at LIMIT 1) AS c"
            cursor.execute(f"SELECT w.route FROM unnest(%s::text[]) AS w(route) {probe}", [list(routes)])
        elif connection.vendor == "sqlite":
            listed = "(SELECT value AS route FROM json_each(%s)) AS w"
            probe = f"EXISTS (SELECT 1 {due} w.route)"
            cursor.execute(f"SELECT w.route FROM {listed} WHERE {probe}", [json.dumps(routes), *params])
        else:
            cursor.execute(
                " UNION ALL ".join([f"(SELECT m.route {due} %s ORDER BY m.due_at LIMIT 1)"] * len(routes)), list(routes)
            )
        return {route for (route,) in cursor.fetchall()}


def walks_dead_entries(connection: Any) -> bool:
    """Whether a look at an index walks past what was there, and no transaction but an old one can see any more."""
    return bool(connection.vendor == "postgresql")


def due_candidates(
    using: str, table: str, routes: Sequence[str], count: int, floors: Mapping[str, tuple[int, int]] | None = None
) -> list[tuple[str, int, int | None, int, int]]:
    """(route, id, lane, lapses, due_at) of the first ``count`` due rows of each route, oldest first, without locks.

    One statement for at most `ROUTES_PER_STATEMENT` routes; each costs one range of the index (route, due_at, id), so
    other routes, finished and future rows cost nothing. ``floors``: by route, (due_at, id) at which to begin, where
    that saves work (`walks_dead_entries`).
    """
    if not routes:
        return []
    connection = connections[using]
    now, now_params = now_sql(connection)
    name = connection.ops.quote_name(table)
    columns = "m.route, m.id, m.lane, m.lapses, m.due_at"
    first = f"m.due_at <= {now} ORDER BY m.due_at, m.id LIMIT {int(count)}"  # a literal, for the planner to count on
    params: list[Any]
    if connection.vendor == "postgresql":
        listed, from_floor, params = "unnest(%s::text[]) AS w(route)", "", [list(routes)]
        if floors:
            listed = "unnest(%s::text[], %s::bigint[], %s::bigint[]) AS w(route, due_at, id)"
            begin = [floors.get(route, NO_FLOOR) for route in routes]
            params += [[due_at for due_at, _ in begin], [pk for _, pk in begin]]
            from_floor = "(m.due_at, m.id) >= (w.due_at, w.id) AND "
        part = f"SELECT {columns} FROM {name} m WHERE m.route = w.route AND {from_floor}{first}"
        sql = f"SELECT c.* FROM {listed} CROSS JOIN LATERAL ({part}) AS c"
    else:
        # The keys alone first: they are all in the index. With more columns MariaDB enters the index by the route
        # only, and walks past the NULLs of all finished rows.
        part = f"SELECT * FROM (SELECT m.id FROM {name} m WHERE m.route = %s AND {first}) AS k"
        keys = " UNION ALL ".join([part] * len(routes))
        params = [value for route in routes for value in (route, *now_params)]
        sql = f"SELECT {columns} FROM ({keys}) AS k CROSS JOIN {name} m WHERE m.id = k.id"
    return sorted((tuple(row) for row in fetch(connection, sql, params)), key=itemgetter(4, 1))


def lane_heads(
    using: str, table: str, ids: Iterable[int], *, without_self: bool, without: Collection[int] = ()
) -> list[tuple[int, int | None, int | None]]:
    """(lane, id of its first row, id of the row that holds it) for the lanes of these rows, by the indexes alone.

    The first ``without_self``: besides the given one; or besides all rows in ``without``.
    PostgreSQL takes ``lane = x ORDER BY id`` for a walk along the primary key when the lane is frequent: only ``lane >=
    x ORDER BY lane, id`` leaves it no choice. There, MariaDB would walk the whole index.
    """
    connection = connections[using]
    name = connection.ops.quote_name(table)
    equal = ">=" if connection.vendor == "postgresql" else "="
    other = "AND h.id <> p.id" if without_self else ""
    if without:
        other = f"AND h.id NOT IN ({', '.join(map(str, map(int, without)))})"
    keys = ", ".join(str(int(pk)) for pk in ids)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT p.lane, (SELECT CASE WHEN h.lane = p.lane THEN h.id END FROM {name} h "
            f"WHERE h.lane {equal} p.lane {other} ORDER BY h.lane, h.id LIMIT 1), "
            f"(SELECT k.id FROM {name} k WHERE k.holder = p.lane) "
            f"FROM {name} p WHERE p.id IN ({keys}) AND p.lane IS NOT NULL"
        )
        return [tuple(row) for row in cursor.fetchall()]


def lane_followers(using: str, table: str, rows: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """(lane, id) of the ``count`` rows next to each of the given ones in its lane, in order, by the index alone.

    One range of the index (lane, id) for each; why PostgreSQL compares pairs is said of `lane_heads`.
    """
    connection = connections[using]
    name = connection.ops.quote_name(table)
    given = [(int(lane), int(pk)) for lane, pk in rows]
    first = f"ORDER BY m.lane, m.id LIMIT {int(count)}"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            part = f"SELECT m.lane, m.id FROM {name} m WHERE (m.lane, m.id) > (w.lane, w.id) {first}"
            listed = "unnest(%s::bigint[], %s::bigint[]) AS w(lane, id)"
            same = f"SELECT * FROM ({part}) AS k WHERE k.lane = w.lane"
            arrays = [list(part) for part in zip(*given, strict=True)]
            cursor.execute(f"SELECT c.* FROM {listed} CROSS JOIN LATERAL ({same}) AS c", arrays)
        else:
            part = f"SELECT * FROM (SELECT m.lane, m.id FROM {name} m WHERE m.lane = %s AND m.id > %s {first}) AS k"
            cursor.execute(" UNION ALL ".join([part] * len(given)), [value for pair in given for value in pair])
        return sorted(tuple(row) for row in cursor.fetchall())
