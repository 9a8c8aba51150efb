"""Claim, renew, settle: the table and the bullets of "Claim, budget, fence", the same on every database."""

import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import Error, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox import signals
from outbox.database import Stale, again, close_quietly, server_now, short_transaction
from outbox.handlers import handler
from outbox.leases import announce, charge, claim, draw_token, renew, settle
from outbox.models import Attempt, Message, Outcome, Reason, State
from outbox.operations import discard, make_due, requeue
from tests import rows
from tests.running import cut_sessions
from tests.specimens import (
    BACKOFF,
    BUDGET,
    VERDICTS,
    check_invariants,
    claimer,
    columns,
    end,
    fresh,
    hand_over,
    in_seconds,
    lapse,
    put,
    specimens,
    take,
    take_one,
    verdict,
)
from tests.stepping import Actor

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]

AT_ONCE = 2.0  # seconds: far less than any lock is held in these tests

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
        if sql.startswith("UPDATE") and not connection.in_atomic_block:
            die()
        return result

    connection.commit = commit_and_die
    try:
        with connection.execute_wrapper(change_and_die):
            yield
    finally:
        del connection.commit


# --- claim ------------------------------------------------------------------------------------------------------------


def test_a_claim_leases_the_row_and_charges_the_attempt():
    row = put("account", "a")
    (lease,) = take(seconds=60)
    found = fresh(row)
    assert (lease.id, lease.attempt, lease.charged, lease.handler.name) == (row.pk, 1, True, "account")
    assert (found.attempt, found.spent, found.lapses, found.leased_by) == (1, 1, 0, "worker")
    assert (found.lease_token, found.holder) == (lease.token, row.lane)
    assert in_seconds(found.due_at) == pytest.approx(60, abs=5)
    assert in_seconds(found.leased_at) == pytest.approx(0, abs=5)
    assert lease.envelope.attempt == 1
    assert not Attempt.objects.exists()
    check_invariants()


def test_one_token_fences_a_whole_claim_and_never_another():
    first = [put("mail") for _ in range(3)]
    tokens = {lease.token for lease in take(3)}
    put("mail")
    (other,) = take()
    assert len(tokens) == 1
    assert other.token not in tokens
    assert Message.objects.filter(lease_token__in=tokens).count() == len(first)


def test_a_token_is_a_random_63_bit_number():
    drawn = {draw_token() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 < token < 2**63 for token in drawn)
    assert max(drawn) > 2**60


def test_a_claim_into_the_local_queue_charges_only_what_starts():
    ids = [put("mail").pk for _ in range(5)]
    leases = take(5, start=2)
    assert [lease.charged for lease in leases] == [True, True, False, False, False]
    assert list(Message.objects.filter(pk__in=ids).order_by("pk").values_list("attempt", "spent")) == [
        (1, 1),
        (1, 1),
        (1, 0),
        (1, 0),
        (1, 0),
    ]


def test_claims_oldest_due_first():
    late, early = put("mail", due_at=rows.ago(10)), put("mail", due_at=rows.ago(20))
    assert [lease.id for lease in take(1)] == [early.pk]
    assert [lease.id for lease in take(1)] == [late.pk]


@pytest.mark.parametrize(
    "make",
    [rows.scheduled, rows.retrying, rows.leased, rows.delivered, rows.dead, rows.discarded],
)
def test_a_claim_leaves_alone_what_is_not_due(make):
    row = make(topic="mail")
    before = columns(row)
    assert take() == []
    assert columns(row) == before


def test_an_unknown_name_or_version_waits_untouched_for_a_process_that_knows_it(specimens):
    """Scenario 51 and P6: the old process never claims it; no attempt is spent; the new one delivers."""
    unknown = put("new.topic", handler="new.topic")
    version = put("mail", route="mail@2", payload_version=2)
    before = [columns(unknown), columns(version)]
    assert take() == []
    assert [columns(unknown), columns(version)] == before
    assert set(Message.objects.unroutable()) == {unknown, version}
    handler("new.topic")(print)
    assert [lease.id for lease in take()] == [unknown.pk]


def test_a_handler_claims_its_versions_and_its_former_names():
    put("render"), put("render", route="render@2"), put("thumbnail", handler="thumbnail")
    assert {lease.handler.name for lease in take()} == {"render"}
    assert not Message.objects.due().exists()


def test_a_claim_is_limited_by_handler_and_in_all():
    for _ in range(4):
        put("mail"), put("sms")
    leases = claimer().claim(5, seconds=60, room={"mail": 1, "sms": 3}).leases
    assert sorted(lease.handler.name for lease in leases) == ["mail", "sms", "sms", "sms"]
    assert len(claimer().claim(2, seconds=60).leases) == 2


def test_a_claim_can_be_restricted_to_handlers_and_can_exclude_some(specimens):
    mail, sms = put("mail"), put("sms")
    assert [lease.id for lease in take(handlers=[specimens.by_name("sms")])] == [sms.pk]
    assert claimer().claim(9, seconds=60, room={"sms": 9}).leases == []
    assert [lease.id for lease in claim(using="default", worker="w", seconds=60, limit=9)] == [mail.pk]


def test_a_claim_of_nothing_is_nothing():
    put("mail")
    assert claimer().claim(0, seconds=60).leases == []
    assert claimer(handlers=[]).claim(9, seconds=60).leases == []


def test_a_claim_by_id_touches_no_other_row():
    wanted, other = put("account", "a"), put("account", "b")
    follower = put("account", "a")
    before = [columns(other), columns(follower)]
    leases = claim(using="default", worker="w", seconds=60, ids=[wanted.pk])
    assert [lease.id for lease in leases] == [wanted.pk]
    assert [columns(other), columns(follower)] == before


def test_a_claim_by_id_takes_only_the_head_of_a_lane_and_only_what_is_due():
    put("account", "a")
    follower = put("account", "a")
    later = rows.scheduled(topic="mail")
    leased = take_one(put("mail"))
    before = [columns(follower), columns(later)]
    assert claim(using="default", worker="w", seconds=60, ids=[follower.pk, later.pk, leased.id]) == []
    assert [columns(follower), columns(later)] == before


