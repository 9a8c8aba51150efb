"""What a message costs in statements, rows and bytes: numbers that do not depend on the machine's speed.

    python benchmarks/cost.py [--database URL] [--quick] [--json FILE] [--update]

Counts the statements per message of staging, claiming and settling, what a claim reads at a small and at a large
backlog (buffers on PostgreSQL, handler reads on MariaDB, steps of the virtual machine on SQLite), and on PostgreSQL the
rows and the bytes of WAL that are written. Compares with ``cost.json`` beside this script, and exits with 1, and a last
line that names what has grown, when a number exceeds its baseline by more than the tolerance; ``--update`` writes a new
baseline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ground import Sheet, empty, fill, parser, scratch_databases

BASELINE = Path(__file__).with_name("cost.json")
TOLERANCES = {"statements": 1.02, "reads": 1.5, "rows": 1.05, "WAL bytes": 1.4}
TOPIC = "benchmark.noop"
ORDERED = "benchmark.ordered"
BATCH = 100
LANES = 100


class Meter:
    """Counts what the connection of this thread does."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.statements = 0
        self.reads = 0

    @contextmanager
    def running(self, *, reads: bool = False) -> Iterator[Meter]:
        read = {"postgresql": self._buffers, "mysql": self._handler_reads, "sqlite": self._steps}
        with self.connection.execute_wrapper(self._count):
            if reads:
                with read[self.connection.vendor]():
                    yield self
            else:
                yield self

    def _count(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.statements += 1
        return execute(sql, params, many, context)

    @contextmanager
    def _steps(self) -> Iterator[None]:
        def tick() -> None:
            self.reads += 1

        self.connection.ensure_connection()
        self.connection.connection.set_progress_handler(tick, 10)
        try:
            yield
        finally:
            self.connection.connection.set_progress_handler(None, 0)

    @contextmanager
    def _handler_reads(self) -> Iterator[None]:
        def count() -> int:
            with self.connection.connection.cursor() as cursor:
                cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
                return sum(int(value) for _, value in cursor.fetchall())

        before = count()
        yield
        self.reads += count() - before

    @contextmanager
    def _buffers(self) -> Iterator[None]:
        with self.connection.execute_wrapper(self._explain):
            yield

    def _explain(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Run each statement by EXPLAIN first, and undo what it has changed."""
        if sql.split()[0] in ("SELECT", "UPDATE") and "outbox_message" in sql:
            inside = self.connection.in_atomic_block
            with self.connection.connection.cursor() as cursor:
                cursor.execute("SAVEPOINT explained" if inside else "BEGIN")
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params or None)
                (plan,) = cursor.fetchone()
                cursor.execute("ROLLBACK TO SAVEPOINT explained" if inside else "ROLLBACK")
            [top] = json.loads(plan) if isinstance(plan, str) else plan
            self.reads += top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"]
        return execute(sql, params, many, context)


def deliver_all(topic: str) -> int:
    """Claim, charge and settle everything that is due, in this thread; returns the count."""
    from outbox.handlers import registry
    from outbox.leases import Claimer, charge, settle
    from outbox.verdicts import judge

    handler = registry.by_name(topic)
    claimer = Claimer(using="default", worker="cost", handlers=[handler] if handler else [])
    count = 0
    leases = claimer.claim(BATCH, seconds=60, start=0).leases
    while leases:
        leases = charge("default", [lease for lease in leases if not lease.charged]) + [
            lease for lease in leases if lease.charged
        ]
        settled = settle("default", [judge(lease, None, 0.0) for lease in leases], hand_over=lambda lease: True)
        count += len(leases)
        leases = [each.next for each in settled if each.next is not None]
        leases = leases or claimer.claim(BATCH, seconds=60, start=0).leases
    return count


def written(connection: Any) -> tuple[int, int]:
    """(rows, bytes of WAL) that were written so far; zeros where nobody counts them."""
    if connection.vendor != "postgresql":
        return 0, 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del), (SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn) "
            "FROM pg_stat_user_tables WHERE relname LIKE 'outbox%'"
        )
        rows, position = cursor.fetchone()
        return int(rows), int(position)


def cost(sheet: Sheet, connection: Any, name: str, messages: int, work: Callable[[], object]) -> None:
    meter, before = Meter(connection), written(connection)
    with meter.running():
        work()
    sheet.note(f"{name}: statements per message", meter.statements / messages)
    if connection.vendor == "postgresql":
        rows, position = (after - first for after, first in zip(written(connection), before, strict=True))
        sheet.note(f"{name}: rows written per message", rows / messages)
        sheet.note(f"{name}: WAL bytes per message", position / messages)


def stage_one_by_one(messages: int) -> None:
    from django.db import transaction

    from outbox import stage

    for number in range(messages):
        with transaction.atomic():
            stage(TOPIC, {"order_id": number}, event_key=f"one:{number}")


def stage_at_once(messages: int) -> None:
    from django.db import transaction

    from outbox import Intent, stage_many

    with transaction.atomic():
        stage_many([Intent(TOPIC, {"order_id": n}, event_key=f"many:{n}") for n in range(messages)])


def fill_lanes(connection: Any, rows: int, prefix: str) -> None:
    """Due messages in `LANES` lanes, in turn one of each."""
    from outbox.handlers import registry

    handler = registry.by_name(ORDERED)
    assert handler is not None
    lanes = [handler.lane(str(number)) for number in range(LANES)]
    picked = " ".join(f"WHEN {number} THEN {lane}" for number, lane in enumerate(lanes))
    remainder = f"n % {LANES}" if connection.vendor != "mysql" else f"MOD(n, {LANES})"
    fill(connection, rows, prefix=prefix, topic=ORDERED, lane=f"CASE {remainder} {picked} END")


def measure(connection: Any, *, messages: int, backlog: int) -> Sheet:
    from outbox.handlers import registry
    from outbox.leases import Claimer

    sheet = Sheet()
    stage_one_by_one(20)
    empty(connection)
    cost(sheet, connection, "stage()", messages, lambda: stage_one_by_one(messages))
    empty(connection)
    cost(sheet, connection, "stage_many()", messages, lambda: stage_at_once(messages))
    for name, topic in (("unordered", TOPIC), (f"{LANES} lanes", ORDERED)):
        empty(connection)
        if topic == TOPIC:
            fill(connection, messages, prefix="due", topic=TOPIC)
        else:
            fill_lanes(connection, messages, "due")
        cost(sheet, connection, f"deliver, {name}", messages, lambda topic=topic: deliver_all(topic))
    for rows in (backlog // 100, backlog):
        empty(connection)
        fill(connection, rows, prefix="due", topic=TOPIC)
        claimer = Claimer(using="default", worker="cost", handlers=[h for h in registry.handlers() if h.name == TOPIC])
        meter = Meter(connection)
        with meter.running(reads=True):
            claimer.claim(BATCH, seconds=60)
        sheet.note(f"claim of {BATCH} among {rows:,}: reads", meter.reads)
    return sheet


def compare(sheet: Sheet, baseline: dict[str, float]) -> None:
    for name, value in sheet.numbers.items():
        kind = next(each for each in TOLERANCES if each in name)
        if name not in baseline:
            sheet.short.append(f"{name} has no baseline")
        elif value > baseline[name] * TOLERANCES[kind] + 0.001:
            sheet.short.append(f"{name} is {value:.3f}, the baseline is {baseline[name]:.3f}")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--update", action="store_true", help="write the numbers into the baseline")
    given = options.parse_args()
    with scratch_databases(given.database) as [connection]:
        from outbox import handler

        handler(TOPIC, ordering="none")(lambda message: None)
        handler(ORDERED)(lambda message: None)
        key = f"{connection.vendor}{' quick' * given.quick}"
        print(f"{connection.vendor}: what a message costs")
        sheet = measure(connection, messages=1_000, backlog=20_000 if given.quick else 100_000)
        known = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
        if given.update:
            known[key] = {name: round(value, 3) for name, value in sheet.numbers.items()}
            BASELINE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        compare(sheet, known.get(key, {}))
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
