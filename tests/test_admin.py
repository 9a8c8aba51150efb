"""The list of messages in the admin: what it shows, counts, finds and costs, and who may look."""

import re
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox.admin import counting
from outbox.admin.places import Place, place_of, rows_at, tallies
from outbox.handlers import Topic, handler, registry
from outbox.models import Attempt, Breaker, Message
from tests import rows

pytestmark = pytest.mark.django_db

LIST = "/admin/outbox/message/"
LANE = 4711


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", max_attempts=8)(lambda message: None)
        handler("order.paid", name="order.paid.audit")(lambda message: None)
        Topic("order.shipped")
        yield


@pytest.fixture
def fleet():
    """One row at each place, and the ways in which a row can be there."""
    return {
        Place.DUE: [rows.message(), rows.lapsed()],
        Place.SCHEDULED: [rows.scheduled()],
        Place.RETRYING: [rows.retrying(), rows.retrying(), rows.retrying()],
        Place.IN_FLIGHT: [rows.leased(), rows.leased(spent=0)],
        Place.WAITING: [rows.parked(LANE)],
        Place.DEAD: [rows.dead(), rows.dead()],
        Place.DELIVERED: [rows.delivered()],
        Place.DISCARDED: [rows.discarded()],
    }


def person(user_model, *rights, **fields):
    user = user_model.objects.create_user(f"u{user_model.objects.count()}", is_staff=True, **fields)
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="outbox", codename__in=rights))
    return user


@pytest.fixture
def client_of(client, django_user_model):
    """Return a function that logs in somebody with just these rights."""

    def log_in(*rights):
        client.force_login(person(django_user_model, *rights))
        return client

    return log_in


def listed(response):
    """The ids in the list, in order."""
    return [int(pk) for pk in re.findall(rf"{LIST}(\d+)/change/", response.content.decode())]


def tab_counts(response):
    text = response.content.decode()
    found = re.findall(r'outbox-tab-(\w+).*?outbox-count">([^<]+)<', text)
    return dict(found)


