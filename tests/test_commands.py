"""The operator's commands: what they print for people and for machines, what they change, how they exit."""

import io
import json
import re

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from outbox import retention
from outbox.fields import JsonText
from outbox.handlers import Topic, handler, registry
from outbox.management.printing import Progress, facts, table
from outbox.models import Attempt, Breaker, Intervention, Message, State
from outbox.operations import requeue
from outbox.overview import overview
from tests import rows

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LANE = 4711


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():
        handler("order.paid", max_attempts=8, timeout=30)(lambda message: None)
        handler("billing.charge", dead_head="block", atomic=True)(lambda message: None)
        Topic("order.returned", required=True)
        yield


def run(*arguments):
    """What a command prints to stdout."""
    out = io.StringIO()
    call_command(*map(str, arguments), stdout=out, stderr=io.StringIO())
    return out.getvalue()


def data(*arguments):
    return json.loads(run(*arguments, "--format", "json"))


def fails(*arguments, code=1):
    """The text of the error that a command ends with, under this exit code."""
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert caught.value.returncode == code
    return str(caught.value)


def fresh(row):
    return Message.objects.get(pk=row.pk)


class Terminal(io.StringIO):
    def isatty(self):
        return True


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_of_each():
    rows.message(due_at=rows.ago(300)), rows.message(), rows.lapsed()
    rows.scheduled(), rows.retrying(), rows.leased(), rows.parked(LANE)
    rows.dead(), rows.dead(topic="billing.charge"), rows.delivered(60), rows.discarded()
    rows.message(topic="unheard.of")


def test_status_counts_each_topic_by_where_its_messages_are(one_of_each):
    found = data("outbox_status", "--delivered-within", "1h")
    paid = found["topics"]["order.paid"]
    assert 299 < paid.pop("oldest") < 400
    assert paid.pop("oldest_due_at").endswith("Z")
    assert paid == {
        "due": 3,
        "scheduled": 1,
        "retrying": 1,
        "in_flight": 1,
        "waiting": 1,
        "dead": 1,
        "unroutable": 0,
        "delivered": 1,
    }
    assert found["topics"]["order.returned"]["due"] == 0, "declared topics are shown even when empty"
    assert found["total"]["due"] == 4
    assert found["total"]["dead"] == 2
    assert found["unroutable"] == {"unheard.of": 1}


def test_status_is_an_aligned_table_for_people(one_of_each):
    text = run("outbox_status")
    header, *lines = text.splitlines()
    assert header.split() == [
        *("topic", "due", "scheduled", "retrying", "in", "flight", "waiting", "dead", "oldest", "due")
    ]
    assert {len(line) for line in lines[:5]} == {len(header)}, "four topics and their sum"
    assert re.search(r"^order\.paid +3 +1 +1 +1 +1 +1 +5 min$", text, re.MULTILINE)
    assert re.search(r"^order\.returned( +-)+$", text, re.MULTILINE)
    assert "Messages wait for handlers that are not installed here: 1 of unheard.of." in text
    assert "No dispatcher reports on database 'default'." in text


def test_status_counts_no_deliveries_unless_asked(one_of_each):
    assert "delivered" not in data("outbox_status")["topics"]["order.paid"]


def test_status_shows_only_the_topics_that_were_asked_for(one_of_each):
    found = data("outbox_status", "--topic", "billing.*")
    assert set(found["topics"]) == {"billing.charge"}
    assert found["total"]["dead"] == 1
    assert found["total"]["due"] == 0


def test_the_numbers_cost_four_queries_however_many_topics_there_are(one_of_each, django_assert_max_num_queries):
    for n in range(30):
        rows.message(topic=f"topic-{n}")
    with django_assert_max_num_queries(4):  # the clock, the counts, the dispatchers, the breakers
        assert len(overview("default").topics) == 34


def test_status_names_the_dispatchers():
    rows.dispatcher(name="host:1:aa", seen=3, in_flight=2, concurrency=10)
    rows.dispatcher(name="host:2:bb", lost_in=-5)
    assert [each["name"] for each in data("outbox_status")["dispatchers"]] == ["host:1:aa"]
    assert re.search(r"Dispatchers: host:1:aa \(2 of 10 slots, seen [34] s ago\)", run("outbox_status"))


