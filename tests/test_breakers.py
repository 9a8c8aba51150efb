"""While the other side of a handler is down, its messages wait for a probe and keep their budget."""

import logging
import threading
import time
from datetime import timedelta

import pytest
from django.db import OperationalError

from outbox import RetryPolicy, Snooze, Unavailable, breakers, handler
from outbox.breakers import Breakers, reset
from outbox.database import ServerNow
from outbox.leases import claim, settle
from outbox.models import Breaker, Message, State
from outbox.registry import registry
from outbox.slots import Want
from outbox.verdicts import judge, release, timed_out
from tests import rows
from tests.running import dispatching, drain, fresh, put
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUICK = {"BREAKER_FAILURES": 3, "BREAKER_PAUSE": 0.2, "BREAKER_PAUSE_CAP": 0.4}
AT_ONCE = RetryPolicy(base=0, jitter=False)


@pytest.fixture(autouse=True)
def _quickly(settings, monkeypatch):
    settings.OUTBOX = QUICK
    monkeypatch.setattr(breakers, "LOOK_EVERY", 0.1)
    with registry.isolated():
        yield


class OtherSide:
    """What the handlers talk to: up or down, and who came when it was which."""

    def __init__(self):
        self.up = threading.Event()
        self.met_down = []
        self.met_up = []
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, message):
        if not self.up.is_set():
            self.met_down.append(message.event_key)
            raise Unavailable("connection refused")
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self._lock:
            self.now -= 1
            self.met_up.append(message.event_key)


def held(name):
    """A lease of a message of this handler."""
    put(name)
    return claim(using="default", worker="worker", seconds=60, handlers=[registry.by_name(name)])[0]


def ended(lease, result=None):
    return judge(lease, result, 0.1)


def process(**options):
    return Breakers(
        **({"using": "default", "handlers": registry.handlers(), "concurrency": 4, "worker": "w"} | options)
    )


def want(limit=4, **room):
    return Want(limit=limit, start=limit, room=room)


def ask(circuits, **room):
    return circuits.admit(want(**room), lambda: dict.fromkeys(room, 0)).room


DOWN = Unavailable("connection refused", code="111")


def open_one(circuits, name="mail"):
    for _ in range(3):
        circuits.note(ended(held(name), DOWN))


# --- what opens and closes it -----------------------------------------------------------------------------------------


def test_several_messages_in_a_row_open_it_and_leave_other_handlers_alone(caplog):
    handler("mail")(print)
    handler("charge")(print)
    circuits = process()
    assert ask(circuits, mail=2, charge=2) == {"mail": 2, "charge": 2}
    open_one(circuits)
    assert ask(circuits, mail=2, charge=2) == {"mail": 0, "charge": 2}
    assert (circuits.is_closed("mail"), circuits.is_closed("charge")) == (False, True)
    assert circuits.take_opened() == ["mail"]
    assert circuits.take_opened() == []
    row = Breaker.objects.get()
    assert (row.handler, row.error_code, row.worker) == ("mail", "111", "w")
    assert row.error_text == "connection refused"
    (record,) = [each for each in caplog.records if each.name == "outbox"]
    assert "'mail' pauses" in record.getMessage()


def test_one_message_alone_never_opens_it():
    """P5: an outage is judged across different messages."""
    handler("mail")(print)
    circuits = process()
    result = ended(held("mail"), DOWN)
    for _ in range(10):
        circuits.note(result)
    assert ask(circuits, mail=2) == {"mail": 2}


@pytest.mark.parametrize("answer", [None, ValueError("no such customer"), False], ids=repr)
def test_any_answer_of_the_other_side_starts_the_count_again(answer):
    handler("mail")(print)
    circuits = process()
    for result in (DOWN, DOWN, answer, DOWN, DOWN):
        circuits.note(ended(held("mail"), result))
    assert ask(circuits, mail=2) == {"mail": 2}


def test_what_says_nothing_of_the_other_side_changes_nothing():
    handler("mail")(print)
    circuits = process()
    for lease in (held("mail"), held("mail")):
        circuits.note(ended(lease, DOWN))
    for neutral in (ended(held("mail"), Snooze(for_=5)), timed_out(held("mail")), release(held("mail"))):
        circuits.note(neutral)
    assert ask(circuits, mail=2) == {"mail": 2}
    circuits.note(ended(held("mail"), DOWN))
    assert ask(circuits, mail=2) == {"mail": 0}


