"""Messages that fail as if the other side were down, at the head of healthy ones of the same topic."""

import pytest
from django.core.management import call_command

from outbox import RetryPolicy, Unavailable, handler
from outbox.models import Message, State
from outbox.registry import registry
from tests.running import put

pytestmark = pytest.mark.django_db(transaction=True)

POISON = ("poison-1", "poison-2")
HEALTHY = tuple(f"healthy-{number}" for number in range(20))


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


def deliver(error):
    """Drain a topic whose first two messages always raise; returns how often each handler was started."""
    starts = dict.fromkeys((*POISON, *HEALTHY), 0)

    @handler("mail", retry=RetryPolicy(max_attempts=3, base=0, jitter=False))
    def send(message):
        starts[message.event_key] += 1
        if message.event_key in POISON:
            raise error

    for key in starts:
        put("mail", event_key=key)
    call_command("outbox_dispatch", "--drain", "--concurrency", "2", "--poll", "0.05")
    return starts


def states(keys):
    return [Message.objects.get(event_key=key).state for key in keys]


def test_poison_that_looks_like_an_outage_dies_of_its_budget_and_holds_nobody_up():
    """P5: seen nothing sent in 60 cycles, with attempts at 0."""
    starts = deliver(ConnectionRefusedError("the mail server is down"))
    assert states(HEALTHY) == [State.DELIVERED] * len(HEALTHY)
    assert states(POISON) == [State.DEAD] * len(POISON)
    assert starts == dict.fromkeys(POISON, 3) | dict.fromkeys(HEALTHY, 1)


def test_what_calls_the_other_side_unavailable_is_put_off_alone():
    """P5: an outage is judged message by message; those of others are delivered, its own keep their budget."""
    starts = deliver(Unavailable("down", after=3600))
    assert states(HEALTHY) == [State.DELIVERED] * len(HEALTHY)
    assert starts == dict.fromkeys((*POISON, *HEALTHY), 1)
    for key in POISON:
        row = Message.objects.get(event_key=key)
        assert (row.state, row.attempt, row.spent) == (State.PENDING, 1, 0)
