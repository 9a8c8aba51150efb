"""How fast one dispatcher process drains no-op messages, compared with a bare loop of the driver on the same table.

    python benchmarks/dispatch.py [--database URL] [--quick] [--json FILE]

The bare loop claims a hundred rows by one UPDATE (or SELECT and UPDATE) and completes them by another. A second
database has a million delivered and scheduled rows in the table besides. All take turns, so that the ratios hold
although the machine's speed varies. Exits with 1, and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ground import Sheet, arguments, empty, fill, scratch_databases

RAW_SHARE = {"postgresql": 1 / 6, "mysql": 0.1, "sqlite": 0.02}  # of the bare loop
HISTORY_SHARE = 0.7  # of the speed in an empty table
TOPIC = "benchmark.noop"
BATCH = 100
CONCURRENCY = 100


def raw_loop(connection: Any, batch: int = BATCH) -> int:
    """Claim and complete everything that is due with the driver's own cursor; returns the count."""
    now = {
        "postgresql": "(extract(epoch from statement_timestamp()) * 1000000)::bigint",
        "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
        "sqlite": str(time.time_ns() // 1000),
    }[connection.vendor]
    due = f"SELECT id FROM outbox_message WHERE route = '{TOPIC}' AND due_at <= {now} ORDER BY due_at, id LIMIT {batch}"
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
        cursor.execute(f"{done} WHERE id IN ({', '.join(map(str, ids))}) AND lease_token = 7")
        count += len(ids)


def drain(using: str) -> int:
    """Drain by one dispatcher, as ``manage.py outbox_dispatch --drain`` does; returns the count."""
    from outbox.dispatcher import Dispatcher
    from outbox.handlers import registry
    from outbox.plans import Plan

    plan = Plan(
        using=using,
        handlers=registry.handlers(),
        concurrency=CONCURRENCY,
        lease=60,
        poll=1,
        grace=30,
        batch=BATCH,
        mode="drain",
    )
    dispatcher = Dispatcher(plan)
    dispatcher.run()
    return dispatcher.counts["delivered"]


def rate(run: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    count = run()
    seconds = time.perf_counter() - start
    if count != expected:
        raise SystemExit(f"{count} messages instead of {expected}: no measurement.")
    return expected / seconds


def main() -> int:
    given = arguments(__doc__ or "")
    rows, rounds, history = (5_000, 3, 100_000) if given.quick else (20_000, 5, 1_000_000)
    with scratch_databases(given.database, "full") as [fresh, full]:
        from outbox import handler

        handler(TOPIC)(lambda message: None)
        sheet = Sheet()
        print(f"{fresh.vendor}: {rows:,} messages, batch {BATCH}, {CONCURRENCY} slots, {rounds} rounds")
        fill(full, history // 2, prefix="old", topic=TOPIC, state="delivered", due="never")
        fill(full, history // 2, prefix="late", topic=TOPIC, due="tomorrow")
        bare, ours, among = [], [], []
        for number in range(rounds):
            empty(fresh)
            fill(fresh, rows, prefix=f"raw{number}:", topic=TOPIC)
            bare.append(rate(lambda: raw_loop(fresh), rows))
            empty(fresh)
            fill(fresh, rows, prefix=f"own{number}:", topic=TOPIC)
            ours.append(rate(lambda: drain("default"), rows))
            fill(full, rows, prefix=f"own{number}:", topic=TOPIC)
            among.append(rate(lambda: drain("full"), rows))
        sheet.note("bare loop, messages a second", bare)
        sheet.note("dispatcher, messages a second", ours)
        sheet.note(f"dispatcher among {history:,} other rows", among)
        sheet.note("dispatcher / bare loop", [mine / raw for mine, raw in zip(ours, bare, strict=True)])
        sheet.demand("dispatcher / bare loop", at_least=RAW_SHARE[fresh.vendor])
        sheet.note("among other rows / without", [late / mine for late, mine in zip(among, ours, strict=True)])
        sheet.demand("among other rows / without", at_least=HISTORY_SHARE)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
