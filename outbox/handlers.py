"""Who delivers what: topics, handlers, and what a handler is given."""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from outbox.conf import options
from outbox.exceptions import LONGEST, LeaseLost
from outbox.registry import cut
from outbox.registry import registry as registry
from outbox.retries import RetryPolicy

NAME = re.compile(r"[A-Za-z0-9._:-]{1,100}\Z", re.ASCII)
ORDERINGS = ("key", "topic", "none")
DEAD_HEADS = ("skip", "block")
LONGEST_LIST = 500  # messages in one call of a list handler

F = TypeVar("F", bound=Callable[..., Any])


class LeaseView:
    """What a handler may know of its lease: whether it may have been lost, and its fencing number.

    ``safe_until`` (monotonic seconds) is moved on by each renewal; past it the clock alone tells that the lease may be
    lost, even to a process that was frozen or whose renewal hangs.
    """

    __slots__ = ("_revoked", "attempt", "safe_until")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.safe_until = float("inf")
        self._revoked = False

    @property
    def lost(self) -> bool:
        """True once somebody else may own the message: renewal failed for too long, or the timeout passed."""
        return self._revoked or time.monotonic() > self.safe_until

    def revoke(self) -> None:
        self._revoked = True

    def raise_if_lost(self) -> None:
        """Raise LeaseLost when the lease may be gone; long handlers call it before each irreversible step."""
        if self.lost:
            raise LeaseLost("The lease of this message may have run out: its result would be thrown away.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One message as its handler receives it. ``payload`` is what JSON made of the staged value.

    ``attempt`` counts claims and only grows, so handlers may hand it on as a fencing token. The repr, which finds its
    way into logs and error reports, shows neither payload nor headers.
    """

    id: int
    event_key: str
    topic: str
    payload: Any = field(repr=False)
    payload_version: int
    attempt: int
    headers: dict[str, Any] = field(repr=False)
    ordering_key: str | None
    staged_at: datetime
    lease: LeaseView = field(compare=False)


@dataclass(frozen=True, slots=True)
class Topic:
    """Declare what kind of thing happens, at module level of ``outbox_handlers``; accepted wherever a topic name is.

    A dispatcher refuses to start while a ``required`` topic has no handler.
    """

    name: str
    required: bool = field(default=False, kw_only=True)
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name, "topic")
        registry.declare(self)

    def __str__(self) -> str:
        return self.name


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A registered handler and how its messages are treated. None means: as ``settings.OUTBOX`` says.

    ``batch``: the function takes a list of so many messages at most; None: it takes one message.
    """

    name: str
    topic: str
    function: Callable[..., Any]
    max_attempts_given: int | None = None
    timeout_given: float | None = None
    retry: RetryPolicy | None = None
    share_given: float | None = None
    ordering: str = "key"
    dead_head: str = "skip"
    atomic: bool = False
    payload_versions: tuple[int, ...] = (1,)
    aliases: tuple[str, ...] = ()
    batch: int | None = None

    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", _is_async(self.function))

    @property
    def policy(self) -> RetryPolicy:
        current = options()
        policy = self.retry or RetryPolicy(
            max_attempts=current.MAX_ATTEMPTS,
            base=current.BACKOFF_BASE,
            factor=current.BACKOFF_FACTOR,
            cap=current.BACKOFF_CAP,
        )
        if self.max_attempts_given is None:
            return policy
        return RetryPolicy(
            max_attempts=self.max_attempts_given,
            base=policy.base,
            factor=policy.factor,
            cap=policy.cap,
            jitter=policy.jitter,
        )

    @property
    def max_attempts(self) -> int:
        if self.max_attempts_given is not None:
            return self.max_attempts_given
        return self.retry.max_attempts if self.retry else options().MAX_ATTEMPTS

    @property
    def timeout(self) -> float:
        return options().TIMEOUT if self.timeout_given is None else self.timeout_given

    @property
    def share(self) -> float:
        return options().SHARE if self.share_given is None else self.share_given

    @property
    def size(self) -> int:
        """How many messages one call may get."""
        return self.batch or 1

    @property
    def routes(self) -> tuple[str, ...]:
        """The values of the route column that this handler claims."""
        return tuple(route(name, v) for name in (self.name, *self.aliases) for v in self.payload_versions)

    def lane(self, ordering_key: str | None) -> int | None:
        """The lane of a message of this handler, or None when it is unordered."""
        if self.ordering == "none" or (self.ordering == "key" and ordering_key is None):
            return None
        return lane_of(self.name, "" if self.ordering == "topic" else f"={ordering_key}")


def route(name: str, payload_version: int) -> str:
    """The first column of the due index: the handler name, with the payload version where it is not 1."""
    return name if payload_version == 1 else f"{name}@{payload_version}"


def lane_of(name: str, key: str) -> int:
    """Signed 64-bit number of a lane. Two lanes that collide are merely served as one."""
    digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def handler(
    topic: str | Topic,
    *,
    name: str | None = None,
    max_attempts: int | None = None,
    timeout: float | None = None,
    retry: RetryPolicy | None = None,
    ordering: str = "key",
    dead_head: str = "skip",
    atomic: bool = False,
    payload_versions: int | Iterable[int] = (1,),
    aliases: Iterable[str] = (),
    share: float | None = None,
    batch: int | None = None,
) -> Callable[[F], F]:
    """Register a function (sync or async) as the deliverer of a topic, and declare the topic.

    ``name`` defaults to the topic; a second handler of the same topic needs its own. ``timeout`` is in seconds.
    ``ordering``: ``"key"`` keeps messages of one ordering key in order, ``"topic"`` all of them, ``"none"`` none.
    ``dead_head``: what a dead message does to its lane, ``"skip"`` or ``"block"``. ``atomic`` commits the handler's
    writes and the completion in one transaction. ``aliases`` are former names whose rows are still to be delivered.
    ``share`` is the part of the slots (0 to 1) that this handler may fill. ``batch`` (1 to 500): the function takes a
    list of so many messages at most, and returns or raises one verdict for all of them, or returns a list with one for
    each, or a mapping of message ids to those that are not delivered. Raises ImproperlyConfigured.
    """
    topic_name = topic.name if isinstance(topic, Topic) else topic
    _check_name(topic_name, "topic")
    handler_name = topic_name if name is None else name
    several = isinstance(aliases, Iterable) and not isinstance(aliases, str)
    _demand(several, handler_name, f"aliases must be a list of names, not {aliases!r}")
    former = tuple(aliases)
    for each in (handler_name, *former):
        _check_name(each, "handler")
    versions = (payload_versions,) if isinstance(payload_versions, int) else tuple(payload_versions)
    _demand(
        retry is None or isinstance(retry, RetryPolicy), handler_name, f"retry must be a RetryPolicy, not {retry!r}"
    )
    _demand(ordering in ORDERINGS, handler_name, f"ordering must be one of {ORDERINGS}, not {ordering!r}")
    _demand(dead_head in DEAD_HEADS, handler_name, f"dead_head must be one of {DEAD_HEADS}, not {dead_head!r}")
    enough = max_attempts is None or (isinstance(max_attempts, int) and max_attempts >= 1)
    _demand(enough, handler_name, f"max_attempts must be a whole number from 1 on, not {max_attempts!r}")
    finite = timeout is None or (isinstance(timeout, int | float) and 0 < timeout <= LONGEST)
    _demand(finite, handler_name, f"timeout must be a number of seconds above 0, a century at most, not {timeout!r}")
    part = share is None or (isinstance(share, int | float) and 0 < share <= 1)
    _demand(part, handler_name, f"share must be above 0 and at most 1, not {share!r}")
    fits = batch is None or (type(batch) is int and 1 <= batch <= LONGEST_LIST)
    _demand(fits, handler_name, f"batch must be a whole number from 1 to {LONGEST_LIST}, not {batch!r}")
    numbers = bool(versions) and all(isinstance(each, int) and each >= 1 for each in versions)
    _demand(numbers, handler_name, f"payload_versions must be whole numbers from 1 on, not {versions!r}")

    def register(function: F) -> F:
        new = Handler(
            name=handler_name,
            topic=topic_name,
            function=function,
            max_attempts_given=max_attempts,
            timeout_given=None if timeout is None else float(timeout),
            retry=retry,
            share_given=share,
            ordering=ordering,
            dead_head=dead_head,
            atomic=atomic,
            payload_versions=versions,
            aliases=former,
            batch=batch,
        )
        _demand(callable(function), handler_name, f"{function!r} is not callable")
        what = "the message" if batch is None else "the list of messages"
        _demand(_takes_one_argument(function), handler_name, f"{function!r} must take one argument, {what}")
        _demand(not (atomic and new.is_async), handler_name, "async and atomic: there is no async transaction")
        registry.register(new)
        return function

    return register


def _demand(fact: bool, name: str, text: str) -> None:
    if not fact:
        raise ImproperlyConfigured(f"Handler {name!r}: {text}.")


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        return True
    return True


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not NAME.match(name):
        raise ImproperlyConfigured(
            f"{cut(name)!r} is no {what} name: it takes 1 to 100 characters of A-Z a-z 0-9 . _ : - (case counts)."
        )
