"""What may be staged: values checked and turned into JSON in Python, before any SQL, the same on every database.

Every refusal names the place of the offending value, ``payload.items[3].price``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from hashlib import blake2b
from math import isfinite
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone

from outbox.conf import options
from outbox.exceptions import InvalidIntent, InvalidPayload
from outbox.fields import JsonText, to_micros
from outbox.inserting import FromNow

MAX_DEPTH = 30  # of lists and dicts within one another
MAX_DIGITS = 4300  # of a whole number: json.loads reads no more
MAX_KEY = 255
_SMALL = 10**18
_SHORT = 255
MAX_VERSION = 2**31 - 1

_ENCODED_BY_DJANGO = (date, time_of_day, Decimal, UUID)  # a datetime is a date
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_FIRST = to_micros(datetime(1, 1, 2, tzinfo=UTC))  # what any time zone can show
_LAST = to_micros(datetime(9999, 12, 30, tzinfo=UTC))

_compact = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_canonical = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True).encode
_django_default = DjangoJSONEncoder().default


class Document(NamedTuple):
    """A value that JSON holds exactly: its text as it is stored, and the value made of plain types only."""

    text: JsonText
    value: Any


def encode(value: Any, what: str = "payload", option: str = "MAX_PAYLOAD_BYTES") -> JsonText:
    """Compact JSON of a value, keys in their order. Raises InvalidPayload with the path of what JSON cannot hold."""
    return document(value, what, option).text


def document(value: Any, what: str = "payload", option: str = "MAX_PAYLOAD_BYTES") -> Document:
    """`encode`, with the plain value that the text stands for; ``option`` names the limit of its size."""
    limit = getattr(options(), option)
    try:
        plain = _Reading(option, limit).plain(value, 0)
        text = _compact(plain)
        size = len(text) if text.isascii() else len(text.encode())
        if size > limit:
            raise _Unfit(_too_large(str(size), option, limit))
    except _Unfit as unfit:
        raise InvalidPayload(f"{what}{''.join(reversed(unfit.path))} {unfit.reason}") from None
    return Document(JsonText(text), plain)


def digest(topic: str, payload_version: int, ordering_key: str | None, plain: Any) -> bytes:
    """What tells equal content from different content: 16 bytes of blake2b over canonical JSON."""
    return blake2b(_canonical([topic, payload_version, ordering_key, plain]).encode(), digest_size=16).digest()


def headers(value: object, what: str = "headers") -> JsonText | None:
    """JSON of headers, or None when there are none. Their names are strings with the rules of an event key."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidPayload(f"{what} must be a dict, not {_type(value)}.")
    for name in value:
        key(name, f"A name in {what}")
    return encode(dict(value), what, "MAX_HEADERS_BYTES") if value else None


def key(value: object, what: str) -> str:
    """An event key or its like: 1 to 255 characters, none of them a control character, no blanks at the ends."""
    if not isinstance(value, str):
        raise InvalidIntent(f"{what} must be a string, not {_type(value)}. Write it as str(...) or in an f-string.")
    text = str.__str__(value)
    if not 1 <= len(text) <= MAX_KEY:
        raise InvalidIntent(f"{what} has {len(text)} characters: 1 to {MAX_KEY} fit ({_cut(text)}).")
    if text != text.strip():
        raise InvalidIntent(f"{what} {_cut(text)} begins or ends with a blank. Strip it.")
    if not text.isprintable() and (_CONTROL.search(text) or _SURROGATE.search(text)):
        raise InvalidIntent(f"{what} {_cut(text)} holds a control character or half a surrogate pair.")
    return text


def version(value: object, what: str = "payload_version") -> int:
    """A payload version: a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_VERSION:
        raise InvalidIntent(f"{what} must be a whole number from 1 to {MAX_VERSION}, not {_cut(value)}.")
    return int(value)


def instant(value: object, what: str) -> int | FromNow | None:
    """Microseconds since the epoch of a datetime; a timedelta counts from the moment of staging, by the server's clock.

    Naive datetimes are taken only under USE_TZ=False, and are read in TIME_ZONE.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        micros = value // timedelta(microseconds=1)
        if micros < 0:
            raise InvalidIntent(f"{what} is {value!r}, a time in the past. A duration must not be negative.")
        if time.time_ns() // 1000 + micros > _LAST:
            raise InvalidIntent(f"{what} is {value!r}, which ends after the year 9999.")
        return FromNow(micros)
    if not isinstance(value, datetime):
        raise InvalidIntent(f"{what} must be an aware datetime or a timedelta, not {_type(value)}.")
    if timezone.is_naive(value):
        if settings.USE_TZ:
            raise InvalidIntent(f"{what} is {value!r}, without a time zone. Make it aware: timezone.make_aware(...).")
        value = value.replace(tzinfo=timezone.get_default_timezone())
    micros = to_micros(value)
    if not _FIRST <= micros <= _LAST:
        raise InvalidIntent(f"{what} is {value!r}, which not every time zone can show. Take None for never.")
    return micros


