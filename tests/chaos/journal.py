"""The journal, outside of all databases: one JSON object per line, each line one write, so it survives a SIGKILL."""

import json
import os
import time
from pathlib import Path

VARIABLE = "CHAOS_JOURNAL"
LINES, TABLES = "journal", "tables.json"  # files in the directory of a run


def note(event, **parts):
    """Append a line. ``at`` is the monotonic clock, which all processes of a machine share and libfaketime leaves."""
    line = json.dumps({"event": event, "at": time.monotonic(), **parts}) + "\n"
    descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path, event=None):
    """All lines, or those of one event, in the order in which they were written."""
    path = Path(path)
    beginning = "" if event is None else f'{{"event": "{event}"'
    if not path.exists():
        return []
    with path.open() as lines:
        return [json.loads(line) for line in lines if line.startswith(beginning)]
