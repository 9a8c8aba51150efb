"""The handlers of these tests, found like those of any project."""

import os

from tests.processes.jobs import register

if os.environ.get("BROKEN_DEPLOYMENT"):
    raise ImportError("a module that this deployment forgot")

register(without=os.environ.get("WITHOUT_TOPICS", "").split())
