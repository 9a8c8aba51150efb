"""The filters above the list of messages. Their choices come from the registry: asking the table would read it all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.admin import SimpleListFilter
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from outbox.database import ServerNow
from outbox.handlers import NAME, registry
from outbox.models import Message, Outcome


class _NameFilter(SimpleListFilter):
    """Rows with one name. A name in the address that nobody here declares is a choice, too: old rows may carry it."""

    def names(self) -> list[str]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        names = self.names()
        given = request.GET.get(self.parameter_name or "")
        if given and given not in names and NAME.match(given):
            names.append(given)
        return [(name, name) for name in names]

    def condition(self, name: str) -> Q:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        name = self.value()
        if not name:
            return queryset
        return queryset.filter(self.condition(name)) if NAME.match(name) else queryset.none()


class TopicFilter(_NameFilter):
    title = _("topic")
    parameter_name = "topic"

    def names(self) -> list[str]:
        return list(registry.topics())

    def condition(self, name: str) -> Q:
        return Q(topic=name)


class HandlerFilter(_NameFilter):
    title = _("handler")
    parameter_name = "handler"

    def names(self) -> list[str]:
        """Nothing to choose where every topic has just its own handler."""
        names = sorted(each.name for each in registry.handlers())
        return [] if names == list(registry.topics()) else names

    def condition(self, name: str) -> Q:
        """Over the index that begins with the route: the name, for a version over 1 followed by that."""
        return Q(route=name) | Q(route__begins=f"{name}@")


class RoutableFilter(SimpleListFilter):
    """Pending messages that nobody here delivers: a deployment that came halfway, or a handler that was removed."""

    title = _("deliverable here")
    parameter_name = "unroutable"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        return [("1", _("No: no handler takes them"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        if self.value() != "1":
            return queryset
        found: QuerySet[Message] = queryset.unroutable()  # type: ignore[attr-defined]
        return found


class SinceFilter(SimpleListFilter):
    title = _("staged")
    parameter_name = "since"
    spans = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7), "30d": timedelta(days=30)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        texts = [_("in the last hour"), _("in the last 24 hours"), _("in the last 7 days"), _("in the last 30 days")]
        return list(zip(self.spans, texts, strict=True))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        span = self.spans.get(self.value() or "")
        if span is None:
            return queryset
        return queryset.filter(staged_at__gte=ServerNow() - int(span.total_seconds() * 1_000_000))


class OutcomeFilter(SimpleListFilter):
    title = _("outcome")
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        return list(Outcome.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(outcome=self.value()) if self.value() in Outcome.values else queryset
