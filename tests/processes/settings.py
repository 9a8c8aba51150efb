"""What a dispatcher process of these tests needs, and no more, so that it starts quickly.

PRETEND_CLOCK      seconds by which this process believes the time to be later
PRETEND_IDENTITY   a host name; with it, the process id is 1, as in a container
DATABASE_CHANGES   by alias, what differs from the default database: JSON; OPTIONS are added to what is there
OUTBOX_OPTIONS     further options of the outbox: JSON
"""

import copy
import json
import os
import socket
import time

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "outbox",
    "tests.testapp",
    "tests.processes.work",
]
MIDDLEWARE = []
ROOT_URLCONF = "tests.processes.urls"
OUTBOX = {"BACKOFF_BASE": 0.2, "BACKOFF_FACTOR": 1.0, **json.loads(os.environ.get("OUTBOX_OPTIONS", "{}"))}

for _alias, _changes in json.loads(os.environ.get("DATABASE_CHANGES", "{}")).items():
    _database = DATABASES.setdefault(_alias, copy.deepcopy(DATABASES["default"]))  # noqa: F405
    _database.update({name: value for name, value in _changes.items() if name != "OPTIONS"})
    _database["OPTIONS"].update(_changes.get("OPTIONS", {}))

if "PRETEND_CLOCK" in os.environ:
    _offset = float(os.environ["PRETEND_CLOCK"])
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _offset
    time.time_ns = lambda: _time_ns() + int(_offset * 1e9)

if "PRETEND_IDENTITY" in os.environ:
    os.getpid = lambda: 1
    socket.gethostname = lambda: os.environ["PRETEND_IDENTITY"]