def test_several_claimers_never_get_the_same_message():
    """Scenario 40: also where row locks are silently nothing."""
    expected = {put("mail").pk for _ in range(120)} | {put("account", f"k{n}").pk for n in range(30)}

    def drain():
        own, found = claimer(), []
        while True:
            result = own.claim(7, seconds=60)
            found += [lease.id for lease in result.leases]
            if not (result.leases or result.more or result.contended):
                return found

    found = [pk for part in rows.at_once(*[drain] * 4) for pk in part]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert set(Message.objects.values_list("attempt", flat=True)) == {1}


def test_every_handler_has_its_turn():
    """Fairness: of many routes, and of two when one has more than anybody can take."""
    for _ in range(30):
        put("mail")
    put("sms"), put("sms")
    assert sorted(lease.handler.name for lease in take(4)) == ["mail", "mail", "sms", "sms"]


def test_routes_take_turns_from_claim_to_claim():
    for _ in range(10):
        put("mail"), put("sms")
    own = claimer()
    taken = [own.claim(1, seconds=60).leases[0].handler.name for _ in range(10)]
    assert 3 <= taken.count("mail") <= 7


def test_hundreds_of_routes_are_served_evenly(specimens):
    names = [f"topic.{number:03}" for number in range(450)]
    for name in names:
        handler(name, ordering="none")(print)
    now = rows.now()
    Message.objects.bulk_create(
        Message(
            event_key=f"{name}-{n}",
            topic=name,
            handler=name,
            route=name,
            payload={},
            digest=b"",
            staged_at=now,
            due_at=now - timedelta(seconds=n),
        )
        for name in names
        for n in range(2)
    )
    own, claims, served = claimer(), 0, []
    while leases := own.claim(100, seconds=60).leases:
        claims += 1
        served.append({lease.handler.name for lease in leases})
    assert not Message.objects.due().exists()
    assert claims <= 12
    assert len(served[0]) == 100


@pytest.mark.parametrize("routes", [1, 9, 250, 600])
def test_an_idle_look_is_one_statement_whatever_the_number_of_topics(specimens, routes):
    """Scenario 62."""
    for number in range(routes):
        handler(f"topic.{number:03}")(print)
    own = claimer()
    own.claim(10, seconds=60)
    with CaptureQueriesContext(connection) as queries:
        assert own.claim(10, seconds=60).leases == []
    assert len(queries) == 1


# --- a claim waits for nobody -----------------------------------------------------------------------------------------


@rows_can_be_locked
@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [1, 10])
def test_a_claim_passes_by_rows_that_others_have_locked(second_connection, limit):
    """Scenario 41 and R6: also when the locked ones are the oldest, and more than one look holds."""
    stuck = [put("mail") for _ in range(30)]
    free = put("mail")
    own = claimer()
    with locked_elsewhere(second_connection, *stuck):
        found, looks = [], 0
        while not found and looks < 40:
            found = own.claim(limit, seconds=60).leases
            looks += 1
        assert [lease.id for lease in found] == [free.pk]
        assert own.claim(limit, seconds=60).contended


@rows_can_be_locked
@pytest.mark.timeout(20)
def test_a_row_that_must_run_alone_and_is_locked_does_not_stop_the_others(second_connection):
    crashing = put("mail", lapses=2, spent=1, due_at=rows.ago(600))
    other = put("mail")
    own = claimer()
    with locked_elsewhere(second_connection, crashing):
        assert [lease.id for lease in own.claim(5, seconds=60, alone=True).leases] == [other.pk]


@rows_can_be_locked
@pytest.mark.timeout(20)
def test_an_expired_head_whose_successor_is_locked_is_left_for_another_claim(second_connection):
    head = put("account", "a", expires_at=rows.ago(1))
    follower = rows.parked(head.lane, topic="account")
    other = put("account", "b")
    own = claimer()
    with locked_elsewhere(second_connection, follower):
        assert [lease.id for lease in own.claim(5, seconds=60).leases] == [other.pk]
        assert fresh(head).state == State.PENDING
        check_invariants()
    assert again_until(lambda: own.claim(5, seconds=60).leases)[0].id == follower.pk
    assert fresh(head).state == State.DISCARDED


def again_until(function, tries=200):
    """Call it until it returns something; what was locked is left alone for a moment."""
    for _ in range(tries):
        if found := function():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("nothing came")


# --- what must not start ----------------------------------------------------------------------------------------------


def test_an_expired_message_is_discarded_when_it_is_claimed():
    row = put("account", "a", expires_at=rows.ago(1))
    with heard(signals.discarded) as events:
        assert take() == []
    found = fresh(row)
    assert (found.state, found.reason, found.lane, found.due_at) == (State.DISCARDED, Reason.EXPIRED, None, None)
    assert (found.attempt, found.spent) == (0, 0)
    assert found.settled_at is not None
    assert Attempt.objects.get(message=row).outcome == Outcome.DISCARDED
    assert [(event.message.id, event.reason) for event in events] == [(row.pk, Reason.EXPIRED)]


def test_an_expired_message_lets_its_lane_go_on():
    put("account", "a", expires_at=rows.ago(1))
    follower = put("account", "a")
    own = claimer()
    found = own.claim(5, seconds=60).leases or own.claim(5, seconds=60).leases
    assert [lease.id for lease in found] == [follower.pk]
    check_invariants()


def test_a_message_expires_only_while_nobody_holds_it():
    row = put("mail", expires_at=rows.ahead(3600))
    (lease,) = take()
    Message.objects.filter(pk=row.pk).update(expires_at=rows.ago(1))
    assert end(lease).status == "settled"
    assert fresh(row).state == State.DELIVERED


