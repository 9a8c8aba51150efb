"""Where a message is, as a person sees it: the five live places and the three ends; counted and recognised here."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Count, Q, QuerySet, TextChoices
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from outbox.admin.counting import Tally, capped_tally
from outbox.database import ServerNow
from outbox.models import Message, State


class Place(TextChoices):
    """Named as the methods of `MessageQuerySet`, which select the rows."""

    DUE = "due", pgettext_lazy("messages", "due")
    SCHEDULED = "scheduled", pgettext_lazy("messages", "scheduled")
    RETRYING = "retrying", pgettext_lazy("messages", "retrying")
    IN_FLIGHT = "in_flight", pgettext_lazy("messages", "in flight")
    WAITING = "waiting", pgettext_lazy("messages", "waiting")
    DEAD = "dead", pgettext_lazy("messages", "dead")
    DELIVERED = "delivered", pgettext_lazy("messages", "delivered")
    DISCARDED = "discarded", pgettext_lazy("messages", "discarded")


MEANING = {
    Place.DUE: _("A dispatcher may take it now"),
    Place.SCHEDULED: _("Not due before its delivery time, or put off by its handler"),
    Place.RETRYING: _("Failed, and waiting for the end of its backoff"),
    Place.IN_FLIGHT: _("A dispatcher holds it"),
    Place.WAITING: _("Parked behind an earlier message of its lane"),
    Place.DEAD: _("No more automatic attempts; kept until somebody acts"),
    Place.DELIVERED: _("Its handler succeeded"),
    Place.DISCARDED: _("Will never be delivered"),
}
ENDS = {State.DEAD: Place.DEAD, State.DELIVERED: Place.DELIVERED, State.DISCARDED: Place.DISCARDED}
_FUTURE = Q(due_at__gt=ServerNow())
# One pass over the pending rows counts all five; the tests hold this against the querysets' own words.
_LIVE = {
    Place.DUE: Q(due_at__lte=ServerNow()),
    Place.SCHEDULED: _FUTURE & Q(lease_token=None, spent=0),
    Place.RETRYING: _FUTURE & Q(lease_token=None, spent__gt=0),
    Place.IN_FLIGHT: _FUTURE & Q(lease_token__isnull=False),
    Place.WAITING: Q(due_at=None),
}


def place_of(message: Message, now: datetime) -> Place:
    """The place of a row by the database's clock, as its queryset would find it."""
    if message.state != State.PENDING:
        return ENDS[State(message.state)]
    if message.due_at is None:
        return Place.WAITING
    if message.due_at <= now:
        return Place.DUE
    if message.lease_token is not None:
        return Place.IN_FLIGHT
    return Place.RETRYING if message.spent else Place.SCHEDULED


def rows_at(place: Place | None, rows: QuerySet[Message]) -> QuerySet[Message]:
    """The rows of one place, or all of them."""
    if place is None:
        return rows
    found: QuerySet[Message] = getattr(rows, place.value)()
    return found


def tallies(rows: QuerySet[Message]) -> dict[Place | None, Tally]:
    """How many rows are at each place, and in all (None). Live places are exact, finished ones stop at ``CAP``."""
    live = {place.value: Count("pk", filter=condition) for place, condition in _LIVE.items()}
    found = rows.order_by().filter(state=State.PENDING).aggregate(**live)
    counted = {place: Tally(rows=found[place.value]) for place in _LIVE}
    for state, place in ENDS.items():
        counted[place] = capped_tally(rows.filter(state=state))
    total = sum(each.rows for each in counted.values())
    capped = any(each.capped for each in counted.values())
    everything: dict[Place | None, Tally] = {None: Tally(rows=total, capped=capped)}
    return everything | counted


def badge(place: Place) -> SafeString:
    """A coloured word; its title says what the word means."""
    template = '<span class="outbox-badge outbox-badge-{}" title="{}">{}</span>'
    return format_html(template, place.value, MEANING[place], place.label)
