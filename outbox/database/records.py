"""Many rows out of one JSON document, where that beats a parameter for each value (PostgreSQL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox.database.clock import now_sql


def can_read_records(connection: Any) -> bool:
    """Whether a JSON document can be read as a table."""
    return bool(connection.vendor == "postgresql")


def records(connection: Any, columns: Mapping[str, str], constants: Mapping[str, str]) -> str:
    """A SELECT, in their order, of the records of one parameter, a JSON array of objects.

    The n-th column (from 0) is their ``value{n}``: bytes in hexadecimal, instants in microseconds, NULL where it is
    missing. An instant may also be given as ``later{n}``, so many microseconds after the server's clock. Further
    columns are the SQL literals ``constants``.
    """
    now, _ = now_sql(connection)
    values, fields = [], []
    for number, kind in enumerate(columns.values()):
        value, later = f"value{number}", f"later{number}"
        if kind == "instant":
            values.append(f"COALESCE({value}, {now} + {later})")
            fields += [(value, "bigint"), (later, "bigint")]
        else:
            values.append(f"decode({value}, 'hex')" if kind == "bytea" else value)
            fields.append((value, "text" if kind == "bytea" else kind))
    typed = ", ".join(f"{name} {kind}" for name, kind in fields)
    names = ", ".join(name for name, _ in fields)
    return (
        f"SELECT {', '.join([*values, *constants.values()])} "
        f"FROM ROWS FROM (json_to_recordset(%s::json) AS ({typed})) WITH ORDINALITY AS r({names}, place) ORDER BY place"
    )
