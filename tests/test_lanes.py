"""The order within a lane, and each race that could break it (R1 to R9 of the ordering notes), with its guard."""

import threading

import pytest
from django.db import connection, transaction

from outbox import lanes
from outbox.database import Stale, again
from outbox.handlers import lane_of
from outbox.leases import looking, settle
from outbox.leases.settling import LONGEST_RUN
from outbox.models import Attempt, Message, Outcome, State
from outbox.operations import discard, make_due, requeue
from outbox.retention import sweep
from tests import rows
from tests.specimens import (
    BUDGET,
    check_invariants,
    claimer,
    columns,
    end,
    fresh,
    hand_over,
    in_seconds,
    lapse,
    locked_elsewhere,
    place,
    put,
    rows_can_be_locked,
    specimens,
    take,
    take_one,
    verdict,
)
from tests.stepping import actors
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["actors", "specimens"]


def places(*messages):
    """Where each message is, in one word."""
    now = rows.now()
    return [place(columns(row), now) for row in messages]


def lane_of_(name="account", count=3, key="a"):
    """Messages of one lane, oldest first."""
    return [put(name, key) for _ in range(count)]


def drained(most=200):
    """Deliver everything that can be delivered, one claim after the other; the ids in the order of their starts."""
    own, order = claimer(), []
    for _ in range(most):
        claim = own.claim(10, seconds=60)
        leases = claim.leases
        while leases:
            order += [lease.id for lease in leases]
            results = settle("default", [verdict(lease) for lease in leases], hand_over=hand_over)
            leases = [each.next for each in results if each.next]
        check_invariants()
        if not (claim.leases or claim.more):
            return order
    raise AssertionError(f"no end: {order}")


# --- which lane -------------------------------------------------------------------------------------------------------


def test_a_lane_belongs_to_one_handler_and_one_key(specimens):
    account, stock, ledger, mail = map(specimens.by_name, ("account", "stock", "ledger", "mail"))
    assert account.lane("a") == account.lane("a") != account.lane("b")
    assert account.lane("a") != stock.lane("a")
    assert account.lane(None) is None
    assert ledger.lane("a") == ledger.lane("b") == ledger.lane(None)
    assert ledger.lane(None) is not None
    assert mail.lane("a") is None
    assert account.lane("") not in (None, ledger.lane(None))


def test_no_ids_are_no_messages():
    put("mail")
    assert list(lanes.pending("default", [])) == []


def test_a_lane_number_fits_a_signed_64_bit_column():
    numbers = [lane_of("account", f"={n}") for n in range(200)]
    assert len(set(numbers)) == 200
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert min(numbers) < 0 < max(numbers)


def test_lanes_that_collide_are_served_as_one():
    first, second = put("account", "a"), put("stock", "b")
    Message.objects.filter(pk=second.pk).update(lane=first.lane)
    settled = end(take_one(first), hand_over=hand_over)
    assert settled.next is None  # each handler has its own share of the slots
    assert drained() == [second.pk]


# --- order ------------------------------------------------------------------------------------------------------------


def test_only_the_oldest_of_a_lane_is_in_flight():
    """Invariant 7."""
    first, second, third = lane_of_()
    other = put("account", "b")
    assert [lease.id for lease in take()] == [first.pk, other.pk]
    assert take() == []
    assert places(first, second, third, other) == ["leased", "parked", "parked", "leased"]
    check_invariants()


def test_messages_without_a_key_are_in_no_order():
    for _ in range(3):
        put("account", None)
    assert len(take()) == 3


def test_a_whole_topic_can_be_one_lane():
    first, second = put("ledger", "a"), put("ledger", "b")
    assert [lease.id for lease in take()] == [first.pk]
    assert drained() == []
    assert places(first, second) == ["leased", "parked"]


def test_a_lane_is_drained_in_the_order_of_its_ids():
    expected = {key: [row.pk for row in lane_of_(count=5, key=key)] for key in "abc"}
    order = drained()
    by_id = {pk: key for key, ids in expected.items() for pk in ids}
    for key, ids in expected.items():
        assert [pk for pk in order if by_id[pk] == key] == ids