def test_a_message_over_its_budget_is_dead_when_it_is_claimed():
    """The budget is compared with what the handler says now, not with what it said when the message was staged."""
    row = put("mail", attempt=BUDGET, spent=BUDGET)
    with heard(signals.buried) as events:
        assert take() == []
    found = fresh(row)
    assert (found.state, found.reason, found.due_at) == (State.DEAD, Reason.EXHAUSTED, None)
    assert Attempt.objects.get(message=row).number == BUDGET
    assert len(events) == 1


@pytest.mark.parametrize(("name", "stays"), [("account", False), ("stock", True)])
def test_a_message_that_a_claim_buries_follows_its_dead_head_policy(name, stays):
    row = put(name, "a", attempt=BUDGET, spent=BUDGET)
    follower = put(name, "a")
    own = claimer()
    found = own.claim(5, seconds=60).leases or own.claim(5, seconds=60).leases
    assert (fresh(row).lane is not None) is stays
    assert [lease.id for lease in found] == ([] if stays else [follower.pk])
    check_invariants()


# --- leases that run out ----------------------------------------------------------------------------------------------


def test_a_lease_that_ran_out_is_claimed_again_at_once():
    """Scenarios 22 and 29: by anybody, also under the same worker's name; no operator, no reaper."""
    row = put("account", "a")
    (first,) = take(seconds=-1)
    with heard(signals.retried) as events:
        (second,) = take(seconds=60)
    found = fresh(row)
    assert (second.id, second.attempt, found.spent, found.lapses) == (row.pk, 2, 2, 1)
    assert found.lease_token == second.token != first.token
    attempt = Attempt.objects.get(message=row)
    assert (attempt.number, attempt.outcome, attempt.worker) == (1, Outcome.LAPSED, "worker")
    assert attempt.started_at is not None
    assert [event.outcome for event in events] == [Outcome.LAPSED]


def test_a_lease_is_not_taken_over_before_it_ran_out():
    put("mail")
    take(seconds=60)
    assert take() == []


def test_a_second_lapse_in_a_row_is_a_crash_with_a_backoff():
    row = put("account", "a")
    take(seconds=-1), take(seconds=-1)
    with heard(signals.retried) as events:
        assert take() == []
    found = fresh(row)
    assert (found.state, found.attempt, found.spent, found.lapses) == (State.PENDING, 2, 2, 2)
    assert (found.lease_token, found.holder) == (None, None)
    assert in_seconds(found.due_at) == pytest.approx(BACKOFF, abs=5)
    assert found.error_type == "LeaseLapsed"
    assert list(found.attempts.values_list("number", "outcome")) == [(1, Outcome.LAPSED), (2, Outcome.CRASHED)]
    assert [event.outcome for event in events] == [Outcome.CRASHED]
    assert events[0].due_at is not None


def test_crashed_messages_come_back_spread_over_their_backoff():
    """Scenario 45."""
    ids = [put("flaky", attempt=2, spent=2, lapses=1, lease_token=5).pk for _ in range(40)]
    take()
    waits = [in_seconds(each) for each in Message.objects.filter(pk__in=ids).values_list("due_at", flat=True)]
    assert max(waits) - min(waits) > BACKOFF / 4
    assert all(-5 < wait <= BACKOFF * 2 for wait in waits)


def test_a_message_whose_claims_never_settle_dies_after_its_budget():
    """Invariant 5 and P1: dead after three claims, reason crashed."""
    row = put("mail")
    starts = 0
    for _ in range(8):
        starts += len(take(seconds=-1))
        Message.objects.pending().update(due_at=rows.ago(1))  # the backoff is over
    found = fresh(row)
    assert (starts, found.state, found.reason) == (BUDGET, State.DEAD, Reason.CRASHED)
    assert (found.attempt, found.spent, found.lease_token, found.due_at) == (BUDGET, BUDGET, None, None)
    assert list(found.attempts.values_list("outcome", flat=True)) == [Outcome.LAPSED, Outcome.CRASHED, Outcome.CRASHED]
    assert take() == []


def test_neighbours_that_never_started_lose_nothing_by_a_crash():
    """P1: nine prefetched messages die with their process, again and again, and none of their budget is spent."""
    crashing = put("mail", due_at=rows.ago(900))
    others = [put("mail") for _ in range(9)]
    for _ in range(2):
        assert len(take(10, seconds=-1, start=1)) == 10
        lapse(crashing)  # it stays the oldest
    take()  # notes the crashes
    assert {fresh(each).spent for each in others} == {0}
    assert fresh(crashing).spent == 2
    assert {fresh(each).state for each in others} == {State.PENDING}


def test_a_repeat_offender_runs_alone():
    crashing = put("mail", lapses=2, attempt=2, spent=1, due_at=rows.ago(1))
    others = {put("sms", due_at=rows.ago(600)).pk for _ in range(3)}
    busy = claimer().claim(10, seconds=60, alone=False)
    assert {lease.id for lease in busy.leases} == others
    assert busy.lonely
    put("sms")
    idle = claimer().claim(10, seconds=60, alone=True)
    assert [lease.id for lease in idle.leases] == [crashing.pk]


def test_many_repeat_offenders_do_not_hide_the_others():
    """They were due first, and they wait until this process holds nothing; it may be busy for ever."""
    for _ in range(90):
        put("mail", lapses=2, attempt=2, spent=1, due_at=rows.ago(600))
    healthy = put("mail")
    claim = claimer().claim(1, seconds=60, alone=False)
    assert [lease.id for lease in claim.leases] == [healthy.pk]


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_any_settlement_ends_the_count_of_lapses(name):
    row = put("mail")
    take(seconds=-1)
    (lease,) = take()
    assert lease.message.lapses == fresh(row).lapses == 1
    end(lease, name)
    assert fresh(row).lapses == 0


