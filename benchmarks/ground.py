"""What the benchmarks stand on: a scratch database, many rows at once, and a verdict as the last line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOLERANCE = 1.5  # of the limits, in a run of few rounds


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--database", default="", help="a database URL; SQLite in a temporary folder by default")
    options.add_argument("--quick", action="store_true", help="smaller and fewer rounds: a look, not a measurement")
    options.add_argument("--json", metavar="FILE", help="write the numbers to this file, too")
    return options


def arguments(description: str) -> argparse.Namespace:
    """What was given of the options that every benchmark takes."""
    return parser(description).parse_args()


def configure(databases: dict[str, Any], **more: Any) -> None:
    """Set Django up; in another process, with the settings of databases that are there already."""
    settings.configure(
        DATABASES=databases,
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "outbox"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        **more,
    )
    django.setup()


@contextmanager
def scratch_databases(url: str, *aliases: str, **more: Any) -> Iterator[list[Any]]:
    """Set Django up on new databases that are dropped at the end; yields Django's connections, "default" first."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = url or f"sqlite:///{folder}/db.sqlite3"
        from example_project.settings import database

        databases = {}
        for alias in ("default", *aliases):
            config = database(os.environ["DATABASE_URL"])
            name = f"bench_outbox_{os.getpid()}_{alias}"
            sqlite = config["ENGINE"].endswith("sqlite3")
            config["TEST"] = {"NAME": str(Path(config["NAME"]).with_name(f"{name}.sqlite3")) if sqlite else name}
            databases[alias] = {**config, "CONN_MAX_AGE": 600}
        configure(databases, **more)
        from django.db import connections

        ours = [connections[alias] for alias in databases]
        for connection in ours:
            connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
        try:
            yield ours
        finally:
            for connection in ours:
                connection.close()
                connection.creation.destroy_test_db(connection.settings_dict["NAME"], verbosity=0)


@contextmanager
def empty_database(connection: Any) -> Iterator[str]:
    """One more database on the PostgreSQL server, for tables of somebody else; yields its URL."""
    name = f"{connection.settings_dict['NAME']}_peer"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        try:
            known = connection.get_connection_params()
            login = quote(known.get("user", "")) + (f":{quote(known['password'])}" if known.get("password") else "")
            yield f"postgresql://{login}@{known.get('host', '')}:{known.get('port', '') or 5432}/{name}"
        finally:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def empty(connection: Any) -> None:
    """Remove every message, and what its removal leaves behind."""
    with connection.cursor() as cursor:
        for table in ("outbox_attempt", "outbox_message"):
            cursor.execute(f"DELETE FROM {table}" if connection.vendor == "sqlite" else f"TRUNCATE TABLE {table}")


def fill(
    connection: Any, rows: int, *, prefix: str, topic: str, state: str = "pending", due: str = "now", **more: str
) -> None:
    """Insert rows by one statement. ``due``: "now", "tomorrow", "never"; ``more``: further columns as SQL of ``n``."""
    now = time.time_ns() // 1000
    due_sql = {"now": f"{now}", "tomorrow": f"{now + 86_400_000_000}", "never": "NULL"}[due]
    concat = f"CONCAT('{prefix}', n)" if connection.vendor == "mysql" else f"'{prefix}' || n"
    values = {
        "event_key": concat,
        "position": "0",
        "topic": f"'{topic}'",
        "handler": f"'{topic}'",
        "route": f"'{topic}'",
        "payload": '\'{"order_id":1,"total":"129.90"}\'',
        "payload_version": "1",
        "headers": "'{}'",
        "digest": "'0123456789abcdef'" + ("::bytea" if connection.vendor == "postgresql" else ""),
        "staged_at": str(now),
        "state": f"'{state}'",
        "due_at": due_sql,
        "leased_by": "''",
        "attempt": "0",
        "spent": "0",
        "lapses": "0",
        "settled_at": "NULL" if state == "pending" else str(now),
        "reason": "''",
        "error_type": "''",
        "error_code": "''",
        "error_text": "''",
        "payload_pruned": "FALSE",
        **more,
    }
    source = {
        "postgresql": f"generate_series(1, {rows}) AS g(n)",
        "mysql": f"(SELECT seq AS n FROM seq_1_to_{rows}) AS g",
        "sqlite": f"(WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {rows}) SELECT n FROM g)",
    }[connection.vendor]
    columns = ", ".join(
        "`position`" if name == "position" and connection.vendor == "mysql" else name for name in values
    )
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO outbox_message ({columns}) SELECT {', '.join(values.values())} FROM {source}")
        if connection.vendor == "postgresql":
            cursor.execute("VACUUM ANALYZE outbox_message")
        elif connection.vendor == "mysql":
            cursor.execute("ANALYZE TABLE outbox_message")
            cursor.fetchall()


