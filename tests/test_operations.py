"""Requeue, discard, make due: who may be moved, what moves, and that the counts are exact."""

import threading

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox import signals
from outbox.handlers import handler, registry
from outbox.leases import Settlement, claim, settle
from outbox.models import Attempt, Intervention, Message, Outcome, Reason, State
from outbox.operations import BATCH, Done, discard, make_due, requeue
from tests import rows

pytestmark = pytest.mark.django_db(transaction=True)

LANE = 4711


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", name="order.paid")(lambda message: None)
        handler("order.shipped", dead_head="block")(lambda message: None)
        yield


def fresh(row):
    return Message.objects.get(pk=row.pk)


# --- requeue ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rows.dead, rows.discarded])
def test_a_requeued_message_is_due_with_a_fresh_budget(make):
    row = make(attempt=20, spent=20, lapses=2, expires_at=rows.ago(5))
    assert requeue("default", [row.pk]) == Done(done=(row.pk,))
    found = Message.objects.due().get(pk=row.pk)
    assert (found.spent, found.lapses, found.expires_at, found.settled_at, found.reason) == (0, 0, None, None, "")
    assert (found.lease_token, found.holder) == (None, None)


def test_a_requeue_keeps_the_history():
    """Scenario 56: the diagnosis is not erased, and the attempt never goes back."""
    row = rows.dead(attempt=20)
    Attempt.objects.create(message=row, number=20, outcome="failed", ended_at=rows.now(), error_text="no such customer")
    requeue("default", [row.pk])
    found = fresh(row)
    assert (found.attempt, found.error_type, found.error_text) == (20, "builtins.ValueError", "no such customer")
    assert found.attempts.count() == 1


def test_only_dead_and_discarded_messages_are_requeued():
    """Invariant 13; scenarios 56 and P13: exact counts, the others named, nobody's lease taken away."""
    dead, gone = rows.dead(), rows.dead()
    others = {
        rows.leased().pk: "in flight",
        rows.message().pk: "pending already",
        rows.lapsed().pk: "pending already",
        rows.parked(LANE).pk: "pending already",
        rows.delivered().pk: "delivered",
        rows.dead(payload_pruned=True).pk: "without its pruned payload",
    }
    before = list(Message.objects.filter(pk__in=others).order_by("pk").values())
    Message.objects.filter(pk=gone.pk).delete()
    result = requeue("default", [*others, dead.pk, gone.pk, dead.pk])
    assert result == Done(done=(dead.pk,), skipped={**others, gone.pk: "not found"})
    assert list(Message.objects.filter(pk__in=others).order_by("pk").values()) == before


def test_a_requeued_message_joins_the_lane_of_its_handler():
    """Scenario 47: the lane went on; the requeued message knocks, and nothing else of the lane is touched."""
    lane = registry.by_name("order.paid").lane("order:1")
    row = rows.dead(ordering_key="order:1")
    head = rows.leased(lane=lane)
    follower = rows.parked(lane)
    requeue("default", [row.pk])
    assert fresh(row).lane == lane
    assert fresh(row).holder is None
    assert fresh(row).due_at is not None
    assert fresh(head).lease_token == 7
    assert fresh(follower).due_at is None


def test_a_blocking_message_is_requeued_as_a_knock_in_its_lane():
    """Scenario 47 under the policy block: followers sleep in the lane as it is stored, so there it must stay."""
    row = rows.dead(topic="order.shipped", ordering_key="other", lane=LANE)
    follower = rows.parked(LANE, topic="order.shipped")
    requeue("default", [row.pk])
    assert Message.objects.due().filter(pk=row.pk, lane=LANE, holder=None).exists()
    assert fresh(follower).due_at is None


def test_a_message_without_a_handler_here_is_requeued_outside_of_any_lane():
    row = rows.dead(topic="unheard.of", ordering_key="order:1")
    assert requeue("default", [row.pk]).done == (row.pk,)
    assert fresh(row).lane is None


@pytest.mark.parametrize("operate", [requeue, discard])
def test_two_operators_at_once_move_each_message_once(operate):
    """Scenario 56: the two counts add up exactly."""
    ids = [rows.dead().pk for _ in range(100)]
    first, second = rows.at_once(
        lambda: operate("default", ids, actor="anna"), lambda: operate("default", reversed(ids), actor="bert")
    )
    assert sorted(first.done + second.done) == ids
    assert set(first.skipped) == set(second.done)
    assert set(second.skipped) == set(first.done)
    by_actor = {actor: set() for actor in ("anna", "bert")}
    for actor, pk in Intervention.objects.values_list("actor", "message_id"):
        by_actor[actor].add(pk)
    assert by_actor == {"anna": set(first.done), "bert": set(second.done)}


def claims(limit=10):
    return claim(using="default", worker="w", seconds=60, limit=limit)


def bury(lease):
    settle("default", [Settlement(lease=lease, outcome=Outcome.BURIED, state=State.DEAD, reason=Reason.BURIED)])


