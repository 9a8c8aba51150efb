"""The pipe between a supervised process and its parent, as the child holds it.

The child tells how it is, once a second and at its end; the parent asks it to stop. The end of the pipe means that the
parent died. Lines are JSON objects.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

logger = logging.getLogger("outbox")

VARIABLE = "OUTBOX_LIFELINE"  # the number of the child's end, in its environment
TELL_EVERY = 1.0  # seconds
STOP = b"stop"


class Lifeline:
    """The child's end. ``stopped`` is set when the parent asks for a stop, or died."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.stopped = threading.Event()
        self._pipe = pipe
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @classmethod
    def inherited(cls) -> Lifeline | None:
        """The one that the parent of this process has left to it; None: this process is nobody's child.

        Processes that handlers start shall not take themselves for children, nor keep the pipe open.
        """
        number = os.environ.pop(VARIABLE, "")
        if not number:
            return None
        if sys.platform == "win32":
            os.set_handle_inheritable(int(number), False)
            return cls(connection.PipeConnection(int(number)))
        os.set_inheritable(int(number), False)
        return cls(connection.Connection(int(number)))

    def watch(self, report: Callable[[], dict[str, Any]]) -> None:
        """From now on listen to the parent, and tell it what ``report`` returns once a second."""
        threading.Thread(target=self._listen, name="outbox-lifeline", daemon=True).start()
        threading.Thread(target=self._tell_regularly, args=(report,), name="outbox-report", daemon=True).start()

    def tell(self, **news: Any) -> None:
        """Tell the parent something now; whether it is there to hear it or not."""
        try:
            with self._lock:
                self._pipe.send_bytes(json.dumps(news).encode())
        except OSError:
            self.stopped.set()

    def end(self, **news: Any) -> None:
        """Tell the last."""
        self._ended.set()
        self.tell(**news)

    def _listen(self) -> None:
        try:
            while self._pipe.recv_bytes() != STOP:
                pass
        except (EOFError, OSError):
            logger.warning("The parent process is gone; this one stops.")
        self.stopped.set()

    def _tell_regularly(self, report: Callable[[], dict[str, Any]]) -> None:
        while not self._ended.is_set():
            try:
                self.tell(**report())
            except Exception:
                logger.exception("The state of this process could not be told.")
            self._ended.wait(TELL_EVERY)
