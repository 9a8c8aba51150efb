"""What all pages of the outbox have in common: rows are only looked at, and read where they are written."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import models, router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst

from outbox.admin.lists import CappedChangeList


class ReadOnlyAdmin(admin.ModelAdmin):
    """Rows of the outbox are written by their guarded operations only, never by a form."""

    list_per_page = 100
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    view_on_site = False
    change_list_template = "admin/outbox/change_list.html"

    class Media:
        css = {"all": ["outbox/admin.css"]}

    @property
    def alias(self) -> str:
        """Where the outbox is written. A replica may lag, or be empty."""
        return router.db_for_write(self.model)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(self.alias)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CappedChangeList]:
        return CappedChangeList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        title = capfirst(str(self.opts.verbose_name_plural))
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

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
