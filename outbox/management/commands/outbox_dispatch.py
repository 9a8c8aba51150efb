"""``manage.py outbox_dispatch``: deliver staged messages until stopped."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.db import Error, connections, router

from outbox.conf import options
from outbox.database import close_quietly
from outbox.dispatcher import LAST_WRITES, Dispatcher
from outbox.handlers import Handler, registry
from outbox.management.arguments import USAGE, as_parsed, duration
from outbox.management.stopping import StopSignals
from outbox.models import Message
from outbox.plans import Plan

logger = logging.getLogger("outbox")

GLANCE = 0.1  # seconds between two looks at the threads
MARGIN = 5.0  # seconds beyond the grace and the last writes, after which a stop does not wait for its threads any more
COUNTS = ("processed", "delivered", "retried", "dead", "discarded", "skipped")


def seconds(text: str) -> float:
    """A number of seconds, also ``1e-3``, or a duration with a unit; the plan says what is too small or too large."""
    try:
        return float(text)
    except ValueError:
        return duration(text)


class Command(BaseCommand):
    help = (
        "Deliver staged messages until stopped. The first SIGTERM or SIGINT stops claiming, lets running handlers "
        "finish within the grace and exits with 0; the second exits at once with 128 + the signal's number."
    )
    stealth_options = ("stop_event",)
    requires_system_checks = ("outbox",)  # all checks would ask databases, and one that is away is to be waited for
    _owns_the_process = False

    def run_from_argv(self, argv: list[str]) -> None:
        self._owns_the_process = True
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        current = options()
        add = parser.add_argument
        add("--topic", action="append", default=[], metavar="GLOB", help="only topics like this; may be repeated")
        add("--exclude-topic", action="append", default=[], metavar="GLOB", help="no topics like this; may be repeated")
        add(
            "--database",
            action="append",
            default=[],
            metavar="ALIAS",
            help="may be repeated; default: where the router writes messages",
        )
        add("--concurrency", type=int, default=current.CONCURRENCY, help="handlers at once (%(default)s)")
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--once", action="store_true", help="one claim; deliver that and exit")
        mode.add_argument("--drain", action="store_true", help="deliver until nothing is due now, and exit")
        add("--limit", type=int, help="start at most so many messages, and exit")
        add(
            "--lease",
            type=seconds,
            default=current.LEASE,
            help="seconds that a claim lasts; renewed every third (%(default)s)",
        )
        add("--poll", type=seconds, default=current.POLL, help="seconds between two looks (%(default)s)")
        add("--grace", type=seconds, default=current.GRACE, help="seconds a stop waits for handlers (%(default)s)")
        add("--batch", type=int, default=current.BATCH, help="messages in one claim at most (%(default)s)")
        add("--exit-on-db-error", action="store_true", help="exit with 1 instead of waiting for the database")
        add("--format", choices=("text", "json"), default="text", help="of the report (%(default)s)")

    def handle(self, *args: Any, stop_event: threading.Event | None = None, **options: Any) -> None:
        given = as_parsed(self, options)
        handlers = _selected(given["topic"], given["exclude_topic"])
        aliases = list(dict.fromkeys(given["database"] or [router.db_for_write(Message)]))
        for using in aliases:
            _check_table(using)
        dispatchers = [Dispatcher(_plan(using, handlers, given)) for using in aliases]
        if not any(each.plan.ends_by_itself for each in dispatchers):
            self._say_what_starts(dispatchers)
        with StopSignals() as signals:
            _run(dispatchers, signals, stop_event)
        self._print_report(dispatchers, given["format"])
        failures = [each.failure for each in dispatchers if each.failure]
        if self._owns_the_process and any(each.left_running for each in dispatchers):
            _leave(failures)
        if failures:
            raise CommandError("; ".join(failures), returncode=1)

    def _say_what_starts(self, dispatchers: Sequence[Dispatcher]) -> None:
        plan = dispatchers[0].plan
        where = ", ".join(each.plan.using for each in dispatchers)
        topics = ", ".join(sorted({each.topic for each in plan.handlers}))
        self.stderr.write(
            f"Delivering {topics} from {where} in {plan.concurrency} slots as {dispatchers[0].name}. Ctrl-C stops.",
            self.style.SUCCESS,
        )

    def _print_report(self, dispatchers: Sequence[Dispatcher], form: str) -> None:
        counts: Counter[str] = Counter()
        for each in dispatchers:
            counts.update(each.counts)
        if form == "json":
            self.stdout.write(json.dumps({name: counts[name] for name in COUNTS}))
        else:
            self.stdout.write(", ".join(f"{name} {counts[name]}" for name in COUNTS))


def _selected(topics: list[str], excluded: list[str]) -> list[Handler]:
    """The handlers to serve. Refuses while a required topic has none, or two handlers share a name."""
    missing = registry.unhandled(required=True)
    if missing:
        raise CommandError(
            f"These required topics have no handler: {', '.join(missing)}. Their messages would wait for ever. "
            "Register a handler in an outbox_handlers module, or declare the topic without required=True.",
            returncode=1,
        )
    if registry.duplicates:
        names = ", ".join(sorted({each.name for each in registry.duplicates}))
        hint = "Give each its own: @handler(..., name=…)."
        raise CommandError(f"Several handlers are named {names}. {hint}", returncode=1)
    handlers = [
        each
        for each in registry.handlers()
        if (not topics or any(fnmatchcase(each.topic, glob) for glob in topics))
        and not any(fnmatchcase(each.topic, glob) for glob in excluded)
    ]
    if not handlers:
        known = ", ".join(sorted({each.topic for each in registry.handlers()})) or "none"
        raise CommandError(f"No handler matches; topics with a handler: {known}.", returncode=USAGE)
    for glob in dict.fromkeys(topics):
        if not any(fnmatchcase(each.topic, glob) for each in registry.handlers()):
            logger.warning("No topic with a handler matches %r.", glob)
    return handlers


def _check_table(using: str) -> None:
    """Refuse to run where the tables are missing; a database that does not answer is waited for."""
    if using not in connections:
        raise CommandError(f"There is no database {using!r}; known: {', '.join(connections)}.", returncode=USAGE)
    connection = connections[using]
    try:
        with connection.cursor() as cursor:
            tables = connection.introspection.table_names(cursor)
    except Error as error:
        logger.warning("The database %r does not answer yet: %s", using, error)
        return
    finally:
        if not connection.in_atomic_block:
            close_quietly(using)  # this thread will not need it again
    missing = {model._meta.db_table for model in apps.get_app_config("outbox").get_models()}.difference(tables)
    if missing:
        raise CommandError(
            f"The database {using!r} lacks {', '.join(sorted(missing))}. "
            f"Run: manage.py migrate outbox --database {using}",
            returncode=1,
        )


def _plan(using: str, handlers: list[Handler], given: dict[str, Any]) -> Plan:
    if given["once"] and given["drain"]:
        raise CommandError("--once and --drain contradict one another.", returncode=USAGE)
    try:
        return Plan(
            using=using,
            handlers=handlers,
            concurrency=given["concurrency"],
            lease=given["lease"],
            poll=given["poll"],
            grace=given["grace"],
            batch=given["batch"],
            mode="once" if given["once"] else "drain" if given["drain"] else "run",
            limit=given["limit"],
            exit_on_database_error=given["exit_on_db_error"],
        )
    except ValueError as error:
        raise CommandError(f"--{error}", returncode=USAGE) from None


def _run(dispatchers: Sequence[Dispatcher], signals: StopSignals, stop_event: threading.Event | None) -> None:
    """Run each dispatcher in a thread of its own, so that this one is free for signals, whatever the database does.

    When one of them gives up, all stop: whoever watches the process must see it end.
    """
    threads = {each: threading.Thread(target=each.run, name="outbox-loop", daemon=True) for each in dispatchers}
    for thread in threads.values():
        thread.start()
    leave_at: float | None = None
    while alive := [each for each, thread in threads.items() if thread.is_alive()]:
        asked = signals.seen or (stop_event is not None and stop_event.is_set())
        if leave_at is None and (asked or any(each.failure for each in dispatchers)):
            leave_at = time.monotonic() + max(each.plan.grace for each in dispatchers) + LAST_WRITES + MARGIN
            for each in dispatchers:
                each.stop()
            logger.info("Stopping: nothing more is claimed, and what runs may finish.")
        if leave_at is not None and time.monotonic() > leave_at:
            for each in alive:
                each.abandon()
            return
        signals.wait(GLANCE)


def _leave(failures: Sequence[str]) -> None:
    """Leave the process although threads are stuck in handlers: interpreter shutdown must not wait for them."""
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failures else 0)
