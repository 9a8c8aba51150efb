"""Wake-ups: who is woken by what, and that losing one harms nobody."""

import logging
import sqlite3
import threading
from time import monotonic
from types import ModuleType

import pytest
from django.db import Error, connection, connections, transaction
from django.test import override_settings

from outbox import listening, wakeup
from outbox.database import can_listen, has_data_version
from outbox.models import Message

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LONG = 20.0  # seconds that no wait below may really take
SHORT = 0.05

postgresql = pytest.mark.skipif(
    not can_listen(connection), reason="NOTIFY is PostgreSQL's, and psycopg 2 cannot be waited for"
)
sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="data_version is SQLite's")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in ("_allowances", "_complained_at", "_waiters"):
        monkeypatch.setattr(wakeup, name, {})


@pytest.fixture
def waiter():
    """Return a function that makes a waiter; all are closed at the end."""
    made = []

    def make(using="default", poll=LONG):
        made.append(wakeup.Waiter(using, poll))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def listener(second_connection):
    """Return a function that counts the notifications sent since it was last called."""
    session = second_connection()
    with session.cursor() as cursor:
        cursor.execute(f'LISTEN "{wakeup.channel()}"')

    def count():
        with session.cursor() as cursor:
            cursor.execute("SELECT 1")  # whatever was committed before arrives with the answer
        raw = session.connection
        found = 0
        raw.pgconn.consume_input()
        backlog = raw._notifies_backlog
        while backlog:
            found += is_told(backlog.popleft().payload)
        while (notification := raw.pgconn.notifies()) is not None:
            found += is_told(notification.extra.decode())
        return found

    return count


def is_told(payload):
    """Whether it tells of commits, and is no probe."""
    return not payload or payload.startswith(listening.SILENT)


@pytest.fixture
def miserly(monkeypatch):
    """Let every process send one notification, and then none for long."""
    monkeypatch.setattr(wakeup, "SAVED", 1e-9)
    monkeypatch.setattr(wakeup, "SHARE", 1e-6)
    monkeypatch.setattr(wakeup, "SILENCE", LONG)


def quieten(waiter):
    """Let a waiter open its ear and prove it; what follows is news."""
    deadline = monotonic() + LONG
    while waiter.wait(SHORT) or (waiter.mode == "poll" and (can_listen(connection) or has_data_version(connection))):
        assert monotonic() < deadline, "it never became quiet"
    return waiter


def seconds(work):
    start = monotonic()
    return work(), monotonic() - start


def notify_from(session, payload=""):
    session.ensure_connection()
    listening.notify(session, wakeup.channel(), payload)


def listening_pid():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, state FROM pg_stat_activity WHERE datname = current_database() AND query LIKE %s",
            [f'LISTEN "{wakeup.channel()}"'],
        )
        return cursor.fetchall()


# --- on every database ------------------------------------------------------------------------------------------------


def test_a_wait_without_news_ends_at_its_timeout(waiter):
    quiet = quieten(waiter())
    heard, took = seconds(lambda: quiet.wait(SHORT))
    assert not heard
    assert SHORT <= took < LONG / 2


def test_no_wait_is_longer_than_the_poll(waiter):
    quiet = quieten(waiter(poll=SHORT))
    heard, took = seconds(lambda: quiet.wait(LONG))
    assert not heard
    assert took < LONG / 2


def test_another_thread_ends_a_wait_at_once(waiter):
    quiet = quieten(waiter())
    timer = threading.Timer(SHORT, quiet.wake)
    timer.start()
    heard, took = seconds(lambda: quiet.wait(LONG))
    timer.join()
    assert heard
    assert took < LONG / 2


def test_a_wake_up_between_two_waits_ends_the_next_one_only(waiter):
    quiet = quieten(waiter())
    for _ in range(100_000):
        quiet.wake()
    assert quiet.wait(LONG)
    assert not quiet.wait(SHORT)