class _Unfit(Exception):
    """A value that cannot be stored; the path grows, innermost part first, while the exception rises."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str] = []


class _Reading:
    """One pass over a value that copies it into plain types.

    The copy is what gets encoded, so nothing can change after it was checked. The size is counted on the way, so that
    a structure that shares its parts (ten lines of Python can describe a terabyte) ends early.
    """

    __slots__ = ("_limit", "_option", "_size")

    def __init__(self, option: str, limit: int) -> None:
        self._option = option
        self._limit = limit
        self._size = 0

    def plain(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, (dict, list, tuple)):
            if depth == MAX_DEPTH:
                raise _Unfit(f"is nested more than {MAX_DEPTH} levels deep. Flatten it, or stage a reference.")
            return self._dict(value, depth + 1) if isinstance(value, dict) else self._list(value, depth + 1)
        self._spend(1)
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            return _whole(value)
        if isinstance(value, float):
            return _fraction(value)
        if isinstance(value, _ENCODED_BY_DJANGO):
            return self._text(_as_django_does(value))
        raise _Unfit(
            f"is of type {_type(value)}, which JSON cannot hold. Convert it first; "
            "only datetime, date, time, Decimal and UUID are converted for you."
        )

    # Nearly all values are short printable strings and small numbers; the two loops take those themselves.

    def _list(self, items: Any, depth: int) -> list[Any]:
        result: list[Any] = []
        size = 2
        for item in items:
            kind = type(item)
            if kind is str and len(item) <= _SHORT and item.isprintable():
                size += len(item) + 2
            elif kind is int and -_SMALL < item < _SMALL:
                size += 1
            else:
                try:
                    item = self.plain(item, depth)
                except _Unfit as unfit:
                    unfit.path.append(f"[{len(result)}]")
                    raise
            result.append(item)
        self._spend(size)
        return result

    def _dict(self, items: dict[Any, Any], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        size = 2
        for name, item in items.items():
            try:
                text = name if type(name) is str and name.isprintable() else self._text(_name(name))
                if text in result:
                    raise _Unfit("stands for two keys of the dict, which are the same in JSON.")
                kind = type(item)
                if kind is str and len(item) <= _SHORT and item.isprintable():
                    size += len(item) + 2
                elif kind is int and -_SMALL < item < _SMALL:
                    size += 1
                else:
                    item = self.plain(item, depth)
            except _Unfit as unfit:
                unfit.path.append(_step(name))
                raise
            size += len(text) + 2
            result[text] = item
        self._spend(size)
        return result

    def _text(self, value: str) -> str:
        text = value if type(value) is str else str.__str__(value)
        self._spend(len(text) + 2)
        if "\0" in text:
            raise _Unfit("holds the character NUL, which PostgreSQL cannot store. Remove it.")
        if not text.isascii() and _SURROGATE.search(text):
            raise _Unfit("holds half a surrogate pair, which is no character. Decode the text correctly.")
        return text

    def _spend(self, size: int) -> None:
        self._size += size
        if self._size > self._limit:
            raise _Unfit(_too_large(f"at least {self._size}", self._option, self._limit))


def _name(name: Any) -> str:
    """The text of a dict's key, as json.dumps writes it."""
    if isinstance(name, str):
        return name
    if name is None or name is True or name is False:
        return _compact(name)
    if isinstance(name, int):
        return str(_whole(name))
    if isinstance(name, float):
        return repr(_fraction(name))
    raise _Unfit(f"is under a key of type {_type(name)}: in JSON keys are strings. Convert it with str(...).")


def _whole(value: int) -> int:
    if value.bit_length() > 2000:  # less than any limit that Python accepts
        digits = min(MAX_DIGITS, sys.get_int_max_str_digits() or MAX_DIGITS)
        if abs(value) >= 10**digits:
            raise _Unfit(f"is a whole number of more than {digits} digits, which json.loads refuses.")
    return int.__int__(value)


def _fraction(value: float) -> float:
    if not isfinite(value):
        raise _Unfit(f"is {float.__repr__(value)}, and JSON has no such number. Take None or a string.")
    return float.__float__(value)


def _as_django_does(value: Any) -> str:
    if isinstance(value, Decimal) and not value.is_finite():
        raise _Unfit(f"is {value!r}, and JSON has no such number. Take None or a string.")
    try:
        return str(_django_default(value))
    except ValueError as error:  # a time with a zone
        raise _Unfit(f"is {value!r}: {error}") from None


def _too_large(size: str, option: str, limit: int) -> str:
    return f"takes {size} bytes as JSON, and OUTBOX[{option!r}] is {limit}. Keep it elsewhere and stage a reference."


def _step(name: Any) -> str:
    return f".{name}" if isinstance(name, str) and name.isidentifier() and len(name) <= 80 else f"[{_cut(name)}]"


def _cut(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # of a foreign class, or a number of more digits than Python prints
        text = f"of type {_type(value)}"
    return text if len(text) <= 80 else f"{text[:79]}…"


def _type(value: object) -> str:
    return type(value).__name__
