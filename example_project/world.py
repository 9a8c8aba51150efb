"""The world outside the database: it is slow, it fails, and what it once received stays received.

Stands in for push services, media servers and mail gateways. What they received is a journal of lines, to be compared
with the books of the business. The WORLD settings say where it lies, and what the weather is like out there.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from django.conf import settings

_failed: set[tuple[str, str]] = set()


class Unreachable(Exception):
    """The other side did not answer."""


def visit(place: str, key: str) -> None:
    """Take as long as a network call, and fail like one: always, or the first time this process comes with a key."""
    _append(settings.WORLD_JOURNAL + ".visits", {"place": place, "key": key})
    latency = settings.WORLD_LATENCY
    time.sleep(latency.get(place, latency.get("all", 0)))
    if place in settings.WORLD_DOWN:
        raise Unreachable(f"{place} is down")
    unlucky = zlib.crc32(f"{place} {key}".encode()) % 1000 < settings.WORLD_FAULTS * 1000
    if unlucky and (place, key) not in _failed:
        _failed.add((place, key))
        raise Unreachable(f"{place} did not answer")


def deliver(place: str, key: str, content: dict[str, Any]) -> None:
    """Hand something over to a place of the outside world. ``key`` tells it what it has received before."""
    visit(place, key)
    _append(settings.WORLD_JOURNAL, {"place": place, "key": key, **content})


def visits(place: str | None = None) -> list[dict[str, Any]]:
    """Every call that set out, oldest first, whatever became of it; to one place or to all of them."""
    return _read(settings.WORLD_JOURNAL + ".visits", place)


def received(place: str | None = None) -> list[dict[str, Any]]:
    """What arrived, oldest first; at one place or at all of them."""
    return _read(settings.WORLD_JOURNAL, place)


def _append(path: str, entry: dict[str, Any]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(entry) + "\n").encode())  # one write: lines of several processes never mix
    finally:
        os.close(file)


def _read(path: str, place: str | None) -> list[dict[str, Any]]:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    everything = [json.loads(line) for line in lines]
    return [each for each in everything if place in (None, each["place"])]
