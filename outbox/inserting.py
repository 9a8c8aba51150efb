"""Insert message rows whose key is free, and find those that are there already: the one write of staging.

Two forms, chosen by what the database can do. ``ON CONFLICT (event_key, position) DO NOTHING`` waits for an uncommitted
rival, inserts after its rollback, and spoils nothing. Where that is unknown (MySQL, MariaDB) a plain INSERT is tried: a
duplicate undoes that statement alone, so what is there is read and taken out, and the rest is tried again. Both need no
more than the rights to INSERT and SELECT, and neither can mistake a bad value for a duplicate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import IntegrityError, connections

from outbox import database

RowKey = tuple[str, int]  # event key and position: what is unique
Row = tuple[Any, ...]  # values of a table's columns; the first two are the row key
Kind = tuple[str, bool]  # of a database: its vendor, and whether an INSERT returns rows

TRIES = 3  # of rows that were there when inserted and gone when read
MAX_ROWS = 1000  # in one statement
MAX_CHARS = 256 * 1024  # in one statement of several rows; escaped UTF-8 takes at most eight times as many bytes


class Now:
    """A column value: the server's clock."""

    __slots__ = ()


class FromNow(NamedTuple):
    """A column value: so many microseconds after the server's clock."""

    micros: int


class Made(NamedTuple):
    """A row that was inserted."""

    id: int
    staged_at: int


