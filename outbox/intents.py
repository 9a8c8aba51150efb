"""An intent, and the draft that it becomes: checked in every part, with nothing left that a database could refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from outbox import payloads
from outbox.exceptions import InvalidIntent
from outbox.fields import JsonText
from outbox.handlers import Handler, Topic, lane_of, registry, route
from outbox.inserting import FromNow, Now, Row, Table
from outbox.models import Message

Instant = datetime | timedelta
T = TypeVar("T")

NOW = Now()

TABLE = Table(
    name=Message._meta.db_table,
    columns={
        "event_key": "text",
        "position": "integer",
        "topic": "text",
        "handler": "text",
        "route": "text",
        "payload": "text",
        "payload_version": "integer",
        "headers": "text",
        "digest": "bytea",
        "ordering_key": "text",
        "lane": "bigint",
        "staged_at": "instant",
        "deliver_at": "instant",
        "due_at": "instant",
        "expires_at": "instant",
    },
    constants={
        "state": "'pending'",
        "leased_by": "''",
        "attempt": "0",
        "spent": "0",
        "lapses": "0",
        "reason": "''",
        "error_type": "''",
        "error_code": "''",
        "error_text": "''",
        "payload_pruned": "false",
    },
)


@dataclass(frozen=True, slots=True)
class Intent:
    """What shall happen: the arguments of `stage` as a value."""

    topic: str | Topic
    payload: Any = field(repr=False)
    _: KW_ONLY
    event_key: str | None = None
    payload_version: int = 1
    ordering_key: str | None = None
    deliver_at: Instant | None = None
    expires_at: Instant | None = None
    headers: Mapping[str, Any] | None = field(default=None, repr=False)
    deliver_now: bool = False


class Target(NamedTuple):
    """For whom a draft makes a row: a handler's name, and the lane there."""

    handler: str
    lane: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An intent as it will be stored, with one target per row."""

    event_key: str
    topic: str
    payload: JsonText = field(repr=False)
    payload_version: int
    headers: JsonText | None = field(repr=False)
    digest: bytes
    ordering_key: str | None
    deliver_at: int | FromNow | None
    expires_at: int | FromNow | None
    deliver_now: bool
    targets: tuple[Target, ...]

    def row(self, position: int) -> Row:
        """The values of `TABLE.columns`."""
        handler, lane = self.targets[position]
        return (
            self.event_key,
            position,
            self.topic,
            handler,
            route(handler, self.payload_version),
            self.payload,
            self.payload_version,
            self.headers,
            self.digest,
            self.ordering_key,
            lane,
            NOW,
            self.deliver_at,
            NOW if self.deliver_at is None else self.deliver_at,
            self.expires_at,
        )

    def place(self, position: int, number: int) -> tuple[Any, ...]:
        """Where its row stands among those of one call, of which this is the ``number``-th intent.

        In a lane ids must follow the call's order. Elsewhere the order of the keys is the same for everybody, so that
        two calls cannot wait for one another.
        """
        handler, lane = self.targets[position]
        return (handler, True, 0, self.event_key) if lane is None else (handler, False, lane, number)


def drafts_of(intents: Iterable[Intent], what: str) -> list[Draft]:
    """Check all intents that a call was given as ``what``."""
    return [draft(intent, f"{what}[{number}]") for number, intent in enumerate(iterated(intents, what))]


def iterated(values: Iterable[T], what: str) -> Iterable[T]:
    """The values, if they can be iterated over at all. Raises InvalidIntent."""
    if not isinstance(values, Iterable):
        raise InvalidIntent(f"{what} must be several, in a list or the like, not a {type(values).__name__}.")
    return values


def draft(intent: Intent, place: str = "") -> Draft:
    """Check every part of an intent. Raises InvalidIntent, whose text calls it by its ``place`` in a call."""
    if not isinstance(intent, Intent):
        raise InvalidIntent(f"{place or 'intent'} is not an Intent but a {type(intent).__name__}.")
    where = place and f"{place}."
    topic = str.__str__(registry.check_topic(intent.topic))
    handlers = registry.handlers_of(topic)
    version = payloads.version(intent.payload_version, f"{where}payload_version")
    ordering_key = None if intent.ordering_key is None else payloads.key(intent.ordering_key, f"{where}ordering_key")
    payload = payloads.document(intent.payload, f"{where}payload")
    if intent.deliver_now:
        _check_deliver_now(intent, handlers, where)
    return Draft(
        event_key=str(uuid4()) if intent.event_key is None else payloads.key(intent.event_key, f"{where}event_key"),
        topic=topic,
        payload=payload.text,
        payload_version=version,
        headers=payloads.headers(intent.headers, f"{where}headers"),
        digest=payloads.digest(topic, version, ordering_key, payload.value),
        ordering_key=ordering_key,
        deliver_at=payloads.instant(intent.deliver_at, f"{where}deliver_at"),
        expires_at=payloads.instant(intent.expires_at, f"{where}expires_at"),
        deliver_now=bool(intent.deliver_now),
        targets=_targets(topic, handlers, ordering_key),
    )


def _targets(topic: str, handlers: tuple[Handler, ...], ordering_key: str | None) -> tuple[Target, ...]:
    """One per handler; a topic without handler in this process waits for one of its own name, in that one's lane."""
    if handlers:
        return tuple(Target(each.name, each.lane(ordering_key)) for each in handlers)
    return (Target(topic, None if ordering_key is None else lane_of(topic, f"={ordering_key}")),)


def _check_deliver_now(intent: Intent, handlers: tuple[Handler, ...], where: str) -> None:
    if intent.deliver_at is not None:
        raise InvalidIntent(f"{where}deliver_now and deliver_at contradict one another. Leave one of them out.")
    for each in handlers:
        if each.is_async:
            raise InvalidIntent(
                f"{where}deliver_now is not possible for topic {each.topic!r}: its handler {each.name!r} is async, "
                "and the thread that commits runs no event loop. Leave it to the dispatcher."
            )