def test_it_can_be_switched_off(settings):
    settings.OUTBOX = QUICK | {"BREAKER_FAILURES": 0}
    handler("mail")(print)
    circuits = process()
    open_one(circuits)
    assert ask(circuits, mail=2) == {"mail": 2}
    assert not Breaker.objects.exists()


def test_one_process_of_all_sends_a_probe_and_the_pauses_grow():
    handler("mail")(print)
    one, other = process(), process(worker="other")
    open_one(one)
    open_one(other)
    assert ask(one, mail=4) == ask(other, mail=4) == {"mail": 0}
    Breaker.objects.update(probe_at=ServerNow())
    time.sleep(0.15)
    assert sorted([ask(one, mail=4)["mail"], ask(other, mail=4)["mail"]]) == [0, 1]
    row = Breaker.objects.get()
    assert row.probes == 1
    assert timedelta(seconds=0.1) < row.probe_at - rows.now() <= timedelta(seconds=0.4)


def test_a_success_closes_it_for_all_and_the_rest_starts_a_few_at_a_time(caplog):
    handler("mail")(print)
    one, other = process(), process(worker="other")
    open_one(one)
    open_one(other)
    ask(one, mail=4), ask(other, mail=4)
    one.note(ended(held("mail")))
    most = [ask(one, mail=4)["mail"]]
    assert not Breaker.objects.exists()
    for _ in range(3):
        one.note(ended(held("mail")))
        most.append(ask(one, mail=4)["mail"])
    assert most == [1, 2, 4, 4]
    assert one.is_closed("mail")
    time.sleep(0.15)
    assert ask(other, mail=4) == {"mail": 1}  # it has seen that the row is gone
    assert "answers again" in caplog.text


def test_what_is_held_counts_while_it_recovers():
    handler("mail")(print)
    circuits = process()
    open_one(circuits)
    circuits.note(ended(held("mail")))
    circuits.note(ended(held("mail")))
    assert circuits.admit(want(mail=4), lambda: {"mail": 1}).room == {"mail": 1}
    assert circuits.admit(want(mail=4), lambda: {"mail": 5}).room == {"mail": 0}


def test_without_a_slot_no_probe_is_spent_and_nobody_looks_without_pause():
    handler("mail")(print)
    circuits = process()
    open_one(circuits)
    ask(circuits, mail=1)
    Breaker.objects.update(probe_at=ServerNow())
    time.sleep(0.15)
    assert circuits.admit(want(limit=0, mail=4), dict).room == {"mail": 4}
    assert ask(circuits, mail=0) == {"mail": 0}
    assert Breaker.objects.get().probes == 0
    assert circuits.next_look() > time.monotonic() + 0.3
    assert ask(circuits, mail=1) == {"mail": 1}


def test_a_process_that_starts_knows_which_are_open():
    handler("mail")(print)
    open_one(first := process())
    ask(first, mail=1)
    assert ask(process(), mail=1) == {"mail": 0}


def test_a_person_may_close_it():
    handler("mail")(print)
    circuits = process()
    open_one(circuits)
    ask(circuits, mail=4)
    assert reset("default", "mail")
    assert not reset("default", "mail")
    time.sleep(0.15)
    assert ask(circuits, mail=4) == {"mail": 1}


def test_what_could_not_be_told_is_told_again(monkeypatch):
    handler("mail")(print)
    circuits = process()
    open_one(circuits)
    with monkeypatch.context() as away:
        away.setattr(Breakers, "_open", lambda *args: (_ for _ in ()).throw(OperationalError("away")))
        with pytest.raises(OperationalError):
            ask(circuits, mail=4)
    assert ask(circuits, mail=4) == {"mail": 0}
    assert Breaker.objects.count() == 1


# --- in a dispatcher --------------------------------------------------------------------------------------------------


