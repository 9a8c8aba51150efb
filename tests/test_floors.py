"""Where looks begin: past what an old snapshot keeps in the index, and never past a message for good."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from outbox.database import walks_dead_entries
from outbox.leases import floors
from outbox.models import Message
from outbox.operations import make_due, requeue
from tests import rows
from tests.specimens import claimer, put, specimens

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]

WIDTH = 20  # of a look at one route


@pytest.fixture
def backlog():
    """Three full looks of one handler's messages, each due a second after the other."""
    return [put("mail", due_at=rows.ago(1000 - number)) for number in range(3 * WIDTH)]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(floors, "monotonic", lambda: Clock.now)
    return Clock


def ids(claim):
    return [lease.id for lease in claim.leases]


def looks(queries):
    return [query["sql"] for query in queries if query["sql"].startswith("SELECT") and "due_at" in query["sql"]]


def test_a_look_that_found_enough_says_where_the_next_one_begins(backlog, clock):
    worker = claimer()
    assert ids(worker.claim(WIDTH, seconds=60)) == [row.pk for row in backlog[:WIDTH]]
    with CaptureQueriesContext(connection) as queries:
        assert ids(worker.claim(WIDTH, seconds=60)) == [row.pk for row in backlog[WIDTH : 2 * WIDTH]]
    assert any(">= (w.due_at, w.id)" in sql for sql in looks(queries)) == walks_dead_entries(connection)


def test_an_idle_look_is_one_statement_also_after_a_backlog(backlog, clock):
    worker = claimer()
    while worker.claim(WIDTH, seconds=60).leases:
        pass
    with CaptureQueriesContext(connection) as queries:
        assert not worker.claim(WIDTH, seconds=60).leases
    assert len(queries) == 1


def late(first):
    """Committed now, by a transaction that began long ago."""
    return put("mail", due_at=first.due_at - timedelta(hours=1)).pk


def same_instant(first):
    """Another session took an id earlier, and commits later."""
    pk = first.pk + 1_000_000
    Message.objects.filter(pk=put("mail", due_at=first.due_at).pk).update(id=pk)
    return pk


def made_due(first):
    row = put("mail", due_at=rows.ahead(3600))
    make_due("default", [row.pk])
    return row.pk


def requeued(first):
    row = put("mail", state="dead", due_at=None, settled_at=rows.ago(5), reason="exhausted")
    requeue("default", [row.pk])
    return row.pk


def clock_set_back(first):
    """The server's clock was an hour ahead when the backlog was staged, and is right again."""
    return put("mail", due_at=first.due_at - timedelta(hours=1), staged_at=first.due_at - timedelta(hours=1)).pk


NEWCOMERS = [late, same_instant, made_due, requeued, clock_set_back]


@pytest.mark.parametrize("newcomer", NEWCOMERS, ids=lambda each: each.__name__)
def test_a_drain_leaves_nothing_before_the_floor(backlog, clock, newcomer):
    """The clock of the floor stands still here: it is dropped because a look came back short."""
    worker = claimer()
    got = ids(worker.claim(WIDTH, seconds=60))
    extra = newcomer(backlog[0])
    while leases := ids(worker.claim(WIDTH, seconds=60)):
        got += leases
    assert sorted(got) == sorted([*(row.pk for row in backlog), extra])


def test_a_look_from_the_floor_that_finds_nothing_looks_before_it_at_once(backlog, clock):
    worker = claimer()
    for _ in range(3):
        assert len(ids(worker.claim(WIDTH, seconds=60))) == WIDTH
    extra = late(backlog[0])
    assert ids(worker.claim(WIDTH, seconds=60)) == [extra]


def test_while_the_backlog_lasts_a_late_message_waits_for_the_floor_to_be_dropped(backlog, clock):
    worker = claimer()
    worker.claim(1, seconds=60)
    extra = late(backlog[0])
    first = ids(worker.claim(1, seconds=60))
    assert first == ([backlog[1].pk] if walks_dead_entries(connection) else [extra])
    clock.now += floors.KEPT
    second = ids(worker.claim(1, seconds=60))
    assert second == ([extra] if walks_dead_entries(connection) else [backlog[1].pk])


def test_floors_that_are_renewed_are_dropped_all_the_same(backlog, clock):
    """Each full look sets them anew; the time runs from the first one."""
    worker = claimer()
    worker.claim(1, seconds=60)
    extra = late(backlog[0])
    seen = []
    for _ in range(4):
        clock.now += floors.KEPT / 3
        seen += ids(worker.claim(1, seconds=60))
    assert extra in seen


def test_what_was_seen_and_could_not_be_had_stays_behind_the_floor(backlog, clock):
    found = floors.Floors()
    look = ("default", "outbox_message", ["mail"], WIDTH)
    assert found.look(*look)[0][1] == backlog[0].pk
    Message.objects.filter(pk__in=[row.pk for row in backlog[1:10]]).update(due_at=None)  # taken; the first was locked
    assert found.look(*look)[0][1] == backlog[0].pk


def test_the_floor_of_one_handler_hides_nothing_of_another(backlog, clock):
    worker = claimer()
    worker.claim(WIDTH, seconds=60)
    other = put("sms", due_at=rows.ago(5000))
    assert other.pk in ids(worker.claim(2 * WIDTH, seconds=60))
