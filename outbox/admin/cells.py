"""The cells of the list of messages."""

from __future__ import annotations

from functools import partial

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.places import Place, badge, place_of
from outbox.admin.shown import NOTHING, about, ago, error_line, key_tag, lateness, plain, short, time_tag
from outbox.handlers import registry
from outbox.models import Message, Reason, State
from outbox.redaction import redacted, safely

KEY_LENGTH = 28
ERROR_LENGTH = 64
WORKER_LENGTH = 20


class MessageCells(ReadOnlyAdmin):
    """Display methods. Rows come with ``clock``, the database's time, and ``error_start``, the error's beginning."""

    def redact(self, message: Message, what: str, text: str) -> str:
        """Override to hide more than ``OUTBOX["REDACT"]`` does; ``what`` is payload, headers, error or traceback."""
        return text

    def visible(self, message: Message, what: str, text: str) -> str:
        """What people see of a text: redacted for the project, and then for this admin."""
        return safely(partial(self.redact, message, what), redacted(text, what, topic=message.topic))

    @admin.display(description=gettext_lazy("event key"))
    def key(self, message: Message) -> SafeString:
        return key_tag(message.event_key, KEY_LENGTH)

    @admin.display(description=gettext_lazy("topic"))
    def topic_and_handler(self, message: Message) -> SafeString:
        notes = [] if message.handler == message.topic else [message.handler]
        if message.payload_version != 1:
            notes.append(f"v{message.payload_version}")
        if registry.by_route(message.route) is None:
            notes.append(_("no handler here"))
        if not notes:
            return format_html('<span class="outbox-name">{}</span>', message.topic)
        template = '<span class="outbox-name">{}</span><small class="outbox-quiet">{}</small>'
        return format_html(template, message.topic, " · ".join(notes))

    @admin.display(description=gettext_lazy("state"))
    def place(self, message: Message) -> SafeString:
        return badge(place_of(message, message.clock))

    @admin.display(description=pgettext_lazy("column", "attempt"))
    def attempts_and_budget(self, message: Message) -> SafeString:
        handler = registry.by_route(message.route)
        budget = f"{message.spent}/{handler.max_attempts if handler else '?'}"
        told = {"attempt": message.attempt, "budget": budget}
        title = _("Attempt %(attempt)s; %(budget)s of the budget spent") % told
        template = '<span class="outbox-number" title="{}">{} <small class="outbox-quiet">{}</small></span>'
        return format_html(template, title, message.attempt, budget)

    @admin.display(description=gettext_lazy("error"), empty_value=NOTHING)
    def error(self, message: Message) -> SafeString | None:
        if message.state == State.DELIVERED:
            return None  # whatever failed before: it is no trouble any more, and its page tells it
        text = self.visible(message, "error", message.error_start)  # type: ignore[attr-defined]
        if message.error_type or text:
            whole = short(f"{message.error_type}: {text}", 300)
            line = error_line(message.error_type, text, ERROR_LENGTH)
            return format_html('<bdi class="outbox-error" title="{}">{}</bdi>', whole, line)
        if message.reason:
            return format_html('<span class="outbox-quiet">{}</span>', Reason(message.reason).label)
        return None

    @admin.display(description=gettext_lazy("due or ended"), ordering="due_at", empty_value=NOTHING)
    def due(self, message: Message) -> SafeString | None:
        if message.settled_at is not None:
            ended = time_tag(message.settled_at, ago(message.settled_at, message.clock))
            return format_html('<span class="outbox-quiet">{}</span>', ended)
        if message.due_at is None:
            return None
        place = place_of(message, message.clock)
        if place == Place.IN_FLIGHT:
            text = _("lease ends %(when)s") % {"when": ago(message.due_at, message.clock)}
            return format_html('<span class="outbox-quiet">{}</span>', time_tag(message.due_at, text))
        return time_tag(message.due_at, lateness(message.due_at, message.clock))

    @admin.display(description=gettext_lazy("age"), ordering="-pk")
    def age(self, message: Message) -> SafeString:
        return time_tag(message.staged_at, about((message.clock - message.staged_at).total_seconds()))

    @admin.display(description=gettext_lazy("worker"), empty_value=NOTHING)
    def worker(self, message: Message) -> SafeString | None:
        if not message.leased_by:
            return None
        whole, name = plain(message.leased_by), short(message.leased_by, WORKER_LENGTH)
        return format_html('<span class="outbox-name" title="{}">{}</span>', whole, name)