def test_a_lapsed_message_that_expired_is_discarded_and_the_lapse_is_noted():
    row = put("mail", expires_at=rows.ahead(3600))
    take(seconds=-1)
    Message.objects.filter(pk=row.pk).update(expires_at=rows.ago(1))
    assert take() == []
    assert fresh(row).reason == Reason.EXPIRED
    assert Attempt.objects.get(message=row).outcome == Outcome.CRASHED


def test_only_the_claimer_writes_the_attempt_of_a_lapsed_lease():
    row = put("mail")
    (stale,) = take(seconds=-1)
    (lease,) = take()
    assert end(stale, "retry").status == "lost"
    assert end(lease).status == "settled"
    assert list(fresh(row).attempts.values_list("number", "outcome")) == [(1, "lapsed"), (2, "delivered")]


# --- settle -----------------------------------------------------------------------------------------------------------

# verdict -> state, spent, seconds until due (None: never), reason, Attempts
EFFECTS = {
    "delivered": (State.DELIVERED, 1, None, "", 0),
    "retry": (State.PENDING, 1, BACKOFF, "", 1),
    "timeout": (State.PENDING, 1, BACKOFF, "", 1),
    "dead": (State.DEAD, 1, None, Reason.BURIED, 1),
    "discarded": (State.DISCARDED, 1, None, Reason.HANDLER, 1),
    "snooze": (State.PENDING, 0, 600, "", 1),
    "unavailable": (State.PENDING, 0, BACKOFF, "", 1),
    "release": (State.PENDING, 0, 0, "", 1),
    "interrupted": (State.PENDING, 0, 0, "", 1),
}


@pytest.mark.parametrize("name", sorted(VERDICTS))
@pytest.mark.parametrize("key", ["a", None])
def test_a_settlement_writes_its_outcome(name, key):
    row = put("account", key)
    (lease,) = take()
    settled = end(lease, name)
    found = fresh(row)
    state, spent, wait, reason, attempts = EFFECTS[name]
    assert settled.status == "settled"
    assert (found.state, found.attempt, found.spent, found.reason) == (state, 1, spent, reason)
    assert (found.lease_token, found.holder) == (None, None)
    assert found.lane == (row.lane if state == State.PENDING else None)
    assert (found.settled_at is None) is (state == State.PENDING)
    assert found.due_at == settled.due_at
    assert (found.due_at is None) if wait is None else (in_seconds(found.due_at) == pytest.approx(wait, abs=5))
    assert found.attempts.count() == attempts
    check_invariants()


def test_a_failure_is_recorded_with_all_its_text():
    row = put("mail")
    (lease,) = take()
    end(lease, "retry")
    found, attempt = fresh(row), Attempt.objects.get()
    for written in (found, attempt):
        assert (written.error_type, written.error_code, written.error_text) == (
            "builtins.ValueError",
            "E42",
            "no such customer",
        )
    assert (attempt.traceback, attempt.number, attempt.worker) == ("Traceback …", 1, "worker")
    assert (attempt.ended_at - attempt.started_at) == timedelta(seconds=0.5)


def test_a_success_at_the_first_attempt_leaves_one_row_and_a_later_one_its_attempt():
    row = put("mail")
    end(take()[0], "retry")
    make_due("default", [row.pk])
    end(take()[0])
    assert list(fresh(row).attempts.values_list("number", "outcome")) == [(1, "failed"), (2, "delivered")]


def test_a_settlement_may_name_the_moment_of_the_next_attempt():
    row = put("mail")
    until = rows.ahead(1234)
    settled = settle("default", [verdict(take()[0], "snooze", until=until)])[0]
    assert fresh(row).due_at == settled.due_at == until


def test_dead_heads_keep_their_lane_only_where_they_block():
    for name in ("account", "stock"):
        row = put(name, "a")
        end(take_one(row), "dead")
        assert (fresh(row).lane is not None) is (name == "stock")
    check_invariants()


@pytest.mark.parametrize("name", [name for name, each in VERDICTS.items() if each.get("refund")])
def test_only_what_was_charged_is_refunded(name):
    rows_ = [put("mail") for _ in range(2)]
    charged, queued = take(2, start=1)
    settle("default", [verdict(charged, name), verdict(queued, name)])
    assert [(fresh(row).attempt, fresh(row).spent) for row in rows_] == [(1, 0), (1, 0)]


def test_the_budget_is_never_negative():
    """A refund after a requeue that reset the budget meanwhile, as far as the fence lets it come."""
    row = put("mail")
    (lease,) = take()
    Message.objects.filter(pk=row.pk).update(spent=0)
    assert end(lease, "release").status == "settled"
    assert fresh(row).spent == 0


def test_a_release_gives_the_attempt_back_but_never_its_number():
    row = put("mail")
    for number in range(1, 4):
        (lease,) = take()
        assert lease.attempt == number
        end(lease, "release")
    assert (fresh(row).attempt, fresh(row).spent) == (3, 0)


def test_a_requeue_restores_the_budget_and_never_the_number():
    row = put("mail")
    end(take()[0], "dead")
    requeue("default", [row.pk])
    (lease,) = take()
    assert (lease.attempt, fresh(row).spent) == (2, 1)


def test_settling_nothing_is_nothing():
    assert settle("default", []) == []


# --- the fence --------------------------------------------------------------------------------------------------------


def delivered_by_another(row):
    Message.objects.filter(pk=row.pk).update(due_at=rows.ago(1))
    (lease,) = take()
    end(lease)


def held_by_another(row):
    lapse(row)
    assert len(take()) == 1


def discarded_by_a_person(row):
    lapse(row)
    assert discard("default", [row.pk]).done


