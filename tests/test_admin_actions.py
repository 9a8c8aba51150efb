"""Requeue, discard and make due from the admin: who may, what is confirmed, what is done, and what is told."""

import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from outbox.admin.places import Place, place_of
from outbox.admin.verbs import DEEDS
from outbox.database import again, locked
from outbox.handlers import handler, registry
from outbox.models import Intervention, Message, State
from outbox.operations import Refusal
from tests import rows

pytestmark = pytest.mark.django_db

LIST = "/admin/outbox/message/"
LANE = 4711
RIGHTS = ("view_message", "requeue_message", "discard_message")


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", max_attempts=8)(lambda message: None)
        yield


@pytest.fixture
def client_of(client, django_user_model):
    """Return a function that logs in somebody with just these rights."""

    def log_in(*rights, name="anna"):
        user = django_user_model.objects.create_user(name, is_staff=True)
        user.user_permissions.set(Permission.objects.filter(content_type__app_label="outbox", codename__in=rights))
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def operator(client_of):
    return client_of(*RIGHTS)


def act(client, action, chosen, query="", **fields):
    """Choose rows in the list and press the button."""
    data = {"action": action, "_selected_action": [row.pk for row in chosen], "index": "0", **fields}
    return client.post(f"{LIST}{query}", data)


def confirm(client, response, url=LIST, **fields):
    """Answer a confirmation page with yes: post its form as it is."""
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', response.content.decode())
    data = {name: unescape(value) for name, value in hidden if name != "csrfmiddlewaretoken"}
    assert data["confirmed"] == "yes"
    return client.post(url, {**data, **fields})


def told(response):
    return [str(each) for each in get_messages(response.wsgi_request)]


def text_of(response):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.content.decode())).split())


def place(row):
    return place_of(fresh(row), rows.now())


def fresh(row):
    return Message.objects.get(pk=row.pk)


# --- one message ------------------------------------------------------------------------------------------------------


def test_one_chosen_message_is_requeued_at_once(operator):
    row = rows.dead()
    response = act(operator, "requeue", [row])
    assert response.status_code == 302
    assert told(response) == ["1 message requeued."]
    assert fresh(row).state == State.PENDING


def test_a_deed_leaves_a_log_entry_and_an_intervention(operator):
    """Scenario 56."""
    row = rows.dead(event_key="order:1:paid")
    act(operator, "requeue", [row])
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.user.username) == (str(row.pk), "anna")
    assert (entry.object_repr, entry.change_message) == ("order.paid order:1:paid", "Requeued.")
    done = Intervention.objects.get()
    assert (done.message_id, done.verb, done.actor) == (row.pk, "requeue", "anna")


def test_make_due_now_ends_a_wait(operator):
    row = rows.retrying()
    assert told(act(operator, "make_due", [row])) == ["1 message made due."]
    assert place(row) == Place.DUE


def test_discard_settles(operator):
    row = rows.parked(LANE)
    assert told(act(operator, "discard", [row])) == ["1 message discarded."]
    assert (fresh(row).state, fresh(row).reason) == (State.DISCARDED, "operator")


# --- many messages ----------------------------------------------------------------------------------------------------


def test_many_are_confirmed_first(operator):
    chosen = [rows.dead(event_key=f"order:{number}:paid") for number in range(7)]
    response = act(operator, "requeue", chosen)
    text = text_of(response)
    assert "Requeue 7 messages?" in text
    assert "Each gets a fresh budget and is due at once." in text
    assert "order:0:paid order.paid · builtins.ValueError" in text
    assert "… and 2 more" in text
    assert Message.objects.dead().count() == 7
    assert not LogEntry.objects.exists()


def test_the_confirmed_ones_are_done_with_the_note(operator):
    chosen = [rows.dead() for _ in range(3)]
    response = confirm(operator, act(operator, "requeue", chosen), note=" gateway is back ")
    assert told(response) == ["3 messages requeued."]
    assert not Message.objects.dead().exists()
    assert set(Intervention.objects.values_list("note", flat=True)) == {"gateway is back"}
    assert set(LogEntry.objects.values_list("change_message", flat=True)) == {"Requeued. gateway is back"}
    assert LogEntry.objects.count() == 3