def test_a_retrying_message_holds_its_own_lane_only():
    """Scenario 46: A, B, C in order; the others are done meanwhile; the retry keeps its place."""
    a, b, c = lane_of_()
    others = [put("account", f"u{n}").pk for n in range(20)]
    leases = take()
    assert {lease.id for lease in leases} == {a.pk, *others}
    settle("default", [verdict(lease, "retry" if lease.id == a.pk else "delivered") for lease in leases])
    assert drained() == []
    assert places(a, b, c) == ["waiting", "parked", "parked"]
    make_due("default", [a.pk])
    assert drained() == [a.pk, b.pk, c.pk]


@pytest.mark.parametrize("name", ["snooze", "unavailable", "retry"])
def test_a_waiting_head_holds_its_lane(name):
    head, follower = lane_of_(count=2)
    end(take_one(head), name, hand_over=hand_over)
    assert drained() == []
    assert places(head, follower) == ["waiting", "parked"]


def test_a_scheduled_head_holds_its_lane():
    head = put("account", "a", due_at=rows.ahead(3600))
    follower = put("account", "a")
    assert drained() == []
    assert places(head, follower) == ["waiting", "parked"]


@pytest.mark.parametrize("name", ["release", "interrupted"])
def test_a_released_head_is_first_again(name):
    head, follower = lane_of_(count=2)
    end(take_one(head), name, hand_over=hand_over)
    assert places(head, follower) == ["due", "due"]
    assert drained() == [head.pk, follower.pk]


def test_a_dead_head_lets_its_lane_go_on_unless_it_blocks():
    """Scenario 47, both policies."""
    skipping, blocking = lane_of_("account", 2), lane_of_("stock", 2)
    leases = [take_one(head) for head, _ in (skipping, blocking)]
    take()
    assert places(*skipping, *blocking) == ["leased", "parked", "leased", "parked"]
    for lease in leases:
        end(lease, "dead")
    assert places(*skipping, *blocking) == ["gone", "due", "blocking", "parked"]
    assert drained() == [skipping[1].pk]
    check_invariants()


def test_a_requeued_head_that_blocked_is_first_again():
    """Scenario 47."""
    head, follower = lane_of_("stock", 2)
    end(take_one(head), "dead")
    assert drained() == []
    requeue("default", [head.pk])
    assert drained() == [head.pk, follower.pk]


def test_a_requeued_message_of_a_lane_that_went_on_gives_up_its_order_but_not_the_lane():
    """Scenario 47: it runs once, and never beside another message of its lane."""
    head, follower = lane_of_(count=2)
    end(take_one(head), "dead")
    running = take_one(follower)
    requeue("default", [head.pk])
    assert take() == []
    end(running)
    assert drained() == [head.pk]


@rows_can_be_locked
@pytest.mark.parametrize("commits", [True, False])
def test_the_late_committer_with_the_lower_id_is_delivered(actors, commits):
    """Scenario 14: never skipped, and nobody waits for it; if it rolls back, nothing stalls."""
    base = put("mail", due_at=rows.ahead(3600)).pk
    (writer,) = actors("writer")

    def stage_low():
        with transaction.atomic():
            put("account", "a", id=base + 1000)
            transaction.set_rollback(not commits)

    writer.begin(stage_low)
    writer.run_until("INSERT")
    writer.step(5)
    high = put("account", "a", id=base + 1001)
    (lease,) = take()
    assert lease.id == high.pk
    writer.finish()
    assert take() == []
    check_invariants()
    if commits:
        assert places(Message(pk=base + 1000)) == ["parked"]  # behind a leased row everybody sleeps
    end(lease)
    assert drained() == ([base + 1000] if commits else [])


def test_a_message_staged_meanwhile_is_a_knock_that_is_parked_at_its_claim():
    head = put("account", "a")
    lease = take_one(head)
    late = put("account", "a")
    assert places(late) == ["due"]
    assert take() == []
    assert places(late) == ["parked"]
    end(lease)
    assert drained() == [late.pk]


