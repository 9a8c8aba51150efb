"""``manage.py outbox_dispatch``: deliver staged messages until stopped."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, Error, connections

from outbox.conf import options
from outbox.dispatcher import Dispatcher
from outbox.handlers import Handler, registry
from outbox.models import Message
from outbox.plans import Plan

logger = logging.getLogger("outbox")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text} is no number of seconds, 0 or more")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{text} is not at least 1")
    return value


class Command(BaseCommand):
    help = (
        "Deliver staged messages until stopped. The first SIGTERM or SIGINT stops claiming, lets running handlers "
        "finish within the grace and exits with 0; the second exits at once with 128 + the signal's number."
    )
    stealth_options = ("stop_event",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        current = options()
        add = parser.add_argument
        add("--topic", action="append", default=[], metavar="GLOB", help="only topics like this; may be repeated")
        add("--exclude-topic", action="append", default=[], metavar="GLOB", help="no topics like this; may be repeated")
        add("--database", action="append", default=[], metavar="ALIAS", help="may be repeated; default: 'default'")
        add("--concurrency", type=positive, default=current.CONCURRENCY, help="handlers at once (%(default)s)")
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--once", action="store_true", help="one claim; deliver that and exit")
        mode.add_argument("--drain", action="store_true", help="deliver until nothing is due now, and exit")
        add("--limit", type=positive, help="start at most so many messages, and exit")
        add("--lease", type=seconds, default=current.LEASE, help="seconds between two renewals ×3 (%(default)s)")
        add("--poll", type=seconds, default=current.POLL, help="seconds between two looks (%(default)s)")
        add("--grace", type=seconds, default=current.GRACE, help="seconds a stop waits for handlers (%(default)s)")
        add("--batch", type=positive, default=current.BATCH, help="messages in one claim at most (%(default)s)")
        add("--exit-on-db-error", action="store_true", help="exit with 1 instead of waiting for the database")
        add("--format", choices=("text", "json"), default="text", help="of the report (%(default)s)")

    def handle(self, *args: Any, stop_event: threading.Event | None = None, **given: Any) -> None:
        handlers = _selected(given["topic"], given["exclude_topic"])
        dispatchers = []
        for using in given["database"] or [DEFAULT_DB_ALIAS]:
            _check_table(using)
            dispatchers.append(Dispatcher(_plan(using, handlers, given)))
        restore = self._take_signals(dispatchers)
        try:
            codes = _run(dispatchers, stop_event)
        finally:
            restore()
        self._print_report(dispatchers, given["format"])
        failures = [each.failure for each in dispatchers if each.failure]
        if any(each.left_running for each in dispatchers):
            _leave(max(codes), failures)
        if failures:
            raise CommandError("; ".join(failures), returncode=1)

    def _take_signals(self, dispatchers: list[Dispatcher]) -> Any:
        """Stop on the first signal, leave at once on the second. Returns what brings the former handlers back."""
        seen: list[int] = []

        def on_signal(number: int, _frame: object) -> None:
            seen.append(number)
            if len(seen) > 1:
                os._exit(128 + number)
            for each in dispatchers:
                each.stop()

        if threading.current_thread() is not threading.main_thread():
            logger.debug("Not in the main thread: the dispatcher takes no signals.")
            return lambda: None
        former = {number: signal.signal(number, on_signal) for number in SIGNALS}
        return lambda: [signal.signal(number, handler) for number, handler in former.items()]

    def _print_report(self, dispatchers: list[Dispatcher], form: str) -> None:
        counts: Counter[str] = Counter()
        for each in dispatchers:
            counts.update(each.counts)
        names = ("processed", "delivered", "retried", "dead", "discarded", "skipped")
        if form == "json":
            self.stdout.write(json.dumps({name: counts[name] for name in names}))
        else:
            self.stdout.write(", ".join(f"{name} {counts[name]}" for name in names))


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
        raise CommandError(f"No handler matches; topics with a handler: {known}.", returncode=2)
    return handlers


def _check_table(using: str) -> None:
    """Refuse to run where the tables are missing; a database that does not answer is waited for."""
    if using not in connections:
        raise CommandError(f"There is no database {using!r}; known: {', '.join(connections)}.", returncode=2)
    connection = connections[using]
    try:
        with connection.cursor() as cursor:
            tables = connection.introspection.table_names(cursor)
    except Error as error:
        logger.warning("The database %r does not answer yet: %s", using, error)
        connection.close()
        return
    if Message._meta.db_table not in tables:
        raise CommandError(
            f"The database {using!r} has no outbox tables. Run: manage.py migrate outbox --database {using}",
            returncode=1,
        )


def _plan(using: str, handlers: list[Handler], given: dict[str, Any]) -> Plan:
    if given["lease"] <= 0 or given["poll"] <= 0:
        raise CommandError("--lease and --poll must be greater than 0.", returncode=2)
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


def _run(dispatchers: list[Dispatcher], stop_event: threading.Event | None) -> list[int]:
    """Run each dispatcher in a thread of its own, so that this one is free for signals, whatever the database does."""
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda each=each: codes.append(each.run()), name="outbox-loop", daemon=True)
        for each in dispatchers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if stop_event is not None and stop_event.is_set():
                for each in dispatchers:
                    each.stop()
    return codes if len(codes) == len(dispatchers) else [1]


def _leave(code: int, failures: list[str]) -> None:
    """Leave the process although threads are stuck in handlers: interpreter shutdown must not wait for them."""
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
