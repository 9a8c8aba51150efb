"""A broker that refuses, or accepts and never answers: the handler ends each call by its timeout, and nobody dies."""

import socket
import threading
import time

import pytest

from outbox import RetryPolicy, Unavailable, breakers, handler
from outbox.models import Breaker, Message, State
from outbox.registry import registry
from tests.running import dispatching, fresh, put
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

CALL = 0.3  # seconds until a call gives up
MESSAGES = 50


class Broker:
    """A port on which nobody listens, on which calls are accepted and never answered, or on which all is well."""

    def __init__(self):
        self.received = []
        self.mood = "closed"
        self._server = socket.create_server(("127.0.0.1", 0), backlog=1)
        self.port = self._server.getsockname()[1]
        self._silent = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._server.settimeout(0.1)
        self._thread.start()

    def publish(self, message):
        """What the handler does. Raises OSError."""
        port = self.port if self.mood != "closed" else free_port()
        with socket.create_connection(("127.0.0.1", port), timeout=CALL) as call:
            call.sendall(message.event_key.encode() + b"\n")
            if call.recv(16) != b"confirmed":
                raise ConnectionError("the broker hung up")

    def close(self):
        self._ended.set()
        self._thread.join()
        for each in [self._server, *self._silent]:
            each.close()

    def _serve(self):
        while not self._ended.is_set():
            try:
                call, _ = self._server.accept()
            except TimeoutError:
                continue
            if self.mood == "silent":
                self._silent.append(call)
                continue
            with call:
                call.settimeout(5)
                self.received.append(call.makefile().readline().strip())
                call.sendall(b"confirmed")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def broker(settings, monkeypatch):
    settings.OUTBOX = {"BREAKER_PAUSE": 0.2, "BREAKER_PAUSE_CAP": 0.4}
    monkeypatch.setattr(breakers, "LOOK_EVERY", 0.1)
    with registry.isolated():
        broker = Broker()
        yield broker
        broker.close()


@pytest.mark.parametrize("mood", ["closed", pytest.param("silent", marks=pytest.mark.slow)])
def test_a_broker_that_is_down_delays_no_other_topic_and_loses_nothing(broker, mood):
    """Scenario 64."""
    broker.mood = mood
    others = []

    @handler("event", ordering="topic", max_attempts=2, retry=RetryPolicy(max_attempts=2, base=0.05, jitter=False))
    def publish(message):
        try:
            broker.publish(message)
        except OSError as error:
            raise Unavailable(str(error)) from error

    @handler("mail", ordering="none", max_attempts=2, retry=RetryPolicy(max_attempts=2, base=0.05, jitter=False))
    def publish_unordered(message):
        publish(message)

    handler("other", ordering="none")(lambda message: others.append(message.event_key))
    keys = [f"event:{number}" for number in range(MESSAGES)]
    for key in keys:
        put("event", event_key=key)
    put("mail", count=10)
    with dispatching(concurrency=4, grace=2):
        wait_until(Breaker.objects.exists)  # for the topic without order: in the other one a single message asks
        put("other", count=20)
        wait_until(lambda: len(others) == 20)
        began = time.monotonic()
    assert time.monotonic() - began < 2 + CALL + 5  # the stop is within the grace, and the last writes
    assert not Message.objects.exclude(state=State.PENDING).exclude(topic="other").exists()
    assert not Message.objects.filter(spent__gt=0).exclude(topic="other").exists()
    broker.mood = "well"
    with dispatching(concurrency=4):
        wait_until(lambda: not Message.objects.pending().exists())
    assert [key for key in broker.received if key.startswith("event:")] == keys
    assert len(broker.received) == MESSAGES + 10
    assert fresh(Message.objects.get(event_key="event:0")).state == State.DELIVERED
