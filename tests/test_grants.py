"""Least privilege: the statements of docs/howto/permissions.md, on real roles, under the real code."""

import asyncio
import logging
import re
import threading
from contextlib import contextmanager
from functools import partial
from io import StringIO
from itertools import product

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command
from django.db import Error, connection, connections, transaction
from django.test import RequestFactory, override_settings

from outbox import (
    Bury,
    EventKeyConflict,
    Intent,
    RetryPolicy,
    Unavailable,
    astage,
    handler,
    operations,
    retention,
    stage,
    stage_many,
)
from outbox.database import code_of
from outbox.handlers import registry
from outbox.leases import claim
from outbox.models import Attempt, Breaker, Dispatcher, Intervention, Message
from tests import rows
from tests.documents import page
from tests.running import dispatching, drain, fresh, put, settled
from tests.testapp.models import Order
from tests.waiting import wait_until

PAGE = page("docs/howto/permissions.md")
PASSWORD = "a-Passw0rd"
DENIED = {"42501", 1142, 1143, 1044}  # PostgreSQL; MariaDB: no right to the table, to a column, to the database
TABLES = [model._meta.db_table for model in (Message, Attempt, Intervention, Dispatcher, Breaker)]
ROLES = {
    "stage": ("shop_web", "Stage only"),
    "immediate": ("shop_web", "Stage and deliver immediately"),
    "dispatch": ("shop_dispatcher", "Dispatch only"),
    "count": ("shop_monitor", "Count only"),
    "read": ("shop_reader", "Read only"),
    "operate": ("shop_operator", "Operate"),
}

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.skipif(connections["default"].vendor == "sqlite", reason="SQLite has no roles"),
]


# --- roles ------------------------------------------------------------------------------------------------------------


def statements(heading):
    """The GRANTs that the page gives for this kind of database."""
    kinds = {"-- PostgreSQL": "postgresql", "-- MariaDB, MySQL": "mysql"}
    blocks = re.findall(r"```sql\n(-- [^\n]+)\n(.*?)```", PAGE.section(heading), re.DOTALL)
    found = {kinds[title]: [each.strip() for each in body.split(";") if each.strip()] for title, body in blocks}
    assert set(found) == set(kinds.values())
    return found[connection.vendor]


def sql(text):
    with connection.cursor() as cursor:
        cursor.execute(text)


