"""The cursor that staging takes: the driver's own where nobody could tell, Django's as soon as somebody watches."""

import asyncio
import contextlib
import functools
import threading
from pathlib import Path

import django
import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.db.transaction import TransactionManagementError
from django.test import TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext

from outbox import Intent, astage, handler, stage, stage_many
from outbox.database import can_listen, direct
from outbox.models import Message
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

psycopg3 = pytest.mark.skipif(not can_listen(connection), reason="only psycopg 3 has a fast path")


@pytest.fixture(autouse=True)
def _handlers(outbox_registry):
    handler("order.paid")(lambda message: None)


@pytest.fixture
def taken(monkeypatch):
    """Which statements went to the driver's own cursor: a list of the cursors' classes."""
    found = []
    real = direct._take_cursor

    def take(connection):
        cursor = real(connection)
        if cursor is not None:
            found.append(type(cursor).__name__)
        return cursor

    monkeypatch.setattr(direct, "_take_cursor", take)
    return found


def stage_alone(key="k", using="default"):
    with transaction.atomic(using=using):
        return stage("order.paid", {"a": 1}, event_key=key, using=using)


# --- nobody watches ---------------------------------------------------------------------------------------------------


@psycopg3
def test_one_message_and_many_go_by_the_drivers_cursor(taken):
    stage_alone()
    with transaction.atomic():
        stage_many([Intent("order.paid", n) for n in range(3)])
    assert taken == ["ClientCursor"] * 2
    assert Message.objects.count() == 4


@psycopg3
def test_the_message_is_part_of_the_callers_transaction(taken, second_connection):
    with second_connection().cursor() as other:
        with transaction.atomic():
            Order.objects.create(reference="1")
            stage("order.paid", {})
            other.execute("SELECT count(*) FROM outbox_message")
            assert other.fetchone() == (0,)
            transaction.set_rollback(True)
        assert taken
        assert not Order.objects.exists()
        assert not Message.objects.exists()


@psycopg3
def test_a_new_session_gets_a_cursor_of_its_own(taken):
    stage_alone("a")
    connection.close()
    stage_alone("b")
    assert taken == ["ClientCursor"] * 2
    assert Message.objects.count() == 2


@psycopg3
@pytest.mark.parametrize(
    ("options", "cursor", "prepared"),
    [
        ({}, "ClientCursor", 0),
        ({"prepare_threshold": 2}, "Cursor", 1),
        ({"server_side_binding": True}, "Cursor", 0),
        ({"pool": {"min_size": 1, "max_size": 2}}, "ClientCursor", 0),
    ],
    ids=["usual", "threshold", "server_side_binding", "pool"],
)
def test_nothing_is_prepared_unless_the_project_has_set_a_threshold(alias, taken, options, cursor, prepared):
    """A pooler hands the next transaction another session, in which a prepared statement would be missing."""
    session = alias("special", **options)
    for number in range(6):
        stage_alone(f"k{number}", using="special")
    assert set(taken) == {cursor}
    with session.cursor() as look:
        look.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%outbox_message%'")
        assert look.fetchone() == (prepared,)
    assert Message.objects.count() == 6


# --- somebody watches -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured():
    with CaptureQueriesContext(connection) as queries:
        yield lambda: len(queries)


@contextlib.contextmanager
def wrapped():
    seen = []

    def see(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(see):
        yield lambda: len(seen)


@contextlib.contextmanager
def debugging():
    with override_settings(DEBUG=True):
        before = len(connection.queries_log)
        yield lambda: len(connection.queries_log) - before


@contextlib.contextmanager
def replaced(owner, name, file=__file__):
    """A method replaced as tracers do it: by a function of ``file`` that calls the real one, and looks like it."""
    real, calls = getattr(owner, name), []

    @functools.wraps(real)
    def trace(*arguments, **keywords):
        calls.append(name)
        return real(*arguments, **keywords)

    trace.__code__ = trace.__code__.replace(co_filename=str(file))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, trace)
        yield lambda: len(calls)


DJANGO = Path(django.__file__).parent

OBSERVERS = {
    "captured": captured,
    "wrapped": wrapped,
    "DEBUG": debugging,
    "the cursor of this connection": lambda: replaced(connections["default"], "cursor"),
    "cursors of all connections": lambda: replaced(type(connections["default"]), "cursor"),
    "new cursors": lambda: replaced(type(connections["default"]), "create_cursor"),
    "execute": lambda: replaced(CursorWrapper, "execute"),
    "execute, by an extension of Django": lambda: replaced(CursorWrapper, "execute", f"{DJANGO}_tracer/tracer.py"),
    "the driver's connection": lambda: replaced(connections["default"].connection, "cursor"),
}


