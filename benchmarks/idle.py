"""What a dispatcher costs that has nothing to do, and whether its memory stays flat while it works.

    python benchmarks/idle.py [--database URL] [--quick] [--json FILE]

Counts the statements of all threads of an idle dispatcher per poll interval, with one and with two hundred topics, and
its CPU time; then drains many messages with DEBUG=True and compares the process's memory early and late. Exits with 1,
and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any

from ground import Sheet, arguments, dispatcher, drain, empty, fill, rate, resident_mb, scratch_databases

STATEMENTS = 1.0  # per poll interval
CPU = 0.01  # of one core
GROWTH_MB = 10.0
TOPIC = "benchmark.noop"


def count_statements() -> Counter[str]:
    """Count what every thread sends through Django from now on; the change counter of SQLite (a PRAGMA) is free."""
    from django.db.backends.utils import CursorWrapper

    seen: Counter[str] = Counter()
    execute = CursorWrapper.execute

    def counting(self: Any, sql: Any, params: Any = None) -> Any:
        if not str(sql).startswith("PRAGMA data_version"):
            seen[threading.current_thread().name] += 1
        return execute(self, sql, params)

    CursorWrapper.execute = counting  # type: ignore[method-assign]
    return seen


def idle(topics: list[str], seconds: float) -> tuple[float, float]:
    """(statements per poll interval, CPU share) of a dispatcher that has settled down and finds nothing."""
    work = dispatcher(topics, mode="run", concurrency=10)
    thread = threading.Thread(target=work.run)
    thread.start()
    time.sleep(2.5)  # the connections are open, the first report is made
    seen = count_statements()
    cpu, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - start
    share = (time.process_time() - cpu) / elapsed
    statements = sum(seen.values()) / (elapsed / work.plan.poll)
    work.stop()
    thread.join()
    return statements, share


def deliver(connection: Any, rows: int, prefix: str) -> None:
    fill(connection, rows, prefix=prefix, topic=TOPIC)
    rate(lambda: drain([TOPIC], concurrency=10), rows)
    empty(connection)


def main() -> int:
    given = arguments(__doc__ or "")
    seconds, first, rest = (20.0, 3_000, 12_000) if given.quick else (60.0, 10_000, 90_000)
    with scratch_databases(given.database, DEBUG=True) as [connection]:
        from outbox import handler

        sheet = Sheet(quick=given.quick)
        print(f"{connection.vendor}: idle for {seconds:.0f} s, polling every second")
        names = [TOPIC, *(f"benchmark.topic{number}" for number in range(199))]
        for name in names:
            handler(name)(lambda message: None)
        for topics in (1, len(names)):
            statements, share = idle(names[:topics], seconds)
            sheet.note(f"statements per poll interval, {topics} topics", statements)
            sheet.demand(f"statements per poll interval, {topics} topics", at_most=STATEMENTS)
            sheet.note(f"CPU share, {topics} topics", share)
            sheet.demand(f"CPU share, {topics} topics", at_most=CPU)
        deliver(connection, first, "early")
        early = sheet.note(f"memory after {first:,} messages", resident_mb(), "MB")
        for part in range(3):
            deliver(connection, rest // 3, f"late{part}:")
        late = sheet.note(f"memory after {first + rest:,} messages", resident_mb(), "MB")
        sheet.note("growth", late - early, "MB")
        sheet.demand("growth", at_most=GROWTH_MB)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
