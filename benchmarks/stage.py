"""What staging costs, compared with Django's own writes of rows of the same width on the same connection.

    python benchmarks/stage.py [--database URL] [--quick] [--json FILE]

stage() is compared with Model.objects.create(), stage_many() with a bulk_create() of as many rows; the rivals take
turns, so that the ratios hold although the machine's speed varies. "Same indexes" are rows of the message table
itself, "no indexes" those of a table with the same columns and only a primary key. The first two comparisons, which
have a limit (against the same indexes), time the calls alone, inside a transaction that has written a row before. The
third times short transactions from begin to commit, with what staging does after the commit. On PostgreSQL peers that
stage by one call stage a small payload, too, in a database of their own, many in one transaction.
Exits with 1, and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ground import Sheet, arguments, empty, empty_database, scratch_databases
from peers import PEERS

STAGE_LIMIT = {"postgresql": 0.65, "mysql": 0.85, "sqlite": 0.85}  # of Model.objects.create()
MANY_LIMIT = 0.5  # of bulk_create()
MANY = 1_000
TOPIC = "benchmark.staged"
Times = dict[str, list[float]]


def payload(number: int) -> dict[str, Any]:
    return {
        "order_id": number,
        "total": "129.90",
        "currency": "EUR",
        "lines": [{"sku": "A-1", "n": 2}] * 3,
        "note": "x" * 60,
    }


def bare_model(connection: Any) -> Any:
    """A table with the columns of the message table, and without its indexes."""
    from django.db import models

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


class Writers:
    """The ways to write messages, and what each takes."""

    def __init__(self, connection: Any) -> None:
        self.bare = bare_model(connection)
        self._numbers = count(1)

    def row(self, number: int) -> dict[str, Any]:
        from outbox.fields import from_micros

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

    def intent(self, number: int) -> dict[str, Any]:
        return {"event_key": f"order:{number}:paid", "ordering_key": f"order:{number}"}

    def batch(self, size: int) -> list[int]:
        return [next(self._numbers) for _ in range(size)]

    def calls(self, write: Callable[[int], object], calls: int) -> float:
        """Microseconds of a call, in a transaction that has written a row before."""
        from django.db import transaction

        batch = self.batch(calls)
        with transaction.atomic():
            self.bare.objects.create(**self.row(0))
            start = time.perf_counter()
            for number in batch:
                write(number)
            return (time.perf_counter() - start) / calls * 1e6

    def at_once(self, write: Callable[[list[int]], object]) -> float:
        """Milliseconds of `MANY` rows at once."""
        from django.db import transaction

        batch = self.batch(MANY)
        with transaction.atomic():
            self.bare.objects.create(**self.row(0))
            start = time.perf_counter()
            write(batch)
            return (time.perf_counter() - start) * 1e3

    def wholes(self, write: Callable[[int], object]) -> float:
        """Microseconds of a transaction of one row and what is written besides."""
        from django.db import transaction

        batch = self.batch(20)
        start = time.perf_counter()
        for number in batch:
            with transaction.atomic():
                self.bare.objects.create(**self.row(0))
                write(number)
        return (time.perf_counter() - start) / len(batch) * 1e6


def in_turn(rivals: dict[str, Callable[[], float]], rounds: int) -> Times:
    times: Times = {name: [] for name in rivals}
    names = list(rivals)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = rivals[name]()
            if turn:  # the first round warms up
                times[name].append(taken)
    return times


def compare(sheet: Sheet, times: Times, unit: str, limit: float | None = None) -> None:
    """Print the medians and the ratios of the first to the others; the limit holds for the second."""
    for name, found in times.items():
        sheet.note(name, found, unit)
    first, *others = times
    for name in others:
        sheet.ratio(f"{first} / {name}", times[first], times[name])
    if limit is not None:
        sheet.demand(f"{first} / {others[0]}", at_most=limit)


def against_django(connection: Any, sheet: Sheet, *, calls: int, rounds: int, many_rounds: int) -> None:
    from outbox import Intent, stage, stage_many
    from outbox.models import Message

    ways = Writers(connection)
    bare, row, intent = ways.bare, ways.row, ways.intent

    def intents(batch: list[int]) -> list[Any]:
        return [Intent(TOPIC, payload(number), **intent(number)) for number in batch]

    singles = {
        "stage()": lambda: ways.calls(lambda n: stage(TOPIC, payload(n), **intent(n)), calls),
        "create(), same indexes": lambda: ways.calls(lambda n: Message.objects.create(**row(n)), calls),
        "create(), no indexes": lambda: ways.calls(lambda n: bare.objects.create(**row(n)), calls),
    }
    many = f"of {MANY:,}"
    batches = {
        f"stage_many() {many}": lambda: ways.at_once(lambda batch: stage_many(intents(batch))),
        f"bulk_create() {many}, same indexes": lambda: ways.at_once(
            lambda batch: Message.objects.bulk_create([Message(**row(n)) for n in batch])
        ),
        f"bulk_create() {many}, no indexes": lambda: ways.at_once(
            lambda batch: bare.objects.bulk_create([bare(**row(n)) for n in batch])
        ),
    }
    wholes = {
        "row, stage(), commit": lambda: ways.wholes(lambda n: stage(TOPIC, payload(n), **intent(n))),
        "row, create(), commit": lambda: ways.wholes(lambda n: Message.objects.create(**row(n))),
        "row, commit": lambda: ways.wholes(lambda n: None),
    }
    compare(sheet, in_turn(singles, rounds), "µs", STAGE_LIMIT[connection.vendor])
    compare(sheet, in_turn(batches, many_rounds), "ms", MANY_LIMIT)
    compare(sheet, in_turn(wholes, rounds), "µs")


def against_peers(connection: Any, sheet: Sheet, *, messages: int, rounds: int) -> None:
    """Small payloads, many in one transaction, as the drivers of the peers stage theirs."""
    from django.db import transaction

    from outbox import stage

    singly = [peer for peer in PEERS if peer.stages_singly]
    for peer in singly:
        peer.interpreter()

    def ours() -> float:
        empty(connection)
        start = time.perf_counter()
        with transaction.atomic():
            for number in range(messages):
                stage(TOPIC, {"order_id": number})
        return (time.perf_counter() - start) / messages * 1e6

    def theirs(peer: Any) -> float:
        with empty_database(connection) as url:
            found: dict[str, Any] = peer.drive(url, messages, only_stage=True)
        seconds: float = found["stage"]
        return seconds / messages * 1e6

    rivals: dict[str, Callable[[], float]] = {"stage(), small payload": ours}
    rivals |= {peer.name: lambda peer=peer: theirs(peer) for peer in singly}
    times = in_turn(rivals, rounds)
    compare(sheet, times, "µs")
    for peer in singly:
        sheet.demand(f"stage(), small payload / {peer.name}", at_most=1.0)


def main() -> int:
    given = arguments(__doc__ or "")
    calls, rounds, many_rounds = (50, 10, 5) if given.quick else (100, 60, 30)
    with scratch_databases(given.database) as [connection]:
        from outbox import handler

        handler(TOPIC)(lambda message: None)
        sheet = Sheet(quick=given.quick)
        print(f"{connection.display_name}, payload of {len(json.dumps(payload(1)))} bytes")
        against_django(connection, sheet, calls=calls, rounds=rounds, many_rounds=many_rounds)
        if connection.vendor == "postgresql":
            messages, peer_rounds = (500, 1) if given.quick else (2_000, 3)
            against_peers(connection, sheet, messages=messages, rounds=peer_rounds)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
