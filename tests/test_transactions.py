"""Lost replies, races and isolation: whatever becomes of a transaction, its effect is there once or not at all."""

import re
import threading
from contextlib import contextmanager

import pytest
from django.db import Error, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox.database import Stale, again, close_quietly, server_now, short_transaction
from outbox.leases import charge, draw_token, renew, settle
from outbox.models import Attempt, Message, State
from outbox.operations import discard
from tests import rows
from tests.running import cut_sessions
from tests.specimens import (
    VERDICTS,
    check_invariants,
    claimer,
    columns,
    end,
    fresh,
    hand_over,
    in_seconds,
    lapse,
    locked_elsewhere,
    put,
    reply_lost,
    rows_can_be_locked,
    specimens,
    take,
    take_one,
    verdict,
)
from tests.stepping import Actor, actors

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["actors", "specimens"]


# --- lost replies and races -------------------------------------------------------------------------------------------


def test_a_claim_whose_commit_was_never_answered_is_recognised():
    """The token was drawn before: rows that carry it are ours."""
    ids = {put("mail").pk for _ in range(3)}
    own = claimer()
    with reply_lost(), pytest.raises(OperationalError):
        own.claim(3, seconds=60)
    later = put("mail")
    adopted = own.claim(10, seconds=600)
    assert {lease.id for lease in adopted.leases} == ids
    assert adopted.more
    assert all(in_seconds(fresh(lease.message).due_at) > 500 for lease in adopted.leases)
    assert {end(lease).status for lease in adopted.leases} == {"settled"}
    assert [lease.id for lease in own.claim(10, seconds=60).leases] == [later.pk]


def test_a_claim_that_was_not_committed_leaves_nothing_to_recognise():
    row = put("mail")
    own = claimer()
    with connection.execute_wrapper(connection_dies_at("UPDATE")), pytest.raises(OperationalError):
        own.claim(3, seconds=60)
    assert [lease.id for lease in own.claim(3, seconds=60).leases] == [row.pk]
    assert fresh(row).attempt == 1


def test_a_recognised_claim_leaves_out_what_was_taken_over_meanwhile():
    first, second = put("mail"), put("mail")
    own = claimer()
    with reply_lost(), pytest.raises(OperationalError):
        own.claim(3, seconds=-1)
    take_one(first)
    assert [lease.id for lease in own.claim(3, seconds=60).leases] == [second.pk]


def connection_dies_at(word):
    def wrapper(execute, sql, params, many, context):
        if sql.startswith(word):
            raise OperationalError("server closed the connection unexpectedly")
        return execute(sql, params, many, context)

    return wrapper


@pytest.mark.parametrize("name", sorted(VERDICTS))
@pytest.mark.parametrize("key", ["a", None])
def test_a_settlement_whose_commit_was_never_answered_is_recognised(name, key):
    """Otherwise a delivered message is called lost."""
    row = put("account", key)
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease, name)], token=token)
    before, attempts = columns(row), Attempt.objects.count()
    (settled,) = settle("default", [verdict(lease, name)], token=token, recheck=True)
    assert (settled.status, settled.due_at) == ("settled", fresh(row).due_at)
    assert columns(row) == before
    assert Attempt.objects.count() == attempts


def test_a_hand_over_whose_commit_was_never_answered_is_recognised():
    """Otherwise the next message of the lane is held by nobody."""
    first, second = put("account", "a"), put("account", "a")
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease)], token=token, hand_over=hand_over)
    (settled,) = settle("default", [verdict(lease)], token=token, seconds=600, hand_over=hand_over, recheck=True)
    assert settled.next is not None
    assert (settled.next.id, settled.next.token, settled.next.run) == (second.pk, token, 1)
    assert in_seconds(fresh(second).due_at) > 500
    assert fresh(second).attempt == 1
    assert end(settled.next).status == "settled"
    assert fresh(first).state == State.DELIVERED