class Found(NamedTuple):
    """A row that was there already."""

    id: int
    staged_at: int
    topic: str
    payload_version: int
    ordering_key: str | None
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Where rows go: a value per column, and the same SQL literal in every row for each constant.

    ``columns`` maps their names to "text", "integer", "bigint", "bytea" or "instant".
    """

    name: str
    columns: Mapping[str, str]
    constants: Mapping[str, str]
    _frames: dict[Kind, tuple[str, str]] = field(default_factory=dict, compare=False)
    _rows: dict[tuple[Kind, tuple[type, ...]], str] = field(default_factory=dict, compare=False)

    def frame(self, connection: Any) -> tuple[str, str]:
        """The constant text before and after what makes the rows."""
        kind = (connection.vendor, _returns(connection))
        if kind not in self._frames:
            quote = connection.ops.quote_name
            names = ", ".join(quote(name) for name in (*self.columns, *self.constants))
            conflict = " ON CONFLICT (event_key, position) DO NOTHING" if _skips(connection) else ""
            returning = " RETURNING event_key, position, id, staged_at" if _returns(connection) else ""
            self._frames[kind] = (f"INSERT INTO {quote(self.name)} ({names}) ", conflict + returning)
        return self._frames[kind]

    def row(self, connection: Any, row: Row) -> str:
        """The text of a row; the types of its values decide about it."""
        kind = ((connection.vendor, _returns(connection)), tuple(map(type, row)))
        if kind not in self._rows:
            now, params = database.now_sql(connection)
            marks = {
                Now: now,
                FromNow: now if params else f"{now} + %s",
                bytes: "%s" if _skips(connection) else "_binary %s",
            }
            values = [marks.get(type(value), "%s") for value in row]
            self._rows[kind] = f"({', '.join([*values, *self.constants.values()])})"
        return self._rows[kind]


def insert_or_find(using: str, table: Table, rows: Sequence[Row]) -> tuple[dict[RowKey, Made], dict[RowKey, Found]]:
    """Insert rows, in their order, unless their key is taken. Return the new and the taken ones.

    Errors of the database reach the caller unchanged; as after any failed write of Django's, its transaction is then to
    be rolled back. A key that is in neither result was taken and freed several times meanwhile.
    """
    connection: Any = connections[using]
    new: dict[RowKey, Made] = {}
    taken: dict[RowKey, Found] = {}
    try:
        for chunk in _chunks(connection, rows):
            _insert_or_find_chunk(connection, table, chunk, new, taken)
    except Exception as error:  # what transaction.mark_for_rollback_on_error() does, without its price
        connection.needs_rollback, connection.rollback_exc = connection.in_atomic_block, error
        raise
    return new, taken


def largest_statement(using: str) -> int | None:
    """Bytes of the longest statement that the server accepts, or None: no limit that matters.

    A longer one would cost the connection, and with it the caller's transaction.
    """
    connection = connections[using]
    if _skips(connection):
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        return int(cursor.fetchone()[0])


def length_in_statement(text: str) -> int:
    """Bytes of a text as a literal, with what is escaped in it."""
    return len(text.encode()) + text.count('"') + text.count("'") + text.count("\\")


def _insert_or_find_chunk(
    connection: Any,
    table: Table,
    rows: Sequence[Row],
    new: dict[RowKey, Made],
    taken: dict[RowKey, Found],
) -> None:
    tries = TRIES
    while True:
        refusal = None
        try:
            new.update(_insert(connection, table, rows))
        except IntegrityError as error:
            if _skips(connection) or not database.is_duplicate(connection, error):
                raise
            refusal = error
        left = [row for row in rows if row[:2] not in new]
        if not left:
            return
        taken.update(_find(connection, table, {row[0] for row in left}))
        rows = [row for row in left if row[:2] not in taken]
        if refusal is not None and len(rows) == len(left):
            raise refusal  # nothing explains it: no duplicate of ours
        tries -= refusal is None
        if not rows or not tries:
            return


def _insert(connection: Any, table: Table, rows: Sequence[Row]) -> dict[RowKey, Made]:
    head, tail = table.frame(connection)
    if len(rows) > 1 and database.can_read_records(connection):
        source, params = database.records(connection, table.columns, table.constants), [_document(rows)]
    else:
        source, params = "VALUES " + ", ".join([table.row(connection, row) for row in rows]), _params(connection, rows)
    sql = head + source + tail
    if _returns(connection):
        made = database.fetch(connection, sql, params)
        return {(key, position): Made(id_, staged_at) for key, position, id_, staged_at in made}
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
    keys = {row[:2] for row in rows}
    there = _find(connection, table, {event_key for event_key, _ in keys}, lock=False)
    return {key: Made(found.id, found.staged_at) for key, found in there.items() if key in keys}


def _params(connection: Any, rows: Sequence[Row]) -> list[Any]:
    """What stands for the marks in the text of the rows, in turn."""
    _, clock = database.now_sql(connection)
    values = [value for row in rows for value in row]
    if not clock:
        return [value.micros if type(value) is FromNow else value for value in values if type(value) is not Now]
    [now] = clock
    return [now + value.micros if type(value) is FromNow else now if type(value) is Now else value for value in values]


def _document(rows: Sequence[Row]) -> str:
    """Rows for `database.records`: one JSON document is read faster than a parameter for each value."""
    return json.dumps([dict(_fields(row)) for row in rows], ensure_ascii=False, separators=(",", ":"))


def _fields(row: Row) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(row):
        if type(value) is Now:
            yield f"later{number}", 0
        elif type(value) is FromNow:
            yield f"later{number}", value.micros
        elif value is not None:
            yield f"value{number}", value.hex() if type(value) is bytes else value


def _find(connection: Any, table: Table, keys: Iterable[str], *, lock: bool | None = None) -> dict[RowKey, Found]:
    """The rows of some event keys, as they are committed now.

    A snapshot from the beginning of the transaction (REPEATABLE READ on MySQL) does not show what refused our INSERT; a
    locking read does.
    """
    shared = not database.reads_committed_now(connection) if lock is None else lock
    wanted = sorted(keys)
    found: dict[RowKey, Found] = {}
    with connection.cursor() as cursor:
        for start in range(0, len(wanted), 500):
            some = wanted[start : start + 500]
            cursor.execute(
                "SELECT event_key, position, id, staged_at, topic, payload_version, ordering_key, digest "
                f"FROM {connection.ops.quote_name(table.name)} WHERE event_key IN ({', '.join(['%s'] * len(some))})"
                + (" LOCK IN SHARE MODE" if shared else ""),
                some,
            )
            for key, position, id_, staged_at, topic, payload_version, ordering_key, digest in cursor.fetchall():
                found[key, position] = Found(id_, staged_at, topic, payload_version, ordering_key, bytes(digest))
    if lock is None and not shared and not _skips(connection) and {key for key, _ in found} != set(wanted):
        return _find(connection, table, wanted, lock=True)  # this one transaction has a level of its own
    return found


def _chunks(connection: Any, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Cut rows into statements that every server takes."""
    if len(rows) == 1:
        yield rows
        return
    parameters = connection.features.max_query_params
    most = min(MAX_ROWS, max(1, parameters // len(rows[0]))) if rows and parameters else MAX_ROWS
    start = chars = 0
    for end, row in enumerate(rows):
        size = sum(len(value) for value in row if isinstance(value, str))
        if end > start and (end - start == most or chars + size > MAX_CHARS):
            yield rows[start:end]
            start, chars = end, 0
        chars += size
    if rows:
        yield rows[start:]


def _skips(connection: Any) -> bool:
    """Whether the database knows ON CONFLICT (…) DO NOTHING."""
    return bool(connection.features.supports_update_conflicts_with_target)


def _returns(connection: Any) -> bool:
    """Whether an INSERT can return the rows it made."""
    return bool(connection.features.can_return_rows_from_bulk_insert)