def test_a_head_that_this_process_cannot_run_is_left_alone_and_its_followers_sleep():
    head = put("account", "a", route="account@9", payload_version=9)
    follower = put("account", "a")
    before = columns(head)
    assert drained() == []
    assert places(head, follower) == ["due", "parked"]
    assert columns(head) == before


def test_a_sleeping_head_that_this_process_cannot_run_is_woken_for_one_that_can():
    head = rows.parked(put("account", "a").lane, topic="account", route="account@9")
    Message.objects.exclude(pk=head.pk).delete()
    follower = put("account", "a")
    assert head.pk < follower.pk
    assert take() == []
    assert places(head, follower) == ["due", "parked"]
    check_invariants()


def test_a_head_for_which_there_is_no_room_is_not_forgotten():
    head, follower = lane_of_(count=2)
    Message.objects.filter(pk=head.pk).update(due_at=None)
    mail = put("mail", due_at=rows.ago(900))
    assert [lease.id for lease in claimer().claim(1, seconds=60).leases] == [mail.pk]
    check_invariants()
    assert drained() == [head.pk, follower.pk]


# --- lapses in a lane -------------------------------------------------------------------------------------------------


def test_a_lapsed_lease_keeps_its_place_in_the_lane():
    """Scenario 15: the take-over is the same message again, never its follower."""
    head, follower = lane_of_(count=2)
    stale = take_one(head)
    take()
    lapse(head)
    (second,) = take()
    assert (second.id, second.attempt) == (head.pk, 2)
    assert end(stale, hand_over=hand_over).status == "lost"
    assert places(head, follower) == ["leased", "parked"]
    end(second)
    assert drained() == [follower.pk]


def test_a_crashed_head_holds_its_lane_until_its_backoff_is_over():
    head, follower = lane_of_(count=2)
    for _ in range(2):
        take_one(head)
        lapse(head)
    assert take() == []
    assert take() == []
    assert places(head, follower) == ["waiting", "parked"]
    assert fresh(head).lapses == 2
    check_invariants()


def test_a_lane_goes_on_when_its_head_has_crashed_for_the_last_time():
    head, follower = lane_of_(count=2)
    take()
    Message.objects.filter(pk=head.pk).update(spent=BUDGET, due_at=rows.ago(1))
    found = claimer().claim(5, seconds=60)
    assert found.leases == []
    assert fresh(head).state == State.DEAD
    assert drained() == [follower.pk]


def test_a_repeat_offender_is_never_handed_over():
    head, follower = lane_of_(count=2)
    Message.objects.filter(pk=follower.pk).update(lapses=2, spent=1)
    settled = end(take_one(head), hand_over=hand_over)
    assert settled.next is None
    claim = claimer().claim(5, seconds=60, alone=False)
    assert claim.leases == []
    assert claim.lonely
    assert [lease.id for lease in take(alone=True)] == [follower.pk]


# --- hand-over --------------------------------------------------------------------------------------------------------


def test_a_settlement_hands_the_next_of_the_lane_to_the_same_worker():
    first, second = lane_of_(count=2)
    lease = take_one(first)
    settled = end(lease, hand_over=hand_over, seconds=60)
    follower, found = settled.next, fresh(second)
    assert (follower.id, follower.charged, follower.worker, follower.run) == (second.pk, True, "worker", 1)
    assert (found.attempt, found.spent, found.holder, found.lease_token) == (1, 1, found.lane, follower.token)
    assert follower.token != lease.token
    assert in_seconds(found.due_at) == pytest.approx(60, abs=5)
    assert follower.envelope.payload == {"n": 1}
    check_invariants()


@rows_can_be_locked
def test_a_lane_that_was_locked_for_long_is_claimed_as_soon_as_it_is_free(second_connection, monkeypatch):
    monkeypatch.setattr("outbox.leases.looking.LEAVE_ALONE", 0.0)
    head, _ = lane_of_(count=2)
    own = claimer()
    with locked_elsewhere(second_connection, head):
        assert own.claim(10, seconds=60).leases == []
    monkeypatch.setattr("outbox.leases.looking.PATIENCE", 0.0)  # that was long
    claim = own.claim(10, seconds=60)
    assert [lease.id for lease in claim.leases] == [head.pk]
    assert not claim.snoozed


