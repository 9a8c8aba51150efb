"""The open breakers in the admin: which handlers pause because their other side is down, and a way to close them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext, pgettext

from outbox import breakers
from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.counting import clocked
from outbox.admin.shown import NOTHING, ago, error_line, number, plain, time_tag
from outbox.models import Breaker
from outbox.redaction import redacted

ERROR_LENGTH = 160


@admin.action(permissions=["reset"], description=_("Close: the other side is back"))
def reset(modeladmin: BreakerAdmin, request: HttpRequest, queryset: QuerySet[Breaker]) -> None:
    closed = [row for row in queryset if breakers.reset(modeladmin.alias, row.handler)]
    LogEntry.objects.log_actions(request.user.pk, closed, CHANGE, "Closed by hand.")  # type: ignore[arg-type]
    text = ngettext(
        "%(count)s breaker was closed; its handler goes on within seconds.",
        "%(count)s breakers were closed; their handlers go on within seconds.",
        len(closed),
    )
    modeladmin.message_user(request, text % {"count": number(len(closed))}, messages.SUCCESS)


class BreakerAdmin(ReadOnlyAdmin):
    """Rows that dispatchers write when a handler's other side is down, and delete when it answers again."""

    list_display = ("name", "since", "next_probe", "probes", "error")
    list_display_links = ("name",)
    ordering = ("handler",)
    sortable_by = ()
    fields = ("name", "since", "next_probe", "probes", "error", "opened_by", "probed")
    readonly_fields = fields
    actions = (reset,)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return clocked(super().get_queryset(request))

    def has_reset_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.reset_breaker")

    @admin.display(description=_("handler"))
    def name(self, breaker: Breaker) -> SafeString:
        return format_html('<span class="outbox-key">{}</span>', plain(breaker.handler))

    @admin.display(description=_("open since"))
    def since(self, breaker: Breaker) -> SafeString:
        return time_tag(breaker.opened_at, ago(breaker.opened_at, breaker.clock))

    @admin.display(description=_("next probe"))
    def next_probe(self, breaker: Breaker) -> SafeString:
        is_due = breaker.probe_at <= breaker.clock
        soon = pgettext("of a probe", "with the next message")
        return time_tag(breaker.probe_at, soon if is_due else ago(breaker.probe_at, breaker.clock))

    @admin.display(description=_("error"))
    def error(self, breaker: Breaker) -> str:
        return error_line(breaker.error_type, redacted(breaker.error_text, "error"), ERROR_LENGTH) or NOTHING

    @admin.display(description=_("opened by"))
    def opened_by(self, breaker: Breaker) -> str:
        return plain(breaker.worker) or NOTHING

    @admin.display(description=_("last probed by"))
    def probed(self, breaker: Breaker) -> str:
        return plain(breaker.probed_by) or NOTHING
