"""All topics and handlers of this process, as every app's ``outbox_handlers`` module fills it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.exceptions import UnknownTopic

if TYPE_CHECKING:
    from outbox.handlers import Handler, Topic


class Registry:
    """All topics and handlers of this process."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic] = {}
        self._handlers: dict[str, Handler] = {}
        self._by_topic: dict[str, tuple[Handler, ...]] = {}
        self._by_route: dict[str, Handler] = {}
        self.duplicates: list[Handler] = []

    def declare(self, topic: Topic) -> None:
        known = self._topics.get(topic.name)
        if known is None or topic.required or topic.description:
            self._topics[topic.name] = topic

    def register(self, new: Handler) -> None:
        known = self._handlers.get(new.name)
        if known is not None and not _same_code(known.function, new.function):
            self.duplicates.append(new)  # reported by a system check, and the dispatcher refuses to start
            return
        self._handlers[new.name] = new
        self._index()

    def _index(self) -> None:
        by_topic: dict[str, list[Handler]] = {}
        for each in self._handlers.values():
            by_topic.setdefault(each.topic, []).append(each)
        self._by_topic = {topic: tuple(found) for topic, found in by_topic.items()}
        self._by_route = {r: each for each in self._handlers.values() for r in each.routes}

    def handlers(self) -> tuple[Handler, ...]:
        return tuple(self._handlers.values())

    def handlers_of(self, topic: str) -> tuple[Handler, ...]:
        """The handlers of a topic in the order of their registration: the order of `Message.position`."""
        return self._by_topic.get(topic, ())

    def by_name(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def by_route(self, name: str) -> Handler | None:
        return self._by_route.get(name)

    def topics(self) -> dict[str, Topic | None]:
        """Every declared topic with its declaration, or None where only a handler declares it."""
        return {name: self._topics.get(name) for name in sorted({*self._topics, *self._by_topic})}

    def unhandled(self, *, required: bool = False) -> list[str]:
        """Declared topics without a handler, sorted; only the required ones if asked."""
        without = (topic for topic in self._topics.values() if topic.name not in self._by_topic)
        return sorted(topic.name for topic in without if topic.required or not required)

    def check_topic(self, topic: str | Topic) -> str:
        """The name of a declared topic. Raises UnknownTopic with the nearest names."""
        name = topic if isinstance(topic, str) else getattr(topic, "name", topic)
        if not isinstance(name, str):
            raise UnknownTopic(f"A topic is a string or a Topic, not {cut(topic)!r} of type {type(topic).__name__}.")
        if name in self._by_topic or name in self._topics:
            return name
        known = sorted({*self._topics, *self._by_topic})
        near = [each for each in known if each.lower() == name.lower()] or difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Declared: {', '.join(known) or 'none'}."
        raise UnknownTopic(
            f"Nobody declares the topic {cut(name)!r}, so a message of it might never be delivered. {hint} "
            "Declare it with @handler(...) or Topic(...) in an outbox_handlers module of an installed app."
        )

    @contextmanager
    def isolated(self) -> Iterator[Registry]:
        """Start from an empty registry and bring the present one back afterwards; for tests."""
        saved = dict(self.__dict__)
        self.__init__()  # type: ignore[misc]
        try:
            yield self
        finally:
            self.__dict__.update(saved)


registry = Registry()


def cut(value: object) -> object:
    """A value for an error text, shortened when it is a long string."""
    return value if not isinstance(value, str) or len(value) <= 120 else value[:100] + "…"


def _same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """True for a function and its reloaded self, so that reloading a module is no duplicate."""

    def identity(function: Callable[..., Any]) -> tuple[object, object]:
        return getattr(function, "__module__", function), getattr(function, "__qualname__", function)

    return one is other or ("<locals>" not in str(identity(one)[1]) and identity(one) == identity(other))
