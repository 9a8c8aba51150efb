"""``manage.py demo``: three systems at work, a dispatcher killed in mid-work, and books that balance all the same."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connection
from django.db.models import Count, Q
from django.utils import timezone

from example_project.ai_jobs.queues import job_queue
from example_project.demo import books, business
from example_project.demo.dispatchers import dispatchers, kill_one_in_mid_work
from example_project.demo.screen import Screen
from example_project.tasks.engine import engine
from outbox.models import Attempt, Message

ON_STAGE = "OUTBOX_DEMO"  # set in the environment of the demo itself and of its dispatchers
PATIENCE = 90  # seconds until the demo gives up on unsettled messages
DEAD_LETTERS = "admin/outbox/message/?place=dead"


class Command(BaseCommand):
    help = "Let three systems work while a dispatcher is killed, and prove that every commit was delivered or is dead."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument(
            "--serve", nargs="?", type=int, const=8000, metavar="PORT", help="open the admin afterwards"
        )
        parser.add_argument("--size", type=int, default=80, help="objects per system (%(default)s)")
        parser.add_argument("--folder", type=Path, default=settings.BASE_DIR, help="where its files are made")

    def handle(self, *, serve: int | None, size: int, folder: Path, **options: Any) -> None:
        if ON_STAGE not in os.environ:
            enter_stage(folder.resolve())
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that nothing is left running
        log = folder / "demo.log"
        divert(logging.getLogger("outbox"), log)
        self.screen = Screen(self.stdout, self.style)
        self.screen.title(f"Three systems, one outbox, {connection.display_name}")
        self.prepare()
        since = timezone.now()
        self.first = Message.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
        try:
            self.perform(size, since, log)
            if serve:
                self.serve(serve, log)
        finally:
            engine().forget()
            job_queue().forget()

    def perform(self, size: int, since: datetime, log: Path) -> None:
        tally = self.play(size)
        self.deliver(log)
        self.report()
        if not self.prove(tally, books.audit(since, self.first)):
            raise CommandError("The books do not balance.")
        self.screen.write(self.style.SUCCESS(f"\n  The books balance. {self.screen.seconds:.0f} s in all.\n"))

    def prepare(self) -> None:
        call_command("migrate", verbosity=0)
        users = get_user_model().objects
        if known := users.filter(username="admin").exists():
            self.login = "admin"
        else:
            users.create_superuser("admin", "admin@example.com", "admin")
            self.login = "admin, password admin"
        self.screen.done(f"Tables migrated; the admin user {'was there' if known else 'is'}: {self.login}")

    def play(self, size: int) -> business.Tally:
        tally = business.play(size)
        for system in books.SYSTEMS:
            committed, rolled_back = tally.committed[system], tally.rolled_back[system]
            self.screen.write(f"    {system:<10}{committed:>4} transactions committed, {rolled_back:>3} rolled back")
        self.screen.done(
            f"Business done; {tally.at_once} notifications left right after their commit, {tally.postponed} must wait"
        )
        return tally

    def deliver(self, log: Path) -> None:
        """Run two dispatchers until everything is settled, and kill one on the way."""
        total = self.messages().count()
        before = self.settled()
        killed = False
        with dispatchers(2, log) as running:
            self.screen.done(f"Two dispatchers started, processes {running[0].pid} and {running[1].pid}")
            deadline = time.monotonic() + PATIENCE
            while (settled := self.settled()) < total:
                if not killed and settled > before + (total - before) // 4:
                    killed = self.kill_one(running)
                self.screen.progress(settled, total, self.situation())
                if all(process.poll() is not None for process in running):
                    raise CommandError(f"No dispatcher runs any more. Their log is {log}.")
                if time.monotonic() > deadline:
                    raise CommandError(f"{total - settled} messages are not settled. The dispatchers' log is {log}.")
                time.sleep(0.1)
            self.screen.done(f"All {total:,} messages settled")
        if not killed:
            raise CommandError("No dispatcher was killed: there was too little work. Try a greater --size.")

    def kill_one(self, running: list) -> bool:
        struck = kill_one_in_mid_work(running)
        if struck:
            process, left = struck
            self.screen.shock(
                f"Dispatcher {process.pid} killed in mid-work (SIGKILL) with {left} messages in its hands"
            )
        return struck is not None

    def messages(self) -> Any:
        return Message.objects.filter(pk__gt=self.first)

    def settled(self) -> int:
        return self.messages().exclude(state="pending").count()

    def situation(self) -> str:
        counts = {
            "in flight": self.messages().in_flight().count(),
            "retrying": self.messages().retrying().count(),
            "dead": self.messages().dead().count(),
        }
        return "".join(f" · {count} {name}" for name, count in counts.items() if count)

    def report(self) -> None:
        """What happened, per topic."""
        failed = dict(
            Attempt.objects.filter(message_id__gt=self.first, outcome__in=["failed", "timed_out"])
            .values_list("message__topic")
            .annotate(Count("pk"))
        )
        counts = {
            "staged": Count("pk"),
            "delivered": Count("pk", filter=Q(state="delivered")),
            "dead": Count("pk", filter=Q(state="dead")),
        }
        found = self.messages().values("topic").annotate(**counts).order_by("topic")
        rows = [
            (each["topic"], each["staged"], each["delivered"], failed.get(each["topic"], 0), each["dead"])
            for each in found
        ]
        totals = ("", *(sum(row[column] for row in rows) for column in range(1, 5)))
        self.screen.title("Per topic")
        self.screen.table(("topic", "staged", "delivered", "retried", "dead"), [*rows, totals])

    def prove(self, tally: business.Tally, accounts: list[books.Account]) -> bool:
        """Compare the business rows with what arrived outside the outbox's tables."""
        self.screen.title("The books")
        for each in accounts:
            self.screen.verdict(
                each.balanced,
                f"{each.system:<8} {len(each.committed):>5,} intents committed = {len(each.arrived):>5,} in the "
                f"{books.OUTSIDE[each.system]} + {len(each.dead)} dead{faults(each)}",
            )
        escaped = tally.void & {key for each in accounts for key in each.arrived}
        self.screen.verdict(
            not escaped,
            f"{tally.rolled_back.total()} transactions rolled back with {len(tally.void)} intents: "
            f"{len(escaped) or 'none'} of them delivered",
        )
        repeated = sum(each.repeated for each in accounts)
        self.screen.verdict(
            True, f"{repeated or 'nothing'} received twice: at least once is the promise, the event key tells"
        )
        for letter in self.messages().dead():
            self.screen.write(f"\n  Dead letter {letter.pk}, {letter.error_code}: {letter.error_text}")
        self.screen.write("  Look at it in the admin: python manage.py demo --serve")
        return not escaped and all(each.balanced for each in accounts)

    def serve(self, port: int, log: Path) -> None:
        self.screen.write(f"  http://127.0.0.1:{port}/{DEAD_LETTERS}   {self.login}; Ctrl-C ends it\n")
        with dispatchers(1, log):
            call_command("runserver", f"127.0.0.1:{port}", use_reloader=False)


