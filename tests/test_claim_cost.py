"""What a claim, a renewal and a settlement read depends on the batch alone, not on what else lies in the table.

Measured is work, not time: buffers on PostgreSQL, rows and index entries on MariaDB, steps of the virtual machine on
SQLite; once in a table that holds the batch alone, and once among thousands of other messages.
"""

import json
from contextlib import contextmanager
from itertools import count

import pytest
from django.db import connection, transaction

from outbox import lanes
from outbox.database import server_now
from outbox.handlers import registry
from outbox.leases import renew, settle
from outbox.models import Message, State
from tests.specimens import check_invariants, claimer, hand_over, put, specimens, verdict
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]

CROWD = 3000
BATCH = 20
DAY = 86_400 * 10**6
_numbers = count(1)


class Meter:
    """What the default connection made the database do."""

    def __init__(self):
        self.work = 0

    @contextmanager
    def running(self):
        run = {"postgresql": self._buffers, "mysql": self._handler_calls, "sqlite": self._steps}[connection.vendor]
        with run():
            yield self

    @contextmanager
    def _steps(self):
        def tick():
            self.work += 1

        connection.ensure_connection()
        connection.connection.set_progress_handler(tick, 10)
        try:
            yield
        finally:
            connection.connection.set_progress_handler(None, 0)

    @contextmanager
    def _handler_calls(self):
        def calls():
            with connection.connection.cursor() as cursor:
                cursor.execute("SHOW SESSION STATUS LIKE 'Handler%'")
                found = dict(cursor.fetchall())
            return sum(int(found[name]) for name in found if "_read_" in name or name.endswith("icp_attempts"))

        before = calls()
        yield
        self.work += calls() - before

    @contextmanager
    def _buffers(self):
        """Explain each statement first, and undo it where that has changed something."""

        def wrapper(execute, sql, params, many, context):
            if sql.split()[0] in ("SELECT", "UPDATE") and "outbox_message" in sql:
                with connection.connection.cursor() as cursor:
                    undo = connection.in_atomic_block
                    if undo:
                        cursor.execute("SAVEPOINT explained")
                    cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params or None)
                    plan = cursor.fetchone()[0]
                    if undo:
                        cursor.execute("ROLLBACK TO SAVEPOINT explained")
                    plan = json.loads(plan) if isinstance(plan, str) else plan
                    self.work += sum(plan[0]["Plan"][f"Shared {kind} Blocks"] for kind in ("Hit", "Read"))
            return execute(sql, params, many, context)

        with connection.execute_wrapper(wrapper):
            yield


def fill(number, name="mail", due_in=0, **fields):
    """Thousands of messages, written in bulk; a callable field gets the message's number. ``due_in`` is in µs."""
    now = server_now("default")
    handler = registry.by_name(name)
    common = {"topic": name, "handler": name, "route": name, "payload": {}, "digest": b"", "staged_at": now}
    usual = Message(**common)
    columns = [field for field in Message._meta.concrete_fields if not field.primary_key]
    prepared = {field.attname: prepare(field, getattr(usual, field.attname)) for field in columns}
    rows = []
    for n in range(number):
        values = {"event_key": f"crowd-{next(_numbers)}", "ordering_key": None, "due_at": now + due_in + n} | fields
        values = {key: value(n) if callable(value) else value for key, value in values.items()}
        in_lane = handler and values.get("state", State.PENDING) != State.DELIVERED
        values["lane"] = handler.lane(values["ordering_key"]) if in_lane else None
        own = {key: prepare(Message._meta.get_field(key), value) for key, value in values.items()}
        rows.append(list((prepared | own).values()))
    names = ", ".join(connection.ops.quote_name(field.column) for field in columns)
    places = ", ".join(["%s"] * len(columns))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO outbox_message ({names}) VALUES ({places})", rows)


def prepare(field, value):
    return field.get_db_prep_save(value, connection)


def blocked_heads(number):
    """Dead messages that block their lanes."""
    fill(number, "stock", state=State.DEAD, due_at=None, settled_at=0, ordering_key=str)