LOSSES = {
    "held": held_by_another,
    "delivered": delivered_by_another,
    "discarded": discarded_by_a_person,
}


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("name", sorted(VERDICTS))
@pytest.mark.parametrize("key", ["a", None])
def test_a_lost_lease_cannot_settle(name, loss, key):
    """Scenario 15 and P4: whatever it says, it writes nothing at all, and it is told once."""
    row = put("account", key)
    (stale,) = take(seconds=60)
    LOSSES[loss](row)
    before, attempts = columns(row), Attempt.objects.count()
    with heard(signals.lease_lost) as lost, heard(signals.delivered) as others, heard(signals.retried) as retried:
        settled = end(stale, name)
        announce([settled])
    assert (settled.status, settled.next) == ("lost", None)
    assert columns(row) == before
    assert Attempt.objects.count() == attempts
    assert [event.message.id for event in lost] == [row.pk]
    assert others == retried == []


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_a_lease_that_ran_out_unclaimed_still_settles(name):
    """The token decides, not the clock."""
    row = put("account", "a")
    (lease,) = take(seconds=-100)
    assert end(lease, name).status == "settled"
    assert fresh(row).state == EFFECTS[name][0]
    check_invariants()


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_a_settled_lease_is_over(name):
    """R4: after a retry or a release the attempt number still matches; the token does not."""
    row = put("account", "a")
    (lease,) = take()
    end(lease, name)
    before = columns(row)
    assert end(lease).status == "lost"
    assert renew("default", [lease], 600).lost == {lease}
    assert charge("default", [lease]) == []
    assert columns(row) == before


@pytest.mark.parametrize("key", ["a", None])
def test_the_state_is_part_of_the_fence(key):
    """Somebody buried it by hand, and left the token."""
    row = put("account", key)
    leases = take(start=0)
    Message.objects.filter(pk=row.pk).update(state=State.DEAD)
    before = columns(row)
    assert renew("default", leases, 600).lost == {*leases}
    assert charge("default", leases) == []
    for name in ("delivered", "retry"):
        assert end(leases[0], name).status == "lost"
    assert columns(row) == before


def test_the_first_of_two_settlements_in_one_group_stands():
    row = put("mail")
    (lease,) = take()
    results = settle("default", [verdict(lease, "interrupted"), verdict(lease)])
    assert [each.status for each in results] == ["settled", "lost"]
    assert fresh(row).state == State.PENDING


def test_one_stolen_lease_among_a_hundred_completions():
    """P10: ninety-nine are recorded, one is reported lost."""
    ids = [put("mail").pk for _ in range(100)]
    leases = take(100)
    stolen = leases[41]
    lapse(stolen.message)
    take_one(stolen.message)
    results = settle("default", [verdict(lease) for lease in leases])
    assert [each.settlement.lease.id for each in results] == ids
    assert [each.settlement.lease.id for each in results if each.status == "lost"] == [stolen.id]
    assert Message.objects.delivered().count() == 99


def test_each_row_of_a_group_is_fenced_by_its_own_token():
    """The same process has claimed one of them again: two lists of ids and tokens would let the old result through."""
    first = put("mail")
    (stale,) = take(seconds=-1)
    second = put("mail")
    fresh_leases = {lease.id: lease for lease in take()}
    assert fresh_leases.keys() == {first.pk, second.pk}
    results = settle("default", [verdict(stale), verdict(fresh_leases[second.pk])])
    assert [each.status for each in results] == ["lost", "settled"]
    assert (fresh(first).state, fresh(second).state) == (State.PENDING, State.DELIVERED)
    assert fresh(first).lease_token == fresh_leases[first.pk].token


def test_one_poison_message_in_a_batch_costs_the_others_nothing():
    """P10: the five good ones are settled once, whatever becomes of the sixth, pass after pass."""
    poison = put("mail", due_at=rows.ago(900))
    good = [put("mail") for _ in range(5)]
    for _ in range(BUDGET):
        leases = take()
        settle("default", [verdict(each, "retry" if each.id == poison.pk else "delivered") for each in leases])
        make_due("default", [poison.pk])
    assert [fresh(row).attempt for row in good] == [1] * 5
    assert fresh(poison).attempt == BUDGET


def test_a_deleted_row_is_lost_and_nothing_is_recreated():
    """Scenario 58."""
    gone, other = put("account", "a"), put("account", "b")
    leases = take()
    Message.objects.filter(pk=gone.pk).delete()
    assert [lease.id for lease in renew("default", leases, 60).lost] == [gone.pk]
    assert [each.status for each in settle("default", [verdict(lease, "retry") for lease in leases])] == [
        "lost",
        "settled",
    ]
    assert not Message.objects.filter(pk=gone.pk).exists()
    assert not Attempt.objects.filter(message_id=gone.pk).exists()
    assert fresh(other).spent == 1


# --- a settlement waits for nobody ------------------------------------------------------------------------------------


@rows_can_be_locked
@pytest.mark.timeout(20)
def test_a_locked_row_is_busy_and_holds_up_no_other_settlement(second_connection):
    busy, other = put("mail"), put("mail")
    leases = take()
    with locked_elsewhere(second_connection, busy):
        results = settle("default", [verdict(lease) for lease in leases])
        assert [each.status for each in results] == ["busy", "settled"]
        assert fresh(busy).state == State.PENDING
        with heard(signals.delivered) as events:
            announce(results)
        assert [event.message.id for event in events] == [other.pk]
    assert end(leases[0]).status == "settled"


@rows_can_be_locked
@pytest.mark.timeout(20)
def test_a_locked_successor_leaves_the_settlement_undone(second_connection):
    """Who goes on without that lock relies on a row that is being settled (R5)."""
    head, other = put("account", "a"), put("account", "b")
    follower = rows.parked(head.lane, topic="account")
    leases = take()
    with locked_elsewhere(second_connection, follower):
        results = settle("default", [verdict(lease) for lease in leases])
        assert [each.status for each in results] == ["busy", "settled"]
        assert fresh(head).lease_token == leases[0].token
        assert fresh(other).state == State.DELIVERED
    assert end(leases[0]).status == "settled"
    assert Message.objects.due().filter(pk=follower.pk).exists()


