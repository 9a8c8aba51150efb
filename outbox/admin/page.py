"""What the page of one message shows, collected in a fixed number of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import ExpressionWrapper, F, QuerySet, TextField
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from outbox.admin.counting import clocked
from outbox.admin.lane import standing
from outbox.admin.places import Place, place_of
from outbox.admin.shown import NO_TEXT, Cut, ago, cut, number, plain, pretty, size, stamp
from outbox.admin.timeline import Event, History, Redact
from outbox.admin.verbs import DEEDS, ORDER_IS_GIVEN_UP, REQUEUE, Deed, leaves_its_order
from outbox.explain import explain
from outbox.handlers import Handler, registry
from outbox.models import Attempt, Intervention, Message, State
from outbox.texts import span

ATTEMPTS = 25  # the latest ones, which a page shows unasked
ALL_ATTEMPTS = 1000
PAYLOAD_LENGTH = 10_000
HEADERS_LENGTH = 4_000
HEAVY = ("payload", "headers", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A JSON document as text; ``note`` says why there is none."""

    text: Cut = NO_TEXT
    size: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """A verb for this message; ``obstacle`` says why it cannot be pressed, ``warning`` what pressing it costs."""

    deed: Deed
    obstacle: str = ""
    warning: str = ""


def with_documents(rows: QuerySet[Any], *, allowed: bool) -> QuerySet[Any]:
    """Payload and headers as the text that was staged, and only for those who may see them."""
    names = ("payload", "headers") if allowed else ()
    texts = {f"{name}_text": ExpressionWrapper(F(name), output_field=TextField()) for name in names}
    return clocked(rows.defer(*HEAVY), **texts)


def document(message: Message, name: str, redact: Redact, limit: int | None) -> Document:
    """The payload or the headers of a message that was read `with_documents`."""
    raw: str | None = getattr(message, f"{name}_text")
    if raw is None:
        if message.payload_pruned:
            return Document(note=_("Pruned: delivered messages keep their payload for a limited time only."))
        return Document(note=_("None."))
    text = pretty(redact(name, raw))
    shown = Cut(text=text) if limit is None else cut(text, limit)
    return Document(text=shown, size=size(len(raw.encode("utf-8", "surrogatepass"))))


def buttons(message: Message, place: Place, rights: dict[str, bool]) -> list[Button]:
    """The three verbs, each with what stands in its way: a right, or the message's place."""
    found = []
    for deed in DEEDS.values():
        obstacle = deed.obstacle(message, place)
        if not rights[deed.right]:
            obstacle = _("%(verb)s needs a right that you do not have.") % {"verb": deed.label}
        warning = str(ORDER_IS_GIVEN_UP) if deed is REQUEUE and not obstacle and leaves_its_order(message) else ""
        found.append(Button(deed=deed, obstacle=obstacle, warning=warning))
    return found


def history(using: str, message: Message, redact: Redact, *, everything: bool) -> tuple[Sequence[Event], int]:
    """The events of a message, newest first, and how many older attempts are left out."""
    limit = ALL_ATTEMPTS if everything else ATTEMPTS
    rows = Attempt.objects.using(using).filter(message_id=message.pk)
    latest = list(rows.order_by("-number", "-id")[:limit])[::-1]
    total = len(latest) if len(latest) < limit else rows.count()
    record = History(
        message=message,
        place=place_of(message, message.clock),
        attempts=latest,
        interventions=list(
            Intervention.objects.using(using).filter(message_id=message.pk).order_by("id")[:ALL_ATTEMPTS]
        ),
        whole=total == len(latest),
        redact=redact,
    )
    return record.events(), total - len(latest)


def facts(message: Message, place: Place) -> list[tuple[str, str]]:
    """What is known of a message besides its story, as label and text."""
    handler = registry.by_route(message.route)
    now = message.clock
    found = [
        (_("Id"), str(message.pk)),
        (_("Topic"), message.topic),
        (_("Handler"), _handler_text(message, handler)),
        (_("Attempt"), str(message.attempt)),
        (_("Budget"), _budget_text(message, handler)),
        (_("Ordering key"), plain(message.ordering_key) if message.ordering_key is not None else ""),
        (_("Staged"), f"{stamp(message.staged_at)} ({ago(message.staged_at, now)})"),
        (_("Deliver at"), stamp(message.deliver_at) if message.deliver_at else ""),
        (_("Expires"), f"{stamp(message.expires_at)} ({ago(message.expires_at, now)})" if message.expires_at else ""),
        (_("Due"), f"{stamp(message.due_at)} ({ago(message.due_at, now)})" if message.due_at else ""),
        (_("Worker"), plain(message.leased_by)),
        (_("Leases that ran out in a row"), str(message.lapses) if message.lapses else ""),
    ]
    return [(label, text) for label, text in found if text]


def _handler_text(message: Message, handler: Handler | None) -> str:
    if handler is None:
        return _("%(route)s: nobody here takes it, so it waits") % {"route": message.route}
    function = handler.function
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return path if handler.name == message.topic else f"{handler.name} · {path}"


def _budget_text(message: Message, handler: Handler | None) -> str:
    if handler is None:
        return ngettext("%(spent)s attempt spent", "%(spent)s attempts spent", message.spent) % {"spent": message.spent}
    policy = handler.policy
    return _("%(spent)s of %(all)s attempts spent; waits of up to %(first)s, growing to %(cap)s") % {
        "spent": message.spent,
        "all": number(policy.max_attempts),
        "first": span(policy.bound(1)),
        "cap": span(policy.bound(policy.max_attempts)),
    }


def why(message: Message, place: Place) -> str:
    """Why a message is not moving; nothing for those that need not move any more."""
    finished = place in (Place.DELIVERED, Place.DISCARDED)
    return "" if finished or message.state not in (State.PENDING, State.DEAD) else plain(explain(message))


def _attempts_title(message: Message) -> str:
    count = message.attempt
    return ngettext("%(n)s attempt", "%(n)s attempts", count) % {"n": number(count)}


def context(using: str, message: Message, *, rights: dict[str, bool], redact: Redact, show: str) -> dict[str, Any]:
    """Everything the template wants."""
    place = place_of(message, message.clock)
    events, older = history(using, message, redact, everything=show == "attempts")
    lane = standing(using, message)
    limits = {"payload": PAYLOAD_LENGTH, "headers": HEADERS_LENGTH}
    documents = {}
    if rights["payload"]:
        documents = {
            name: document(message, name, redact, None if show == name else limit) for name, limit in limits.items()
        }
    return {
        "message": message,
        "key": plain(message.event_key),
        "place": place,
        "staged_ago": ago(message.staged_at, message.clock),
        "why": redact("error", why(message, place)),  # it names the last error
        "buttons": buttons(message, place, rights),
        "events": events,
        "older": number(older) if older else "",
        "attempts_title": _attempts_title(message),
        "lane": lane,
        "target_key": plain(lane.target.event_key) if lane and lane.target else "",
        "facts": facts(message, place),
        "payload": documents.get("payload"),
        "headers": documents.get("headers"),
    }
