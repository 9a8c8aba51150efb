"""What a process holds and what may start next: bookkeeping without a database."""

import threading
import time

import pytest

from outbox import handler
from outbox.handlers import LeaseView
from outbox.leases import Lease
from outbox.models import Message
from outbox.registry import registry
from outbox.slots import Slots
from tests.running import DEADLINE

LEASE = 60.0


@pytest.fixture(autouse=True)
def _handlers():
    with registry.isolated():
        for name in ("a", "b", "c"):
            handler(name, timeout=10, ordering="none")(lambda message: None)
        yield


def slots(names="ab", concurrency=4, batch=20, prefetch=False):
    return Slots(
        concurrency=concurrency,
        handlers=[registry.by_name(name) for name in names],
        batch=batch,
        lease_seconds=LEASE,
        prefetch=prefetch,
    )


def lease(name="a", *, charged=True, lane=None):
    return Lease(
        using="default",
        message=Message(pk=1, handler=name, lane=lane),
        handler=registry.by_name(name),
        token=1,
        worker="w",
        deadline=time.monotonic() + LEASE,
        charged=charged,
        view=LeaseView(1),
    )


def test_a_handler_may_fill_its_share_and_the_only_one_everything():
    assert slots("ab").cap(registry.by_name("a")) == 2
    assert slots("ab", concurrency=1).cap(registry.by_name("a")) == 1
    assert slots("ab", concurrency=5).cap(registry.by_name("a")) == 2
    assert slots("a").cap(registry.by_name("a")) == 4


def test_empty_slots_want_what_starts_at_once():
    want = slots("abc").want()
    assert (want.limit, want.start, want.room) == (4, 4, {"a": 2, "b": 2, "c": 2})


def test_what_is_held_leaves_less_room():
    held = slots("abc")
    held.add([lease("a"), lease("a"), lease("b")])
    want = held.want()
    assert (want.limit, want.room) == (1, {"a": 0, "b": 1, "c": 2})


def test_charged_leases_are_run_in_their_order_and_queued_ones_wait_for_their_charge():
    held = slots("ab")
    first, second, queued = lease("a"), lease("b"), lease("a", charged=False)
    held.add([first, second, queued])
    assert [held.take(), held.take()] == [first, second]
    (startable,) = held.startable()
    assert startable is queued
    held.start([queued])
    assert held.take() is queued


def test_queued_leases_start_in_turn_within_their_shares():
    held = slots("ab")
    queued = [lease("a", charged=False) for _ in range(4)] + [lease("b", charged=False)]
    held.add(queued)
    assert held.startable() == [queued[0], queued[4], queued[1]]
    assert held.startable() == []


def test_whoever_started_last_comes_last_the_next_time():
    held = slots("abc", concurrency=1)
    queued = {name: [lease(name, charged=False) for _ in range(3)] for name in "abc"}
    for leases in queued.values():
        held.add(leases)
    started = []
    for _ in range(6):
        (one,) = held.startable()
        started.append(one.handler.name)
        held.end(one)
    assert started == ["a", "b", "c", "a", "b", "c"]


def test_free_slots_are_offered_to_handlers_of_which_nothing_is_queued(monkeypatch):
    held = slots("abc", concurrency=3, batch=4)
    held.add([lease("a", charged=False) for _ in range(4)])
    assert held.startable()
    assert held.want().limit == 0
    assert held.want_for_others().limit == 0  # only now and then
    monkeypatch.setattr("outbox.slots.OTHERS_EVERY", 0.0)
    want = held.want_for_others()
    assert (want.limit, want.start, want.room) == (2, 2, {"a": 0, "b": 1, "c": 1})


def test_leases_that_could_not_be_charged_are_queued_again_in_their_order():
    held = slots("a")
    queued = [lease("a", charged=False) for _ in range(6)]
    held.add(queued)
    taken = held.startable()
    held.put_back(taken)
    assert held.startable() == taken
    assert set(held.held()) == set(queued)


def test_a_finished_handler_frees_its_slot_but_its_lease_is_held_until_it_is_settled():
    held = slots("ab", concurrency=1)
    only = lease("a")
    held.add([only])
    held.take()
    assert held.want().limit == 0
    assert held.finished(only)
    assert held.want().limit == 1
    assert (held.held(), held.is_empty()) == ([only], False)
    held.end(only)
    assert (held.held(), held.is_empty()) == ([], True)


def test_in_a_lane_the_slot_is_kept_for_the_successor():
    held = slots("ab", concurrency=1)
    first, second = lease("a", lane=7), lease("a", lane=7)
    held.add([first])
    held.take()
    held.finished(first)
    assert held.want().limit == 0
    assert held.hand_over(first, second)
    assert held.take() is second