def divert(logger: logging.Logger, log: Path) -> None:
    """Send its lines to where the dispatchers write theirs, not onto the screen."""
    logger.addHandler(logging.FileHandler(log))
    logger.propagate = False


def enter_stage(folder: Path) -> None:
    """Start again in an environment of the demo's own, which its dispatchers inherit: fresh files and bad weather."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("demo.*"):
        old.unlink()
    environment = {
        "LOG_LEVEL": "WARNING",
        "WORLD_LATENCY": "all=0.02",
        "WORLD_FAULTS": "0.05",
        **os.environ,
        "DATABASE_URL": os.environ.get("DATABASE_URL") or f"sqlite:///{folder}/demo.sqlite3",
        "WORLD_JOURNAL": str(folder / "demo.jsonl"),
        "WORLD_NAMESPACE": f"demo-{secrets.token_hex(4)}",  # brokers are shared: nothing of an earlier run counts
        ON_STAGE: "1",
    }
    command = [sys.executable, str(settings.BASE_DIR / "manage.py"), *sys.argv[1:]]
    os.execve(sys.executable, command, environment)  # noqa: S606 - itself


def faults(account: books.Account) -> str:
    found = {
        "missing": account.missing,
        "without a commit": account.unasked,
        "neither delivered nor dead": account.unsettled,
    }
    return "".join(f"; {len(keys)} {name}, such as {min(keys)}" for name, keys in found.items() if keys)