def test_a_settlement_without_hand_over_wakes_the_next_for_anybody():
    first, second = lane_of_(count=2)
    lease = take_one(first)
    take()
    assert places(second) == ["parked"]
    assert end(lease).next is None
    assert places(second) == ["due"]


def test_who_settles_may_refuse_to_go_on():
    first, second = lane_of_(count=2)
    asked = []
    settled = end(take_one(first), hand_over=lambda lease: asked.append(lease.id))
    assert settled.next is None
    assert asked == [first.pk]
    assert places(second) == ["due"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"expires_at": 1}, "expired"),
        ({"spent": BUDGET}, "its budget is spent"),
        ({"lapses": 2}, "it must run alone"),
        ({"route": "account@9"}, "this process does not know its version"),
        ({"due_at": "later"}, "it waits"),
    ],
)
def test_only_what_a_claim_would_take_is_handed_over(fields, why):
    first, second = lane_of_(count=2)
    lease = take_one(first)
    if fields.get("due_at"):
        fields = {"due_at": rows.ahead(3600)}
    Message.objects.filter(pk=second.pk).update(**fields)
    before = columns(second)
    assert end(lease, hand_over=hand_over).next is None, why
    assert columns(second)["attempt"] == before["attempt"]
    assert columns(second)["lease_token"] is None
    check_invariants()


def test_a_run_of_hand_overs_is_bounded():
    """Else the first process keeps all hot lanes."""
    messages = lane_of_(count=LONGEST_RUN + 5)
    lease, started = take_one(messages[0]), []
    while lease:
        started.append(lease.id)
        lease = end(lease, hand_over=hand_over).next
    assert started == [row.pk for row in messages[:LONGEST_RUN]]
    assert places(messages[LONGEST_RUN]) == ["due"]


def test_a_run_of_hand_overs_ends_after_a_while(monkeypatch):
    monkeypatch.setattr("outbox.leases.settling.LONGEST_RUN_SECONDS", 0.0)
    first, second = lane_of_(count=2)
    assert end(take_one(first), hand_over=hand_over).next is None
    assert places(second) == ["due"]


def test_a_group_settles_and_hands_over_many_lanes_at_once():
    """Ten lanes with three messages each: three groups, and everything is in order."""
    expected = {key: [row.pk for row in lane_of_(count=3, key=key)] for key in map(str, range(10))}
    leases, order = take(30), []
    for _ in range(3):
        order += [lease.id for lease in leases]
        leases = [each.next for each in settle("default", [verdict(x) for x in leases], hand_over=hand_over)]
        check_invariants()
    assert leases == [None] * 10
    for ids in expected.values():
        assert [pk for pk in order if pk in ids] == ids


def test_a_group_moves_on_only_the_lanes_whose_lease_is_ours():
    (a, a2), (b, b2) = lane_of_(count=2, key="a"), lane_of_(count=2, key="b")
    leases = take()
    take()
    lapse(a)
    take_one(a)
    results = settle("default", [verdict(lease) for lease in leases], hand_over=hand_over)
    assert [each.status for each in results] == ["lost", "settled"]
    assert places(a, a2, b, b2) == ["leased", "parked", "gone", "leased"]


def test_mixed_verdicts_in_one_group_move_each_lane_by_its_own():
    keys = {"delivered": "gone", "retry": "waiting", "release": "due", "dead": "gone", "discarded": "gone"}
    heads = {name: lane_of_(count=2, key=name) for name in keys}
    leases = {lease.id: lease for lease in take()}
    take()
    settle("default", [verdict(leases[head.pk], name) for name, (head, _) in heads.items()])
    assert {name: places(head)[0] for name, (head, _) in heads.items()} == keys
    expected = {name: "due" if where == "gone" else "parked" for name, where in keys.items()}
    assert {name: places(follower)[0] for name, (_, follower) in heads.items()} == expected
    check_invariants()


