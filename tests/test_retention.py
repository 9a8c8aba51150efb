"""Pruning touches only what is settled and old enough, gently; the sweep wakes lanes that nobody else would."""

import threading
from functools import partial

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from outbox import retention, stage
from outbox.handlers import handler, registry
from outbox.models import Attempt, Breaker, Dispatcher, Intervention, Message
from outbox.retention import Pruned, prune, sweep
from tests import rows

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 86400
LANE = 4711


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(retention._Run, "rest", lambda run, seconds: None)


def ids(queryset=None):
    return set((Message.objects if queryset is None else queryset).values_list("pk", flat=True))


# --- what is pruned ---------------------------------------------------------------------------------------------------


def test_payloads_go_first_then_rows_and_the_dead_stay():
    """Invariants 13 and 14, with the defaults: a week, a month, never."""
    young, week, month = (rows.delivered(age * DAY + 60) for age in (0, 7, 30))
    gone = rows.discarded(30 * DAY + 60)
    kept = rows.discarded(8 * DAY), rows.dead(400 * DAY)
    assert prune("default") == Pruned(payloads=1, delivered=1, discarded=1)
    assert ids() == {young.pk, week.pk, *(row.pk for row in kept)}
    assert not ids() & {month.pk, gone.pk}
    week.refresh_from_db()
    assert (week.payload, week.headers, week.payload_pruned) == (None, None, True)
    for row in (young, *kept):
        row.refresh_from_db()
        assert (row.payload, row.headers, row.payload_pruned) == ({"n": 1}, {"trace": "t"}, False)
    assert prune("default") == Pruned()


def test_what_is_not_settled_is_never_pruned():
    """Scenario 48, P9: pending, retrying and running messages, however old, and lanes that are blocked."""
    old = {"staged_at": rows.ago(900 * DAY)}
    rows.message(**old, due_at=rows.ago(800 * DAY))
    rows.scheduled(**old), rows.retrying(**old), rows.leased(**old), rows.lapsed(**old)
    rows.parked(LANE, **old)
    rows.dead(800 * DAY, lane=LANE)
    before = list(Message.objects.order_by("pk").values())
    assert prune("default", payloads_after=1, after=1, dead_after=1) == Pruned()
    assert list(Message.objects.order_by("pk").values()) == before


def test_dead_messages_go_only_by_their_own_limit():
    old, young = rows.dead(10 * DAY), rows.dead(DAY)
    assert prune("default", payloads_after=1, after=1).dead == 0
    assert prune("default", dead_after=5 * DAY).dead == 1
    assert ids() == {young.pk}
    assert not ids() & {old.pk}


def test_nothing_is_pruned_where_retention_is_disabled(settings):
    settings.OUTBOX = {"PRUNE_PAYLOADS_AFTER": 0, "PRUNE_AFTER": 0, "PRUNE_DEAD_AFTER": 0}
    rows.delivered(900 * DAY), rows.discarded(900 * DAY), rows.dead(900 * DAY)
    assert prune("default") == Pruned()
    assert Message.objects.filter(payload_pruned=False).count() == 3


def test_the_longest_retention_keeps_everything():
    rows.delivered(4000 * DAY)
    assert prune("default", payloads_after=1e18, after=1e18, dead_after=1e18) == Pruned()


def test_the_servers_clock_decides_the_age(monkeypatch):
    limit = 30 * DAY
    row = rows.delivered()
    Message.objects.filter(pk=row.pk).update(settled_at=rows.ago(limit - 30))
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert prune("default").delivered == 0
    Message.objects.filter(pk=row.pk).update(settled_at=rows.ago(limit + 30))
    assert prune("default").delivered == 1


def test_attempts_and_interventions_go_with_their_message():
    gone, kept = rows.delivered(31 * DAY), rows.delivered()
    for row in (gone, kept):
        Attempt.objects.create(message=row, number=1, outcome="failed", ended_at=rows.now())
        Intervention.objects.create(message=row, verb="requeue", at=rows.now())
    assert prune("default") == Pruned(delivered=1)
    assert list(Attempt.objects.values_list("message_id")) == [(kept.pk,)]
    assert list(Intervention.objects.values_list("message_id")) == [(kept.pk,)]


