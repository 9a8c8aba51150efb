"""A project whose reads go to a replica that is far behind: the outbox reads its own rows where it writes them."""

import io
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.test import override_settings

from outbox import DurableCommand, Effect, Intent, handler
from outbox.models import Dispatcher, Message
from outbox.operations import requeue
from outbox.registry import registry
from outbox.retention import prune, sweep
from outbox.testing import assert_staged
from outbox.testing import drain as drain_here
from tests import rows
from tests.running import dispatching, drain, put
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class ReadsElsewhere:
    """Sends every read to a database that never hears of what is written."""

    def db_for_read(self, model, **hints):
        return "other"

    def db_for_write(self, model, **hints):
        return "default"

    def allow_relation(self, *objects, **hints):
        return True


@pytest.fixture(autouse=True)
def _replica():
    with override_settings(DATABASE_ROUTERS=["tests.test_replica.ReadsElsewhere"]), registry.isolated():
        yield


def here():
    return Message.objects.using("default")


def test_staging_delivery_and_repetition_never_ask_the_replica():
    """Scenario 38."""
    done = []
    handler("job", max_attempts=1)(lambda message: done.append(message.payload) or message.payload != "bad")
    put("job", 1, event_key="one", ordering_key="k")
    assert put("job", 1, event_key="one", ordering_key="k").pk == here().get().pk
    put("job", 2, ordering_key="k")
    put("job", "bad")
    put("job", "now", deliver_now=True)
    drain()
    assert sorted(map(str, done)) == ["1", "2", "bad", "now"]
    (dead,) = here().dead()
    assert requeue("default", [dead.pk]).done == (dead.pk,)
    here().filter(pk=dead.pk).update(payload="good")
    assert drain_here().delivered == 1
    assert here().delivered().count() == 4
    assert not Message.objects.using("other").exists()
    assert not Dispatcher.objects.using("other").exists()


def test_atomic_handlers_retries_and_commands_never_ask_the_replica():
    """Scenario 38."""
    handler("job", atomic=True)(lambda message: message.attempt > 1)
    result = DurableCommand().execute(lambda: 5, [Effect(Intent("job", 1), deliver=lambda message: True)])
    assert (result.value, len(result.completed_effects)) == (5, 1)
    put("job", 2, ordering_key="k")
    with dispatching():
        wait_until(lambda: here().retrying().exists())
        here().pending().update(due_at=rows.ago(1))
        wait_until(lambda: here().delivered().count() == 2)
    assert_staged("job", 2)


def test_operators_and_housekeeping_never_ask_the_replica():
    """Scenario 38."""
    handler("job")(lambda message: None)
    put("job", 1)
    drain()
    for command, word in (("outbox_status", "job"), ("outbox_show", "delivered"), ("outbox_explain", "delivered")):
        out = io.StringIO()
        call_command(command, *([] if command == "outbox_status" else [str(here().get().pk)]), stdout=out)
        assert word in out.getvalue()
    here().update(settled_at=rows.ago(timedelta(days=40).total_seconds()))
    sweep("default")
    prune("default")
    assert not here().exists()