def text_of(response):
    """What a person reads, without tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", response.content.decode())).split())


# --- places -----------------------------------------------------------------------------------------------------------


def test_every_message_is_at_the_place_that_its_queryset_names(fleet):
    for place, members in fleet.items():
        found = counting.clocked(rows_at(place, Message.objects.all()))
        assert {row.pk for row in found} == {row.pk for row in members}
        assert {place_of(row, row.clock) for row in found} == {place}


def test_the_tabs_count_what_the_querysets_find(fleet):
    counted = tallies(Message.objects.all())
    assert {place: counted[place].rows for place in fleet} == {place: len(found) for place, found in fleet.items()}
    assert counted[None].rows == Message.objects.count()


@pytest.mark.parametrize("place", Place)
def test_a_tab_lists_its_place_and_all_tabs_keep_their_numbers(admin_client, fleet, place):
    response = admin_client.get(LIST, {"place": place.value})
    assert sorted(listed(response)) == sorted(row.pk for row in fleet[place])
    expected = {"all": "13"} | {each.value: str(len(found)) for each, found in fleet.items()}
    assert tab_counts(response) == expected


def test_the_tabs_count_what_the_filters_leave(admin_client, fleet):
    rows.dead(topic="order.shipped", handler="order.shipped")
    counts = tab_counts(admin_client.get(LIST, {"topic": "order.shipped", "place": "due"}))
    assert (counts["all"], counts["dead"], counts["due"]) == ("1", "1", "0")


def test_an_unknown_tab_is_no_tab(admin_client, fleet):
    assert len(listed(admin_client.get(LIST, {"place": "nowhere"}))) == 13


# --- numbers and pages ------------------------------------------------------------------------------------------------


@pytest.fixture
def capped(monkeypatch):
    """Lists of three rows, so that four are already too many."""
    for module in ("counting", "lists", "selection"):
        monkeypatch.setattr(f"outbox.admin.{module}.CAP", 3)


def test_finished_messages_are_counted_up_to_the_cap_and_live_ones_exactly(admin_client, capped):
    for _ in range(4):
        rows.dead()
        rows.message()
    assert {"dead": "3+", "due": "4", "all": "7+"}.items() <= tab_counts(admin_client.get(LIST)).items()


def test_a_capped_list_says_what_it_leaves_out(admin_client, capped):
    for _ in range(4):
        rows.dead()
    response = admin_client.get(LIST, {"place": "dead"})
    assert len(listed(response)) == 3
    assert "these are the first 3" in text_of(response)


def test_select_all_on_a_capped_list_names_the_first_rows_only(admin_client, capped, monkeypatch):
    monkeypatch.setattr("outbox.admin.messages.MessageAdmin.list_per_page", 2)
    for _ in range(4):
        rows.dead()
    text = text_of(admin_client.get(LIST, {"place": "dead"}))
    assert "Select the first 3 messages" in text
    assert "The first 3 are selected" in text
    assert "Select all" not in text


def test_select_all_on_a_whole_list_names_the_true_number(admin_client, monkeypatch):
    monkeypatch.setattr("outbox.admin.messages.MessageAdmin.list_per_page", 2)
    for _ in range(5):
        rows.dead()
    assert "Select all 5 messages" in text_of(admin_client.get(LIST, {"place": "dead"}))


def test_a_page_behind_the_last_is_the_last(admin_client, monkeypatch):
    """Scenario 57: page 500 of a list that has fewer."""
    monkeypatch.setattr("outbox.admin.messages.MessageAdmin.list_per_page", 2)
    made = [rows.dead() for _ in range(5)]
    response = admin_client.get(LIST, {"p": "500"})
    assert listed(response) == [made[0].pk]
    assert listed(admin_client.get(LIST, {"p": "nonsense"})) == [made[4].pk, made[3].pk]


def test_the_newest_come_first_and_ties_are_broken_by_id(admin_client):
    made = [rows.dead(staged_at=rows.ago(60)) for _ in range(3)]
    assert listed(admin_client.get(LIST)) == [row.pk for row in reversed(made)]


def test_messages_that_wait_for_a_time_come_soonest_first(admin_client):
    late, soon = rows.scheduled(due_at=rows.ahead(900)), rows.scheduled(due_at=rows.ahead(60))
    assert listed(admin_client.get(LIST, {"place": "scheduled"})) == [soon.pk, late.pk]


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_row_tells_key_topic_handler_state_budget_error_age_and_worker(admin_client):
    rows.retrying(event_key="order:1:paid", handler="order.paid.audit", attempt=3, leased_by="web-1/9")
    text = text_of(admin_client.get(LIST))
    row = text[text.index("order:1:paid") :]
    assert re.search(
        r"order:1:paid order\.paid order\.paid\.audit retrying 3 2/20 TimeoutError: no answer in (59|60) min"
        r"|order:1:paid order\.paid order\.paid\.audit retrying 3 2/20 TimeoutError: no answer in 1 h",
        row,
    )
    assert "10 min web-1/9" in row


def test_a_long_key_is_cut_in_the_middle_and_whole_in_its_title(admin_client):
    key = "order:" + "9" * 100 + ":paid"
    rows.message(event_key=key)
    content = admin_client.get(LIST).content.decode()
    assert f'title="{key}"' in content
    assert re.search(r">order:9+…9+:paid<", content)


def test_a_late_message_says_so(admin_client):
    rows.message(due_at=rows.ago(250))
    assert "4 min late" in text_of(admin_client.get(LIST))


def test_a_message_that_nobody_here_delivers_says_so(admin_client):
    rows.message(topic="order.paid", handler="gone", route="gone@3", payload_version=3)
    assert "gone · v3 · no handler here" in text_of(admin_client.get(LIST))


def test_the_empty_list_says_whether_nothing_exists_or_something_hides_it(admin_client):
    assert "No messages yet." in text_of(admin_client.get(LIST))
    rows.message()
    assert "No message matches." in text_of(admin_client.get(LIST, {"q": "other"}))
    assert "The other tabs have some." in text_of(admin_client.get(LIST, {"place": "dead"}))


# --- search and filters -----------------------------------------------------------------------------------------------


@pytest.fixture
def orders():
    return {
        "paid": rows.message(event_key="order:84:paid", leased_by="web-1/7"),
        "Paid": rows.message(event_key="Order:84:paid", handler="order.paid.audit"),
        "blank": rows.message(event_key="order 84", topic="order.shipped"),
        "dead": rows.dead(event_key="8400", error_type="requests.exceptions.ConnectionError", error_code="E7"),
        "percent": rows.parked(LANE, event_key="topic:100%", topic="order.shipped.late"),
    }


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("order:84:paid", ["paid"]),  # exact, though it looks like a term
        ("order:84", []),
        ("order 84", ["blank"]),
        ("key:order:84*", ["paid"]),  # case counts on every database
        ('key:"order 8"*', []),
        ('key:"order 84"', ["blank"]),
        ("key:topic:100%", ["percent"]),
        ("key:%*", []),
        ("8400", ["dead"]),
        ("topic:order.paid", ["paid", "Paid", "dead"]),
        ("topic:order.shipped*", ["blank", "percent"]),
        ("topic:order.paid handler:order.paid.audit", ["Paid"]),
        ("error:ConnectionError", ["dead"]),
        ("error:requests.exceptions.ConnectionError", ["dead"]),
        ("error:Connection*", ["dead"]),
        ("error:E7", ["dead"]),
        ("error:Other", []),
        ("error:*", ["dead"]),
        ("key:order*", ["paid", "blank"]),
        ("worker:web-1*", ["paid"]),
        ("worker:web-1/7", ["paid"]),
        (f"lane:{LANE}", ["percent"]),
        ("lane:x", []),
        ("topic:order.paid colour:red", []),
    ],
)
def test_the_search_understands(admin_client, orders, query, names):
    found = listed(admin_client.get(LIST, {"q": query}))
    assert sorted(found) == sorted(orders[name].pk for name in names)


def test_a_bare_number_is_a_key_or_an_id(admin_client, orders):
    assert listed(admin_client.get(LIST, {"q": str(orders["blank"].pk)})) == [orders["blank"].pk]
    assert listed(admin_client.get(LIST, {"q": f"id:{orders['blank'].pk}"})) == [orders["blank"].pk]


@pytest.mark.parametrize(
    "query", ["9" * 19, "9" * 30, "9" * 5000, "id:-1", "id:" + "9" * 400, "٣", "%00", "\x00", '"', "*"]
)
def test_no_search_breaks_the_page(admin_client, orders, query):
    assert admin_client.get(LIST, {"q": query}).status_code == 200


def test_the_filters_offer_what_the_registry_knows(admin_client):
    text = text_of(admin_client.get(LIST))
    assert "Topic: All All order.paid order.shipped" in text
    assert "Handler: All All order.paid order.paid.audit" in text


def test_handlers_are_no_filter_where_every_topic_has_its_own(admin_client):
    with registry.isolated():
        handler("order.paid")(lambda message: None)
        assert "Handler:" not in text_of(admin_client.get(LIST))


def test_a_filter_shows_and_finds_a_name_that_nobody_declares(admin_client):
    old = rows.message(topic="order.old", handler="order.old")
    rows.message()
    response = admin_client.get(LIST, {"topic": "order.old"})
    assert listed(response) == [old.pk]
    assert "Topic: order.old" in text_of(response)
    assert listed(admin_client.get(LIST, {"topic": "<b>"})) == []


@pytest.mark.parametrize("name", ["topic", "handler", "since", "unroutable", "place", "p", "o", "q", "all", "e"])
@pytest.mark.parametrize("value", ["", "\x00", "%", "-1", "9" * 30, "1.1", "<b>"])
def test_no_value_of_a_filter_breaks_the_page(admin_client, orders, name, value):
    assert admin_client.get(LIST, {name: value}).status_code == 200


def test_a_handler_is_found_with_all_its_payload_versions(admin_client):
    first = rows.message(handler="order.paid.audit")
    second = rows.delivered(handler="order.paid.audit", route="order.paid.audit@2", payload_version=2)
    rows.message(handler="order.paid.audits")
    assert listed(admin_client.get(LIST, {"handler": "order.paid.audit"})) == [second.pk, first.pk]


def test_what_failed_before_a_delivery_is_no_trouble_any_more(admin_client):
    rows.delivered(error_type="a.TimeoutError", error_text="no answer")
    assert "no answer" not in text_of(admin_client.get(LIST))
    assert not listed(admin_client.get(LIST, {"q": "error:TimeoutError"}))


def test_unroutable_messages_are_a_filter(admin_client):
    old = rows.message(topic="order.old", handler="order.old")
    rows.message()
    rows.dead(topic="order.old", handler="order.old")
    assert listed(admin_client.get(LIST, {"unroutable": "1"})) == [old.pk]


def test_messages_can_be_narrowed_to_the_last_hour(admin_client):
    young = rows.message(staged_at=rows.ago(60))
    rows.message(staged_at=rows.ago(7200))
    assert listed(admin_client.get(LIST, {"since": "1h"})) == [young.pk]


@pytest.mark.parametrize(
    "lookup", ["payload__contains", "payload", "event_key__startswith", "attempts__traceback__contains", "id", "action"]
)
def test_no_other_lookup_is_let_through(admin_client, lookup):
    """Else somebody without the right to payloads could search them letter by letter."""
    assert admin_client.get(LIST, {lookup: "1"}).status_code == 400


# --- cost -------------------------------------------------------------------------------------------------------------


def outbox_statements(queries):
    return [query["sql"] for query in queries if "outbox_message" in query["sql"]]


def names_a_document(sql):
    """Whether a statement reads the payload, the headers, the digest or a whole error."""
    columns = re.findall(r"[\"`](payload|headers|digest)[\"`]", sql)
    whole_error = re.findall(r"(?<!LEFT\()(?<!SUBSTR\()[\"`]outbox_message[\"`]\.[\"`]error_text[\"`]", sql)
    return columns or whole_error


@pytest.mark.parametrize(
    "query", [{}, {"place": "dead"}, {"topic": "order.paid"}, {"q": "key:k*"}, {"since": "1h", "p": "2"}]
)
def test_the_list_costs_a_constant_number_of_queries(client_of, query, monkeypatch):
    """Scenario 57: at most ten, whatever is in the table; none reads a document or counts without a condition."""
    monkeypatch.setattr("outbox.admin.messages.MessageAdmin.list_per_page", 5)
    client = client_of("view_message", "requeue_message", "discard_message")
    client.get(LIST)  # content types are cached from now on
    counts = []
    for _ in range(2):
        for _ in range(6):
            rows.dead()
            rows.retrying()
        with CaptureQueriesContext(connection) as captured:
            assert client.get(LIST, query).status_code == 200
        counts.append(len(captured))
        statements = outbox_statements(captured.captured_queries)
        assert statements
        assert not [sql for sql in statements if names_a_document(sql)]
        for sql in statements:
            if "COUNT(" in sql:
                assert "WHERE" in sql
            assert "DISTINCT" not in sql
    assert counts[0] == counts[1] <= 10


def test_every_count_of_finished_rows_stops_at_the_cap():
    with CaptureQueriesContext(connection) as captured:
        tallies(Message.objects.all())
    counts = [query["sql"] for query in captured.captured_queries]
    live = [sql for sql in counts if "'pending'" in sql]
    assert len(live) == 1
    assert len(counts) == 4
    assert all(f"LIMIT {counting.CAP + 1}" in sql for sql in counts if sql not in live)


def plan_of(sql):
    with connection.cursor() as cursor:
        cursor.execute(("EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN ") + sql)
        return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)  # MariaDB's ANALYZE commits
def test_twenty_thousand_rows_are_counted_and_listed_over_indexes(admin_client):
    """Scenario 57: dead rows among a long history are found over the state's index, never by reading the table."""
    now = rows.now()
    Message.objects.bulk_create(
        (
            Message(
                event_key=f"k{number}",
                topic="order.paid",
                handler="order.paid",
                route="order.paid",
                payload={"blob": "x" * 500},
                digest=b"",
                staged_at=now,
                settled_at=now,
                state="delivered" if number % 1000 else "dead",
            )
            for number in range(20_000)
        ),
        batch_size=1000,
    )
    with connection.cursor() as cursor:
        table = connection.ops.quote_name("outbox_message")
        cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")
        cursor.fetchall() if connection.vendor == "mysql" else None
    with CaptureQueriesContext(connection) as captured:
        response = admin_client.get(LIST, {"place": "dead"})
    assert tab_counts(response)["dead"] == "20"
    assert tab_counts(response)["delivered"] == "10,000+"
    statements = [sql for sql in outbox_statements(captured.captured_queries) if "'dead'" in sql]
    assert len(statements) == 2
    for sql in statements:
        assert "outbox_message_settled" in plan_of(sql), sql


