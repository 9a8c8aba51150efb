"""Two and three transactions that stage the same keys at the same time, on real connections of their own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from django.db import OperationalError, connection, transaction

from outbox import EventKeyConflict, Intent, handler, stage, stage_many
from outbox.database import code_of
from outbox.models import Message
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("statement_path")]

DEADLOCK = {"postgresql": "40P01", "mysql": 1213}


@pytest.fixture(autouse=True)
def _handlers(outbox_registry):
    handler("order.paid")(lambda message: None)


class Caller:
    """A thread with a connection and, between `begin` and `end`, a transaction of its own."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1)
        self._block = None

    def start(self, function, *arguments, **keywords):
        return self._thread.submit(function, *arguments, **keywords)

    def do(self, function, *arguments, **keywords):
        return self.start(function, *arguments, **keywords).result(30)

    def begin(self, isolation=None):
        self.do(self._begin, isolation)

    def _begin(self, isolation):
        self._block = transaction.atomic()
        self._block.__enter__()
        if isolation:
            execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")

    def stage(self, key, payload=1):
        return self.start(stage, "order.paid", payload, event_key=key)

    def order(self, reference):
        return self.do(Order.objects.create, reference=reference)

    def commit(self):
        self.do(self._end, rollback=False)

    def roll_back(self):
        self.do(self._end, rollback=True)

    def _end(self, rollback):
        block, self._block = self._block, None
        if rollback:
            transaction.set_rollback(True)
        block.__exit__(None, None, None)

    def close(self):
        if self._block is not None:
            self.start(self._end, rollback=True).exception(30)
        self.do(lambda: connection.close())
        self._thread.shutdown()


@pytest.fixture
def caller():
    """Return a function that makes another caller."""
    with ExitStack() as stack:

        def make():
            made = Caller()
            stack.callback(made.close)
            return made

        yield make


def execute(sql, *params):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchone() if cursor.description else None


WAITING = {
    "postgresql": "SELECT COUNT(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist p "
    "ON p.id = t.trx_mysql_thread_id WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()",
}


def wait_until_blocked(many=1):
    """Wait until so many sessions wait for a lock. SQLite cannot tell: there a writer waits to begin."""

    def blocked():
        time.sleep(0.15)  # InnoDB renews this table only when nobody has looked for a tenth of a second
        return execute(WAITING[connection.vendor])[0] >= many

    if connection.vendor in WAITING:
        wait_until(blocked)


def begins_only_alone(database_kind):
    return database_kind == "sqlite"


@contextmanager
def rival_holds(caller, key, payload=1):
    """Yield a rival that has staged a key and not ended yet, what a loser that waits for it will get, and the loser."""
    rival, loser = caller(), caller()
    rival.begin()
    assert rival.stage(key, payload).result(30).created

    def begin_and_stage():
        loser._begin(None)
        return stage("order.paid", 1, event_key=key)

    waiting = loser.start(begin_and_stage)
    wait_until_blocked()
    yield rival, waiting, loser


def test_the_loser_waits_for_its_rival_and_then_reports_the_rivals_message(caller):
    """Invariant 2."""
    with rival_holds(caller, "k") as (rival, waiting, loser):
        assert not waiting.done()
        rival.commit()
        staged = waiting.result(30)
        assert not staged.created
        loser.order("the transaction goes on")
        loser.commit()
    assert Message.objects.get().pk == staged.ids[0]
    assert Order.objects.count() == 1


def test_if_the_rival_rolls_back_the_losers_message_exists(caller):
    """Invariant 2."""
    with rival_holds(caller, "k") as (rival, waiting, loser):
        rival.roll_back()
        staged = waiting.result(30)
        assert staged.created
        loser.commit()
    assert Message.objects.get().pk == staged.ids[0]


def test_if_the_rival_commits_other_content_the_loser_gets_a_conflict_and_goes_on(caller):
    with rival_holds(caller, "k", payload=2) as (rival, waiting, loser):
        rival.commit()
        with pytest.raises(EventKeyConflict, match="payload"):
            waiting.result(30)
        loser.order("the transaction goes on")
        loser.commit()
    assert Message.objects.get().payload == 2
    assert Order.objects.count() == 1


def test_of_two_losers_of_a_rolled_back_rival_one_makes_the_message(caller, database_kind):
    rival, *losers = caller(), caller(), caller()
    rival.begin()
    rival.stage("k").result(30)

    def stage_alone():
        with transaction.atomic():
            return stage("order.paid", 1, event_key="k")

    waiting = [loser.start(stage_alone) for loser in losers]
    wait_until_blocked(2)
    rival.roll_back()
    errors = [error for error in (future.exception(30) for future in waiting) if error]
    created = [future.result().created for future in waiting if not future.exception()]
    # InnoDB resolves the tie by a deadlock; the error reaches its caller as it is.
    assert len(errors) <= (database_kind == "mysql")
    assert all(isinstance(error, OperationalError) and code_of(error) == 1213 for error in errors)
    assert created.count(True) == 1
    assert Message.objects.count() == 1


