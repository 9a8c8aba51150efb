"""On which terms one claim is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outbox.handlers import Handler


@dataclass(slots=True, kw_only=True)
class Terms:
    """On which terms one claim is made; ``room`` is how many messages each handler (by name) may get.

    The first ``start`` messages are charged. ``solo``: the one row that is claimed may be one that must run alone.
    ``only``: touch no other rows than the chosen ones. ``lasting``: lanes whose knocks are snoozed if they are stuck.
    """

    using: str
    worker: str
    seconds: float
    token: int
    limit: int
    start: int
    room: dict[str, int]
    routes: Mapping[str, Handler]
    solo: bool = False
    only: bool = False
    lasting: Collection[int] = ()