def test_a_hint_wakes_the_waiters_of_its_database_in_this_process(waiter):
    mine, other = quieten(waiter()), quieten(waiter("other"))
    with transaction.atomic():
        wakeup.hint("default")
        assert mine.wait(LONG)
        assert not other.wait(SHORT)


def test_every_hint_wakes_this_process_however_close_they_follow(waiter):
    quiet = quieten(waiter())
    with transaction.atomic():
        for _ in range(3):
            wakeup.hint("default")
            assert quiet.wait(LONG)


def test_closing_ends_everything_and_a_late_wake_up_is_harmless(waiter):
    closed = quieten(wakeup.Waiter("default", LONG))
    closed.close()
    closed.wake()
    wakeup.hint("default")
    assert closed.mode == "poll"
    assert not wakeup._waiters["default"]


def test_a_hint_for_a_database_that_does_not_exist_is_only_logged(caplog):
    wakeup.hint("nowhere")
    assert "nowhere" in caplog.text


def test_the_way_of_hearing_is_told(waiter, database_kind):
    expected = "notify" if can_listen(connection) else "data_version" if database_kind == "sqlite" else "poll"
    assert quieten(waiter()).mode == expected


def test_an_ear_that_cannot_be_opened_leaves_polling_and_one_warning(waiter, monkeypatch, caplog):
    """Scenario 31: the database is away."""
    if not (can_listen(connection) or has_data_version(connection)):
        pytest.skip("polls anyway")

    def refuse(alias, **defaults):
        raise Error("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(listening, "_own_connection", refuse)
        patch.setattr(wakeup, "REOPEN_AFTER", 0.0)
        cut_off = waiter()
        assert not cut_off.wait(SHORT)
        assert not cut_off.wait(SHORT)
        assert cut_off.mode == "poll"
        assert caplog.text.count("the server is away") == 1
    cut_off._reopen_at = 0.0
    assert cut_off.wait(LONG), "what was committed meanwhile must be looked for"
    assert quieten(cut_off).mode != "poll"


def test_a_channel_name_fits_however_long_the_table_name(monkeypatch):
    """Scenario 35."""
    assert wakeup.channel() == Message._meta.db_table
    monkeypatch.setattr(Message._meta, "db_table", "ü" * 63)
    assert len(wakeup.channel().encode()) <= 63


# --- the allowance ----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(wakeup, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_first_of_a_few_commits_are_all_told(clock):
    allowance = wakeup.Allowance()
    assert [allowance.take() for _ in range(5)] == [0.0] * 5


@pytest.mark.parametrize("price", [0.0002, 0.001, 0.004, 0.02, 1.0])
def test_a_silence_lasts_exactly_as_long_as_was_told(clock, price):
    """A receiver looks again when it is over: whoever committed in it must not be missed."""
    allowance = wakeup.Allowance()
    allowance.price = price
    ends = []
    for _ in range(200):
        silence = allowance.take()
        if silence is None:
            assert clock.now < ends[-1] + 1e-6
        else:
            assert silence <= wakeup.SILENCE
            assert not ends or clock.now > ends[-1] - 1e-6
            ends.append(clock.now + silence)
        clock.now += 0.0013
    assert len(ends) > 1


@pytest.mark.parametrize("price", [0.0002, 0.001, 0.004])
def test_notifying_takes_no_more_than_its_share_of_the_time(clock, price):
    allowance = wakeup.Allowance()
    allowance.price = price
    start, spent = clock.now, 0.0
    while clock.now < start + 20:
        if allowance.take() is not None:
            spent += price
        clock.now += 0.0005
    assert wakeup.SHARE / 2 < spent / 20 <= wakeup.SHARE * 1.1


def test_the_price_is_learned_from_what_notifications_take(clock):
    allowance = wakeup.Allowance()
    for _ in range(30):
        allowance.learn(0.004)
    assert 0.0035 < allowance.price <= 0.004


# --- PostgreSQL: NOTIFY -----------------------------------------------------------------------------------------------


@postgresql
def test_a_notification_of_another_session_ends_the_wait(waiter, second_connection):
    quiet = quieten(waiter())
    timer = threading.Timer(SHORT, notify_from, [second_connection()])
    timer.start()
    heard, took = seconds(lambda: quiet.wait(LONG))
    timer.join()
    assert heard
    assert took < LONG / 2


@postgresql
@pytest.mark.process
def test_a_hint_in_another_process_ends_the_wait(waiter, spawn):
    quiet = quieten(waiter())
    code = "from django.db import *; connection.ensure_connection(); from outbox.wakeup import hint; hint('default')"
    process = spawn("shell", "-c", code)
    assert quiet.wait(LONG), process.output()
    assert process.wait(LONG) == 0


@postgresql
def test_the_receiver_looks_again_when_the_sender_is_no_longer_silent(waiter, second_connection):
    """A commit that the sender's allowance kept silent happened before that."""
    quiet, sender = quieten(waiter()), second_connection()
    notify_from(sender, "silent 200")
    assert quiet.wait(LONG)
    heard, took = seconds(lambda: quiet.wait(LONG))
    assert heard
    assert 0.1 < took < LONG / 2
    assert not quiet.wait(SHORT)


@postgresql
def test_the_silence_of_one_sender_is_not_cut_short_by_another(waiter, second_connection):
    quiet, sender = quieten(waiter()), second_connection()
    notify_from(sender, "silent 400")
    assert quiet.wait(LONG)
    notify_from(sender, "silent 1")
    assert quiet.wait(LONG)
    heard, took = seconds(lambda: quiet.wait(LONG))
    assert heard
    assert 0.2 < took < LONG / 2


@postgresql
def test_the_receiver_looks_once_when_the_sender_may_go_on(waiter, second_connection):
    quiet = quieten(waiter())
    notify_from(second_connection())
    assert quiet.wait(LONG)
    assert not quiet.wait(4 * SHORT)


@postgresql
@pytest.mark.parametrize("payload", ["silent ", "silent x", "silent -1", "silent 99999999999999999999"])
def test_nonsense_about_silence_is_heard_and_believed_for_a_second_at_most(waiter, second_connection, payload):
    quiet = quieten(waiter())
    notify_from(second_connection(), payload)
    assert quiet.wait(LONG)
    assert quiet.mode == "notify"
    assert quiet._ear.silence <= 1.0


@postgresql
def test_what_was_kept_silent_is_looked_for_when_the_silence_is_over(waiter, listener, monkeypatch):
    """From end to end: the second of two commits is not told, and the receiver looks after it all the same."""
    monkeypatch.setattr(wakeup, "SAVED", 1e-9)
    quiet = quieten(waiter())
    connection.ensure_connection()
    with monkeypatch.context() as patch:
        patch.setattr(wakeup.Waiter, "wake", lambda self: None)  # as if it were another process
        wakeup.hint("default")
        wakeup.hint("default")
    assert listener() == 1
    assert quiet.wait(LONG), "the notification"
    assert quiet.wait(LONG), "the end of the silence"


@postgresql
@pytest.mark.usefixtures("miserly")
def test_a_process_that_has_spent_its_allowance_sends_nothing(listener):
    connection.ensure_connection()
    for _ in range(50):
        wakeup.hint("default")
    assert listener() == 1
    wakeup._allowances.clear()
    wakeup.hint("default")
    assert listener() == 1


@postgresql
@pytest.mark.usefixtures("miserly")
def test_ten_thousand_staged_at_once_send_one_notification(listener):
    """Scenario 35."""
    with transaction.atomic():
        for _ in range(10_000):
            transaction.on_commit(lambda: wakeup.hint("default"))
        assert listener() == 0
    assert listener() == 1


@postgresql
def test_no_notification_is_sent_inside_a_transaction(listener):
    """Invariant 12: NOTIFY there would serialise the commits of the whole application."""
    with transaction.atomic():
        wakeup.hint("default")
    transaction.set_autocommit(False)
    wakeup.hint("default")
    transaction.rollback()
    transaction.set_autocommit(True)
    assert listener() == 0
    wakeup.hint("default")
    assert listener() == 1


@postgresql
def test_no_connection_is_opened_for_a_hint():
    connection.close()
    wakeup.hint("default")
    assert connection.connection is None


@postgresql
@pytest.mark.parametrize(
    "options",
    [{}, {"prepare_threshold": 0, "server_side_binding": True}, {"pool": {"min_size": 1, "max_size": 2}}],
    ids=["usual", "prepared", "pooled"],
)
def test_a_notification_leaves_nothing_in_the_session(alias, listener, options):
    pytest.importorskip("psycopg")
    session = alias("special", **options)
    session.settings_dict["CONN_MAX_AGE"] = 0
    with session.cursor() as cursor:
        cursor.execute("SET synchronous_commit TO local")
    wakeup.hint("special")
    wakeup.hint("special")
    assert listener() == 2
    with session.cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('synchronous_commit'), current_setting('lock_timeout'), "
            "(SELECT count(*) FROM pg_prepared_statements)"
        )
        assert cursor.fetchone()[:2] == ("local", "0")
    assert session.get_autocommit()