@rows_can_be_locked
def test_inside_the_callers_transaction_a_settlement_waits_its_turn(second_connection):
    """A handler that is atomic must not fail because the heartbeat renews its row at that moment."""
    row = put("account", "a")
    follower = rows.parked(row.lane, topic="account")
    (lease,) = take()
    for locked in (row, follower):
        actor = Actor("settler")
        try:
            with locked_elsewhere(second_connection, locked):
                actor.begin(lambda: settle_atomically(lease))
                actor.let_go()
                assert not actor.settle_down(0.3, "idle")
            assert actor.finish() == "settled"
        finally:
            actor.close()
    assert fresh(row).state == State.PENDING  # rolled back each time


def settle_atomically(lease):
    """Settle inside an atomic block that is then rolled back."""
    with transaction.atomic():
        settled = end(lease)
        transaction.set_rollback(True)
    return settled.status


# --- renew and charge -------------------------------------------------------------------------------------------------


def test_a_renewal_prolongs_everything_held_with_one_statement_pair():
    """Invariant 6."""
    for number in range(50):
        put("account", f"k{number}")
    leases = take(50, seconds=10)
    deadlines = [lease.deadline for lease in leases]
    with CaptureQueriesContext(connection) as queries:
        renewal = renew("default", leases, 600)
    assert renewal.renewed == set(leases)
    assert (renewal.lost, renewal.busy) == (frozenset(), frozenset())
    assert len([each for each in queries if "outbox_message" in each["sql"]]) == 2
    assert all(in_seconds(each) > 500 for each in Message.objects.values_list("due_at", flat=True))
    assert all(lease.deadline > before + 500 for lease, before in zip(leases, deadlines, strict=True))


def test_a_renewed_lease_is_not_taken_over():
    """P2 and P3: a handler longer than its lease, and a message waiting in the local queue, run once."""
    put("mail")
    leases = take(seconds=-1, start=0)
    renew("default", leases, 60)
    assert take() == []


def test_a_renewal_saves_a_lease_that_ran_out_unclaimed():
    put("mail")
    leases = take(seconds=-100)
    assert renew("default", leases, 60).renewed == set(leases)


def test_a_renewal_leaves_what_is_not_ours_any_more():
    """R4: a late heartbeat turns no backoff into a lease, and revives no parked row."""
    retried, taken, parked = put("mail"), put("sms"), put("account", "a")
    leases = take(seconds=60)
    end(next(lease for lease in leases if lease.id == retried.pk), "retry")
    held_by_another(taken)
    Message.objects.filter(pk=parked.pk).update(due_at=None, lease_token=None, holder=None)
    before = [columns(row) for row in (retried, taken, parked)]
    renewal = renew("default", leases, 600)
    assert renewal.lost == set(leases)
    assert renewal.renewed == renewal.busy == frozenset()
    assert [columns(row) for row in (retried, taken, parked)] == before


@rows_can_be_locked
@pytest.mark.timeout(20)
def test_a_renewal_and_a_charge_pass_by_locked_rows(second_connection):
    busy, other = put("mail"), put("mail")
    leases = take(seconds=60, start=0)
    with locked_elsewhere(second_connection, busy):
        renewal = renew("default", leases, 600)
        assert (renewal.renewed, renewal.busy, renewal.lost) == ({leases[1]}, {leases[0]}, frozenset())
        assert [lease.id for lease in charge("default", leases)] == [other.pk]
    assert [lease.id for lease in charge("default", leases[:1])] == [busy.pk]


def test_renewing_or_charging_nothing_asks_nothing(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert renew("default", [], 60).renewed == frozenset()
        assert charge("default", []) == []


def test_a_charge_takes_one_attempt_from_the_budget_just_before_the_start():
    row = put("mail")
    leases = take(start=0)
    assert charge("default", leases) == leases
    assert fresh(row).spent == leases[0].message.spent == 1
    assert leases[0].charged
    end(leases[0], "release")
    assert fresh(row).spent == 0


def test_of_two_leases_of_one_message_only_the_new_one_is_charged_and_renewed():
    """A process that was frozen has claimed its own message again: what it still holds of old must not start."""
    row = put("mail")
    (old,) = take(seconds=-1, start=0)
    (new,) = take(start=0)
    assert charge("default", [old, new]) == [new]
    assert (fresh(row).spent, old.charged) == (1, False)
    deadline = old.deadline
    renewal = renew("default", [new, old], 60)
    assert (renewal.renewed, renewal.lost, renewal.busy) == ({new}, {old}, frozenset())
    assert old.deadline == deadline


def test_a_charge_is_fenced_for_each_row():
    first = put("mail")
    (stale,) = take(seconds=-1, start=0)
    second = put("mail")
    leases = {lease.id: lease for lease in take(start=0)}
    assert charge("default", [stale, leases[second.pk]]) == [leases[second.pk]]
    assert (fresh(first).spent, stale.charged, leases[first.pk].charged) == (0, False, False)


# --- lost replies and races -------------------------------------------------------------------------------------------


def test_a_claim_whose_commit_was_never_answered_is_recognised():
    """The token was drawn before: rows that carry it are ours."""
    ids = {put("mail").pk for _ in range(3)}
    own = claimer()
    with reply_lost(), pytest.raises(OperationalError):
        own.claim(3, seconds=60)
    later = put("mail")
    adopted = own.claim(10, seconds=600)
    assert {lease.id for lease in adopted.leases} == ids
    assert adopted.more
    assert all(in_seconds(fresh(lease.message).due_at) > 500 for lease in adopted.leases)
    assert {end(lease).status for lease in adopted.leases} == {"settled"}
    assert [lease.id for lease in own.claim(10, seconds=60).leases] == [later.pk]


def test_a_claim_that_was_not_committed_leaves_nothing_to_recognise():
    row = put("mail")
    own = claimer()
    with connection.execute_wrapper(connection_dies_at("UPDATE")), pytest.raises(OperationalError):
        own.claim(3, seconds=60)
    assert [lease.id for lease in own.claim(3, seconds=60).leases] == [row.pk]
    assert fresh(row).attempt == 1


def test_a_recognised_claim_leaves_out_what_was_taken_over_meanwhile():
    first, second = put("mail"), put("mail")
    own = claimer()
    with reply_lost(), pytest.raises(OperationalError):
        own.claim(3, seconds=-1)
    take_one(first)
    assert [lease.id for lease in own.claim(3, seconds=60).leases] == [second.pk]


def connection_dies_at(word):
    def wrapper(execute, sql, params, many, context):
        if sql.startswith(word):
            raise OperationalError("server closed the connection unexpectedly")
        return execute(sql, params, many, context)

    return wrapper


@pytest.mark.parametrize("name", sorted(VERDICTS))
@pytest.mark.parametrize("key", ["a", None])
def test_a_settlement_whose_commit_was_never_answered_is_recognised(name, key):
    """Otherwise a delivered message is called lost."""
    row = put("account", key)
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease, name)], token=token)
    before, attempts = columns(row), Attempt.objects.count()
    (settled,) = settle("default", [verdict(lease, name)], token=token, recheck=True)
    assert (settled.status, settled.due_at) == ("settled", fresh(row).due_at)
    assert columns(row) == before
    assert Attempt.objects.count() == attempts


