"""How fast dispatchers drain no-op messages, compared with a bare loop of the driver and with other projects.

    python benchmarks/dispatch.py [--database URL] [--quick] [--json FILE]

The bare loop claims a batch by one UPDATE (or SELECT and UPDATE) and completes it by another; for atomic handlers, it
completes each message in a transaction of its own. Several processes drain the same table together. On PostgreSQL every
peer of `peers` runs, too, on its own tables in a database of its own, at the settings that are printed. All take turns,
so that the ratios hold although the machine's speed varies. At last one process drains very many messages, and its
memory is compared early and late. Exits with 1, and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import bare
from ground import Sheet, arguments, configure, drain, empty, empty_database, fill, rate, resident_mb, scratch_databases
from peers import PEERS

RAW_SHARE = {"postgresql": {100: 0.6, 500: 0.7}, "mysql": {100: 0.5}, "sqlite": {100: 0.3}}  # by batch
ATOMIC_SHARE = 0.8  # of a bare loop with one transaction per message
PROCESSES = {2: 1.5, 4: 2.0}  # times the rate of one process
GROWTH_MB = 10.0
MEMORY_MB = 120.0
TOPIC = "benchmark.noop"
ATOMIC = "benchmark.atomic"
SLOTS = 100


def declare() -> None:
    from outbox import handler

    handler(TOPIC, ordering="none")(lambda message: None)
    handler(ATOMIC, ordering="none", atomic=True)(lambda message: None)


def work(database: dict[str, Any], pipe: Connection) -> None:
    """Another process: drain as often as it is told to, and send back (count, seconds of the processor, MB)."""
    logging.disable(logging.WARNING)
    configure({"default": database})
    declare()
    pipe.send("ready")
    while pipe.recv() == "drain":
        busy = time.process_time()
        count = drain([TOPIC], concurrency=SLOTS)
        pipe.send((count, time.process_time() - busy, resident_mb()))


class Team:
    """Other processes that drain together."""

    def __init__(self, connection: Any, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(connection.settings_dict, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        assert all(pipe.recv() == "ready" for pipe in self._pipes)

    def drain(self) -> list[tuple[int, float, float]]:
        for pipe in self._pipes:
            pipe.send("drain")
        return [pipe.recv() for pipe in self._pipes]

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send("stop")
            process.join()


def refill(connection: Any, rows: int, topic: str = TOPIC) -> None:
    empty(connection)
    fill(connection, rows, prefix="row", topic=topic)


def against_bare(connection: Any, sheet: Sheet, rows: int, rounds: int) -> list[float]:
    """Our rates at the batch of the first limit, after those of the bare loops have been noted."""
    shares = RAW_SHARE[connection.vendor]
    few = rows // 10
    bares: dict[int, list[float]] = {batch: [] for batch in shares}
    ours: dict[int, list[float]] = {batch: [] for batch in shares}
    slow: list[float] = []
    atomic: list[float] = []
    default: list[float] = []
    for _ in range(rounds):
        for batch in shares:
            refill(connection, rows)
            bares[batch].append(rate(partial(bare.in_batches, connection, TOPIC, batch), rows))
            refill(connection, rows)
            ours[batch].append(rate(partial(drain, [TOPIC], concurrency=SLOTS, batch=batch), rows))
        refill(connection, rows)
        default.append(rate(partial(drain, [TOPIC], concurrency=20), rows))
        refill(connection, few, ATOMIC)
        slow.append(rate(partial(bare.one_by_one, connection, ATOMIC), few))
        refill(connection, few, ATOMIC)
        atomic.append(rate(partial(drain, [ATOMIC], concurrency=20), few))
    for batch, share in shares.items():
        sheet.note(f"bare loop, batch {batch}", bares[batch], "/s")
        sheet.note(f"dispatcher, batch {batch}, {SLOTS} slots", ours[batch], "/s")
        sheet.ratio(f"dispatcher / bare loop, batch {batch}", ours[batch], bares[batch])
        sheet.demand(f"dispatcher / bare loop, batch {batch}", at_least=share)
    sheet.note("dispatcher, batch 100, 20 slots (default)", default, "/s")
    sheet.note("bare loop, one transaction per message", slow, "/s")
    sheet.note("dispatcher, atomic handlers, 20 slots", atomic, "/s")
    sheet.ratio("atomic handlers / bare loop of transactions", atomic, slow)
    sheet.demand("atomic handlers / bare loop of transactions", at_least=ATOMIC_SHARE)
    return ours[100]


def together(connection: Any, sheet: Sheet, rows: int, rounds: int) -> None:
    """One, two and four processes in turn."""
    teams = {size: Team(connection, size) for size in (1, *PROCESSES)}
    rates: dict[int, list[float]] = {size: [] for size in teams}
    busy: dict[int, list[float]] = {size: [] for size in teams}
    for number in range(rounds + 1):
        for size, team in teams.items():
            refill(connection, rows)
            start = time.perf_counter()
            found = team.drain()
            seconds = time.perf_counter() - start
            if sum(count for count, _, _ in found) != rows:
                raise SystemExit(f"{found}: no measurement.")
            if number:  # the first round warms up
                rates[size].append(rows / seconds)
                busy[size].append(sum(taken for _, taken, _ in found) / rows * 1e6)
    for team in teams.values():
        team.stop()
    for size, found in rates.items():
        sheet.note(f"processes: {size}", found, "/s")
        sheet.note(f"processes: {size}, processor time of a message", busy[size], "µs")
    for size, factor in PROCESSES.items():
        sheet.ratio(f"{size} processes / 1", rates[size], rates[1])
        sheet.demand(f"{size} processes / 1", at_least=factor)


def against_peers(connection: Any, sheet: Sheet, rows: int, rounds: int, part: int) -> None:
    """Every peer in turn with a dispatcher."""
    for peer in PEERS:
        peer.interpreter()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer.name: [] for peer in PEERS}
    settings = {}
    for _ in range(rounds):
        refill(connection, rows)
        ours.append(rate(partial(drain, [TOPIC], concurrency=SLOTS), rows))
        for peer in PEERS:
            with empty_database(connection) as url:
                found = peer.drive(url, peer.messages // part)
            settings[peer.name] = found["settings"]
            theirs[peer.name].append(found["messages"] / found["drain"])
    sheet.note("dispatcher, beside the peers", ours, "/s")
    for peer in PEERS:
        print(f"{peer.name} ({', '.join(peer.requirements)}): {settings[peer.name]}")
        sheet.note(peer.name, theirs[peer.name], "/s")
        sheet.ratio(f"dispatcher / {peer.name}", ours, theirs[peer.name])
        sheet.demand(f"dispatcher / {peer.name}", at_least=peer.faster)


def memory(connection: Any, sheet: Sheet, first: int, rest: int) -> None:
    """What one process uses after few and after many messages."""
    team = Team(connection, 1)
    refill(connection, first)
    [(_, _, early)] = team.drain()
    refill(connection, rest)
    [(_, _, late)] = team.drain()
    team.stop()
    sheet.note(f"memory after {first:,} messages", early, "MB")
    sheet.note(f"memory after {first + rest:,} messages", late, "MB")
    sheet.demand(f"memory after {first + rest:,} messages", at_most=MEMORY_MB)
    sheet.note("growth of memory", late - early, "MB")
    sheet.demand("growth of memory", at_most=GROWTH_MB)


def main() -> int:
    given = arguments(__doc__ or "")
    rows, rounds, part, rest = (5_000, 3, 4, 40_000) if given.quick else (20_000, 5, 1, 490_000)
    with scratch_databases(given.database) as [connection]:
        declare()
        sheet = Sheet(quick=given.quick)
        print(f"{connection.display_name}: {rows:,} messages, {rounds} rounds")
        against_bare(connection, sheet, rows, rounds)
        if connection.vendor != "sqlite":  # which has one writer at a time
            together(connection, sheet, rows, rounds)
        if connection.vendor == "postgresql":
            against_peers(connection, sheet, rows, 1 if given.quick else 3, part)
        memory(connection, sheet, 10_000, rest)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
