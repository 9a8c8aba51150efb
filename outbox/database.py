"""Everything that differs between databases; no other module asks which one it talks to.

Clock, short transactions, which errors mean "do it again" or "the connection is gone", row locks, and the statements
for which one portable form would be wrong or slow.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import (
    DatabaseError,
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    models,
    transaction,
)
from django.db.models.expressions import Func

from outbox.fields import InstantField

T = TypeVar("T")
QS = TypeVar("QS", bound="models.QuerySet[Any]")

TRIES = 12  # of a short transaction that lost a deadlock or a race
ROUTES_PER_STATEMENT = 200  # SQLite refuses a union of 500


class Stale(Exception):
    """What a transaction relied on was changed meanwhile; do the whole transaction again."""


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


# --- transactions -----------------------------------------------------------------------------------------------------


@contextmanager
def short_transaction(using: str) -> Iterator[None]:
    """A READ COMMITTED transaction; on SQLite one that takes the write lock at once.

    A deferred SQLite transaction that reads before it writes cannot wait for the lock: it fails at once. Inside an open
    transaction (the testing kit) this is a savepoint, and nothing is set.
    """
    connection: Any = connections[using]
    if connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
        return
    atomic = transaction.atomic(using=using)
    if connection.vendor == "sqlite":
        connection.ensure_connection()  # a connection learns its mode only when it is opened
        mode = connection.transaction_mode
        connection.transaction_mode = "IMMEDIATE"
        try:
            atomic.__enter__()
        finally:
            connection.transaction_mode = mode
    else:
        foreign = not _reads_committed(connection)
        if foreign and connection.vendor == "mysql":  # holds for the next transaction only
            _execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        atomic.__enter__()
        if foreign and connection.vendor == "postgresql":
            _execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    try:
        yield
    except BaseException as error:
        atomic.__exit__(type(error), error, error.__traceback__)
        raise
    else:
        atomic.__exit__(None, None, None)


@contextmanager
def impatient_transaction(using: str, *, seconds: int = 1) -> Iterator[None]:
    """A short transaction that waits at most so long for each lock; then it fails, and `is_race` says why.

    On SQLite the wait is for the whole database, before the transaction begins, and the project's ``timeout`` rules.
    """
    connection = connections[using]
    usual = 0
    if connection.vendor == "mysql":  # there is no SET LOCAL: set for the session, and set back
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@innodb_lock_wait_timeout")
            usual = int(cursor.fetchone()[0])
        _execute(connection, f"SET SESSION innodb_lock_wait_timeout = {min(usual, seconds)}")
    try:
        with short_transaction(using):
            if connection.vendor == "postgresql":
                _execute(connection, f"SET LOCAL lock_timeout TO '{seconds}s'")
            yield
    finally:
        if usual:
            with suppress(Error):  # the session is gone, and its setting with it
                _execute(connection, f"SET SESSION innodb_lock_wait_timeout = {usual}")


def again(using: str, work: Callable[[], T]) -> T:
    """Run ``work`` in a short transaction; do all of it again when a deadlock or a race made it void.

    Inside an open transaction only `Stale` is tried again: the database has already given up the rest.
    """
    connection = connections[using]
    for left in range(TRIES, 0, -1):
        nested = connection.in_atomic_block
        try:
            with short_transaction(using):
                return work()
        except Stale:
            if left == 1:
                raise
        except DatabaseError as error:
            if left == 1 or nested or not is_race(connection, error):
                raise
        if not nested:
            time.sleep(random.uniform(0, 0.004 * (TRIES - left + 1)))  # noqa: S311 - jitter, not secrecy
    raise AssertionError("unreachable")


def _reads_committed(connection: Any) -> bool:
    """Whether transactions of this session are READ COMMITTED by default; asked once per session."""
    connection.ensure_connection()
    known = getattr(connection, "_outbox_isolation", None)
    if known is None or known[0] is not connection.connection:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SHOW default_transaction_isolation")
            else:
                name = "tx_isolation" if connection.mysql_is_mariadb else "transaction_isolation"
                cursor.execute(f"SELECT @@{name}")
            level = str(cursor.fetchone()[0]).replace("-", " ").lower()
        if connection.vendor == "postgresql" and "isolation_level" in connection.settings_dict["OPTIONS"]:
            level = connection.isolation_level.name.replace("_", " ").lower()
        known = connection._outbox_isolation = (connection.connection, level == "read committed")
    return bool(known[1])


def reads_committed_now(connection: Any) -> bool:
    """Whether a plain read sees what others committed since this transaction began (asked of the open transaction)."""
    if connection.vendor != "mysql":
        return True
    return _reads_committed(connection)


def has_open_transaction(connection: Any) -> bool:
    """Whether a transaction is open on this connection, even one that Django does not know of."""
    if connection.connection is None:
        return False
    if connection.in_atomic_block or not connection.get_autocommit():
        return True
    if connection.vendor == "sqlite":
        return bool(connection.connection.in_transaction)
    if connection.vendor == "postgresql":
        info = getattr(connection.connection, "info", None)
        return info is not None and int(info.transaction_status) != 0
    if connection.mysql_is_mariadb:
        # The driver's cursor: a test case forbids Django's on the databases that the test does not name.
        with connection.wrap_database_errors, connection.connection.cursor() as cursor:
            cursor.execute("SELECT @@in_transaction")
            return bool(cursor.fetchone()[0])
    return False


def _execute(connection: Any, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


# --- errors -----------------------------------------------------------------------------------------------------------


def code_of(error: BaseException) -> int | str | None:
    """SQLSTATE on PostgreSQL, the error number on MySQL and SQLite."""
    cause = error.__cause__ or error
    for name in ("sqlstate", "pgcode", "sqlite_errorcode"):
        code = getattr(cause, name, None)
        if code is not None:
            return code & 0xFF if isinstance(code, int) else str(code)
    first = cause.args[0] if cause.args else None
    return first if isinstance(first, int) else None


RACES: dict[str, set[int | str]] = {
    "postgresql": {"40001", "40P01", "55P03", "23505"},  # serialization, deadlock, lock timeout, unique (holder)
    "mysql": {1205, 1213, 1062, 1020},  # lock wait timeout, deadlock, duplicate (holder), record changed
    "sqlite": {5, 6, 19},  # busy, locked, constraint (holder)
}
LOSSES: dict[str, set[int | str]] = {
    "postgresql": {"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300"},  # stop, idle, read-only, full
    "mysql": {1040, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1290, 1836, 1927, 2002, 2003, 2006, 2013, 2055},
    "sqlite": set(),
}


def is_race(connection: Any, error: BaseException) -> bool:
    """Whether the statement was refused only because of somebody else's transaction."""
    return code_of(error) in RACES.get(connection.vendor, set())


