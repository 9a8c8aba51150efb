"""How long a committed message waits for its handler at a steady rate, compared with a bare LISTEN loop and with oban.

    python benchmarks/latency.py [--database URL] [--quick] [--json FILE]

This process commits 50 messages a second, at random moments; another one delivers them: a dispatcher, or (on
PostgreSQL) the least that can do it, psycopg alone, which is notified inside the producer's transaction, claims one
batch by one UPDATE, and completes it by another. On PostgreSQL two processes of oban do the same. They take turns.
Measured is the time from the end of COMMIT to the first line of the handler. Exits with 1, and a last line that names
what fell short, when a limit is broken.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ground import Sheet, arguments, configure, dispatcher, empty, empty_database, scratch_databases
from peers import by_name

RATE = 50  # messages a second
TOPIC = "benchmark.latency"
CHANNEL = "benchmark_latency"
MEDIAN_LIMIT = {"postgresql": 25.0, "sqlite": 60.0, "mysql": 1_200.0}  # milliseconds; MariaDB and MySQL are polled
P99_LIMIT = {"postgresql": 100.0, "sqlite": 150.0, "mysql": 1_500.0}
BARE_RATIO = 2.0  # of our median to that of the bare loop
PEER = "oban"
PEER_RATIO = 1.2  # of our median to that of the peer


# --- the process that delivers ----------------------------------------------------------------------------------------


def deliver(way: str, database: dict[str, Any], pipe: Connection) -> None:
    """Deliver until told to stop; send back when each message's handler began, by its number."""
    logging.disable(logging.WARNING)
    configure({"default": database})
    began: dict[int, int] = {}
    {"outbox": by_dispatcher, "bare": by_listen_loop}[way](began, pipe)
    pipe.send(began)


def by_dispatcher(began: dict[int, int], pipe: Connection) -> None:
    import threading

    from outbox import handler

    @handler(TOPIC)
    def note(message: Any) -> None:
        began[message.payload] = time.monotonic_ns()

    work = dispatcher([TOPIC], mode="run", concurrency=10)
    thread = threading.Thread(target=work.run)
    thread.start()
    pipe.send("ready")
    pipe.recv()
    work.stop()
    thread.join()


def by_listen_loop(began: dict[int, int], pipe: Connection) -> None:
    import psycopg
    from django.db import connection

    now = "(extract(epoch from statement_timestamp()) * 1000000)::bigint"
    claim = (
        f"UPDATE outbox_message SET due_at = {now} + 60000000, lease_token = 7, attempt = attempt + 1 WHERE id = ANY("
        f"ARRAY(SELECT id FROM outbox_message WHERE route = '{TOPIC}' AND due_at <= {now} ORDER BY due_at, id "
        "LIMIT 100 FOR UPDATE SKIP LOCKED)) RETURNING id, payload"
    )
    done = "UPDATE outbox_message SET state = 'delivered', due_at = NULL, lease_token = NULL WHERE id = ANY(%s)"
    parameters = {**connection.get_connection_params(), "cursor_factory": psycopg.Cursor, "prepare_threshold": 5}
    parameters.pop("context", None)
    listener = psycopg.connect(**parameters, autocommit=True)
    worker = psycopg.connect(**parameters, autocommit=True)
    listener.execute(f"LISTEN {CHANNEL}")
    pipe.send("ready")
    while not pipe.poll():
        for _ in listener.notifies(timeout=0.5, stop_after=1):
            pass
        while rows := worker.execute(claim).fetchall():
            for _, payload in rows:
                began[int(payload)] = time.monotonic_ns()
            worker.execute(done, [[pk for pk, _ in rows]])
    pipe.recv()
    listener.close()
    worker.close()


# --- the process that commits -----------------------------------------------------------------------------------------


def stage_one(number: int, committed: dict[int, int]) -> None:
    from django.db import transaction

    from outbox import stage

    with transaction.atomic():
        transaction.on_commit(lambda: committed.setdefault(number, time.monotonic_ns()))
        stage(TOPIC, number)


def insert_one(number: int, committed: dict[int, int]) -> None:
    """The same row, with NOTIFY in its own transaction."""
    from django.db import connection, transaction

    from outbox import stage

    with transaction.atomic(), connection.cursor() as cursor:
        transaction.on_commit(lambda: committed.setdefault(number, time.monotonic_ns()))
        stage(TOPIC, number)
        cursor.execute(f"NOTIFY {CHANNEL}")


def measure(way: str, connection: Any, seconds: float) -> list[float]:
    """Milliseconds from commit to handler of each message."""
    empty(connection)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=deliver, args=(way, connection.settings_dict, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    write: Callable[[int, dict[int, int]], None] = {"outbox": stage_one, "bare": insert_one}[way]
    committed: dict[int, int] = {}
    warm_up = RATE * 2
    steady = random.Random(1)  # the same moments in every run
    at = time.monotonic()
    for number in range(warm_up + int(seconds * RATE)):
        at += steady.expovariate(RATE)
        time.sleep(max(0.0, at - time.monotonic()))
        write(number, committed)
    time.sleep(2.5)
    ours.send("stop")
    began = ours.recv()
    process.join()
    missing = committed.keys() - began.keys()
    assert not missing, f"{len(missing)} messages were not delivered"
    return [(began[number] - at) / 1e6 for number, at in committed.items() if number >= warm_up]


def medians(rounds: list[list[float]]) -> list[float]:
    return [statistics.median(times) for times in rounds]


def main() -> int:
    options = arguments(__doc__ or "")
    rounds, seconds = (1, 5.0) if options.quick else (3, 20.0)
    sheet = Sheet(quick=options.quick)
    with scratch_databases(options.database) as [connection]:
        from outbox import handler

        handler(TOPIC)(lambda message: None)
        ways = ["bare", PEER, "outbox"] if connection.vendor == "postgresql" else ["outbox"]
        found: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                if way == PEER:
                    with empty_database(connection) as url:
                        found[way].append(by_name(PEER).latency(url, int((2 + seconds) * RATE)))
                else:
                    found[way].append(sorted(measure(way, connection, seconds)))
        print(f"{connection.display_name}: {RATE} messages a second, {rounds} rounds of {seconds:g} s")
        for way in ways:
            sheet.note(f"{way}, median", medians(found[way]), "ms")
            for part in (90, 99):
                sheet.note(f"{way}, p{part}", [times[len(times) * part // 100] for times in found[way]], "ms")
        for way, limit in (("bare", BARE_RATIO), (PEER, PEER_RATIO)):
            if way in found:
                sheet.ratio(f"outbox, median / {way}", medians(found["outbox"]), medians(found[way]))
                sheet.demand(f"outbox, median / {way}", at_most=limit)
        sheet.demand("outbox, median", at_most=MEDIAN_LIMIT[connection.vendor])
        sheet.demand("outbox, p99", at_most=P99_LIMIT[connection.vendor])
    return sheet.close(options.json)


if __name__ == "__main__":
    sys.exit(main())
