"""oban's latency: one process enqueues at a steady rate, another one works; prints milliseconds from commit on."""

import asyncio
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection

import uvloop
from driving import Drive
from oban import Oban, worker
from oban.schema import install

RATE = 50
LIMIT = 10
began: dict[int, int] = {}


@worker(queue="latency")
class Note:
    async def process(self, job: object) -> None:
        began[job.args["number"]] = time.monotonic_ns()


def deliver(url: str, pipe: Connection) -> None:
    async def run() -> None:
        pool = await Oban.create_pool(url)
        async with Oban(pool=pool, queues={"latency": LIMIT}):
            await asyncio.sleep(1.0)
            pipe.send("ready")
            while not pipe.poll():
                await asyncio.sleep(0.2)
        await pool.close()

    uvloop.run(run())
    pipe.send(began)


async def enqueue(url: str, messages: int) -> dict[int, int]:
    pool = await Oban.create_pool(url)
    client = Oban(pool=pool, name="client")
    committed = {}
    steady = random.Random(1)
    at = time.monotonic()
    for number in range(messages):
        at += steady.expovariate(RATE)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        await client.enqueue(Note.new({"number": number}))
        committed[number] = time.monotonic_ns()
    await asyncio.sleep(2.5)
    await pool.close()
    return committed


async def prepare(url: str) -> None:
    pool = await Oban.create_pool(url)
    await install(pool)
    await pool.close()


def main() -> None:
    drive = Drive(f"queue limit {LIMIT}, uvloop")
    uvloop.run(prepare(drive.url))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=deliver, args=(drive.url, theirs))
    process.start()
    assert ours.recv() == "ready"
    committed = uvloop.run(enqueue(drive.url, drive.messages))
    ours.send("stop")
    started = ours.recv()
    process.join()
    warm_up = RATE * 2
    waits = [(started[number] - at) / 1e6 for number, at in committed.items() if number >= warm_up]
    print(json.dumps({"waits": waits, "settings": drive.settings}))


if __name__ == "__main__":
    main()