# --- operators and lanes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["account", "stock"])
def test_discarding_the_head_lets_the_lane_go_on(name):
    head, follower = lane_of_(name, 2)
    end(take_one(head), "dead" if name == "stock" else "retry")
    take()
    assert places(follower) == ["parked"]
    discard("default", [head.pk])
    check_invariants()
    assert drained() == [follower.pk]


def test_advance_does_nothing_where_nothing_sleeps():
    head = put("account", "a")
    lane = head.lane
    lanes.advance("default", lane)
    lanes.advance("default", lane + 1)
    assert places(head) == ["due"]
    take()
    before = columns(head)
    lanes.advance("default", lane)
    assert columns(head) == before


@rows_can_be_locked
def test_advance_waits_for_the_head_it_relies_on(actors, second_connection):
    """R5: whoever wakes nobody, because the head will, must hold that head."""
    head, follower = lane_of_("stock", 2)
    end(take_one(head), "dead")
    take()
    (actor,) = actors("operator")
    with locked_elsewhere(second_connection, head):
        actor.begin(transaction.atomic(lambda: lanes.advance("default", head.lane)))
        actor.let_go()
        assert not actor.settle_down(0.3, "idle")
    actor.finish()
    assert places(head, follower) == ["blocking", "parked"]


def test_a_successor_that_left_its_lane_is_never_relied_on(monkeypatch):
    row, gone = put("account", "a"), put("account", "b")
    monkeypatch.setattr(lanes, "heads", lambda using, ids, **options: {row.lane: (gone.pk, None)})
    assert again("default", lambda: lanes.successors("default", {row.lane: [row.pk]}, wait=False)) == {}
    with transaction.atomic(), pytest.raises(Stale):
        lanes.successors("default", {row.lane: [row.pk]}, wait=True)


def test_advance_gives_up_on_a_lane_that_keeps_changing(monkeypatch):
    head = rows.parked(put("account", "a").lane, topic="account")
    Message.objects.exclude(pk=head.pk).delete()

    def changed_meanwhile(execute, sql, params, many, context):
        if sql.startswith("UPDATE"):
            sql = sql.replace("WHERE", "WHERE 1 = 0 AND", 1)
        return execute(sql, params, many, context)

    with transaction.atomic(), connection.execute_wrapper(changed_meanwhile), pytest.raises(Stale):
        lanes.advance("default", head.lane)


# --- the races --------------------------------------------------------------------------------------------------------


@rows_can_be_locked
def test_r1_two_heads_of_one_lane_are_never_both_leased(actors):
    """Two claimers see two heads, since a lower one commits late: the unique holder refuses the second."""
    low, _ = lane_of_(count=2)
    values = columns(low)
    Message.objects.filter(pk=low.pk).delete()
    first, second = actors("first", "second")
    first.begin(take)
    first.run_until("UPDATE", "lease_token")
    Message.objects.create(**values)
    second.begin(lambda: claimer().claim_only([low.pk], seconds=60))
    second.run_until("UPDATE", "lease_token")
    first.let_go()
    second.let_go()
    leased = [lease.id for lease in first.finish() + second.finish()]
    check_invariants()
    assert len(leased) == len(set(leased))
    assert Message.objects.filter(holder=low.lane).count() == 1
    assert Message.objects.in_flight().count() == 1


@rows_can_be_locked
def test_r2_a_follower_is_parked_only_under_the_lock_of_its_target(actors):
    """The target is settled between the look and the parking: nobody sleeps behind a row that is gone."""
    head, parked = lane_of_(count=2)
    lease = take_one(head)
    take()
    knock = put("account", "a")
    claimant, settler = actors("claimant", "settler")
    claimant.begin(take)
    claimant.run_until("FOR UPDATE", f"({head.pk})")
    settler.begin(lambda: end(lease))
    assert settler.finish().status == "settled"
    assert claimant.finish() == []
    check_invariants()
    assert places(parked, knock) == ["due", "due"]
    assert drained() == [parked.pk, knock.pk]


