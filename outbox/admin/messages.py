"""The messages in the admin: a list to find them, a page to understand one, and three guarded verbs."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib.admin.utils import unquote
from django.contrib.messages import WARNING
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from outbox.admin import actions, page, search, selection
from outbox.admin.cells import MessageCells
from outbox.admin.filters import HandlerFilter, RoutableFilter, SinceFilter, TopicFilter
from outbox.admin.lists import PLACE_VAR, MessageChangeList
from outbox.admin.places import Place, badge
from outbox.admin.shown import middle
from outbox.admin.verbs import DEEDS
from outbox.models import Message

TITLE_LENGTH = 60  # of a key in the breadcrumbs


class MessageAdmin(MessageCells):
    """Register it on a site of your own for a second door; subclass it to redact or to restrict the rows."""

    list_display = ("key", "topic_and_handler", "place", "attempts_and_budget", "error", "due", "age", "worker")
    list_display_links = ("key",)
    list_filter = (TopicFilter, HandlerFilter, SinceFilter, RoutableFilter)
    ordering = ("-pk",)
    search_fields = ("event_key",)  # makes the box appear; what it understands stands in `search`
    search_help_text = search.HELP
    actions = (actions.make_due, actions.requeue, actions.discard)
    change_list_template = "admin/outbox/message/change_list.html"
    change_form_template = "admin/outbox/message/change_form.html"

    def has_payload_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.view_payload")

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.requeue_message")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.discard_message")

    # --- the list -----------------------------------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[MessageChangeList]:
        return MessageChangeList

    def get_sortable_by(self, request: HttpRequest) -> tuple[str, ...]:
        """By due time only where few rows have one: sorting a whole table would read all of it."""
        live = {place.value for place in Place} - {Place.DEAD, Place.DELIVERED, Place.DISCARDED}
        return ("due", "age") if request.GET.get(PLACE_VAR) in live else ("age",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Message], search_term: str
    ) -> tuple[QuerySet[Message], bool]:
        return (queryset.filter(search.condition(search_term)) if search_term.strip() else queryset), False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        return lookup == PLACE_VAR or super().lookup_allowed(lookup, value, request)

    # --- the page -----------------------------------------------------------------------------------------------------

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The page of one message; POST carries one verb."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        rights = {name: getattr(self, f"has_{name}_permission")(request) for name in ("payload", "requeue", "discard")}
        message = self._find(request, object_id, payload=rights["payload"] and request.method != "POST")
        if message is None:
            text = _("There is no message %(id)s any more. Perhaps it was pruned.") % {"id": unquote(object_id)[:40]}
            self.message_user(request, text, WARNING)
            return HttpResponseRedirect(self._url("changelist"))
        if request.method == "POST":
            return self._do(request, message)
        shown = page.context(
            self.alias,
            message,
            rights=rights,
            redact=partial(self.visible, message),
            show=request.GET.get("show", ""),
        )
        context = {
            **self.admin_site.each_context(request),
            "title": _("Message"),
            "original": f"{message.topic} {middle(shown['key'], TITLE_LENGTH)}",
            "opts": self.opts,
            "media": self.media,
            "is_popup": False,
            "has_view_permission": True,
            "badge": badge(shown["place"]),
            **shown,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.change_form_template, context)

    def _find(self, request: HttpRequest, object_id: str, *, payload: bool) -> Message | None:
        rows = page.with_documents(self.get_queryset(request), allowed=payload)
        try:
            found: Message | None = rows.filter(pk=unquote(object_id)).first()
        except (ValueError, ValidationError):
            return None
        return found

    def _do(self, request: HttpRequest, message: Message) -> HttpResponse:
        deed = DEEDS.get(request.POST.get("verb", ""))
        if deed is None:
            raise BadRequest(f"No such verb: use one of {', '.join(DEEDS)}.")
        if not getattr(self, f"has_{deed.right}_permission")(request):
            raise PermissionDenied
        actions.do(deed, self, request, selection.of_ids([str(message.pk)], self.get_queryset(request)))
        return HttpResponseRedirect(self._url("change", message.pk))

    def _url(self, name: str, *arguments: object) -> str:
        route = f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}"
        return reverse(route, args=arguments, current_app=self.admin_site.name)
