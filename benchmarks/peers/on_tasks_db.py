"""django-tasks-db: its worker command in batch mode, without pauses."""

from django.core.management import call_command
from django.db import connection, transaction
from driving import Drive

drive = Drive("db_worker --batch --interval 0 --no-startup-delay")
drive.configure_django("django_tasks_db", TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}})

import tasks_of_tasks_db  # noqa: E402 - only after the setup

with drive.timed("stage"), transaction.atomic():
    for number in range(drive.messages):
        tasks_of_tasks_db.noop.enqueue(order_id=number)
with connection.cursor() as cursor:
    cursor.execute("ANALYZE")
with drive.timed("drain"):
    call_command("db_worker", batch=True, interval=0, startup_delay=False, verbosity=0)
drive.handled = tasks_of_tasks_db.handled
drive.report()