@rows_can_be_locked
def test_r2_a_settlement_sees_every_follower_that_was_parked_before_it(actors):
    """The follower is parked between the settlement's look and its lock: the settlement must find it."""
    head = put("account", "a")
    lease = take_one(head)
    follower = put("account", "a")
    claimant, settler = actors("claimant", "settler")
    settler.begin(lambda: end(lease))
    settler.run_until("SELECT")
    claimant.begin(take)
    claimant.run_until("UPDATE", "due_at")
    settler.let_go()
    claimant.finish()
    settled = settler.finish()
    if settled.status == "busy":
        settled = end(lease)
    assert settled.status == "settled"
    check_invariants()
    assert drained() == [follower.pk]


@pytest.mark.parametrize("head_place", ["blocking", "waiting"])
def test_r3_a_late_lower_row_never_sleeps_behind_a_higher_one(head_place):
    """Behind a blocking or waiting row only higher ids may sleep: nobody would ever wake the lower one."""
    low, head, follower = lane_of_("stock", 3)
    values = columns(low)
    Message.objects.filter(pk=low.pk).delete()
    end(take_one(head), "dead" if head_place == "blocking" else "retry")
    take()
    assert places(head, follower) == [head_place, "parked"]
    Message.objects.create(**values)
    assert [lease.id for lease in take()] == [low.pk]
    check_invariants()


@rows_can_be_locked
@pytest.mark.parametrize("head_place", ["blocking", "waiting"])
def test_r3_a_lower_row_that_commits_during_the_claim_never_sleeps_behind_a_higher_one(actors, head_place):
    low, head, _ = lane_of_("stock", 3)
    values = columns(low)
    Message.objects.filter(pk=low.pk).delete()
    end(take_one(head), "dead" if head_place == "blocking" else "retry")
    (claimant,) = actors("claimant")
    claimant.begin(take)
    claimant.run_until("FOR UPDATE", f"({head.pk})")
    Message.objects.create(**values)
    claimant.finish()
    check_invariants()
    assert drained()[0] == low.pk


@rows_can_be_locked
@pytest.mark.parametrize("head_place", ["blocking", "waiting"])
def test_r3_a_late_lower_row_is_not_parked_with_the_crowd(actors, head_place):
    """A crowded lane has more of its due rows parked than were picked: only those behind the target."""
    low, head, *followers = lane_of_("stock", 8)
    values = columns(low)
    Message.objects.filter(pk=low.pk).delete()
    end(take_one(head), "dead" if head_place == "blocking" else "retry")
    (claimant,) = actors("claimant")
    claimant.begin(take)
    claimant.run_until("FOR UPDATE", f"({head.pk})")
    claimant.step(5)
    Message.objects.create(**values)
    assert claimant.finish() == []
    check_invariants()
    assert set(places(*followers)) == {"parked"}
    assert drained()[0] == low.pk


def test_parking_leaves_alone_what_was_leased_or_put_off_meanwhile():
    leased, waiting, due = put("account", "a"), put("account", "b"), put("account", "c")
    picked = {row.lane: lanes.Followers(rows=[row], floor=0) for row in (leased, waiting, due)}
    take_one(leased)
    lapse(leased)
    end(take_one(waiting), "retry")
    again("default", lambda: lanes.park("default", picked))
    assert places(leased, waiting, due) == ["due", "waiting", "parked"]
    assert fresh(leased).lease_token is not None


def test_r3_two_late_rows_and_a_waiting_head_in_one_pick():
    """The pick holds rows below and above the target: only those above may sleep behind it."""
    messages = lane_of_("account", 4)
    Message.objects.filter(pk=messages[2].pk).update(due_at=rows.ahead(3600), spent=1)
    assert [lease.id for lease in take()] == [messages[0].pk]
    check_invariants()
    assert places(*messages)[0] == "leased"