def test_after_a_withdrawal_nothing_starts_any_more():
    held = slots("ab")
    running, ready, queued = lease("a", lane=7), lease("b"), lease("a", charged=False)
    held.add([running, ready, queued])
    held.take()
    assert held.withdraw() == [ready, queued]
    held.finished(running)
    successor = lease("a", lane=7)
    assert not held.hand_over(running, successor)
    assert held.is_quiet()
    assert set(held.held()) == {ready, queued, successor}  # until they are given back


def test_an_overdue_handler_loses_its_slot_and_keeps_its_thread():
    held = slots("ab", concurrency=1)
    handler("d", timeout=0.01, ordering="none")(lambda message: None)
    stuck = lease("d")
    held._queued["d"] = held._queued["a"]
    held.add([stuck])
    held.take()
    time.sleep(0.02)
    assert held.next_timeout() == 0
    assert held.abandon_overdue() == [stuck]
    assert held.abandon_overdue() == []
    assert (held.abandoned(), held.is_quiet(), held.is_empty(), held.held()) == (1, True, True, [])
    assert held.want().limit == 1
    assert not held.finished(stuck)
    assert held.abandoned() == 0


def test_an_overdue_handler_in_a_lane_is_renewed_until_its_thread_has_ended():
    held = slots("ab")
    handler("d", timeout=0.01)(lambda message: None)
    stuck = lease("d", lane=7)
    held.add([stuck])
    held.take()
    time.sleep(0.02)
    held.abandon_overdue()
    assert held.held() == [stuck]


def test_the_next_timeout_is_that_of_the_first_handler_to_run_out_of_time():
    held = slots("ab")
    assert held.next_timeout() == float("inf")
    held.add([lease("a")])
    held.take()
    assert 9 < held.next_timeout() <= 10


def test_handlers_known_to_be_quick_get_a_stock():
    held = slots("ab", concurrency=2, batch=50, prefetch=True)
    quick = lease("a")
    held.add([quick])
    held.take()
    held.finished(quick)
    held.end(quick)
    want = held.want()
    assert want.limit == 50
    assert want.room["a"] > 2 >= want.room["b"]


def test_slow_handlers_and_counted_runs_get_none():
    held = slots("ab", concurrency=2, batch=50)
    quick = lease("a")
    held.add([quick])
    held.take()
    held.finished(quick)
    held.end(quick)
    assert held.want().start == held.want().limit == 2


def test_a_lease_is_promised_until_shortly_before_its_end():
    held = slots("a")
    one = lease("a")
    held.add([one])
    assert one.deadline - LEASE / 5 < one.view.safe_until < one.deadline


def test_a_waiting_thread_gets_the_next_lease_or_learns_of_the_end():
    held = slots("a")
    got = []
    threads = [threading.Thread(target=lambda: got.append(held.take())) for _ in range(2)]
    for thread in threads:
        thread.start()
    only = lease("a")
    held.add([only])
    held.close()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(got, key=bool) == [None, only]


# --- a moment's patience ----------------------------------------------------------------------------------------------


def quick_slots(names="a", **options):
    """Four slots whose handlers have just shown that they take no time, and one charged lease of each that is run."""
    held = slots(names, **options)
    for name in names:
        held.add([lease(name)])
        held.finished(taken := held.take())
        held.end(taken)
    return held


def waited(held):
    start = time.monotonic()
    held.await_room()
    return time.monotonic() - start


def test_room_is_awaited_while_quick_handlers_are_in_their_slots(monkeypatch):
    monkeypatch.setattr("outbox.slots.MOMENT", DEADLINE)
    held = quick_slots()
    held.add([lease(), lease()])
    running = [held.take(), held.take()]

    def finish():
        for each in running:
            held.finished(each)

    timer = threading.Timer(0.1, finish)
    timer.start()
    assert 0.05 < waited(held) < DEADLINE
    assert held.want().start == 4


def test_room_is_awaited_for_a_moment_only():
    held = quick_slots()
    held.add([lease(), lease()])
    assert waited(held) < DEADLINE


@pytest.mark.parametrize("reason", ["nothing runs", "unknown", "slow", "in a lane", "one of two is slow"])
def test_no_room_is_awaited_where_none_comes_soon(reason, monkeypatch):
    monkeypatch.setattr("outbox.slots.MOMENT", DEADLINE)
    with monkeypatch.context() as patch:
        if reason == "slow":
            patch.setattr("outbox.slots.time.monotonic", iter(range(100)).__next__)
        held = slots("a") if reason == "unknown" else quick_slots()
    if reason == "in a lane":
        handler("ordered", timeout=10)(lambda message: None)
        held = quick_slots(["ordered"])
        held.add([lease("ordered", lane=1), lease("ordered", lane=2)])
    elif reason == "one of two is slow":
        held = quick_slots("ab")
        held._wants.learn(registry.by_name("b"), 60.0)
        held.add([lease("a"), lease("b")])
    elif reason != "nothing runs":
        held.add([lease(), lease()])
    assert waited(held) < DEADLINE / 2
