"""What a claim settles instead of starting it, and leases that run out: crashes count, and cost no neighbour."""

import pytest

from outbox import signals
from outbox.models import Attempt, Message, Outcome, Reason, State
from tests import rows
from tests.specimens import (
    BACKOFF,
    BUDGET,
    VERDICTS,
    check_invariants,
    claimer,
    end,
    fresh,
    heard,
    in_seconds,
    lapse,
    put,
    specimens,
    take,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]


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


def test_the_next_of_a_lane_whose_head_expired_keeps_its_place_among_what_is_due():
    put("account", "a", expires_at=rows.ago(1), due_at=rows.ago(300))
    behind = put("account", "a", due_at=rows.ago(200))
    assert take() == []
    assert fresh(behind).due_at == behind.due_at


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


def test_a_message_whose_only_attempt_never_ended_is_dead_by_a_crash():
    row = put("mail", spent=BUDGET - 1)
    take()
    lapse(row)
    with heard(signals.buried) as events:
        assert take() == []
    assert (fresh(row).state, fresh(row).reason) == (State.DEAD, Reason.CRASHED)
    assert [event.reason for event in events] == [Reason.CRASHED]


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