def test_r4_the_old_owner_of_a_retried_message_matches_nothing():
    """The attempt number alone would still match: the token is emptied by every settlement."""
    head, follower = lane_of_(count=2)
    lease = take_one(head)
    end(lease, "retry")
    before = columns(head), columns(follower)
    for name in ("delivered", "dead", "release"):
        assert end(lease, name, hand_over=hand_over).status == "lost"
    assert (columns(head), columns(follower)) == before


def test_r4_parking_empties_the_token():
    """A row that a crash left with a token, and no holder any more, is put to sleep without it."""
    head, follower = lane_of_(count=2)
    take_one(head)
    Message.objects.filter(pk=follower.pk).update(lease_token=77)
    assert take() == []
    assert places(head, follower) == ["leased", "parked"]
    assert fresh(follower).lease_token is None


@rows_can_be_locked
def test_r5_two_settlements_of_one_lane_leave_nobody_asleep(actors):
    """A late lower row is leased beside a waiting one; both leave at once, and each could count on the other."""
    waiting, third = lane_of_(count=2)
    low_values = columns(waiting)
    end(take_one(waiting), "retry")
    take()
    assert places(waiting, third) == ["waiting", "parked"]
    low_values |= {"id": waiting.pk - 1, "event_key": "late", "attempt": 0}
    Message.objects.filter(pk=waiting.pk - 1).delete()
    low = Message.objects.create(**low_values)
    lease = take_one(low)
    settler, operator = actors("settler", "operator")
    settler.begin(lambda: end(lease))
    operator.begin(lambda: discard("default", [waiting.pk]))
    settler.run_until("UPDATE")
    operator.let_go()
    operator.settle_down(0.2)
    settled = settler.finish()
    operator.finish()
    check_invariants()
    if settled.status == "busy":
        end(lease)
    check_invariants()
    assert drained() == [third.pk]


@rows_can_be_locked
def test_r5_a_successor_that_leaves_before_it_is_locked_is_not_relied_on(actors):
    """Who discards it wakes nobody, for the lane is leased; so the settlement must look again."""
    waiting, third = lane_of_(count=2)
    end(take_one(waiting), "retry")
    take()
    late = {"id": waiting.pk - 1, "event_key": "late", "due_at": rows.ago(1)}
    low = Message.objects.create(**(columns(third) | late))
    lease = take_one(low)
    assert places(low, waiting, third) == ["leased", "waiting", "parked"]
    (settler,) = actors("settler")
    settler.begin(lambda: end(lease))
    settler.run_until("FOR UPDATE", f"({waiting.pk})")
    assert discard("default", [waiting.pk]).done
    assert settler.finish().status == "settled"
    check_invariants()
    assert drained() == [third.pk]


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_r6_a_lane_whose_target_stays_locked_does_not_fill_the_claims(second_connection):
    """First its knocks are left; after half a second they are snoozed, and the others are seen."""
    head = put("account", "a")
    lease = take_one(head)
    knocks = [put("account", "a", due_at=rows.ago(900)) for _ in range(60)]
    other = put("account", "z")
    own = claimer()
    with locked_elsewhere(second_connection, head):
        found = wait_until(lambda: own.claim(1, seconds=60).leases, seconds=10)
        assert [each.id for each in found] == [other.pk]
        assert {fresh(row).lease_token for row in knocks} == {None}
        wait_until(lambda: own.claim(1, seconds=60).leases or set(places(*knocks)) == {"waiting"}, seconds=10)
        check_invariants()
    end(lease)
    wait_until(lambda: drained() and not Message.objects.filter(state=State.PENDING).exclude(pk=other.pk).exists())


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_r6_the_next_claim_passes_by_a_locked_lane_and_brings_another(second_connection, monkeypatch):
    monkeypatch.setattr(looking, "LEAVE_ALONE", 10.0)
    head = put("account", "a")
    take_one(head)
    for _ in range(3):
        put("account", "a", due_at=rows.ago(900))
    other, own = put("account", "z"), claimer()
    with locked_elsewhere(second_connection, head):
        assert own.claim(1, seconds=60).contended
        assert [lease.id for lease in own.claim(1, seconds=60).leases] == [other.pk]


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_r6_a_lane_that_is_free_again_is_not_put_off(second_connection, monkeypatch):
    monkeypatch.setattr(looking, "PATIENCE", -1.0)  # each lock has lasted for too long
    heads = [put("account", key) for key in "ab"]
    leases = take()
    knocks, other = [put("account", key) for key in "ab"], put("account", "c", due_at=rows.ago(0))
    own = claimer()
    with locked_elsewhere(second_connection, *heads, other):  # so that the next claim tries for more than it may take
        assert own.claim(5, seconds=60).contended
        assert own.claim(5, seconds=60).snoozed
    settle("default", [verdict(lease) for lease in leases])
    Message.objects.filter(pk__in=[row.pk for row in knocks]).update(due_at=rows.ago(1))
    (first,) = own.claim(1, seconds=60).leases
    (left,) = [row for row in knocks if row.pk != first.id]
    assert places(left) == ["due"]


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_a_locked_row_of_a_crowded_lane_does_not_hold_up_the_parking_of_the_others(second_connection):
    messages = lane_of_("account", 30)
    take_one(messages[0])
    with locked_elsewhere(second_connection, messages[-1]):
        assert take() == []
    assert places(*messages[1:]) == ["parked"] * 28 + ["due"]


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_r6_a_moment_of_a_lock_snoozes_nobody(second_connection):
    head = put("account", "a")
    take_one(head)
    knock = put("account", "a")
    own = claimer()
    with locked_elsewhere(second_connection, head):
        assert own.claim(5, seconds=60).contended
    assert places(knock) == ["due"]


