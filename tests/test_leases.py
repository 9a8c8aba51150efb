"""Claim, renew, settle: the table and the bullets of "Claim, budget, fence", the same on every database."""

import threading
from contextlib import ExitStack
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from outbox import signals
from outbox.handlers import handler
from outbox.leases import announce, charge, claim, draw_token, renew, settle, shortcut
from outbox.models import Attempt, Message, Reason, State
from outbox.operations import discard, make_due, requeue
from outbox.retries import RetryPolicy
from tests import rows
from tests.specimens import (
    BACKOFF,
    BUDGET,
    VERDICTS,
    check_invariants,
    claimer,
    columns,
    end,
    fresh,
    heard,
    in_seconds,
    lapse,
    locked_elsewhere,
    put,
    rows_can_be_locked,
    specimens,
    take,
    take_one,
    verdict,
)
from tests.stepping import Actor

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]


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


def test_all_that_is_due_of_one_lane_counts_as_one():
    for _ in range(6):
        put("account", "crowded")
    others = [put("account", f"key-{n}") for n in range(4)]
    leases = claimer().claim(5, seconds=60).leases
    assert {lease.id for lease in leases} > {each.pk for each in others}
    assert len(leases) == 5


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


def test_a_claim_by_id_takes_only_what_its_handlers_know(specimens):
    mail, unknown = put("mail"), put("new.topic", handler="new.topic")
    before = [columns(mail), columns(unknown)]
    only_sms = [specimens.by_name("sms")]
    assert claim(using="default", worker="w", seconds=60, ids=[mail.pk, unknown.pk], handlers=only_sms) == []
    assert [columns(mail), columns(unknown)] == before


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


def test_hundreds_of_routes_with_nothing_due_do_not_hide_the_one_that_is(specimens):
    names = [f"topic.{number:03}" for number in range(300)]
    for name in names:
        handler(name, ordering="none")(print)
    fields = {"payload": {}, "digest": b"", "staged_at": rows.now(), "due_at": rows.ahead(3600)}
    Message.objects.bulk_create(
        Message(event_key=name, topic=name, handler=name, route=name, **fields) for name in names[:-1]
    )
    busy = put(names[-1])
    assert [lease.id for lease in take(1)] == [busy.pk]


def test_a_claim_that_waited_for_a_lock_grants_whole_leases(monkeypatch):
    """Scenario 17: the time of a statement is that of its start, and a file or a table may be locked meanwhile."""
    real = shortcut.lease_free

    def waiting(*args, micros, **options):
        return real(*args, micros=micros - 590_000_000, **options)  # as if it had been sent so long ago

    monkeypatch.setattr(shortcut, "lease_free", waiting)
    monkeypatch.setattr(shortcut, "LATE", 1e-9)
    row = put("account")
    (lease,) = take(1, seconds=600)
    assert in_seconds(fresh(row).due_at) == pytest.approx(600, abs=50)
    assert (lease.attempt, fresh(row).spent) == (1, 1)


@pytest.mark.skipif(connection.vendor == "mysql", reason="only where UPDATE returns rows there are such leases")
def test_late_leases_that_cannot_be_renewed_for_a_lock_are_held_all_the_same(monkeypatch):
    def locked(*args):
        raise OperationalError("database is locked")

    monkeypatch.setattr(shortcut, "renew", locked)
    monkeypatch.setattr(shortcut, "is_race", lambda connection, error: True)
    monkeypatch.setattr(shortcut, "LATE", 1e-9)
    row = put("mail")
    (lease,) = take(1, seconds=600)
    assert (lease.id, lease.token) == (row.pk, fresh(row).lease_token)


@pytest.mark.skipif(connection.vendor == "mysql", reason="only where UPDATE returns rows there are such leases")
def test_a_renewal_of_late_leases_that_fails_for_no_lock_is_told_and_they_are_found_again(monkeypatch):
    def fail(*args):
        raise OperationalError("the disk is full")

    row, own = put("mail"), claimer()
    with monkeypatch.context() as patch:
        patch.setattr(shortcut, "renew", fail)
        patch.setattr(shortcut, "LATE", 1e-9)
        with pytest.raises(OperationalError, match="the disk is full"):
            own.claim(1, seconds=600)
    assert [lease.id for lease in own.claim(1, seconds=600).leases] == [row.pk]
    assert fresh(row).attempt == 1


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


