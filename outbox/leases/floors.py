"""Where the looks at the routes begin, past what an old snapshot keeps in the index.

While somebody's transaction stays open, PostgreSQL cannot remove the entries of what was claimed since, and they all
stand before the oldest due row: each look would walk past them. A look that found as much as it asked for says where
the next one may begin. Nothing is left behind by that, only late by two seconds at most: whatever was due at that look
stands behind the floor, and what comes to stand before it (committed late, or dated back) is seen when the floor is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from django.db import connections

from outbox import database

Place = tuple[int, int]  # due_at and id: the order in which due rows are looked at
Row = tuple[str, int, int | None, int, int]  # route, id, lane, lapses, due_at

KEPT = 2.0  # seconds from the first floor until all are dropped


@dataclass(slots=True, kw_only=True)
class Floors:
    """The floors of one claimer, by route."""

    _places: dict[str, Place] = field(default_factory=dict)
    _until: float = 0.0

    def look(self, using: str, table: str, routes: Sequence[str], count: int) -> list[Row]:
        """`database.due_candidates` from the floors on; a route of which that is not enough is looked at as a whole."""
        if self._places and monotonic() >= self._until:
            self._places.clear()
        rows = database.due_candidates(using, table, routes, count, self._places)
        if self._places:
            short = [route for route in routes if route in self._places and _many(rows, route) < count]
            if short:
                for route in short:
                    del self._places[route]
                rows = [row for row in rows if row[0] not in short]
                rows += database.due_candidates(using, table, short, count)
                rows.sort(key=_place)
        if len(rows) >= count and database.walks_dead_entries(connections[using]):
            self._note(rows, count)
        return rows

    def _note(self, rows: Sequence[Row], count: int) -> None:
        if not self._places:
            self._until = monotonic() + KEPT
        for route in {row[0] for row in rows}:
            if _many(rows, route) == count:
                self._places[route] = min(_place(row) for row in rows if row[0] == route)


def _many(rows: Sequence[Row], route: str) -> int:
    return sum(row[0] == route for row in rows)


def _place(row: Row) -> Place:
    return row[4], row[1]