@postgresql
def test_a_notification_does_not_count_as_a_statement_of_the_caller(django_assert_num_queries):
    with django_assert_num_queries(0):
        wakeup.hint("default")


@postgresql
def test_a_notification_that_fails_reaches_nobody_and_leaves_the_connection_usable(second_connection, caplog):
    """Scenario 6 (b): here the session is killed between the commit and the hint."""
    connection.ensure_connection()
    with second_connection().cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
    wakeup.hint("default")
    assert "could not be notified" in caplog.text
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


@postgresql
def test_after_a_failed_notification_the_next_commits_do_not_pay_again(monkeypatch, caplog):
    tried = []

    def refuse(*arguments):
        tried.append(arguments)
        raise Error("refused")

    monkeypatch.setattr(wakeup, "notify", refuse)
    connection.ensure_connection()
    for _ in range(5):
        wakeup.hint("default")
    assert len(tried) == 1
    for _ in range(5):
        wakeup._allowances.clear()
        wakeup.hint("default")
    assert len(tried) == 6
    assert caplog.text.count("could not be notified") == 1


@postgresql
@override_settings(OUTBOX={"WAKEUP": False})
def test_the_setting_turns_both_ends_off(waiter, listener):
    wakeup.hint("default")
    assert listener() == 0
    quiet = waiter()
    assert not quiet.wait(SHORT)
    assert quiet.mode == "poll"


