"""How arguments of commands are read, from a command line and from `call_command` alike."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone
from django.utils.dateparse import parse_datetime

USAGE = 2  # the exit code of arguments that make no sense
LONGEST = 36525 * 86400.0  # seconds

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)\Z", re.ASCII)


def duration(text: str) -> float:
    """Seconds, from ``90``, ``1.5h`` or ``30d``."""
    match = _DURATION.match(text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no duration: give seconds, or a number with s, m, h or d, as in 30d")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > LONGEST:
        raise ArgumentTypeError(f"{text!r} is longer than a century")
    return seconds


def since(text: str) -> timedelta | datetime:
    """An age such as ``2h``, or a point in time in ISO 8601 (without an offset: in TIME_ZONE)."""
    if _DURATION.match(text.strip()):
        return timedelta(seconds=duration(text))
    try:
        instant = parse_datetime(text)
    except ValueError:
        instant = None
    if instant is None:
        raise ArgumentTypeError(f"{text!r} is neither an age (2h, 30d) nor a time (2026-07-01T12:00)")
    return instant if timezone.is_aware(instant) else timezone.make_aware(instant)


def as_parsed(command: BaseCommand, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command with all their strings parsed: `call_command` passes most of them as they are.

    A single value of a repeatable option becomes a list. Raises CommandError, with code 2, for a bad value.
    """
    options = dict(given)
    for action in command.create_parser("manage.py", "")._actions:
        value = options.get(action.dest)
        repeatable = isinstance(action.default, list) and action.nargs is None
        values = value if isinstance(value, list | tuple) else [value]
        if action.nargs is not None or value is None:
            continue
        try:
            parsed = [action.type(each) if callable(action.type) and isinstance(each, str) else each for each in values]
        except (ArgumentTypeError, TypeError, ValueError) as error:
            raise CommandError(f"{action.dest}={value!r}: {error}.", returncode=USAGE) from None
        for each in parsed:
            if action.choices is not None and each not in action.choices:
                known = ", ".join(map(str, action.choices))
                raise CommandError(f"{action.dest}={each!r}: choose from {known}.", returncode=USAGE)
        options[action.dest] = parsed if repeatable else parsed[0]
    return options
