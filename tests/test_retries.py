"""How long a failed message waits: pure arithmetic, and what becomes of it in the table."""

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import RetryPolicy, handler
from outbox.delivery import run
from outbox.leases import claim, settle
from outbox.models import Message, State
from outbox.registry import registry
from tests import rows
from tests.running import put


class Highest:
    """The largest number that jitter can draw."""

    def random(self):
        return 1.0


def test_the_bound_doubles_up_to_the_cap():
    policy = RetryPolicy(base=5, factor=2, cap=3600)
    assert [policy.bound(n) for n in (1, 2, 3, 4, 10, 11, 12)] == [5, 10, 20, 40, 2560, 3600, 3600]


@pytest.mark.parametrize("factor", [2, 5, 1.5, 1])
@pytest.mark.parametrize("failures", [39, 47, 1024, 4999])
def test_a_large_number_of_failures_waits_for_the_cap(factor, failures):
    """Scenario 44."""
    policy = RetryPolicy(max_attempts=5000, base=1, factor=factor, cap=3600)
    delay = policy.delay(failures, Highest())
    assert delay == (1 if factor == 1 else 3600)


@given(
    failures=st.integers(1, 10**6),
    base=st.floats(0, 1e300),
    factor=st.floats(1, 1e300),
    cap=st.floats(0, 1e300),
    seed=st.integers(),
)
def test_no_policy_and_no_number_overflows(failures, base, factor, cap, seed):
    """Scenario 44."""
    policy = RetryPolicy(max_attempts=10**7, base=base, factor=factor, cap=cap)
    assert 0 <= policy.delay(failures, random.Random(seed)) <= cap


def test_the_budget_ends_the_retries():
    policy = RetryPolicy(max_attempts=3)
    assert [policy.delay(n) is None for n in (1, 2, 3, 4)] == [False, False, True, True]


def test_without_jitter_the_wait_is_exact():
    assert RetryPolicy(base=7, jitter=False).delay(1) == 7


def test_delays_spread_over_the_whole_window():
    """Scenario 45: full jitter."""
    policy = RetryPolicy(base=100, cap=100)
    source = random.Random(7)
    delays = [policy.delay(1, source) for _ in range(1000)]
    tenths = [sum(n * 10 <= each < (n + 1) * 10 for each in delays) for n in range(10)]
    assert min(tenths) > 60
    assert max(delays) <= 100


NAN = float("nan")


@pytest.mark.parametrize("name", ["max_attempts", "base", "factor", "cap"])
@pytest.mark.parametrize("value", ["3", None, NAN, True, timedelta(seconds=5)], ids=repr)
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a (whole )?number, not "):
        RetryPolicy(**{name: value})


@pytest.mark.parametrize("values", [{"max_attempts": 0}, {"base": -1}, {"cap": -1}, {"factor": 0.5}])
def test_a_policy_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValueError, match=r"max_attempts|factor"):
        RetryPolicy(**values)


def fail(message):
    raise ValueError("x")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("failures", [39, 47, 1024, 4999])
def test_a_message_with_many_failures_is_stored_with_the_cap(failures):
    """Scenario 44."""
    with registry.isolated():
        handler("job", retry=RetryPolicy(max_attempts=5000, base=1, factor=5, cap=3600, jitter=False))(fail)
        put("job")
        Message.objects.update(spent=failures - 1, attempt=failures - 1)
        (lease,) = claim(using="default", worker="worker", seconds=60)
        settle("default", [run(lease)])
    row = Message.objects.get()
    assert row.state == State.PENDING
    assert timedelta(minutes=59) < row.due_at - rows.now() <= timedelta(hours=1)


@pytest.mark.django_db(transaction=True)
def test_messages_that_fail_together_come_back_one_by_one():
    """Scenario 45."""
    with registry.isolated():
        handler("job", ordering="none", retry=RetryPolicy(base=600, cap=600))(fail)
        put("job", count=200)
        leases = claim(using="default", worker="worker", seconds=60, limit=200)
        settle("default", [run(lease) for lease in leases])
    due = sorted(Message.objects.values_list("due_at", flat=True))
    assert due[-1] <= rows.ahead(600)
    assert len({each.replace(microsecond=0) for each in due}) > 100
    assert due[150] - due[50] > timedelta(seconds=100)


@pytest.mark.django_db(transaction=True)
def test_messages_of_crashed_workers_come_back_one_by_one():
    """Scenario 45: the recovery of crashed claims is spread, too."""
    with registry.isolated():
        handler("job", ordering="none", retry=RetryPolicy(base=600, cap=600))(fail)
        put("job", count=100)
        for _ in range(2):
            claim(using="default", worker="dead", seconds=60, limit=100)
            Message.objects.update(due_at=rows.ago(1))
        assert claim(using="default", worker="next", seconds=60, limit=100) == []
    due = sorted(Message.objects.values_list("due_at", flat=True))
    assert len({each.replace(microsecond=0) for each in due}) > 40
