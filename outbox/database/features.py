"""What a database can do, and whether it is fit for an outbox at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def can_notify(connection: Any) -> bool:
    """Whether NOTIFY reaches every session that listens."""
    return bool(connection.vendor == "postgresql")


def can_listen(connection: Any) -> bool:
    """Whether notifications can be waited for together with other things; psycopg 2 hides what that needs."""
    return can_notify(connection) and connection.Database.__name__ == "psycopg"


def has_data_version(connection: Any) -> bool:
    """Whether ``PRAGMA data_version`` tells of others' commits; a database in memory has no second connection."""
    return bool(connection.vendor == "sqlite" and not connection.is_in_memory_db())


def is_cheap_to_open(connection: Any) -> bool:
    """Whether a new connection costs next to nothing: no server is involved.

    Where it is so, a read that was never finished also holds the whole database: it keeps this connection from writing.
    """
    return bool(connection.vendor == "sqlite" and not connection.is_in_memory_db())


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
