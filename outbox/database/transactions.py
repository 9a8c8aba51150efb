"""Short transactions of our own, done again as a whole when a race or a deadlock made them void."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import DatabaseError, Error, connections, transaction

from outbox.database.faults import is_loss, is_race

T = TypeVar("T")

TRIES = 12  # of a short transaction that lost a deadlock or a race


class Stale(Exception):
    """What a transaction relied on was changed meanwhile; do the whole transaction again."""


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
    foreign = connection.vendor != "sqlite" and not _reads_committed(connection)
    if connection.vendor == "sqlite":
        connection.ensure_connection()  # a connection learns its mode only when it is opened
        mode = connection.transaction_mode
        connection.transaction_mode = "IMMEDIATE"
        try:
            atomic.__enter__()
        finally:
            connection.transaction_mode = mode
    else:
        if foreign and connection.vendor == "mysql":  # holds for the next transaction only
            _execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        atomic.__enter__()
    try:
        if foreign and connection.vendor == "postgresql":
            _execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
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
    """Whether a transaction is open on this connection, even one that Django does not know of.

    A session that has ended, as servers end what is idle for too long, has none.
    """
    if connection.connection is None:
        return False
    if connection.in_atomic_block or not connection.get_autocommit():
        return True
    if connection.vendor == "sqlite":
        with connection.wrap_database_errors:  # the driver's connection may be closed
            return bool(connection.connection.in_transaction)
    if connection.vendor == "postgresql":
        info = getattr(connection.connection, "info", None)
        # Ended by the server, not closed by somebody here. psycopg 2 says so by a number.
        ended = getattr(connection.connection, "broken", connection.connection.closed == 2)
        return info is not None and int(info.transaction_status) != 0 and not ended
    try:
        if connection.mysql_is_mariadb:
            # The driver's cursor: a test case forbids Django's on the databases that the test does not name.
            with connection.wrap_database_errors, connection.connection.cursor() as cursor:
                cursor.execute("SELECT @@in_transaction")
                return bool(cursor.fetchone()[0])
    except Error as error:
        if not is_loss(connection, error):
            raise
    return False


def _execute(connection: Any, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)