def test_each_lane_is_handed_over_to_its_own_successor_when_the_commit_was_never_answered():
    rows_of = {key: [put("account", key), put("account", key)] for key in ("a", "b")}
    leases, token = take(), draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease) for lease in leases], token=token, hand_over=hand_over)
    results = settle("default", [verdict(lease) for lease in leases], token=token, hand_over=hand_over, recheck=True)
    followers = {each.settlement.lease.id: each.next.id for each in results}
    assert followers == {first.pk: second.pk for first, second in rows_of.values()}


def test_what_somebody_else_leased_after_a_commit_that_was_never_answered_stays_theirs():
    put("account", "a"), put("account", "a")
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease)], token=token)
    (other,) = take()
    (settled,) = settle("default", [verdict(lease)], token=token, hand_over=hand_over, recheck=True)
    assert (settled.status, settled.next) == ("settled", None)
    assert end(other).status == "settled"


@rows_can_be_locked
@pytest.mark.timeout(30)
def test_a_hand_over_is_recognised_as_soon_as_its_row_is_not_locked_any_more(actors, second_connection):
    _, second = put("account", "a"), put("account", "a")
    (lease,) = take()
    token = draw_token()
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", [verdict(lease)], token=token, hand_over=hand_over)
    (settler,) = actors("settler")
    with locked_elsewhere(second_connection, second):
        settler.begin(lambda: settle("default", [verdict(lease)], token=token, hand_over=hand_over, recheck=True))
        settler.let_go()
        assert not settler.settle_down(0.3, "idle")
    (settled,) = settler.finish()
    assert settled.next.id == second.pk


@pytest.mark.parametrize("name", ["retry", "release"])
def test_the_time_of_each_is_its_own_when_the_commit_was_never_answered(name):
    put("mail"), put("sms", due_at=rows.ago(100))
    leases, token = take(), draw_token()
    settlements = [verdict(lease, name, wait=100.0 * number) for number, lease in enumerate(leases, 1)]
    with reply_lost(), pytest.raises(OperationalError):
        settle("default", settlements, token=token)
    results = settle("default", settlements, token=token, recheck=True)
    assert [round(in_seconds(each.due_at), -1) for each in results] == [100, 200]


def test_what_was_not_committed_is_settled_by_the_second_try():
    row = put("mail")
    (lease,) = take()
    with connection.execute_wrapper(connection_dies_at("UPDATE")), pytest.raises(OperationalError):
        end(lease)
    assert settle("default", [verdict(lease)], recheck=True)[0].status == "settled"
    assert fresh(row).state == State.DELIVERED


@pytest.mark.parametrize("name", ["delivered", "discarded", "retry"])
def test_what_an_operator_or_a_claimer_wrote_is_not_taken_for_our_own(name):
    """Attempt mine and token empty, but the state or the lapses say that it was somebody else."""
    row, crashed = put("mail"), put("sms", lapses=1)
    leases = take()
    lapse(row, crashed)
    assert discard("default", [row.pk]).done
    assert take() == []  # notes the crash
    assert fresh(crashed).lapses == 2
    results = settle("default", [verdict(lease, name) for lease in leases], recheck=True)
    assert [each.status for each in results] == ["lost", "lost"]


def test_without_a_lost_reply_an_empty_token_is_nobodys():
    (lease,) = [put("mail") and take()[0]]
    end(lease)
    assert settle("default", [verdict(lease)])[0].status == "lost"


def test_a_charge_whose_commit_was_never_answered_is_not_made_twice():
    row = put("mail")
    leases = take(start=0)
    with reply_lost(), pytest.raises(OperationalError):
        charge("default", leases)
    assert not leases[0].charged
    assert charge("default", leases) == leases
    assert fresh(row).spent == leases[0].message.spent == 1


def race_errors():
    """Errors as the driver raises them when a transaction lost a deadlock, a serialization or a lock wait."""
    if connection.vendor == "postgresql":
        errors = pytest.importorskip("psycopg.errors", reason="errors of psycopg 2 cannot be made by hand")
        return [errors.DeadlockDetected(), errors.SerializationFailure()]
    if connection.vendor == "mysql":
        from MySQLdb import OperationalError as MySQLError

        return [MySQLError(1213, "Deadlock found"), MySQLError(1205, "Lock wait timeout exceeded")]
    import sqlite3

    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = 261  # SQLITE_BUSY_RECOVERY, an extended code of SQLITE_BUSY
    return [error]


