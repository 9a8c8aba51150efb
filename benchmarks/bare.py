"""The least that can move messages: loops of the bare driver that know no lease, no budget, no order and no handler."""

from __future__ import annotations

import time
from typing import Any


def in_batches(connection: Any, topic: str, batch: int = 100) -> int:
    """Claim and complete everything that is due, a batch by two statements; returns the count."""
    return _drain(connection, topic, batch, one_by_one=False)


def one_by_one(connection: Any, topic: str, batch: int = 100) -> int:
    """The same, but every message is completed by a transaction of its own, as a handler's own writes need it."""
    return _drain(connection, topic, batch, one_by_one=True)


def _drain(connection: Any, topic: str, batch: int, *, one_by_one: bool) -> int:
    now = {
        "postgresql": "(extract(epoch from statement_timestamp()) * 1000000)::bigint",
        "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
        "sqlite": str(time.time_ns() // 1000),
    }[connection.vendor]
    due = f"SELECT id FROM outbox_message WHERE route = '{topic}' AND due_at <= {now} ORDER BY due_at, id LIMIT {batch}"
    counters = "attempt = attempt + 1, spent = spent + 1"
    lease = f"UPDATE outbox_message SET due_at = {now} + 60000000, lease_token = 7, {counters}"
    done = "UPDATE outbox_message SET state = 'delivered', due_at = NULL, lease_token = NULL, settled_at = 1"
    connection.ensure_connection()
    cursor = connection.connection.cursor()
    count = 0
    while True:
        if connection.vendor == "postgresql":
            cursor.execute(f"{lease} WHERE id = ANY(ARRAY({due} FOR UPDATE SKIP LOCKED)) RETURNING id, payload")
            ids = [row[0] for row in cursor.fetchall()]
        else:
            cursor.execute("BEGIN")
            cursor.execute(
                due.replace("SELECT id", "SELECT id, payload")
                + (" FOR UPDATE SKIP LOCKED" * (connection.vendor == "mysql"))
            )
            ids = [row[0] for row in cursor.fetchall()]
            if ids:
                cursor.execute(f"{lease} WHERE id IN ({', '.join(map(str, ids))})")
            cursor.execute("COMMIT")
        if not ids:
            cursor.close()
            return count
        for some in [[one] for one in ids] if one_by_one else [ids]:
            if one_by_one:
                cursor.execute("BEGIN")
            cursor.execute(f"{done} WHERE id IN ({', '.join(map(str, some))}) AND lease_token = 7")
            if one_by_one:
                cursor.execute("COMMIT")
        count += len(ids)
