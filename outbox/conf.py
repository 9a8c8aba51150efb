"""The ``OUTBOX`` setting: every option with its type, default and unit."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, get_type_hints

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of ``settings.OUTBOX``. Durations are seconds (numbers or timedeltas)."""

    # Claiming and delivering
    LEASE: float = 60.0  # how long a claim lasts between two renewals
    POLL: float = 1.0  # pause between two looks at the table; 10 to 30 % are added at random
    GRACE: float = 30.0  # how long a stop waits for running handlers
    CONCURRENCY: int = 20  # handlers running at once in one dispatcher process (slots)
    SHARE: float = 0.5  # part of the slots that one handler may fill
    BATCH: int = 100  # most messages in one claim, and in one settlement
    TIMEOUT: float = 300.0  # longest run of a handler that names no timeout of its own
    WAKEUP: bool = True  # notify dispatchers after commit where the database can (PostgreSQL)
    LISTEN_DATABASE: str = ""  # alias for LISTEN, when the usual one goes through a transaction pooler

    # Failing
    MAX_ATTEMPTS: int = 20  # failures until a message is dead
    BACKOFF_BASE: float = 5.0  # bound of the first wait
    BACKOFF_FACTOR: float = 2.0  # growth of the bound per failure
    BACKOFF_CAP: float = 3600.0  # largest bound
    MAX_ERROR_CHARS: int = 4000  # of an error text that is kept
    MAX_TRACEBACK_CHARS: int = 20000  # of a traceback that is kept

    # When the other side is down
    BREAKER_FAILURES: int = 3  # messages in a row that must find it unavailable, until their handler pauses; 0: never
    BREAKER_PAUSE: float = 5.0  # bound of the first wait for a probe; doubled with each probe
    BREAKER_PAUSE_CAP: float = 60.0  # largest bound
    OUTAGE_PATIENCE: float = 3 * 86400.0  # age of a message from which on "unavailable" costs its budget

    # Staging
    MAX_PAYLOAD_BYTES: int = 1024 * 1024  # of the payload as UTF-8 JSON
    MAX_HEADERS_BYTES: int = 16 * 1024  # of the headers as UTF-8 JSON

    # Keeping; 0 disables
    PRUNE_EVERY: float = 3600.0  # how often a dispatcher prunes
    PRUNE_PAYLOADS_AFTER: float = 7 * 86400.0  # payloads and headers of delivered messages
    PRUNE_AFTER: float = 30 * 86400.0  # delivered and discarded messages
    PRUNE_DEAD_AFTER: float = 0.0  # dead messages
    DEDUPE_WINDOW: float = 30 * 86400.0  # how long an event key must be remembered
    SWEEP_EVERY: float = 60.0  # how often lanes stranded by hand-written SQL are looked for

    # Showing
    REDACT: str = "outbox.redaction.mask"  # dotted path of the function that hides what people and logs must not see


_NAMES = tuple(field.name for field in fields(Options))
_RATIOS = {"SHARE", "BACKOFF_FACTOR"}
_POSITIVE = {"LEASE", "POLL", "CONCURRENCY", "SHARE", "BATCH", "TIMEOUT", "MAX_ATTEMPTS", "MAX_PAYLOAD_BYTES"}
_CENTURY = 36525 * 86400.0  # seconds; much more than that no database can add to its clock
_LARGEST = 2**31 - 1
_MOST = {"CONCURRENCY": 10_000, "BATCH": 10_000}
_cache: tuple[dict[str, Any] | None, Options] | None = None


def options() -> Options:
    """The options in force. Reads the setting on every access, so that ``override_settings`` works.

    Raises ImproperlyConfigured, naming every problem, when the setting is wrong; the system checks say the same.
    """
    global _cache
    given = getattr(settings, "OUTBOX", None)
    if _cache is None or _cache[0] is not given:
        problems = problems_of(given)
        if problems:
            raise ImproperlyConfigured(" ".join(f"{fact} {hint}" for fact, hint in problems))
        values = {name: checked(name, value) for name, value in (given or {}).items()}
        _cache = (given, Options(**values))
    return _cache[1]


def problems_of(given: object) -> list[tuple[str, str]]:
    """(fact, hint) for each thing that is wrong with a value of the ``OUTBOX`` setting."""
    if given is None:
        return []
    if not isinstance(given, dict):
        return [(f"OUTBOX must be a dict, not {type(given).__name__}.", "See the settings reference.")]
    problems = []
    for name, value in given.items():
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name).upper(), _NAMES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known options: {', '.join(_NAMES)}."
            problems.append((f"OUTBOX has no option {name!r}.", hint))
            continue
        try:
            checked(name, value)
        except (TypeError, ValueError) as error:
            problems.append((f"OUTBOX[{name!r}] is {value!r}.", f"It must be {error}."))
    return problems


def checked(name: str, value: Any) -> Any:
    """A value of an option in the option's own type. TypeError or ValueError says what it must be."""
    kind = get_type_hints(Options)[name]
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            raise TypeError("True or False" if kind is bool else "a string")
        return value
    if kind is float and isinstance(value, timedelta) and name not in _RATIOS:
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        numbers = "a number" if name in _RATIOS else "a number of seconds or a timedelta"
        raise TypeError("a whole number" if kind is int else numbers)
    if name == "BACKOFF_FACTOR" and not value >= 1:
        raise ValueError("1 or more")
    if name in _POSITIVE and not value > 0:
        raise ValueError("greater than 0")
    if not 0 <= value < float("inf"):
        raise ValueError("a finite number, 0 or more")
    if name == "SHARE" and value > 1:
        raise ValueError("at most 1")
    most = _MOST.get(name, _LARGEST if kind is int else _CENTURY)
    if value > most:
        raise ValueError(f"at most {most:,}" if kind is int else "at most a century")
    return kind(value)