def dispatcher(
    topics: Sequence[str], *, using: str = "default", mode: str = "drain", concurrency: int = 100, batch: int = 100
) -> Any:
    """A dispatcher of these topics; by default it works as ``outbox_dispatch --drain``."""
    from outbox.dispatcher import Dispatcher
    from outbox.handlers import registry
    from outbox.plans import Plan

    plan = Plan(
        using=using,
        handlers=[each for each in registry.handlers() if each.topic in topics],
        concurrency=concurrency,
        lease=60,
        poll=1,
        grace=30,
        batch=batch,
        mode=mode,  # type: ignore[arg-type]
    )
    return Dispatcher(plan)


def drain(topics: Sequence[str], **how: Any) -> int:
    """Deliver all that is due; returns how many there were."""
    work = dispatcher(topics, **how)
    if work.run():
        raise SystemExit(f"{work.failure}: no measurement.")
    delivered: int = work.counts["delivered"]
    return delivered


def rate(run: Callable[[], int], expected: int) -> float:
    """Messages a second of something that delivers so many."""
    start = time.perf_counter()
    count = run()
    seconds = time.perf_counter() - start
    if count != expected:
        raise SystemExit(f"{count} messages instead of {expected}: no measurement.")
    return expected / seconds


def resident_mb() -> float:
    """The memory that this process uses now."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


class Sheet:
    """The numbers of a run and the limits they must keep, ``quick`` ones roughly."""

    def __init__(self, *, quick: bool = False) -> None:
        self.tolerance = TOLERANCE if quick else 1.0
        self.numbers: dict[str, float] = {}
        self.short: list[str] = []

    def note(self, name: str, values: list[float] | float, unit: str = "") -> float:
        """Print and keep the median of some values."""
        value = statistics.median(values) if isinstance(values, list) else values
        self.numbers[name] = value
        spread = f"   ({min(values):.3g} … {max(values):.3g})" if isinstance(values, list) and len(values) > 1 else ""
        print(f"{name:<58} {value:>12,.3f} {unit}{spread}", flush=True)
        return value

    def ratio(self, name: str, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """The median of the rounds' own ratios: what slows a whole round down does not count."""
        return self.note(name, [one / other for one, other in zip(ours, theirs, strict=True)])

    def demand(self, name: str, *, at_least: float | None = None, at_most: float | None = None) -> None:
        value = self.numbers[name]
        if at_least is not None and value < at_least / self.tolerance:
            self.short.append(f"{name} is {value:.3f}, should be at least {at_least:.3f}")
        if at_most is not None and value > at_most * self.tolerance:
            self.short.append(f"{name} is {value:.3f}, should be at most {at_most:.3f}")

    def close(self, file: str | None) -> int:
        """Print what falls short as the last line; returns the exit code."""
        if file:
            Path(file).write_text(json.dumps(self.numbers, indent=2) + "\n", encoding="utf-8")
        print("Falls short: " + "; ".join(self.short) if self.short else "All limits are kept.")
        return 1 if self.short else 0