def is_duplicate(connection: Any, error: BaseException) -> bool:
    """Whether a unique constraint refused the statement."""
    return code_of(error) in {"postgresql": ("23505",), "mysql": (1062,), "sqlite": (19,)}.get(connection.vendor, ())


def is_loss(connection: Any, error: BaseException) -> bool:
    """Whether the database went away: close the connection in this thread and try again later.

    A fail-over to a read-only server (InternalError) counts, so does any error of a connection that is closed now.
    """
    if isinstance(error, InterfaceError):
        return True
    code = code_of(error)
    if code in LOSSES.get(connection.vendor, set()) or (isinstance(code, str) and code.startswith("08")):
        return True
    if isinstance(error, (OperationalError, InternalError)):
        return code is None or connection.connection is None or not connection.is_usable()
    return isinstance(error, Error) and getattr(connection.connection, "closed", False) is True


def close_quietly(using: str) -> None:
    """Drop this thread's connection, whatever state it is in; the next use opens a new one."""
    connection = connections[using]
    try:
        connection.close()
    except Error:
        pass  # it is gone already: that is what was wanted
    if connection.connection is not None and not connection.in_atomic_block:
        connection.connection = None


# --- locks ------------------------------------------------------------------------------------------------------------


def locked(rows: QS, *, skip: bool = True) -> QS:
    """Lock the rows of a queryset, leaving out those that others have locked.

    Where rows cannot be locked (SQLite) our short transaction already keeps every other writer out.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=skip and features.has_select_for_update_skip_locked)


def with_clock(rows: QS) -> QS:
    """Read each row together with ``clock``: the server's time, of the statement that read it."""
    return rows.annotate(clock=ServerNow())


# --- the look at the due index ----------------------------------------------------------------------------------------


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


# --- hearing of others' commits ---------------------------------------------------------------------------------------


def can_notify(connection: Any) -> bool:
    """Whether NOTIFY reaches every session that listens."""
    return bool(connection.vendor == "postgresql")


def can_listen(connection: Any) -> bool:
    """Whether notifications can be waited for together with other things; psycopg 2 hides what that needs."""
    return can_notify(connection) and connection.Database.__name__ == "psycopg"


def has_data_version(connection: Any) -> bool:
    """Whether ``PRAGMA data_version`` tells of others' commits; a database in memory has no second connection."""
    return bool(connection.vendor == "sqlite" and not connection.is_in_memory_db())


# --- what checks ask --------------------------------------------------------------------------------------------------

OLDEST = {"postgresql": (14,), "mariadb": (10, 6), "mysql": (8, 0, 11), "sqlite": (3, 35)}


def unsupported(connection: Any) -> str:
    """Why this database cannot hold the outbox, or "": its kind or its version is not supported."""
    kind = "mariadb" if connection.vendor == "mysql" and connection.mysql_is_mariadb else connection.vendor
    oldest = OLDEST.get(kind)
    if oldest is None:
        return f"{connection.display_name} is not supported"
    version = tuple(connection.get_database_version())
    if version >= oldest:
        return ""
    given, wanted = (".".join(map(str, numbers)) for numbers in (version, oldest))
    return f"{connection.display_name} {given} is not supported: it takes {wanted} or newer"


def tables_without_transactions(connection: Any, tables: Sequence[str]) -> list[str]:
    """Those of the tables that do not roll back (MyISAM and its like)."""
    if connection.vendor != "mysql":
        return []
    marks = ", ".join(["%s"] * len(tables))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT t.table_name FROM information_schema.tables t JOIN information_schema.engines e "
            f"ON e.engine = t.engine WHERE t.table_schema = DATABASE() AND t.table_name IN ({marks}) "
            "AND (e.transactions IS NULL OR e.transactions <> 'YES')",
            list(tables),
        )
        return sorted(name for (name,) in cursor.fetchall())


def fails_reading_before_writing(connection: Any) -> bool:
    """Whether a transaction that reads first and writes later fails at once when somebody else writes meanwhile."""
    mode = connection.settings_dict.get("OPTIONS", {}).get("transaction_mode")
    return connection.vendor == "sqlite" and (mode or "DEFERRED").upper() == "DEFERRED"