@psycopg3
@pytest.mark.parametrize("observer", OBSERVERS)
def test_who_watches_sees_the_statement(observer, taken):
    connection.ensure_connection()
    stage_alone("before")
    del taken[:]
    with transaction.atomic():
        with OBSERVERS[observer]() as seen:
            stage("order.paid", {"a": 1}, event_key="k")
            count = seen()
        assert count >= 1
        assert not taken
    stage_alone("after")
    assert taken
    assert Message.objects.count() == 3


def test_assert_num_queries_counts_each_statement(django_assert_num_queries):
    with transaction.atomic(), django_assert_num_queries(2):
        stage("order.paid", {"a": 1})
        stage("order.paid", {"a": 2})


@psycopg3
def test_a_connection_class_of_somebody_else_keeps_its_cursor(monkeypatch, taken):
    wrapper = connections["default"]
    foreign = type("DatabaseWrapper", (type(wrapper),), {"__module__": "traced.base"})
    monkeypatch.setattr(wrapper, "__class__", foreign)
    stage_alone()
    assert not taken


@psycopg3
@pytest.mark.parametrize("what", ["connection", "cursor"])
def test_a_class_of_the_driver_that_somebody_has_replaced_is_used(monkeypatch, alias, taken, what):
    import psycopg

    calls = []

    class Traced(psycopg.ClientCursor):
        def execute(self, *arguments, **keywords):
            calls.append(arguments[0])
            return super().execute(*arguments, **keywords)

    class TracedConnection(psycopg.Connection):
        def cursor(self, *arguments, **keywords):
            calls.append("cursor")
            return super().cursor(*arguments, **keywords)

    session = alias("traced", **({"cursor_factory": Traced} if what == "cursor" else {}))
    session.ensure_connection()
    if what == "connection":
        monkeypatch.setattr(session.connection, "__class__", TracedConnection)
    with transaction.atomic(using="traced"):
        del calls[:]
        stage("order.paid", {}, using="traced")
        assert len(calls) == 1
    assert not taken


# --- the checks and errors of Django ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("statement_path")
def test_a_broken_transaction_is_refused():
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            stage("order.paid", {})
    assert not Message.objects.exists()


@pytest.mark.usefixtures("statement_path")
def test_a_connection_of_another_thread_is_refused():
    errors = []
    with transaction.atomic():
        mine = connections["default"]

        def elsewhere():
            try:
                direct.fetch(mine, "SELECT 1", [])
            except DatabaseError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "created in a thread" in str(errors[0])


@pytest.mark.usefixtures("statement_path")
def test_an_event_loop_is_refused():
    async def main():
        with pytest.raises(SynchronousOnlyOperation):
            direct.fetch(connections["default"], "SELECT 1", [])

    with transaction.atomic():
        asyncio.run(main())


@pytest.mark.usefixtures("statement_path")
def test_errors_of_the_database_are_djangos_and_undo_the_transaction():
    def stage_badly():
        with transaction.atomic():
            Order.objects.create(reference="1")
            with pytest.raises(DatabaseError) as caught:
                direct.fetch(connections["default"], "INSERT INTO no_such_table VALUES (1)", [])
            assert isinstance(caught.value.__cause__, connection.Database.Error)
            raise caught.value

    with pytest.raises(DatabaseError):
        stage_badly()
    assert not Order.objects.exists()
    stage_alone()
    assert Message.objects.count() == 1


@pytest.mark.usefixtures("statement_path")
@psycopg3
def test_a_session_that_was_killed_is_an_operational_error_and_a_new_one_works(second_connection):
    """As with Django's cursor the connection is known to be doubtful afterwards."""

    def stage_in_a_killed_session():
        with transaction.atomic():
            pid = connection.connection.info.backend_pid
            with second_connection().cursor() as other:
                other.execute("SELECT pg_terminate_backend(%s)", [pid])
            stage("order.paid", {})

    with pytest.raises(OperationalError) as caught:
        stage_in_a_killed_session()
    assert isinstance(caught.value.__cause__, connection.Database.OperationalError)
    connection.close()
    stage_alone()
    assert Message.objects.count() == 1


# --- outside pytest's fixtures: the path is whatever it is ---------------------------------------------------------


class InTestCases(TransactionTestCase):
    """The block of a test case is no caller's; astage() may still open its own inside it."""

    databases = frozenset(["default"])

    async def test_astage_works_in_an_async_test(self):
        staged = await astage("order.paid", {}, event_key="k")
        assert staged.created
