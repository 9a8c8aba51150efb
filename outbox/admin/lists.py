"""The lists: pages of the first rows that match, with numbers that tell the truth, and tabs by place for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import F, QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from outbox.admin.counting import CAP, Tally, capped_tally, clocked
from outbox.admin.places import MEANING, Place, rows_at, tallies
from outbox.admin.shown import number
from outbox.models import Message

PLACE_VAR = "place"
ORDER = dict.fromkeys((Place.DUE, Place.SCHEDULED, Place.RETRYING), ("due_at", "-pk"))
# Ended last comes first; and it keeps SQLite from walking the whole table by id in search of the few that are dead.
ORDER |= dict.fromkeys((Place.DEAD, Place.DISCARDED), ("-settled_at", "-pk"))
ERROR_START = 300  # characters of an error that the list reads
COLUMNS = (
    *("event_key", "topic", "handler", "route", "payload_version", "staged_at", "state", "due_at", "settled_at"),
    *("lease_token", "leased_by", "attempt", "spent", "reason", "error_type"),
)


class KnownPaginator(Paginator):
    """Pages of rows that have been counted already."""

    def __init__(self, rows: QuerySet[Any], per_page: int, count: int) -> None:
        super().__init__(rows, per_page)
        self.count = count


class CappedChangeList(ChangeList):
    """At most ``CAP`` rows are listed; a page behind the last one is the last one."""

    def count_rows(self) -> Tally:
        return capped_tally(self.queryset)

    def rows(self) -> QuerySet[Any]:
        """What the pages are cut from."""
        found: QuerySet[Any] = self.queryset
        return found

    def get_results(self, request: HttpRequest) -> None:
        tally = self.count_rows()
        self.result_count = min(tally.rows, CAP)
        self.cut = tally.capped or tally.rows > CAP
        self.paginator = KnownPaginator(self.rows(), self.list_per_page, self.result_count)
        page = self.paginator.get_page(self.page_num)
        self.page_num = page.number
        self.result_list = page.object_list
        self.multi_page = self.result_count > self.list_per_page
        self.can_show_all = False
        # Equal numbers keep the search form from telling one: it would tell the capped one for the whole.
        self.full_result_count = self.result_count
        self.show_full_result_count = False
        self.show_admin_actions = self.result_count > 0

    @property
    def nothing_at_all(self) -> bool:
        return self.result_count == 0 and not self.query and not self.has_active_filters

    @property
    def cap_note(self) -> str:
        """What the list leaves out, or nothing."""
        if not self.cut:
            return ""
        text = _("More rows match than are listed: these are the first %(cap)s. A filter or the search narrows them.")
        return text % {"cap": number(CAP)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tab:
    """One tab above the list of messages."""

    label: str
    meaning: str
    tally: Tally
    link: str
    selected: bool
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRow:
    """One filter above the list of messages, with its choices."""

    title: str
    choices: Sequence[Any]


class MessageChangeList(CappedChangeList):
    """The tab is no filter for Django: the tabs count what the filters and the search leave of every place."""

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = super().get_filters_params(params)
        found.pop(PLACE_VAR, None)
        return found

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Message]:
        wanted = self.params.get(PLACE_VAR)
        self.place = Place(wanted) if wanted in Place.values else None
        self.everywhere: QuerySet[Message] = super().get_queryset(request, exclude_parameters)
        return rows_at(self.place, self.everywhere)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Message]) -> list[Any]:
        if self.place in ORDER and not self.params.get("o"):
            return list(ORDER[self.place])
        return list(super().get_ordering(request, queryset))

    def count_rows(self) -> Tally:
        counted = tallies(self.everywhere)
        self.tabs = [self._tab(place, counted[place]) for place in (None, *Place)]
        return counted[self.place]

    def rows(self) -> QuerySet[Any]:
        """Without payload and headers, and of an error only its beginning."""
        return clocked(self.queryset.only(*COLUMNS), error_start=Left(F("error_text"), ERROR_START))

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.has_filters = False  # they stand in a row above the list, which needs the width: see filters.html

    @property
    def nothing_at_all(self) -> bool:
        return super().nothing_at_all and not any(tab.tally.rows for tab in self.tabs)

    @property
    def filter_rows(self) -> list[FilterRow]:
        specs = self.filter_specs
        return [FilterRow(title=capfirst(str(spec.title)), choices=list(spec.choices(self))) for spec in specs]

    @property
    def select_all_text(self) -> str:
        """The offer below a fully selected page: an action on a capped list touches the rows that are listed."""
        return _("Select the first %(cap)s messages") % {"cap": number(CAP)}

    @property
    def all_selected_text(self) -> str:
        return _("The first %(cap)s are selected, in the order of this list") % {"cap": number(CAP)}

    def _tab(self, place: Place | None, tally: Tally) -> Tab:
        return Tab(
            label=_("All") if place is None else capfirst(str(place.label)),
            meaning="" if place is None else str(MEANING[place]),
            tally=tally,
            link=self.get_query_string({PLACE_VAR: place.value if place else None}),
            selected=place == self.place,
            name=place.value if place else "all",
        )
