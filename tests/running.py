"""Dispatchers in threads of the test's own process, and the messages for them."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.db import connections, transaction

from outbox import stage
from outbox.dispatcher import Dispatcher
from outbox.models import Attempt, Message
from outbox.plans import Plan
from outbox.registry import registry

QUICK = {"concurrency": 4, "lease": 5.0, "poll": 0.05, "grace": 5.0, "batch": 20}
DEADLINE = 30.0  # seconds that nothing below really takes


def plan(**changes):
    return Plan(**({"using": "default", "handlers": registry.handlers(), **QUICK} | changes))


def drain(*, mode="drain", **changes):
    """Let a dispatcher deliver what is due, in a thread of its own; return it once it has ended."""
    with dispatching(mode=mode, stop=False, **changes) as dispatcher:
        pass
    return dispatcher


@contextmanager
def dispatching(*, stop=True, **changes):
    """A dispatcher that works meanwhile; at the end it is stopped, and its threads have ended."""
    dispatcher = Dispatcher(plan(**changes))
    thread = threading.Thread(target=dispatcher.run, name="dispatcher")
    thread.start()
    try:
        yield dispatcher
    except BaseException:
        dispatcher.stop()
        raise
    finally:
        if stop:
            dispatcher.stop()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the dispatcher does not stop"


def put(topic, payload=None, count=1, using="default", **options):
    """Stage messages and commit; returns the one row, or the rows in order."""
    with transaction.atomic(using=using):
        ids = [pk for _ in range(count) for pk in stage(topic, payload, using=using, **options).ids]
    found = [Message.objects.using(using).get(pk=pk) for pk in ids]
    return found[0] if count == 1 and len(found) == 1 else found


def fresh(row):
    return Message.objects.using(row._state.db).get(pk=row.pk)


def state(row):
    return fresh(row).state


def outcomes(row):
    """How the recorded attempts of a message ended, in order."""
    rows = Attempt.objects.using(row._state.db).filter(message_id=row.pk).order_by("id")
    return list(rows.values_list("outcome", flat=True))


def settled(*found):
    """Whether all these messages are settled, for `wait_until`."""
    return all(fresh(each).state != "pending" for each in found)


@dataclass
class Gate:
    """A handler that tells when it is entered and returns when it is let."""

    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    open: threading.Event = field(default_factory=threading.Event)
    runs: list = field(default_factory=list)
    now: int = 0
    most: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, message):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.runs.append(message)
        self.entered.release()
        try:
            assert self.open.wait(DEADLINE), "nobody opened the gate"
        finally:
            with self._lock:
                self.now -= 1

    def wait(self, count=1):
        for _ in range(count):
            assert self.entered.acquire(timeout=DEADLINE), "the handler was not started"


def sessions():
    """How many other sessions the test database has, by its own account; None where it keeps none."""
    connection = connections["default"]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        elif connection.vendor == "mysql":
            cursor.execute(
                "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
        else:
            return None
        return cursor.fetchone()[0]


def cut_sessions():
    """End all other sessions of the test database, as a restart of its server does; returns how many there were."""
    connection = connections["default"]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return cursor.fetchone()[0]
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        ids = [pk for (pk,) in cursor.fetchall()]
        for pk in ids:
            try:
                cursor.execute(f"KILL {pk}")
            except Exception:
                pass  # it went by itself
        return len(ids)