def test_a_mixed_choice_moves_only_the_dead_and_names_the_others(operator):
    """Scenario 56, P13: running rows keep their lease, and every number is true."""
    dead, leased = rows.dead(), rows.leased(event_key="running")
    delivered, pending = rows.delivered(event_key="done"), rows.message(event_key="next")
    before = list(Message.objects.exclude(pk=dead.pk).order_by("pk").values())
    response = act(operator, "requeue", [dead, leased, delivered, pending])
    assert "Requeue 1 message?" in text_of(response)
    assert "3 of the selected messages are left alone: 1 in flight, 1 delivered, 1 due." in text_of(response)
    response = confirm(operator, response)
    assert told(response) == [
        "1 message requeued.",
        "3 messages were left alone: running (in flight); done (delivered); next (pending already).",
    ]
    assert list(Message.objects.exclude(pk=dead.pk).order_by("pk").values()) == before
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(dead.pk)]


def test_nothing_to_do_offers_no_button(operator):
    response = act(operator, "requeue", [rows.delivered(), rows.leased()])
    assert "None of the selected messages can be changed this way." in text_of(response)
    assert "<button" not in response.content.decode().split('class="outbox-confirm-form"')[1]


def test_what_moved_while_it_was_confirmed_is_told_not_done(operator):
    """Scenario 56, P13: the tab must not hide what is no longer dead."""
    chosen = [rows.dead(event_key=f"k{number}") for number in range(5)]
    page = act(operator, "requeue", chosen, query="?place=dead")
    Message.objects.filter(pk=chosen[0].pk).update(state=State.DISCARDED, reason="operator")
    Message.objects.filter(pk=chosen[1].pk).delete()
    Message.objects.filter(pk__in=[row.pk for row in chosen[2:]]).update(state=State.PENDING, due_at=rows.ago(1))
    response = confirm(operator, page, url=f"{LIST}?place=dead")
    assert told(response) == [
        "1 message requeued.",
        f"4 messages were left alone: #{chosen[1].pk} (not found); k2, k3 and k4 (pending already).",
    ]


def test_what_left_the_tab_before_the_button_was_pressed_is_told(operator):
    """Scenario 56, P13."""
    one, other = rows.dead(event_key="one"), rows.dead(event_key="other")
    Message.objects.filter(pk=other.pk).update(state=State.PENDING, due_at=rows.ago(1))
    response = confirm(operator, act(operator, "requeue", [one, other], query="?place=dead"))
    assert told(response) == ["1 message requeued.", "1 message was left alone: other (pending already)."]


def test_the_same_confirmation_twice_does_it_once(operator):
    """Scenario 56: exactly one run per requeue round."""
    chosen = [rows.dead(event_key="one"), rows.dead(event_key="two")]
    page = act(operator, "requeue", chosen)
    confirm(operator, page)
    response = confirm(operator, page)
    assert told(response)[-1] == "2 messages were left alone: one and two (pending already)."
    assert Intervention.objects.count() == 2


def test_only_some_of_many_are_named(operator):
    chosen = [rows.delivered(event_key=f"k{number}") for number in range(5)] + [rows.dead()]
    response = confirm(operator, act(operator, "requeue", chosen))
    assert told(response)[1] == "5 messages were left alone: k0, k1, k2 and 2 more (delivered)."


def test_select_all_takes_what_the_list_shows_and_nothing_that_comes_later(operator, monkeypatch):
    monkeypatch.setattr("outbox.admin.messages.MessageAdmin.list_per_page", 2)
    chosen = [rows.dead(settled_at=rows.ago(60)) for _ in range(5)]
    elsewhere = rows.discarded()
    page = act(operator, "requeue", chosen[:2], query="?place=dead", select_across="1")
    assert "Requeue 5 messages?" in text_of(page)
    late = rows.dead()
    assert told(confirm(operator, page, url=f"{LIST}?place=dead")) == ["5 messages requeued."]
    assert [fresh(row).state for row in (elsewhere, late)] == [State.DISCARDED, State.DEAD]


def test_select_all_of_a_capped_list_takes_the_first_rows(operator, monkeypatch):
    for module in ("counting", "lists", "selection"):
        monkeypatch.setattr(f"outbox.admin.{module}.CAP", 3)
    chosen = [rows.dead(settled_at=rows.ago(60 - number)) for number in range(5)]
    page = act(operator, "discard", chosen[:1], query="?place=dead", select_across="1")
    assert "Discard 3 messages?" in text_of(page)
    confirm(operator, page, url=f"{LIST}?place=dead")
    assert [fresh(row).state for row in chosen] == [State.DEAD] * 2 + [State.DISCARDED] * 3


