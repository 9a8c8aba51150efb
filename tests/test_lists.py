"""List handlers: several messages in one call, each charged, fenced and settled by itself, and lanes in order."""

import threading
from collections import Counter, defaultdict
from datetime import timedelta
from io import StringIO

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from outbox import (
    Bury,
    Discard,
    DurableCommand,
    Effect,
    Intent,
    Retry,
    RetryPolicy,
    Snooze,
    Unavailable,
    handler,
    lanes,
    outages,
    stage,
    testing,
)
from outbox.conf import options
from outbox.delivery import run_list
from outbox.explain import explain
from outbox.leases import Claimer, charge, claim, renew, runs, settle, unbroken
from outbox.models import Attempt, Message, Outcome, Reason, State
from outbox.operations import discard, requeue
from outbox.registry import registry
from outbox.slots import Slots
from outbox.verdicts import judge_list, release
from tests import rows
from tests import test_interleavings as interleavings
from tests.running import Gate, dispatching, drain, fresh, outcomes, put, settled, state
from tests.specimens import (
    BUDGET,
    VERDICTS,
    check_invariants,
    claimer,
    lapse,
    locked_elsewhere,
    rows_can_be_locked,
    verdict,
)
from tests.test_interleavings import cast
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
__all__ = ["cast"]

NOW = RetryPolicy(max_attempts=3, base=0, jitter=False)  # a failed message is due again at once
LATER = RetryPolicy(max_attempts=3, base=60, factor=1, jitter=False)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    monkeypatch.setattr(outages, "_told_at", {})
    with registry.isolated():
        yield


@pytest.fixture
def calls():
    """The payloads of each call, in order; appended to from any thread."""
    return []


def listing(calls, topic="job", *, verdict=None, batch=10, **options):
    """Register a list handler that notes the payloads of each call; ``verdict`` makes what it returns of a list."""

    def function(messages):
        calls.append([each.payload for each in messages])
        return verdict(messages) if verdict else None

    handler(topic, **({"batch": batch, "ordering": "none", "retry": NOW} | options))(function)


def take(limit=100, seconds=60.0, worker="worker"):
    return claim(using="default", worker=worker, seconds=seconds, limit=limit)


def seen(calls):
    return sorted(payload for call in calls for payload in call)


# --- the declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, -1, 501, 1.0, "10", True])
def test_a_batch_that_is_no_small_whole_number_is_refused(batch):
    with pytest.raises(ImproperlyConfigured, match="batch must be a whole number from 1 to 500"):
        handler("job", batch=batch)(lambda messages: None)


def test_a_list_handler_must_take_one_argument():
    with pytest.raises(ImproperlyConfigured, match="must take one argument, the list of messages"):
        handler("job", batch=10)(lambda: None)


def test_an_asynchronous_list_handler_cannot_be_atomic():
    async def function(messages):
        pass

    with pytest.raises(ImproperlyConfigured, match="no async transaction"):
        handler("job", batch=10, atomic=True)(function)


def test_the_topics_tell_which_handlers_take_lists(calls):
    listing(calls, batch=7)
    handler("other")(lambda message: None)
    out = StringIO()
    call_command("outbox_topics", stdout=out)
    assert "lists of 7" in out.getvalue()
    out = StringIO()
    call_command("outbox_topics", "--format", "json", stdout=out)
    assert '"batch": 7' in out.getvalue()
    assert '"batch": null' in out.getvalue()


# --- what is handed over ----------------------------------------------------------------------------------------------


def test_what_is_due_is_handed_over_in_lists_of_the_given_size_at_most(calls):
    listing(calls)
    found = [put("job", n) for n in range(25)]
    dispatcher = drain(concurrency=1)
    assert seen(calls) == list(range(25))
    assert [len(call) for call in calls] == [10, 10, 5]
    assert settled(*found)
    assert dispatcher.counts == {
        "processed": 25, "delivered": 25, "retried": 0, "dead": 0, "discarded": 0, "skipped": 0,
    }  # fmt: skip


def test_nobody_waits_for_a_list_to_be_full(calls):
    listing(calls, batch=500)
    with dispatching():
        row = put("job", 1)
        wait_until(lambda: settled(row))
    assert calls == [[1]]


def test_each_message_has_its_own_envelope():
    found = []
    handler("job", batch=10, ordering="none")(lambda messages: found.extend(messages))
    put("job", {"n": 1}, event_key="a", headers={"trace": "x"})
    put("job", {"n": 2}, event_key="b")
    drain()
    assert [(each.event_key, each.payload, each.headers, each.attempt) for each in found] == [
        ("a", {"n": 1}, {"trace": "x"}, 1),
        ("b", {"n": 2}, {}, 1),
    ]
    assert found[0].lease is not found[1].lease


def test_payload_versions_are_never_mixed_in_one_list():
    found = []
    handler("job", batch=10, ordering="none", payload_versions=(1, 2))(
        lambda messages: found.append({each.payload_version for each in messages})
    )
    for n in range(8):
        put("job", n, payload_version=1 + n % 2)
    drain()
    assert all(len(each) == 1 for each in found)
    assert {1, 2} == set.union(*found)


def test_an_asynchronous_handler_gets_lists_too(calls):
    async def function(messages):
        calls.append([each.payload for each in messages])
        return [None if each.payload else Bury("zero") for each in messages]

    handler("job", batch=10, ordering="none")(function)
    found = [put("job", n) for n in range(3)]
    drain()
    assert calls == [[0, 1, 2]]
    assert [state(row) for row in found] == [State.DEAD, State.DELIVERED, State.DELIVERED]


