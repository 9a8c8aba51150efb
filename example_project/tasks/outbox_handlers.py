"""The relay: one handler per route, all made by one function."""

from __future__ import annotations

import uuid

from example_project.tasks.engine import engine
from example_project.tasks.routes import ROUTES
from outbox import RetryPolicy, handler

# 2, 4, 8 … at most 300 seconds; dead at the tenth failure.
PATIENCE = RetryPolicy(max_attempts=10, base=2, factor=2, cap=300, jitter=False)


def relay(route):
    def deliver(message):
        task = route(message.payload)
        if task is None:
            return
        trace = task.trace_id or message.headers.get("trace_id") or message.payload.get("traceId") or uuid.uuid4().hex
        engine().enqueue(task, idempotency_key=message.event_key, trace_id=trace)

    return deliver


for topic, route in ROUTES.items():
    handler(topic, retry=PATIENCE)(relay(route))
