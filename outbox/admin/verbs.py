"""The three verbs of `operations` in words: what each is for, what follows from it, and who may."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from outbox import operations
from outbox.admin.places import Place
from outbox.handlers import registry
from outbox.models import Message, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One verb. ``right`` names the method ``has_…_permission`` of the admin; ``places`` are those it changes."""

    verb: Verb
    right: str
    run: Callable[..., operations.Done]
    places: Collection[Place]
    label: Any
    only: Any
    consequence: Any
    question: Any
    did: Any
    log: Any

    def obstacle(self, message: Message, place: Place) -> str:
        """Why the verb would leave this message alone, or nothing. `operations` decides again, under the lock."""
        if place not in self.places:
            return str(self.only) % {"place": place.label}
        if self.verb == Verb.REQUEUE and message.payload_pruned:
            return str(_("Its payload has been pruned: there is nothing left to deliver."))
        return ""


REQUEUE = Deed(
    verb=Verb.REQUEUE,
    right="requeue",
    run=operations.requeue,
    places={Place.DEAD, Place.DISCARDED},
    label=_("Requeue"),
    only=_("Requeue is for dead and discarded messages; this one is %(place)s."),
    consequence=_("Each gets a fresh budget and is due at once. Attempts and errors so far stay on record."),
    question=ngettext_lazy("Requeue %(count)s message?", "Requeue %(count)s messages?", "rows"),
    did=ngettext_lazy("%(count)s message requeued.", "%(count)s messages requeued.", "rows"),
    log=_("Requeued."),
)
DISCARD = Deed(
    verb=Verb.DISCARD,
    right="discard",
    run=operations.discard,
    places={Place.DUE, Place.SCHEDULED, Place.RETRYING, Place.WAITING, Place.DEAD},
    label=_("Discard"),
    only=_("Discard is for messages that are neither finished nor in flight; this one is %(place)s."),
    consequence=_(
        "They are never delivered; the next message of each lane goes on. The rows stay and can be requeued."
    ),
    question=ngettext_lazy("Discard %(count)s message?", "Discard %(count)s messages?", "rows"),
    did=ngettext_lazy("%(count)s message discarded.", "%(count)s messages discarded.", "rows"),
    log=_("Discarded."),
)
MAKE_DUE = Deed(
    verb=Verb.MAKE_DUE,
    right="requeue",
    run=operations.make_due,
    places={Place.SCHEDULED, Place.RETRYING},
    label=_("Make due now"),
    only=_("Make due now ends the wait of scheduled and retrying messages; this one is %(place)s."),
    consequence=_("They skip the rest of their wait and may be taken at once. Their budget stays as it is."),
    question=ngettext_lazy("Make %(count)s message due now?", "Make %(count)s messages due now?", "rows"),
    did=ngettext_lazy("%(count)s message made due.", "%(count)s messages made due.", "rows"),
    log=_("Made due."),
)
DEEDS = {str(each.verb): each for each in (MAKE_DUE, REQUEUE, DISCARD)}


def leaves_its_order(message: Message) -> bool:
    """Whether a requeue of this message gives up a place in a lane that may have gone on without it."""
    if message.lane is not None:
        return False  # it blocks its lane: nothing overtook it
    handler = registry.by_route(message.route)
    return handler is not None and handler.lane(message.ordering_key) is not None


ORDER_IS_GIVEN_UP = _(
    "Its lane may have gone on without it: a requeue gives up the order, and later messages may already be delivered."
)