def test_a_claim_brings_enough_to_fill_a_list_that_is_larger_than_the_batches_of_the_dispatcher(calls):
    listing(calls, batch=40)
    for n in range(60):
        put("job", n)
    drain(batch=5, concurrency=1)
    assert [len(call) for call in calls] == [40, 20]


def test_a_list_handler_and_others_share_the_slots(calls):
    single = []
    listing(calls, "listed", batch=5)
    handler("single", ordering="none")(lambda message: single.append(message.payload))
    for n in range(20):
        put("listed", n)
        put("single", n)
    drain(concurrency=2)
    assert seen(calls) == sorted(single) == list(range(20))


def test_a_run_of_one_claim_delivers_what_it_claimed(calls):
    listing(calls)
    found = [put("job", n) for n in range(5)]
    assert drain(mode="once").counts["delivered"] == 5
    assert calls == [[0, 1, 2, 3, 4]]
    assert settled(*found)


def test_a_limit_counts_messages_and_not_lists(calls):
    listing(calls)
    for n in range(20):
        put("job", n)
    assert drain(mode="run", limit=13).counts["processed"] == 13
    assert len(seen(calls)) == 13


def test_the_attempts_of_a_list_are_charged_before_it_starts_and_no_others():
    gate = Gate()
    handler("job", batch=3, ordering="none")(gate)
    found = [put("job", n) for n in range(6)]
    with dispatching(concurrency=1):
        gate.wait()
        wait_until(lambda: {fresh(row).attempt for row in found} >= {1})
        started = {each.id for each in gate.runs[0]}
        assert [fresh(row).spent for row in found] == [int(row.pk in started) for row in found]
        gate.open.set()
        wait_until(lambda: settled(*found))
    assert {fresh(row).spent for row in found} == {1}


def test_what_had_not_started_at_a_stop_is_given_back_at_no_cost():
    gate = Gate()
    handler("job", batch=2, ordering="key", share=1)(gate)
    found = [put("job", n, ordering_key="a") for n in range(2)] + [put("job", n, ordering_key="b") for n in range(2)]
    with dispatching(concurrency=1, mode="run"):
        gate.wait()
        threading.Timer(0.2, gate.open.set).start()
    ran = {each.id for call in gate.runs for each in call}
    assert [fresh(row).spent for row in found] == [int(row.pk in ran) for row in found]
    check_invariants()


@pytest.mark.parametrize("key", ["a", None], ids=["in a lane", "unordered"])
def test_a_list_that_outlasts_the_grace_is_given_back_as_a_whole_and_costs_nothing(key):
    gate = Gate()
    handler("job", batch=10)(gate)
    found = [put("job", n, ordering_key=key) for n in range(3)]
    with dispatching(grace=0.2):
        gate.wait()
    gate.open.set()
    assert [outcomes(row) for row in found] == [[Outcome.INTERRUPTED]] * 3
    assert [(fresh(row).spent, fresh(row).lease_token) for row in found] == [(0, None)] * 3
    assert all(message.lease.lost for message in gate.runs[0])
    check_invariants()


def test_the_testing_kit_hands_over_lists_in_the_order_of_their_lanes(calls):
    listing(calls, ordering="key")
    for n in range(25):
        put("job", n, ordering_key="a")
    report = testing.drain()
    assert report.delivered == 25
    assert calls == [list(range(10)), list(range(10, 20)), list(range(20, 25))]


def test_the_testing_kit_counts_messages_against_its_limit_and_raises_errors(calls):
    listing(calls, verdict=lambda messages: [ValueError("x") if each.payload == 3 else None for each in messages])
    for n in range(6):
        put("job", n)
    assert testing.drain(limit=2).delivered == 2
    with pytest.raises(ValueError, match="x"):
        testing.drain(raise_errors=True)
    assert [len(call) for call in calls] == [2, 4]


def test_an_immediate_delivery_is_a_list_of_one(calls):
    listing(calls)
    first = put("job", 1)
    second = put("job", 2, deliver_now=True)
    assert calls == [[2]]
    assert (state(first), state(second)) == (State.PENDING, State.DELIVERED)


def test_an_immediate_delivery_reads_a_list_of_one_verdict(calls):
    listing(calls, verdict=lambda messages: [Bury("no")])
    row = put("job", 1, deliver_now=True)
    assert state(row) == State.DEAD


def test_the_function_of_an_effect_takes_its_message_all_the_same(calls):
    listing(calls)
    got = []
    effect = Effect(Intent("job", 1), deliver=lambda message: got.append(message.payload))
    DurableCommand().execute(lambda: None, (effect,))
    assert (got, calls) == ([1], [])


# --- verdicts ---------------------------------------------------------------------------------------------------------


def first_call(verdict, count=4, **options):
    """Hand one list over, once; returns its messages."""
    done = []

    def once(messages):
        done.append(len(messages))
        result = verdict(messages)
        if isinstance(result, BaseException) and getattr(result, "raised", False):
            raise result
        return result

    handler("job", **({"batch": 10, "ordering": "none", "retry": LATER} | options))(once)
    found = [put("job", n) for n in range(count)]
    drain(mode="once")
    assert done == [count]
    return [fresh(row) for row in found]


def raised(error):
    error.raised = True
    return error


