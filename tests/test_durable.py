"""DurableCommand: business writes and effects in one transaction, urgent effects delivered before it returns."""

import asyncio
import threading
from datetime import timedelta
from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction

from outbox import (
    Bury,
    Discard,
    DurableCommand,
    Effect,
    EventKeyConflict,
    Intent,
    InvalidPayload,
    NotInTransaction,
    PostCommitEffectError,
    PostCommitResult,
    Topic,
    durable,
    handler,
    stage,
    wakeup,
)
from outbox.exceptions import InvalidIntent
from outbox.models import Message
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ran():
    """The event keys that the handlers of "mail" and "charge" were given."""
    return []


@pytest.fixture(autouse=True)
def _handlers(outbox_registry, ran):
    handler("mail")(lambda message: ran.append(message.event_key))
    handler("charge")(lambda message: ran.append(message.event_key))


def buy():
    return Order.objects.create(reference="1")


def mail(key="mail:1", **keywords):
    return Intent("mail", {"key": key}, event_key=key, **keywords)


def test_everything_is_committed_together_and_the_result_says_what_is_left(ran):
    """A12."""
    result = DurableCommand().execute(buy, (Effect(mail()), Effect(Intent("charge", 5, event_key="charge:1"))))
    assert result == PostCommitResult(
        value=Order.objects.get(),
        business_committed=True,
        completed_effects=(),
        pending_effects=("mail:1", "charge:1"),
    )
    assert ran == []
    assert Message.objects.due().count() == 2


def test_a_command_may_have_no_effects():
    assert DurableCommand().execute(buy).pending_effects == ()
    assert Order.objects.count() == 1


def test_effects_may_follow_from_the_business_result():
    """A12."""

    def effects(order):
        yield Effect(Intent("mail", {"order": order.pk}, event_key=f"mail:{order.pk}"))

    result = DurableCommand().execute(buy, effects)
    assert result.pending_effects == (f"mail:{result.value.pk}",)
    assert Message.objects.get().payload == {"order": result.value.pk}


def test_an_effect_with_deliver_is_delivered_before_the_command_returns(ran):
    """A11."""
    seen = []

    def deliver(message):
        seen.append((message.event_key, message.payload, message.attempt, connection.in_atomic_block))
        assert Order.objects.exists()

    result = DurableCommand().execute(buy, (Effect(mail(), deliver=deliver), Effect(mail("mail:2"))))
    assert seen == [("mail:1", {"key": "mail:1"}, 1, False)]
    assert (result.completed_effects, result.pending_effects) == (("mail:1",), ("mail:2",))
    assert ran == []
    assert Message.objects.delivered().get().event_key == "mail:1"


def test_an_intent_that_asks_for_it_is_delivered_by_its_handlers(ran):
    handler("mail", name="second")(lambda message: ran.append("second"))
    result = DurableCommand().execute(buy, [Effect(mail(deliver_now=True))])
    assert ran == ["mail:1", "second"]
    assert result.completed_effects == ("mail:1",)
    assert Message.objects.delivered().count() == 2


@pytest.mark.parametrize("refusal", ["raises", "returns False"])
def test_a_failed_delivery_raises_with_the_result_and_leaves_the_message_due(ran, refusal):
    """A11 and A12."""

    def deliver(message):
        if refusal == "raises":
            raise ConnectionError("mail server away")
        return False

    effects = (
        Effect(mail("mail:1"), deliver=lambda message: ran.append("delivered")),
        Effect(mail("mail:2"), deliver=deliver),
        Effect(mail("mail:3")),
        Effect(mail("mail:4"), deliver=deliver),
    )
    with pytest.raises(PostCommitEffectError, match="'mail:2'") as caught:
        DurableCommand().execute(buy, effects)
    result = caught.value.result
    assert result.value == Order.objects.get()
    assert result.business_committed
    assert (result.completed_effects, result.pending_effects) == (("mail:1",), ("mail:2", "mail:3", "mail:4"))
    assert list(caught.value.errors) == ["mail:2", "mail:4"]
    if refusal == "raises":
        assert str(caught.value.errors["mail:2"]) == "mail server away"
    assert Message.objects.due().count() == 3
    assert not Message.objects.dead().exists()


