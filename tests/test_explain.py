"""Why a message is not moving: the one reason, in a sentence that names the way out."""

import pytest

from outbox.explain import diagnose, explain
from outbox.handlers import handler, registry
from outbox.models import Intervention, Message, State
from tests import rows

pytestmark = pytest.mark.django_db(transaction=True)

LANE = 4711


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", max_attempts=8, payload_versions=(1, 2))(lambda message: None)
        handler("order.shipped", dead_head="block")(lambda message: None)
        yield


@pytest.fixture
def at_work():
    return rows.dispatcher(name="host:1:aa", handlers=["order.paid", "order.shipped"])


def says(row, code, *parts):
    """The explanation of a row is one sentence of this code that contains the parts."""
    diagnosis = diagnose(Message.objects.get(pk=row.pk))
    text = str(diagnosis)
    assert diagnosis.code == code, text
    assert text.startswith(f"Message {row.pk} ")
    assert text.endswith(".")
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, text
    return text


def test_a_message_whose_handler_pauses_says_so(at_work):
    row = rows.message()
    rows.breaker("order.paid", since=120)
    rows.breaker("order.shipped")
    text = says(row, "paused", "its handler pauses since", "Unavailable: connection refused")
    assert text.endswith("if you know better: manage.py outbox_reset order.paid.")
    says(rows.leased(), "in_flight")


# --- settled ----------------------------------------------------------------------------------------------------------


def test_a_delivered_message_says_when():
    says(rows.delivered(90, attempt=3), "delivered", "delivered", "1 min 30 s ago", "attempt 3")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {"reason": "exhausted", "spent": 8},
            "8 of 8 attempts failed, the last with builtins.ValueError: no such customer",
        ),
        ({"reason": "crashed", "spent": 8}, "its worker died or hung in each of 8 of 8 attempts"),
        ({"reason": "buried", "error_code": "E7"}, "its handler gave up on it with builtins.ValueError [E7]"),
    ],
)
def test_a_dead_message_says_why_and_how_it_comes_back(fields, part):
    row = rows.dead(60, **fields)
    says(row, "dead", part, f"outbox_requeue {row.pk}")


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("expired", "it expired"),
        ("handler", "its handler decided so: order cancelled"),
        ("operator", "anna decided so (test data)"),
    ],
)
def test_a_discarded_message_says_who_decided(reason, part):
    row = rows.discarded(60, reason=reason, expires_at=rows.ago(120), error_text="order cancelled")
    Intervention.objects.create(message=row, verb="discard", actor="anna", note="test data", at=rows.now())
    says(row, "discarded", part)


def test_a_message_that_is_gone_says_so():
    row = rows.message()
    Message.objects.all().delete()
    assert explain(row) == f"Message {row.pk} does not exist any more: it was pruned or deleted."


# --- pending, without a lane ------------------------------------------------------------------------------------------


def test_a_message_in_flight_names_its_worker(at_work):
    says(rows.leased(attempt=3), "in_flight", "attempt 3", "worker-1", "in 1 h")


def test_a_scheduled_message_names_its_time(at_work):
    says(rows.scheduled(), "scheduled", "scheduled until", "(in ")


def test_a_snoozed_message_is_not_called_scheduled(at_work):
    says(rows.scheduled(attempt=1), "scheduled", "snoozed until")


def test_a_retrying_message_names_its_error_and_its_budget(at_work):
    says(rows.retrying(), "retrying", "2 of 8 attempts failed", "builtins.TimeoutError: no answer", "(in ")


def test_an_unknown_handler_is_named(at_work):
    row = rows.message(topic="order.piad")
    says(row, "unroutable", "'order.piad'", "outbox_handlers")
    says(rows.scheduled(topic="order.piad"), "unroutable")


def test_an_unknown_payload_version_is_named(at_work):
    row = rows.message(payload_version=3, route="order.paid@3")
    says(row, "unroutable", "payload version 3", "'order.paid'", "only 1, 2")


def test_a_handler_that_only_dispatchers_know_is_not_called_unknown(at_work):
    rows.dispatcher(handlers=["order.returned"])
    says(rows.message(topic="order.returned"), "due")


