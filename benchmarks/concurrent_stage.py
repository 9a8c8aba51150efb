"""What waking the dispatchers costs an application: many clients that stage in short transactions, at the same time.

    python benchmarks/concurrent_stage.py --database URL [--quick] [--json FILE]

Sixteen processes commit transactions of one row of their own and one message, as fast as they can; one session listens.
They do so with the wake-up on (after the commit, debounced), with it off, and with a NOTIFY inside each transaction, as
triggers send it, which makes all commits wait for one another. The three take turns. PostgreSQL only: elsewhere nobody
is notified. Exits with 1, and a last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from ground import Sheet, arguments, configure, empty, scratch_databases

SHARE = 0.9  # of the rate without wake-up
CLIENTS = 16
TOPIC = "benchmark.staged"
TABLE = "benchmark_order"
WAYS = ("off", "on", "inside")


def client(database: dict[str, Any], pipe: Connection) -> None:
    """Another process: commit for so many seconds as told, in the way told; send back the number of transactions."""
    configure({"default": database})
    from django.db import connection, transaction
    from django.test import override_settings

    from outbox import handler, stage
    from outbox.wakeup import channel

    handler(TOPIC, ordering="none")(lambda message: None)
    connection.ensure_connection()
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        way, seconds = told
        count = 0
        with override_settings(OUTBOX={"WAKEUP": way == "on"}):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                with transaction.atomic(), connection.cursor() as cursor:
                    cursor.execute(f"INSERT INTO {TABLE} (total) VALUES (129.90)")
                    stage(TOPIC, {"order_id": count})
                    if way == "inside":
                        cursor.execute(f"NOTIFY {channel()}")
                count += 1
        pipe.send(count)


def main() -> int:
    given = arguments(__doc__ or "")
    rounds, seconds = (8, 1.0) if given.quick else (24, 1.5)
    with scratch_databases(given.database) as [connection]:
        if connection.vendor != "postgresql":
            raise SystemExit("Only PostgreSQL notifies: give its URL by --database.")
        from outbox.wakeup import channel

        with connection.cursor() as cursor:
            cursor.execute(f"CREATE TABLE {TABLE} (id bigserial PRIMARY KEY, total numeric)")
        listener = connection.copy()
        with listener.cursor() as cursor:
            cursor.execute(f"LISTEN {channel()}")
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for _ in range(CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=client, args=(connection.settings_dict, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        assert all(pipe.recv() == "ready" for pipe in pipes)
        sheet = Sheet(quick=given.quick)
        print(f"{connection.display_name}: {CLIENTS} processes, {rounds} rounds of {seconds:g} s")
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            empty(connection)
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                for pipe in pipes:
                    pipe.send((way, seconds))
                total = sum(pipe.recv() for pipe in pipes)
                if number:  # the first round warms up
                    found[way].append(total / seconds)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
        listener.close()
        for way in WAYS:
            sheet.note(f"transactions, wake-up {way}", found[way], "/s")
        sheet.ratio("wake-up on / off", found["on"], found["off"])
        sheet.demand("wake-up on / off", at_least=SHARE)
        sheet.ratio("NOTIFY inside the transaction / off", found["inside"], found["off"])
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
