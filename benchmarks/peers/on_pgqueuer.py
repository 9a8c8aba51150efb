"""PgQueuer: one QueueManager on one asyncpg connection under uvloop, durable tables."""

import uvloop
from asyncpg import connect
from driving import Drive
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

BATCH = 1000

drive = Drive(f"asyncpg, uvloop, batch_size={BATCH}, durable, autovacuum settings applied")


async def main() -> None:
    connection = await connect(drive.url)
    driver = AsyncpgDriver(connection)
    queries = Queries(driver)
    await queries.install()
    await queries.optimize_autovacuum()
    worker = PgQueuer(driver)

    @worker.entrypoint("noop")
    async def noop(job: object) -> None:
        drive.handled += 1

    with drive.timed("stage"):
        for start in range(0, drive.messages, 1000):
            count = min(1000, drive.messages - start)
            payloads = [b'{"order_id": 1}'] * count
            await queries.enqueue(["noop"] * count, payloads, [0] * count)
    await connection.execute("ANALYZE")
    with drive.timed("drain"):
        await worker.run(batch_size=BATCH, mode=QueueExecutionMode.drain)


uvloop.run(main())
drive.report()
