"""Processes that claim at the same moment try for different rows, and none of the rows is left behind."""

import pytest

from outbox.leases import claiming, rivals
from outbox.leases.rivals import BLOCKS, CALM, CROWD, Rivals, begin_anywhere
from outbox.models import Message
from tests.specimens import check_invariants, claimer, put, specimens

LIMIT = 5

__all__ = ["specimens"]
database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def draw(monkeypatch):
    """Return a function that fixes which of several parts is drawn: the first or the last."""

    def fix(place):
        monkeypatch.setattr(rivals.random, "randrange", lambda count: range(count)[place])

    return fix


def let_a_rival_be_faster(monkeypatch, times=1):
    """Let another process claim the same rows between the next look and the lease."""
    rival, look, left = claimer(worker="rival"), claiming.read, list(range(times))

    def read(*given):
        found = look(*given)
        if left:
            left.pop()
            monkeypatch.setattr(claiming, "read", look)
            assert len(rival.claim(LIMIT, seconds=60).leases) == LIMIT
            monkeypatch.setattr(claiming, "read", read)
        return found

    monkeypatch.setattr(claiming, "read", read)


def oldest(count):
    pending = Message.objects.filter(lease_token=None).order_by("due_at", "id")
    return list(pending.values_list("id", flat=True)[:count])


@database
@pytest.mark.usefixtures("specimens")
@pytest.mark.parametrize("times", [1, 4])
def test_a_claim_whose_rows_a_rival_took_takes_others_in_the_same_call(times, monkeypatch, draw):
    for _ in range(2 * LIMIT * BLOCKS):
        put("mail")
    mine = claimer()
    draw(0)
    let_a_rival_be_faster(monkeypatch, times)
    assert len(mine.claim(LIMIT, seconds=60).leases) == LIMIT
    assert Message.objects.exclude(lease_token=None).values("lease_token").distinct().count() == 1 + times
    check_invariants()


@database
@pytest.mark.usefixtures("specimens")
def test_among_rivals_a_claim_begins_anywhere_and_alone_it_begins_at_the_oldest_again(monkeypatch, draw):
    for _ in range(LIMIT * (BLOCKS + 4)):
        put("mail")
    mine = claimer()
    draw(-1)
    let_a_rival_be_faster(monkeypatch)
    mine.claim(LIMIT, seconds=60)
    due = oldest(BLOCKS * LIMIT)
    taken = [lease.id for lease in mine.claim(LIMIT, seconds=60).leases]
    assert sorted(taken) == sorted(due[-LIMIT:])
    monkeypatch.setattr(rivals, "BLOCKS", 1)  # as after CALM claims without a rival
    due = oldest(LIMIT)
    assert sorted(lease.id for lease in mine.claim(LIMIT, seconds=60).leases) == sorted(due)


@database
@pytest.mark.usefixtures("specimens")
def test_two_processes_take_everything_between_them(monkeypatch):
    total = 3 * LIMIT * BLOCKS + 2
    for _ in range(total):
        put("mail")
    mine = claimer()
    let_a_rival_be_faster(monkeypatch, times=2)
    taken = []
    while leases := mine.claim(LIMIT, seconds=60).leases:
        taken += [lease.id for lease in leases]
    assert len(taken) == len(set(taken)) == total - 2 * LIMIT
    assert not oldest(1)


def test_few_rows_missed_show_no_rival():
    met = Rivals()
    met.meet(LIMIT - 1, tried=CROWD * LIMIT)
    assert met.blocks == 1
    met.meet(LIMIT, tried=CROWD * LIMIT)
    assert met.blocks == BLOCKS
    assert met.just_met


def test_after_so_many_claims_alone_a_rival_is_forgotten():
    met = Rivals()
    met.meet(1, tried=1)
    for _ in range(CALM - 1):
        met.meet(0, tried=LIMIT)
        assert not met.just_met
    assert met.blocks == BLOCKS
    met.meet(0, tried=LIMIT)
    assert met.blocks == 1


@pytest.mark.parametrize(
    ("there", "begin"),
    [(3, {0}), (9, {0}), (10, {0, 5}), (14, {0, 5}), (20, {0, 5, 10, 15}), (40, {0, 5, 10, 15})],
)
def test_only_whole_parts_are_begun_with_and_the_oldest_is_one_of_them(there, begin):
    found = {begin_anywhere(list(range(there)), 5, BLOCKS)[0] for _ in range(300)}
    assert found == begin
