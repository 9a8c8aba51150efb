"""Rows in each place of the state diagram, as a long history would have left them; only what matters is named."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

from django.db import connections
from model_bakery import baker

from outbox.database import server_now
from outbox.fields import from_micros
from outbox.models import Breaker, Dispatcher, Message, State

_numbers = count(1)


def now(using="default"):
    return from_micros(server_now(using))


def ago(seconds, using="default"):
    return now(using) - timedelta(seconds=seconds)


def ahead(seconds, using="default"):
    return ago(-seconds, using)


def message(using="default", **fields):
    """A pending message that is due, unless the fields say otherwise."""
    topic = fields.setdefault("topic", "order.paid")
    handler = fields.setdefault("handler", topic)
    defaults = {
        "event_key": f"key-{next(_numbers)}",
        "route": handler,
        "digest": b"",
        "payload": {"n": 1},
        "headers": {"trace": "t"},
        "staged_at": ago(600, using),
        "due_at": ago(60, using),
    }
    return baker.make(Message, _using=using, **(defaults | fields))


def scheduled(**fields):
    return message(**({"due_at": ahead(3600)} | fields))


def retrying(**fields):
    error = {"error_type": "builtins.TimeoutError", "error_text": "no answer"}
    return message(**({"due_at": ahead(3600), "attempt": 2, "spent": 2} | error | fields))


def leased(**fields):
    lease = {"due_at": ahead(3600), "lease_token": 7, "leased_by": "worker-1", "leased_at": ago(1)}
    if "lane" in fields:
        lease["holder"] = fields["lane"]
    return message(**(lease | {"attempt": 1, "spent": 1} | fields))


def lapsed(**fields):
    return leased(**({"due_at": ago(5)} | fields))


def parked(lane, **fields):
    return message(**({"lane": lane, "due_at": None} | fields))


def settled(state, age=0.0, **fields):
    return message(**({"state": state, "due_at": None, "settled_at": ago(age), "attempt": 1, "spent": 1} | fields))


def delivered(age=0.0, **fields):
    return settled(State.DELIVERED, age, **fields)


def discarded(age=0.0, **fields):
    return settled(State.DISCARDED, age, **({"reason": "handler"} | fields))


def dead(age=0.0, **fields):
    error = {"reason": "exhausted", "error_type": "builtins.ValueError", "error_text": "no such customer"}
    return settled(State.DEAD, age, **(error | fields))


def dispatcher(using="default", *, seen=0.0, lost_in=60.0, **fields):
    """The report of a dispatcher, which is believed lost in so many seconds (negative: since)."""
    return baker.make(
        Dispatcher,
        _using=using,
        **(
            {
                "name": f"host:{next(_numbers)}",
                "started_at": ago(600, using),
                "seen_at": ago(seen, using),
                "lost_at": ahead(lost_in, using),
                "handlers": ["order.paid"],
            }
            | fields
        ),
    )


def breaker(handler="order.paid", *, since=120.0, probe_in=30.0, using="default", **fields):
    """The open breaker of a handler."""
    error = {"error_type": "outbox.exceptions.Unavailable", "error_text": "connection refused"}
    times = {"opened_at": ago(since, using), "probe_at": ahead(probe_in, using)}
    return baker.make(Breaker, _using=using, **({"handler": handler} | error | times | fields))


def at_once(*functions):
    """Run functions in threads that start together, and return their results in order."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        try:
            barrier.wait(10)
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(60) for each in [pool.submit(run, function) for function in functions]]