@pytest.mark.parametrize("how", [raised, lambda error: error], ids=["raised", "returned"])
@pytest.mark.parametrize(
    ("make", "ends", "spent"),
    [
        (lambda: ValueError("x"), (State.PENDING, Outcome.FAILED), 1),
        (lambda: Retry("x", after=60), (State.PENDING, Outcome.FAILED), 1),
        (lambda: Snooze("x", for_=60), (State.PENDING, Outcome.SNOOZED), 0),
        (lambda: Unavailable("x", after=60), (State.PENDING, Outcome.UNAVAILABLE), 0),
        (lambda: Bury("x"), (State.DEAD, Outcome.BURIED), 1),
        (lambda: Discard("x"), (State.DISCARDED, Outcome.DISCARDED), 1),
    ],
    ids=["error", "retry", "snooze", "unavailable", "bury", "discard"],
)
def test_one_verdict_for_the_whole_call_is_the_verdict_on_each(how, make, ends, spent):
    found = first_call(lambda messages: how(make()))
    assert [(row.state, row.spent) for row in found] == [(ends[0], spent)] * 4
    assert [outcomes(row) for row in found] == [[ends[1]]] * 4


@pytest.mark.parametrize("as_list", [list, tuple], ids=["list", "tuple"])
def test_a_list_of_verdicts_gives_each_message_its_own(as_list):
    verdicts = [None, Retry("later", after=60), Bury("never"), False, Discard("done"), "anything"]
    found = first_call(lambda messages: as_list(verdicts), count=6)
    assert [row.state for row in found] == [
        State.DELIVERED, State.PENDING, State.DEAD, State.PENDING, State.DISCARDED, State.DELIVERED,
    ]  # fmt: skip
    assert found[3].error_type.endswith("NotConfirmed")


def test_a_mapping_names_those_that_are_not_delivered():
    found = first_call(lambda messages: {messages[1].id: Bury("never"), messages[3].id: Snooze(for_=60)})
    assert [row.state for row in found] == [State.DELIVERED, State.DEAD, State.DELIVERED, State.PENDING]
    assert [row.spent for row in found] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda messages: [None], "returned 1 verdicts for 4 messages"),
        (lambda messages: [], "returned 0 verdicts for 4 messages"),
        (lambda messages: {0: None}, "which are no ids of its messages"),
        (lambda messages: (each for each in messages), "a generator that nobody has run"),
        (lambda messages: False, "not confirmed"),
    ],
    ids=["short", "empty", "unknown", "generator", "false"],
)
def test_a_result_that_cannot_be_read_is_a_failure_of_each(make, text):
    found = first_call(make)
    assert [(row.state, row.spent) for row in found] == [(State.PENDING, 1)] * 4
    assert all(text in row.error_text for row in found)


def test_a_mapping_that_raises_is_a_failure_of_each():
    class Broken(dict):
        def __iter__(self):
            raise RuntimeError("broken")

    found = first_call(lambda messages: Broken())
    assert [(row.state, row.error_type) for row in found] == [(State.PENDING, "RuntimeError")] * 4


