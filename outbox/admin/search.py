"""What may be typed into the search box of the messages."""

from __future__ import annotations

import re
from collections.abc import Callable

from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from outbox.models import State

HELP = _(
    "An exact key or id, or terms that narrow: "
    "key:order:84* topic:billing.* handler:… error:ConnectionError worker:web-1*"
)
LARGEST = 2**63 - 1
_TERM = re.compile(r'(?:([a-z]+):)?(?:"([^"]*)"|(\S+))')


def condition(query: str) -> Q:
    """The rows that a query asks for: terms like ``topic:billing.*`` narrow one another; all else is a key or id."""
    query = query.strip()
    terms = [match.groups() for match in _TERM.finditer(query)]
    if not terms or any(name not in _MEANINGS for name, *_ in terms):
        return _key_or_id(query[1:-1] if len(query) > 1 and query[0] == query[-1] == '"' else query)
    found = Q()
    for name, quoted, bare in terms:
        found &= _MEANINGS[name](bare if quoted is None else quoted)
    return found


def _key_or_id(text: str) -> Q:
    exact = Q(event_key=text)
    return exact | _id("pk", text) if text.isdecimal() else exact


def _id(column: str, text: str) -> Q:
    try:
        value = int(text) if len(text) <= 20 else LARGEST + 1
    except ValueError:
        return Q(pk__in=())
    return Q(**{column: value}) if -LARGEST <= value <= LARGEST else Q(pk__in=())


def _text(column: str, text: str) -> Q:
    """Exact, or a beginning before ``*``."""
    return Q(**{f"{column}__begins": text[:-1]} if text.endswith("*") else {column: text})


def _error(text: str) -> Q:
    """A type by its full or short name, or a code; ``*`` at the end asks for a beginning.

    Not of delivered messages: no index knows errors, and it spares the reading of a long history.
    """
    start = text.removesuffix("*")
    name = {"error_type__endswith" if start == text else "error_type__contains": f".{start}"}
    found = _text("error_type", text) | _text("error_code", text) | Q(**name)
    return Q(state__in=(State.PENDING, State.DEAD, State.DISCARDED)) & found & ~Q(error_type="", error_code="")


_MEANINGS: dict[str | None, Callable[[str], Q]] = {
    "key": lambda text: _text("event_key", text),
    "id": lambda text: _id("pk", text),
    "topic": lambda text: _text("topic", text),
    "handler": lambda text: _text("handler", text),
    "error": _error,
    "worker": lambda text: _text("leased_by", text),
    "lane": lambda text: _id("lane", text),
}