def test_status_names_every_database_with_due_messages_and_no_dispatcher():
    """Semantics, Dispatcher: every alias that has outbox tables and due rows but no live dispatcher."""
    rows.dispatcher()
    rows.message(), rows.message(using="other")
    found = {each["name"]: each for each in data("outbox_status")["databases"]}
    assert not found["default"]["abandoned"]
    assert found["other"]["abandoned"]
    assert "Database 'other' has 1 due messages but no live dispatcher" in run("outbox_status")
    assert "abandoned is 1" in fails("outbox_status", "--fail-if", "abandoned>0", code=3)
    assert data("outbox_status", "--database", "other")["total"]["due"] == 1


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("dead>0", True),
        ("dead>2", False),
        ("dead >= 2", True),
        ("oldest>299", True),
        ("oldest>4.5m", True),
        ("oldest>1h", False),
        ("due>1000", False),
        ("due==4", True),
        ("due!=4", False),
        ("unroutable>0", True),
        ("dispatchers<1", True),
        ("in_flight<=0", False),
    ],
)
def test_status_fails_with_exit_code_3_when_a_condition_holds(one_of_each, condition, holds):
    if holds:
        assert condition in fails("outbox_status", "--fail-if", "dead>100", "--fail-if", condition, code=3)
    else:
        assert data("outbox_status", "--fail-if", condition)["breached"] == []


def test_status_prints_all_before_it_fails(one_of_each):
    out = io.StringIO()
    with pytest.raises(CommandError):
        call_command("outbox_status", "--fail-if", "dead>0", "--format", "json", stdout=out)
    assert json.loads(out.getvalue())["breached"] == ["dead>0"]


@pytest.mark.parametrize("condition", ["dead", "dead>", "dead>x", "lost>1", "dead~1", ""])
def test_status_refuses_a_condition_that_makes_no_sense(condition):
    with pytest.raises(CommandError, match="fail-if"):
        run("outbox_status", "--fail-if", condition)


def test_a_watch_on_a_topic_that_is_not_there_is_a_usage_error(one_of_each):
    """A monitor with a typo must not stay green for ever."""
    assert "nothing is watched" in fails("outbox_status", "--topic", "biling.*", "--fail-if", "dead>0", code=2)


def test_arguments_of_call_command_are_parsed_like_those_of_a_command_line(one_of_each):
    out = io.StringIO()
    with pytest.raises(CommandError, match="Threshold breached"):
        call_command("outbox_status", fail_if="dead>0", delivered_within="1h", stdout=out)
    call_command("outbox_requeue", since="1h", dry_run=True, stdout=out)
    with pytest.raises(CommandError, match="neither an age") as caught:
        call_command("outbox_requeue", since="soon", dry_run=True)
    assert caught.value.returncode == 2
    with pytest.raises(CommandError, match="choose from text, json"):
        call_command("outbox_status", format="xml")


def test_status_names_the_handlers_that_pause():
    rows.breaker("mail", since=120, probe_in=30.9, error_text="connection\nrefused")
    rows.breaker("sms", probe_in=-1)
    text = run("outbox_status")
    assert "Handler 'mail' pauses since" in text
    assert re.search(r"\(outbox.exceptions.Unavailable: connection refused\); the next probe is sent in \d+ s\.", text)
    assert "the next probe is sent with the next message." in text
    assert [each["handler"] for each in data("outbox_status")["breakers"]] == ["mail", "sms"]
    assert "breakers>1 (breakers is 2)" in fails("outbox_status", "--fail-if", "breakers>1", code=3)


def test_reset_closes_breakers():
    rows.breaker("mail"), rows.breaker("sms"), rows.breaker("fax")
    assert run("outbox_reset", "mail", "nope") == "Closed: mail.\nNot open: nope.\n"
    assert data("outbox_reset", "--all") == {"closed": ["fax", "sms"], "not_open": []}
    assert run("outbox_reset", "--all") == "No breaker is open.\n"
    assert not Breaker.objects.exists()


