"""A proxy in front of a database server that cuts a connection at a chosen moment: around a COMMIT, for example."""

import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

COMMIT = re.compile(rb"\bcommit\b", re.IGNORECASE)
END = re.compile(rb"\b(commit|rollback|begin|autocommit\s*=\s*\d)\b", re.IGNORECASE)


@dataclass
class Cut:
    """What to cut: the end of a transaction in which ``pattern`` was said, or a statement outside that says it.

    With ``reply`` the server receives it, and its answer is thrown away; otherwise the server never hears of it.
    """

    pattern: re.Pattern
    reply: bool
    left: int
    done: int = 0
    said: list[bytes] = field(default_factory=list)


class Proxy:
    """Listens on ``port`` and forwards to another port of this machine."""

    def __init__(self, target):
        self.target = target
        self.cuts = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, pattern, *, reply, times=1):
        """Cut so many connections at this; returns the order, whose ``done`` counts."""
        order = Cut(re.compile(pattern, re.IGNORECASE | re.DOTALL), reply, times)
        with self._lock:
            self.cuts.append(order)
        return order

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client):
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        muted = threading.Event()
        answered = threading.Event()
        back = threading.Thread(target=self._back, args=[server, client, muted, answered], daemon=True)
        back.start()
        said = b""
        with suppress(OSError):
            while chunk := client.recv(1 << 20):
                said += chunk
                order = self._order(said, chunk)
                if order is not None:
                    if order.reply:
                        muted.set()
                        server.sendall(chunk)
                        answered.wait(10)
                    break
                if END.search(chunk):
                    said = chunk if not COMMIT.search(chunk) else b""
                server.sendall(chunk)
        for each in (client, server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _order(self, said, chunk):
        """The order that is to be carried out now, if any."""
        inside = re.search(rb"\bbegin\b|autocommit\s*=\s*0", said, re.IGNORECASE) is not None
        if inside and not COMMIT.search(chunk):
            return None
        with self._lock:
            for order in self.cuts:
                if order.left and order.pattern.search(said if inside else chunk):
                    order.left -= 1
                    order.done += 1
                    order.said.append(said)
                    return order
        return None

    def _back(self, server, client, muted, answered):
        with suppress(OSError):
            while chunk := server.recv(1 << 20):
                if muted.is_set():
                    answered.set()
                    return
                client.sendall(chunk)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
