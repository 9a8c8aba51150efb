"""oban: one process with one queue, on its own pool under uvloop."""

import asyncio

import uvloop
from driving import Drive
from oban import Oban, worker
from oban.schema import install

LIMIT = 500

drive = Drive(f"queue limit {LIMIT}, uvloop, pool of 10")
done = asyncio.Event()


@worker(queue="noop")
class Noop:
    async def process(self, job: object) -> None:
        drive.handled += 1
        if drive.handled == drive.messages:
            done.set()


async def main() -> None:
    pool = await Oban.create_pool(drive.url)
    await install(pool)
    client = Oban(pool=pool, name="client")
    with drive.timed("stage"):
        for start in range(0, drive.messages, 1000):
            rows = range(start, min(start + 1000, drive.messages))
            await client.enqueue_many(*(Noop.new({"order_id": number}) for number in rows))
    async with pool.connection() as connection:
        await connection.execute("ANALYZE")
    with drive.timed("drain"):
        async with Oban(pool=pool, queues={"noop": LIMIT}):
            await done.wait()
    await pool.close()


uvloop.run(main())
drive.report()
