"""What must be in order before a dispatcher starts: its handlers, its tables, and a plan that makes sense."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import CommandError
from django.db import Error, connections, router

from outbox import schema
from outbox.database import close_quietly
from outbox.handlers import Handler, registry
from outbox.limits import Limits
from outbox.management.arguments import USAGE
from outbox.models import Message
from outbox.plans import Plan

logger = logging.getLogger("outbox")

MOST_PROCESSES = 1000
LAST_PORT = 65535


def plans_of(given: dict[str, Any]) -> list[Plan]:
    """How to serve each database, as the options of the command say. CommandError says what is not in order."""
    if given["once"] and given["drain"]:
        raise CommandError("--once and --drain contradict one another.", returncode=USAGE)
    processes = given["processes"]
    if type(processes) is not int or not 1 <= processes <= MOST_PROCESSES:
        text = f"--processes is {processes!r}; it must be a whole number from 1 to {MOST_PROCESSES:,}."
        raise CommandError(text, returncode=USAGE)
    if processes > 1 and (given["once"] or given["drain"] or given["limit"] is not None):
        raise CommandError(
            "--processes are for work without an end, not for --once, --drain or --limit.", returncode=USAGE
        )
    port = given["probe_port"]
    if port is not None and (type(port) is not int or not 0 <= port <= LAST_PORT):
        raise CommandError(f"--probe-port is {port!r}; it must be from 0 to {LAST_PORT}.", returncode=USAGE)
    handlers = _select(given["topic"], given["exclude_topic"])
    aliases = list(dict.fromkeys(given["database"] or [router.db_for_write(Message)]))
    for using in aliases:
        _check_tables(using)
    return [_plan(using, handlers, given) for using in aliases]


def limits_of(given: dict[str, Any]) -> Limits:
    """After how much work a process ends."""
    try:
        return Limits(max_messages=given["max_messages"], max_rss=given["max_rss"], max_seconds=given["max_seconds"])
    except ValueError as error:
        raise CommandError(f"--{error}", returncode=USAGE) from None


def _select(topics: list[str], excluded: list[str]) -> list[Handler]:
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


def _check_tables(using: str) -> None:
    """Refuse to run where the tables are missing; a database that does not answer is waited for."""
    if using not in connections:
        raise CommandError(f"There is no database {using!r}; known: {', '.join(connections)}.", returncode=USAGE)
    try:
        lacking = schema.missing(using)
    except Error as error:
        logger.warning("The database %r does not answer yet: %s", using, error)
        return
    finally:
        if not connections[using].in_atomic_block:
            close_quietly(using)  # this thread will not need it again
    if lacking:
        raise CommandError(
            f"The database {using!r} lacks {', '.join(lacking)}. Run: manage.py migrate outbox --database {using}",
            returncode=1,
        )


def _plan(using: str, handlers: Sequence[Handler], given: dict[str, Any]) -> Plan:
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
