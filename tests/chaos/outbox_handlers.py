"""The handlers of a run, found like those of any project: they do what their message says, and note what they did."""

import os
import signal
import threading
import time

from django.db import Error, connection, transaction

from outbox import Bury, Discard, RetryPolicy, Snooze, Unavailable, handler, heartbeat, signals
from outbox.models import Message
from tests.chaos import plan, terms
from tests.chaos.journal import note
from tests.testapp.models import Effect

TICK = 0.2  # seconds between two looks at the clock
LATE = 0.7  # seconds between two such looks from which on this process was kept from running
BEGINNING = "CHAOS_BEGINNING"  # the monotonic time from which the plan counts
BASE_EXCEPTIONS = (SystemExit, KeyboardInterrupt, GeneratorExit)

_bursts = tuple(plan.bursts(terms.load()))


def look(message):
    """Note when this message was claimed, by the database's clock: what was visible then decides the lane's order."""
    try:
        mine = Message.objects.filter(pk=message.id, attempt=message.attempt)
        claimed = mine.values_list("leased_at", flat=True).first()
    except Error:
        if connection.in_atomic_block:
            raise
        connection.close()
        return
    if claimed is not None:
        note("claim", id=message.id, attempt=message.attempt, claimed=claimed.timestamp())


def fail(message, _):
    raise ValueError(f"attempt {message.attempt} fails")


def fail_badly(message, _):
    raise BASE_EXCEPTIONS[message.id % len(BASE_EXCEPTIONS)]("a handler of the chaos suite")


def snooze(message, _):
    raise Snooze(for_=0.3)


def bury(message, _):
    raise Bury("as planned")


def discard(message, _):
    raise Discard("as planned")


def unavailable(message, _):
    raise Unavailable("as planned", after=0.2)


STEPS = {
    "sleep": lambda message, seconds: time.sleep(seconds),
    "raise": fail,
    "false": lambda message, _: False,
    "base": fail_badly,
    "leak": lambda message, _: transaction.atomic().__enter__() and None,
    "close": lambda message, _: connection.close(),
    "snooze": snooze,
    "bury": bury,
    "discard": discard,
    "unavailable": unavailable,
    "kill": lambda message, _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda message, _: os._exit(1),
}


def step_of(message):
    """What to do at this attempt: the last step is done ever after."""
    if message.topic == "shaky" and is_down():
        return "unavailable", 0
    steps = message.payload["do"]
    return steps[min(message.attempt, len(steps)) - 1]


def is_down():
    now = time.monotonic() - float(os.environ[BEGINNING])
    return any(since <= now < until for since, until in _bursts)


def deliver(message):
    step, argument = step_of(message)
    me = {"id": message.id, "attempt": message.attempt, "pid": os.getpid()}
    note("start", **me, key=message.event_key, topic=message.topic, lane=message.ordering_key, step=step)
    result = "error"
    try:
        if terms.TOPICS[message.topic].lane:
            look(message)
        if terms.TOPICS[message.topic].atomic:
            Effect.objects.create(key=message.event_key, attempt=message.attempt)
        answer = STEPS[step](message, argument)
        result = "false" if answer is False else "ok"
    finally:
        note("end", **me, result=result, thread=threading.get_ident())
    return answer


for _topic, _options in terms.TOPICS.items():
    handler(
        _topic,
        ordering="key" if _options.lane else "none",
        atomic=_options.atomic,
        timeout=_options.timeout,
        retry=RetryPolicy(max_attempts=_options.budget, base=0.3, factor=1.5, cap=2.0),
    )(deliver)


# --- what dispatchers say that they settled and renewed ---------------------------------------------------------------


def tell(name, event):
    me = {"id": event.message.id, "attempt": event.message.attempt, "outcome": event.outcome}
    note(name, **me, worker=event.worker, pid=os.getpid())


def on_settled(sender, event, **_):
    tell("settled", event)


def on_lost(sender, event, **_):
    tell("refused", event)


for _signal in ("delivered", "retried", "snoozed", "buried", "discarded", "released"):
    getattr(signals, _signal).connect(on_settled)
signals.lease_lost.connect(on_lost)


def noted(renew):
    """Note what was renewed, with a moment before: none of these leases ends sooner than a lease after it."""

    def renew_and_note(using, leases, seconds):
        asked = time.monotonic()
        renewal = renew(using, leases, seconds)
        if renewal.renewed:
            held = [(lease.id, lease.attempt) for lease in renewal.renewed]
            note("renewed", pid=os.getpid(), asked=asked, seconds=seconds, leases=held)
        return renewal

    return renew_and_note


def watch_the_clock():
    """Note when this process did not run for long: frozen, or on a crowded machine."""
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        if now - before > LATE:
            note("late", pid=os.getpid(), since=before)
        before = now


heartbeat.renew = noted(heartbeat.renew)
threading.Thread(target=watch_the_clock, daemon=True).start()
