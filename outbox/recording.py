"""Write drafts into the open transaction, idempotent by event key, and tell of them once it is committed.

The rows go in by one statement, further handlers of a topic by a second one; nothing is read before, and nothing that
the database refused is tried again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from django.db import transaction

from outbox import delivery, inserting, payloads, signals, wakeup
from outbox.exceptions import EventKeyConflict, InvalidPayload, OutboxError
from outbox.fields import from_micros
from outbox.handlers import Envelope, LeaseView
from outbox.inserting import Found, Made, RowKey
from outbox.intents import TABLE, Draft

logger = logging.getLogger("outbox")

LARGE = 512 * 1024  # characters of a payload, from which on the server is asked what it accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What staging did: one message id per handler. ``created`` is False when the event key was there already."""

    event_key: str
    topic: str
    ids: tuple[int, ...]
    created: bool


class Told(NamedTuple):
    """A new message that is to be told of after the commit."""

    draft: Draft
    position: int
    id: int
    staged_at: int


def write(using: str, drafts: Sequence[Draft], *, deliver: bool = True) -> list[Staged]:
    """Insert the messages of drafts in the open transaction, and tell of them after the commit.

    Position 0 decides whether an event key is new. ``deliver`` is False when the caller delivers them itself.
    """
    by_key = _by_key(drafts)
    new, taken = _insert(using, by_key, [(each, 0) for each in by_key.values()])
    if len(drafts) == 1 and not taken and len(drafts[0].targets) == 1:  # nearly every call: nothing left to judge
        [each], [made] = drafts, new.values()
        _tell(using, [Told(each, 0, *made)], deliver)
        return [Staged(event_key=each.event_key, topic=each.topic, ids=(made.id,), created=True)]
    for key, each in by_key.items():
        if (key, 0) in taken:
            _check_same_content(each, taken[key, 0])
    fresh = [each for each in by_key.values() if (each.event_key, 0) in new]
    further = [(each, position) for each in fresh for position in range(1, len(each.targets))]
    if further:
        new_too, taken_too = _insert(using, by_key, further)
        new |= new_too
        taken |= taken_too
    if new:
        _tell(using, [Told(by_key[key], position, *row) for (key, position), row in new.items()], deliver)
    return _results(drafts, new, taken)


def _tell(using: str, told: Sequence[Told], deliver: bool) -> None:
    # No partial: Django names a robust callback that failed by its __qualname__.
    transaction.on_commit(lambda: _after_commit(using, told, deliver), using=using, robust=True)


def _by_key(drafts: Sequence[Draft]) -> dict[str, Draft]:
    """The first draft of each event key. A later one of the same content is a repetition like any other."""
    by_key: dict[str, Draft] = {}
    for each in drafts:
        first = by_key.setdefault(each.event_key, each)
        if first is not each and first.digest != each.digest:
            raise EventKeyConflict(
                f"The event key {each.event_key!r} stands twice in this call, with another "
                f"{_differences(each, first)}. Nothing was staged: give each event a key of its own."
            )
    return by_key


def _insert(
    using: str, by_key: dict[str, Draft], wanted: list[tuple[Draft, int]]
) -> tuple[dict[RowKey, Made], dict[RowKey, Found]]:
    if len(wanted) > 1:
        number = {key: n for n, key in enumerate(by_key)}
        wanted.sort(key=lambda each: each[0].place(each[1], number[each[0].event_key]))
    for each, _ in wanted:
        if len(each.payload) > LARGE:
            _check_fits(using, each)
    new, taken = inserting.insert_or_find(using, TABLE, [each.row(position) for each, position in wanted])
    for each, position in wanted:
        if (each.event_key, position) not in new and (each.event_key, position) not in taken:
            raise OutboxError(
                f"The event key {each.event_key!r} was taken whenever it was inserted and free whenever it was looked "
                "up: somebody stages and deletes it in a loop. Roll back and try again."
            )
    return new, taken


