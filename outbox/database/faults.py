"""What a database error means: do it again, somebody was first, or the connection is gone."""

from __future__ import annotations

from typing import Any

from django.db import Error, InterfaceError, InternalError, OperationalError, connections


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
    # serialization, deadlock, lock timeout, statement timeout or cancelled by a person, unique (holder)
    "postgresql": {"40001", "40P01", "55P03", "57014", "23505"},
    # lock wait timeout, deadlock, duplicate (holder), record changed, cancelled by a person, statement timeout
    "mysql": {1205, 1213, 1062, 1020, 1317, 1969, 3024},
    "sqlite": {5, 6, 19},  # busy, locked, constraint (holder)
}
LOSSES: dict[str, set[int | str]] = {
    # stop, idle, too many connections
    "postgresql": {"57P01", "57P02", "57P03", "57P05", "25P03", "53300"},
    # the same; 1180 is an error during COMMIT
    "mysql": {1040, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1180, 1927, 2002, 2003, 2006, 2013, 2055},
    "sqlite": {14},  # a file that cannot be opened
}
UNWRITABLE: dict[str, set[int | str]] = {
    # read-only, disk full, out of memory, failing disk
    "postgresql": {"25006", "53100", "53200", "58030"},
    "mysql": {1290, 1836, 1021, 1114},  # read-only twice, disk full twice
    "sqlite": {8, 10, 13},  # read-only, failing disk, disk full
}


def is_race(connection: Any, error: BaseException) -> bool:
    """Whether the statement was refused only because of what others did meanwhile: it may succeed when done again."""
    return code_of(error) in RACES.get(connection.vendor, set())


def is_duplicate(connection: Any, error: BaseException) -> bool:
    """Whether a unique constraint refused the statement."""
    return code_of(error) in {"postgresql": ("23505",), "mysql": (1062,), "sqlite": (19,)}.get(connection.vendor, ())


def is_unwritable(connection: Any, error: BaseException) -> bool:
    """Whether the database, though it may answer, can write nothing now: its disk is full, or it is read-only."""
    return code_of(error) in UNWRITABLE.get(connection.vendor, set())


def is_loss(connection: Any, error: BaseException) -> bool:
    """Whether the database went away, or can write nothing now: close this thread's connection and try again later.

    A fail-over to a read-only server (InternalError) counts, so does any error of a connection that is closed now.
    """
    if isinstance(error, InterfaceError) or is_unwritable(connection, error):
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


def give_back(using: str) -> None:
    """Return this thread's connection to its pool, if it has one: other threads may be waiting for it."""
    connection = connections[using]
    if getattr(connection, "pool", None) is not None and not connection.in_atomic_block:
        close_quietly(using)
