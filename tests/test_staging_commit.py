"""Staging and the business transaction: which one it is, what a rollback takes along, what a commit sets off."""

import asyncio
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path

from outbox import Intent, NotInTransaction, astage, delivery, handler, recording, signals, stage, stage_many, wakeup
from outbox.exceptions import EventKeyConflict, InvalidIntent
from outbox.models import Message
from tests.testapp.models import Order

pytestmark = pytest.mark.usefixtures("statement_path")


@pytest.fixture(autouse=True)
def _handlers(outbox_registry):
    handler("order.paid")(lambda message: None)


@pytest.fixture
def told(monkeypatch):
    """What was set off after commits, in its order: ("signal", key), ("hint", alias), ("deliver", ids)."""
    happened = []
    monkeypatch.setattr(wakeup, "hint", lambda using: happened.append(("hint", using)))
    monkeypatch.setattr(delivery, "deliver_now", lambda using, ids: happened.append(("deliver", tuple(ids))))

    def receive(event, **rest):
        happened.append(("signal", event.message.event_key))

    signals.staged.connect(receive)
    yield happened
    signals.staged.disconnect(receive)


def stage_order(reference, **keywords):
    Order.objects.create(reference=reference)
    return stage("order.paid", {"reference": reference}, event_key=reference, **keywords)


@transaction.atomic
def stage_and_fail(reference):
    stage_order(reference, deliver_now=True)
    raise ZeroDivisionError


# --- which transaction ---


@pytest.mark.django_db(transaction=True)
def test_staging_in_autocommit_is_refused():
    """Scenario 1 (a)."""
    with pytest.raises(NotInTransaction):
        stage("order.paid", {})
    assert not Message.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_staging_in_manual_transaction_management_is_refused_by_our_own_error():
    """Scenario 1 (b)."""
    transaction.set_autocommit(False)
    try:
        with pytest.raises(NotInTransaction, match=r"set_autocommit\(False\)"):
            stage("order.paid", {})
        with transaction.atomic():
            stage("order.paid", {}, event_key="k")
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert Message.objects.get().event_key == "k"


@pytest.mark.django_db(transaction=True)
def test_a_thread_started_inside_somebodys_transaction_is_refused():
    """Scenario 1 (c)."""
    caught = []

    def in_thread():
        try:
            stage("order.paid", {})
        except NotInTransaction as error:
            caught.append(error)
        finally:
            connection.close()

    with transaction.atomic():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert caught
    assert not Message.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_message_is_visible_to_others_with_the_commit_and_not_before(second_connection):
    """Invariant 1."""
    with second_connection().cursor() as other, transaction.atomic():
        stage_order("1")
        other.execute("SELECT COUNT(*) FROM outbox_message")
        assert other.fetchone() == (0,)
    with second_connection().cursor() as other:
        other.execute("SELECT COUNT(*) FROM outbox_message")
        assert other.fetchone() == (1,)


# --- rollback ---


@pytest.mark.django_db(transaction=True)
def test_a_rollback_takes_the_message_along(told):
    with pytest.raises(ZeroDivisionError):
        stage_and_fail("1")
    assert (Order.objects.count(), Message.objects.count(), told) == (0, 0, [])


@pytest.mark.django_db(transaction=True)
def test_the_rollback_of_a_savepoint_takes_its_messages_along_and_no_others(told):
    """Scenario 4 (a)."""
    with transaction.atomic():
        stage_order("before")
        with pytest.raises(ZeroDivisionError):
            stage_and_fail("inner")
        stage_order("after")
    assert set(Message.objects.values_list("event_key", flat=True)) == {"before", "after"}
    assert told == [("signal", "before"), ("hint", "default"), ("signal", "after"), ("hint", "default")]


