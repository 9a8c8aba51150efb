"""django-celery-outbox: its relay, which hands the messages to a broker in memory."""

import logging
import os
import signal

import structlog
from django.db import connection, transaction
from driving import Drive

BATCH = 500

drive = Drive(f"relay with batch_size={BATCH}, broker in memory, logs from WARNING on")
drive.configure_django("django_celery_outbox", CELERY_OUTBOX_APP="app_of_celery_outbox.app")
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

from app_of_celery_outbox import app, noop  # noqa: E402 - only after the setup
from django_celery_outbox.relay import Relay, RelayConfig  # noqa: E402
from django_celery_outbox.signals import outbox_message_sent  # noqa: E402


def count(**sent: object) -> None:
    drive.handled += 1
    if drive.handled == drive.messages:
        os.kill(os.getpid(), signal.SIGTERM)  # the relay finishes its batch and returns


outbox_message_sent.connect(count)
with drive.timed("stage"), transaction.atomic():
    for number in range(drive.messages):
        noop.delay(number)
with connection.cursor() as cursor:
    cursor.execute("ANALYZE")
with drive.timed("drain"):
    Relay(app=app, config=RelayConfig.init(batch_size=BATCH, idle_time=0.0)).start()
drive.report()
