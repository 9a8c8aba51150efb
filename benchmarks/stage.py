"""What staging costs, compared with Django's own writes of rows of the same width on the same connection.

    python benchmarks/stage.py [--database URL] [--quick]

stage() is compared with Model.objects.create(), stage_many() with a bulk_create() of as many rows; the rivals take
turns, so that the ratios hold although the machine's speed varies. "Same indexes" are rows of the message table
itself, "no indexes" those of a table with the same columns and only a primary key. The first two comparisons, which
have a limit (against the same indexes), time the calls alone, inside a transaction that has written a row before. The
third times short transactions from begin to commit, with what staging does after the commit.
Exits with 1, and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STAGE_LIMIT = 1.25  # times Model.objects.create()
MANY_LIMIT = 3.0  # times bulk_create()
TOPIC = "benchmark.staged"


def payload(number: int) -> dict[str, Any]:
    return {
        "order_id": number,
        "total": "129.90",
        "currency": "EUR",
        "lines": [{"sku": "A-1", "n": 2}] * 3,
        "note": "x" * 60,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", default="", help="a database URL; SQLite in a temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _configure(options.database or f"sqlite:///{folder}/db.sqlite3")
        from django.db import connection

        connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
        try:
            return _measure(quick=options.quick)
        finally:
            connection.creation.destroy_test_db(connection.settings_dict["NAME"], verbosity=0)


def _configure(url: str) -> None:
    os.environ["DATABASE_URL"] = url
    from example_project.settings import database

    config = database(url)
    name = f"bench_outbox_{os.getpid()}"
    sqlite = config["ENGINE"].endswith("sqlite3")
    config["TEST"] = {"NAME": str(Path(config["NAME"]).with_name(f"{name}.sqlite3")) if sqlite else name}
    if config["ENGINE"].endswith("mysql"):
        config["TEST"]["CHARSET"] = "utf8mb4"
    settings.configure(
        DATABASES={"default": config},
        INSTALLED_APPS=["outbox"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()


def _bare_model() -> Any:
    """A table with the columns of the message table, and without its indexes."""
    from django.db import connection, models

    from outbox.models import Message

    columns = {}
    for field in Message._meta.concrete_fields:
        column = field.clone()
        if not column.primary_key:
            column._unique = column.db_index = False
        columns[field.name] = column

    class Meta:
        app_label = "outbox"

    bare = type("Bare", (models.Model,), {**columns, "Meta": Meta, "__module__": __name__})
    with connection.schema_editor() as editor:
        editor.create_model(bare)
    return bare


def _measure(*, quick: bool) -> int:
    from django.db import connection, transaction

    from outbox import Intent, handler, stage, stage_many
    from outbox.fields import from_micros
    from outbox.models import Message

    handler(TOPIC)(lambda message: None)
    bare = _bare_model()
    numbers = count(1)

    def values(number: int) -> dict[str, Any]:
        now = from_micros(time.time_ns() // 1000)
        return {
            "event_key": f"order:{number}:paid",
            "topic": TOPIC,
            "handler": TOPIC,
            "route": TOPIC,
            "payload": payload(number),
            "digest": b"0123456789abcdef",
            "ordering_key": f"order:{number}",
            "staged_at": now,
            "due_at": now,
            "lane": number,
        }

    def intent(number: int) -> dict[str, Any]:
        return {"event_key": f"order:{number}:paid", "ordering_key": f"order:{number}"}

    def one_by_one(write: Callable[[int], object], calls: int) -> float:
        batch = [next(numbers) for _ in range(calls)]
        with transaction.atomic():
            bare.objects.create(**values(0))
            start = time.perf_counter()
            for number in batch:
                write(number)
            return (time.perf_counter() - start) / calls

    def at_once(write: Callable[[list[int]], object], rows: int) -> float:
        batch = [next(numbers) for _ in range(rows)]
        with transaction.atomic():
            bare.objects.create(**values(0))
            start = time.perf_counter()
            write(batch)
            return time.perf_counter() - start

    calls, rounds = (50, 10) if quick else (100, 60)
    singles = {
        "stage()": lambda: one_by_one(lambda n: stage(TOPIC, payload(n), **intent(n)), calls),
        "create(), same indexes": lambda: one_by_one(lambda n: Message.objects.create(**values(n)), calls),
        "create(), no indexes": lambda: one_by_one(lambda n: bare.objects.create(**values(n)), calls),
    }
    rows, many_rounds = (2_000, 3) if quick else (10_000, 7)
    batches = {
        "stage_many()": lambda: at_once(
            lambda batch: stage_many([Intent(TOPIC, payload(n), **intent(n)) for n in batch]), rows
        ),
        "bulk_create(), same indexes": lambda: at_once(
            lambda batch: Message.objects.bulk_create([Message(**values(n)) for n in batch]), rows
        ),
        "bulk_create(), no indexes": lambda: at_once(
            lambda batch: bare.objects.bulk_create([bare(**values(n)) for n in batch]), rows
        ),
    }

    def whole(write: Callable[[int], object]) -> float:
        batch = [next(numbers) for _ in range(20)]
        start = time.perf_counter()
        for number in batch:
            with transaction.atomic():
                bare.objects.create(**values(0))
                write(number)
        return (time.perf_counter() - start) / len(batch)

    wholes = {
        "row, stage(), commit": lambda: whole(lambda n: stage(TOPIC, payload(n), **intent(n))),
        "row, create(), commit": lambda: whole(lambda n: Message.objects.create(**values(n))),
        "row, commit": lambda: whole(lambda n: None),
    }
    print(f"{connection.display_name}, payload of {len(json.dumps(payload(1)))} bytes")
    short = [
        *_compare(singles, rounds, STAGE_LIMIT, 1e6, "µs a call"),
        *_compare(batches, many_rounds, MANY_LIMIT, 1e3, f"ms for {rows} rows"),
        *_compare(wholes, rounds, float("inf"), 1e6, "µs each"),
    ]
    print(f"Short of the target: {'; '.join(short)}." if short else "Nothing falls short.")
    return 1 if short else 0


def _compare(rivals: dict[str, Callable[[], float]], rounds: int, limit: float, scale: float, unit: str) -> list[str]:
    """Let the rivals take turns; print their medians and the ratios to the first, and return broken limits."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = rivals[name]()
            if turn:  # the first round warms up
                times[name].append(taken)
    first, judge, *_ = names
    for name in names:
        line = f"  {name:<28} {statistics.median(times[name]) * scale:9.1f} {unit}"
        if name != first:
            line += f"   {first} takes {_ratio(times[first], times[name]):.2f} times as long"
        print(line)
    ratio = _ratio(times[first], times[judge])
    return [f"{first} takes {ratio:.2f} times {judge}, the limit is {limit:g}"] if ratio > limit else []


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the rounds' own ratios: what slows a whole round down does not count."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
