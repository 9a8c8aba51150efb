"""django-domain-events: one pass of its relay over everything that is owed."""

from dataclasses import dataclass

from django.db import connection, transaction
from driving import Drive

BATCH = 500

drive = Drive(f"deliver_pending, batch_size={BATCH}")
drive.configure_django("django_domain_events")

from django_domain_events import DURABLE, deliver_pending, event, fire, receiver  # noqa: E402 - only after the setup


@event(name="noop")
@dataclass(frozen=True, slots=True)
class Noop:
    order_id: int


@receiver(Noop, mode=DURABLE, key="noop")
def noop(evt: Noop) -> None:
    drive.handled += 1


with drive.timed("stage"), transaction.atomic():
    for number in range(drive.messages):
        fire(Noop(order_id=number))
with connection.cursor() as cursor:
    cursor.execute("ANALYZE")
with drive.timed("drain"):
    deliver_pending(batch_size=BATCH)
drive.report()