@pytest.mark.parametrize("arguments", [(), ("mail", "--all")], ids=str)
def test_reset_wants_to_be_told_which(arguments):
    assert "Say which" in fails("outbox_reset", *arguments, code=2)


def test_status_wants_a_period_for_a_condition_on_deliveries():
    assert "--delivered-within" in fails("outbox_status", "--fail-if", "delivered<1", code=2)
    assert "delivered is 0" in fails("outbox_status", "--fail-if", "delivered<1", "--delivered-within", "1h", code=3)


def test_exit_codes_of_a_real_process(spawn):
    """Exit codes: 0 ok, 1 error, 2 usage, 3 threshold."""
    calls = {
        0: ["outbox_status"],
        1: ["outbox_show", "999999"],
        2: ["outbox_status", "--fail-if", "nonsense"],
        3: ["outbox_status", "--fail-if", "dispatchers<1"],
    }
    processes = {code: spawn(*call) for code, call in calls.items()}
    for code, process in processes.items():
        assert process.wait(60) == code, process.output()
        assert "Traceback" not in process.output()


# --- requeue and discard ----------------------------------------------------------------------------------------------


def test_requeue_takes_ids_and_keys():
    by_id, by_key, other = rows.dead(), rows.dead(event_key="order:1:paid"), rows.dead()
    number = rows.dead(event_key="123456789")
    found = data("outbox_requeue", by_id.pk, "order:1:paid", "key:123456789", "--no-input")
    assert found == {"requeued": [by_id.pk, by_key.pk, number.pk], "skipped": {}}
    assert fresh(other).state == State.DEAD


def test_requeue_reports_what_it_did_not_do():
    """P13: true numbers."""
    dead, leased, delivered = rows.dead(), rows.leased(), rows.delivered()
    text = run("outbox_requeue", dead.pk, leased.pk, delivered.pk, "--no-input")
    assert text.splitlines() == [
        "Requeued 1 message.",
        "Skipped 2: 1 in flight, 1 delivered.",
        f"  {leased.pk}: in flight",
        f"  {delivered.pk}: delivered",
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--all"], {"old", "timeout", "billing", "crashed"}),
        (["--topic", "billing.*"], {"billing"}),
        (["--handler", "billing.charge"], {"billing"}),
        (["--error-type", "*.TimeoutError"], {"timeout"}),
        (["--error-code", "E7"], {"billing"}),
        (["--reason", "crashed"], {"crashed"}),
        (["--since", "1h"], {"timeout", "billing", "crashed"}),
        (["--until", "1h"], {"old"}),
        (["--since", "2020-01-01"], {"old", "timeout", "billing", "crashed"}),
        (["--since", "2020-01-01T00:00:00Z", "--until", "2020-01-02T00:00"], set()),
        (["--topic", "order.*", "--error-type", "*.TimeoutError"], {"timeout"}),
        (["--state", "discarded"], {"gone"}),
    ],
)
def test_requeue_takes_what_matches_a_filter(arguments, wanted):
    made = {
        "old": rows.dead(7200),
        "timeout": rows.dead(60, error_type="builtins.TimeoutError"),
        "billing": rows.dead(60, topic="billing.charge", error_code="E7"),
        "crashed": rows.dead(60, reason="crashed"),
        "gone": rows.discarded(60),
        "delivered": rows.delivered(60),
        "running": rows.leased(),
    }
    expected = sorted(made[name].pk for name in wanted)
    assert data("outbox_requeue", *arguments, "--dry-run")["matching"] == len(expected)
    assert data("outbox_requeue", *arguments, "--no-input")["requeued"] == expected


def test_a_dry_run_changes_nothing():
    rows.dead(), rows.dead(topic="billing.charge")
    assert data("outbox_requeue", "--all", "--dry-run") == {
        "matching": 2,
        "topics": {"billing.charge": 1, "order.paid": 1},
    }
    assert run("outbox_discard", "--all", "--dry-run").startswith("2 messages would be discarded.")
    assert Message.objects.dead().count() == 2