@pytest.mark.parametrize(
    ("spent", "left"), [(0, (State.PENDING, 1, "")), (BUDGET - 1, (State.DEAD, BUDGET, Reason.EXHAUSTED))]
)
def test_an_outage_that_outlasts_the_patience_costs_budget_like_any_failure(spent, left):
    row = put("mail", spent=spent, staged_at=rows.ago(4 * 86_400))
    end(take_one(row), "unavailable")
    found = fresh(row)
    assert (found.state, found.spent, found.reason) == left


def test_what_is_put_off_until_a_time_that_is_over_waits_as_long_as_it_says():
    row = put("mail")
    settle("default", [verdict(take()[0], "snooze", until=rows.ago(1234), wait=600.0)])
    assert in_seconds(fresh(row).due_at) > 500


@pytest.mark.parametrize("wait", [2.0**38, 2.0**1023, float("inf")])
def test_an_absurd_wait_is_bounded_and_spoils_no_other_settlement(wait):
    """Scenario 44."""
    absurd, other = put("mail"), put("mail")
    leases = take()
    results = settle("default", [verdict(leases[0], "retry", wait=wait), verdict(leases[1])])
    assert [each.status for each in results] == ["settled", "settled"]
    assert 10**9 < in_seconds(fresh(absurd).due_at) < 10**10
    assert fresh(other).state == State.DELIVERED


@pytest.mark.parametrize("attempt", [39, 47, 1024, 4999])
def test_a_large_attempt_number_is_like_any_other(specimens, attempt):
    """Scenario 44: the backoff of a crash is computed by the policy, which never overflows."""
    policy = RetryPolicy(max_attempts=5000, base=1, factor=2, cap=3600)
    handler("patient", ordering="none", retry=policy)(print)
    row = put("patient", attempt=attempt, spent=attempt, lapses=1, lease_token=5)
    assert take() == []
    assert 0 <= in_seconds(fresh(row).due_at) + 5 <= 3610
    lapse(row)
    (lease,) = take()
    assert (lease.attempt, fresh(row).spent) == (attempt + 1, attempt + 1)
    assert end(lease, "retry").status == "settled"


def test_dead_heads_keep_their_lane_only_where_they_block():
    for name in ("account", "stock"):
        row = put(name, "a")
        end(take_one(row), "dead")
        assert (fresh(row).lane is not None) is (name == "stock")
    check_invariants()


@pytest.mark.parametrize("name", [name for name, each in VERDICTS.items() if each.get("refund")])
def test_only_what_was_charged_is_refunded(name):
    messages = [put("mail", attempt=1, spent=1) for _ in range(2)]
    charged, queued = take(2, start=1)
    assert [fresh(row).spent for row in messages] == [2, 1]
    settle("default", [verdict(charged, name), verdict(queued, name)])
    assert [(fresh(row).attempt, fresh(row).spent) for row in messages] == [(2, 1), (2, 1)]


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


@rows_can_be_locked
def test_a_charge_waits_a_moment_for_a_claim_that_looks_at_the_lane(second_connection, monkeypatch):
    """Else the message is given back, and its attempt is one of nothing."""
    row = put("account", "a")
    (lease,) = take(start=0)
    with ExitStack() as lock:
        lock.enter_context(locked_elsewhere(second_connection, row))
        monkeypatch.setattr("outbox.leases.holding.time.sleep", lambda seconds: lock.close())
        assert charge("default", [lease]) == [lease]
    assert fresh(row).spent == 1


def test_inside_the_callers_transaction_one_delivery_is_no_other():
    """All leases of a claim carry the same token."""
    first, second = put("mail"), put("mail")
    lease, _ = take()
    with transaction.atomic():
        assert end(lease).status == "settled"
    assert (fresh(first).state, fresh(second).state) == (State.DELIVERED, State.PENDING)


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