def test_a_hand_over_whose_commit_was_never_answered_is_recognised():
    """Otherwise the next message of the lane is held by nobody."""
    first, second = put("account", "a"), put("account", "a")
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease)], token=token, hand_over=hand_over)
    (settled,) = settle("default", [verdict(lease)], token=token, seconds=600, hand_over=hand_over, recheck=True)
    assert settled.next is not None
    assert (settled.next.id, settled.next.token, settled.next.run) == (second.pk, token, 1)
    assert in_seconds(fresh(second).due_at) > 500
    assert fresh(second).attempt == 1
    assert end(settled.next).status == "settled"
    assert fresh(first).state == State.DELIVERED


def test_what_was_not_committed_is_settled_by_the_second_try():
    row = put("mail")
    (lease,) = take()
    with connection.execute_wrapper(connection_dies_at("UPDATE")), pytest.raises(OperationalError):
        end(lease)
    assert settle("default", [verdict(lease)], recheck=True)[0].status == "settled"
    assert fresh(row).state == State.DELIVERED


@pytest.mark.parametrize("name", ["delivered", "discarded", "retry"])
def test_what_an_operator_or_a_claimer_wrote_is_not_taken_for_our_own(name):
    """Attempt mine and token empty, but the state or the lapses say that it was somebody else."""
    row, crashed = put("mail"), put("sms", lapses=1)
    leases = take()
    lapse(row, crashed)
    assert discard("default", [row.pk]).done
    assert take() == []  # notes the crash
    assert fresh(crashed).lapses == 2
    results = settle("default", [verdict(lease, name) for lease in leases], recheck=True)
    assert [each.status for each in results] == ["lost", "lost"]


def test_without_a_lost_reply_an_empty_token_is_nobodys():
    (lease,) = [put("mail") and take()[0]]
    end(lease)
    assert settle("default", [verdict(lease)])[0].status == "lost"


def test_a_charge_whose_commit_was_never_answered_is_not_made_twice():
    row = put("mail")
    leases = take(start=0)
    with reply_lost(), pytest.raises(OperationalError):
        charge("default", leases)
    assert not leases[0].charged
    assert charge("default", leases) == leases
    assert fresh(row).spent == leases[0].message.spent == 1


def race_errors():
    """Errors as the driver raises them when a transaction lost a deadlock, a serialization or a lock wait."""
    if connection.vendor == "postgresql":
        from psycopg import errors

        return [errors.DeadlockDetected(), errors.SerializationFailure()]
    if connection.vendor == "mysql":
        from MySQLdb import OperationalError as MySQLError

        return [MySQLError(1213, "Deadlock found"), MySQLError(1205, "Lock wait timeout exceeded")]
    import sqlite3

    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = 261  # SQLITE_BUSY_RECOVERY, an extended code of SQLITE_BUSY
    return [error]


@contextmanager
def victims(*, at, times):
    """The first so many statements that begin with a word become victims of somebody else's transaction."""
    left = [times]

    def wrapper(execute, sql, params, many, context):
        if sql.startswith(at) and left[0]:
            left[0] -= 1
            cause = race_errors()[left[0] % len(race_errors())]
            raise OperationalError(*cause.args) from cause
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


def test_victims_of_deadlocks_are_done_again():
    """Scenario 43: claims, renewals, charges and settlements, each as a whole, and its effect is there once."""
    row = put("account", "a")
    with victims(at="UPDATE", times=2):
        (lease,) = take(start=0)
    with victims(at="UPDATE", times=2):
        assert renew("default", [lease], 60).renewed == {lease}
    with victims(at="UPDATE", times=2):
        assert charge("default", [lease]) == [lease]
    with victims(at="INSERT", times=2):
        assert end(lease, "retry").status == "settled"
    found = fresh(row)
    assert (found.attempt, found.spent, found.attempts.count()) == (1, 1, 1)
    assert lease.token != 0


def test_a_claim_that_is_done_again_keeps_its_token_and_its_room():
    for _ in range(5):
        put("mail")
    tokens = []

    def note(execute, sql, params, many, context):
        if sql.startswith("UPDATE"):
            tokens.append(next(value for value in params if isinstance(value, int) and value > 2**40))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note), victims(at="UPDATE", times=3):
        leases = claimer().claim(5, seconds=60, room={"mail": 4}).leases
    assert len(leases) == 4
    assert len(set(tokens)) == 1


def test_a_race_that_never_ends_reaches_the_caller_and_leaves_nothing_behind():
    row = put("mail")
    before = columns(row)
    with victims(at="UPDATE", times=1000), pytest.raises(OperationalError):
        take()
    assert columns(row) == before
    assert [lease.id for lease in take()] == [row.pk]