# --- who may look, and what nobody may do -----------------------------------------------------------------------------


def test_only_people_with_the_right_see_the_list(client_of):
    assert client_of().get(LIST).status_code == 403
    assert client_of("view_message").get(LIST).status_code == 200


def test_a_viewer_is_offered_no_action(client_of):
    """Scenario 56."""
    rows.dead()
    response = client_of("view_message").get(LIST)
    assert "_selected_action" not in response.content.decode()


@pytest.mark.parametrize(
    ("rights", "offered"),
    [
        (["requeue_message"], {"make_due", "requeue"}),
        (["discard_message"], {"discard"}),
        (["requeue_message", "discard_message"], {"make_due", "requeue", "discard"}),
    ],
)
def test_each_action_has_its_right(client_of, rights, offered):
    rows.dead()
    content = client_of("view_message", *rights).get(LIST).content.decode()
    assert set(re.findall(r'<option value="(\w+)"', content)) == offered


@pytest.mark.parametrize("model", ["message", "attempt", "dispatcher"])
def test_nobody_adds_changes_or_deletes_rows(admin_client, model):
    row = {"message": rows.dead, "attempt": attempt, "dispatcher": rows.dispatcher}[model]()
    base = f"/admin/outbox/{model}/"
    assert admin_client.get(f"{base}add/").status_code == 403
    assert admin_client.get(f"{base}{row.pk}/delete/").status_code == 403
    assert admin_client.post(f"{base}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin_client.post(f"{base}{row.pk}/change/", {"topic": "other"}).status_code in (400, 403)
    assert "delete_selected" not in admin_client.get(base).content.decode()
    assert type(row).objects.filter(pk=row.pk).exists()


def attempt(**fields):
    message = fields.pop("message", None) or rows.dead()
    defaults = {"number": 1, "outcome": "failed", "ended_at": rows.ago(60), "started_at": rows.ago(62)}
    return Attempt.objects.create(message=message, **(defaults | fields))


# --- attempts and dispatchers -----------------------------------------------------------------------------------------


def test_attempts_are_listed_with_a_constant_number_of_queries(client_of):
    client = client_of("view_attempt")
    counts = []
    for _ in range(2):
        for _ in range(3):
            attempt(worker="web-1/9", error_type="a.TimeoutError", error_text="no answer", traceback="long")
        with CaptureQueriesContext(connection) as captured:
            response = client.get("/admin/outbox/attempt/")
        counts.append(len(captured))
        assert not any("traceback" in query["sql"] for query in captured.captured_queries)
    assert counts[0] == counts[1] <= 10
    text = text_of(response)
    assert re.search(r"#1 failed \d+ 1 min ago 2\.0 s web-1/9 TimeoutError: no answer", text)


@pytest.mark.parametrize(("right", "status"), [("view_message", 200), ("view_attempt", 200), ("view_dispatcher", 403)])
def test_who_sees_messages_sees_their_attempts(client_of, right, status):
    made = attempt()
    assert client_of(right).get(f"/admin/outbox/attempt/{made.pk}/change/").status_code == status


def test_the_attempts_of_one_message_are_found_by_its_id(admin_client):
    one, other = attempt(), attempt()
    content = admin_client.get("/admin/outbox/attempt/", {"q": str(one.message_id)}).content.decode()
    assert f"/attempt/{one.pk}/" in content
    assert f"/attempt/{other.pk}/" not in content
    assert admin_client.get("/admin/outbox/attempt/", {"q": "x"}).status_code == 200
    assert admin_client.get("/admin/outbox/attempt/", {"q": "9" * 30}).status_code == 200


def test_attempts_are_filtered_by_outcome(admin_client):
    failed, late = attempt(), attempt(outcome="timed_out")
    content = admin_client.get("/admin/outbox/attempt/", {"outcome": "timed_out"}).content.decode()
    assert f"/attempt/{late.pk}/" in content
    assert f"/attempt/{failed.pk}/" not in content


def test_an_attempt_shows_its_whole_traceback(admin_client):
    row = attempt(traceback="line <1>\n" * 3000, error_text="\x1b[31mred\u202e")
    content = admin_client.get(f"/admin/outbox/attempt/{row.pk}/change/").content.decode()
    assert content.count("line &lt;1&gt;") == 3000
    assert "\x1b" not in content
    assert "\u202e" not in content
    assert "red\\u202e" in content


def test_dispatchers_are_live_stopping_or_lost(admin_client):
    rows.dispatcher(name="one", version="1.0", wakeup="notify", concurrency=8, in_flight=3, seen=2)
    rows.dispatcher(name="three", stopping=True)
    rows.dispatcher(name="two", seen=94, lost_in=-26)
    text = text_of(admin_client.get("/admin/outbox/dispatcher/"))
    assert re.search(r"one live \d s ago 3 / 8 order\.paid .* notify 1\.0 three stopping .* two lost 1 min ago", text)


def test_a_dispatcher_has_a_page(admin_client):
    row = rows.dispatcher(name="one", host="web-1", pid=77)
    assert "web-1 · 77" in text_of(admin_client.get(f"/admin/outbox/dispatcher/{row.pk}/change/"))


def test_an_open_breaker_says_why_and_when_it_is_tried(admin_client):
    rows.breaker("mail", since=94, probe_in=30, probes=4)
    rows.breaker("sms", probe_in=-1)
    text = text_of(admin_client.get("/admin/outbox/breaker/"))
    assert re.search(
        r"mail 1 min ago in (29|30) s 4 Unavailable: connection refused sms .* with the next message", text
    )


def test_a_breaker_has_a_page(admin_client):
    row = rows.breaker("mail", worker="web-1:7:ab")
    assert "web-1:7:ab" in text_of(admin_client.get(f"/admin/outbox/breaker/{row.pk}/change/"))


def test_what_is_not_known_is_a_dash_and_never_none(admin_client):
    found = {
        "dispatcher": rows.dispatcher(name="one", handlers=[]),
        "breaker": rows.breaker("mail", error_type="", error_text=""),
        "attempt": attempt(),
    }
    for model, row in found.items():
        text = text_of(admin_client.get(f"/admin/outbox/{model}/{row.pk}/change/"))
        assert "—" in text
        assert "None" not in text


def test_a_breaker_may_be_closed_by_those_who_have_the_right(client, admin_client, django_user_model):
    row, other = rows.breaker("mail"), rows.breaker("sms")
    chosen = {"action": "reset", "_selected_action": [row.pk]}
    clerk = django_user_model.objects.create_user("clerk", password="x", is_staff=True)
    clerk.user_permissions.add(Permission.objects.get(codename="view_breaker"))
    client.force_login(clerk)
    client.post("/admin/outbox/breaker/", chosen)
    assert Breaker.objects.count() == 2
    text = text_of(admin_client.post("/admin/outbox/breaker/", chosen, follow=True))
    assert "1 breaker was closed" in text
    assert Breaker.objects.get() == other
    assert LogEntry.objects.get().object_repr == "mail"


# --- around the list --------------------------------------------------------------------------------------------------


class FrozenReplica:
    """Sends all reads of the outbox to a database that never sees its rows."""

    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == "outbox" else None

    def db_for_write(self, model, **hints):
        return "default" if model._meta.app_label == "outbox" else None

    def allow_relation(self, *objects, **hints):
        return True


@pytest.mark.django_db(databases=["default", "other"])
def test_a_replica_does_not_matter(admin_client, settings):
    """Scenario 38."""
    settings.DATABASE_ROUTERS = [f"{__name__}.FrozenReplica"]
    row = rows.dead(event_key="order:1:paid")
    made = attempt(message=row)
    rows.dispatcher(name="one")
    with CaptureQueriesContext(connections["other"]) as elsewhere:
        assert listed(admin_client.get(LIST)) == [row.pk]
        assert "order:1:paid" in text_of(admin_client.get(f"{LIST}{row.pk}/change/"))
        assert f"/{made.pk}/" in admin_client.get("/admin/outbox/attempt/").content.decode()
        assert f"#{made.number}" in text_of(admin_client.get(f"/admin/outbox/attempt/{made.pk}/change/"))
        assert "one" in text_of(admin_client.get("/admin/outbox/dispatcher/"))
        admin_client.post(f"{LIST}{row.pk}/change/", {"verb": "requeue"})
        assert Message.objects.using("default").get(pk=row.pk).state == "pending"
    assert not elsewhere.captured_queries


def test_the_index_of_the_admin_names_the_app(admin_client):
    text = text_of(admin_client.get(reverse("admin:index")))
    assert "Outbox" in text
    assert "Messages" in text
