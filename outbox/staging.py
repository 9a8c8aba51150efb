"""Stage intents in the caller's transaction, and in no other: the doors to the outbox.

Everything is checked in Python before the first statement, so a refusal never spoils the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, router, transaction

from outbox.exceptions import InvalidIntent, NotInTransaction
from outbox.handlers import Topic
from outbox.intents import Instant, Intent, draft, drafts_of
from outbox.models import Message
from outbox.recording import Staged, write


def stage(
    topic: str | Topic,
    payload: Any,
    *,
    event_key: str | None = None,
    payload_version: int = 1,
    ordering_key: str | None = None,
    deliver_at: Instant | None = None,
    expires_at: Instant | None = None,
    headers: Mapping[str, Any] | None = None,
    deliver_now: bool = False,
    using: str | None = None,
) -> Staged:
    """Store an intent in the caller's open transaction: it is delivered if, and only if, that commits.

    Staging an event key again changes nothing and returns the messages that are there. ``deliver_at`` and
    ``expires_at`` are aware datetimes, or timedeltas from now by the database's clock. ``deliver_now`` delivers in this
    process right after the commit. ``using`` is the alias of the transaction; by default where the router writes.

    Raises NotInTransaction, InvalidIntent (InvalidPayload, UnknownTopic) and EventKeyConflict; after any of them the
    transaction goes on.
    """
    alias = _callers_transaction(using, "stage")
    intent = Intent(
        topic,
        payload,
        event_key=event_key,
        payload_version=payload_version,
        ordering_key=ordering_key,
        deliver_at=deliver_at,
        expires_at=expires_at,
        headers=headers,
        deliver_now=deliver_now,
    )
    return write(alias, [draft(intent)])[0]


async def astage(
    topic: str | Topic,
    payload: Any,
    *,
    event_key: str | None = None,
    payload_version: int = 1,
    ordering_key: str | None = None,
    deliver_at: Instant | None = None,
    expires_at: Instant | None = None,
    headers: Mapping[str, Any] | None = None,
    deliver_now: bool = False,
    using: str | None = None,
) -> Staged:
    """`stage` in a transaction of its own: for intents without business rows.

    Async code that writes business rows, too, takes ``DurableCommand().aexecute()``. Cancelling the await does not undo
    the commit. Raises NotInTransaction when somebody's transaction is open on the thread that runs synchronous code.
    """
    intent = Intent(
        topic,
        payload,
        event_key=event_key,
        payload_version=payload_version,
        ordering_key=ordering_key,
        deliver_at=deliver_at,
        expires_at=expires_at,
        headers=headers,
        deliver_now=deliver_now,
    )
    return await sync_to_async(_stage_alone, thread_sensitive=True)(intent, using)


def stage_many(intents: Iterable[Intent], using: str | None = None) -> list[Staged]:
    """Stage thousands of intents in a few statements. The results are in their order; if it raises, none is stored."""
    alias = _callers_transaction(using, "stage_many")
    drafts = drafts_of(intents, "intents")
    if not drafts:
        return []
    with transaction.atomic(using=alias):  # a conflict takes back what this call has inserted before it
        return write(alias, drafts)


@contextmanager
def own_transaction(using: str | None) -> Iterator[str]:
    """A transaction that this block alone commits. Raises NotInTransaction inside somebody else's."""
    alias = _alias(using)
    connection = connections[alias]
    if _blocks(connection) or not (connection.in_atomic_block or connection.get_autocommit()):
        raise NotInTransaction(
            f"A transaction of its own was asked for on database {alias!r}, but one is already open on this thread "
            "(all synchronous code of an async program shares one): what is written now would be lost with its "
            "rollback. Inside your own atomic() block call stage(); keep no transaction open across an await."
        )
    with transaction.atomic(using=alias):
        yield alias


def _stage_alone(intent: Intent, using: str | None) -> Staged:
    ready = draft(intent)
    with own_transaction(using) as alias:
        return write(alias, [ready])[0]


def _blocks(connection: Any) -> list[Any]:
    """The open atomic blocks, without those of the test case: they would hide that a block is missing."""
    return [block for block in connection.atomic_blocks if not block._from_testcase]


def _alias(using: str | None) -> str:
    if using is not None and not isinstance(using, str):
        raise InvalidIntent(f"using must be the alias of a database, not {using!r}.")
    return using or router.db_for_write(Message)


def _callers_transaction(using: str | None, function: str) -> str:
    alias = _alias(using)
    if _blocks(connections[alias]):
        return alias
    elsewhere = [repr(each.alias) for each in connections.all(initialized_only=True) if _blocks(each)]
    hint = (
        f"An atomic() block is open on {', '.join(elsewhere)}: say which one with using=…, "
        "or give atomic() the same alias."
        if elsewhere
        else "Put it into the `with transaction.atomic():` block that writes the business rows."
    )
    raise NotInTransaction(
        f"{function}() needs an atomic() block of yours on database {alias!r}, so that the message is committed with "
        f"your rows or not at all (neither set_autocommit(False) nor the block of a TestCase is one). {hint}"
    )
