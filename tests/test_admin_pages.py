"""The page of one message: exact, honest about what happened, and harmless whatever the message holds."""

import gettext
import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.contrib.staticfiles import finders
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from django.utils import translation

import outbox
from outbox.admin import MessageAdmin, shown
from outbox.explain import explain
from outbox.fields import JsonText
from outbox.handlers import handler, registry
from outbox.models import Attempt, Intervention, Message
from tests import rows

LIST = "/admin/outbox/message/"
LANE = 4711
EVERYTHING = ("view_message", "view_payload", "requeue_message", "discard_message")
HOSTILE = "<script>alert(1)</script>\"'\x1b[31mred\x1b[0m\u202egnp.exe\u202c\u2066x\u2069\u200b\x00\x07"

custom_site = admin.AdminSite(name="back_office")
custom_site.register(Message, MessageAdmin)
urlpatterns = [path("office/", custom_site.urls), path("admin/", include((admin.site.get_urls(), "admin"), "admin"))]


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", max_attempts=8)(send_receipt)
        yield


def send_receipt(message):
    """A handler with a name to show."""


@pytest.fixture
def client_of(client, django_user_model):
    """Return a function that logs in somebody with just these rights."""

    def log_in(*rights):
        user = django_user_model.objects.create_user("anna", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(content_type__app_label="outbox", codename__in=rights))
        client.force_login(user)
        return client

    return log_in


def page(client, row, **query):
    response = client.get(f"{LIST}{row.pk}/change/", query)
    assert response.status_code == 200
    return response.content.decode()


def text_of(content):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", content)).split())


def story(content):
    """The lines of the timeline, newest first."""
    events = re.findall(r'<p class="outbox-event-line">(.*?)</p>', content, re.DOTALL)
    return [text_of(event) for event in events]


def attempt(row, number, outcome="failed", ago=60.0, took=2.0, **fields):
    ended = rows.ago(ago)
    started = None if took is None else ended - timedelta(seconds=took)
    defaults = {"worker": "web-1/9", "started_at": started, "ended_at": ended}
    return Attempt.objects.create(message=row, number=number, outcome=outcome, **(defaults | fields))


ERROR = {"error_type": "requests.ConnectionError", "error_text": "gateway timed out", "traceback": "Traceback:\n  boom"}


# --- payload and headers ----------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_every_digit_of_a_payload_is_shown(admin_client):
    """Scenario 13."""
    row = rows.message(
        payload={"id": 1970670598291982290, "h": 2**70, "big": 10**60, "small": 1e-300, "neg": -(2**53) - 1}
    )
    content = unescape(page(admin_client, row))
    for text in ("1970670598291982290", str(2**70), "1" + "0" * 60, "1e-300", str(-(2**53) - 1)):
        assert text in content


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["1.10", "1E400", "0.1000000000000000055511151231257827", "9" * 5000])
def test_numbers_are_shown_as_they_are_stored(admin_client, text):
    """Scenario 13: no parser stands between the row and the page."""
    row = rows.message(payload=JsonText(f'{{"n":{text}}}'))
    assert f'"n": {text}' in unescape(page(admin_client, row))


@pytest.mark.django_db
def test_payload_and_headers_are_pretty_with_size_and_version(admin_client):
    row = rows.message(
        payload={"a": [1, {}], "é": "ü"}, headers={"tenant": "acme"}, payload_version=3, route="order.paid@3"
    )
    content = unescape(page(admin_client, row))
    assert '{\n  "a": [\n    1,\n    {}\n  ],\n  "é": "ü"\n}' in content
    assert '{\n  "tenant": "acme"\n}' in content
    assert "22 bytes · v3" in text_of(content)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("payload", "shown_as"), [(JsonText("null"), ">null<"), ("", '>""<'), (0, ">0<"), ([], ">[]<")]
)
def test_falsy_payloads_are_shown(admin_client, payload, shown_as):
    assert shown_as in unescape(page(admin_client, rows.message(payload=payload)))


@pytest.mark.django_db
def test_a_pruned_payload_says_so(admin_client):
    row = rows.delivered(payload=None, headers=None, payload_pruned=True)
    assert "Pruned: delivered messages keep their payload" in text_of(page(admin_client, row))


