"""System checks: what is wrong with settings, handlers, routers and databases, before it costs a message.

The ids are permanent. Each has an entry in `CHECKS`, a hint, and its place in ``docs/reference/checks.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router

from outbox import redaction
from outbox.conf import Options, options, problems_of
from outbox.database import fails_reading_before_writing, tables_without_transactions, unsupported
from outbox.handlers import Handler, registry
from outbox.models import Attempt, Dispatcher, Intervention, Message
from outbox.overview import aliases, has_tables

CHECKS = {
    "outbox.E001": "The OUTBOX setting has an unknown option",
    "outbox.E002": "An option of the OUTBOX setting has a bad value",
    "outbox.E003": "A required topic has no handler",
    "outbox.E004": "Two handlers have one name",
    "outbox.E005": "Two handlers claim the same messages",
    "outbox.E006": "The router sends the outbox to a database where its tables are not allowed",
    "outbox.E007": "The router splits the outbox's tables between databases",
    "outbox.E008": "The database or its version is not supported",
    "outbox.E009": "A table of the outbox cannot roll back",
    "outbox.W001": "A declared topic has no handler",
    "outbox.W002": "The lease is shorter than three renewals",
    "outbox.W003": "Transactions on SQLite do not begin with IMMEDIATE",
    "outbox.W004": "The router sends the outbox to another database than the business rows",
    "outbox.W005": "The connection pool is smaller than a dispatcher needs",
    "outbox.W006": "Messages are pruned before their event keys may be forgotten",
    "outbox.W007": "One slot cannot be shared by several handlers",
    "outbox.W008": "A handler's share is less than one slot",
    "outbox.W009": "The backoff's cap is below its base",
    "outbox.W010": "Messages are due in a database without a dispatcher",
    "outbox.I001": "The router reads the outbox from another database than it writes",
}
TABLES = (Message, Attempt, Intervention, Dispatcher)
SHORTEST_LEASE = 3.0  # a renewal that did not get its row is tried again after a second; there shall be time for three
FURTHER_CONNECTIONS = 4  # of a dispatcher besides its slots: claimer, heartbeat, settling, retention

_KINDS = {"E": checks.Error, "W": checks.Warning, "I": checks.Info}


def anchor(check_id: str) -> str:
    """Where the documentation explains a check."""
    return f"docs/reference/checks.md#{check_id.lower().replace('.', '-')}"


def _found(check_id: str, fact: str, hint: str) -> CheckMessage:
    return _KINDS[check_id.removeprefix("outbox.")[0]](fact, hint=f"{hint} ({anchor(check_id)})", id=check_id)


def _check(tag: str = "outbox") -> Callable[[Callable[..., Iterable[CheckMessage]]], Callable[..., list[CheckMessage]]]:
    """Register a generator as a system check; one that is tagged for databases is told which are to be asked."""

    def decorate(generator: Callable[..., Iterable[CheckMessage]]) -> Callable[..., list[CheckMessage]]:
        def check(
            app_configs: Sequence[AppConfig] | None = None, databases: Sequence[str] | None = None, **kwargs: Any
        ) -> list[CheckMessage]:
            return list(generator(databases or ()) if tag == Tags.database else generator())

        check.__name__ = generator.__name__  # functools.wraps would show Django the generator's signature
        return register(check, tag)

    return decorate


# --- settings ---------------------------------------------------------------------------------------------------------


@_check()
def check_settings() -> Iterator[CheckMessage]:
    given = getattr(settings, "OUTBOX", None)
    known = {field.name for field in fields(Options)}
    bad = False
    for part in [{name: value} for name, value in given.items()] if isinstance(given, dict) else [given]:
        unknown = isinstance(part, dict) and not known.issuperset(part)
        for fact, hint in problems_of(part):
            bad = True
            yield _found("outbox.E001" if unknown else "outbox.E002", fact, hint)
    if not bad:
        yield from _settings_that_disagree(options())


def _settings_that_disagree(current: Options) -> Iterator[CheckMessage]:
    if current.LISTEN_DATABASE and current.LISTEN_DATABASE not in connections:
        fact = f"OUTBOX['LISTEN_DATABASE'] is {current.LISTEN_DATABASE!r}, but DATABASES has no such alias."
        yield _found("outbox.E002", fact, f"Name one of {', '.join(connections)}, or leave it empty.")
    if fault := redaction.problem():
        hint = "Name a function redact(text, *, kind, topic, **kwargs); until then payloads and errors are not shown."
        yield _found("outbox.E002", f"OUTBOX['REDACT']: {fault}.", hint)
    if current.LEASE < SHORTEST_LEASE:
        yield _found(
            "outbox.W002",
            f"OUTBOX['LEASE'] is {current.LEASE:g} s, which leaves less than a second between renewals.",
            f"Make it {SHORTEST_LEASE:g} s or more: one slow statement would lose leases, and messages run twice.",
        )
    if current.BACKOFF_CAP < current.BACKOFF_BASE:
        yield _found(
            "outbox.W009",
            f"OUTBOX['BACKOFF_CAP'] ({current.BACKOFF_CAP:g} s) is below its base ({current.BACKOFF_BASE:g} s).",
            "Raise BACKOFF_CAP or lower BACKOFF_BASE: as it is, the wait does not grow from failure to failure.",
        )
    for name in ("PRUNE_AFTER", "PRUNE_DEAD_AFTER"):
        age = getattr(current, name)
        if 0 < age < current.DEDUPE_WINDOW:
            yield _found(
                "outbox.W006",
                f"OUTBOX[{name!r}] ({age:g} s) is shorter than the DEDUPE_WINDOW ({current.DEDUPE_WINDOW:g} s).",
                "An event key is remembered as long as its message is kept: keep it longer, or narrow the window.",
            )


# --- handlers ---------------------------------------------------------------------------------------------------------


@_check()
def check_handlers() -> Iterator[CheckMessage]:
    required = registry.unhandled(required=True)
    for topic in registry.unhandled():
        hint = "Register one with @handler(...) in an outbox_handlers module of an installed app."
        if topic in required:
            fact = f"The required topic {topic!r} has no handler: dispatchers refuse to start."
            yield _found("outbox.E003", fact, hint)
        else:
            yield _found("outbox.W001", f"The topic {topic!r} has no handler: its messages wait.", hint)
    for duplicate in registry.duplicates:
        both = " and ".join(_place(each) for each in (registry.by_name(duplicate.name), duplicate) if each is not None)
        yield _found(
            "outbox.E004",
            f"Two handlers are named {duplicate.name!r}: {both}. Only the first is in force.",
            "Give the second one a name of its own: @handler(topic, name=...).",
        )
    yield from _contested_routes()


def _place(handler: Handler) -> str:
    function = handler.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _contested_routes() -> Iterator[CheckMessage]:
    owners: dict[str, Handler] = {}
    for handler in registry.handlers():
        for route in handler.routes:
            owner = owners.setdefault(route, handler)
            if owner is not handler:
                fact = f"The handlers {owner.name!r} and {handler.name!r} both claim messages of {route!r}."
                yield _found("outbox.E005", fact, "Take the name out of the aliases of one of them.")


@_check()
def check_shares() -> Iterator[CheckMessage]:
    handlers = registry.handlers()
    slots = _slots()
    if slots is None or len(handlers) < 2:
        return
    if slots == 1:
        yield _found(
            "outbox.W007",
            f"OUTBOX['CONCURRENCY'] is 1, but there are {len(handlers)} handlers: a slow one delays all others.",
            "Allow two slots at least, or start a dispatcher for each topic: outbox_dispatch --topic.",
        )
        return
    for handler in handlers:
        share = handler.share_given
        if share is not None and share * slots < 1:
            fact = f"The share of handler {handler.name!r} ({share:g} of {slots} slots) is less than one slot."
            yield _found("outbox.W008", fact, f"Make its share {1 / slots:g} or more.")


def _slots() -> int | None:
    try:
        return options().CONCURRENCY
    except ImproperlyConfigured:
        return None  # told by check_settings


# --- routers and connections ------------------------------------------------------------------------------------------


@_check()
def check_routers() -> Iterator[CheckMessage]:
    if not settings.DATABASE_ROUTERS:
        return
    write, read = router.db_for_write(Message), router.db_for_read(Message)
    homes = {model.__name__: router.db_for_write(model) for model in TABLES}
    business = {router.db_for_write(model) for model in apps.get_models() if model._meta.app_label != "outbox"}
    if not router.allow_migrate_model(write, Message):
        yield _found(
            "outbox.E006",
            f"The router writes messages to {write!r} but does not allow their table there.",
            "Let allow_migrate() and db_for_write() agree about the app label 'outbox'.",
        )
    if len(set(homes.values())) > 1:
        places = ", ".join(f"{name}: {alias}" for name, alias in homes.items())
        yield _found(
            "outbox.E007",
            f"The router splits the outbox's tables between databases ({places}).",
            "Route the whole app 'outbox' to one database: a settlement writes several of its tables at once.",
        )
    if business and write not in business:
        yield _found(
            "outbox.W004",
            f"The router writes messages to {write!r}, but every other model to {', '.join(sorted(business))}: "
            "what is staged there does not commit together with any business row.",
            "Route the app 'outbox' to the database of the business rows, or stage with using=... where they are.",
        )
    if read != write:
        yield _found(
            "outbox.I001",
            f"The router reads messages from {read!r} and writes them to {write!r}.",
            "The outbox itself always reads where it writes; queries of your own see what the replica has so far.",
        )


@_check()
def check_connections() -> Iterator[CheckMessage]:
    for alias in connections:
        if not router.allow_migrate_model(alias, Message):
            continue
        if fails_reading_before_writing(connections[alias]):
            yield _found(
                "outbox.W003",
                f"Transactions of the SQLite database {alias!r} begin DEFERRED.",
                "The outbox copes, but a transaction of yours that reads before it writes fails with 'database is "
                "locked' while a dispatcher writes: set OPTIONS['transaction_mode'] to 'IMMEDIATE'.",
            )
        slots, size = _slots(), _pool_size(alias)
        if slots is not None and size is not None and size < slots + FURTHER_CONNECTIONS:
            needed = slots + FURTHER_CONNECTIONS
            yield _found(
                "outbox.W005",
                f"The connection pool of {alias!r} holds {size} connections, but a dispatcher needs {needed}.",
                f"Set OPTIONS['pool']['max_size'] to {needed} or more: CONCURRENCY and {FURTHER_CONNECTIONS}.",
            )


def _pool_size(alias: str) -> int | None:
    """Connections of the pool, as psycopg_pool reads its options; None without one."""
    pool = connections[alias].settings_dict.get("OPTIONS", {}).get("pool")
    given = pool if isinstance(pool, dict) else {}
    return int(given.get("max_size") or given.get("min_size", 4)) if pool else None


# --- databases; run by check --database ALIAS -------------------------------------------------------------------------


@_check(Tags.database)
def check_databases(databases: Sequence[str]) -> Iterator[CheckMessage]:
    for alias in databases:
        if router.allow_migrate_model(alias, Message):
            try:
                yield from _check_database(alias)
            except Error:
                continue  # that it does not answer is said by whoever needs it first


def _check_database(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    refusal = unsupported(connection)
    if refusal:
        yield _found("outbox.E008", f"Database {alias!r}: {refusal}.", "See the supported databases.")
    if not has_tables(alias):
        return
    for table in tables_without_transactions(connection, [model._meta.db_table for model in TABLES]):
        fact = (
            f"The table {table!r} in database {alias!r} has an engine without transactions: nothing in it rolls back."
        )
        yield _found("outbox.E009", fact, f"Convert it: ALTER TABLE {table} ENGINE = InnoDB.")
    for each in aliases([alias]):
        if each.is_abandoned:
            fact = f"{each.due_text} messages are due in database {alias!r}, but no live dispatcher looks there."
            yield _found("outbox.W010", fact, f"Start one: manage.py outbox_dispatch --database {alias}.")
