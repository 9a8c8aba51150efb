"""What an orchestrator asks of a process, over HTTP or by a file: does it live, is it ready, has it started?

The answers come from what the loops saw; no request makes a statement, and none can disturb the work.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from outbox.health import Verdict

logger = logging.getLogger("outbox")

ANSWERS = {"/livez": "live", "/readyz": "ready", "/startupz": "started"}
IMPATIENCE = 5.0  # seconds that a client may take for its request
TOUCH_EVERY = 1.0  # seconds


class Probes:
    """A small HTTP server on threads of its own. Raises OSError when it cannot listen; port 0 takes a free one."""

    def __init__(self, host: str, port: int, verdict: Callable[[], Verdict]) -> None:
        self._server = _Server(host, port, verdict)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="outbox-probes", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Not `HTTPServer`, which asks the name service for its own name before it listens."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, verdict: Callable[[], Verdict]) -> None:
        self.verdict = verdict
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A probe went away before its answer.", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = IMPATIENCE
    server_version = "outbox"
    sys_version = ""

    def do_GET(self) -> None:
        name = ANSWERS.get(self.path.partition("?")[0])
        if name is None:
            self._answer(404, {"ok": False, "known": sorted(ANSWERS)})
            return
        try:
            verdict = self.server.verdict()
        except Exception:
            logger.exception("A probe could not be answered.")
            self._answer(500, {"ok": False})
            return
        problems = [{"problem": each.kind, "where": each.where, "text": each.text} for each in getattr(verdict, name)]
        self._answer(503 if problems else 200, {"ok": not problems, "problems": problems, "seen": verdict.details})

    do_HEAD = do_GET

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        logger.debug("Probe: %s", format % args)


class LivenessFile:
    """A file that is touched once a second while the process lives. Raises OSError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touch_at = 0.0
        self._complained = False
        path.touch()

    def note(self, verdict: Callable[[], Verdict]) -> None:
        """Touch it, if it is time, and if that is true."""
        now = time.monotonic()
        if now < self._touch_at:
            return
        self._touch_at = now + TOUCH_EVERY
        if not verdict().is_live:
            return
        try:
            self._path.touch()
        except OSError as error:
            if not self._complained:
                logger.error("The liveness file cannot be touched: %s", error)
            self._complained = True

    def close(self) -> None:
        """Take it away: nobody lives here any more."""
        with suppress(OSError):
            self._path.unlink()
