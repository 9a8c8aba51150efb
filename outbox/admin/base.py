"""What all pages of the outbox have in common: rows are only looked at, and read where they are written."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db import models, router
from django.db.models import QuerySet
from django.http import HttpRequest

from outbox.database import ServerNow

CAP = 10_000  # rows that are listed, and counted one by one, at most


def capped_count(rows: QuerySet[Any]) -> int:
    """How many rows there are, or ``CAP + 1``, at the cost of no more than that many."""
    return rows.order_by().values("pk")[: CAP + 1].count()


def clocked(rows: QuerySet[Any], **more: Any) -> QuerySet[Any]:
    """The rows with ``clock``, the database's time, by which alone they are due, late or lost."""
    found: QuerySet[Any] = rows.annotate(clock=ServerNow(), **more)
    return found


class CappedPaginator(Paginator):
    """Pages of the first ``CAP`` rows: a list never counts a whole table."""

    @cached_property
    def count(self) -> int:
        return min(capped_count(self.object_list), CAP)  # type: ignore[arg-type]


class ReadOnlyAdmin(admin.ModelAdmin):
    """Rows of the outbox are written by their guarded operations only, never by a form."""

    list_per_page = 100
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    view_on_site = False

    class Media:
        css = {"all": ["outbox/admin.css"]}

    @property
    def alias(self) -> str:
        """Where the outbox is written. A replica may lag, or be empty."""
        return router.db_for_write(self.model)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(self.alias)

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.view_{self.opts.model_name}")

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only our own filters: any other lookup would let people without the right to payloads search them."""
        return lookup in {getattr(each, "parameter_name", None) for each in self.list_filter}