@pytest.mark.parametrize("arguments", [[], ["--no-input"], ["1", "--all"], ["1", "--topic", "x"]])
def test_requeue_wants_to_be_told_which(arguments):
    assert "which messages" in fails("outbox_requeue", *arguments, code=2)


@pytest.mark.parametrize("command", ["outbox_show", "outbox_explain", "outbox_requeue", "outbox_discard"])
@pytest.mark.parametrize("name", ["a\0b", "\udcff", "key:\udcff"], ids=ascii)
def test_a_name_that_no_message_can_have_is_not_found(command, name):
    assert "No message in database 'default'" in fails(command, name)


def test_a_pattern_that_matches_no_topic_is_told():
    rows.dead()
    assert run("outbox_status", "--topic", "biling.*").startswith("No topic matches.")


def test_requeue_names_all_that_do_not_exist():
    row = rows.dead()
    text = fails("outbox_requeue", row.pk, "nope", 10**30, "--no-input")
    assert "'nope', '1000000000000000000000000000000'" in text
    assert fresh(row).state == State.DEAD


@pytest.mark.parametrize(("answer", "done"), [("y", True), ("YES", True), ("n", False), ("", False), ("maybe", False)])
def test_requeue_asks_first(monkeypatch, answer, done):
    row = rows.dead()
    monkeypatch.setattr("builtins.input", lambda: answer)
    if done:
        run("outbox_requeue", row.pk)
    else:
        assert fails("outbox_requeue", row.pk) == "Nothing was changed."
    assert (fresh(row).state == State.PENDING) == done


def test_the_question_says_how_many_of_what(monkeypatch):
    rows.dead(), rows.dead(), rows.dead(topic="billing.charge")
    monkeypatch.setattr("builtins.input", lambda: "y")
    errors = io.StringIO()
    call_command("outbox_discard", "--all", stdout=io.StringIO(), stderr=errors)
    assert (
        "About to discard 3 messages in database 'default': 2 of order.paid, 1 of billing.charge." in errors.getvalue()
    )


def test_where_nobody_can_answer_nothing_is_changed(monkeypatch):
    def end_of_file():
        raise EOFError

    row = rows.dead()
    monkeypatch.setattr("builtins.input", end_of_file)
    assert "--no-input" in fails("outbox_discard", row.pk)
    assert fresh(row).state == State.DEAD


def test_the_operating_systems_user_is_recorded(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "anna")
    run("outbox_requeue", rows.dead().pk, "--no-input", "--note", "gateway is back")
    found = Intervention.objects.get()
    assert (found.actor, found.note, found.verb) == ("anna", "gateway is back", "requeue")