@pytest.mark.django_db
def test_a_long_payload_is_cut_and_can_be_shown_whole(admin_client):
    row = rows.message(payload=["x" * 10] * 5000)
    content = page(admin_client, row)
    assert content.count("xxxxxxxxxx") < 1000
    assert "?show=payload" in content
    assert "more characters" in content
    assert page(admin_client, row, show="payload").count("xxxxxxxxxx") == 5000


@pytest.mark.django_db
def test_without_the_right_payload_and_headers_are_not_even_read(client_of):
    row = rows.message(payload={"secret": "hunter2"}, headers={"token": "hunter3"})
    client = client_of("view_message")
    with CaptureQueriesContext(connection) as captured:
        content = page(client, row)
    statements = [query["sql"] for query in captured.captured_queries if "outbox_message" in query["sql"]]
    assert statements
    assert not [sql for sql in statements if re.search(r"[\"`](payload|headers)[\"`]", sql)]
    assert "hunter" not in content
    assert "You may not see payloads and headers." in content
    assert "hunter" not in page(client, row, show="payload")


@pytest.mark.django_db
def test_a_subclass_can_redact(rf, django_user_model):
    class Discreet(MessageAdmin):
        def redact(self, message, what, text):
            return re.sub(r"\w+@\w+", "•••", text)

    row = rows.dead(payload={"mail": "anna@shop"}, error_text="no mailbox anna@shop")
    attempt(row, 1, error_type="E", error_text="anna@shop", traceback="at anna@shop")
    request = rf.get("/")
    request.user = django_user_model.objects.create_superuser("root")
    view = Discreet(Message, admin.site)
    content = view.change_view(request, str(row.pk)).render().content.decode()
    assert "•••" in content
    assert "anna" not in content


# --- the story --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_story_of_a_dead_message_is_told_newest_first(admin_client):
    row = rows.dead(attempt=5, spent=2, staged_at=rows.ago(10_000))
    attempt(row, 1, ago=9000, error_type="ValueError", error_text="amount is missing", traceback="first")
    attempt(row, 2, ago=8000, error_type="ValueError", error_text="amount is missing", traceback="second")
    Intervention.objects.create(message=row, verb="requeue", actor="anna", note="gateway is back", at=rows.ago(7000))
    attempt(row, 3, "lapsed", ago=5000, took=None, worker="web-2/1")
    attempt(row, 4, "timed_out", ago=3000, took=30, error_type="HandlerTimeout", error_text="too slow")
    attempt(row, 5, ago=60, took=0.012, **ERROR)
    content = page(admin_client, row)
    assert story(content) == [
        "#5 failed → dead · 1 min ago · 12 ms · web-1/9",
        "#4 timed out → again after 49 min · 50 min ago · 30 s · web-1/9",
        "#3 lease ran out → again after 32 min 50 s · 1 h ago · web-2/1",
        "requeued by anna · 1 h ago",
        "#2 failed → dead · 2 h ago · 2.0 s · web-1/9",
        "#1 failed → again after 16 min 38 s · 2 h ago · 2.0 s · web-1/9 · same error as #2",
        "staged · 2 h ago",
    ]
    text = text_of(content)
    assert "requests.ConnectionError: gateway timed out" in text
    assert "“ gateway is back ”" in text
    assert text.count("amount is missing") == 1
    assert "Traceback: boom" in text


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda: rows.message(due_at=rows.ago(250)), "due · 4 min late"),
        (lambda: rows.scheduled(due_at=rows.ahead(250)), "scheduled · in 4 min"),
        (lambda: rows.retrying(due_at=rows.ahead(250)), "retrying · in 4 min"),
        (lambda: rows.parked(LANE), "waiting"),
        (
            lambda: rows.leased(attempt=4, due_at=rows.ahead(250), leased_at=rows.ago(12), leased_by="web-2/1"),
            "#4 in flight · for 12 s · web-2/1 · its lease ends in 4 min",
        ),
        (lambda: rows.delivered(age=60, leased_by="web-2/1"), "#1 delivered · 1 min ago · web-2/1"),
        (lambda: rows.discarded(age=60, reason="expired"), "discarded · 1 min ago · expired before delivery"),
        (lambda: rows.dead(age=60, reason="crashed"), "dead · 1 min ago · its worker died or hung each time"),
    ],
)
def test_the_story_begins_with_what_a_message_does_now(admin_client, make, first):
    told = story(page(admin_client, make()))
    assert told == [first, "staged · 10 min ago"]