# --- PostgreSQL: LISTEN -----------------------------------------------------------------------------------------------


@postgresql
def test_the_listener_is_a_session_of_its_own_outside_any_transaction(waiter):
    """Scenario 34."""
    quieten(waiter())
    connection.ensure_connection()
    [(pid, state)] = listening_pid()
    assert state == "idle"
    assert pid != connection.connection.info.backend_pid


@postgresql
def test_a_killed_listener_listens_again_and_looks_once(waiter, second_connection, monkeypatch, caplog):
    """Scenario 34."""
    monkeypatch.setattr(wakeup, "REOPEN_AFTER", 0.01)
    quiet = quieten(waiter())
    [(pid, _)] = listening_pid()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
    assert quiet.wait(LONG)
    assert quieten(quiet).mode == "notify"
    [(new, _)] = listening_pid()
    assert new != pid
    assert "only noticed by polling" not in caplog.text  # it listens again already
    notify_from(second_connection())
    assert quiet.wait(LONG)


@postgresql
@override_settings(OUTBOX={"LISTEN_DATABASE": "other"})
def test_a_listener_that_hears_nothing_is_found_out_by_a_probe(waiter, monkeypatch, caplog):
    """Scenario 33: as behind a transaction pooler, LISTEN succeeds here, and nothing arrives."""
    monkeypatch.setattr(listening, "PROBE_PATIENCE", SHORT)
    deaf = waiter()
    assert deaf.wait(LONG), "it listens"
    assert not deaf.wait(4 * SHORT)
    assert deaf.mode == "poll"
    assert "LISTEN_DATABASE" in caplog.text
    assert deaf._reopen_at - monotonic() > 20, "the pooler will not go away soon"


