"""A claim does not get in the way of the lanes that its own process holds, nor do they hide the others for long."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from outbox.leases import courtesy
from outbox.models import Message
from tests import rows
from tests.specimens import (
    check_invariants,
    claimer,
    end,
    fresh,
    hand_over,
    locked_elsewhere,
    put,
    rows_can_be_locked,
    specimens,
    take,
    take_one,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]


def is_asleep(row):
    return fresh(row).due_at is None


@pytest.fixture
def held():
    """A claimer, and the lane of which its process holds a message."""
    head = put("account", "a")
    own = claimer()
    own.claim(1, seconds=60)
    return own, {head.lane}


@pytest.fixture
def for_long(monkeypatch):
    monkeypatch.setattr(courtesy, "FACTOR", 1e6)


@pytest.mark.usefixtures("for_long")
def test_followers_in_a_lane_of_ours_are_put_to_sleep_now_and_then_only(held):
    own, ours = held
    first = put("account", "a")
    assert own.claim(10, seconds=60, ours=ours).leases == []
    assert is_asleep(first)
    second = put("account", "a")
    claim = own.claim(10, seconds=60, ours=ours)
    assert (claim.leases, claim.spared, claim.contended) == ([], True, False)
    assert not is_asleep(second)
    check_invariants()


def test_the_followers_are_put_to_sleep_after_a_while(held, monkeypatch):
    monkeypatch.setattr(courtesy, "FACTOR", 0.0)
    own, ours = held
    for _ in range(2):
        follower = put("account", "a")
        own.claim(10, seconds=60, ours=ours)
        assert is_asleep(follower)


@pytest.mark.usefixtures("for_long")
def test_what_is_in_no_lane_of_ours_is_claimed_meanwhile(held):
    own, ours = held
    put("account", "a")
    own.claim(10, seconds=60, ours=ours)
    follower, other, plain = put("account", "a"), put("account", "b"), put("mail")
    claim = own.claim(10, seconds=60, ours=ours)
    assert {lease.id for lease in claim.leases} == {other.pk, plain.pk}
    assert not is_asleep(follower)


@rows_can_be_locked
@pytest.mark.parametrize("what", ["head", "follower"])
def test_what_a_settlement_of_ours_had_locked_is_no_obstacle(second_connection, what):
    head = put("account", "a")
    own = claimer()
    (lease,) = own.claim(1, seconds=60).leases
    follower = put("account", "a")
    with locked_elsewhere(second_connection, head if what == "head" else follower):
        assert own.claim(10, seconds=60, ours={head.lane}).leases == []
    end(lease)
    assert [lease.id for lease in own.claim(10, seconds=60).leases] == [follower.pk]


def test_without_a_look_a_lane_goes_on_by_one_statement(database_kind):
    first = [put("account", key) for key in "ab"]
    second = [put("account", key) for key in "ab"]
    leases = [take_one(row) for row in first]
    take()
    with CaptureQueriesContext(connection) as queries:
        nexts = [end(lease, hand_over=hand_over).next for lease in leases]
    assert [each.id for each in nexts] == [row.pk for row in second]
    assert (len(queries) == len(leases)) == (database_kind == "postgresql")
    check_invariants()


@rows_can_be_locked
def test_nobody_waits_for_the_next_message_of_a_lane(second_connection):
    first, second = put("account", "a"), put("account", "a")
    lease = take_one(first)
    with locked_elsewhere(second_connection, second):
        assert end(lease, hand_over=hand_over).status == "busy"
    assert end(lease, hand_over=hand_over).next.id == second.pk


def test_a_next_message_whose_lease_ran_out_is_left_to_a_claim():
    first, second = put("account", "a"), put("account", "a")
    lease = take_one(first)
    Message.objects.filter(pk=second.pk).update(lease_token=77, due_at=rows.ago(1))
    assert end(lease, hand_over=hand_over).next is None
    assert (fresh(second).lease_token, fresh(second).attempt) == (77, 0)
