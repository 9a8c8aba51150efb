"""One durable transaction of business writes and their effects; the urgent effects are delivered before it returns."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import Error, transaction

from outbox import delivery
from outbox.exceptions import Bury, InvalidIntent, OutboxError, PostCommitEffectError
from outbox.handlers import Envelope, registry
from outbox.intents import Draft, Intent, draft, iterated
from outbox.models import Message, Reason, State
from outbox.recording import Staged, write
from outbox.staging import own_transaction

logger = logging.getLogger("outbox")

T = TypeVar("T")

Deliver = Callable[[Envelope], Any]


@dataclass(frozen=True, slots=True)
class Effect:
    """An intent of a command. With ``deliver`` it is delivered right after the commit, by this function of the message.

    ``deliver`` stands in for the topic's one handler and follows the same rules: returning is success, ``False`` and
    exceptions are failures, which leave the message to the dispatcher and the handler. An intent with ``deliver_now``
    is delivered by its handlers themselves.
    """

    intent: Intent
    deliver: Deliver | None = None


Effects = Iterable[Effect] | Callable[[T], Iterable[Effect]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostCommitResult(Generic[T]):
    """What a command did: the business result, whether it was committed, and the event keys of its effects by fate.

    Completed effects are delivered; pending ones are left to the dispatcher; one that is dead or expired is neither,
    and stands among the errors. Both are empty when ``business`` rolled back without an exception
    (`transaction.set_rollback`).
    """

    value: T
    business_committed: bool
    completed_effects: tuple[str, ...]
    pending_effects: tuple[str, ...]


class DurableCommand:
    """Business writes and effects, committed together or not at all, on the alias ``using`` (default: the router's)."""

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    def execute(self, business: Callable[[], T], effects: Effects[T] = ()) -> PostCommitResult[T]:
        """Run ``business()`` and stage its effects in one transaction, then deliver those that shall not wait.

        ``effects`` may be a function of the business result. Raises what ``business`` raises, and everything that
        `stage` does, before the commit; PostCommitEffectError after it, when an immediate delivery failed. Inside an
        atomic block it raises NotInTransaction: nothing would be committed when it returns.
        """
        if not callable(business):
            raise InvalidIntent(f"business must be a function, not {type(business).__name__}.")
        _check_sync(business, "business")
        _check_sync(effects, "effects")
        ready: Ready = () if callable(effects) else _prepare(effects)
        with own_transaction(self.using) as using:
            value = business()
            _check_value(value)
            if callable(effects):
                ready = _prepare(effects(value))
            rolled_back = transaction.get_rollback(using=using)
            staged = [] if rolled_back else write(using, [each for each, _ in ready], deliver=False)
        if rolled_back:
            return PostCommitResult(value=value, business_committed=False, completed_effects=(), pending_effects=())
        return _deliver(using, value, ready, staged)

    async def aexecute(self, business: Callable[[], T], effects: Effects[T] = ()) -> PostCommitResult[T]:
        """`execute` for async code; ``business`` is a plain function, for there is no async transaction.

        Everything runs in one piece on the thread of synchronous code. Cancelling the await undoes nothing.
        """
        return await sync_to_async(self.execute, thread_sensitive=True)(business, effects)


Ready = Sequence[tuple[Draft, Deliver | None]]


def _prepare(effects: Iterable[Effect]) -> Ready:
    """Check all effects. Their drafts say by ``deliver_now`` which ones are delivered here."""
    ready = []
    for number, effect in enumerate(iterated(effects, "effects")):
        if not isinstance(effect, Effect):
            raise InvalidIntent(f"effects[{number}] is not an Effect but a {type(effect).__name__}.")
        each = draft(effect.intent, f"effects[{number}].intent")
        if effect.deliver is not None:
            _check_deliver(effect, each, f"effects[{number}].")
            each = replace(each, deliver_now=True)
        ready.append((each, effect.deliver))
    repeated = [key for key, count in Counter(each.event_key for each, _ in ready).items() if count > 1]
    if repeated:
        raise InvalidIntent(
            f"Several effects of this command have the event key {', '.join(map(repr, repeated))}. "
            "Nothing was committed: give each effect a key of its own."
        )
    return ready


def _check_deliver(effect: Effect, each: Draft, where: str) -> None:
    handlers = len(registry.handlers_of(each.topic))
    if handlers != 1:
        raise InvalidIntent(
            f"{where}deliver stands in for the one handler of its topic, but {each.topic!r} has {handlers}. "
            "Register one, or leave it to the dispatcher."
        )
    if effect.intent.deliver_at is not None:
        raise InvalidIntent(f"{where}deliver and deliver_at contradict one another. Leave one of them out.")
    if not callable(effect.deliver):
        raise InvalidIntent(f"{where}deliver is not callable but a {type(effect.deliver).__name__}.")
    _check_sync(effect.deliver, f"{where}deliver")


def _check_sync(function: Any, what: str) -> None:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        raise InvalidIntent(f"{what} must be a plain function: there is no async transaction. Use async_to_sync().")


def _check_value(value: object) -> None:
    """A coroutine was never run: what looks like success would have written nothing."""
    if inspect.iscoroutine(value):
        value.close()
        raise InvalidIntent("business returned a coroutine, which nobody has run. It must be a plain function.")


def _deliver(using: str, value: T, ready: Ready, staged: Sequence[Staged]) -> PostCommitResult[T]:
    done: set[str] = set()
    errors: dict[str, BaseException] = {}
    skipped: dict[str, tuple[int, ...]] = {}
    for (each, deliver), row in zip(ready, staged, strict=True):
        if not each.deliver_now:
            continue
        attempts = delivery.deliver_now(using, row.ids, deliver=deliver)
        failed = [attempt for attempt in attempts if attempt.status == "failed"]
        if failed:
            errors[row.event_key] = failed[0].error or RuntimeError("The immediate delivery failed.")
        elif all(attempt.status == "delivered" for attempt in attempts):
            done.add(row.event_key)
        else:
            skipped[row.event_key] = row.ids
    try:
        delivered, ended = _ended_elsewhere(using, skipped)
    except Error as error:  # the business is committed: that its effects cannot be looked at now must not undo it
        logger.warning("What became of the effects %s cannot be read now: %s", ", ".join(skipped), error)
        delivered, ended = set(), {}
    done |= delivered
    errors |= ended
    over = ended.keys() | {key for key, error in errors.items() if isinstance(error, Bury)}
    keys = [row.event_key for row in staged]
    result = PostCommitResult(
        value=value,
        business_committed=True,
        completed_effects=tuple(key for key in keys if key in done),
        pending_effects=tuple(key for key in keys if key not in done and key not in over),
    )
    if errors:
        raise PostCommitEffectError(result, errors)
    return result


def _ended_elsewhere(using: str, skipped: dict[str, tuple[int, ...]]) -> tuple[set[str], dict[str, BaseException]]:
    """Of what could not be claimed: the event keys that are delivered, and those that nobody will deliver, with why.

    Delivered by a dispatcher or an earlier command; what its handler discarded needs no delivery.
    """
    ids = [pk for each in skipped.values() for pk in each]
    rows = Message.objects.using(using).filter(pk__in=ids).exclude(state=State.PENDING)
    ended = {pk: (State(state), Reason(reason)) for pk, state, reason in rows.values_list("pk", "state", "reason")}
    delivered: set[str] = set()
    errors: dict[str, BaseException] = {}
    for key, pks in skipped.items():
        final = [ended[pk] for pk in pks if pk in ended]
        bad = [(state, reason) for state, reason in final if not _is_good(state, reason)]
        if bad:
            state, reason = bad[0]
            errors[key] = OutboxError(f"The message is {state.label}: {reason.label}.")
        elif len(final) == len(pks):
            delivered.add(key)
    return delivered, errors


def _is_good(state: State, reason: Reason) -> bool:
    return state == State.DELIVERED or (state == State.DISCARDED and reason == Reason.HANDLER)