@postgresql
def test_a_direct_alias_can_be_named_for_the_listener(waiter, alias, second_connection):
    """Scenario 33: the way out."""
    alias("direct", application_name="outbox-direct")
    with override_settings(OUTBOX={"LISTEN_DATABASE": "direct"}):
        quiet = quieten(waiter())
    with connection.cursor() as cursor:
        cursor.execute("SELECT query FROM pg_stat_activity WHERE application_name = 'outbox-direct'")
        assert cursor.fetchall() == [(f'LISTEN "{wakeup.channel()}"',)]
    notify_from(second_connection())
    assert quiet.wait(LONG)


@postgresql
def test_a_listener_takes_no_connection_out_of_a_pool(waiter, alias):
    pytest.importorskip("psycopg_pool")
    session = alias("pooled", pool={"min_size": 1, "max_size": 1, "timeout": 1})
    session.settings_dict["CONN_MAX_AGE"] = 0
    quiet = quieten(waiter("pooled"))
    assert quiet.mode == "notify"
    with session.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_listening_channels()")
        assert cursor.fetchone() == (0,)
    session.close()
    assert session.pool.get_stats()["pool_available"] == 1


@postgresql
def test_a_listener_that_became_deaf_is_found_out(waiter, monkeypatch):
    quiet = quieten(waiter())
    [(pid, _)] = listening_pid()
    quiet._ear._connection.cursor().execute("UNLISTEN *")
    monkeypatch.setattr(listening, "PROBE_PATIENCE", SHORT)
    quiet._ear.due = 0.0
    assert not quiet.wait(4 * SHORT)
    assert quiet.mode == "poll"
    quiet._reopen_at = 0.0
    assert quieten(quiet).mode == "notify"
    assert [each for each, _ in listening_pid()] != [pid]


@postgresql
def test_probes_of_others_wake_nobody(waiter, second_connection):
    quiet = quieten(waiter())
    session = second_connection()
    session.ensure_connection()
    listening.notify(session, wakeup.channel(), "0123456789abcdef")
    assert not quiet.wait(4 * SHORT)


@postgresql
def test_only_its_own_probe_proves_a_listener(waiter, second_connection, monkeypatch):
    """Behind a pooler, what arrives in answer to LISTEN itself proves nothing."""
    monkeypatch.setattr(listening, "may_notify", lambda connection: False)
    unproven = waiter()
    assert unproven.wait(LONG), "it listens"
    session = second_connection()
    session.ensure_connection()
    listening.notify(session, wakeup.channel(), "0123456789abcdef")
    assert not unproven.wait(4 * SHORT)
    assert unproven.mode == "poll"
    notify_from(session)
    assert unproven.wait(LONG), "it is heard all the same"


@postgresql
def test_an_idle_wait_sends_no_statement(waiter, second_connection):
    """Scenario 62: the budget of one statement a poll belongs to the look at the table."""
    quiet = quieten(waiter())
    observer = second_connection()
    with observer.cursor() as cursor:
        sessions = "SELECT pid, query_start FROM pg_stat_activity WHERE datname = current_database() AND pid <> %s"
        cursor.execute(sessions, [observer.connection.info.backend_pid])
        before = cursor.fetchall()
        for _ in range(5):
            assert not quiet.wait(SHORT)
        cursor.execute(sessions, [observer.connection.info.backend_pid])
        assert cursor.fetchall() == before