def test_a_message_whose_payload_cannot_be_read_is_no_part_of_the_list(calls):
    listing(calls)
    bad, good = put("job", 1), put("job", 2)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox_message SET payload = %s WHERE id = %s", ["{", bad.pk])
    drain()
    assert calls == [[2]]
    assert (state(bad), state(good)) == (State.DEAD, State.DELIVERED)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_after_a_failure_of_its_list_each_message_is_tried_alone(calls):
    """So one poisonous message takes no neighbour along to its death."""

    def poisoned(messages):
        if any(each.payload == 3 for each in messages):
            raise ValueError("poison")

    listing(calls, verdict=poisoned)
    found = [put("job", n) for n in range(6)]
    drain()
    assert calls[0] == list(range(6))
    assert all(len(call) == 1 for call in calls[1:])
    assert Counter(payload for call in calls for payload in call) == {0: 2, 1: 2, 2: 2, 3: 3, 4: 2, 5: 2}
    assert [state(row) for row in found] == [State.DEAD if n == 3 else State.DELIVERED for n in range(6)]
    assert fresh(found[3]).reason == Reason.EXHAUSTED
    assert outcomes(found[3]) == [Outcome.FAILED] * 3
    assert outcomes(found[0]) == [Outcome.FAILED, Outcome.DELIVERED]


def test_a_failed_message_is_not_mixed_with_fresh_ones(calls):
    listing(calls, verdict=lambda messages: [Retry(after=0) if each.payload == 0 else None for each in messages])
    put("job", 0)
    put("job", 1)
    drain(mode="once")
    for n in range(2, 5):
        put("job", n)
    drain(mode="once")
    assert calls[0] == [0, 1]
    assert [0] in calls[1:]
    assert [2, 3, 4] in calls[1:]


def test_a_message_that_has_cost_an_attempt_is_alone_whatever_became_of_it(calls):
    listing(calls)
    found = [put("job", n) for n in range(3)]
    Message.objects.filter(pk=found[1].pk).update(spent=1)
    drain()
    assert [1] in calls


def test_a_snoozed_message_may_go_into_lists_again(calls):
    listing(calls, verdict=lambda messages: Snooze(for_=0) if len(calls) == 1 else None)
    for n in range(3):
        put("job", n)
    drain()
    assert calls == [[0, 1, 2], [0, 1, 2]]


def test_one_message_that_calls_the_other_side_unavailable_holds_up_its_list_once(calls):
    def refused(messages):
        if any(each.payload == 1 for each in messages):
            raise Unavailable("down", after=0)

    listing(calls, verdict=refused)
    found = [put("job", n) for n in range(3)]
    with dispatching():
        wait_until(lambda: settled(found[0], found[2]))
    assert calls[0] == [0, 1, 2]
    assert all(len(call) == 1 for call in calls[1:])
    assert (state(found[1]), fresh(found[1]).spent) == (State.PENDING, 0)


def test_a_requeued_message_is_tried_alone(calls):
    listing(calls, verdict=lambda messages: [Bury("x") for _ in messages] if len(calls) == 1 else None)
    row = put("job", 0)
    drain()
    requeue("default", [row.pk])
    put("job", 1)
    put("job", 2)
    drain()
    assert sorted(calls[1:]) == [[0], [1, 2]]


def test_a_message_whose_lease_ran_out_is_never_with_others(calls):
    listing(calls)
    found = [put("job", n) for n in range(4)]
    held = take(limit=2)
    lapse(*[lease.message for lease in held])
    drain()
    lapsed = [found.index(row) for row in found if row.pk in {lease.id for lease in held}]
    assert sorted(call for call in calls if set(call) & set(lapsed)) == [[n] for n in lapsed]
    assert sorted(n for n in range(4) if n not in lapsed) in calls


def test_a_list_that_kills_its_process_costs_its_messages_one_attempt_and_from_then_on_they_run_alone(calls):
    listing(calls)
    found = [put("job", n) for n in range(3)]
    lapse(*[lease.message for lease in take()])
    drain()
    assert sorted(calls) == [[0], [1], [2]]
    assert [fresh(row).spent for row in found] == [2, 2, 2]
    assert [outcomes(row) for row in found] == [[Outcome.LAPSED, Outcome.DELIVERED]] * 3


def test_a_call_has_one_timeout_and_all_its_messages_run_out_of_time():
    gate = Gate()
    handler("job", batch=10, ordering="none", timeout=0.2, retry=LATER)(gate)
    found = [put("job", n) for n in range(3)]
    with dispatching():
        gate.wait()
        wait_until(lambda: all(fresh(row).lease_token is None for row in found))
        assert all(message.lease.lost for message in gate.runs[0])
        gate.open.set()
    assert [outcomes(row) for row in found] == [[Outcome.TIMED_OUT]] * 3
    assert [fresh(row).spent for row in found] == [1, 1, 1]
    assert len(gate.runs) == 1


def test_in_a_lane_a_list_that_ran_out_of_time_keeps_its_messages_until_its_thread_has_ended():
    gate = Gate()
    handler("job", batch=10, timeout=0.2, retry=NOW)(gate)
    found = [put("job", n, ordering_key="a") for n in range(3)]
    with dispatching() as dispatcher:
        gate.wait()
        wait_until(lambda: dispatcher._slots.abandoned())
        assert all(fresh(row).lease_token is not None for row in found)
        gate.open.set()
        wait_until(lambda: settled(*found))
    assert gate.most == 1
    assert [outcomes(row)[0] for row in found] == [Outcome.TIMED_OUT] * 3


def test_an_outage_told_by_a_whole_call_counts_as_one_observation(calls):
    many = options().BREAKER_FAILURES + 5
    listing(calls, batch=100, verdict=lambda messages: Unavailable("down", after=60))
    found = [put("job", n) for n in range(many)]
    with dispatching() as dispatcher:
        wait_until(lambda: all(fresh(row).attempt for row in found) and dispatcher._slots.is_empty())
        assert len(calls) == 1
        assert dispatcher._breakers.is_closed("job")


# --- the fence --------------------------------------------------------------------------------------------------------


def test_a_lost_lease_of_one_message_does_not_spoil_the_others(calls):
    listing(calls)
    found = [put("job", n) for n in range(4)]
    leases = take()
    lapse(found[1])
    (other,) = take(worker="another")
    done = settle("default", judge_list(leases, None, 0.1))
    assert [each.status for each in done] == ["settled", "lost", "settled", "settled"]
    assert [state(row) for row in found] == [State.DELIVERED, State.PENDING, State.DELIVERED, State.DELIVERED]
    assert settle("default", judge_list([other], None, 0.1))[0].status == "settled"


def test_a_message_that_is_lost_before_the_start_stays_out_of_the_list(calls):
    listing(calls)
    for n in range(3):
        put("job", n)
    leases = take()
    leases[1].view.revoke()
    ends = run_list(leases)
    assert calls == [[0, 2]]
    assert [each.outcome for each in ends] == [Outcome.DELIVERED, Outcome.RELEASED, Outcome.DELIVERED]


def test_a_renewal_prolongs_each_message_of_a_list(calls):
    listing(calls, ordering="key")
    for n in range(3):
        put("job", n, ordering_key="a")
    leases = take()
    assert renew("default", leases, 600.0).renewed == set(leases)
    check_invariants()


# --- atomic -----------------------------------------------------------------------------------------------------------


def writing(verdict=None, **options):
    def function(messages):
        for each in messages:
            Order.objects.create(reference=str(each.payload))
        return verdict(messages) if verdict else None

    handler("job", **({"batch": 10, "atomic": True, "ordering": "none", "retry": NOW} | options))(function)


def test_an_atomic_list_commits_its_writes_and_all_completions_together():
    writing()
    found = [put("job", n) for n in range(5)]
    counts = drain().counts
    assert (counts["delivered"], Order.objects.count()) == (5, 5)
    assert settled(*found)


def test_an_atomic_list_that_fails_leaves_nothing_and_each_is_tried_alone():
    def poisoned(messages):
        if any(each.payload == 1 for each in messages):
            raise ValueError("poison")

    writing(poisoned)
    found = [put("job", n) for n in range(3)]
    drain()
    assert [state(row) for row in found] == [State.DELIVERED, State.DEAD, State.DELIVERED]
    assert sorted(Order.objects.values_list("reference", flat=True)) == ["0", "2"]


def test_one_verdict_in_an_atomic_list_rolls_back_all_and_the_others_come_again_at_no_cost():
    writing(lambda messages: {each.id: Bury("no") for each in messages if each.payload == 1})
    found = [put("job", n) for n in range(3)]
    drain()
    assert [(state(row), fresh(row).spent) for row in found] == [
        (State.DELIVERED, 1), (State.DEAD, 1), (State.DELIVERED, 1),
    ]  # fmt: skip
    assert sorted(Order.objects.values_list("reference", flat=True)) == ["0", "2"]
    assert outcomes(found[0]) == [Outcome.RELEASED, Outcome.DELIVERED]


def test_an_atomic_list_that_lost_one_lease_leaves_nothing_and_gives_the_others_back():
    writing()
    found = [put("job", n) for n in range(3)]
    leases = take()
    Message.objects.filter(pk=found[1].pk).update(lease_token=5)
    ends = run_list(leases)
    assert [each.outcome for each in ends] == [Outcome.RELEASED] * 3
    assert [each.status for each in settle("default", ends)] == ["settled", "lost", "settled"]
    assert Order.objects.count() == 0
    assert [fresh(row).spent for row in found] == [0, 1, 0]


def test_an_atomic_run_of_a_lane_keeps_its_order_when_one_of_it_is_tried_again():
    calls = []

    def refuse_once(messages):
        calls.append([each.payload for each in messages])
        return {each.id: Retry(after=0) for each in messages if each.payload == 1 and each.attempt == 1}

    writing(refuse_once, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    drain()
    assert calls == [[0, 1, 2, 3], [0], [1], [2, 3]]
    assert [fresh(row).spent for row in found] == [1, 2, 1, 1]
    assert list(Order.objects.order_by("id").values_list("reference", flat=True)) == ["0", "1", "2", "3"]
    check_invariants()


# --- lanes: what is handed over ---------------------------------------------------------------------------------------


def test_a_list_takes_a_run_of_a_lane_in_its_order(calls):
    listing(calls, ordering="key", batch=4)
    found = [put("job", n, ordering_key="a") for n in range(10)]
    drain()
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert settled(*found)


def test_a_topic_in_order_is_one_lane(calls):
    listing(calls, ordering="topic", batch=50)
    for n in range(120):
        put("job", n)
    drain()
    assert calls == [list(range(50)), list(range(50, 100)), list(range(100, 120))]


def test_a_list_takes_runs_of_several_lanes(calls):
    listing(calls, ordering="key", batch=12)
    for n in range(4):
        for key in "abc":
            put("job", f"{key}{n}", ordering_key=key)
    drain(batch=12, concurrency=1)
    for key in "abc":
        assert [each for call in calls for each in call if each[0] == key] == [f"{key}{n}" for n in range(4)]
    assert len(calls[0]) == 12


def test_a_run_ends_before_what_may_not_start(calls):
    listing(calls, ordering="key", retry=LATER)
    first = put("job", 0, ordering_key="a")
    put("job", 1, ordering_key="a", deliver_at=timedelta(hours=1))
    put("job", 2, ordering_key="a")
    drain()
    assert calls == [[0]]
    assert settled(first)
    check_invariants()


def test_a_run_ends_before_what_has_expired(calls):
    listing(calls, ordering="key")
    put("job", 0, ordering_key="a")
    gone = put("job", 1, ordering_key="a", expires_at=timedelta(seconds=60))
    Message.objects.filter(pk=gone.pk).update(expires_at=rows.ago(1))
    put("job", 2, ordering_key="a")
    drain()
    assert calls == [[0], [2]]
    assert fresh(gone).reason == Reason.EXPIRED


def test_what_will_expire_is_part_of_a_run_until_then(calls):
    listing(calls, ordering="key")
    for n in range(3):
        put("job", n, ordering_key="a", expires_at=timedelta(seconds=60))
    drain()
    assert calls == [[0, 1, 2]]


def test_a_run_ends_before_another_version(calls):
    listing(calls, ordering="key", payload_versions=(1, 2))
    for n in range(4):
        put("job", n, ordering_key="a", payload_version=1 + n // 2)
    drain()
    assert calls == [[0, 1], [2, 3]]


def test_a_drain_goes_on_behind_a_message_that_its_claim_discards():
    got = []
    handler("job")(lambda message: got.append(message.payload))
    put("job", 0, ordering_key="a")
    gone = put("job", 1, ordering_key="a", expires_at=timedelta(seconds=60))
    Message.objects.filter(pk=gone.pk).update(expires_at=rows.ago(1))
    put("job", 2, ordering_key="a")
    drain()
    assert got == [0, 2]


def test_no_run_is_longer_than_what_a_claim_has_room_for(calls):
    listing(calls, ordering="key", batch=100)
    for n in range(10):
        put("job", n, ordering_key="a")
    leases = take(limit=4)
    assert [lease.message.payload for lease in leases] == [0, 1, 2, 3]
    assert [lease.message.holder is not None for lease in leases] == [True, False, False, False]
    check_invariants()


def test_only_one_claim_has_messages_of_a_lane(calls):
    listing(calls, ordering="key")
    for n in range(6):
        put("job", n, ordering_key="a")
    held = take(limit=3)
    assert take(worker="another") == []
    check_invariants()
    assert [each.status for each in settle("default", judge_list(held, None, 0.1))] == ["settled"] * 3
    assert [lease.message.payload for lease in take(worker="another")] == [3, 4, 5]
    check_invariants()


def test_a_claim_by_ids_takes_no_others_of_a_lane_along(calls):
    listing(calls, ordering="key")
    first, second = (put("job", n, ordering_key="a") for n in range(2))
    other = put("job", 9, deliver_at=rows.ahead(3600))
    leases = claim(using="default", worker="worker", seconds=60, ids=[first.pk, other.pk])
    assert [lease.id for lease in leases] == [first.pk]
    assert fresh(second).lease_token is None


def test_a_row_that_left_its_lane_ends_the_run(calls, monkeypatch):
    """It is found in the index, and has gone when it is locked."""
    listing(calls, ordering="key")
    head, elsewhere, follower = (put("job", n, ordering_key=key) for n, key in enumerate("aba"))
    places = [(head.lane, elsewhere.pk), (head.lane, follower.pk)]
    monkeypatch.setattr(lanes, "lane_followers", lambda *arguments: places)
    leases = take(limit=5)
    assert {lease.id for lease in leases} == {head.pk, elsewhere.pk}
    assert fresh(follower).lease_token is None
    check_invariants()


@rows_can_be_locked
def test_a_claim_of_a_run_locks_no_other_row(calls, second_connection):
    listing(calls, ordering="key")
    followers = [put("job", n, ordering_key="a") for n in range(3)][1:]
    Message.objects.filter(pk__in=[row.pk for row in followers]).update(due_at=None)
    other, watcher, seen = put("job", 9, deliver_at=rows.ahead(3600)), second_connection(), []

    def look(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if "FOR UPDATE" in sql:
            with watcher.cursor() as cursor:
                cursor.execute("SELECT id FROM outbox_message WHERE id = %s FOR UPDATE SKIP LOCKED", [other.pk])
                seen.append(cursor.fetchall())
        return result

    with connection.execute_wrapper(look):
        assert len(take()) == 3
    assert seen
    assert all(rows_of == seen[0] and rows_of for rows_of in seen)


@rows_can_be_locked
def test_a_run_ends_before_a_row_that_somebody_has_locked(calls, second_connection):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    with locked_elsewhere(second_connection, found[2]):
        leases = take()
        assert [lease.message.payload for lease in leases] == [0, 1]
    check_invariants()


def test_a_message_that_commits_late_with_a_lower_id_waits_for_the_run_to_end(calls):
    listing(calls, ordering="key")
    late = put("job", "late", ordering_key="a")
    found = [put("job", n, ordering_key="a") for n in range(3)]
    Message.objects.filter(pk=late.pk).update(due_at=rows.ahead(60), route="hidden", lane=None)
    leases = take(limit=2)
    lane = found[0].lane
    Message.objects.filter(pk=late.pk).update(due_at=rows.now(), route="job", lane=lane)
    assert take(worker="another") == []
    settle("default", judge_list(leases, None, 0.1))
    assert [lease.message.payload for lease in take()] == ["late", 2]
    check_invariants()


def test_the_immediate_delivery_of_a_message_takes_no_others_of_its_lane_along(calls):
    listing(calls, ordering="key")
    with transaction.atomic():
        stage("job", 1, ordering_key="a", deliver_now=True)
        stage("job", 2, ordering_key="a")
    assert calls == [[1]]
    drain()
    assert calls == [[1], [2]]


def test_two_dispatchers_never_run_two_lists_with_messages_of_one_lane():
    running, lock = Counter(), threading.Lock()
    starts, overlaps = defaultdict(list), []

    def function(messages):
        lanes = {each.ordering_key for each in messages}
        with lock:
            overlaps.extend(key for key in lanes if running[key])
            running.update(lanes)
            for each in messages:
                starts[each.ordering_key].append(each.payload)
        threading.Event().wait(0.002)
        with lock:
            running.subtract(lanes)

    handler("job", batch=7)(function)
    found = []
    for n in range(120):
        found += [put("job", n, ordering_key=str(n % 5))]
    with dispatching(batch=10), dispatching(batch=10):
        wait_until(lambda: settled(*found))
    assert overlaps == []
    assert all(payloads == sorted(payloads) for payloads in starts.values())
    assert sum(map(len, starts.values())) == 120
    check_invariants()


# --- lanes: verdicts --------------------------------------------------------------------------------------------------


def in_lane(verdict, count=5, **options):
    calls = []
    listing(calls, ordering="key", verdict=verdict, **options)
    return calls, [put("job", n, ordering_key="a") for n in range(count)]


def test_what_comes_behind_a_message_that_is_tried_again_is_given_back_and_comes_after_it():
    calls, found = in_lane(
        lambda messages: {each.id: Retry(after=0) for each in messages if each.payload == 2 and len(messages) > 1}
    )
    drain()
    assert calls == [[0, 1, 2, 3, 4], [2], [3, 4]]
    assert [fresh(row).spent for row in found] == [1, 1, 2, 1, 1]
    assert outcomes(found[4]) == [Outcome.RELEASED, Outcome.DELIVERED]
    check_invariants()


def test_while_it_waits_nobody_behind_it_starts():
    calls, found = in_lane(lambda messages: {messages[1].id: Retry(after=60)}, count=4)
    drain()
    assert calls == [[0, 1, 2, 3]]
    assert [fresh(row).state for row in found] == [State.DELIVERED, *[State.PENDING] * 3]
    assert [fresh(row).spent for row in found] == [1, 1, 0, 0]
    assert "behind message" in explain(found[3])
    check_invariants()


@pytest.mark.parametrize("verdict", [Bury("no"), Discard("no")], ids=["bury", "discard"])
def test_what_leaves_its_lane_holds_nobody(verdict):
    calls, found = in_lane(lambda messages: {each.id: verdict for each in messages if each.payload == 2})
    drain()
    assert calls == [[0, 1, 2, 3, 4]]
    assert [state(row) for row in found].count(State.DELIVERED) == 4


def test_a_dead_message_that_blocks_its_lane_leaves_those_behind_it_undelivered():
    calls, found = in_lane(
        lambda messages: {each.id: Bury("no") for each in messages if each.payload == 2}, dead_head="block"
    )
    drain()
    assert calls == [[0, 1, 2, 3, 4]]
    assert [state(row) for row in found] == [State.DELIVERED] * 2 + [State.DEAD] + [State.PENDING] * 2
    assert [fresh(row).spent for row in found] == [1, 1, 1, 0, 0]
    discard("default", [found[2].pk])
    drain()
    assert calls[1:] == [[3, 4]]
    check_invariants()


def test_a_failure_of_the_whole_call_is_retried_one_by_one_in_the_order_of_the_lane():
    def poisoned(messages):
        if any(each.payload == 2 for each in messages):
            raise ValueError("poison")

    calls, found = in_lane(poisoned)
    drain()
    assert calls == [[0, 1, 2, 3, 4], [0], [1], [2], [2], [3], [4]]
    assert [state(row) for row in found] == [State.DELIVERED] * 2 + [State.DEAD] + [State.DELIVERED] * 2
    check_invariants()


def test_lanes_do_not_hold_one_another():
    calls = []
    listing(
        calls, ordering="key", verdict=lambda messages: {e.id: Retry(after=60) for e in messages if e.payload == "a0"}
    )
    found = {name: put("job", name, ordering_key=name[0]) for name in ("a0", "b0", "a1", "b1")}
    drain()
    assert [name for name, row in found.items() if state(row) == State.DELIVERED] == ["b0", "b1"]
    check_invariants()


# --- lanes: crashes, locks and losses ---------------------------------------------------------------------------------


def test_a_run_whose_process_died_comes_again_one_by_one_in_order(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    lapse(*[lease.message for lease in take()])
    check_invariants()
    drain()
    assert calls == [[0], [1], [2], [3]]
    assert [outcomes(row) for row in found] == [[Outcome.LAPSED, Outcome.DELIVERED]] * 4
    assert [fresh(row).spent for row in found] == [2] * 4
    check_invariants()


def test_each_message_of_a_run_whose_process_died_has_a_lapse(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(3)]
    lapse(*[lease.message for lease in take()])
    take()
    assert [fresh(row).lapses for row in found] == [1, 1, 1]


def test_a_run_whose_process_died_before_its_start_comes_again_one_by_one(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(3)]
    held = Claimer(using="default", worker="worker").claim(10, seconds=60, start=0).leases
    assert [lease.id for lease in held] == [row.pk for row in found]
    lapse(*[lease.message for lease in held])
    assert [lease.id for lease in take()] == [found[0].pk]
    check_invariants()


def test_a_message_whose_lease_ran_out_takes_no_follower_along(calls):
    listing(calls, ordering="key")
    head = put("job", 0, ordering_key="a")
    lapse(*[lease.message for lease in Claimer(using="default", worker="w").claim(10, seconds=60, start=0).leases])
    follower = put("job", 1, ordering_key="a")
    assert [lease.id for lease in take()] == [head.pk]
    assert fresh(follower).lease_token is None


def test_only_a_run_makes_a_transaction_larger_than_it_shall_be(calls):
    listing(calls, ordering="key")
    listing(calls, "free")
    for key in ("a", "a", "a", "b", "b"):
        put("job", ordering_key=key)
    in_lanes = [release(lease) for lease in take()]
    put("free", count=4)
    free = [release(lease) for lease in take()]
    assert [runs.end_of_part(in_lanes, size) for size in (1, 2, 3, 4, 5)] == [3, 3, 3, 5, 5]
    assert [runs.end_of_part(free, size) for size in (1, 4, 9)] == [1, 4, 9]


def test_the_rest_of_a_run_that_was_taken_over_is_not_settled(calls):
    """The first is another's now, so those behind it may not be done before it."""
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    old = take()
    Message.objects.filter(pk=found[0].pk).update(due_at=rows.ago(900))
    (other,) = take(worker="another")
    assert other.id == found[0].pk
    done = settle("default", judge_list(old, None, 0.1))
    assert [each.status for each in done] == ["lost", "settled", "settled", "settled"]
    assert [state(row) for row in found] == [State.PENDING] * 4
    assert settle("default", judge_list([other], None, 0.1))[0].status == "settled"
    check_invariants()
    drain()
    assert settled(*found)


def test_what_comes_behind_a_lost_message_of_a_run_is_given_back(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    leases = take()
    Message.objects.filter(pk=found[1].pk).update(due_at=rows.ago(900))
    assert take(worker="another") == []  # put to sleep behind the first
    done = settle("default", judge_list(leases, None, 0.1))
    assert [each.status for each in done] == ["settled", "lost", "settled", "settled"]
    assert [state(row) for row in found] == [State.DELIVERED, *[State.PENDING] * 3]
    check_invariants()
    drain()
    assert [payload for call in calls for payload in call] == [1, 2, 3]


@rows_can_be_locked
def test_a_run_with_a_locked_row_is_settled_later_and_as_a_whole(calls, second_connection):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(3)]
    leases = take()
    with locked_elsewhere(second_connection, found[1]):
        done = settle("default", judge_list(leases, None, 0.1))
        assert [each.status for each in done] == ["busy"] * 3
        assert [state(row) for row in found] == [State.PENDING] * 3
    assert [each.status for each in settle("default", judge_list(leases, None, 0.1))] == ["settled"] * 3


def test_a_dispatcher_settles_a_run_whose_row_was_locked_for_a_while(calls, second_connection):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks")
    gate = Gate()
    handler("job", batch=10)(gate)
    found = [put("job", n, ordering_key="a") for n in range(3)]
    with dispatching():
        gate.wait()
        with locked_elsewhere(second_connection, found[1]):
            gate.open.set()
            threading.Event().wait(0.5)
            assert not any(settled(row) for row in found)
        wait_until(lambda: settled(*found))
    assert len(gate.runs) == 1


def test_a_run_of_which_one_cannot_be_charged_starts_without_those_behind_it():
    handler("job", batch=10)(lambda messages: None)
    found = [put("job", n, ordering_key="a") for n in range(4)]
    leases = Claimer(using="default", worker="w").claim(10, seconds=60, start=0).leases
    slots = Slots(concurrency=2, handlers=registry.handlers(), batch=10, lease_seconds=60, prefetch=False)
    slots.add(leases)
    Message.objects.filter(pk=found[2].pk).update(lease_token=5)
    startable = slots.startable()
    assert startable == leases
    charged = charge("default", startable)
    assert charged == [*leases[:2], leases[3]]
    assert slots.start(charged) == [leases[3]]
    first = slots.take()
    assert first.call == leases[:2]
    done = settle("default", [release(leases[3])])
    assert done[0].status == "settled"
    assert [each.status for each in settle("default", judge_list(first.call, None, 0.1))] == ["settled"] * 2
    assert fresh(found[3]).spent == 0


def test_what_a_lost_reply_to_a_commit_wrote_of_a_run_is_recognised(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(4)]
    leases = take()
    ends = judge_list(leases, {leases[2].id: Retry(after=60)}, 0.1)
    token = 77
    first = settle("default", ends, token=token)
    assert [each.status for each in first] == ["settled"] * 4
    again = settle("default", ends, token=token, recheck=True)
    assert [each.status for each in again] == ["settled", "settled", "settled", "lost"]
    assert [state(row) for row in found] == [State.DELIVERED] * 2 + [State.PENDING] * 2
    check_invariants()


def test_a_message_of_a_run_is_in_flight_and_no_operator_takes_it_away(calls):
    listing(calls, ordering="key")
    found = [put("job", n, ordering_key="a") for n in range(3)]
    take()
    assert discard("default", [row.pk for row in found]).skipped == {row.pk: "in flight" for row in found}
    assert all("is in flight" in explain(row) for row in found)


def test_a_lane_of_a_list_handler_costs_a_claim_no_more_however_long_it_is(calls):
    """Flat cost: statements for a run do not grow with the backlog."""
    listing(calls, ordering="key", batch=10)
    counts = []
    for _ in range(2):
        for n in range(60):
            put("job", n, ordering_key="a")
        with CaptureQueriesContext(connection) as queries:
            leases = take(limit=10)
            settle("default", judge_list(leases, None, 0.1))
        counts.append(len(queries))
    assert counts[1] <= counts[0] + 1


def test_the_first_attempt_of_a_delivered_list_leaves_no_record(calls):
    listing(calls, ordering="key")
    for n in range(5):
        put("job", n, ordering_key="a")
    drain()
    assert not Attempt.objects.exists()


# --- interleavings ----------------------------------------------------------------------------------------------------


class World(interleavings.World):
    """Actors that claim runs, and settle each as a whole."""

    def claim(self):
        limit, alone, start = self.chance.randint(2, 5), self.chance.random() < 0.5, self.chance.choice([None, 0])
        seconds, ends = self.chance.choice([60, 60, -1]), self.chance.random() < 0.7
        names = [self.chance.choice(["delivered", "delivered", *VERDICTS]) for _ in range(limit)]

        def job():
            leases = claimer().claim(limit, seconds=seconds, start=start, alone=alone).leases
            self.granted += leases
            if not ends:
                return
            charged = charge("default", [lease for lease in leases if not lease.charged])
            missing = [lease for lease in leases if not lease.charged and lease not in charged]
            held = unbroken(leases, missing)
            left = [verdict(lease, name) for lease, name in zip(held, names, strict=False)]
            left += [release(lease) for lease in leases if lease not in held]
            for _ in range(10):
                left = [each.settlement for each in settle("default", left) if each.status == "busy"]
                if not left:
                    break

        return job


def test_no_interleaving_of_runs_breaks_an_invariant(monkeypatch, cast):
    monkeypatch.setattr(interleavings, "World", World)
    monkeypatch.setattr(interleavings, "NAMES", ("bulk", "stock"))
    policy = RetryPolicy(max_attempts=BUDGET, base=60, factor=1, jitter=False)
    handler("bulk", batch=4, retry=policy)(lambda messages: None)
    handler("stock", batch=4, retry=policy, dead_head="block")(lambda messages: None)
    interleavings.run(cast, interleavings.SECONDS, least=10)
