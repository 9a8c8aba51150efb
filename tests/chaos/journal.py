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


class Running:
    """Who is executing what just now, as far as the journal tells: read on from call to call."""

    def __init__(self, path):
        self._path = Path(path)
        self._offset = 0
        self._open = {}  # (id, attempt) -> (start, pid)

    def since(self):
        """By process the start of its oldest execution."""
        with self._path.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if line.startswith((b'{"event": "start"', b'{"event": "end"')):
                    self._take(json.loads(line))
        found = {}
        for start, pid in self._open.values():
            found[pid] = min(start, found.get(pid, start))
        return found

    def _take(self, line):
        key = line["id"], line["attempt"]
        if line["event"] == "start":
            self._open[key] = line["at"], line["pid"]
        else:
            self._open.pop(key, None)
