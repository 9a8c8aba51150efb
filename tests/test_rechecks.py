"""Every write repeats in its WHERE what was judged before: no lock, and no look, is relied on alone."""

from contextlib import contextmanager, nullcontext, suppress

import pytest
from django.db import connection, transaction

from outbox import lanes
from outbox.database import Stale, again
from outbox.leases import charge, renew
from outbox.models import Message, State
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
    put,
    specimens,
    take,
    take_one,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]


@contextmanager
def changing_before_each_update(row, values):
    """Just before our UPDATE of messages the row changes, as if neither look nor lock had been worth anything."""
    busy = []

    def wrapper(execute, sql, params, many, context):
        if not busy and sql.startswith(("UPDATE", "WITH")) and "outbox_message" in sql:
            busy.append(sql)
            Message.objects.filter(pk=row.pk).update(**values)
            busy.clear()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


# --- what is written, as (the row that changes meanwhile, the write) --------------------------------------------------


def a_delivery(key):
    row = put("account", key)
    lease = take_one(row)
    return row, lambda: end(lease)


def a_delivery_by_an_atomic_handler(key):
    row = put("account", key)
    lease = take_one(row)

    def write():
        with transaction.atomic():
            end(lease)

    return row, write


def a_failure(key):
    row = put("account", key)
    lease = take_one(row)
    return row, lambda: end(lease, "retry")


def a_charge(key):
    row = put("account", key)
    (lease,) = take(start=0)
    return row, lambda: charge("default", [lease])


def a_renewal(key):
    row = put("account", key)
    lease = take_one(row)
    return row, lambda: renew("default", [lease], 600)


def a_claim(key):
    return put("account", key), take


def a_second_claim(key):
    row = rows.lapsed(topic="account", handler="account", route="account")
    return row, take


def a_hand_over(key):
    head, follower = put("account", "a"), put("account", "a", due_at=None)
    lease = take_one(head)
    return follower, lambda: end(lease, hand_over=hand_over)


def a_delivery_with_hand_over(key):
    head, _ = put("account", "a"), put("account", "a", due_at=None)
    lease = take_one(head)
    return head, lambda: end(lease, hand_over=hand_over)


def a_wake_up(key):
    head, follower = put("account", "a"), put("account", "a", due_at=None)
    lease = take_one(head)
    return follower, lambda: end(lease)


def a_parking(key):
    head, follower = put("account", "a"), put("account", "a")
    take_one(head)
    return follower, take


def an_advance(key):
    head = put("account", "a", due_at=None)
    return head, lambda: again("default", lambda: lanes.advance("default", head.lane))


def a_snooze(key):
    row = put("account", "a")
    late = {row.lane: [row]}
    return row, lambda: again("default", lambda: lanes.snooze("default", late, 10**9))


def a_sweep(key):
    row = put("account", "a", due_at=None)
    return row, lambda: sweep("default")


def a_requeue(key):
    row = rows.dead(topic="account", handler="account", route="account")
    return row, lambda: requeue("default", [row.pk])


def a_discard(key):
    row = put("account", key)
    return row, lambda: discard("default", [row.pk])


def a_discard_of_a_dead_one(key):
    row = rows.dead(topic="account", handler="account", route="account")
    return row, lambda: discard("default", [row.pk])


def a_make_due(key):
    row = put("account", key, due_at=rows.ahead(3600))
    return row, lambda: make_due("default", [row.pk])


# --- what changes meanwhile -------------------------------------------------------------------------------------------

CHANGES = {
    "settled": lambda row: {"state": State.DISCARDED},
    "dead": lambda row: {"state": State.DEAD},
    "requeued": lambda row: {"state": State.PENDING, "due_at": rows.ahead(3600)},
    "held by another": lambda row: {"lease_token": 77},
    "leased to another": lambda row: {"lease_token": 77, "due_at": rows.ahead(3600)},
    "put off": lambda row: {"due_at": rows.ahead(3600)},
    "asleep": lambda row: {"due_at": None},
    "holder": lambda row: {"holder": row.lane + 1},
    "out of its lane": lambda row: {"lane": None},
}
WRITES = [
    *(
        (write, change)
        for write in (a_delivery, a_delivery_by_an_atomic_handler, a_failure, a_charge, a_renewal)
        for change in ("settled", "held by another")
    ),
    *((a_claim, change) for change in ("settled", "leased to another")),
    *((a_second_claim, change) for change in ("settled", "put off")),
    *((a_hand_over, change) for change in ("settled", "leased to another")),
    *((a_delivery_with_hand_over, change) for change in ("settled", "held by another")),
    *((a_wake_up, change) for change in ("dead", "held by another", "put off")),
    *((a_parking, change) for change in ("settled", "holder", "put off")),
    *((an_advance, change) for change in ("dead", "held by another", "put off", "out of its lane")),
    *((a_snooze, change) for change in ("settled", "held by another", "put off")),
    *((a_sweep, change) for change in ("dead", "put off", "out of its lane")),
    *((a_requeue, change) for change in ("requeued",)),
    *((a_discard, change) for change in ("leased to another", "settled")),
    (a_discard_of_a_dead_one, "settled"),
    *((a_make_due, change) for change in ("dead", "held by another", "asleep")),
]


@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize(
    ("write", "change"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in WRITES]
)
def test_a_write_passes_by_what_changed_after_it_was_judged(write, change, key):
    row, work = write(key)
    values = CHANGES[change](row)
    before = columns(row)
    with changing_before_each_update(row, values), suppress(Stale):
        work()
    assert columns(row) in (before, before | values)  # undone as a whole, or passed by


# --- between the look of a claim and the claim ------------------------------------------------------------------------


@contextmanager
def changing_after_the_look(row, values):
    """Somebody was quicker: the looks, which precede any UPDATE and any transaction, have seen the row as it was."""
    seen = []

    def wrapper(execute, sql, params, many, context):
        if not seen and (sql.startswith("UPDATE") or connection.in_atomic_block):
            seen.append(sql)
            Message.objects.filter(pk=row.pk).update(**values)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


LATER_CHANGES = {
    "settled": ({"state": State.DISCARDED}, State.DISCARDED),
    "leased to another": (lambda: {"lease_token": 77, "due_at": rows.ahead(3600)}, State.PENDING),
    "put off": (lambda: {"due_at": rows.ahead(3600)}, State.PENDING),
    "a repeat offender": ({"lapses": 2}, State.PENDING),
    "expired": (lambda: {"expires_at": rows.ago(1)}, State.DISCARDED),
    "over its budget": ({"spent": BUDGET}, State.DEAD),
}


@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize("change", LATER_CHANGES)
def test_a_claim_takes_nothing_that_changed_after_its_look(change, key):
    values, state = LATER_CHANGES[change]
    row = put("account", key)
    with changing_after_the_look(row, values() if callable(values) else values):
        assert claimer().claim(5, seconds=60, alone=False).leases == []
    found = fresh(row)
    assert (found.state, found.attempt) == (state, 0)


def test_a_message_that_comes_into_a_lane_meanwhile_is_leased_as_one_of_that_lane():
    row = put("account")
    with changing_after_the_look(row, {"lane": 5}):
        take()
    assert fresh(row).holder == 5
    check_invariants()


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic], ids=["", "in a transaction"])
def test_a_message_that_comes_into_a_lane_meanwhile_leaves_it_with_its_delivery(block):
    row = put("account")
    lease = take_one(row)
    Message.objects.filter(pk=row.pk).update(lane=5, holder=5)
    with block():
        assert end(lease).status == "settled"
    check_invariants()
