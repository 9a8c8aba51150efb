"""System checks: what is wrong with settings, handlers, routers and databases, before it costs a message.

The ids are permanent. Each has an entry in `CHECKS`, a hint, and its place in ``docs/reference/checks.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections, router

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


def anchor(check_id: str) -> str:
    """Where the documentation explains a check."""
    return f"docs/reference/checks.md#{check_id.lower().replace('.', '-')}"


def _found(check_id: str, text: str, hint: str, obj: object = None) -> CheckMessage:
    kind = {"E": Error, "W": Warning, "I": Info}[check_id.partition(".")[2][0]]
    return kind(text, hint=f"{hint} ({anchor(check_id)})", obj=obj, id=check_id)


# --- settings ---------------------------------------------------------------------------------------------------------


@register("outbox")
def check_settings(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    given = getattr(settings, "OUTBOX", None)
    names = {field.name for field in fields(Options)}
    parts = [{name: value} for name, value in given.items()] if isinstance(given, dict) else [given]
    found = []
    for part in parts:
        unknown = isinstance(part, dict) and not names.issuperset(part)
        found += [_found("outbox.E001" if unknown else "outbox.E002", *problem) for problem in problems_of(part)]
    return found or [*_settings_that_disagree(options())]


def _settings_that_disagree(current: Options) -> Iterable[CheckMessage]:
    if current.LISTEN_DATABASE and current.LISTEN_DATABASE not in connections:
        yield _found(
            "outbox.E002",
            f"OUTBOX['LISTEN_DATABASE'] is {current.LISTEN_DATABASE!r}, but DATABASES has no such alias.",
            f"Name one of {', '.join(connections)}, or leave it empty.",
        )
    if current.LEASE < SHORTEST_LEASE:
        yield _found(
            "outbox.W002",
            f"OUTBOX['LEASE'] is {current.LEASE:g} s, which leaves less than a second between renewals.",
            f"Make it {SHORTEST_LEASE:g} s or more: one slow statement would lose leases, and messages run twice.",
        )
    if current.BACKOFF_CAP < current.BACKOFF_BASE:
        yield _found(
            "outbox.W009",
            f"OUTBOX['BACKOFF_CAP'] ({current.BACKOFF_CAP:g} s) is below OUTBOX['BACKOFF_BASE'] ({current.BACKOFF_BASE:g} s).",
            "Raise the cap, or lower the base: as it is, every retry waits for the cap at most and backs off no further.",
        )
    for name in ("PRUNE_AFTER", "PRUNE_DEAD_AFTER"):
        age = getattr(current, name)
        if 0 < age < current.DEDUPE_WINDOW:
            yield _found(
                "outbox.W006",
                f"OUTBOX[{name!r}] ({age:g} s) is shorter than OUTBOX['DEDUPE_WINDOW'] ({current.DEDUPE_WINDOW:g} s).",
                "An event key is remembered as long as its message is kept: keep messages longer, or shorten the window.",
            )


# --- handlers ---------------------------------------------------------------------------------------------------------


@register("outbox")
def check_handlers(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    found = []
    required = registry.unhandled(required=True)
    for topic in registry.unhandled():
        hint = "Register one with @handler(...) in an outbox_handlers module of an installed app."
        if topic in required:
            found.append(
                _found(
                    "outbox.E003", f"The required topic {topic!r} has no handler: dispatchers refuse to start.", hint
                )
            )
        else:
            found.append(_found("outbox.W001", f"The topic {topic!r} has no handler: its messages wait.", hint))
    for duplicate in registry.duplicates:
        first = registry.by_name(duplicate.name)
        functions = " and ".join(_place(each) for each in (first, duplicate) if each is not None)
        found.append(
            _found(
                "outbox.E004",
                f"Two handlers are named {duplicate.name!r}: {functions}. Only the first is in force.",
                "Give the second one a name of its own: @handler(topic, name=...).",
            )
        )
    return [*found, *_contested_routes(), *_useless_shares()]


def _place(handler: Handler) -> str:
    function = handler.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _contested_routes() -> Iterable[CheckMessage]:
    owners: dict[str, Handler] = {}
    for handler in registry.handlers():
        for route in handler.routes:
            owner = owners.setdefault(route, handler)
            if owner is not handler:
                yield _found(
                    "outbox.E005",
                    f"The handlers {owner.name!r} and {handler.name!r} both claim messages of {route!r}.",
                    "Take the name out of the aliases of one of them.",
                )


def _useless_shares() -> Iterable[CheckMessage]:
    try:
        slots = options().CONCURRENCY
    except ImproperlyConfigured:  # told by check_settings
        return
    handlers = registry.handlers()
    if len(handlers) < 2:
        return
    if slots == 1:
        yield _found(
            "outbox.W007",
            f"OUTBOX['CONCURRENCY'] is 1, but there are {len(handlers)} handlers: a slow one delays all others.",
            "Allow two slots at least, or start a dispatcher for each topic: outbox_dispatch --topic.",
        )
        return
    for handler in handlers:
        if handler.share_given is not None and handler.share_given * slots < 1:
            yield _found(
                "outbox.W008",
                f"Handler {handler.name!r} has a share of {handler.share_given:g}, which is less than one of {slots} slots; "
                "it gets one.",
                f"Make the share {1 / slots:g} or more.",
            )


# --- routers and connections ------------------------------------------------------------------------------------------


@register("outbox")
def check_routers(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    if not settings.DATABASE_ROUTERS:
        return []
    write, read = router.db_for_write(Message), router.db_for_read(Message)
    homes = {model.__name__: router.db_for_write(model) for model in TABLES}
    business = {router.db_for_write(model) for model in apps.get_models() if model._meta.app_label != "outbox"}
    found = []
    if not router.allow_migrate_model(write, Message):
        found.append(
            _found(
                "outbox.E006",
                f"The router writes messages to {write!r} but does not allow their table there.",
                "Let allow_migrate() and db_for_write() agree about the app label 'outbox'.",
            )
        )
    if len(set(homes.values())) > 1:
        places = ", ".join(f"{name}: {alias}" for name, alias in homes.items())
        found.append(
            _found(
                "outbox.E007",
                f"The router splits the outbox's tables between databases ({places}).",
                "Route the whole app 'outbox' to one database: a settlement writes several of its tables at once.",
            )
        )
    if business and write not in business:
        found.append(
            _found(
                "outbox.W004",
                f"The router writes messages to {write!r}, but no model of the project: the rest goes to "
                f"{', '.join(sorted(business))}. What is staged there does not commit with any business row.",
                "Route the app 'outbox' to the database of the business rows, or stage with using=...",
            )
        )
    if read != write:
        found.append(
            _found(
                "outbox.I001",
                f"The router reads messages from {read!r} and writes them to {write!r}.",
                "The outbox itself always reads where it writes; queries of your own see what the replica has so far.",
            )
        )
    return found


@register("outbox")
def check_connections(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    found = []
    for alias in connections:
        if not router.allow_migrate_model(alias, Message):
            continue
        if fails_reading_before_writing(connections[alias]):
            found.append(
                _found(
                    "outbox.W003",
                    f"Transactions of the SQLite database {alias!r} begin DEFERRED.",
                    "The outbox copes, but a transaction of yours that reads before it writes fails with 'database is locked' "
                    "while a dispatcher writes: set OPTIONS['transaction_mode'] to 'IMMEDIATE'.",
                )
            )
        found += _small_pool(alias)
    return found


def _small_pool(alias: str) -> list[CheckMessage]:
    pool = connections[alias].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return []
    given = pool if isinstance(pool, dict) else {}
    size = given.get("max_size") or given.get("min_size", 4)  # as psycopg_pool reads them
    try:
        needed = options().CONCURRENCY + FURTHER_CONNECTIONS
    except ImproperlyConfigured:  # told by check_settings
        return []
    if size >= needed:
        return []
    return [
        _found(
            "outbox.W005",
            f"The connection pool of {alias!r} holds {size} connections, but a dispatcher needs {needed}.",
            f"Set OPTIONS['pool']['max_size'] to {needed} or more: OUTBOX['CONCURRENCY'] and {FURTHER_CONNECTIONS}.",
        )
    ]


# --- databases; run by check --database ALIAS -------------------------------------------------------------------------


@register("outbox", Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    found = []
    for alias in databases or ():
        try:
            found += _check_database(alias)
        except DatabaseError:
            continue  # Django tells by itself when a database does not answer
    return found


def _check_database(alias: str) -> list[CheckMessage]:
    connection = connections[alias]
    if not router.allow_migrate_model(alias, Message):
        return []
    found = []
    refusal = unsupported(connection)
    if refusal:
        found.append(
            _found("outbox.E008", f"Database {alias!r}: {refusal}.", "Use PostgreSQL, MariaDB, MySQL or SQLite.")
        )
    if not has_tables(alias):
        return found
    for table in tables_without_transactions(connection, [model._meta.db_table for model in TABLES]):
        found.append(
            _found(
                "outbox.E009",
                f"The table {table!r} in database {alias!r} has an engine without transactions: a rollback leaves its rows.",
                f"Convert it: ALTER TABLE {table} ENGINE = InnoDB.",
            )
        )
    for each in aliases([alias]):
        if each.is_abandoned:
            found.append(
                _found(
                    "outbox.W010",
                    f"{each.due} messages are due in database {alias!r}, but no live dispatcher looks there.",
                    f"Start one: manage.py outbox_dispatch --database {alias}.",
                )
            )
    return found
