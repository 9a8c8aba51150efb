"""The attempts in the admin: how each claim ended, with its whole traceback."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin
from django.db.models import F, Model, QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.counting import clocked
from outbox.admin.filters import OutcomeFilter
from outbox.admin.lists import ERROR_START, CappedChangeList
from outbox.admin.search import LARGEST
from outbox.admin.shown import NOTHING, ago, duration, error_line, plain, short, stamp, time_tag
from outbox.models import Attempt
from outbox.redaction import redacted, safely

ERROR_LENGTH = 80


class AttemptChangeList(CappedChangeList):
    """Of an error only its beginning, and no traceback."""

    def rows(self) -> QuerySet[Any]:
        light = super().rows().defer("error_text", "traceback")
        return clocked(light, error_start=Left(F("error_text"), ERROR_START))


class AttemptAdmin(ReadOnlyAdmin):
    """One row is one claim that did not simply succeed at the first try."""

    list_display = ("title", "of_message", "ended", "took", "worker_name", "error")
    list_filter = (OutcomeFilter,)
    ordering = ("-pk",)
    sortable_by = ()
    search_fields = ("message_id",)
    search_help_text = _("The id of a message.")
    fields = (
        "of_message",
        "title",
        "ended_stamp",
        "took",
        "worker_name",
        "error_name",
        "whole_error",
        "whole_traceback",
    )
    readonly_fields = fields

    def redact(self, attempt: Attempt, what: str, text: str) -> str:
        """Override to hide more than ``OUTBOX["REDACT"]`` does; ``what`` is error or traceback."""
        return text

    def visible(self, attempt: Attempt, what: str, text: str) -> str:
        """What people see of a text: redacted for the project, and then for this admin."""
        return safely(partial(self.redact, attempt, what), redacted(text, what))

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Whoever may look at a message may follow its links to the whole of an attempt."""
        return super().has_view_permission(request, obj) or request.user.has_perm("outbox.view_message")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return clocked(super().get_queryset(request))  # for the page of one

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[AttemptChangeList]:
        return AttemptChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        known = term.isdecimal() and len(term) < 20 and int(term) <= LARGEST
        return (queryset.filter(message_id=int(term)) if known else queryset.none()), False

    @admin.display(description=_("attempt"))
    def title(self, attempt: Attempt) -> str:
        return f"#{attempt.number} {attempt.get_outcome_display()}"

    @admin.display(description=_("message"))
    def of_message(self, attempt: Attempt) -> SafeString:
        route = f"admin:{self.opts.app_label}_message_change"
        url = reverse(route, args=(attempt.message_id,), current_app=self.admin_site.name)
        return format_html('<a href="{}">{}</a>', url, attempt.message_id)

    @admin.display(description=_("ended"))
    def ended(self, attempt: Attempt) -> SafeString:
        return time_tag(attempt.ended_at, ago(attempt.ended_at, attempt.clock))  # type: ignore[attr-defined]

    @admin.display(description=_("ended"))
    def ended_stamp(self, attempt: Attempt) -> str:
        return stamp(attempt.ended_at)

    @admin.display(description=pgettext_lazy("of an attempt", "took"))
    def took(self, attempt: Attempt) -> str:
        if attempt.started_at is None:
            return NOTHING
        return duration((attempt.ended_at - attempt.started_at).total_seconds())

    @admin.display(description=_("worker"))
    def worker_name(self, attempt: Attempt) -> str:
        return plain(attempt.worker) or NOTHING

    @admin.display(description=_("error"))
    def error(self, attempt: Attempt) -> SafeString | str:
        start = self.visible(attempt, "error", attempt.error_start)  # type: ignore[attr-defined]
        line = error_line(attempt.error_type, start, ERROR_LENGTH)
        whole = short(f"{attempt.error_type}: {start}", 300)
        return format_html('<bdi title="{}">{}</bdi>', whole, line) if line else NOTHING

    @admin.display(description=_("error type"))
    def error_name(self, attempt: Attempt) -> str:
        return plain(" · ".join(each for each in (attempt.error_type, attempt.error_code) if each)) or NOTHING

    @admin.display(description=_("error"))
    def whole_error(self, attempt: Attempt) -> SafeString | str:
        return _block(self.visible(attempt, "error", attempt.error_text))

    @admin.display(description=_("traceback"))
    def whole_traceback(self, attempt: Attempt) -> SafeString | str:
        return _block(self.visible(attempt, "traceback", attempt.traceback))


def _block(text: str) -> SafeString | str:
    return format_html('<pre class="outbox-pre">{}</pre>', plain(text)) if text else NOTHING
