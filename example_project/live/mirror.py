"""Publishes deliveries to the live page, after they have committed and best effort.

The signal is sent in the process that delivered; a row carries the news to the web process. If publishing fails, the
outbox logs it and nothing else changes: the delivery is recorded already.
"""

from __future__ import annotations

from fnmatch import fnmatch

from django.conf import settings
from django.db import transaction
from django.dispatch import receiver

from example_project.live.models import Delivery
from outbox.signals import delivered

KEPT = 1000


@receiver(delivered)
def publish(event, **_):
    if not any(fnmatch(event.message.topic, pattern) for pattern in settings.LIVE_TOPICS):
        return
    with transaction.atomic():
        row = Delivery.objects.create(
            event_key=event.message.event_key,
            topic=event.message.topic,
            handler=event.handler,
            attempt=event.message.attempt,
            worker=event.worker,
        )
    if row.pk % 100 == 0:
        Delivery.objects.filter(pk__lte=row.pk - KEPT).delete()