def test_a_delivery_that_buries_is_a_failure_of_the_command():
    def deliver(message):
        raise Bury("no such customer")

    with pytest.raises(PostCommitEffectError) as caught:
        DurableCommand().execute(buy, [Effect(mail(), deliver=deliver)])
    assert isinstance(caught.value.errors["mail:1"], Bury)
    assert "Nothing more is done for 'mail:1' (no such customer) until somebody acts." in str(caught.value)
    assert "pending" not in str(caught.value)
    assert (caught.value.result.completed_effects, caught.value.result.pending_effects) == ((), ())
    assert Message.objects.dead().count() == 1


def test_an_effect_that_expired_is_neither_completed_nor_pending(ran):
    late = mail("mail:2", expires_at=timedelta(0))
    effects = [Effect(mail(), deliver=lambda message: None), Effect(late, deliver=ran.append)]
    with pytest.raises(PostCommitEffectError, match="expired before delivery") as caught:
        DurableCommand().execute(buy, effects)
    assert (caught.value.result.completed_effects, caught.value.result.pending_effects) == (("mail:1",), ())
    assert (list(caught.value.errors), ran) == (["mail:2"], [])


def test_an_effect_that_is_dead_since_an_earlier_command_is_an_error_again(ran):
    def bury(message):
        raise Bury("no such customer")

    for deliver in (bury, ran.append):
        with pytest.raises(PostCommitEffectError) as caught:
            DurableCommand().execute(buy, [Effect(mail(), deliver=deliver)])
        assert caught.value.result.pending_effects == ()
    assert "the handler gave up on it" in str(caught.value)
    assert ran == []


def test_a_delivery_that_discards_completes_the_effect():
    def deliver(message):
        raise Discard("nothing to do")

    assert DurableCommand().execute(buy, [Effect(mail(), deliver=deliver)]).completed_effects == ("mail:1",)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_error_of_the_business_takes_everything_back(ran, error):
    """A12."""

    def business():
        buy()
        stage("mail", {}, event_key="own")
        raise error

    with pytest.raises(error):
        DurableCommand().execute(business, [Effect(mail(), deliver=ran.append)])
    assert (Order.objects.count(), Message.objects.count(), ran) == (0, 0, [])


def test_an_error_of_the_effects_function_takes_everything_back():
    def effects(order):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DurableCommand().execute(buy, effects)
    assert not Order.objects.exists()


def test_a_silent_rollback_of_the_business_takes_the_effects_along_and_is_reported(ran):
    def business():
        buy()
        transaction.set_rollback(True)
        return "gave up"

    result = DurableCommand().execute(business, [Effect(mail(), deliver=lambda message: ran.append("delivered"))])
    nothing = PostCommitResult(value="gave up", business_committed=False, completed_effects=(), pending_effects=())
    assert result == nothing
    assert (Order.objects.count(), Message.objects.count(), ran) == (0, 0, [])


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_one_key_twice_in_a_command_is_refused_before_anything_is_committed(computed):
    """A12."""
    effects = (Effect(mail("a")), Effect(mail("b")), Effect(mail("a")))
    with pytest.raises(ValueError, match="have the event key 'a'"):
        DurableCommand().execute(buy, (lambda order: effects) if computed else effects)
    assert (Order.objects.count(), Message.objects.count()) == (0, 0)


def test_given_effects_are_checked_before_the_business_runs():
    def business():
        pytest.fail("business ran")

    for effect, error in [
        (Effect(Intent("mail", float("nan"))), InvalidPayload),
        (Effect(Intent("mail", {}, event_key="")), InvalidIntent),
        (mail(), InvalidIntent),
    ]:
        with pytest.raises(error, match=r"effects\[1\]"):
            DurableCommand().execute(business, (Effect(mail("a")), effect))


