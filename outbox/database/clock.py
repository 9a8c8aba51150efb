"""The database server's clock: the only one by which due times and leases are computed and compared."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models.expressions import Func

from outbox.fields import InstantField

QS = TypeVar("QS", bound="models.QuerySet[Any]")


class ServerNow(Func):
    """The database server's clock, as microseconds since the epoch; constant during one statement."""

    arity = 0
    output_field = InstantField()

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return now_sql(connection)


def now_sql(connection: Any) -> tuple[str, list[Any]]:
    """SQL and parameters of the server's clock. SQLite has no server: there it is this machine's clock."""
    if connection.vendor == "postgresql":  # statement_timestamp() is stable; clock_timestamp() would become a filter
        return "(extract(epoch from statement_timestamp()) * 1000000)::bigint", []
    if connection.vendor == "mysql":
        return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))", []
    return "%s", [time.time_ns() // 1000]


def server_now(using: str) -> int:
    """Microseconds since the epoch by the database's clock; one round trip except on SQLite."""
    connection = connections[using]
    sql, params = now_sql(connection)
    if params:
        return int(params[0])
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {sql}")
        return int(cursor.fetchone()[0])


def with_clock(rows: QS) -> QS:
    """Read each row together with ``clock``: the server's time, of the statement that read it."""
    return rows.annotate(clock=ServerNow())