def test_a_handler_that_only_a_stopping_dispatcher_knows_is_unknown(at_work):
    rows.dispatcher(handlers=["order.returned"], stopping=True)
    says(rows.message(topic="order.returned"), "unroutable")


def test_a_message_in_flight_elsewhere_needs_no_handler_here(at_work):
    says(rows.leased(topic="order.returned"), "in_flight")


def test_a_message_that_nobody_can_deliver_asks_for_a_dispatcher():
    rows.dispatcher(lost_in=-5)
    rows.dispatcher(stopping=True)
    says(rows.message(), "no_dispatcher", "due since", "no live dispatcher", "'default'", "outbox_dispatch")


def test_a_handler_that_no_live_dispatcher_runs_is_named():
    rows.dispatcher(name="host:9:zz", handlers=["order.shipped"])
    says(rows.message(), "no_dispatcher_for_handler", "host:9:zz", "'order.paid'")


def test_a_former_name_is_served_by_the_handler_that_took_it_over(at_work):
    handler("order.settled", name="order.settled", aliases=["order.closed"])(lambda message: None)
    rows.dispatcher(handlers=["order.settled"])
    says(rows.message(topic="order.closed"), "due")


def test_a_due_message_is_about_to_be_claimed(at_work):
    says(rows.message(), "due", "about to be claimed")


def test_an_expired_lease_is_named(at_work):
    says(rows.lapsed(lapses=0), "lapsed", "worker-1", "lease ran out", "5 s ago")


def test_a_message_that_runs_alone_says_why(at_work):
    says(rows.lapsed(lapses=2), "alone", "runs alone", "2 times in a row", "holds nothing else")


def test_a_message_that_ends_at_its_next_claim_says_so(at_work):
    says(rows.message(expires_at=rows.ago(5)), "expired", "will be discarded")
    says(rows.message(spent=8), "exhausted", "8 of 8 attempts")


# --- in a lane --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fields", "part"),
    [
        (rows.leased, {}, "which is in flight: attempt 1 with worker-1"),
        (rows.scheduled, {}, "which is scheduled until"),
        (rows.retrying, {}, "which is retrying"),
        (rows.dead, {"topic": "order.shipped"}, "which is dead since"),
        (rows.lapsed, {}, "which was in flight with worker-1 until its lease ran out"),
        (rows.message, {}, "which is due since"),
    ],
)
@pytest.mark.parametrize("place", ["asleep", "knocking"])
def test_a_message_behind_another_gives_that_ones_reason(at_work, make, fields, part, place):
    """Scenario 47: a lane that stands still says at which message."""
    head = make(lane=LANE, **fields)
    row = rows.parked(LANE, **fields) if place == "asleep" else rows.message(lane=LANE, **fields)
    text = says(row, "waiting", f"waits in its lane behind message {head.pk}, {part}")
    assert diagnose(row).behind == head.pk
    if head.state == State.DEAD:
        assert f"outbox_requeue {head.pk}" in text


def test_a_message_behind_one_that_nobody_here_can_run_says_so(at_work):
    head = rows.message(lane=LANE, topic="order.piad")
    says(rows.parked(LANE), "waiting", f"behind message {head.pk}, which has no handler", "'order.piad'")


def test_a_late_lower_message_waits_for_the_one_in_flight(at_work):
    """Invariant 7: the holder comes before the head."""
    late = rows.message(lane=LANE)
    holder = rows.leased(lane=LANE)
    says(late, "waiting", f"behind message {holder.pk}, which is in flight")


def test_a_sleeper_whom_nobody_will_wake_waits_for_the_sweep(at_work):
    says(rows.parked(LANE), "stranded", "sweep", "1 min")


def test_a_row_broken_by_hand_says_so(at_work):
    says(rows.message(due_at=None), "stranded", "by hand")


# --- hostile content --------------------------------------------------------------------------------------------------


def test_hostile_content_stays_in_its_line(at_work):
    text = says(rows.retrying(error_text="a\nb\x1b[31m‮" + "x" * 5000, leased_by="w"), "retrying", "a b\\x1b[31m\\u202e")
    assert len(text) < 700


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_database_of_the_message_is_asked():
    rows.dispatcher(handlers=["order.paid"])
    row = rows.message(using="other")
    assert "'other'" in explain(row)
    assert "--database other" in explain(rows.dead(using="other"))
