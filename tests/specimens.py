"""Handlers with telling names, the messages they deliver, and the verdicts on them, for the tests of the leases.

What a place is called and which rows may lie together in a lane stands in `outbox/lanes.py`; `check_invariants` insists
on it.
"""

from contextlib import contextmanager

import pytest
from django.db import OperationalError, connection

from outbox.database import ServerNow
from outbox.errors import ErrorRecord
from outbox.handlers import handler, registry
from outbox.leases import Claimer, Settlement, settle
from outbox.models import Message, Outcome, Reason, State
from outbox.retries import RetryPolicy
from tests import rows

BACKOFF = 60.0  # seconds after each failure, exactly
BUDGET = 3

# name -> how it is registered
HANDLERS = {
    "mail": {"ordering": "none"},
    "sms": {"ordering": "none"},
    "account": {},  # ordered by key; a dead message does not stop its lane
    "stock": {"dead_head": "block"},
    "ledger": {"ordering": "topic"},
    "render": {"ordering": "none", "payload_versions": (1, 2), "aliases": ["thumbnail"]},
    "flaky": {"ordering": "none", "retry": RetryPolicy(max_attempts=BUDGET, base=BACKOFF)},  # with jitter
}


@pytest.fixture
def specimens():
    """The registry with these handlers alone."""
    with registry.isolated():
        for name, options in HANDLERS.items():
            policy = RetryPolicy(max_attempts=BUDGET, base=BACKOFF, factor=1, jitter=False)
            handler(name, **({"retry": policy} | options))(lambda message: None)
        yield registry


def put(name, key=None, **fields):
    """A due message of a handler, in the lane of its ordering key."""
    known = registry.by_name(name)
    defaults = {"topic": name, "ordering_key": key, "lane": known.lane(key) if known else None}
    return rows.message(**(defaults | fields))


def claimer(worker="worker", **options):
    return Claimer(using="default", worker=worker, **options)


def take(limit=100, seconds=60.0, handlers=None, **options):
    """What one claim of a fresh worker leases."""
    return claimer(handlers=handlers).claim(limit, seconds=seconds, **options).leases


def take_one(row, seconds=60.0):
    (lease,) = claimer().claim_only([row.pk], seconds=seconds)
    return lease


def fresh(row):
    return Message.objects.get(pk=row.pk)


def columns(row):
    """Everything that is stored of a message."""
    return Message.objects.filter(pk=row.pk).values().get()


def lapse(*messages):
    """Let leases run out, long ago."""
    Message.objects.filter(pk__in=[each.pk for each in messages]).update(due_at=rows.ago(900))


def in_seconds(instant):
    """How far an instant lies ahead of the database's clock."""
    return (instant - rows.now()).total_seconds()


# --- verdicts ---------------------------------------------------------------------------------------------------------

ERROR = ErrorRecord(type="builtins.ValueError", code="E42", text="no such customer", traceback="Traceback …")

VERDICTS = {
    "delivered": {"outcome": Outcome.DELIVERED, "state": State.DELIVERED, "duration": 0.5},
    "retry": {"outcome": Outcome.FAILED, "wait": BACKOFF, "error": ERROR, "duration": 0.5},
    "timeout": {"outcome": Outcome.TIMED_OUT, "wait": BACKOFF, "error": ERROR, "duration": 0.5},
    "dead": {"outcome": Outcome.BURIED, "state": State.DEAD, "reason": Reason.BURIED, "error": ERROR},
    "discarded": {"outcome": Outcome.DISCARDED, "state": State.DISCARDED, "reason": Reason.HANDLER, "error": ERROR},
    "snooze": {"outcome": Outcome.SNOOZED, "wait": 600.0, "refund": True},
    "unavailable": {"outcome": Outcome.UNAVAILABLE, "wait": BACKOFF, "refund": True, "error": ERROR},
    "release": {"outcome": Outcome.RELEASED, "refund": True},
    "interrupted": {"outcome": Outcome.INTERRUPTED, "refund": True},
}


def verdict(lease, name="delivered", **changes):
    return Settlement(lease=lease, **(VERDICTS[name] | changes))


def end(lease, name="delivered", **options):
    """Settle one lease; returns what became of it."""
    (settled,) = settle("default", [verdict(lease, name)], **options)
    return settled


def hand_over(lease):
    """For `settle`: the lane may go on here."""
    return True


# --- others -----------------------------------------------------------------------------------------------------------

rows_can_be_locked = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has one writer and no row locks: there is nothing to wait for"
)