def test_more_rows_than_a_form_may_have_fields_are_confirmed(operator, settings):
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 20
    chosen = [rows.dead() for _ in range(30)]
    page = act(operator, "requeue", chosen[:1], query="?place=dead", select_across="1")
    assert told(confirm(operator, page)) == ["30 messages requeued."]


def test_a_bulk_deed_costs_queries_by_the_batch(operator):
    chosen = [rows.dead() for _ in range(60)]
    page = act(operator, "discard", chosen)
    with CaptureQueriesContext(connection) as captured:
        confirm(operator, page)
    assert len(captured) < 30


@pytest.mark.parametrize("named", ["", "x,y", "1e3", "-1", "9" * 40, "0,,00"])
def test_a_forged_confirmation_changes_nothing(operator, named):
    row = rows.dead()
    data = {"action": "requeue", "_selected_action": [row.pk], "ids": named, "confirmed": "yes"}
    assert operator.post(LIST, data).status_code == 302
    assert fresh(row).state == State.DEAD


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_requeue_warns_that_order_is_given_up(operator):
    """Scenario 47: even for a single message, before it is done."""
    row = rows.dead(ordering_key="order:1")
    page = act(operator, "requeue", [row])
    assert "1 of them gives up its order" in text_of(page)
    assert fresh(row).state == State.DEAD
    response = confirm(operator, page)
    assert "1 message requeued. Its lane may have gone on without it" in told(response)[0]


def test_a_blocking_head_keeps_its_order(operator):
    """Under the policy `block` nothing has overtaken it."""
    with registry.isolated():
        handler("order.paid", dead_head="block")(lambda message: None)
        row = rows.dead(ordering_key="order:1", lane=LANE)
        assert told(act(operator, "requeue", [row])) == ["1 message requeued."]


# --- rights and methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["requeue", "discard", "make_due"])
def test_a_viewer_can_do_nothing(client_of, action):
    """Scenario 56: view-only permission."""
    client = client_of("view_message")
    row = rows.dead() if action == "requeue" else rows.scheduled()
    before = list(Message.objects.values())
    act(client, action, [row])
    client.post(LIST, {"action": action, "_selected_action": [row.pk], "ids": str(row.pk), "confirmed": "yes"})
    assert client.post(f"{LIST}{row.pk}/change/", {"verb": action}).status_code == 403
    assert list(Message.objects.values()) == before
    assert not Intervention.objects.exists()


@pytest.mark.parametrize(("right", "action"), [("requeue_message", "discard"), ("discard_message", "requeue")])
def test_one_right_is_not_the_other(client_of, right, action):
    client = client_of("view_message", right)
    row = rows.dead()
    act(client, action, [row])
    assert client.post(f"{LIST}{row.pk}/change/", {"verb": action}).status_code == 403
    assert fresh(row).state == State.DEAD


def test_the_right_to_act_does_not_let_anybody_look(client_of):
    client = client_of("requeue_message")
    row = rows.dead()
    assert act(client, "requeue", [row]).status_code == 403
    assert client.post(f"{LIST}{row.pk}/change/", {"verb": "requeue"}).status_code == 403


def test_a_get_does_nothing(operator):
    """Scenario 56: a replayed address."""
    row = rows.dead()
    query = {"action": "requeue", "_selected_action": row.pk, "index": "0", "confirmed": "yes", "ids": row.pk}
    assert operator.get(LIST, query).status_code == 400
    assert operator.get(f"{LIST}{row.pk}/change/", {"verb": "requeue"}).status_code == 200
    assert fresh(row).state == State.DEAD


def test_a_post_without_the_token_of_the_form_is_refused(django_user_model):
    client = Client(enforce_csrf_checks=True)
    client.force_login(django_user_model.objects.create_superuser("root"))
    row = rows.dead()
    assert client.post(f"{LIST}{row.pk}/change/", {"verb": "requeue"}).status_code == 403
    assert act(client, "requeue", [row]).status_code == 403
    assert fresh(row).state == State.DEAD


# --- the buttons of the page ------------------------------------------------------------------------------------------


