"""django-reliable-outbox: one process of its worker command, in burst mode."""

from django.core.management import call_command
from django.db import connection, transaction
from driving import Drive

THREADS = 16
BATCH = 100

drive = Drive(f"outbox_worker --burst --concurrency {THREADS} --batch-size {BATCH}")
drive.configure_django("reliable_outbox")

from reliable_outbox import handler, publish  # noqa: E402 - only after the setup


@handler("noop")
def noop(envelope: object) -> None:
    drive.handled += 1


with drive.timed("stage"), transaction.atomic():
    for number in range(drive.messages):
        publish("noop", {"order_id": number})
with connection.cursor() as cursor:
    cursor.execute("ANALYZE")
with drive.timed("drain"):
    call_command("outbox_worker", burst=True, concurrency=THREADS, batch_size=BATCH)
drive.report()