def test_deliver_needs_a_topic_with_exactly_one_handler():
    Topic("unhandled")
    handler("mail", name="second")(lambda message: None)
    for intent, count in ((mail(), 2), (Intent("unhandled", {}), 0)):
        with pytest.raises(InvalidIntent, match=rf"effects\[0\]\.deliver .* has {count}"):
            DurableCommand().execute(buy, [Effect(intent, deliver=print)])
    assert not Order.objects.exists()


def test_deliver_stands_in_for_an_async_handler_but_cannot_be_async_itself(outbox_registry, ran):
    @handler("push")
    async def push(message): ...

    async def deliver(message): ...

    push_intent = Intent("push", {}, event_key="push:1")
    for function in (deliver, partial(deliver), "print"):
        with pytest.raises(InvalidIntent, match=r"effects\[0\]\.deliver"):
            DurableCommand().execute(buy, [Effect(push_intent, deliver=function)])
    result = DurableCommand().execute(buy, [Effect(push_intent, deliver=lambda message: ran.append("pushed"))])
    assert (result.completed_effects, ran) == (("push:1",), ["pushed"])


def test_deliver_and_deliver_at_contradict_one_another():
    with pytest.raises(InvalidIntent, match="deliver and deliver_at"):
        DurableCommand().execute(buy, [Effect(mail(deliver_at=timedelta(1)), deliver=print)])


def test_a_conflicting_key_takes_everything_back():
    with transaction.atomic():
        stage("mail", "other", event_key="mail:1")
    with pytest.raises(EventKeyConflict):
        DurableCommand().execute(buy, [Effect(mail())])
    assert not Order.objects.exists()


def test_a_command_run_again_delivers_what_is_still_due_and_reports_what_was_delivered(ran):
    def fail(message):
        raise ConnectionError

    effects = [Effect(mail("a"), deliver=lambda message: ran.append("a")), Effect(mail("b"), deliver=fail)]
    with pytest.raises(PostCommitEffectError):
        DurableCommand().execute(buy, effects)
    effects[1] = Effect(mail("b"), deliver=lambda message: ran.append("b"))
    result = DurableCommand().execute(buy, effects)
    assert ran == ["a", "b"]
    assert result.completed_effects == ("a", "b")
    assert Message.objects.count() == 2


def test_a_database_that_is_gone_after_the_commit_takes_no_result_back(monkeypatch, caplog):
    def gone(using, skipped):
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(durable, "_ended_elsewhere", gone)
    result = DurableCommand().execute(buy, [Effect(mail(), deliver=lambda message: None)])
    assert (result.value, result.completed_effects) == (Order.objects.get(), ("mail:1",))
    assert "cannot be read now" in caplog.text


def test_what_somebody_else_holds_is_skipped_and_pending():
    """A11."""
    results = []

    def outer(message):
        results.append(DurableCommand().execute(buy, [Effect(mail("mail:1"), deliver=pytest.fail)]))

    result = DurableCommand().execute(buy, [Effect(mail("mail:1"), deliver=outer)])
    assert results[0].pending_effects == ("mail:1",)
    assert result.completed_effects == ("mail:1",)


def test_a_message_behind_another_of_its_lane_waits_for_the_dispatcher(ran):
    """Scenario 53."""
    with transaction.atomic():
        stage("mail", {}, ordering_key="customer")
    result = DurableCommand().execute(buy, [Effect(mail(ordering_key="customer"), deliver=pytest.fail)])
    assert result.pending_effects == ("mail:1",)


def test_a_command_inside_a_transaction_is_refused():
    with transaction.atomic(), pytest.raises(NotInTransaction, match="already open"):
        DurableCommand().execute(buy)
    transaction.set_autocommit(False)
    try:
        with pytest.raises(NotInTransaction, match="already open"):
            DurableCommand().execute(buy)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not Order.objects.exists()


