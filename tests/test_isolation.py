"""Whatever a handler does to its thread's connections is undone, and the next statement works."""

import pytest
from django.db import Error, IntegrityError, close_old_connections, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from outbox.isolation import SessionWatch, bookmark, restore
from tests.testapp.models import Order

in_autocommit = pytest.mark.django_db(transaction=True)
in_test_case = pytest.mark.django_db
only_told_when_asked = pytest.mark.skipif(connection.vendor == "postgresql", reason="the driver is not asked about it")


def leave_a_block_open():
    transaction.atomic().__enter__()


def leave_nested_blocks_open():
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()


def leave_autocommit_off():
    transaction.set_autocommit(False)


def begin_by_hand():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


def break_a_block():
    transaction.atomic().__enter__()
    taken = Order.objects.create(reference="taken")
    with pytest.raises(IntegrityError):
        Order(pk=taken.pk).save(force_insert=True)


def close_inside_a_block():
    transaction.atomic().__enter__()
    connection.close()


LEAKS = [leave_a_block_open, leave_nested_blocks_open, leave_autocommit_off, begin_by_hand, break_a_block]


@in_autocommit
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no sessions")
@pytest.mark.parametrize("noticed", [True, pytest.param(False, marks=only_told_when_asked)])
def test_a_session_that_ended_meanwhile_is_no_open_transaction(noticed):
    """Scenario 32: servers end what is idle for too long, and a handler may be longer than that."""
    Order.objects.create(reference="before")
    end_own_session()
    if noticed:
        with pytest.raises(Error):
            Order.objects.count()
    assert restore({}) == set()
    assert Order.objects.count() == 1


@in_autocommit
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no sessions")
def test_a_session_that_ended_inside_a_block_is_told():
    transaction.atomic().__enter__()
    Order.objects.create(reference="lost")
    end_own_session()
    assert restore({}) == {"default"}
    check_usable()


def end_own_session():
    """As the server does."""
    ask, end = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s, 5000)"),
        "mysql": ("SELECT CONNECTION_ID()", "KILL %s"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(ask)
        [pid] = cursor.fetchone()
    other = connections.create_connection("default")
    with other.cursor() as cursor:
        cursor.execute(end, [pid])
    other.close()


def insert():
    Order.objects.create(reference="written by the handler")


def check_usable():
    with transaction.atomic(durable=not connection.in_atomic_block):
        Order.objects.create(reference="written afterwards")
    assert list(Order.objects.values_list("reference", flat=True)) == ["written afterwards"]


@in_autocommit
@pytest.mark.parametrize("leak", LEAKS)
def test_an_open_transaction_is_rolled_back(leak):
    hooks = []
    marks = bookmark()
    assert marks == {}
    leak()
    if not connection.needs_rollback:
        insert()
    if connection.in_atomic_block:
        transaction.on_commit(lambda: hooks.append("of a transaction that was rolled back"))
    assert restore(marks) == {"default"}
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    check_usable()
    assert hooks == []


@in_autocommit
def test_a_connection_closed_inside_a_block_is_opened_anew():
    marks = bookmark()
    close_inside_a_block()
    assert restore(marks) == {"default"}
    check_usable()


@in_autocommit
def test_committed_writes_stay_and_nothing_is_reported():
    marks = bookmark()
    insert()
    assert restore(marks) == set()
    assert Order.objects.count() == 1


@in_autocommit
def test_the_connection_object_is_the_same_afterwards():
    """The test runner, among others, holds on to it."""
    before = connections["default"]
    marks = bookmark()
    leave_a_block_open()
    restore(marks)
    assert connections["default"] is before


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_every_database_is_looked_after():
    marks = bookmark()
    transaction.atomic(using="other").__enter__()
    Order.objects.using("other").create(reference="leaked")
    assert restore(marks) == {"other"}
    assert not Order.objects.using("other").exists()


@pytest.fixture
def pooled(monkeypatch):
    """A connection out of a pool of one."""
    if connection.vendor != "postgresql":
        pytest.skip("Django pools connections of PostgreSQL only")
    pytest.importorskip("psycopg_pool")
    pooled = connections["default"].copy("pooled")
    pooled.settings_dict["CONN_MAX_AGE"] = 0
    pooled.settings_dict["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 1, "timeout": 5}
    connections["pooled"] = pooled
    monkeypatch.setattr(connections, "all", lambda initialized_only=False: [pooled])
    yield pooled
    pooled.close()
    pooled.close_pool()
    del connections["pooled"]


@in_autocommit
def test_a_pool_gets_its_connection_back(pooled):
    marks = bookmark()
    transaction.atomic(using="pooled").__enter__()
    Order.objects.using("pooled").create(reference="leaked")
    assert restore(marks) == {"pooled"}
    assert not Order.objects.using("pooled").exists()


@in_autocommit
@pytest.mark.parametrize("leaks", [False, True])
def test_a_pool_hands_on_no_session_that_a_handler_has_changed(pooled, leaks):
    sessions = SessionWatch()
    marks = bookmark()
    with pooled.cursor() as cursor:
        cursor.execute("SET search_path TO nowhere")
    if leaks:
        transaction.atomic(using="pooled").__enter__()
        with pooled.cursor() as cursor:
            cursor.execute("SELECT 1")
    restore(marks)
    sessions.renew()
    close_old_connections()
    with pooled.cursor() as cursor:
        cursor.execute("SHOW search_path")
        assert cursor.fetchone()[0] != "nowhere"


@in_autocommit
def test_a_connection_is_not_closed_for_its_age(monkeypatch):
    """The caller of an immediate delivery goes on in its session, with all it has set there."""
    connection.ensure_connection()
    session = connection.connection
    monkeypatch.setattr(connections["default"], "close_at", 0.0)
    restore(bookmark())
    assert connection.connection is session


@in_test_case
@pytest.mark.parametrize("leak", [leave_a_block_open, leave_nested_blocks_open, break_a_block])
def test_the_transaction_of_a_test_case_stays_usable(leak):
    depth = len(connection.atomic_blocks), len(connection.savepoint_ids), len(connection.run_on_commit)
    marks = bookmark()
    insert()
    leak()
    assert restore(marks) == {"default"}
    assert depth == (len(connection.atomic_blocks), len(connection.savepoint_ids), len(connection.run_on_commit))
    check_usable()


@in_test_case
def test_a_statement_that_fails_in_a_test_case_is_rolled_back_alone():
    Order.objects.create(reference="before")
    marks = bookmark()
    with pytest.raises(IntegrityError):
        Order(pk=Order.objects.get().pk).save(force_insert=True)
    with pytest.raises(TransactionManagementError):
        Order.objects.count()
    assert restore(marks) == {"default"}
    assert Order.objects.get().reference == "before"


@in_test_case
def test_writes_in_a_test_case_stay():
    marks = bookmark()
    insert()
    assert restore(marks) == set()
    assert Order.objects.count() == 1