@postgresql
def test_psycopg_2_polls(waiter, monkeypatch):
    monkeypatch.setattr(connections["default"], "Database", ModuleType("psycopg2"))
    quiet = waiter()
    assert not quiet.wait(SHORT)
    assert quiet.mode == "poll"


# --- SQLite -----------------------------------------------------------------------------------------------------------


@sqlite
def test_a_commit_of_another_connection_ends_the_wait(waiter, second_connection):
    quiet = quieten(waiter())
    writer = second_connection()
    with writer.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        cursor.execute("INSERT INTO testapp_order (reference, total, note) VALUES ('a', 1, '')")
        assert not quiet.wait(4 * SHORT), "nothing is committed yet"
        cursor.execute("ROLLBACK")
        assert not quiet.wait(4 * SHORT), "nothing was committed"
        cursor.execute("INSERT INTO testapp_order (reference, total, note) VALUES ('a', 1, '')")
    heard, took = seconds(lambda: quiet.wait(LONG))
    assert heard
    assert took < LONG / 2
    assert not quiet.wait(4 * SHORT)


@sqlite
def test_the_counter_is_read_more_often_for_a_while_after_a_change(waiter, second_connection):
    quiet = quieten(waiter())
    ear, now = quiet._ear, monotonic() + 100
    assert not ear.heard(now)
    assert ear.due == now + listening.CHANGES_EVERY
    with second_connection().cursor() as cursor:
        cursor.execute("INSERT INTO testapp_order (reference, total, note) VALUES ('a', 1, '')")
    now = ear.due
    assert ear.heard(now)
    assert ear.due == now + listening.CHANGES_OFTEN
    assert not ear.heard(ear.due), "nothing new"
    assert not ear.heard(now + 2)
    assert ear.due == now + 2 + listening.CHANGES_EVERY


@sqlite
def test_a_commit_just_before_a_wait_ends_it(waiter, second_connection):
    """The counter is compared with what was seen before the look at the table, so nothing falls in between."""
    quiet = quieten(waiter())
    with second_connection().cursor() as cursor:
        cursor.execute("INSERT INTO testapp_order (reference, total, note) VALUES ('a', 1, '')")
    assert quiet.wait(SHORT * 10)


@sqlite
def test_a_locked_database_file_does_not_hold_up_the_wait(waiter, alias, tmp_path):
    """In rollback-journal mode a reader has to wait for the writer: the connection's timeout must not apply here."""
    path = tmp_path / "journal.sqlite3"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("CREATE TABLE t (a)")
    session = alias("journal", timeout=LONG, init_command="")
    session.settings_dict["NAME"] = str(path)
    quiet = quieten(waiter("journal"))
    writer.execute("BEGIN EXCLUSIVE")
    writer.execute("INSERT INTO t VALUES (1)")
    heard, took = seconds(lambda: quiet.wait(4 * SHORT))
    assert not heard
    assert took < LONG / 2
    assert quiet.mode == "data_version"
    writer.execute("COMMIT")
    assert quiet.wait(LONG)
    writer.close()


@sqlite
@pytest.mark.parametrize("name", [":memory:", "file:shared?mode=memory&cache=shared"])
def test_a_database_in_memory_is_polled(waiter, alias, name):
    session = alias("memory")
    session.settings_dict["NAME"] = name
    quiet = waiter("memory")
    assert not quiet.wait(SHORT)
    assert quiet.mode == "poll"


@sqlite
def test_a_reopened_counter_counts_as_a_change(waiter, caplog):
    caplog.set_level(logging.WARNING, "outbox")
    quiet = quieten(waiter())
    quiet._ear._connection.connection.close()  # as if the file had vanished
    assert not quiet.wait(SHORT * 2)
    assert quiet.mode == "poll"
    quiet._reopen_at = 0.0
    assert quiet.wait(LONG)
    assert quiet.mode == "data_version"