def _check_fits(using: str, each: Draft) -> None:
    """Refuse what would cost the connection, and with it the caller's transaction."""
    limit = inserting.largest_statement(using)
    if limit is None:
        return
    size = inserting.length_in_statement(each.payload)
    if size + LARGE > limit:
        raise InvalidPayload(
            f"The payload of event key {each.event_key!r} takes {size} bytes in an INSERT, and the database "
            f"accepts {limit} in all (max_allowed_packet). Keep it elsewhere and stage a reference."
        )


def _check_same_content(each: Draft, found: Found) -> None:
    if found.digest != each.digest:
        since = from_micros(found.staged_at)
        raise EventKeyConflict(
            f"The event key {each.event_key!r} is taken since {since:%Y-%m-%d %H:%M:%S} UTC by message {found.id} with "
            f"another {_differences(each, found)}. Nothing was staged: a key stands for one event with one content."
        )


def _differences(each: Draft, there: Draft | Found) -> str:
    """What of the content differs, with both values where they are short."""
    parts = [
        f"{what} ({getattr(there, name)!r}, here {getattr(each, name)!r})"
        for name, what in (("topic", "topic"), ("payload_version", "payload version"), ("ordering_key", "ordering key"))
        if getattr(there, name) != getattr(each, name)
    ]
    payload = json.loads(each.payload)
    if payloads.digest(there.topic, there.payload_version, there.ordering_key, payload) != there.digest:
        parts.append("payload")
    return ", ".join(parts)


def _results(drafts: Sequence[Draft], new: Mapping[RowKey, Made], taken: Mapping[RowKey, Found]) -> list[Staged]:
    ids: dict[str, dict[int, int]] = {}
    for rows in (new, taken):
        for (key, position), row in rows.items():
            ids.setdefault(key, {})[position] = row.id
    created = {key for key, position in new if position == 0}
    results = []
    for each in drafts:
        mine = ids[each.event_key]
        results.append(
            Staged(
                event_key=each.event_key,
                topic=each.topic,
                ids=tuple(mine[position] for position in sorted(mine)),
                created=each.event_key in created,
            )
        )
        created.discard(each.event_key)
    return results


# --- after the commit -------------------------------------------------------------------------------------------------


def _after_commit(using: str, told: Sequence[Told], deliver: bool) -> None:
    """Tell receivers and dispatchers, and deliver what shall be delivered here. Only speed depends on it.

    Dispatchers do not hear of what is delivered here, or they would run for it; of a failure `delivery` tells them.
    """
    with _contained("Receivers could not be told of staged messages"):
        if signals.staged.has_listeners(signals.Event):
            for each in told:
                signals.send(signals.staged, _event(using, each))
    here = [each.id for each in told if each.draft.deliver_now]
    if len(here) < len(told):
        with _contained("Dispatchers could not be told of staged messages"):
            wakeup.hint(using)
    if here and deliver:
        with _contained("Immediate delivery failed; a dispatcher will deliver the messages"):
            delivery.deliver_now(using, here)


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Keep any failure from the caller, who has committed; SystemExit, too, which robust=True would let pass."""
    try:
        yield
    except KeyboardInterrupt:
        raise  # somebody at the terminal wants to stop
    except BaseException:
        logger.exception("%s.", what)


def _event(using: str, told: Told) -> signals.Event:
    draft = told.draft
    message = Envelope(
        id=told.id,
        event_key=draft.event_key,
        topic=draft.topic,
        payload=json.loads(draft.payload),
        payload_version=draft.payload_version,
        attempt=0,
        headers={} if draft.headers is None else json.loads(draft.headers),
        ordering_key=draft.ordering_key,
        staged_at=from_micros(told.staged_at),
        lease=LeaseView(0),
    )
    return signals.Event(message=message, handler=draft.targets[told.position].handler, using=using)
