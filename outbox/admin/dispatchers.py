"""The dispatchers in the admin: who reported lately, and who has stopped reporting."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.counting import clocked
from outbox.admin.shown import NOTHING, ago, number, plain, short, time_tag
from outbox.models import Dispatcher


class DispatcherAdmin(ReadOnlyAdmin):
    """Rows that the processes write about themselves; nothing depends on them."""

    list_display = ("worker", "state", "seen", "load", "takes", "started", "wakeup_mode", "release")
    list_display_links = ("worker",)
    ordering = ("name",)
    sortable_by = ()
    fields = (
        "worker",
        "state",
        "seen",
        "load",
        "all_handlers",
        "started",
        "wakeup_mode",
        "release",
        "host_and_process",
    )
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return clocked(super().get_queryset(request))

    @admin.display(description=_("dispatcher"))
    def worker(self, dispatcher: Dispatcher) -> SafeString:
        return format_html('<span class="outbox-key">{}</span>', plain(dispatcher.name))

    @admin.display(description=_("state"))
    def state(self, dispatcher: Dispatcher) -> SafeString:
        if dispatcher.lost_at <= dispatcher.clock:  # type: ignore[attr-defined]
            return _badge("dead", pgettext_lazy("dispatcher", "lost"))
        if dispatcher.stopping:
            return _badge("retrying", pgettext_lazy("dispatcher", "stopping"))
        return _badge("delivered", pgettext_lazy("dispatcher", "live"))

    @admin.display(description=_("last report"))
    def seen(self, dispatcher: Dispatcher) -> SafeString:
        return time_tag(dispatcher.seen_at, ago(dispatcher.seen_at, dispatcher.clock))  # type: ignore[attr-defined]

    @admin.display(description=_("in flight"))
    def load(self, dispatcher: Dispatcher) -> SafeString:
        return format_html('<span class="outbox-number">{} / {}</span>', dispatcher.in_flight, dispatcher.concurrency)

    @admin.display(description=_("handlers"))
    def takes(self, dispatcher: Dispatcher) -> SafeString | str:
        names = _names(dispatcher)
        if not names:
            return NOTHING
        every = ", ".join(names)
        text = short(every, 60) if len(names) <= 4 else _("%(count)s handlers") % {"count": number(len(names))}
        return format_html('<span title="{}">{}</span>', short(every, 1000), text)

    @admin.display(description=_("handlers"))
    def all_handlers(self, dispatcher: Dispatcher) -> str:
        return ", ".join(_names(dispatcher)) or NOTHING

    @admin.display(description=_("started"))
    def started(self, dispatcher: Dispatcher) -> SafeString:
        return time_tag(dispatcher.started_at, ago(dispatcher.started_at, dispatcher.clock))  # type: ignore[attr-defined]

    @admin.display(description=_("wake-up"))
    def wakeup_mode(self, dispatcher: Dispatcher) -> str:
        return plain(dispatcher.wakeup) or NOTHING

    @admin.display(description=_("version"))
    def release(self, dispatcher: Dispatcher) -> str:
        return plain(dispatcher.version) or NOTHING

    @admin.display(description=_("host and process"))
    def host_and_process(self, dispatcher: Dispatcher) -> str:
        return f"{plain(dispatcher.host)} · {dispatcher.pid}"


def _names(dispatcher: Dispatcher) -> list[str]:
    return sorted(plain(str(each)) for each in dispatcher.handlers or ())


def _badge(look: str, text: Any) -> SafeString:
    return format_html('<span class="outbox-badge outbox-badge-{}">{}</span>', look, text)