@contextmanager
def victims(*, at, times):
    """The first so many statements that begin with a word become victims of somebody else's transaction."""
    left = [times]

    def wrapper(execute, sql, params, many, context):
        if sql.startswith(at) and left[0]:
            left[0] -= 1
            cause = race_errors()[left[0] % len(race_errors())]
            raise OperationalError(*cause.args) from cause
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


def test_victims_of_deadlocks_are_done_again():
    """Scenario 43: claims, renewals, charges and settlements, each as a whole, and its effect is there once."""
    row = put("account", "a")
    with victims(at="UPDATE", times=2):
        (lease,) = take(start=0)
    with victims(at="UPDATE", times=2):
        assert renew("default", [lease], 60).renewed == {lease}
    with victims(at="UPDATE", times=2):
        assert charge("default", [lease]) == [lease]
    with victims(at="INSERT", times=2):
        assert end(lease, "retry").status == "settled"
    found = fresh(row)
    assert (found.attempt, found.spent, found.attempts.count()) == (1, 1, 1)
    assert lease.token != 0


def test_a_claim_that_is_done_again_keeps_its_token_and_its_room():
    for _ in range(5):
        put("mail")
    tokens = []

    def note(execute, sql, params, many, context):
        if sql.startswith("UPDATE"):
            values = [*map(int, re.findall(r"lease_token = (\d+)", sql)), *params]
            tokens.append(next(value for value in values if isinstance(value, int) and value > 2**40))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note), victims(at="UPDATE", times=3):
        leases = claimer().claim(5, seconds=60, room={"mail": 4}).leases
    assert len(leases) == 4
    assert len(set(tokens)) == 1


def test_a_race_that_never_ends_reaches_the_caller_and_leaves_nothing_behind():
    row = put("mail")
    before = columns(row)
    with victims(at="UPDATE", times=1000), pytest.raises(OperationalError):
        take()
    assert columns(row) == before
    assert [lease.id for lease in take()] == [row.pk]


@rows_can_be_locked
def test_a_real_deadlock_is_done_again():
    first, second = put("mail"), put("mail")
    barrier, once = threading.Barrier(2), threading.local()

    def update(one, other):
        def work():
            Message.objects.filter(pk=one.pk).update(spent=1)
            if not getattr(once, "met", False):
                once.met = True
                barrier.wait(10)
            Message.objects.filter(pk=other.pk).update(spent=2)

        return lambda: again("default", work)

    rows.at_once(update(first, second), update(second, first))
    assert {fresh(first).spent, fresh(second).spent} == {1, 2}


def test_a_transaction_that_is_stale_is_done_again_but_not_for_ever():
    tries = []

    def work():
        tries.append(1)
        raise Stale("always")

    with pytest.raises(Stale):
        again("default", work)
    assert len(tries) > 3
    tries.clear()
    with transaction.atomic(), pytest.raises(Stale):
        again("default", work)
    assert len(tries) > 3


@contextmanager
def changes_that_match_nothing():
    """As if the rows had changed under their locks."""

    def wrapper(execute, sql, params, many, context):
        if sql.startswith("UPDATE"):
            sql = sql.replace("WHERE", "WHERE 1 = 0 AND", 1)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


@pytest.mark.parametrize("name", ["delivered", "retry"])
def test_an_outcome_that_matched_no_row_is_never_called_settled(name):
    row = put("account", "a")
    (lease,) = take()
    before = columns(row)
    with changes_that_match_nothing(), pytest.raises(Stale):
        end(lease, name)
    assert columns(row) == before
    assert not Attempt.objects.exists()
    assert end(lease, name).status == "settled"


def test_a_lease_that_matched_no_row_is_never_granted():
    row = put("account", "a")
    with changes_that_match_nothing(), pytest.raises(Stale):
        take()
    assert [lease.id for lease in take()] == [row.pk]


# --- transactions -----------------------------------------------------------------------------------------------------


