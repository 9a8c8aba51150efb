"""faststream-outbox: one subscriber on asyncpg that fetches and finishes in batches."""

import asyncio
import logging

from driving import Drive
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

WORKERS = 4
BATCH = 500

logging.disable(logging.INFO)
drive = Drive(f"asyncpg, max_workers={WORKERS}, fetch_batch_size={BATCH}, terminal_flush_batch_size={BATCH}")
metadata = MetaData()
table = make_outbox_table(metadata)
done = asyncio.Event()


async def main() -> None:
    engine = create_async_engine(drive.url.replace("postgresql://", "postgresql+asyncpg://"))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    broker = OutboxBroker(engine, outbox_table=table)

    @broker.subscriber(
        "noop",
        max_workers=WORKERS,
        fetch_batch_size=BATCH,
        terminal_flush_batch_size=BATCH,
        min_fetch_interval=0.001,
        max_fetch_interval=1.0,
    )
    async def noop(body: dict) -> None:
        drive.handled += 1
        if drive.handled == drive.messages:
            done.set()

    session_factory = async_sessionmaker(engine)
    with drive.timed("stage"):
        async with session_factory() as session, session.begin():
            await broker.publish_batch(
                *({"order_id": number} for number in range(drive.messages)), queue="noop", session=session
            )
    async with engine.begin() as connection:
        await connection.execute(text("ANALYZE"))
    with drive.timed("drain"):
        await broker.start()
        await done.wait()
        await broker.stop()
    await engine.dispose()


asyncio.run(main())
drive.report()
