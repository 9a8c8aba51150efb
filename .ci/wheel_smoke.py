"""Use the installed wheel as a stranger would: a new project, one handler, one message delivered.

Run with the interpreter that has the wheel, in an empty directory.
"""

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = """
SECRET_KEY = "smoke"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "outbox", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "smoke.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
}
USE_TZ = True
"""

HANDLERS = """
from pathlib import Path

from outbox import handler


@handler("order.paid")
def write_receipt(message):
    Path("receipt.txt").write_text(f"{message.topic} {message.payload['order_id']}")
"""

STAGE = """
import django
from django.db import transaction

django.setup()

from outbox import stage

with transaction.atomic():
    assert stage("order.paid", {"order_id": 7}, event_key="order:7:paid").created
"""

ASSERT_DELIVERED = """
import django

django.setup()

from outbox.models import Message

message = Message.objects.get()
assert message.state == "delivered", message.state
"""


def python(*arguments):
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "project", "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, *arguments], check=True, env=environment, timeout=60)


shop = Path("shop")
shop.mkdir()
Path("project.py").write_text(SETTINGS)
(shop / "__init__.py").write_text("")
(shop / "outbox_handlers.py").write_text(HANDLERS)

python("-m", "django", "check")
python("-m", "django", "migrate", "--verbosity", "0")
python("-c", STAGE)
python("-m", "django", "outbox_dispatch", "--drain")
python("-c", ASSERT_DELIVERED)
assert Path("receipt.txt").read_text() == "order.paid 7"
print("The installed wheel migrates, stages and delivers.")
