"""procrastinate: one asynchronous worker that ends when it has caught up."""

import asyncio

import procrastinate
from driving import Drive

JOBS = 20

drive = Drive(f"PsycopgConnector, concurrency={JOBS}, delete_jobs=never")
connector = procrastinate.PsycopgConnector(conninfo=drive.url, max_size=JOBS)
app = procrastinate.App(connector=connector)


@app.task(queue="noop", name="noop")
async def noop(order_id: int) -> None:
    drive.handled += 1


async def main() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        with drive.timed("stage"):
            for start in range(0, drive.messages, 1000):
                rows = range(start, min(start + 1000, drive.messages))
                await noop.batch_defer_async(*({"order_id": number} for number in rows))
        await connector.execute_query_async("ANALYZE")
        with drive.timed("drain"):
            await app.run_worker_async(wait=False, concurrency=JOBS, install_signal_handlers=False)


asyncio.run(main())
drive.report()