@pytest.mark.django_db
def test_an_end_that_an_attempt_or_a_person_tells_is_told_once(admin_client):
    delivered = rows.delivered(age=30, attempt=2)
    attempt(delivered, 1)
    attempt(delivered, 2, "delivered", ago=30)
    assert [line.split(" · ")[0] for line in story(page(admin_client, delivered))] == [
        "#2 delivered",
        "#1 failed → again after 28 s",
        "staged",
    ]
    gone = rows.discarded(age=30, reason="operator", attempt=0)
    Intervention.objects.create(message=gone, verb="discard", actor="ben", at=rows.ago(30))
    assert [line.split(" · ")[0] for line in story(page(admin_client, gone))] == ["discarded by ben", "staged"]


@pytest.mark.django_db
def test_a_retrying_message_tells_when_it_goes_on(admin_client):
    row = rows.retrying(attempt=1, due_at=rows.ahead(485))
    attempt(row, 1)
    assert story(page(admin_client, row))[1].startswith("#1 failed → again in 8 min")


@pytest.mark.django_db
def test_only_the_latest_attempts_are_shown_unasked(admin_client):
    row = rows.retrying(attempt=40)
    for number in range(1, 41):
        attempt(row, number, ago=4100 - 100 * number)
    content = page(admin_client, row)
    told = story(content)
    assert told[1].startswith("#40")
    assert told[-1].startswith("#16")
    assert "Show 15 older attempts" in content
    assert story(page(admin_client, row, show="attempts"))[-2].startswith("#1 ")


@pytest.mark.django_db
def test_long_errors_and_tracebacks_are_cut_with_a_way_to_the_whole(admin_client):
    row = rows.dead()
    made = attempt(row, 1, error_type="E", error_text="e" * 4000, traceback="frame\n" * 4000)
    content = page(admin_client, row)
    assert content.count("frame\n") < 1500
    assert content.count(f"/admin/outbox/attempt/{made.pk}/change/") == 2


# --- why, lane, buttons -----------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("make", [rows.message, rows.scheduled, rows.retrying, rows.leased, rows.dead])
def test_the_page_explains_like_the_command(admin_client, make):
    row = make()
    with connection.cursor():
        told = re.sub(r"[\d:]+( min| s| h)?( \d+ (s|min))?", "#", explain(row))
    assert told in re.sub(r"[\d:]+( min| s| h)?( \d+ (s|min))?", "#", text_of(page(admin_client, row)))


@pytest.mark.django_db
@pytest.mark.parametrize("make", [rows.delivered, rows.discarded])
def test_what_need_not_move_is_not_explained(admin_client, make):
    assert "Why it is not moving" not in page(admin_client, make())


@pytest.mark.django_db
def test_a_waiting_message_links_to_what_it_waits_for(admin_client):
    head = rows.retrying(lane=LANE, event_key="the head")
    row = rows.parked(LANE)
    rows.parked(LANE)
    content = page(admin_client, row)
    assert "1 before it in its lane, 1 behind it. Its turn comes after the head retrying" in text_of(content)
    assert f'href="{LIST}{head.pk}/change/"' in content
    assert f"?q=lane:{LANE}" in content
    assert "First of its lane; 2 messages behind it." in text_of(page(admin_client, head))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("make", "enabled"),
    [
        (rows.message, {"discard"}),
        (rows.scheduled, {"make_due", "discard"}),
        (rows.retrying, {"make_due", "discard"}),
        (rows.leased, set()),
        (rows.dead, {"requeue", "discard"}),
        (rows.delivered, set()),
        (rows.discarded, {"requeue"}),
    ],
)
def test_buttons_follow_the_state_and_a_disabled_one_says_why(admin_client, make, enabled):
    content = page(admin_client, make())
    buttons = re.findall(r'<button type="submit" name="verb" value="(\w+)"([^>]*)>', content)
    assert {verb for verb, attributes in buttons if "disabled" not in attributes} == enabled
    for verb, attributes in buttons:
        if "disabled" in attributes:
            described = re.search(r'aria-describedby="([\w-]+)"', attributes)[1]
            assert re.search(rf'id="{described}"[^>]*>[^<]{{20,}}<', content), verb