def test_r8_the_sweep_finds_a_lane_stranded_by_hand_written_sql():
    head, follower, third = lane_of_()
    take()
    take()
    Message.objects.filter(pk=head.pk).delete()
    assert take() == []
    assert sweep("default") == 1
    assert drained() == [follower.pk, third.pk]


def test_r8_a_new_message_heals_a_stranded_lane_too():
    head, follower = lane_of_(count=2)
    take()
    take()
    Message.objects.filter(pk=head.pk).delete()
    late = put("account", "a")
    assert drained() == [follower.pk, late.pk]


@pytest.mark.parametrize("name", ["delivered", "retry", "dead"])
def test_a_row_deleted_while_it_is_leased_strands_its_lane_only_until_the_sweep(name):
    """Scenario 58, in a lane."""
    head, follower = lane_of_(count=2)
    lease = take_one(head)
    take()
    Message.objects.filter(pk=head.pk).delete()
    assert end(lease, name, hand_over=hand_over).status == "lost"
    assert not Attempt.objects.filter(message_id=head.pk).exists()
    sweep("default")
    assert drained() == [follower.pk]


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane_count", [1, 7])
def test_several_processes_keep_every_lane_in_order(lane_count):
    """Scenario 40, with lanes: each once, in order, never two of a lane at a time."""
    expected = {key: [row.pk for row in lane_of_(count=12, key=key)] for key in map(str, range(lane_count))}
    total = sum(map(len, expected.values()))
    log, running, guard = [], set(), threading.Lock()

    def work():
        own, idle = claimer(), 0
        while idle < 400:
            claim = own.claim(3, seconds=60)
            leases = claim.leases
            while leases:
                with guard:
                    for lease in leases:
                        assert lease.message.lane not in running
                        running.add(lease.message.lane)
                        log.append(lease.id)
                with guard:
                    running.difference_update(lease.message.lane for lease in leases)
                left, leases = [verdict(lease) for lease in leases], []
                while left:
                    results = settle("default", left, hand_over=hand_over)
                    leases += [each.next for each in results if each.next]
                    left = [each.settlement for each in results if each.status == "busy"]
            with guard:
                if len(log) >= total:
                    return
            idle += 1

    rows.at_once(*[work] * 3)
    assert sorted(log) == sorted(pk for ids in expected.values() for pk in ids)
    for ids in expected.values():
        assert [pk for pk in log if pk in ids] == ids
    check_invariants()
    assert Message.objects.delivered().count() == total
    assert not Attempt.objects.exclude(outcome=Outcome.DELIVERED).exists()
