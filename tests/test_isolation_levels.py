"""What holds for callers of each isolation level, and on connections that have it by default."""

import threading
from importlib import import_module
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, transaction

from outbox import handler, retention, stage
from outbox.database import code_of
from outbox.models import Attempt, Message
from tests import rows
from tests.running import drain, put
from tests.testapp.models import Order

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one level: transactions follow one another"),
]
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture(autouse=True)
def delivered(outbox_registry):
    seen = []
    handler("order.paid", ordering="key")(lambda message: seen.append(message.payload))
    return seen


def as_an_option(level):
    if connection.vendor == "mysql":
        return level.lower()
    # Numbers of their own in psycopg 2 and psycopg 3.
    return import_module("django.db.backends.postgresql.psycopg_any").IsolationLevel[level.replace(" ", "_")]


@pytest.fixture(params=LEVELS)
def level(request):
    """A level of isolation that this connection, and every new one, has by default."""
    options = connection.settings_dict["OPTIONS"]
    there = options.get("isolation_level")
    connection.close()
    options["isolation_level"] = as_an_option(request.param)
    yield request.param
    connection.close()
    options.pop("isolation_level")
    if there is not None:
        options["isolation_level"] = there


def meanwhile(function):
    """Run it on another connection and wait for its end."""
    (result,) = rows.at_once(function)
    return result


def test_staging_is_atomic_and_idempotent(level, delivered):
    with transaction.atomic():
        Order.objects.create(reference="A-1")
        first = stage("order.paid", 1, event_key="k")
    with transaction.atomic():
        assert Order.objects.count() == 1
        again = stage("order.paid", 1, event_key="k")
        Order.objects.create(reference="A-2")
    with transaction.atomic():
        stage("order.paid", 2, event_key="rolled back")
        transaction.set_rollback(True)
    assert (first.created, again.created, again.ids) == (True, False, first.ids)
    assert Order.objects.count() == 2
    drain()
    assert delivered == [1]


def test_transactions_that_stage_different_keys_do_not_wait_for_one_another(level):
    """The keys are new to the server: of one that was just deleted InnoDB keeps locks above READ COMMITTED."""
    barrier = threading.Barrier(2)

    def place(reference):
        with transaction.atomic():
            Order.objects.create(reference=reference)
            stage("order.paid", reference, event_key=f"{reference}:{uuid4()}")
            barrier.wait(30)

    rows.at_once(lambda: place("A-1"), lambda: place("A-2"))
    assert Message.objects.count() == 2


def test_a_key_that_was_committed_after_the_snapshot_is_found_or_refused_by_the_database(level, database_kind):
    """PostgreSQL refuses with 40001 above READ COMMITTED; MariaDB and MySQL read what is committed."""
    with transaction.atomic():
        assert Order.objects.count() == 0  # takes the snapshot
        first = meanwhile(lambda: put("order.paid", 1, event_key="k"))
        if database_kind == "mysql" or level == "READ COMMITTED":
            assert stage("order.paid", 1, event_key="k").ids == (first.pk,)
            Order.objects.create(reference="the transaction goes on")
        else:
            with pytest.raises(OperationalError) as caught:
                stage("order.paid", 1, event_key="k")
            assert code_of(caught.value) == "40001"
            transaction.set_rollback(True)
    assert Message.objects.count() == 1


def test_dispatching_works_where_it_is_the_default(level, delivered):
    """Claims, settlements, retries, lanes and pruning bring their own level along."""

    @handler("order.shipped", max_attempts=1)
    def fails(message):
        raise ValueError("no")

    for number in range(3):
        put("order.paid", number, ordering_key="lane")
    put("order.shipped")
    rows.lapsed(topic="order.paid", lapses=1, attempt=2, spent=2)
    rows.delivered(age=365 * 86400)
    drain()
    assert delivered == [0, 1, 2]
    assert Message.objects.dead().count() == 1
    assert set(Attempt.objects.values_list("outcome", flat=True)) == {"failed", "crashed"}
    assert retention.prune("default").delivered == 1


def test_two_dispatchers_deliver_each_message_once(level):
    put("order.paid", count=40, ordering_key="lane")
    put("order.paid", count=40)
    failures = [each.failure for each in rows.at_once(drain, drain)]
    assert not any(failures)
    assert Message.objects.delivered().count() == 80
    assert Message.objects.filter(attempt=1).count() == 80