@pytest.mark.django_db(transaction=False)
def test_a_command_works_inside_the_block_of_a_test_case(ran):
    """Scenario 54."""
    result = DurableCommand().execute(buy, [Effect(mail(), deliver=lambda message: ran.append("delivered"))])
    assert (result.completed_effects, ran) == (("mail:1",), ["delivered"])
    assert result.business_committed


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_command_works_on_the_alias_that_it_is_given(ran):
    result = DurableCommand(using="other").execute(
        lambda: Order.objects.using("other").create(reference="1"),
        [Effect(mail(), deliver=lambda message: ran.append(message.event_key))],
    )
    assert result.completed_effects == ("mail:1",)
    assert Message.objects.using("other").delivered().count() == 1
    assert not Message.objects.exists()


def test_dispatchers_are_woken_for_what_is_left_to_them_only(monkeypatch):
    hints = []
    monkeypatch.setattr(wakeup, "hint", hints.append)
    DurableCommand().execute(buy, [Effect(mail("a"), deliver=lambda message: None)])
    assert hints == []
    DurableCommand().execute(buy, [Effect(mail("b"), deliver=lambda message: None), Effect(mail("c"))])
    assert hints == ["default"]


def test_a_coroutine_as_business_is_refused_before_it_is_forgotten():
    async def business():
        pytest.fail("nobody awaits it")

    for attempt in (business, lambda: business()):
        with pytest.raises(InvalidIntent, match="plain function"):
            DurableCommand().execute(attempt, [Effect(mail())])
    assert not Message.objects.exists()


# --- async ---


def run(coroutine):
    async def main():
        try:
            return await coroutine
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(main())


def test_the_async_twin_does_the_same_on_the_thread_of_synchronous_code(ran):
    """A13."""
    threads = set()

    def business():
        threads.add(threading.get_ident())
        return buy()

    def deliver(message):
        threads.add(threading.get_ident())
        ran.append(message.event_key)

    result = run(DurableCommand().aexecute(business, lambda order: [Effect(mail(), deliver=deliver)]))
    assert result.value == Order.objects.get()
    assert (result.completed_effects, ran) == (("mail:1",), ["mail:1"])
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_the_async_twin_raises_what_execute_raises():
    """A13."""

    def deliver(message):
        raise ConnectionError

    with pytest.raises(PostCommitEffectError) as caught:
        run(DurableCommand().aexecute(buy, [Effect(mail(), deliver=deliver)]))
    assert caught.value.result.pending_effects == ("mail:1",)
    with pytest.raises(InvalidIntent, match="plain function"):
        run(DurableCommand().aexecute(sync_to_async(buy)))


def test_the_async_twin_never_lands_in_another_tasks_transaction():
    """Scenario 7."""
    block = transaction.atomic()

    def end():
        transaction.set_rollback(True)
        block.__exit__(None, None, None)

    async def main():
        await sync_to_async(block.__enter__)()
        try:
            with pytest.raises(NotInTransaction):
                await DurableCommand().aexecute(buy, [Effect(mail())])
        finally:
            await sync_to_async(end)()

    run(main())
    assert not Order.objects.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((5,), "business must be a function, not int"),
        ((buy, None), "effects must be several, in a list or the like, not a NoneType"),
        ((buy, Effect(mail())), "effects must be several, in a list or the like, not a Effect"),
        ((buy, lambda order: None), "effects must be several, in a list or the like, not a NoneType"),
        ((buy, [Effect("mail")]), "effects[0].intent is not an Intent but a str"),
    ],
)
def test_what_is_no_command_is_told_in_our_words_and_commits_nothing(arguments, text):
    with pytest.raises(InvalidIntent) as caught:
        DurableCommand().execute(*arguments)
    assert text in str(caught.value)
    assert not Order.objects.exists()