@pytest.mark.django_db
def test_a_button_without_the_right_says_so(client_of):
    content = page(client_of("view_message", "discard_message"), rows.dead())
    assert "Requeue needs a right that you do not have." in content
    assert "Discard needs" not in content


@pytest.mark.django_db
def test_requeue_of_an_ordered_message_is_warned_of(admin_client):
    """Scenario 47."""
    assert "gives up the order" in page(admin_client, rows.dead(ordering_key="order:1"))
    assert "gives up the order" not in page(admin_client, rows.dead())


@pytest.mark.django_db
def test_the_facts_name_handler_policy_and_times(admin_client):
    row = rows.retrying(ordering_key="order:1", expires_at=rows.ahead(7200), leased_by="web-1/9", lapses=1)
    text = text_of(page(admin_client, row))
    assert f"{send_receipt.__module__}.send_receipt" in text
    assert "2 of 8 attempts spent; waits of up to 5 s" in text
    assert "Ordering key order:1" in text
    assert re.search(r"Expires \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \(in (1|2) h\)", text)
    assert "Leases that ran out in a row 1" in text
    stray = rows.message(handler="gone", route="gone")
    assert "gone: nobody here takes it, so it waits" in text_of(page(admin_client, stray))


@pytest.mark.django_db
def test_the_page_costs_a_constant_number_of_queries(client_of):
    client = client_of(*EVERYTHING)
    row = rows.retrying(lane=LANE, attempt=30)
    page(client, row)
    counts = []
    for start in (0, 15):
        for number in range(start, start + 15):
            attempt(row, number + 1)
            rows.parked(LANE)
        with CaptureQueriesContext(connection) as captured:
            page(client, row)
        counts.append(len(captured))
    assert max(counts) <= 20
    assert counts[1] - counts[0] <= 1  # the attempts that are left out are counted


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", ["999999999", "0", "x", "9" * 40, "-1", "_3Cscript_3E"])
def test_a_message_that_is_gone_leads_back_to_the_list(admin_client, wrong):
    response = admin_client.get(f"{LIST}{wrong}/change/", follow=True)
    assert response.redirect_chain[-1][0] == LIST
    assert "There is no message" in text_of(response.content.decode())


@pytest.mark.django_db
def test_the_log_of_a_message_is_readable(admin_client):
    row = rows.dead()
    admin_client.post(f"{LIST}{row.pk}/change/", {"verb": "requeue"})
    content = admin_client.get(f"{LIST}{row.pk}/history/").content.decode()
    assert "Requeued." in content


# --- hostile content --------------------------------------------------------------------------------------------------


def hostile_row():
    kept = HOSTILE.replace("\x00", "")
    row = rows.dead(
        event_key=kept,
        ordering_key=kept,
        payload={kept: HOSTILE, "lone": "\\ud800", "nested": [[[[HOSTILE]]]]},
        headers={"h": HOSTILE},
        error_type=kept[:200],
        error_text=kept * 50,
        leased_by=kept[:100],
    )
    Message.objects.filter(pk=row.pk).update(payload=JsonText(json.dumps({kept: HOSTILE, "lone": "\ud800"})))
    attempt(row, 1, error_type=kept, error_text=kept, traceback=kept * 100, worker=kept)
    Intervention.objects.create(message=row, verb="make_due", actor=kept, note=kept, at=rows.ago(70))
    return row


def assert_harmless(content, where=""):
    assert "<script>alert" not in content
    found = [char for char in "\x00\x07\x1b\u202e\u202c\u2066\u2069\u200b" if char in content]
    assert not found, where


