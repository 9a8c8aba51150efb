"""A row whose payload is no JSON, as hand-written SQL may leave it."""

import pytest
from django.db import connection

from outbox import handler, signals
from outbox.leases import claim
from outbox.models import Message, Reason, State
from outbox.registry import registry
from outbox.testing import drain
from tests.running import put

pytestmark = pytest.mark.django_db(transaction=True)
BROKEN = '{"n": 1'


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


@pytest.mark.parametrize("column", ["payload", "headers"])
def test_it_dies_at_the_first_attempt_with_a_reason_and_stops_nobody_else(column):
    """Scenario 55: a permanent fault of one message; it is kept as it is, and may be requeued."""
    delivered = []
    handler("job")(lambda message: delivered.append(message.event_key))
    put("job", {"n": 1}, event_key="broken")
    put("job", {"n": 2}, event_key="sound")
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE outbox_message SET {column} = %s WHERE event_key = 'broken'", [BROKEN])
    told = []
    signals.buried.connect(receiver := lambda event, **_: told.append(event.message.event_key))
    drain()
    signals.buried.disconnect(receiver)
    row = Message.objects.get(event_key="broken")
    assert (row.state, row.reason, row.error_code, row.attempt) == (State.DEAD, Reason.BURIED, "unreadable", 1)
    assert "no JSON" in row.error_text
    assert delivered == ["sound"]
    assert told == ["broken"]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column} FROM outbox_message WHERE event_key = 'broken'")
        assert cursor.fetchone() == (BROKEN,)


def test_saving_it_keeps_the_text():
    handler("job")(lambda message: None)
    put("job", {"n": 1}, event_key="broken")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox_message SET payload = %s", [BROKEN])
    assert claim(using="default", worker="w", seconds=60)
    row = Message.objects.get()
    row.save()
    with connection.cursor() as cursor:
        cursor.execute("SELECT payload FROM outbox_message")
        assert cursor.fetchone() == (BROKEN,)