def test_an_outage_costs_no_budget_few_calls_and_no_other_handler(caplog):
    """A broker that is down for long: no message dies, nobody else waits, and all is delivered when it is back."""
    side, others = OtherSide(), []
    handler("mail", ordering="none", max_attempts=2, retry=RetryPolicy(max_attempts=2, base=0.1, jitter=False))(side)
    handler("other", ordering="none")(lambda message: others.append(message.event_key))
    mails = put("mail", count=30)
    with dispatching(concurrency=4), caplog.at_level(logging.INFO, "outbox"):
        wait_until(Breaker.objects.exists)
        put("other", count=10)
        wait_until(lambda: len(others) == 10)
        time.sleep(1.5)
        calls = len(side.met_down)
        assert calls <= 3 + 4 + 10  # those that opened it, those that ran beside them, a probe every 0.2 s and more
        side.up.set()
        wait_until(lambda: len(side.met_up) == 30)
        wait_until(lambda: not Message.objects.pending().exists())
    assert all(fresh(each).state == State.DELIVERED for each in mails)
    assert not Breaker.objects.exists()
    assert caplog.text.count("'mail' pauses") == 1


def test_in_a_lane_the_order_is_kept_through_an_outage():
    side = OtherSide()
    handler("mail", retry=AT_ONCE)(side)
    keys = [f"{key}:{number}" for number in range(5) for key in "abcd"]
    for key in keys:
        put("mail", event_key=key, ordering_key=key[0])
    with dispatching(concurrency=4):
        wait_until(Breaker.objects.exists)
        side.up.set()
        wait_until(lambda: len(side.met_up) == len(keys))
    for lane in "abcd":
        assert [key for key in side.met_up if key[0] == lane] == [key for key in keys if key[0] == lane]


def test_what_is_queued_is_given_back_when_it_opens():
    side = OtherSide()
    side.up.set()
    handler("mail", ordering="none", retry=RetryPolicy(base=60, jitter=False))(side)
    put("mail", count=4)
    with dispatching(concurrency=1, batch=50, lease=60):
        wait_until(lambda: len(side.met_up) == 4)  # it is known to be quick, so a stock is claimed from now on
        side.up.clear()
        put("mail", count=40)
        wait_until(Breaker.objects.exists)
        wait_until(lambda: not Message.objects.in_flight().exists())
    assert Message.objects.due().count() >= 30


def test_a_drain_ends_although_the_other_side_is_down():
    side = OtherSide()
    handler("mail", ordering="none", retry=RetryPolicy(base=60, jitter=False))(side)
    put("mail", count=20)
    dispatcher = drain(concurrency=4)
    assert dispatcher.failure is None
    assert 3 <= len(side.met_down) <= 8
    assert Message.objects.due().count() == 20 - len(set(side.met_down))


@pytest.mark.parametrize(("failures", "longest"), [(3, 0.4), (0, 3600)])
def test_a_message_that_meets_the_outage_alone_asks_as_often_as_a_probe(settings, failures, longest):
    """In a lane only the head asks, so that no breaker opens; after a long outage it must not wait for an hour."""
    settings.OUTBOX = QUICK | {"BREAKER_FAILURES": failures}
    handler("mail", retry=RetryPolicy(base=3600, jitter=False))(print)
    lease = held("mail")
    assert judge(lease, Unavailable("down"), 0.1).wait == longest
    assert judge(lease, Unavailable("down", after=7200), 0.1).wait == 7200


# --- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", ["staged_at", "deliver_at"])
def test_patience_ends_with_the_age_of_the_message(settings, since):
    settings.OUTBOX = QUICK | {"OUTAGE_PATIENCE": 3600}
    handler("mail", max_attempts=2, retry=RetryPolicy(max_attempts=2, base=0, jitter=False))(print)
    row = put("mail")
    spent = []
    for age in (3500, 3700, 3700):
        ages = {"staged_at": rows.ago(age), "deliver_at": None}
        if since == "deliver_at":
            ages = {"staged_at": rows.ago(9999), "deliver_at": rows.ago(age)}
        Message.objects.filter(pk=row.pk).update(due_at=1, **ages)
        (lease,) = claim(using="default", worker="w", seconds=60)
        settle("default", [judge(lease, DOWN, 0.1)])
        spent.append(fresh(row).spent)
    assert spent == [0, 1, 2]
    assert (fresh(row).state, fresh(row).reason) == (State.DEAD, "exhausted")