def deliver(lease):
    settle("default", [Settlement(lease=lease, outcome=Outcome.DELIVERED, state=State.DELIVERED)])


def test_a_dead_head_under_skip_is_requeued_and_runs_once():
    """Scenario 47: A dies, B runs; A requeued runs once, though B was before it."""
    first, second = (rows.message(lane=LANE, ordering_key="order:1") for _ in "AB")
    (lease,) = claims()
    assert lease.id == first.pk
    bury(lease)
    (lease,) = claims()
    assert lease.id == second.pk
    requeue("default", [first.pk])
    deliver(lease)
    (lease,) = claims()
    assert lease.id == first.pk
    deliver(lease)
    assert claims() == []
    assert Message.objects.delivered().count() == 2


@pytest.mark.parametrize("way_out", [requeue, discard])
def test_a_dead_head_under_block_halts_its_lane_until_a_person_acts(way_out):
    """Scenario 47: requeued it runs before its followers, discarded they go on; nobody is left behind."""
    lane = registry.by_name("order.shipped").lane("order:1")
    names = {"topic": "order.shipped", "ordering_key": "order:1", "lane": lane}
    first, second, third = (rows.message(**names) for _ in "ABC")
    (lease,) = claims()
    bury(lease)
    assert claims() == []
    assert way_out("default", [first.pk]).done == (first.pk,)
    order = []
    while leases := claims():
        order += [lease.id for lease in leases]
        for lease in leases:
            deliver(lease)
    assert order == ([first.pk] if way_out is requeue else []) + [second.pk, third.pk]


@pytest.mark.parametrize("state", [State.DELIVERED, State.DEAD])
def test_a_discarded_message_whose_lease_ran_out_stays_discarded(state):
    """The stale worker's fence is gone with the token: what it reports is thrown away."""
    row = rows.message()
    (lease,) = claims()
    Message.objects.filter(pk=row.pk).update(due_at=rows.ago(1))
    discard("default", [row.pk])
    (result,) = settle("default", [Settlement(lease=lease, outcome=Outcome.DELIVERED, state=state)])
    assert result.status == "lost"
    assert fresh(row).state == State.DISCARDED


# --- discard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rows.message, rows.scheduled, rows.retrying, rows.lapsed, rows.dead])
def test_a_discarded_message_is_settled_by_a_person(make):
    row = make()
    assert discard("default", [row.pk]).done == (row.pk,)
    found = fresh(row)
    assert (found.state, found.reason) == (State.DISCARDED, Reason.OPERATOR)
    assert (found.due_at, found.lease_token, found.holder, found.lane) == (None, None, None, None)
    assert found.settled_at is not None


def test_messages_that_are_in_flight_or_settled_are_not_discarded():
    """Scenario 56: nothing is taken from a worker that runs."""
    others = {rows.leased().pk: "in flight", rows.delivered().pk: "delivered", rows.discarded().pk: "discarded"}
    before = list(Message.objects.order_by("pk").values())
    assert discard("default", others) == Done(skipped=others)
    assert list(Message.objects.order_by("pk").values()) == before


@pytest.mark.parametrize("place", ["blocking", "waiting", "due", "lapsed"])
def test_the_lane_goes_on_when_its_head_is_discarded(place):
    """Scenario 47: the way out for a lane that halted."""
    make = {"blocking": rows.dead, "waiting": rows.retrying, "due": rows.message, "lapsed": rows.lapsed}[place]
    head = make(lane=LANE, topic="order.shipped", lapses=1)
    second, third = rows.parked(LANE, topic="order.shipped"), rows.parked(LANE, topic="order.shipped")
    discard("default", [head.pk])
    found = fresh(head)
    assert (found.lane, found.holder, found.lease_token, found.lapses) == (None, None, None, 0)
    assert Message.objects.due().filter(pk=second.pk).exists()
    assert fresh(third).due_at is None


def test_a_lane_in_flight_is_left_alone_when_a_sleeper_is_discarded():
    head, sleeper = rows.leased(lane=LANE), rows.parked(LANE)
    last = rows.parked(LANE)
    discard("default", [sleeper.pk])
    assert fresh(head).lease_token == 7
    assert fresh(last).due_at is None


def test_a_lane_discarded_as_a_whole_leaves_nobody_due():
    ids = [rows.message(lane=LANE).pk, *(rows.parked(LANE).pk for _ in range(5))]
    assert discard("default", ids).done == tuple(ids)
    assert not Message.objects.pending().exists()


def test_a_discard_is_told_after_it_was_committed():
    told = []

    def hear(event, **kwargs):
        told.append((event.message.id, event.message.payload, event.outcome, event.reason))

    row, _ = rows.message(payload={"n": 5}), rows.message()
    signals.discarded.connect(hear)
    try:
        with transaction.atomic():
            discard("default", [row.pk])
            assert told == []
        assert told == [(row.pk, {"n": 5}, "discarded", "operator")]
    finally:
        signals.discarded.disconnect(hear)


