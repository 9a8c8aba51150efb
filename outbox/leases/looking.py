"""The look before a claim: which due rows there are, read without locks, and which of them to try for."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from outbox.database import ROUTES_PER_STATEMENT, due_routes
from outbox.handlers import Handler
from outbox.leases.floors import Floors
from outbox.leases.lease import ALONE_FROM
from outbox.leases.rivals import begin_anywhere
from outbox.models import Message

WIDTH = 20  # rows that a look reads of a route at least, so that crowded lanes are seen
FEW_ROUTES = 8  # with more routes than this, a look first asks which of them have due rows
MOST_KNOCKS = 8  # of one lane that a claim takes up; if there are more, they are put to sleep by other means
LEAVE_ALONE = 0.1  # seconds for which a row or lane that somebody had locked is not tried again; more if it lasts
LONGEST_ALONE = 1.0
MOST_SPARE = 50  # rows beyond the limit that a claim tries for when it meets locked ones
PATIENCE = 0.5  # seconds that a locked lane may fill the looks before its knocks are snoozed
FORGET = 5.0  # seconds after which an obstacle that was not met again is forgotten
MOST_HIDING = 1000  # rows that cannot be had and that a look reads past, at most
_TABLE = Message._meta.db_table


class Candidate(NamedTuple):
    """A due row as the look at the index saw it, without a lock."""

    route: str
    id: int
    lane: int | None
    lapses: int
    due_at: int


@dataclass(slots=True, kw_only=True)
class Obstacles:
    """Rows (by id) or lanes that somebody had locked; left alone for a moment, so that they do not fill every claim."""

    _since: dict[int, float] = field(default_factory=dict)
    _until: dict[int, float] = field(default_factory=dict)

    def meet(self, met: Iterable[int], *, tried: Iterable[int]) -> None:
        """Note which of those that were tried are locked now; the others are free again."""
        now = time.monotonic()
        old = [each for each, until in self._until.items() if until + FORGET < now]
        met = set(met)
        self.forget({*old, *tried} - met)
        for each in met:
            self._since.setdefault(each, now)
            self._until[each] = now + min(LONGEST_ALONE, LEAVE_ALONE + now - self._since[each])

    def forget(self, gone: Iterable[int]) -> None:
        """These are none."""
        for each in gone:
            self._since.pop(each, None)
            self._until.pop(each, None)

    def in_the_way(self) -> set[int]:
        """Those to leave alone at present."""
        now = time.monotonic()
        return {each for each, until in self._until.items() if until > now}

    def lasting(self) -> set[int]:
        """Those that have been in the way for longer than anybody should hold a lock."""
        now = time.monotonic()
        return {each for each, since in self._since.items() if now - since > PATIENCE}


def read(using: str, routes: Sequence[str], width: int, floors: Floors) -> tuple[list[Candidate], bool]:
    """Due rows of these routes, ``width`` of each at most, fewer if many routes have any; oldest first in each route.

    The second value tells whether there may be more. One statement when nothing is due, however many routes there are.
    """
    width = max(width, WIDTH)
    if len(routes) > FEW_ROUTES:
        due = due_routes(using, _TABLE, routes)
        routes = [route for route in routes if route in due]
    asked = routes[:ROUTES_PER_STATEMENT]
    count = width if len(asked) <= FEW_ROUTES else max(2, 2 * width // len(asked))
    found = [Candidate(*row) for row in floors.look(using, _TABLE, asked, count)]
    sizes = dict.fromkeys(asked, 0)
    for row in found:
        sizes[row.route] += 1
    return found, len(asked) < len(routes) or any(size == count for size in sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows to lock. ``solo``: the only one, because it must run alone; ``lonely``: such a one was left out.

    ``plain``: none is in a lane, and no lease of them ever lapsed, by all we know. ``rest``: there are others that
    could have been chosen; ``avoided``: so many are locked by somebody, by all we know; ``hiding``: so many rows that
    cannot be had now may hide others from the look.
    """

    ids: list[int]
    solo: bool = False
    plain: bool = False
    lonely: bool = False
    rest: bool = False
    avoided: int = 0
    hiding: int = 0


def choose(
    candidates: Sequence[Candidate],
    routes: Mapping[str, Handler],
    *,
    order: Sequence[str],
    limit: int,
    room: Mapping[str, int],
    alone: bool,
    rows: Collection[int] = (),
    lanes: Collection[int] = (),
    blocks: int = 1,
) -> Choice:
    """Choose in turn one of each handler, while there is room; all knocks at one lane count as one.

    ``order``: the routes, the one whose turn it is first. ``rows`` and ``lanes`` are the obstacles to avoid.
    ``blocks``: among rivals, of how many parts of the plain rows of each handler one is tried for.
    """
    free = [row for row in candidates if row.id not in rows and row.lane not in lanes]
    avoided = len(candidates) - len(free)
    lonely = [row for row in free if row.lapses >= ALONE_FROM]
    if lonely and alone:
        return Choice(ids=[lonely[0].id], solo=True, rest=len(free) > 1, avoided=avoided, hiding=avoided)
    queues: dict[str, list[Candidate]] = {routes[route].name: [] for route in order}
    for row in free:
        if row.lapses < ALONE_FROM:
            queues[routes[row.route].name].append(row)
    plain = not any(row.lane is not None or row.lapses for row in free)
    if plain and blocks > 1:
        queues = {name: begin_anywhere(rows, limit, blocks) for name, rows in queues.items()}
    chosen: list[int] = []
    left = limit
    for layer in zip_longest(*(units[: room[name]] for name, units in _units(queues).items())):
        for unit in layer:
            if unit and left > 0:
                chosen += unit
                left -= 1
    rest = len(chosen) + len(lonely) < len(free)
    hiding = avoided + len(lonely)
    return Choice(ids=chosen, plain=plain, lonely=bool(lonely), rest=rest, avoided=avoided, hiding=hiding)


def _units(queues: Mapping[str, Sequence[Candidate]]) -> dict[str, list[list[int]]]:
    """Ids by handler, in due order; rows of one lane are one unit, since only one of them can be leased."""
    units: dict[str, list[list[int]]] = {}
    by_lane: dict[int, list[int]] = {}
    for name, rows in queues.items():
        mine = units.setdefault(name, [])
        for row in rows:
            if row.lane is not None and row.lane in by_lane:
                if len(by_lane[row.lane]) < MOST_KNOCKS:
                    by_lane[row.lane].append(row.id)
                continue
            mine.append([row.id])
            if row.lane is not None:
                by_lane[row.lane] = mine[-1]
    return units