@pytest.mark.django_db
def test_hostile_content_is_harmless_on_every_page(admin_client):
    row = hostile_row()
    made = Attempt.objects.get()
    rows.dispatcher(name="<script>alert(1)</script>\u202e", host=HOSTILE.replace("\x00", ""), handlers=[HOSTILE])
    pages = [
        LIST,
        f"{LIST}?place=dead",
        f"{LIST}{row.pk}/change/",
        f"{LIST}{row.pk}/change/?show=payload",
        "/admin/outbox/attempt/",
        f"/admin/outbox/attempt/{made.pk}/change/",
        "/admin/outbox/dispatcher/",
    ]
    for url in pages:
        response = admin_client.get(url)
        assert response.status_code == 200, url
        content = response.content.decode()
        main = content.split('id="content-start"')[1]
        assert_harmless(main, url)
    other = rows.dead(event_key="other")
    data = {"action": "requeue", "_selected_action": [row.pk, other.pk], "index": "0"}
    assert_harmless(admin_client.post(LIST, data).content.decode())
    told = admin_client.post(f"{LIST}{row.pk}/change/", {"verb": "make_due"}, follow=True)
    assert_harmless(told.content.decode().split('id="content-start"')[1])


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["{", '{"a":', "[[[[" * 5000, '"', "nonsense", '{"a":1}}}}]]', "\\", ""])
def test_a_payload_that_somebody_broke_by_hand_is_shown(admin_client, text):
    row = rows.message(payload=JsonText(text))
    assert admin_client.get(f"{LIST}{row.pk}/change/").status_code == 200
    assert admin_client.get(LIST).status_code == 200


@pytest.mark.django_db
def test_no_page_needs_inline_scripts_or_styles(admin_client):
    """Content-Security-Policy: default-src 'self'."""
    row = hostile_row()
    other = rows.dead()
    data = {"action": "requeue", "_selected_action": [row.pk, other.pk], "index": "0"}
    responses = [
        admin_client.get(LIST),
        admin_client.get(f"{LIST}?q=none"),
        admin_client.get(f"{LIST}{row.pk}/change/"),
        admin_client.post(LIST, data),
        admin_client.get("/admin/outbox/attempt/"),
        admin_client.get("/admin/outbox/dispatcher/"),
    ]
    for response in responses:
        content = response.content.decode()
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)|<[^>]*\s(style|on\w+)=", content)
        sources = re.findall(r'(?:src|rel="stylesheet" href)="([^"]+)"', content)
        assert sources
        assert all(source.startswith("/") and not source.startswith("//") for source in sources)


def test_the_stylesheet_takes_its_colours_from_the_host():
    with open(finders.find("outbox/admin.css")) as stylesheet:
        text = stylesheet.read()
    assert "url(" not in text
    assert "@import" not in text
    for name in ("--body-quiet-color", "--hairline-color", "--darkened-bg"):
        assert all(use.startswith(f"var({name}, ") for use in re.findall(rf"var\({name}[^)]*", text))
    assert 'html[data-theme="dark"]' in text
    assert "html.dark" in text


# --- other sites, other languages -------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.urls(__name__)
def test_a_site_of_ones_own_stays_among_itself(admin_client):
    head = rows.retrying(lane=LANE)
    row = rows.parked(LANE)
    base = "/office/outbox/message/"
    content = admin_client.get(base).content.decode()
    assert f'href="{base}{row.pk}/change/' in content
    content = admin_client.get(f"{base}{row.pk}/change/").content.decode()
    assert f'href="{base}{head.pk}/change/"' in content
    assert f'href="{base}{row.pk}/history/"' in content
    assert "/admin/outbox" not in content
    response = admin_client.post(f"{base}{row.pk}/change/", {"verb": "discard"})
    assert response.url == f"{base}{row.pk}/change/"


@pytest.mark.django_db
def test_numbers_in_addresses_are_not_written_for_people(admin_client, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    head = rows.retrying(pk=1_234_567, lane=1_234_567)
    row = rows.parked(1_234_567, pk=2_345_678)
    attempt(row, 1, error_text="e" * 4000, pk=3_456_789)
    content = page(admin_client, row)
    assert f'href="{LIST}{head.pk}/change/"' in content
    assert "?q=lane:1234567" in content
    assert "/attempt/3456789/" in content
    data = {"action": "discard", "_selected_action": [head.pk, row.pk], "index": "0"}
    assert 'value="1234567,2345678"' in admin_client.post(LIST, data).content.decode()


# --- pure -------------------------------------------------------------------------------------------------------------

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 日本", "plain é 日本"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("open \x1b] end", "open  end"),
        ("a\u202eb", "a\\u202eb"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\ud800", "\\ud800"),
        ("a\tb\r\nc", "a    b\nc"),
        ("bell\x07", "bell\\x07"),
    ],
)
def test_plain_text_has_no_tricks(text, expected):
    assert shown.plain(text) == expected