def test_attempts_and_interventions_of_messages_deleted_by_hand_go_too(monkeypatch):
    monkeypatch.setattr(retention, "ORPHAN_WINDOW", 2)
    deleted, kept = rows.delivered(), rows.delivered()
    for row in (deleted, kept, deleted, kept, deleted):
        Attempt.objects.create(message=row, number=1, outcome="failed", ended_at=rows.now())
    Intervention.objects.create(message=deleted, verb="requeue", at=rows.now())
    Message.objects.filter(pk=deleted.pk)._raw_delete("default")
    assert prune("default", dry_run=True).orphans == 4
    assert prune("default").orphans == 4
    assert set(Attempt.objects.values_list("message_id", flat=True)) == {kept.pk}


def test_dispatchers_long_lost_are_forgotten():
    alive, lost = rows.dispatcher(), rows.dispatcher(lost_in=-60)
    rows.dispatcher(lost_in=-2 * DAY)
    assert prune("default").dispatchers == 1
    assert set(Dispatcher.objects.all()) == {alive, lost}


def test_open_breakers_that_nobody_probes_are_forgotten():
    kept = rows.breaker("mail", probe_in=-6 * DAY)
    rows.breaker("gone", probe_in=-8 * DAY)
    assert prune("default", dry_run=True).breakers == 1
    assert prune("default").breakers == 1
    assert Breaker.objects.get() == kept


def test_a_dry_run_counts_and_changes_nothing():
    """Scenario 48."""
    rows.delivered(8 * DAY), rows.delivered(31 * DAY), rows.delivered(31 * DAY, payload_pruned=True)
    rows.discarded(31 * DAY), rows.dead(2 * DAY), rows.dispatcher(lost_in=-2 * DAY)
    before = list(Message.objects.order_by("pk").values())
    expected = Pruned(payloads=1, delivered=2, discarded=1, dead=1, dispatchers=1)
    assert prune("default", dead_after=DAY, dry_run=True) == expected
    assert list(Message.objects.order_by("pk").values()) == before
    assert prune("default", dead_after=DAY) == expected


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_one_database_is_pruned_at_a_time():
    rows.delivered(31 * DAY)
    row = rows.delivered(using="other")
    Message.objects.using("other").filter(pk=row.pk).update(settled_at=rows.ago(31 * DAY, "other"))
    assert prune("other").delivered == 1
    assert Message.objects.using("default").count() == 1


# --- how it is pruned -------------------------------------------------------------------------------------------------


def test_batches_are_bounded(monkeypatch):
    """Scenarios 42, 48 and 49: however much there is, no transaction takes more than a batch."""
    monkeypatch.setattr(retention, "BATCH", 3)
    for _ in range(10):
        rows.delivered(31 * DAY, payload_pruned=True)
    batches = []
    assert prune("default", progress=batches.append).delivered == 10
    assert batches == [3, 3, 3, 1]


def test_rows_settled_in_the_same_microsecond_are_all_found(monkeypatch):
    monkeypatch.setattr(retention, "BATCH", 3)
    instant = rows.ago(31 * DAY)
    for _ in range(7):
        rows.delivered(settled_at=instant)
    assert prune("default").delivered == 7


def test_pruning_rests_after_each_batch(monkeypatch):
    """Scenario 49."""
    rests = []
    monkeypatch.setattr(retention, "BATCH", 2)
    monkeypatch.setattr(retention._Run, "rest", lambda run, seconds: rests.append(seconds))
    for _ in range(4):
        rows.delivered(31 * DAY)
    prune("default")
    assert len([seconds for seconds in rests if seconds > 0]) >= 2


def test_pruning_ends_between_two_batches_when_told(monkeypatch):
    monkeypatch.setattr(retention, "BATCH", 2)
    for _ in range(5):
        rows.delivered(31 * DAY)
    stopping = threading.Event()
    assert prune("default", stopping=stopping, progress=lambda n: stopping.set()).delivered == 2
    assert Message.objects.count() == 3


def test_payloads_are_not_loaded_to_be_pruned():
    rows.delivered(8 * DAY), rows.delivered(31 * DAY)
    with CaptureQueriesContext(connection) as queries:
        prune("default")
    reads = [query["sql"] for query in queries if query["sql"].startswith("SELECT")]
    assert reads
    assert not [sql for sql in reads if '"payload"' in sql.replace("`", '"')]