def statements(queries):
    return [each["sql"] for each in queries if "outbox_message" not in each["sql"]]


def test_no_isolation_is_set_where_it_is_the_default_already():
    with short_transaction("default"):
        pass  # asks for the default
    put("account", "a")
    with CaptureQueriesContext(connection) as queries:
        end(take()[0])
    assert not [sql for sql in statements(queries) if "ISOLATION" in sql.upper()]


def test_inside_an_open_transaction_nothing_is_set():
    """The testing kit's drain() runs claims and settlements in the test's own transaction."""
    put("account", "a")
    follower = put("account", "a")
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        lease = take()[0]
        assert renew("default", [lease], 60).renewed
        assert end(lease, hand_over=hand_over).next.id == follower.pk
    assert not [sql for sql in statements(queries) if sql.upper().startswith("SET")]


@pytest.fixture(params=["session", "settings"])
def repeatable_read(request):
    """A connection on which transactions are REPEATABLE READ unless they say otherwise."""
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    if request.param == "settings":
        options["isolation_level"] = {"postgresql": 3, "mysql": "repeatable read"}[connection.vendor]
    connection.ensure_connection()
    if request.param == "session":
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET default_transaction_isolation TO 'repeatable read'")
            else:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    yield
    options.pop("isolation_level", None)
    connection.close()


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_claims_are_read_committed_on_a_repeatable_read_connection(second_connection):
    """Invariant 4: what others commit meanwhile is seen; afterwards the connection is as it was."""
    other = second_connection()

    def count_twice():
        first = Message.objects.count()
        with other.cursor() as cursor:
            cursor.execute("DELETE FROM outbox_message")
        return first, Message.objects.count()

    put("mail")
    with short_transaction("default"):
        assert count_twice() == (1, 0)
    put("mail")
    with transaction.atomic():
        assert count_twice() == (1, 1)


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_the_whole_path_works_on_a_repeatable_read_connection():
    put("account", "a")
    follower = put("account", "a")
    (lease,) = take()
    renew("default", [lease], 60)
    assert end(lease, hand_over=hand_over).next.id == follower.pk
    check_invariants()


@rows_can_be_locked
@pytest.mark.usefixtures("repeatable_read")
def test_a_session_that_is_gone_at_the_begin_of_a_transaction_leaves_nothing_open():
    """Scenario 43: on PostgreSQL setting the level is the first thing that the server hears of a transaction."""
    put("mail")
    (lease,) = take()
    renew("default", [lease], 60)
    rows.at_once(cut_sessions)
    with pytest.raises(Error):
        renew("default", [lease], 60)
    assert not connection.in_atomic_block
    close_quietly("default")
    assert renew("default", [lease], 60).renewed == {lease}


def test_no_transaction_is_open_after_a_claim_or_a_settlement():
    """Scenario 36."""
    put("mail")
    (lease,) = take()
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    end(lease)
    assert not connection.in_atomic_block


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has transactions that cannot be upgraded")
def test_a_claim_waits_for_the_write_lock_instead_of_failing(second_connection):
    """Scenario 39: whatever transaction_mode the project has set, our transactions take the write lock at once."""
    row = put("mail")
    other = second_connection()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute("UPDATE outbox_message SET leased_by = ''")
    actor = Actor("claimer")
    try:
        actor.begin(lambda: deferred(take))
        actor.let_go()
        assert not actor.settle_down(0.3, "idle")
        other.commit()
        assert [lease.id for lease in actor.finish()] == [row.pk]
    finally:
        other.rollback()
        actor.close()


def deferred(function):
    """Call it on a connection whose transactions begin without a lock, as Django's do by default."""
    connection = connections["default"]
    connection.ensure_connection()
    connection.transaction_mode = None
    return function()


def test_the_servers_clock_decides(monkeypatch):
    """Scenario 19, without a server whose clock can be set: what this machine says matters on SQLite only."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no server: its clock is this machine's")
    import time

    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
    put("mail")
    (lease,) = take(seconds=60)
    assert take() == []
    assert abs(server_now("default") - now // 1000) < 60 * 10**6
    assert end(lease).status == "settled"