def test_a_user_without_a_name_is_recorded_too(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    run("outbox_discard", rows.dead().pk, "--no-input")
    assert Intervention.objects.get().actor.startswith("uid ")


def test_discard_takes_pending_messages_only_when_told():
    pending, dead, leased = rows.retrying(), rows.dead(), rows.leased()
    assert data("outbox_discard", "--all", "--no-input")["discarded"] == [dead.pk]
    found = data("outbox_discard", "--state", "pending", "--no-input")
    assert found == {"discarded": [pending.pk], "skipped": {str(leased.pk): "in flight"}}


@pytest.mark.slow
def test_five_thousand_messages_are_requeued_in_bounded_batches():
    """Scenario 42: on every database, without a sliced subquery."""
    row = rows.dead()
    template = {field.attname: getattr(row, field.attname) for field in Message._meta.concrete_fields}
    del template["id"], template["event_key"]
    Message.objects.bulk_create((Message(event_key=f"bulk-{n}", **template) for n in range(4999)), batch_size=500)
    assert run("outbox_requeue", "--all", "--no-input") == "Requeued 5,000 messages.\n"
    assert Message.objects.due().filter(spent=0).count() == 5000
    assert Intervention.objects.count() == 5000


def test_an_interrupted_requeue_reports_what_it_did(monkeypatch):
    monkeypatch.setattr("outbox.management.bulk.BATCH", 2)
    ids = [rows.dead().pk for _ in range(4)]
    operations = iter([True, False])

    def interrupted(using, batch, **kwargs):
        if not next(operations):
            raise KeyboardInterrupt
        return requeue(using, batch, **kwargs)

    monkeypatch.setattr("outbox.management.commands.outbox_requeue.Command.operate", staticmethod(interrupted))
    out = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("outbox_requeue", "--all", "--no-input", stdout=out)
    assert caught.value.returncode == 130
    assert out.getvalue() == "Requeued 2 messages.\n"
    assert set(Message.objects.due().values_list("pk", flat=True)) == set(ids[:2])


# --- show and explain -------------------------------------------------------------------------------------------------


def test_show_prints_the_payload_with_exact_digits():
    """Scenario 13."""
    payload = {"id": 1970670598291982290, "h": 2**70, "amount": "129.00", "name": "résumé"}
    row = rows.message(payload=payload, headers={"trace": "4bf9"})
    (found,) = data("outbox_show", row.pk)
    assert found["payload"] == payload
    assert found["headers"] == {"trace": "4bf9"}
    text = run("outbox_show", row.pk)
    for part in ("1970670598291982290", "1180591620717411303424", '"129.00"', "résumé", '"trace": "4bf9"'):
        assert part in text


@pytest.mark.parametrize("payload", [None, "", 0, False, [], {}])
def test_show_tells_an_empty_payload_from_a_pruned_one(payload):
    row = rows.message(payload=JsonText(json.dumps(payload)))
    assert data("outbox_show", row.pk)[0]["payload"] == payload
    assert f"payload\n{json.dumps(payload)}\n" in run("outbox_show", row.pk)
    pruned = rows.delivered(payload=None, headers=None, payload_pruned=True)
    assert "payload\npruned\n" in run("outbox_show", pruned.pk)


def test_show_prints_a_document_that_is_no_json():
    """Rows written by hand are looked at with the same command."""
    row = rows.message(payload=JsonText("<xml/>"))
    assert data("outbox_show", row.pk)[0]["payload"] == "<xml/>"
    assert '"<xml/>"' in run("outbox_show", row.pk)


def test_show_prints_attempts_and_interventions():
    row = rows.dead(event_key="order:1")
    Attempt.objects.create(
        message=row,
        number=1,
        outcome="failed",
        worker="host:1:aa",
        started_at=rows.ago(70),
        ended_at=rows.ago(60),
        error_type="builtins.ValueError",
        error_text="no such customer",
        traceback='Traceback:\n  File "x.py", line 1\nValueError: no such customer\n',
    )
    Intervention.objects.create(message=row, verb="requeue", actor="anna", note="gateway is back", at=rows.ago(30))
    (found,) = data("outbox_show", "order:1")
    assert found["attempts"][0]["number"] == 1
    assert found["attempts"][0]["traceback"].startswith("Traceback:\n")
    assert found["interventions"][0]["actor"] == "anna"
    assert found["explanation"].startswith(f"Message {row.pk} is dead since ")
    text = run("outbox_show", "order:1")
    assert "attempt 1: failed" in text
    assert 'traceback   Traceback:\n              File "x.py", line 1\n            ValueError' in text
    assert "requeue by anna: gateway is back" in text


def test_show_takes_a_key_of_several_handlers():
    first, second = (rows.message(event_key="order:1", position=n) for n in (0, 1))
    assert [each["id"] for each in data("outbox_show", "order:1")] == [first.pk, second.pk]


def test_hostile_content_cannot_reach_the_terminal():
    hostile = "\x1b[2J\x9b31m‮evil"
    row = rows.dead(event_key="order:1", payload={hostile: hostile}, headers={"h": hostile}, error_text=hostile)
    Attempt.objects.create(
        message=row,
        number=1,
        outcome="failed",
        worker=hostile,
        ended_at=rows.now(),
        error_text=hostile,
        traceback=hostile,
    )
    Intervention.objects.create(message=row, verb="requeue", actor=hostile, note=hostile, at=rows.now())
    for text in (run("outbox_show", row.pk), run("outbox_explain", row.pk)):
        assert not set(text) & set("\x1b\x9b‮")
    assert data("outbox_show", row.pk)[0]["payload"] == {hostile: hostile}


def test_explain_prints_one_sentence_per_message():
    first, second = rows.dead(), rows.parked(LANE)
    lines = run("outbox_explain", first.pk, second.pk).splitlines()
    assert [line.split()[1] for line in lines] == [str(first.pk), str(second.pk)]
    found = data("outbox_explain", first.pk, second.pk)
    assert [(each["id"], each["code"]) for each in found] == [(first.pk, "dead"), (second.pk, "stranded")]
    assert [each["text"] for each in found] == lines


@pytest.mark.parametrize("command", ["outbox_show", "outbox_explain"])
def test_a_message_that_does_not_exist_is_an_error(command):
    assert "'999999999'" in fails(command, "999999999")
    assert "key:123" in fails(command, "no-such-key")


# --- prune and topics -------------------------------------------------------------------------------------------------


def test_prune_takes_ages_and_prints_counts(monkeypatch):
    """Scenario 48: counts printed, and a dry run."""
    monkeypatch.setattr(retention._Run, "rest", lambda run, seconds: None)
    rows.delivered(3 * 86400), rows.delivered(10 * 86400), rows.dead(10 * 86400)
    arguments = ["outbox_prune", "--payloads-after", "2d", "--after", "168h", "--dead-after", "604800"]
    expected = {
        "busy": 0,
        "breakers": 0,
        "payloads": 1,
        "delivered": 1,
        "discarded": 0,
        "dead": 1,
        "orphans": 0,
        "dispatchers": 0,
    }
    assert data(*arguments, "--dry-run") == {"dry_run": True, **expected}
    assert Message.objects.count() == 3
    assert run(*arguments).splitlines() == [
        "Pruned:",
        "  1  payloads of delivered messages",
        "  1  delivered messages",
        "  1  dead messages",
    ]
    assert run(*arguments) == "Nothing is old enough to be pruned.\n"


def test_prune_leaves_the_dead_unless_told():
    """Invariant 13."""
    rows.dead(4000 * 86400)
    assert data("outbox_prune", "--after", "1s", "--payloads-after", "1s")["dead"] == 0


@pytest.mark.parametrize("age", ["-1", "soon", "1w", "1e5", "", "99999999999d"])
def test_an_age_that_makes_no_sense_is_refused(age):
    with pytest.raises(CommandError, match=r"duration|expected one argument|century"):
        run("outbox_prune", "--after", age)


def test_topics_lists_handlers_and_their_policy():
    found = {each["topic"]: each for each in data("outbox_topics")}
    (paid,) = found["order.paid"]["handlers"]
    assert (paid["max_attempts"], paid["timeout"], paid["ordering"], paid["atomic"]) == (8, 30.0, "key", False)
    assert paid["backoff"] == {"base": 5.0, "factor": 2.0, "cap": 3600.0, "jitter": True}
    assert found["order.returned"] == {"topic": "order.returned", "required": True, "description": "", "handlers": []}
    text = run("outbox_topics")
    assert re.search(
        r"^billing\.charge +billing\.charge +20 +5 s × 2, at most 3600 s .* block +atomic$", text, re.MULTILINE
    )
    assert "order.returned: no handler, its messages wait." in text


def test_topics_says_so_when_there_are_none():
    with registry.isolated():
        assert "No topic is declared." in run("outbox_topics")
        assert data("outbox_topics") == []


# --- databases --------------------------------------------------------------------------------------------------------


class ReplicaRouter:
    """Reads go to a replica that holds nothing."""

    def db_for_read(self, model, **hints):
        return "other"

    def db_for_write(self, model, **hints):
        return "default"


def test_a_replica_is_never_asked(settings, monkeypatch):
    """Scenario 38: every command sees what the write database holds."""
    settings.DATABASE_ROUTERS = [ReplicaRouter()]
    monkeypatch.setattr(retention._Run, "rest", lambda run, seconds: None)
    row, old = rows.dead(), rows.delivered(31 * 86400)
    for each in (row, old):
        Attempt.objects.create(message_id=each.pk, number=1, outcome="failed", ended_at=rows.now())
        Intervention.objects.create(message_id=each.pk, verb="requeue", actor="anna", at=rows.now())
    assert data("outbox_status")["total"]["dead"] == 1
    (shown,) = data("outbox_show", row.event_key)
    assert (len(shown["attempts"]), len(shown["interventions"])) == (1, 1)
    assert data("outbox_explain", row.pk)[0]["code"] == "dead"
    assert data("outbox_prune")["delivered"] == 1
    assert not Attempt.objects.using("default").filter(message_id=old.pk).exists()
    assert data("outbox_requeue", "--all", "--no-input")["requeued"] == [row.pk]
    assert data("outbox_discard", "--state", "pending", "--no-input")["discarded"] == [row.pk]


def test_every_command_works_on_the_database_that_is_named():
    row = rows.dead(using="other")
    database = ["--database", "other"]
    assert data("outbox_status", *database)["total"]["dead"] == 1
    assert data("outbox_show", row.pk, *database)[0]["id"] == row.pk
    assert data("outbox_explain", row.pk, *database)[0]["code"] == "dead"
    assert data("outbox_requeue", row.pk, "--no-input", *database)["requeued"] == [row.pk]
    assert data("outbox_discard", row.pk, "--no-input", *database)["discarded"] == [row.pk]
    assert data("outbox_prune", *database)["dry_run"] is False
    assert Message.objects.using("default").count() == 0


# --- all commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["outbox_status"],
        ["outbox_topics"],
        ["outbox_prune"],
        ["outbox_requeue", "--all", "--no-input"],
        ["outbox_discard", "--all", "--no-input"],
    ],
)
def test_json_is_all_that_is_printed(arguments):
    rows.dead()
    json.loads(run(*arguments, "--format", "json"))


