"""One child process, as its parent holds it: start it, hear what it tells, ask it to stop, kill it, reap it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from outbox.lifeline import STOP, VARIABLE

# What a stop by hand, or by a service manager, sends to the whole group.
STOPS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


class Child:
    """A new interpreter (never a fork: threads and connections do not survive one) with a pipe to this process.

    ``news`` is the latest of everything that it told. Times are monotonic.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.news: dict[str, Any] = {}
        self.born = self.heard_at = time.monotonic()
        self.told = False
        self._pipe, theirs = connection.Pipe()
        try:
            self._process = _start(command, theirs)
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        self._open = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self) -> None:
        """Take in what it has told meanwhile."""
        try:
            while self._open and self._pipe.poll():
                self.news.update(json.loads(self._pipe.recv_bytes()))
                self.heard_at, self.told = time.monotonic(), True
        except (EOFError, OSError, ValueError):  # it has ended, or foreign code wrote into its end
            self._open = False

    def ask_to_stop(self) -> None:
        with suppress(OSError):  # it is gone
            self._pipe.send_bytes(STOP)

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Then it is reaped, and has told its last."""
        code = self._process.poll()
        if code is not None:
            self.listen()
        return code

    def close(self) -> None:
        self._pipe.close()


def _start(command: Sequence[str], theirs: Any) -> subprocess.Popen[bytes]:
    number = theirs.fileno()
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {**os.environ, VARIABLE: str(number)}}
    if sys.platform == "win32":
        os.set_handle_inheritable(number, True)
        startup = subprocess.STARTUPINFO()
        startup.lpAttributeList = {"handle_list": [number]}
        return subprocess.Popen(command, startupinfo=startup, close_fds=True, **options)  # noqa: S603 - our own command
    return subprocess.Popen(command, pass_fds=[number], **options)  # noqa: S603 - our own command line


def how(code: int) -> str:
    """An exit code in words: which signal it was."""
    if code >= 0:
        return f"exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def was_told_to_stop(code: int) -> bool:
    """Whether a process that had no time yet to care for signals was ended by one that asks for a stop."""
    return -code in STOPS or code - 128 in STOPS
