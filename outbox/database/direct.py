"""Statements on the driver's own cursor, where nobody could tell it from Django's; on Django's everywhere else.

Django's cursor costs a fifth of a single INSERT on PostgreSQL. It is passed by only on a stock connection of psycopg 3
that nobody observes: no query log, no execute wrapper, no replaced method, no class of somebody else's. The statement
then runs in the same session and transaction, under the same checks, and its errors become the same exceptions.

It is prepared only where the project has set ``prepare_threshold``. Django sets None, and then psycopg ignores even
``execute(prepare=True)``: behind a transaction pooler the next transaction may meet a session without the prepared
statement, and the caller's transaction would fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import django
from django.apps import apps
from django.db.backends.utils import CursorWrapper

_STOCK = ("django.db.backends.postgresql.base", "django.contrib.gis.db.backends.postgis.base")
_DJANGO = Path(django.__file__).parent
_METHODS = ("cursor", "_cursor", "create_cursor", "_prepare_cursor", "make_cursor")  # of a connection

_of_connection = attrgetter(*_METHODS)
_of_cursor = attrgetter("execute", "_execute_with_wrappers", "_execute")
_known: dict[type, tuple[Any, Any]] = {}


def fetch(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """Execute a statement that returns rows, and return them as tuples.

    Errors of the database are Django's; as with Django's own cursor, it is the caller who marks the transaction.
    """
    cursor = _take_cursor(connection) if is_unobserved(connection) else None
    if cursor is None:
        with connection.cursor() as observed:
            observed.execute(sql, params or None)
            return list(observed.fetchall())
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        cursor.execute(sql, params or None)
        rows: list[Any] = cursor.fetchall()
    connection._outbox_cursor = cursor  # for the next time; after an error there is a new one
    return rows


def is_unobserved(connection: Any) -> bool:
    """Whether Django's cursor would do nothing on this connection but run the statement."""
    return (
        connection.vendor == "postgresql"
        and not connection.execute_wrappers
        and not connection.queries_logged
        and apps.ready
        and connection.connection is not None
        and connection.__dict__.keys().isdisjoint(_METHODS)
        and _is_stock(type(connection))
    )


def _is_stock(kind: type) -> bool:
    """Whether all that Django's cursor consists of is Django's own code: tracers replace methods of its classes."""
    known = _known.get(kind)
    if known is not None and known[0] == _of_connection(kind) and known[1] == _of_cursor(CursorWrapper):
        return True
    if kind.__module__ not in _STOCK:
        return False
    methods = _of_connection(kind), _of_cursor(CursorWrapper)
    if not all(map(_is_djangos, (*methods[0], *methods[1]))):
        return False
    _known[kind] = methods
    return True


def _is_djangos(method: object) -> bool:
    return type(method) is FunctionType and _DJANGO in Path(method.__code__.co_filename).parents


def _take_cursor(connection: Any) -> Any:
    """A cursor of the driver, or None where the driver's connection is not a stock one of psycopg 3.

    It belongs to the caller alone until it is given back: connections can be shared between threads.
    """
    connection.ensure_connection()  # with its checks, of the event loop for one
    connection.validate_thread_sharing()
    driver, raw = connection.Database, connection.connection
    cursor = connection.__dict__.pop("_outbox_cursor", None)
    if type(raw) is not getattr(driver, "Connection", None) or not raw.__dict__.keys().isdisjoint(_METHODS):
        return None  # psycopg 2, or a tracer's
    if raw.cursor_factory.__module__ != _STOCK[0]:
        return None
    if cursor is not None and cursor.connection is raw:
        return cursor
    binds_here = issubclass(raw.cursor_factory, driver.ClientCursor) and raw.prepare_threshold is None
    kind = driver.ClientCursor if binds_here else driver.Cursor
    return kind(raw, row_factory=driver.rows.tuple_row)