CROWDS = {
    "backlog": lambda: fill(CROWD, due_in=-DAY // 2),
    "history": lambda: fill(CROWD, state=State.DELIVERED, due_at=None, settled_at=1),
    "scheduled": lambda: fill(CROWD, due_in=DAY),
    "retrying": lambda: fill(CROWD, "account", due_in=DAY, spent=1, attempt=1, ordering_key=str),
    "foreign topics": lambda: fill(CROWD, "unknown", due_at=1),
    "a busy lane": lambda: (
        fill(1, "account", ordering_key="busy", due_in=DAY),
        fill(CROWD, "account", ordering_key="busy", due_at=None),
    ),
    "blocked lanes": lambda: (
        blocked_heads(50),
        fill(CROWD, "stock", ordering_key=lambda n: str(n % 50), due_at=None),
    ),
    "a lane that is frequent, but only behind a long history": lambda: (
        fill(CROWD, state=State.DELIVERED, due_at=None, settled_at=1),
        fill(CROWD, "account", ordering_key="a", due_at=None),
    ),
    "the history of a busy lane": lambda: fill(
        CROWD, "account", state=State.DELIVERED, due_at=None, settled_at=1, ordering_key="a"
    ),
}


# Remove what earlier tests deleted; count what is there. Nobody does either for SQLite.
TIDY = {"postgresql": "VACUUM outbox_message"}
COUNT = {"postgresql": "ANALYZE outbox_message", "mysql": "ANALYZE TABLE outbox_message"}


def do(statements):
    if connection.vendor in statements:
        with connection.cursor() as cursor:
            cursor.execute(statements[connection.vendor])


def batch():
    """What is claimed: older than any crowd, half of it in lanes with followers."""
    now = server_now("default")
    for n in range(BATCH // 2):
        put("mail", due_at=now - DAY + n)
        put("account", "a" if n == 0 else f"key-{n}", due_at=now - DAY + n)
        put("account", "a" if n == 0 else f"key-{n}", due_at=now - DAY + 100 + n)


def path():
    """The work of each stop on the way of a batch."""
    own, work = claimer(), {}
    own.claim(0, seconds=60)
    with Meter().running() as meter:
        claim = own.claim(BATCH, seconds=60)
    work["claim"] = meter.work
    assert len(claim.leases) == BATCH
    with Meter().running() as meter:
        renew("default", claim.leases, 60)
    work["renew"] = meter.work
    with Meter().running() as meter:
        results = settle("default", [verdict(lease) for lease in claim.leases], hand_over=hand_over)
    work["settle"] = meter.work
    after = [each.next for each in results if each.next]
    assert len(after) == BATCH // 2
    with Meter().running() as meter:
        settle("default", [verdict(lease, "release") for lease in after])
    work["release"] = meter.work
    return work


@pytest.mark.parametrize("statistics", ["fresh", pytest.param("stale", marks=pytest.mark.slow)])
@pytest.mark.parametrize("crowd", sorted(CROWDS))
def test_the_cost_of_the_path_is_the_cost_of_the_batch(crowd, statistics):
    """Invariant 4, P11, scenarios 41 and 50, R9."""
    do(TIDY)
    batch()
    do(COUNT)
    alone = path()
    Message.objects.all().delete()
    do(TIDY)
    CROWDS[crowd]()
    batch()
    if statistics == "fresh":
        do(COUNT)
    among = path()
    check_invariants()
    for stop, work in among.items():
        assert work <= 3 * alone[stop] + 50, (stop, alone, among)


@pytest.mark.parametrize("crowd", [name for name in sorted(CROWDS) if name != "backlog"])
def test_an_empty_look_costs_nothing_however_much_lies_in_the_table(crowd):
    """P11: 200,000 messages due tomorrow and none now cost 287 ms elsewhere."""
    do(TIDY)
    CROWDS[crowd]()
    do(COUNT)
    own = claimer()
    with Meter().running() as meter:
        assert own.claim(100, seconds=60).leases == []
    assert meter.work <= 100


def test_followers_of_a_blocked_head_are_parked_once_in_bounded_steps(monkeypatch):
    """P11: a dead head with thousands of followers; each claim parks what it saw and a window, and then never again."""
    monkeypatch.setattr(lanes, "WINDOW", 500)
    blocked_heads(1)
    fill(CROWD, "stock", ordering_key="0")
    own, most = claimer(), 0
    while Message.objects.due().exists():
        with Meter().running() as meter:
            claim = own.claim(BATCH, seconds=60)
        assert claim.leases == []
        assert claim.more or not Message.objects.due().exists()
        most = max(most, meter.work)
    check_invariants()
    assert most <= 20_000
    wait_until(lambda: cost_of_nothing(own) <= 100)  # the database clears away the old index entries in its own time


def cost_of_nothing(own):
    with Meter().running() as meter:
        assert not own.claim(BATCH, seconds=60).more
    return meter.work


def test_a_crowded_lane_does_not_hide_the_others():
    blocked_heads(1)
    fill(CROWD, "stock", ordering_key="0")
    other = put("account", "z")
    own = claimer()
    for _ in range(CROWD // 400):
        if leases := own.claim(BATCH, seconds=60).leases:
            break
    assert [lease.id for lease in leases] == [other.pk]
