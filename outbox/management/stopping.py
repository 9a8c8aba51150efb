"""How a command is asked to stop: the first signal is noticed, the second one usually ends the process."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("outbox")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


def leave_at_once(number: int) -> None:
    os._exit(128 + number)


def ignore(_number: int) -> None:
    """In a child of a supervisor all signals count as one: Ctrl-C reaches the whole group; force comes as SIGKILL."""


class StopSignals:
    """Notices the first stop signal, and calls ``further`` with the next; outside the main thread neither.

    The handler only rings: what it interrupts may hold any lock.
    """

    def __init__(self, further: Callable[[int], None] = leave_at_once) -> None:
        self.seen = False
        self._further = further
        self._bell, self._button = socket.socketpair()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            logger.debug("Not in the main thread: the dispatcher takes no signals.")
            return self
        hangup = getattr(signal, "SIGHUP", None)  # ignored under nohup, and so it stays
        taken = [each for each in SIGNALS if each != hangup or signal.getsignal(each) != signal.SIG_IGN]
        self._former = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._bell.close()
        self._button.close()

    def wait(self, seconds: float) -> None:
        """Sleep, at most so long; a signal ends it."""
        if select.select([self._bell], [], [], seconds)[0]:
            self._bell.recv(1)

    def _take(self, number: int, _frame: object) -> None:
        if self.seen:
            self._further(number)
            return
        self.seen = True
        self._button.send(b"\0")