def create(role):
    """A login of this name without any right."""
    if connection.vendor == "postgresql":
        sql(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    else:
        sql(f"CREATE USER '{role}'@'%' IDENTIFIED BY '{PASSWORD}'")


def drop(role):
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
            if cursor.fetchone():
                cursor.execute(f"DROP OWNED BY {role}")
                cursor.execute(f"DROP ROLE {role}")
    else:
        sql(f"DROP USER IF EXISTS '{role}'@'%'")


def name_of(purpose):
    """Roles belong to the whole server: each run has its own."""
    return re.sub(r"\W", "_", f"{settings.DATABASES['default']['TEST']['NAME']}_{purpose}")


@contextmanager
def role(purpose, *, without=None):
    """Work as a role that has the rights of its section in the page, and those to the tables of the business.

    ``without``: a right and a table, taken away again.
    """
    name = name_of(purpose)
    database = connection.settings_dict["NAME"]
    given, heading = ROLES[purpose]
    drop(name)
    create(name)
    orders = statements(heading)
    if without:
        host = "@'%'" if connection.vendor == "mysql" else ""
        right, table = without
        orders.append(f"REVOKE {right} ON {table} FROM {repr(given) if host else given}{host}")
    for order in orders:
        sql(re.sub(r"\bshop\.", f"`{database}`.", order.replace(given, name)))
    shop = Order._meta.db_table
    if connection.vendor == "postgresql":
        sql(f"GRANT ALL ON {shop} TO {name}")
    else:
        sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.{shop} TO '{name}'@'%'")
    owner = {key: connection.settings_dict[key] for key in ("USER", "PASSWORD")}
    become({"USER": name, "PASSWORD": PASSWORD})
    try:
        yield
    finally:
        become(owner)
        drop(name)


def become(login):
    connection.close()
    connection.settings_dict.update(login)


def is_denied(error):
    return code_of(error) in DENIED


@pytest.fixture(autouse=True)
def handlers():
    with registry.isolated():

        @handler("order.paid")
        def delivers(message):
            Order.objects.count()

        @handler("order.paid", name="second")
        def delivers_too(message):
            pass

        @handler("order.shipped", retry=RetryPolicy(base=600, jitter=False))
        def fails(message):
            raise ValueError("no such order")

        @handler("order.refused")
        def buries(message):
            raise Bury("never")

        yield


# --- what each may do -------------------------------------------------------------------------------------------------


async def stage_elsewhere():
    """In the thread that asgiref keeps for this: its connection must be one of the role's."""
    await sync_to_async(connections.close_all)()
    await astage("order.paid", {})
    await sync_to_async(connections.close_all)()


def stages(act):
    with act:
        with transaction.atomic():
            Order.objects.create(reference="1")
            first = stage("order.paid", {"n": 1}, event_key="k", ordering_key="lane", headers={"trace": "t"})
        with transaction.atomic():
            again = stage("order.paid", {"n": 1}, event_key="k", ordering_key="lane")
        with transaction.atomic(), pytest.raises(EventKeyConflict):
            stage("order.paid", {"n": 2}, event_key="k", ordering_key="lane")
        with transaction.atomic():
            many = stage_many(
                [Intent("order.paid", {"n": n}, event_key=f"k{n}", ordering_key="lane") for n in range(9)]
            )
            stage("order.paid", {"long": "x" * 600_000})
        asyncio.run(stage_elsewhere())
    assert (first.created, again.created, again.ids) == (True, False, first.ids)
    assert all(each.created for each in many)
    assert Message.objects.count() == 2 * (1 + 9 + 1 + 1)


def stages_under_repeatable_read(act):
    put("order.paid", {"n": 1}, event_key="k")
    level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    with act:
        if connection.vendor == "mysql":
            sql(level)
        with transaction.atomic():
            if connection.vendor == "postgresql":
                sql(level)
            assert not stage("order.paid", {"n": 1}, event_key="k").created


def delivers_immediately(act):
    with act:
        for topic in ("order.paid", "order.shipped", "order.refused"):
            with transaction.atomic():
                stage(topic, {"n": 1}, deliver_now=True)
        with transaction.atomic():
            stage("order.paid", {"n": 1}, deliver_now=True, ordering_key="lane")
    assert Message.objects.delivered().count() == 4
    assert Message.objects.dead().count() == 1
    assert Attempt.objects.filter(outcome="buried").exists()


def dispatches(act):
    put("order.paid", count=3)
    put("order.paid", count=5, ordering_key="lane")
    put("order.refused", count=2, ordering_key="lane")
    failing = put("order.shipped")
    lapsed = [rows.lapsed(topic="order.paid", lapses=n, attempt=3, spent=3) for n in range(3)]
    expired = rows.message(expires_at=rows.ago(5))
    with act:
        call_command("outbox_dispatch", once=True, stdout=StringIO(), stderr=StringIO())
        dispatcher = drain()
        with dispatching():
            wait_until(lambda: settled(*lapsed[:1], expired))
            wait_until(Dispatcher.objects.exists)
    assert not dispatcher.failure
    assert Message.objects.delivered().count() >= 16
    assert Message.objects.dead().count() == 2
    assert fresh(failing).spent == 1
    assert Attempt.objects.filter(outcome="crashed").exists()
    assert not Dispatcher.objects.exists()


def opens_and_closes_breakers(act):
    away = threading.Event()
    away.set()

    @handler("order.told", retry=RetryPolicy(base=0.01, jitter=False))
    def tells(message):
        if away.is_set():
            raise Unavailable("no")

    told = put("order.told", count=4)
    with act, override_settings(OUTBOX={"BREAKER_PAUSE": 0.1, "BREAKER_PAUSE_CAP": 0.1}), dispatching():
        wait_until(Breaker.objects.exists)
        away.clear()
        wait_until(lambda: settled(*told))
    assert not Breaker.objects.exists()


def prunes(act):
    year = 365 * 86400
    old, dead, young = rows.delivered(age=year), rows.dead(age=year), rows.delivered(age=8 * 86400)
    operations.requeue("default", [dead.pk])
    Message.objects.filter(pk=dead.pk).update(state="dead", settled_at=rows.ago(year), due_at=None, lane=None)
    for message_id in (old.pk, 10**9):
        Attempt.objects.create(message_id=message_id, number=1, outcome="failed", ended_at=rows.ago(1))
        Intervention.objects.create(message_id=message_id, verb="discard", at=rows.ago(1))
    rows.dispatcher(lost_in=-2 * 86400)
    rows.breaker(probe_in=-9 * 86400)
    rows.parked(7)
    with act:
        pruned = retention.prune("default", dead_after=86400)
        woken = retention.sweep("default")
    assert (pruned.delivered, pruned.dead, pruned.payloads, pruned.orphans) == (1, 1, 1, 2)
    assert (pruned.dispatchers, pruned.breakers, woken) == (1, 1, 1)
    assert list(Message.objects.delivered()) == [young]


def counts(act):
    rows.dead()
    rows.delivered(age=10)
    rows.message()
    rows.dispatcher()
    rows.breaker()
    conditions = [[], ["delivered>5"], ["oldest>1000"]]
    with act:
        for form in ("text", "json"):
            for fail_if in conditions:
                options = {"format": form, "delivered_within": 3600, "fail_if": fail_if}
                call_command("outbox_status", stdout=StringIO(), **options)


def reads(act):
    dead, waiting = rows.dead(), rows.parked(7)
    Attempt.objects.create(message=dead, number=1, outcome="failed", ended_at=rows.ago(1))
    Intervention.objects.create(message=dead, verb="requeue", at=rows.ago(1))
    rows.message(lane=7)
    rows.dispatcher()
    rows.breaker()
    with act:
        for form in ("text", "json"):
            call_command("outbox_status", format=form, stdout=StringIO())
            call_command("outbox_topics", format=form, stdout=StringIO())
            call_command("outbox_explain", str(dead.pk), str(waiting.pk), format=form, stdout=StringIO())
            call_command("outbox_show", str(dead.pk), str(waiting.pk), format=form, stdout=StringIO())
        call_command("check", databases=["default"])


def looks_at_the_admin(act):
    """As the pages are built: who asks, and the session, are tables of the project."""
    dead, waiting = rows.dead(), rows.parked(7)
    rows.message(lane=7)
    attempt = Attempt.objects.create(message=dead, number=1, outcome="failed", ended_at=rows.ago(1))
    dispatcher, breaker = rows.dispatcher(), rows.breaker()
    request = RequestFactory().get("/")
    ContentType.objects.get_for_models(*(type(each) for each in (dead, attempt, dispatcher, breaker)))  # remembered
    request.user = User(username="root", is_superuser=True, is_active=True, is_staff=True)
    with act:
        for shown in (dead, waiting, attempt, dispatcher, breaker):
            pages = admin.site.get_model_admin(type(shown))
            assert pages.change_view(request, str(shown.pk)).render().status_code == 200
            assert pages.changelist_view(request).render().status_code == 200


def operates(act):
    dead, due, retrying = rows.dead(), rows.message(lane=7), rows.retrying()
    follower = rows.parked(7)
    rows.breaker("order.paid")
    with act:
        call_command("outbox_requeue", str(dead.pk), no_input=True, stdout=StringIO())
        call_command("outbox_discard", str(due.pk), no_input=True, stdout=StringIO())
        call_command("outbox_reset", "order.paid", stdout=StringIO())
        operations.make_due("default", [retrying.pk], actor="anna")
        call_command("outbox_status", stdout=StringIO())
    assert (fresh(dead).state, fresh(due).state) == ("pending", "discarded")
    assert fresh(follower).due_at is not None
    assert Intervention.objects.count() == 3
    assert not Breaker.objects.exists()


MAY = [
    ("stage", stages),
    ("stage", stages_under_repeatable_read),
    ("immediate", stages),
    ("immediate", delivers_immediately),
    ("dispatch", dispatches),
    ("dispatch", opens_and_closes_breakers),
    ("dispatch", prunes),
    ("dispatch", reads),
    ("count", counts),
    ("read", counts),
    ("read", reads),
    ("read", looks_at_the_admin),
    ("operate", operates),
    ("operate", reads),
    ("operate", looks_at_the_admin),
]


@pytest.mark.parametrize(("purpose", "work"), [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in MAY])
def test_a_role_may_do_what_it_is_for(purpose, work):
    work(role(purpose))


# --- what each may not ------------------------------------------------------------------------------------------------


def statement(text):
    def attempt():
        sql(text)

    return attempt


def staging():
    stage("order.paid", {"n": 1})


def claiming():
    assert claim(using="default", worker="w", seconds=60, limit=5)


def requeueing():
    operations.requeue("default", list(Message.objects.dead().values_list("pk", flat=True)))


def registering():
    Dispatcher.objects.create(name="x", started_at=rows.ago(1), seen_at=rows.ago(1), lost_at=rows.ahead(1))


EVERYTHING = {
    "stage": staging,
    "claim": claiming,
    "requeue": requeueing,
    "register": registering,
    "read keys": statement("SELECT event_key FROM outbox_message"),
    "read payloads": statement("SELECT payload FROM outbox_message"),
    "read headers": statement("SELECT headers FROM outbox_message"),
    "change a message": statement("UPDATE outbox_message SET state = 'delivered'"),
    "change a payload": statement("UPDATE outbox_message SET payload = NULL"),
    "delete messages": statement("DELETE FROM outbox_message"),
    "read attempts": statement("SELECT * FROM outbox_attempt"),
    "forge an attempt": statement(
        "INSERT INTO outbox_attempt (message_id, number, outcome, worker, ended_at, error_type, error_code, "
        "error_text, traceback) VALUES (1, 1, 'failed', '', 0, '', '', '', '')"
    ),
    "change attempts": statement("UPDATE outbox_attempt SET error_text = ''"),
    "delete attempts": statement("DELETE FROM outbox_attempt"),
    "forge an intervention": statement(
        "INSERT INTO outbox_intervention (message_id, verb, actor, note, at) VALUES (1, 'requeue', 'anna', '', 0)"
    ),
    "change interventions": statement("UPDATE outbox_intervention SET actor = ''"),
    "delete interventions": statement("DELETE FROM outbox_intervention"),
    "close a breaker": statement("DELETE FROM outbox_breaker"),
    "empty the table": statement("TRUNCATE TABLE outbox_message"),
    "drop the table": statement("DROP TABLE outbox_message"),
    "alter the table": statement("ALTER TABLE outbox_message ADD COLUMN x integer"),
    "read users": statement("SELECT password FROM auth_user"),
}
PERMITTED = {
    "stage": {"stage", "read keys", *(("read payloads", "read headers") if connection.vendor == "mysql" else ())},
    "immediate": {
        *("stage", "claim", "read keys", "read payloads", "read headers", "change a message", "change a payload"),
        *("forge an attempt", "read attempts"),
    },
    "dispatch": {
        *("claim", "register", "read keys", "read payloads", "read headers", "change a message", "change a payload"),
        *("delete messages", "read attempts", "forge an attempt", "delete attempts", "delete interventions"),
        "close a breaker",
    },
    "count": set(),
    "read": {"read keys", "read payloads", "read headers", "read attempts"},
    "operate": {
        *("requeue", "claim", "read keys", "read payloads", "read headers", "change a message", "change a payload"),
        *("read attempts", "forge an intervention", "close a breaker"),
    },
}


@pytest.mark.parametrize("purpose", ROLES)
def test_a_role_is_refused_everything_else(purpose):
    rows.dead()
    rows.message()
    wrong = {}
    with role(purpose):
        for what, attempt in EVERYTHING.items():
            if what in PERMITTED[purpose]:
                continue
            try:
                with transaction.atomic():
                    attempt()
            except Error as error:
                if not is_denied(error):
                    wrong[what] = error
            else:
                wrong[what] = "was not refused"
    assert wrong == {}


@pytest.mark.slow  # what lacks a right is waited for in vain
@pytest.mark.parametrize("purpose", ROLES)
def test_every_right_of_the_page_is_needed(purpose, monkeypatch):
    monkeypatch.setitem(globals(), "wait_until", partial(wait_until, seconds=5))
    works = [work for each, work in MAY if each == purpose]
    needless = []
    for right, table in rights(purpose):
        for work in works:
            empty()
            try:
                work(role(purpose, without=(right, table)))
            except (AssertionError, Error, CommandError):
                break
        else:
            needless.append((right, table))
    assert needless == []


def empty():
    for model in (Attempt, Intervention, Message, Dispatcher, Breaker, Order):
        model.objects.all().delete()


def rights(purpose):
    """Each right that a section grants: SELECT or SELECT (id), and the table."""
    for statement in statements(ROLES[purpose][1]):
        granted, tables = re.match(r"GRANT (.+?)\s+ON (.+?)\s+TO ", statement, re.DOTALL).groups()
        columns = re.fullmatch(r"SELECT \((.+)\)", granted)
        each_right = [f"SELECT ({each})" for each in columns[1].split(", ")] if columns else granted.split(", ")
        yield from product(each_right, tables.split(", "))


def test_without_the_rights_for_it_immediate_delivery_is_left_to_a_dispatcher(caplog):
    with role("stage"), transaction.atomic():
        staged = stage("order.refused", {}, deliver_now=True)
    row = Message.objects.get(pk=staged.ids[0])
    assert (row.state, row.attempt) == ("pending", 0)
    assert [each.levelno for each in caplog.records if each.name == "outbox"] == [logging.WARNING]
