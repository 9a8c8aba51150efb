"""How sessions hear of one another's commits: NOTIFY and LISTEN, or the change counter of a database file.

An *ear* owns one autocommit connection. It may fail at any time by raising; `wakeup` opens it again. ::

    open()        connect, or raise
    heard(now)    whether somebody committed since the last call; raises when the ear is of no use any more
    due           when, on the monotonic clock, heard() must be called again at the latest
    proven        whether it is known to hear
    silence       seconds after the last heard() in which somebody may commit without being heard
    fileno()      what becomes readable when there is something to hear, or None
"""

from __future__ import annotations

import secrets
from typing import Any, Protocol

from django.db import Error, connections

from outbox import database

SILENT = "silent "  # begins a notification that tells for how many milliseconds its sender will send no other
LONGEST_SILENCE = 1.0  # seconds that are believed
PROBE_EVERY = 60.0  # seconds without any notification until the listener is probed again
PROBE_PATIENCE = 5.0  # seconds that a probe may take to arrive
PROBE_RETRY = 1.0  # seconds until the next try to send one
CHANGES_EVERY = 0.05  # seconds between two reads of the change counter
CHANGES_OFTEN = 0.01  # the same for a second after a change: where there was one there will be others
CONNECT_TIMEOUT = 10  # seconds, where the project sets none


class Deaf(Exception):
    """LISTEN succeeded, but what another session sends does not arrive."""


def may_notify(connection: Any) -> bool:
    """Whether NOTIFY may be sent on this connection now.

    Never inside a transaction, whose commit would then wait for those of all other notifiers; nor is a closed
    connection opened for it.
    """
    if not database.can_notify(connection) or connection.connection is None:
        return False
    return not connection.in_atomic_block and bool(connection.get_autocommit())


def notify(connection: Any, channel: str, payload: str = "") -> None:
    """Send NOTIFY in a transaction of its own, which waits neither for the disk nor, for long, for other notifiers.

    The three commands are one simple query and thereby one transaction, so that no setting outlives it. Django's cursor
    is passed by: prepared, they would be refused, and query counts shall show only the caller's own statements.
    """
    name = connection.ops.quote_name(channel)
    told = f", '{payload}'" if payload else ""
    sql = f"SET LOCAL synchronous_commit TO off; SET LOCAL lock_timeout TO '50ms'; NOTIFY {name}{told}"
    unprepared = {"prepare": False} if database.can_listen(connection) else {}
    with connection.wrap_database_errors, connection.cursor() as cursor:
        cursor.cursor.execute(sql, **unprepared)


class Ear(Protocol):
    mode: str
    due: float
    proven: bool
    silence: float

    def open(self) -> None: ...
    def fileno(self) -> int | None: ...
    def heard(self, now: float) -> bool: ...
    def close(self) -> None: ...


class Listener:
    """LISTEN on a session of its own.

    Behind a transaction pooler LISTEN succeeds and hears nothing, and a dead peer is silent, too. So it is probed, by
    the session that looks at the table: a probe sent by the listener itself would arrive even through such a pooler.
    """

    mode = "notify"

    def __init__(self, *, using: str, listen_on: str, channel: str) -> None:
        self.due = 0.0
        self.proven = False
        self.silence = 0.0
        self._using = using
        self._alias = listen_on
        self._channel = channel
        self._probe = ""
        self._connection: Any = None

    def open(self) -> None:
        self._connection = _own_connection(self._alias, connect_timeout=CONNECT_TIMEOUT)
        with self._connection.cursor() as cursor:
            cursor.execute(f"LISTEN {self._connection.ops.quote_name(self._channel)}")
        self.due = 0.0

    def fileno(self) -> int | None:
        return int(self._connection.connection.pgconn.socket)

    def heard(self, now: float) -> bool:
        pgconn = self._connection.connection.pgconn
        pgconn.consume_input()
        told = False
        self.silence = 0.0
        while (notification := pgconn.notifies()) is not None:
            payload = notification.extra.decode()
            told = told or not payload or payload.startswith(SILENT)
            if payload.startswith(SILENT) and (millis := payload.removeprefix(SILENT)).isdecimal():
                self.silence = max(self.silence, min(int(millis) / 1000, LONGEST_SILENCE))
            if self.proven or payload == self._probe:
                self.proven, self._probe, self.due = True, "", now + PROBE_EVERY
        if now >= self.due:
            if self._probe:
                raise Deaf(
                    f"LISTEN on {self._alias!r} does not receive what {self._using!r} sends. If that is a transaction "
                    "pooler, let OUTBOX['LISTEN_DATABASE'] name an alias with a direct connection."
                )
            self._send_probe(now)
        return told

    def _send_probe(self, now: float) -> None:
        """Trouble of the sending session is no verdict on the listener."""
        sender = connections[self._using]
        self.due = now + PROBE_RETRY
        try:
            sender.ensure_connection()
            if may_notify(sender):
                probe = secrets.token_hex(8)
                notify(sender, self._channel, probe)
                self._probe, self.due = probe, now + PROBE_PATIENCE
        except Error as error:
            if database.is_loss(sender, error):
                database.close_quietly(self._using)

    def close(self) -> None:
        self.proven, self._probe = False, ""
        _close(self._connection)


class ChangeCounter:
    """``PRAGMA data_version``: changes with every commit of another connection, and costs a few microseconds."""

    mode = "data_version"

    def __init__(self, *, using: str) -> None:
        self.due = 0.0
        self.proven = False
        self.silence = 0.0
        self._alias = using
        self._seen = -1
        self._busy_until = 0.0
        self._connection: Any = None

    def open(self) -> None:
        self._connection = _own_connection(self._alias)
        self._connection.ensure_connection()
        self._connection.connection.execute("PRAGMA busy_timeout = 0")  # a writer's lock is no reason to wait here
        self._changed()
        self.proven = True

    def fileno(self) -> int | None:
        return None

    def heard(self, now: float) -> bool:
        if now < self.due:
            return False
        changed = self._changed()
        if changed:
            self._busy_until = now + 1.0
        self.due = now + (CHANGES_OFTEN if now < self._busy_until else CHANGES_EVERY)
        return changed

    def _changed(self) -> bool:
        try:  # fetchall ends the statement: an open one would be a read transaction, which sees no change
            [(version,)] = self._connection.connection.execute("PRAGMA data_version").fetchall()
        except self._connection.Database.Error as error:
            if database.is_race(self._connection, error):
                return False
            raise
        changed = bool(version != self._seen)
        self._seen = version
        return changed

    def close(self) -> None:
        self.proven = False
        _close(self._connection)


def _own_connection(alias: str, **defaults: Any) -> Any:
    """A new autocommit connection that belongs to no thread and no pool."""
    connection = connections[alias].copy()
    connection.inc_thread_sharing()
    connection.settings_dict["AUTOCOMMIT"] = True
    options = connection.settings_dict["OPTIONS"]
    options.pop("pool", None)  # a pooled session would go on listening for its next owner
    for name, value in defaults.items():
        options.setdefault(name, value)
    return connection


def _close(connection: Any) -> None:
    if connection is not None:
        try:
            connection.close()
        except Error:
            pass  # it is gone already: that is what was wanted