@contextmanager
def locked_elsewhere(second_connection, *messages):
    """Somebody else's open transaction that has locked these rows."""
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        for row in messages:  # one by one: MariaDB may lock more than it returns
            cursor.execute("SELECT * FROM outbox_message WHERE id = %s FOR UPDATE", [row.pk])
    try:
        yield
    finally:
        other.rollback()


@contextmanager
def heard(signal):
    """The events that a signal sends meanwhile."""
    events = []

    def receive(sender, event, **_):
        events.append(event)

    signal.connect(receive)
    try:
        yield events
    finally:
        signal.disconnect(receive)


@contextmanager
def reply_lost(*, times=1):
    """COMMIT takes place, or a change outside of transactions, but its answer never arrives."""
    commit, left = connection.commit, [times]

    def die():
        if left[0]:
            left[0] -= 1
            connection.close()
            raise OperationalError("server closed the connection unexpectedly")

    def commit_and_die():
        commit()
        die()

    def change_and_die(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if sql.startswith(("UPDATE", "WITH")) and not connection.in_atomic_block:
            die()
        return result

    connection.commit = commit_and_die
    try:
        with connection.execute_wrapper(change_and_die):
            yield
    finally:
        del connection.commit


# --- invariants -------------------------------------------------------------------------------------------------------


def place(row, now):
    """Where a message of a lane is, by the table in ordering.md: the word, or what is wrong with it."""
    if row["lane"] is None or row["state"] in (State.DELIVERED, State.DISCARDED):
        return "gone"
    if row["state"] == State.DEAD:
        return "blocking"
    if row["due_at"] is None:
        return "parked"
    if row["due_at"] <= now:
        return "due"
    return "waiting" if row["lease_token"] is None else "leased"


ROW_RULES = {
    "has spent less than nothing": lambda row, where: row["spent"] < 0,
    "has a token and is never due": lambda row, where: row["lease_token"] is not None and row["due_at"] is None,
    "is settled, and still due or held": lambda row, where: (
        row["state"] != State.PENDING and {row["due_at"], row["lease_token"], row["holder"]} != {None}
    ),
    "is gone, and still in its lane": lambda row, where: (
        where == "gone" and row["state"] != State.PENDING and row["lane"] is not None
    ),
    "holds a lane that it is not leased in": lambda row, where: (
        row["holder"] is not None and (row["holder"] != row["lane"] or row["lease_token"] is None)
    ),
    "sleeps in no lane whose settlements could wake it": lambda row, where: (
        row["state"] == State.PENDING and row["lane"] is None and row["due_at"] is None
    ),
}
LANE_RULES = {
    "sleeps": lambda words: "parked" in words and not {"due", "leased", "waiting", "blocking"}.intersection(words),
    "has a sleeping head that nobody will wake": lambda words: (
        words[0] == "parked" and not {"due", "leased"}.intersection(words)
    ),
}


def broken_invariants(found, now):
    """What is wrong with these rows (dicts), as sentences; none when everything is legal."""
    places = {row["id"]: place(row, now) for row in found}
    wrong = [
        f"message {row['id']} {text}"
        for row in found
        for text, rule in ROW_RULES.items()
        if rule(row, places[row["id"]])
    ]
    by_lane = {}
    for row in sorted(found, key=lambda row: row["id"]):
        if places[row["id"]] != "gone":
            by_lane.setdefault(row["lane"], []).append(places[row["id"]])
    wrong += [
        f"lane {lane} {text}: {words}"
        for lane, words in by_lane.items()
        for text, rule in LANE_RULES.items()
        if rule(words)
    ]
    held = [row for row in found if row["lane"] is not None and row["lease_token"] is not None]
    for lane in {row["lane"] for row in held}:
        leases = [row for row in held if row["lane"] == lane]
        if len({row["lease_token"] for row in leases if places[row["id"]] == "leased"}) > 1:
            wrong.append(f"lane {lane} has the live leases of two claims: {leases}")
        marks = [row["lease_token"] for row in leases if row["holder"] is not None]
        if places[min(leases, key=lambda row: row["id"])["id"]] == "leased" and len(marks) != 1:
            wrong.append(f"lane {lane} is leased without being held: {leases}")
    return wrong


def check_invariants(using="default"):
    """Fail unless all that is committed is legal; one statement, so one moment."""
    names = ("id", "state", "lane", "holder", "lease_token", "due_at", "spent", "attempt", "lapses")
    found = list(Message.objects.using(using).annotate(clock=ServerNow()).values(*names, "clock"))
    wrong = broken_invariants(found, found[0]["clock"] if found else None)
    assert not wrong, "\n".join([*wrong, *map(str, found)])