@rows_can_be_locked
def test_a_real_deadlock_is_done_again():
    first, second = put("mail"), put("mail")
    barrier, once = threading.Barrier(2), threading.local()

    def update(one, other):
        def work():
            Message.objects.filter(pk=one.pk).update(spent=1)
            if not getattr(once, "met", False):
                once.met = True
                barrier.wait(10)
            Message.objects.filter(pk=other.pk).update(spent=2)

        return lambda: again("default", work)

    rows.at_once(update(first, second), update(second, first))
    assert {fresh(first).spent, fresh(second).spent} == {1, 2}


def test_a_transaction_that_is_stale_is_done_again_but_not_for_ever():
    tries = []

    def work():
        tries.append(1)
        raise Stale("always")

    with pytest.raises(Stale):
        again("default", work)
    assert len(tries) > 3
    tries.clear()
    with transaction.atomic(), pytest.raises(Stale):
        again("default", work)
    assert len(tries) > 3


# --- transactions -----------------------------------------------------------------------------------------------------


def statements(queries):
    return [each["sql"] for each in queries if "outbox_message" not in each["sql"]]


def test_no_isolation_is_set_where_it_is_the_default_already():
    with short_transaction("default"):
        pass  # asks for the default
    put("account", "a")
    with CaptureQueriesContext(connection) as queries:
        end(take()[0])
    assert not [sql for sql in statements(queries) if "ISOLATION" in sql.upper()]


def test_inside_an_open_transaction_nothing_is_set():
    """The testing kit's drain() runs claims and settlements in the test's own transaction."""
    put("account", "a")
    follower = put("account", "a")
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        lease = take()[0]
        assert renew("default", [lease], 60).renewed
        assert end(lease, hand_over=hand_over).next.id == follower.pk
    assert not [sql for sql in statements(queries) if sql.upper().startswith("SET")]


@pytest.fixture
def repeatable_read():
    """A connection on which transactions are REPEATABLE READ unless they say otherwise."""
    connection.close()
    connection.ensure_connection()
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET default_transaction_isolation TO 'repeatable read'")
        else:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    yield
    connection.close()


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_claims_are_read_committed_on_a_repeatable_read_connection(second_connection):
    """Invariant 4: what others commit meanwhile is seen; afterwards the connection is as it was."""
    other = second_connection()

    def count_twice():
        first = Message.objects.count()
        with other.cursor() as cursor:
            cursor.execute("DELETE FROM outbox_message")
        return first, Message.objects.count()

    put("mail")
    with short_transaction("default"):
        assert count_twice() == (1, 0)
    put("mail")
    with transaction.atomic():
        assert count_twice() == (1, 1)


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_the_whole_path_works_on_a_repeatable_read_connection():
    put("account", "a")
    follower = put("account", "a")
    (lease,) = take()
    renew("default", [lease], 60)
    assert end(lease, hand_over=hand_over).next.id == follower.pk
    check_invariants()


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_a_session_that_is_gone_at_the_begin_of_a_transaction_leaves_nothing_open():
    """Scenario 43: on PostgreSQL setting the level is the first thing that the server hears of a transaction."""
    put("mail")
    (lease,) = take()
    renew("default", [lease], 60)
    rows.at_once(cut_sessions)
    with pytest.raises(Error):
        renew("default", [lease], 60)
    assert not connection.in_atomic_block
    close_quietly("default")
    assert renew("default", [lease], 60).renewed == {lease}


def test_no_transaction_is_open_after_a_claim_or_a_settlement():
    """Scenario 36."""
    put("mail")
    (lease,) = take()
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    end(lease)
    assert not connection.in_atomic_block


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has transactions that cannot be upgraded")
def test_a_claim_waits_for_the_write_lock_instead_of_failing(second_connection):
    """Scenario 39: whatever transaction_mode the project has set, our transactions take the write lock at once."""
    row = put("mail")
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute("UPDATE outbox_message SET leased_by = ''")
    actor = Actor("claimer")
    try:
        actor.begin(lambda: deferred(take))
        actor.let_go()
        assert not actor.settle_down(0.3, "idle")
        other.commit()
        assert [lease.id for lease in actor.finish()] == [row.pk]
    finally:
        other.rollback()
        actor.close()


def deferred(function):
    """Call it on a connection whose transactions begin without a lock, as Django's do by default."""
    connection = connections["default"]
    connection.ensure_connection()
    connection.transaction_mode = None
    return function()


def test_the_servers_clock_decides(monkeypatch):
    """Scenario 19, without a server whose clock can be set: what this machine says matters on SQLite only."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no server: its clock is this machine's")
    import time

    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
    put("mail")
    (lease,) = take(seconds=60)
    assert take() == []
    assert abs(server_now("default") - now // 1000) < 60 * 10**6
    assert end(lease).status == "settled"


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("delivered", signals.delivered),
        ("retry", signals.retried),
        ("timeout", signals.retried),
        ("dead", signals.buried),
        ("discarded", signals.discarded),
        ("snooze", signals.snoozed),
        ("unavailable", signals.snoozed),
        ("release", signals.released),
        ("interrupted", signals.released),
    ],
)
def test_each_verdict_is_told_by_its_signal_after_the_commit(name, signal):
    row = put("mail")
    (lease,) = take()
    with heard(signal) as events:
        settled = end(lease, name)
        assert events == []
        announce([settled])
    (event,) = events
    assert (event.message.id, event.handler, event.using, event.worker) == (row.pk, "mail", "default", "worker")
    assert (event.outcome, event.due_at) == (VERDICTS[name]["outcome"], fresh(row).due_at)


def test_a_receiver_that_raises_changes_nothing(caplog):
    def receive(sender, event, **_):
        raise RuntimeError("broken receiver")

    signals.discarded.connect(receive)
    try:
        expired, row = put("mail", expires_at=rows.ago(1)), put("mail")
        assert [lease.id for lease in take()] == [row.pk]
    finally:
        signals.discarded.disconnect(receive)
    assert fresh(expired).state == State.DISCARDED
    assert "broken receiver" in caplog.text