def test_an_unknown_database_is_a_usage_error():
    with pytest.raises(CommandError, match="nowhere"):
        run("outbox_status", "--database", "nowhere")


def test_a_database_without_tables_is_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr(Message._meta, "db_table", "no_such_table")
    assert "was it migrated?" in fails("outbox_explain", "1")


def test_terminals_get_colour_and_files_do_not(monkeypatch):
    rows.dead()
    terminal = Terminal()
    call_command("outbox_requeue", "--all", "--no-input", "--force-color", stdout=terminal)
    assert "\x1b[" in terminal.getvalue()
    rows.dead()
    assert "\x1b[" not in run("outbox_requeue", "--all", "--no-input")


def test_long_work_shows_a_bar_on_a_terminals_stderr(monkeypatch):
    monkeypatch.setattr("outbox.management.printing.REDRAW", 0)
    for _ in range(3):
        rows.dead()
    terminal, out = Terminal(), io.StringIO()
    call_command("outbox_requeue", "--all", "--no-input", stdout=out, stderr=terminal)
    assert "Requeue [##############################] 3 of 3" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K"), "the bar is removed in the end"
    assert "\n" not in terminal.getvalue()
    assert out.getvalue() == "Requeued 3 messages.\n"


def test_a_bar_of_unknown_length_counts(monkeypatch):
    monkeypatch.setattr("outbox.management.printing.REDRAW", 0)
    written = []
    bar = Progress(written.append, "Pruning")
    bar.add(1500)
    assert written == ["\rPruning 1,500\x1b[K"]


def test_columns_are_as_wide_as_their_widest_cell():
    assert table(["name", "n"], [["a", 1], ["longer", 1000]], left=["name"]) == [
        "name       n",
        "a          1",
        "longer  1000",
    ]


def test_facts_hang_their_further_lines():
    assert facts([("a", "x"), ("none", None), ("long", "1\n2")]) == ["a     x", "long  1\n      2"]