def test_a_failure_to_tell_does_not_reach_the_operator(monkeypatch):
    """It was committed: that somebody could not be told of it is only logged."""

    def fail(using):
        raise RuntimeError("no wake-up")

    monkeypatch.setattr("outbox.wakeup.hint", fail)
    row = rows.dead()
    assert requeue("default", [row.pk]).done == (row.pk,)
    with transaction.atomic():
        assert discard("default", [row.pk]).done == (row.pk,)
    assert fresh(row).state == State.DISCARDED


# --- make due ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rows.scheduled, rows.retrying])
def test_a_wait_is_ended_and_the_budget_stays(make):
    row = make()
    assert make_due("default", [row.pk]).done == (row.pk,)
    found = Message.objects.due().get(pk=row.pk)
    assert found.spent == row.spent


def test_messages_that_do_not_wait_for_a_time_are_not_made_due():
    others = {
        rows.message().pk: "due already",
        rows.lapsed().pk: "due already",
        rows.leased().pk: "in flight",
        rows.parked(LANE).pk: "waiting in its lane",
        rows.dead().pk: "dead",
        rows.delivered().pk: "delivered",
        rows.discarded().pk: "discarded",
    }
    before = list(Message.objects.order_by("pk").values())
    assert make_due("default", others) == Done(skipped=others)
    assert list(Message.objects.order_by("pk").values()) == before


# --- all verbs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operate", "make", "verb"),
    [(requeue, rows.dead, "requeue"), (discard, rows.dead, "discard"), (make_due, rows.scheduled, "make_due")],
)
def test_who_did_what_is_recorded_for_each_changed_message(operate, make, verb):
    changed, skipped = make(), rows.delivered()
    operate("default", [changed.pk, skipped.pk], actor="anna", note="gateway is back")
    (found,) = Intervention.objects.all()
    assert (found.message_id, found.verb, found.actor, found.note) == (changed.pk, verb, "anna", "gateway is back")
    assert abs((found.at - rows.now()).total_seconds()) < 60


def test_a_record_takes_any_name_and_note():
    row = rows.dead()
    requeue("default", [row.pk], actor="a" * 300, note="nul \0, surrogate \udcff, 🍏")
    found = Intervention.objects.get()
    assert found.actor == "a" * 255
    assert found.note == "nul �, surrogate ?, 🍏"


def test_the_number_of_statements_does_not_grow_with_the_messages_of_a_batch(monkeypatch):
    """Scenario 42: 5,000 messages are a few bounded statements per batch, not one per message."""
    monkeypatch.setattr("outbox.wakeup.hint", lambda using: None)
    requeue("default", [rows.dead().pk])  # asks the session for its isolation level, once

    def statements(n):
        ids = [rows.dead().pk for _ in range(n)]
        with CaptureQueriesContext(connection) as queries:
            assert len(requeue("default", ids).done) == n
        return len(queries)

    assert statements(BATCH) == statements(2)
    assert statements(BATCH + 1) == 2 * statements(2)


def test_an_operation_is_undone_by_the_rollback_of_the_callers_transaction():
    row = rows.dead()
    with transaction.atomic():
        requeue("default", [row.pk])
        transaction.set_rollback(True)
    assert fresh(row).state == State.DEAD
    assert not Intervention.objects.exists()


def test_waiting_dispatchers_are_woken_after_the_commit(monkeypatch):
    heard = []
    monkeypatch.setattr("outbox.wakeup.hint", heard.append)
    row = rows.dead()
    with transaction.atomic():
        requeue("default", [row.pk])
        assert heard == []
    assert heard == ["default"]
    requeue("default", [row.pk])
    assert heard == ["default"], "nothing was changed, so nobody is woken"


def test_a_requeue_waits_for_the_settlement_that_makes_the_message_dead(second_connection, database_kind):
    """Scenario 56: requeue while the dispatcher is dead-lettering the message: one of the two comes first, whole."""
    if database_kind == "sqlite":
        pytest.skip("SQLite has one writer: the two cannot overlap")
    row = rows.leased()
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute(
            "UPDATE outbox_message SET state = 'dead', due_at = NULL, lease_token = NULL WHERE id = %s", [row.pk]
        )
    started = threading.Event()
    results = []

    def operate():
        started.set()
        results.append(requeue("default", [row.pk]))
        connections.close_all()

    thread = threading.Thread(target=operate)
    thread.start()
    started.wait(10)
    thread.join(0.3)
    assert thread.is_alive(), "the requeue waits for the row"
    other.commit()
    thread.join(30)
    assert results == [Done(done=(row.pk,))]
    assert fresh(row).state == State.PENDING


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_an_operation_works_on_the_database_it_is_told():
    row = rows.dead(using="other")
    assert requeue("default", [row.pk]).done == ()
    assert requeue("other", [row.pk]).done == (row.pk,)
    assert Intervention.objects.using("other").count() == 1
