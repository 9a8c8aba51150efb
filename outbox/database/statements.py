"""Row locks, and the statements for which one portable form would be wrong or slow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.models.expressions import Func

from outbox.database.clock import now_sql

QS = TypeVar("QS", bound="models.QuerySet[Any]")

ROUTES_PER_STATEMENT = 200  # SQLite refuses a union of 500


class Among(Func):
    """Whether a row has one of these primary keys, which are written into the SQL.

    Parsing, binding and checking a hundred placeholders takes longer than all the database does with them.
    """

    arity = 1
    template = "%(expressions)s IN (%(keys)s)"
    output_field = models.BooleanField()

    def __init__(self, keys: Iterable[int]) -> None:
        super().__init__(models.F("pk"), keys=", ".join(str(int(key)) for key in keys))

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:  # type: ignore[override]
        if not self.extra["keys"]:
            raise EmptyResultSet
        return super().as_sql(compiler, connection, **extra)


def locked(rows: QS, *, skip: bool = True) -> QS:
    """Lock the rows of a queryset, leaving out those that others have locked.

    Where rows cannot be locked (SQLite) our short transaction already keeps every other writer out.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=skip and features.has_select_for_update_skip_locked)


def due_routes(using: str, table: str, routes: Sequence[str]) -> set[str]:
    """Which of these routes, however many, have a due row: one statement, one probe of the index for each."""
    connection = connections[using]
    now, params = now_sql(connection)
    probe = f"EXISTS (SELECT 1 FROM {connection.ops.quote_name(table)} m WHERE m.route = w.route AND m.due_at <= {now})"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SELECT w.route FROM unnest(%s::text[]) AS w(route) WHERE {probe}", [list(routes)])
        elif connection.vendor == "sqlite":
            listed = "(SELECT value AS route FROM json_each(%s)) AS w"
            cursor.execute(f"SELECT w.route FROM {listed} WHERE {probe}", [json.dumps(routes), *params])
        else:
            column = "route VARCHAR(120) CHARACTER SET utf8mb4 PATH '$'"  # compared in the collation of m.route
            listed = f"JSON_TABLE(%s, '$[*]' COLUMNS ({column})) AS w"
            cursor.execute(f"SELECT w.route FROM {listed} WHERE {probe}", [json.dumps(routes), *params])
        return {route for (route,) in cursor.fetchall()}


def due_candidates(
    using: str, table: str, routes: Sequence[str], count: int
) -> list[tuple[str, int, int | None, int, int]]:
    """(route, id, lane, lapses, due_at) of the first ``count`` due rows of each route, without locks.

    One statement for at most `ROUTES_PER_STATEMENT` routes; each costs one range of the index (route, due_at, id), so
    other routes, finished and future rows cost nothing.
    """
    if not routes:
        return []
    connection = connections[using]
    now, now_params = now_sql(connection)
    name = connection.ops.quote_name(table)
    columns = "m.route, m.id, m.lane, m.lapses, m.due_at"
    first = f"m.due_at <= {now} ORDER BY m.due_at, m.id LIMIT {int(count)}"  # a literal, for the planner to count on
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"SELECT c.* FROM unnest(%s::text[]) AS w(route) CROSS JOIN LATERAL "
                f"(SELECT {columns} FROM {name} m WHERE m.route = w.route AND {first}) AS c",
                [list(routes)],
            )
        else:
            part = f"SELECT * FROM (SELECT {columns} FROM {name} m WHERE m.route = %s AND {first}) AS c"
            params = [value for route in routes for value in (route, *now_params)]
            cursor.execute(" UNION ALL ".join([part] * len(routes)), params)
        return [tuple(row) for row in cursor.fetchall()]