def lock(connection, sql, params):
    connection.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


def test_locked_rows_are_left_for_the_next_time(second_connection, database_kind):
    """Scenario 49: nobody who works on a row is waited for."""
    if database_kind == "sqlite":
        pytest.skip("SQLite has no row locks")
    locked, free = rows.delivered(31 * DAY), [rows.delivered(31 * DAY) for _ in range(20)]
    other = second_connection()
    lock(other, "SELECT id FROM outbox_message WHERE id = %s FOR UPDATE", [locked.pk])
    result = prune("default")
    assert (result.delivered, result.busy) == (len(free), 1)
    assert ids() == {locked.pk}
    other.rollback()
    assert prune("default") == Pruned(delivered=1)


@pytest.mark.timeout(30)
def test_a_locked_row_behind_all_others_is_tried_once(second_connection, database_kind):
    if database_kind == "sqlite":
        pytest.skip("SQLite has no row locks")
    free, locked = rows.delivered(32 * DAY), rows.delivered(31 * DAY)
    lock(second_connection(), "SELECT id FROM outbox_message WHERE id = %s FOR UPDATE", [locked.pk])
    result = prune("default")
    assert (result.delivered, result.busy) == (1, 1)
    assert free.pk not in ids()


def test_pruning_locks_no_row_but_those_that_it_prunes(second_connection, database_kind):
    if database_kind == "sqlite":
        pytest.skip("SQLite has no row locks")
    pending, _ = rows.message(), rows.delivered(31 * DAY)
    other, seen = second_connection(), []

    def look(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if sql.startswith("DELETE") and "outbox_message" in sql:
            with other.cursor() as cursor:
                cursor.execute("SELECT id FROM outbox_message WHERE id = %s FOR UPDATE SKIP LOCKED", [pending.pk])
                seen.extend(cursor.fetchall())
        return result

    with connection.execute_wrapper(look):
        assert prune("default").delivered == 1
    assert seen[0] == (pending.pk,)


def test_a_duplicate_being_staged_delays_only_its_own_row(second_connection, database_kind):
    """On MariaDB the open transaction of a restager holds a lock on the entry of the event key."""
    if database_kind == "sqlite":
        pytest.skip("SQLite has no row locks")
    taken, free = rows.delivered(31 * DAY), [rows.delivered(31 * DAY) for _ in range(20)]
    columns = [
        field.column for field in Message._meta.concrete_fields if field.name not in ("id", "headers", "payload")
    ]
    names = ", ".join(columns)
    again = f"INSERT INTO outbox_message ({names}) SELECT {names} FROM outbox_message WHERE id = %s"
    other = second_connection()
    if database_kind == "postgresql":
        lock(other, f"{again} ON CONFLICT DO NOTHING", [taken.pk])
    else:
        with pytest.raises(IntegrityError):
            lock(other, again, [taken.pk])
    result = prune("default")
    assert result.delivered + result.busy == 21
    assert result.busy <= 1
    assert not ids() & {row.pk for row in free}
    other.rollback()


def test_pruning_gives_up_when_locks_do_not_come(monkeypatch):
    """A database whose locks do not come in time is left alone until the next time, with what is not pruned counted."""
    monkeypatch.setattr(retention, "is_race", lambda connection, error: True)
    for _ in range(300):
        rows.delivered(31 * DAY)
    tries = []

    def refused(*args, **kwargs):
        tries.append(1)
        raise transaction.TransactionManagementError("locked")

    monkeypatch.setattr(retention, "impatient_transaction", refused)
    assert prune("default") == Pruned(busy=300)
    assert len(tries) == retention.REFUSALS


def test_an_error_that_is_no_lock_ends_the_pruning(monkeypatch):
    rows.delivered(31 * DAY)

    def refused(*args, **kwargs):
        raise OperationalError("the disk is full")

    monkeypatch.setattr(retention, "impatient_transaction", refused)
    with pytest.raises(OperationalError, match="the disk is full"):
        prune("default")


def test_lock_waits_are_as_usual_after_pruning(database_kind):
    if database_kind == "sqlite":
        pytest.skip("SQLite has no row locks")
    sql = "SHOW lock_timeout" if database_kind == "postgresql" else "SELECT @@innodb_lock_wait_timeout"
    with connection.cursor() as cursor:
        cursor.execute(sql)
        before = cursor.fetchall()
        rows.delivered(31 * DAY)
        prune("default")
        cursor.execute(sql)
        assert cursor.fetchall() == before


def test_pruning_and_staging_do_not_fail_one_another(monkeypatch):
    """Scenario 49: no lock error anywhere, nothing lost, while four stage and one prunes."""
    monkeypatch.setattr(retention, "BATCH", 10)
    for _ in range(200):
        rows.delivered(31 * DAY)

    def stage_many_times(writer):
        for n in range(25):
            with transaction.atomic():
                stage("order.paid", {"n": n}, event_key=f"{writer}-{n}")

    with registry.isolated():
        handler("order.paid")(lambda message: None)
        result, *_ = rows.at_once(lambda: prune("default"), *(partial(stage_many_times, writer) for writer in range(4)))
    assert result.delivered + result.busy == 200
    assert Message.objects.pending().count() == 100


def test_two_that_prune_at_once_count_each_row_once():
    for _ in range(60):
        rows.delivered(31 * DAY)
    first, second = rows.at_once(lambda: prune("default"), lambda: prune("default"))
    assert first.delivered + second.delivered + Message.objects.count() == 60
    prune("default")
    assert not Message.objects.exists()


# --- sweep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("higher", [None, "waiting", "blocking"])
def test_a_head_that_nobody_would_wake_is_woken(higher):
    """R8; and R3: a higher row that waits or blocks does not wake a lower one."""
    head, follower = rows.parked(LANE), rows.parked(LANE)
    if higher:
        {"waiting": rows.scheduled, "blocking": rows.dead}[higher](lane=LANE)
    assert sweep("default") == 1
    assert ids(Message.objects.due()) == {head.pk}
    assert Message.objects.get(pk=follower.pk).due_at is None
    assert sweep("default") == 0


@pytest.mark.parametrize("make", [rows.message, rows.leased, rows.lapsed, rows.scheduled, rows.retrying, rows.dead])
def test_a_lane_that_will_go_on_by_itself_is_left_alone(make):
    make(lane=LANE)
    sleeper = rows.parked(LANE)
    assert sweep("default") == 0
    assert Message.objects.get(pk=sleeper.pk).due_at is None


@pytest.mark.parametrize("make", [rows.message, rows.leased])
def test_a_sleeping_head_with_a_knock_above_it_is_left_alone(make):
    head = rows.parked(LANE)
    make(lane=LANE)
    assert sweep("default") == 0
    assert Message.objects.get(pk=head.pk).due_at is None


def test_every_stranded_lane_is_found_wherever_the_sweep_begins(monkeypatch):
    monkeypatch.setattr(retention, "SWEEP_WINDOW", 4)
    lanes = [-(2**63) + 1, -5, 0, 3, 2**63 - 1]
    heads = set()
    for lane in lanes:
        heads.add(rows.parked(lane).pk)
        rows.parked(lane)
    for start in (-(2**63), -5, -4, 2**63 - 1):
        monkeypatch.setattr("random.randrange", lambda low, high, start=start: start)
        assert sweep("default") == 5, start
        assert ids(Message.objects.due()) == heads
        Message.objects.filter(pk__in=heads).update(due_at=None)


def test_a_sweep_costs_a_bounded_number_of_statements(monkeypatch):
    monkeypatch.setattr(retention, "SWEEP_WINDOW", 2)
    monkeypatch.setattr(retention, "SWEEP_WINDOWS", 3)
    for lane in range(50):
        rows.parked(lane)
        rows.message(lane=lane)
    with CaptureQueriesContext(connection) as queries:
        sweep("default")
    assert len(queries) <= 9


def test_a_sweep_wakes_waiting_dispatchers(monkeypatch):
    heard = []
    monkeypatch.setattr("outbox.wakeup.hint", heard.append)
    sweep("default")
    assert heard == []
    rows.parked(LANE)
    sweep("default")
    assert heard == ["default"]


def test_rows_without_a_lane_are_no_matter_of_the_sweep():
    rows.message(due_at=None)
    assert sweep("default") == 0
