"""What a claim costs among few and among very many other rows, and while somebody holds an old snapshot open.

    python benchmarks/growth.py [--database URL] [--quick] [--json FILE]

Two databases hold the same due messages and, besides, 10,000 or a million others: pending ones of the same topic,
scheduled ones, older ones of a topic that this process has no handler for (paused), or finished ones. The claims, of a
hundred messages each, take turns. Then 60,000 messages are claimed and settled, with and without a transaction that was
opened before and sees them all to the end (not on SQLite, which keeps no old entries in its indexes). Exits with 1,
and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ground import Sheet, arguments, empty, fill, scratch_databases

CLAIM_MS = 5.0  # of a hundred messages
CLAIM_RATIO = 3.0  # among many others, compared with few
SNAPSHOT_RATIO = 1.5  # the last tenth of the claims, compared with the first
TOPIC = "benchmark.noop"
FOREIGN = "benchmark.nobody"
BATCH = 100
FEW = 10_000
OTHERS: dict[str, dict[str, str]] = {
    "pending": {"topic": TOPIC},
    "scheduled": {"topic": TOPIC, "due": "tomorrow"},
    "paused": {"topic": FOREIGN},
    "finished": {"topic": TOPIC, "state": "delivered", "due": "never"},
}


def claimer(using: str) -> Any:
    from outbox.handlers import registry
    from outbox.leases import Claimer

    return Claimer(using=using, worker="growth", handlers=registry.handlers())


def step(claims: Any) -> tuple[float, float]:
    """Milliseconds of one claim, and of the settlement of what it brought."""
    from outbox.leases import settle
    from outbox.verdicts import judge

    start = time.perf_counter()
    leases = claims.claim(BATCH, seconds=60).leases
    claimed = time.perf_counter()
    if len(leases) != BATCH:
        raise SystemExit(f"{len(leases)} messages claimed instead of {BATCH}: no measurement.")
    settle(claims.using, [judge(lease, None, 0.0) for lease in leases])
    return (claimed - start) * 1000, (time.perf_counter() - claimed) * 1000


def beside(kind: str, few: Any, many: Any, *, crowd: int, claims: int, sheet: Sheet) -> None:
    """Claims in turn among few and among many others."""
    takers = {}
    for connection, rows in ((few, FEW), (many, crowd)):
        empty(connection)
        fill(connection, rows, prefix="other", **OTHERS[kind])
        fill(connection, (claims + 5) * BATCH, prefix="due", topic=TOPIC)
        takers[rows] = claimer(connection.alias)
    times: dict[int, list[tuple[float, float]]] = {FEW: [], crowd: []}
    for number in range(claims + 5):
        for rows in (FEW, crowd) if number % 2 else (crowd, FEW):
            taken = step(takers[rows])
            if number >= 5:  # the first ones warm up
                times[rows].append(taken)
    for rows, found in times.items():
        sheet.note(f"{kind}, {rows:,} others: claim of {BATCH}", [claim for claim, _ in found], "ms")
        sheet.note(f"{kind}, {rows:,} others: settlement", [settlement for _, settlement in found], "ms")
    sheet.demand(f"{kind}, {crowd:,} others: claim of {BATCH}", at_most=CLAIM_MS)
    median = {rows: statistics.median(claim for claim, _ in found) for rows, found in times.items()}
    name = f"{kind}: claim among {crowd:,} / among {FEW:,}"
    sheet.note(name, median[crowd] / median[FEW])
    sheet.demand(name, at_most=CLAIM_RATIO)


@contextmanager
def old_snapshot(connection: Any) -> Iterator[None]:
    """A transaction that has looked at the table now, and goes on seeing it so."""
    other = connection.copy()
    with other.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        else:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        cursor.execute("SELECT count(*) FROM outbox_message")
        cursor.fetchall()
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")
            other.close()


def under_snapshot(connection: Any, *, messages: int, sheet: Sheet) -> None:
    for name, held in (("no old snapshot", False), ("old snapshot", True)):
        empty(connection)
        fill(connection, messages, prefix="due", topic=TOPIC)
        claims = claimer(connection.alias)
        if held:
            with old_snapshot(connection):
                found = [step(claims)[0] for _ in range(messages // BATCH)]
        else:
            found = [step(claims)[0] for _ in range(messages // BATCH)]
        tenth = len(found) // 10
        first = sheet.note(f"{name}, {messages:,} messages: claim, first tenth", found[:tenth], "ms")
        last = sheet.note(f"{name}, {messages:,} messages: claim, last tenth", found[-tenth:], "ms")
        sheet.note(f"{name}: last tenth / first tenth", last / first)
    sheet.demand("old snapshot: last tenth / first tenth", at_most=SNAPSHOT_RATIO)


def main() -> int:
    given = arguments(__doc__ or "")
    crowd, claims, messages = (200_000, 20, 20_000) if given.quick else (1_000_000, 50, 60_000)
    with scratch_databases(given.database, "many") as [few, many]:
        from outbox import handler

        handler(TOPIC, ordering="none")(lambda message: None)
        sheet = Sheet(quick=given.quick)
        print(f"{few.display_name}: {claims} claims of {BATCH} messages each, in turn among few and many others")
        for kind in OTHERS:
            beside(kind, few, many, crowd=crowd, claims=claims, sheet=sheet)
        empty(many)
        if few.vendor != "sqlite":
            under_snapshot(few, messages=messages, sheet=sheet)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
