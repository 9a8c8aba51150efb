"""Which event becomes which task. Pure: a route looks at the payload and answers a task, or None: nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UHD = 2160


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the engine shall do. A higher ``priority`` runs earlier."""

    name: str
    input: dict[str, Any]
    trace_id: str | None = None
    priority: int = 0


def probe(event: dict[str, Any]) -> Task:
    return Task(name="probe", input={"recording": event["recording"]})


def transcode(event: dict[str, Any]) -> Task | None:
    if event["height"] < UHD:
        return None  # every device plays it as it is
    return Task(name="transcode", input={"recording": event["recording"], "height": UHD}, priority=5)


def clean_up(event: dict[str, Any]) -> Task:
    return Task(name="clean-up", input={"recording": event["recording"]}, trace_id=f"deletion-{event['recording']}")


def nothing(event: dict[str, Any]) -> None:
    """For events that are only shown live: the mirror sees them when they are delivered."""


ROUTES: dict[str, Callable[[dict[str, Any]], Task | None]] = {
    "recording.imported": probe,
    "recording.probed": transcode,
    "recording.deleted": clean_up,
    "recording.progress": nothing,
}