def test_the_buttons_of_a_message_do_what_the_actions_do(operator):
    row = rows.dead()
    url = f"{LIST}{row.pk}/change/"
    response = operator.post(url, {"verb": "requeue", "note": "again"})
    assert (response.status_code, response.url) == (302, url)
    assert told(response) == ["1 message requeued."]
    assert (LogEntry.objects.get().change_message, Intervention.objects.get().note) == ("Requeued. again", "again")


def test_a_button_pressed_too_late_says_why_nothing_happened(operator):
    row = rows.leased(event_key="running")
    response = operator.post(f"{LIST}{row.pk}/change/", {"verb": "discard"})
    assert told(response) == ["1 message was left alone: running (in flight)."]
    assert fresh(row).lease_token == row.lease_token
    assert not LogEntry.objects.exists()


def test_an_unknown_verb_is_refused(operator):
    row = rows.dead()
    assert operator.post(f"{LIST}{row.pk}/change/", {"verb": "delete"}).status_code == 400
    assert operator.post(f"{LIST}{row.pk}/change/", {}).status_code == 400


@pytest.mark.parametrize("note", ["nul\x00", "x" * 5000, "\u202egnp", "<b>&"])
def test_any_note_can_be_kept(operator, note):
    row = rows.dead()
    assert operator.post(f"{LIST}{row.pk}/change/", {"verb": "requeue", "note": note}).status_code == 302
    assert len(Intervention.objects.get().note) <= 1000


MAKERS = {
    Place.DUE: rows.message,
    Place.SCHEDULED: rows.scheduled,
    Place.RETRYING: rows.retrying,
    Place.IN_FLIGHT: rows.leased,
    Place.WAITING: lambda: rows.parked(LANE),
    Place.DEAD: rows.dead,
    Place.DELIVERED: rows.delivered,
    Place.DISCARDED: rows.discarded,
    "pruned": lambda: rows.dead(payload_pruned=True),
}


@pytest.mark.parametrize("where", MAKERS)
@pytest.mark.parametrize("deed", DEEDS.values(), ids=list(DEEDS))
def test_a_button_can_be_pressed_where_the_operation_would_do_it(deed, where):
    row = MAKERS[where]()
    obstacle = deed.obstacle(row, place_of(row, rows.now()))
    result = deed.run("default", [row.pk])
    assert bool(obstacle) == bool(result.skipped), result
    assert set(result.skipped.values()) <= set(Refusal.values)


# --- at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_two_people_on_the_same_messages_share_them_exactly(django_user_model):
    """Scenario 56: two admins at once on the same hundred dead."""
    chosen = [rows.dead() for _ in range(100)]
    ids = ",".join(str(row.pk) for row in chosen)
    clients = []
    for name in ("anna", "ben"):
        client = Client()
        client.force_login(django_user_model.objects.create_superuser(name))
        clients.append(client)
    data = {"action": "requeue", "_selected_action": [chosen[0].pk], "ids": ids, "confirmed": "yes"}
    responses = rows.at_once(*[lambda client=client: client.post(LIST, data) for client in clients])
    requeued = 0
    for response in responses:
        done = sum(int(number) for text in told(response) for number in re.findall(r"(\d+) messages? requeued", text))
        left = sum(int(number) for text in told(response) for number in re.findall(r"(\d+) messages? w", text))
        assert done + left == 100
        requeued += done
    assert requeued == 100
    assert Intervention.objects.count() == LogEntry.objects.count() == 100


@pytest.mark.django_db(transaction=True)
def test_a_requeue_during_the_last_settlement_waits_for_it(django_user_model):
    """Scenario 56: requeue while the dispatcher is burying it: requeued or refused, never a lease taken away."""
    client = Client()
    client.force_login(django_user_model.objects.create_superuser("anna"))
    row = rows.leased()

    def bury():
        def work():
            mine = Message.objects.filter(pk=row.pk, lease_token=row.lease_token)
            held = locked(mine, skip=False).get()
            Message.objects.filter(pk=held.pk).update(
                state=State.DEAD, due_at=None, lease_token=None, settled_at=rows.now()
            )

        again("default", work)

    def press():
        return told(client.post(f"{LIST}{row.pk}/change/", {"verb": "requeue"}))

    _, told_to = rows.at_once(bury, press)
    if told_to == ["1 message requeued."]:
        assert (fresh(row).state, fresh(row).lease_token) == (State.PENDING, None)
    else:
        assert told_to[0].endswith("(in flight).")
        assert fresh(row).state == State.DEAD