@pytest.mark.django_db(transaction=True)
def test_a_silent_rollback_takes_the_message_along(told):
    """Scenario 4 (b) and (c)."""
    with transaction.atomic():
        stage_order("b", deliver_now=True)
        transaction.set_rollback(True)
    with transaction.atomic():
        stage_order("c", deliver_now=True)
        with pytest.raises(ZeroDivisionError), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
    assert (Order.objects.count(), Message.objects.count(), told) == (0, 0, [])


def failing_view(request):
    stage_order("500")
    return HttpResponse(status=500)


def marked_view(request):
    stage_order("marked")
    transaction.set_rollback(True)
    return HttpResponse()


urlpatterns = [path("failing", failing_view), path("marked", marked_view)]


@pytest.mark.django_db(transaction=True)
@override_settings(ROOT_URLCONF=__name__)
def test_under_atomic_requests_a_response_commits_whatever_its_status_unless_marked(client, monkeypatch, told):
    """Scenario 4 (b) and (d)."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    client.get("/failing")
    client.get("/marked")
    assert Message.objects.get().event_key == "500"
    assert told == [("signal", "500"), ("hint", "default")]


@pytest.mark.django_db(transaction=True)
def test_a_key_whose_first_staging_was_rolled_back_is_new():
    with transaction.atomic():
        stage_order("1")
        transaction.set_rollback(True)
    with transaction.atomic():
        assert stage_order("1").created


# --- after the commit ---


@pytest.mark.django_db(transaction=True)
def test_a_commit_tells_receivers_and_dispatchers_once_per_call(told):
    handler("order.paid", name="second")(lambda message: None)
    with transaction.atomic():
        stage_order("1")
        stage_order("1")
        stage_many([Intent("order.paid", {}, event_key=key) for key in "ab"])
        assert told == []
    assert told[:3] == [("signal", "1"), ("signal", "1"), ("hint", "default")]
    assert sorted(told[3:7]) == [("signal", "a"), ("signal", "a"), ("signal", "b"), ("signal", "b")]
    assert told[7:] == [("hint", "default")]


@pytest.mark.django_db(transaction=True)
def test_a_repetition_tells_nobody_anything(told):
    with transaction.atomic():
        stage_order("1")
    told.clear()
    with transaction.atomic():
        stage_order("1", deliver_now=True)
    assert told == []


@pytest.mark.django_db(transaction=True)
def test_the_signal_tells_of_the_message_as_it_was_stored():
    events = []

    def receive(sender, event, **rest):
        events.append(event)

    signals.staged.connect(receive, sender=signals.Event)
    try:
        with transaction.atomic():
            stage("order.paid", (1, {2: "b"}), event_key="k", ordering_key="o", headers={"h": 1}, payload_version=3)
    finally:
        signals.staged.disconnect(receive, sender=signals.Event)
    [event] = events
    row = Message.objects.get()
    told = event.message
    assert (told.id, told.event_key, told.topic, told.staged_at) == (row.pk, "k", "order.paid", row.staged_at)
    assert (told.payload, told.headers, told.ordering_key) == (row.payload, {"h": 1}, "o")
    assert (told.payload_version, told.attempt, told.lease.lost) == (3, 0, False)
    assert (event.handler, event.using) == ("order.paid", "default")


@pytest.mark.django_db(transaction=True)
def test_immediate_delivery_gets_the_new_messages_and_dispatchers_do_not_run_for_them(told):
    handler("order.paid", name="second")(lambda message: None)
    with transaction.atomic():
        staged = stage_order("1", deliver_now=True)
    assert told == [("signal", "1"), ("signal", "1"), ("deliver", staged.ids)]
    told.clear()
    with transaction.atomic():
        mixed = stage_many([Intent("order.paid", {}, event_key=key, deliver_now=key == "b") for key in "abc"])
    assert [what for what in told if what[0] != "signal"] == [("hint", "default"), ("deliver", mixed[1].ids)]


@pytest.mark.django_db(transaction=True)
def test_a_message_is_delivered_in_the_staging_thread_right_after_the_commit():
    seen = []

    @handler("order.sent")
    def sent(message):
        seen.append((message.payload, threading.current_thread(), connection.in_atomic_block))

    with transaction.atomic():
        stage("order.sent", {"n": 1}, deliver_now=True)
        assert seen == []
    assert seen == [({"n": 1}, threading.current_thread(), False)]
    assert Message.objects.delivered().count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_failing_callback_of_somebody_else_costs_only_the_wake_up(told):
    """Scenario 6 (a)."""

    def commit():
        with transaction.atomic():
            transaction.on_commit(lambda: 1 / 0)
            stage_order("1", deliver_now=True)

    with pytest.raises(ZeroDivisionError):
        commit()
    assert told == []
    assert Message.objects.due().count() == 1


class Stop(BaseException):
    pass


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit, asyncio.CancelledError, Stop])
@pytest.mark.parametrize("failing", ["hint", "deliver_now", "receiver"])
def test_no_failure_after_the_commit_reaches_the_caller(monkeypatch, caplog, failing, error):
    """Scenario 6 (b) and (c), invariant 3."""

    def fail(*arguments, **keywords):
        raise error("broken")

    if failing == "hint":
        monkeypatch.setattr(wakeup, "hint", fail)
    elif failing == "deliver_now":
        monkeypatch.setattr(delivery, "deliver_now", fail)
    else:
        signals.staged.connect(fail)
    later = []
    try:
        with transaction.atomic():
            stage_order("1", deliver_now=failing == "deliver_now")
            transaction.on_commit(lambda: later.append("ran"))
    finally:
        signals.staged.disconnect(fail)
    assert later == ["ran"]
    assert "broken" in caplog.text
    assert Message.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_an_interrupt_from_the_terminal_is_not_swallowed(monkeypatch):
    def interrupt(using):
        raise KeyboardInterrupt

    monkeypatch.setattr(wakeup, "hint", interrupt)
    with pytest.raises(KeyboardInterrupt), transaction.atomic():
        stage_order("1")
    assert Message.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_handler_that_exits_does_not_take_the_staging_process_along():
    """Scenario 6 (c)."""

    @handler("order.sent")
    def leave(message):
        raise SystemExit(3)

    with transaction.atomic():
        stage("order.sent", {}, deliver_now=True)
    assert Message.objects.due().count() == 1


@pytest.mark.django_db
def test_captured_callbacks_run_what_a_commit_would(django_capture_on_commit_callbacks, told):
    """Scenario 54."""
    with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
        stage_order("1")
    assert len(callbacks) == 1
    assert all(robust for _, _, robust in connection.run_on_commit)
    assert told == []
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        staged = stage_order("2", deliver_now=True)
    assert told == [("signal", "2"), ("deliver", staged.ids)]


@pytest.mark.django_db
def test_a_handler_run_by_captured_callbacks_can_stage_a_follow_up_which_is_captured_too(
    django_capture_on_commit_callbacks,
):
    """Scenario 54."""
    seen = []

    @handler("order.sent")
    def sent(message):
        with transaction.atomic(durable=True):
            stage("order.paid", {}, event_key=f"{message.event_key}:paid", deliver_now=True)
        seen.append("sent")

    @handler("order.paid", name="follow-up")
    def paid(message):
        seen.append("paid")

    with django_capture_on_commit_callbacks(execute=True) as callbacks, transaction.atomic():
        stage("order.sent", {}, event_key="k", deliver_now=True)
    assert seen == ["sent", "paid"]
    assert len(callbacks) == 2
    assert Message.objects.delivered().count() == 3
    Order.objects.create(reference="the test's transaction is usable")


@pytest.mark.django_db(transaction=True)
def test_ten_thousand_stagings_in_one_transaction_make_few_notifications(monkeypatch):
    notified = []
    monkeypatch.setattr(wakeup, "may_notify", lambda connection: True)
    monkeypatch.setattr(wakeup, "notify", lambda connection, channel, payload: notified.append(channel))
    monkeypatch.setattr(recording.inserting, "insert_or_find", numbered_rows())
    with transaction.atomic():
        for _ in range(10_000):
            stage("order.paid", {})
    assert 1 <= len(notified) < 1000


def numbered_rows():
    count = iter(range(1, 100_000))

    def insert_or_find(using, table, rows):
        return {row[:2]: recording.Made(next(count), 0) for row in rows}, {}

    return insert_or_find


# --- async ---


def run(coroutine):
    """As an ASGI server would: the synchronous parts on a thread of their own, whose connections are closed here."""

    async def main():
        try:
            return await coroutine
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(main())


@pytest.mark.django_db(transaction=True)
def test_astage_commits_in_a_transaction_of_its_own(told):
    staged = run(astage("order.paid", {"a": 1}, event_key="k", ordering_key="o", headers={"h": 1}))
    message = Message.objects.get()
    assert staged.ids == (message.pk,)
    assert (message.payload, message.headers, message.ordering_key) == ({"a": 1}, {"h": 1}, "o")
    assert told == [("signal", "k"), ("hint", "default")]
    again = run(astage("order.paid", {"a": 1}, event_key="k", ordering_key="o"))
    assert (again.ids, again.created) == (staged.ids, False)


@pytest.mark.django_db(transaction=True)
def test_astage_refuses_what_stage_refuses():
    with pytest.raises(InvalidIntent):
        run(astage("order.paid", float("nan")))
    run(astage("order.paid", 1, event_key="k"))
    with pytest.raises(EventKeyConflict):
        run(astage("order.paid", 2, event_key="k"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("manual", [False, True], ids=["atomic", "set_autocommit"])
def test_astage_never_lands_in_another_tasks_transaction(manual):
    """Scenario 7."""
    opened, tried = asyncio.Event(), asyncio.Event()
    block = transaction.atomic()

    def begin():
        transaction.set_autocommit(False) if manual else block.__enter__()
        Order.objects.create(reference="of the other task")

    def roll_back():
        if manual:
            transaction.rollback()
            transaction.set_autocommit(True)
        else:
            transaction.set_rollback(True)
            block.__exit__(None, None, None)

    async def other_task():
        await sync_to_async(begin)()
        opened.set()
        await tried.wait()
        await sync_to_async(roll_back)()

    async def main():
        other = asyncio.create_task(other_task())
        await opened.wait()
        try:
            with pytest.raises(NotInTransaction, match="already open on this thread"):
                await astage("order.paid", {}, event_key="k")
        finally:
            tried.set()
            await other
        return await astage("order.paid", {}, event_key="k")

    assert run(main()).created
    assert Message.objects.get().event_key == "k"
    assert not Order.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_stage_on_a_thread_that_only_borrows_the_callers_context_is_refused():
    """Scenario 7: sync_to_async(thread_sensitive=False) runs on another thread, with another connection."""

    def refused():
        try:
            with pytest.raises(NotInTransaction):
                stage("order.paid", {})
        finally:
            connections.close_all()

    async def main():
        await sync_to_async(refused, thread_sensitive=False)()

    with transaction.atomic():
        asyncio.run(main())
    assert not Message.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_cancelling_the_await_does_not_undo_the_commit(monkeypatch):
    """Scenario 7."""
    started, go_on = threading.Event(), threading.Event()
    real = recording.inserting.insert_or_find

    def slow(*arguments):
        started.set()
        go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(recording.inserting, "insert_or_find", slow)

    async def main():
        task = asyncio.create_task(astage("order.paid", {}, event_key="k"))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sync_to_async(lambda: None)()  # behind it on the same thread

    run(main())
    assert Message.objects.get().event_key == "k"


@pytest.mark.django_db
def test_astage_works_inside_the_block_of_a_test_case():
    staged = async_to_sync(astage)("order.paid", {}, event_key="k")
    assert Message.objects.get().pk == staged.ids[0]
