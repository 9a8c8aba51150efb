"""Which messages an action is about: exactly those that were named, from the list to the confirmation to the deed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest

from outbox.admin.counting import CAP, clocked
from outbox.admin.places import Place, place_of
from outbox.models import Message

IDS = "ids"  # one field of the confirmation form: Django refuses forms of more than a thousand fields
CHUNK = 500  # ids in one statement
_COLUMNS = (
    *("event_key", "topic", "handler", "route", "ordering_key", "lane"),
    *("state", "due_at", "lease_token", "spent", "payload_pruned", "error_type"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The named messages that are there, in the order they were named, and the ids that are not."""

    rows: Sequence[Message]
    missing: Sequence[int] = ()

    @property
    def ids(self) -> list[int]:
        return [row.pk for row in self.rows]

    def at(self, places: Iterable[Place]) -> list[Message]:
        wanted = set(places)
        return [row for row in self.rows if place_of(row, row.clock) in wanted]

    def elsewhere(self, places: Iterable[Place]) -> dict[Place, int]:
        """How many of the rows are at which other place."""
        counts: dict[Place, int] = {}
        for row in self.rows:
            place = place_of(row, row.clock)
            if place not in places:
                counts[place] = counts.get(place, 0) + 1
        return counts


def of_action(request: HttpRequest, listed: QuerySet[Message], visible: QuerySet[Message]) -> Selection:
    """What is ticked in the list, or all that the list shows of its first ``CAP`` rows.

    Ticked rows are looked up by id alone: one that moved to another tab meanwhile must be told, not silently left out.
    """
    if request.POST.get("select_across") == "1" and IDS not in request.POST:
        return Selection(rows=list(_read(listed)[:CAP]))
    named = request.POST[IDS].split(",") if IDS in request.POST else request.POST.getlist(ACTION_CHECKBOX_NAME)
    return of_ids(named, visible)


def of_ids(named: Iterable[str], visible: QuerySet[Message]) -> Selection:
    """The rows of these ids, at most ``CAP``; what is no id is nobody's."""
    ids = list(dict.fromkeys(int(each) for each in named if each.isdecimal() and len(each) < 20))[:CAP]
    found = {row.pk: row for chunk in chunks(ids) for row in _read(visible.filter(pk__in=chunk))}
    return Selection(rows=[found[pk] for pk in ids if pk in found], missing=[pk for pk in ids if pk not in found])


def chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _read(rows: QuerySet[Any]) -> QuerySet[Any]:
    return clocked(rows.only(*_COLUMNS))