def test_a_committed_key_that_the_snapshot_does_not_show(caller, database_kind):
    """PostgreSQL refuses with 40001, which reaches the caller as it is; MySQL and MariaDB read what is committed."""
    if begins_only_alone(database_kind):
        pytest.skip("a transaction that begins with the write lock has no rival")
    late = caller()
    if database_kind == "mysql":
        late.do(execute, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        late.begin()
    else:
        late.begin("REPEATABLE READ")
    assert late.do(Message.objects.count) == 0  # takes the snapshot
    with transaction.atomic():
        first = stage("order.paid", 1, event_key="k")
    if database_kind == "postgresql":
        with pytest.raises(OperationalError) as caught:
            late.stage("k").result(30)
        assert code_of(caught.value) == "40001"
        assert type(caught.value.__cause__) is connection.Database.errors.SerializationFailure
    else:
        staged = late.stage("k").result(30)
        assert (staged.ids, staged.created) == (first.ids, False)
        late.order("the transaction goes on")
        late.commit()
        assert Order.objects.count() == 1


def test_a_snapshot_of_this_transaction_alone_hides_nothing_either(caller, database_kind):
    """On MySQL SET TRANSACTION holds for the next transaction only, and the session does not tell of it."""
    if database_kind != "mysql":
        pytest.skip("elsewhere the level of the session is never asked for")
    late = caller()
    late.do(execute, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    late.begin()
    assert late.do(Message.objects.count) == 0
    with transaction.atomic():
        first = stage("order.paid", 1, event_key="k")
    staged = late.stage("k").result(30)
    assert (staged.ids, staged.created) == (first.ids, False)
    late.commit()


def test_opposite_order_is_a_deadlock_that_reaches_one_caller_as_it_is(caller, database_kind):
    """Scenario 5."""
    if begins_only_alone(database_kind):
        pytest.skip("a transaction that begins with the write lock has no rival")
    one, other = caller(), caller()
    for each, key in ((one, "a"), (other, "b")):
        each.begin()
        each.order(key)
        each.stage(key).result(30)
    futures = {one: one.stage("b"), other: other.stage("a")}
    failed = wait_until(lambda: [each for each, future in futures.items() if future.done() and future.exception()])
    [victim] = failed
    error = futures[victim].exception()
    assert isinstance(error, OperationalError)
    assert code_of(error) == DEADLOCK[database_kind]
    victim.roll_back()
    survivor = one if victim is other else other
    assert futures[survivor].result(30).created
    survivor.commit()
    assert set(Message.objects.values_list("event_key", flat=True)) == {"a", "b"}
    assert Order.objects.count() == 1


def test_a_deadlock_victim_cannot_commit_half_of_its_work(caller, database_kind):
    """InnoDB has rolled the whole transaction back: a caller that swallows the error must not commit the rest of it."""
    if begins_only_alone(database_kind):
        pytest.skip("a transaction that begins with the write lock has no rival")
    one, other = caller(), caller()
    for each, key in ((one, "a"), (other, "b")):
        each.begin()
        each.stage(key).result(30)
    futures = {one: one.stage("b"), other: other.stage("a")}
    [victim] = wait_until(lambda: [each for each, future in futures.items() if future.done() and future.exception()])
    with pytest.raises(transaction.TransactionManagementError):
        victim.order("after the error")


@pytest.mark.parametrize("committed", [0, 7], ids=["new keys", "some keys known"])
def test_two_bulk_calls_with_the_same_keys_never_deadlock(committed):
    """Scenario 5."""
    keys = [f"k{n:02}" for n in range(30)]
    rounds = 15
    together = threading.Barrier(2)

    def stage_in(order):
        results = []
        try:
            for number in range(rounds):
                intents = [Intent("order.paid", 1, event_key=f"{number}:{key}") for key in order]
                together.wait(30)
                with transaction.atomic():
                    results.append(stage_many(intents))
            return results
        finally:
            connection.close()

    with transaction.atomic():
        stage_many([Intent("order.paid", 1, event_key=f"{n}:{key}") for n in range(rounds) for key in keys[:committed]])
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(stage_in, order) for order in (keys, keys[::-1])]
        one, other = (future.result(60) for future in futures)
    assert Message.objects.count() == rounds * len(keys)
    for mine, theirs in zip(one, other, strict=True):
        ids = {staged.event_key: staged.ids for staged in mine}
        assert {staged.event_key: staged.ids for staged in theirs} == ids
        assert sum(staged.created for staged in (*mine, *theirs)) == len(keys) - committed


def test_a_transaction_that_commits_late_has_the_lower_id_and_is_not_lost(caller, database_kind):
    """Scenario 14, as far as staging goes: ids are drawn when a message is staged, not when it is committed."""
    if begins_only_alone(database_kind):
        pytest.skip("a transaction that begins with the write lock has no rival")
    late = caller()
    late.begin()
    [early_id] = late.stage("late").result(30).ids
    with transaction.atomic():
        [pk] = stage("order.paid", 1, event_key="early").ids
    assert list(Message.objects.values_list("event_key", flat=True)) == ["early"]
    late.commit()
    assert early_id < pk
    assert list(Message.objects.order_by("id").values_list("event_key", flat=True)) == ["late", "early"]
