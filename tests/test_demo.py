"""``manage.py demo``: it plays to the end, kills a dispatcher, and its proof cannot be fooled."""

import io
import re
import signal
import socket
import uuid
from collections import Counter
from urllib.request import urlopen

import pytest
from django.core.management import CommandError
from django.core.management.color import no_style
from django.utils import timezone

from example_project import world
from example_project.ai_jobs import services as ai_jobs
from example_project.ai_jobs.queues import job_queue
from example_project.demo import books, business
from example_project.demo.books import Account
from example_project.demo.management.commands.demo import Command
from example_project.demo.screen import Screen
from example_project.media import services as media
from example_project.tasks import services as tasks
from tests.waiting import wait_until

# --- the whole play ---------------------------------------------------------------------------------------------------


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_demo_plays_kills_proves_and_serves_until_it_is_stopped(spawn, tmp_path, free_port, database_kind):
    # On SQLite in a fresh file of its own, elsewhere in the database that DATABASE_URL names.
    (tmp_path / "demo.sqlite3").write_text("left over from yesterday")
    environment = {"DATABASE_URL": ""} if database_kind == "sqlite" else {}
    process = spawn("demo", "--size", "24", "--folder", tmp_path, "--serve", free_port, environment=environment)
    wait_until(lambda: "Quit the server" in process.output() or process.poll() is not None, seconds=100)
    told = process.output()
    assert "killed in mid-work (SIGKILL)" in told
    assert "QUEUE_NOT_ALLOWED" in told
    assert [system for system in ("media", "tasks", "ai_jobs") if f"✓ {system}" not in told] == []
    assert "The books balance." in told
    address = f"http://127.0.0.1:{free_port}/admin/outbox/message/?place=dead"
    assert address in told
    with urlopen(address) as response:
        assert response.url.startswith(f"http://127.0.0.1:{free_port}/admin/login/")
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "demo.sqlite3").exists() == (database_kind == "sqlite")


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(settings, tmp_path):
    settings.WORLD_JOURNAL = str(tmp_path / "journal.jsonl")
    settings.WORLD_NAMESPACE = f"test-{uuid.uuid4().hex[:8]}"
    settings.REDIS_URL = settings.RABBITMQ_URL = ""
    return settings


def accounts(since):
    return {account.system: account for account in books.audit(since, 0)}


@pytest.mark.django_db
def test_an_intent_that_never_arrived_is_missing(outside):
    since = timezone.now()
    item = media.request("A film")
    account = accounts(since)["media"]
    assert account.missing == {f"media.requested:{item.pk}"}
    assert not account.balanced


@pytest.mark.django_db
def test_an_intent_that_arrived_balances_and_twice_is_told(outside):
    since = timezone.now()
    item = media.request("A film")
    for _ in range(2):
        world.deliver("listeners", f"media.requested:{item.pk}", {})
    account = accounts(since)["media"]
    assert account.balanced
    assert account.repeated == 1


@pytest.mark.django_db
def test_something_that_no_committed_row_asks_for_spoils_the_books(outside):
    since = timezone.now()
    world.deliver("listeners", "media.requested:nobody", {})
    account = accounts(since)["media"]
    assert account.unasked == {"media.requested:nobody"}
    assert not account.balanced


@pytest.mark.django_db
def test_an_event_without_a_task_must_at_least_be_settled(outside):
    since = timezone.now()
    tasks.finish_probe(tasks.import_recording("A lake", 1080))
    account = accounts(since)["tasks"]
    assert len(account.without_effect) == 5  # progress, and HD needs no transcoding
    assert account.unsettled == account.without_effect


@pytest.mark.django_db
def test_rows_of_an_earlier_run_are_left_out(outside):
    job = ai_jobs.submit("Why?")
    job_queue().add(str(job.pk), "standard", {})
    account = accounts(timezone.now())["ai_jobs"]
    assert account.committed == set()
    assert account.balanced  # it arrived only now, but a committed row asked for it


def test_a_dead_intent_counts_as_settled():
    account = Account(system="media", committed={"a", "b"}, arrived=Counter(["a"]), dead={"b"})
    assert account.balanced


@pytest.mark.django_db(transaction=True)
def test_what_was_rolled_back_is_remembered_and_not_there(outside):
    since = timezone.now()
    tally = business.play(8)
    assert tally.rolled_back == {"media": 1, "tasks": 1, "ai_jobs": 1}
    asked = {key for account in accounts(since).values() for key in account.committed | account.without_effect}
    assert len(tally.void) == 3
    assert not tally.void & asked


@pytest.mark.django_db(transaction=True)
def test_books_that_do_not_balance_are_an_error(outside, monkeypatch, tmp_path):
    command = Command(stdout=io.StringIO(), no_color=True)
    command.screen, command.first = Screen(command.stdout, command.style), 0
    monkeypatch.setattr(command, "deliver", lambda log: None)  # nobody delivers
    with pytest.raises(CommandError, match="do not balance"):
        command.perform(2, timezone.now(), tmp_path / "demo.log")
    told = command.stdout.getvalue()
    assert re.search("✗ media +[0-9]+ intents committed = .+ missing, such as media", told)


# --- the screen -------------------------------------------------------------------------------------------------------


class Lines:
    """An output that is no terminal."""

    def __init__(self):
        self.lines = []

    def isatty(self):
        return False

    def write(self, text):
        self.lines.append(text)


def test_progress_that_cannot_be_redrawn_takes_a_line_per_quarter():
    output = Lines()
    screen = Screen(output, no_style())
    for done in range(101):
        screen.progress(done, 100, "")
    assert len(output.lines) == 5


def test_a_table_is_aligned():
    output = Lines()
    Screen(output, no_style()).table(("topic", "dead"), [("a", 0), ("long.topic", 1234)])
    assert output.lines == ["    topic         dead", "    a                ·", "    long.topic   1,234"]
