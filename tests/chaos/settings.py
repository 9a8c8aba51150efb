"""Settings of the writers and dispatchers of a run; the database comes from DATABASE_URL."""

import os
import select
import time

from tests.processes.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "outbox",
    "tests.testapp",
    "tests.chaos",
]
OUTBOX = {
    "BACKOFF_BASE": 0.3,
    "BACKOFF_FACTOR": 1.5,
    "BACKOFF_CAP": 2.0,
    "BREAKER_PAUSE": 0.5,
    "BREAKER_PAUSE_CAP": 2.0,
    "TIMEOUT": 60.0,
    "SWEEP_EVERY": 0.0,  # nothing may depend on it
    "PRUNE_EVERY": 0.0,
}

if "FAKETIME" in os.environ:
    # libfaketime 0.9.10 answers the clock_nanosleep of an unfaked monotonic clock with "invalid argument".
    time.sleep = lambda seconds: select.select([], [], [], seconds) and None