@pytest.mark.parametrize(
    ("text", "limit", "expected"), [("abc", 3, "abc"), ("abcdef", 5, "ab…ef"), ("abcdefg", 4, "ab…g"), ("", 5, "")]
)
def test_the_middle_is_cut(text, limit, expected):
    assert shown.middle(text, limit) == expected


def test_a_cut_counts_what_it_leaves_out():
    assert shown.cut("abc", 3) == shown.Cut(text="abc")
    assert shown.cut("abcdef", 4) == shown.Cut(text="abcd", left_out=2)
    assert shown.cut("123456789\nabc", 12) == shown.Cut(text="123456789", left_out=4)


def test_a_short_text_is_one_line():
    assert shown.short("a\n  b\tc", 10) == "a b c"
    assert shown.short("x" * 1_000_000, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (0, "0 ms"), (-1, "0 ms"), (1.96, "2.0 s"), (9.96, "10 s"), (252, "4 min 12 s")],
)
def test_durations(seconds, text):
    assert shown.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "ago", "late"),
    [
        (-252, "4 min ago", "4 min late"),
        (-8, "8 s ago", "8 s late"),
        (0, "now", "due now"),
        (8, "in 8 s", "in 8 s"),
        (7300, "in 2 h", "in 2 h"),
        (-200_000, "2 d ago", "2 d late"),
    ],
)
def test_distances_in_time(seconds, ago, late):
    instant = NOW + timedelta(seconds=seconds)
    assert (shown.ago(instant, NOW), shown.lateness(instant, NOW)) == (ago, late)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("[]", "[]"),
        ('{"a":[]}', '{\n  "a": []\n}'),
        ('[1,"x, y: {}"]', '[\n  1,\n  "x, y: {}"\n]'),
        ('{"a":1,"a":2}', '{\n  "a": 1,\n  "a": 2\n}'),
        ('"\\u00e9\\u202e\\ud83d\\ude00"', '"é\\u202e😀"'),
        ('"\\ud800"', '"\\ud800"'),
        ('"line\\nbreak \\"quoted\\""', '"line\\nbreak \\"quoted\\""'),
        ("-0.0", "-0.0"),
    ],
)
def test_json_is_indented_and_nothing_else(document, expected):
    assert shown.pretty(document) == expected


@pytest.mark.parametrize(("octets", "text"), [(412, "412 bytes"), (48_000, "47 KiB"), (1_258_291, "1.2 MiB")])
def test_sizes(octets, text):
    assert shown.size(octets) == text


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_absolute_times_are_in_the_readers_zone(settings, zone, use_tz):
    """Scenario 20."""
    settings.TIME_ZONE, settings.USE_TZ = zone, use_tz
    expected = {"UTC": "2026-03-01 12:00:00 UTC", "Europe/Berlin": "2026-03-01 13:00:00 CET"}
    assert shown.stamp(NOW) == expected[zone]


def test_numbers_follow_the_readers_language():
    assert shown.number(10_000) == "10,000"
    with translation.override("de"):
        assert shown.number(10_000) == "10.000"


@pytest.mark.django_db
def test_the_pages_speak_german(admin_client, settings):
    settings.LANGUAGE_CODE = "de"
    row = rows.retrying(due_at=rows.ahead(250))
    attempt(row, 1)
    content = page(admin_client, row)
    assert story(content)[0] == "wird wiederholt · in 4 min"
    assert "Jetzt fällig machen" in content
    assert "Fällig 0" in text_of(admin_client.get(LIST).content.decode())
    told = admin_client.post(f"{LIST}{row.pk}/change/", {"verb": "discard"}, follow=True)
    assert "1 Nachricht verworfen." in text_of(told.content.decode())


def test_the_german_catalogue_is_complete_and_compiled():
    folder = Path(outbox.__file__).parent / "locale/de/LC_MESSAGES"
    source = (folder / "django.po").read_text(encoding="utf-8")
    assert "fuzzy" not in source
    assert not re.search(r'msgstr(\[\d\])? ""\n(?!")', source)
    with (folder / "django.mo").open("rb") as compiled:
        catalogue = gettext.GNUTranslations(compiled)
    pairs = re.findall(r'(?<!")\nmsgid "(.+)"\nmsgstr "(.+)"\n\n', source)
    assert len(pairs) > 100
    assert {text: catalogue.gettext(text) for text, _ in pairs} == dict(pairs)
