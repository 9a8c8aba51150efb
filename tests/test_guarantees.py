"""The guarantees page promises nothing without a test, and what no other module proves is proven here."""

import ast
import re
import threading
from datetime import timedelta
from functools import cache

import pytest
from django.db import transaction

from outbox import Retry, handler, retention, stage, stage_many
from outbox.intents import Intent
from outbox.models import Message
from tests import rows
from tests.documents import ROOT, page
from tests.documents import rows as table_rows
from tests.running import dispatching, drain, fresh, put, settled
from tests.testapp.models import Order
from tests.waiting import wait_until

PAGE = page("docs/explanation/guarantees.md")
PROMISING = ["What is promised", "By database and isolation level"]
INVARIANTS = [
    "Atomic",
    "Staging never harms the caller",
    "A commit hook is only a hint",
    "A claim is one short transaction",
    "Crashes count",
    "Renewal does not starve",
    "Lane order",
    "Failures are bounded and isolated",
    "Success is durable",
    "Shutdown is release",
    "Loops cannot die silently",
    "Wake-ups are only speed",
    "Dead is kept",
    "Pruning is gentle",
]
LINK = re.compile(r"\[`(tests/[\w/]+\.py)::(\w+)`\]\(((?:\.\./)*)(tests/[\w/]+\.py)\)")
PROMISE = re.compile(r"\b(never|always|guaranteed?|each message is|nothing is lost|no message)\b", re.IGNORECASE)


# --- the page ---------------------------------------------------------------------------------------------------------


@cache
def names_in(path):
    """Names of the tests that pytest collects from a file, without their parameters."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        found |= {each.name for each in members if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in found if name.startswith("test_")}


def linked():
    return sorted({(path, name) for path, name, _, _ in LINK.findall(PAGE.text)})


def items(text):
    """The entries of all lists."""
    return re.findall(r"^- (.+?)(?=^- |^#|^\n|\Z)", text, re.MULTILINE | re.DOTALL)


def paragraphs(text):
    """What stands outside of lists, tables and headings."""
    blocks = re.split(r"\n{2,}", text)
    return [each for each in blocks if each.strip() and not re.match(r"(- |\||#)", each.strip())]


@pytest.mark.parametrize(("path", "name"), [pytest.param(*each, id="::".join(each)) for each in linked()])
def test_every_test_that_the_page_links_to_exists(path, name):
    assert name in names_in(path)


def test_every_link_leads_to_the_file_of_its_test():
    assert len(LINK.findall(PAGE.text)) > 150
    for path, name, up, target in LINK.findall(PAGE.text):
        assert path == target, name
        assert (PAGE.path.parent / up / target).resolve() == ROOT / path
    assert len(re.findall(r"`tests/", PAGE.text)) == len(LINK.findall(PAGE.text))  # none in another form


def test_every_invariant_of_the_design_has_its_heading():
    headings = re.findall(r"^### (\d+)\. (.+)$", PAGE.section("What is promised"), re.MULTILINE)
    assert headings == [(str(number), name) for number, name in enumerate(INVARIANTS, 1)]
    for number, name in headings:
        assert items(PAGE.section(f"{number}. {name}", level=3)), name


@pytest.mark.parametrize("heading", PROMISING)
def test_every_promise_is_one_sentence_with_its_tests(heading):
    for item in items(PAGE.section(heading)):
        assert LINK.search(item), item
        sentence = " ".join(LINK.sub("", item).replace("\\\n", "\n").split())
        assert sentence.endswith("."), sentence
        assert not re.search(r"[.!?] [A-Z`]", sentence), f"two sentences share their tests: {sentence}"


def test_every_row_of_a_table_ends_with_its_tests():
    found = table_rows(PAGE.section("By database and isolation level"))
    assert [row[0] for row in found] == ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
    assert all(LINK.search(row[-1]) for row in found)


def test_nothing_else_on_the_page_promises():
    """What is not in a list of promises only leads up to one, or says what is not promised, or what to do."""
    for heading in PROMISING:
        for each in paragraphs(PAGE.section(heading)):
            assert not PROMISE.search(each), each
    rest = [PAGE.section("What is not promised"), PAGE.section("What you must do")]
    for sentence in re.split(r"(?<=[.:])\s+", " ".join(rest)):
        assert not PROMISE.search(sentence) or "Exactly once." in sentence, sentence


# --- what no other module proves --------------------------------------------------------------------------------------


def transactional(test):
    return pytest.mark.django_db(transaction=True)(pytest.mark.usefixtures("outbox_registry")(test))


@transactional
def test_an_atomic_handler_longer_than_its_lease_runs_once_beside_a_second_dispatcher(database_kind):
    """On SQLite it holds the write lock: it cannot be renewed, but nobody else can claim."""
    entered, leave, runs = threading.Event(), threading.Event(), []

    @handler("order.paid", atomic=True)
    def place(message):
        Order.objects.create(reference=message.event_key)
        entered.set()
        wait_until(lambda: message.lease.lost or leave.is_set())
        runs.append(message.lease.lost)

    row = put("order.paid")
    with dispatching(lease=1.0), dispatching(lease=1.0):
        assert entered.wait(30)
        if database_kind != "sqlite":
            begun = fresh(row).due_at
            wait_until(lambda: fresh(row).due_at > begun + timedelta(seconds=1))
            leave.set()
        wait_until(lambda: settled(row))
    assert runs == [database_kind == "sqlite"]
    assert (fresh(row).state, fresh(row).attempt) == ("delivered", 1)
    assert Order.objects.count() == 1


@transactional
def test_within_a_transaction_a_lane_has_the_order_of_staging():
    seen = []
    handler("order.paid")(lambda message: seen.append(message.payload))
    with transaction.atomic():
        stage("order.paid", 1, ordering_key="lane", event_key="z")
        stage_many([Intent("order.paid", n, ordering_key="lane", event_key=f"k{9 - n}") for n in (2, 3)])
        with transaction.atomic():
            stage("order.paid", 4, ordering_key="lane", event_key="a")
    drain()
    assert seen == [1, 2, 3, 4]


@transactional
def test_a_dead_message_that_blocks_its_lane_is_not_pruned():
    blocking, free = rows.dead(age=10_000, lane=7), rows.dead(age=10_000)
    assert retention.prune("default", dead_after=60).dead == 1
    assert fresh(blocking).state == "dead"
    assert not Message.objects.filter(pk=free.pk).exists()


@transactional
def test_a_key_is_new_again_once_its_row_was_pruned():
    handler("order.paid")(lambda message: None)
    first = put("order.paid", event_key="k")
    drain()
    Message.objects.filter(pk=first.pk).update(settled_at=rows.ago(1000))
    assert retention.prune("default", payloads_after=60, after=5000).payloads == 1
    assert put("order.paid", event_key="k") == first
    assert retention.prune("default", after=60).delivered == 1
    assert put("order.paid", event_key="k") != first


@transactional
def test_every_attempt_and_every_handler_sees_the_same_key_and_a_higher_number():
    seen = {"one": [], "two": []}
    for name, runs in seen.items():

        @handler("order.paid", name=name)
        def deliver(message, runs=runs):
            runs.append((message.event_key, message.attempt))
            if message.attempt < 3:
                raise Retry(after=0)

    put("order.paid", event_key="k")
    drain()
    assert seen["one"] == seen["two"] == [("k", 1), ("k", 2), ("k", 3)]
