"""Where a message stands in its lane, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from outbox import lanes
from outbox.admin.counting import Tally, capped_tally, clocked
from outbox.admin.places import Place, badge, place_of
from outbox.models import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """``before`` and ``behind``: unfinished messages of the lane. ``target``: the other one whose turn is now."""

    number: str
    before: Tally
    behind: Tally
    target: Message | None
    target_place: Place | None

    @property
    def sentence(self) -> str:
        """How many stand before and behind it."""
        if not self.before.rows:
            text = ngettext(
                "First of its lane; %(n)s message behind it.",
                "First of its lane; %(n)s messages behind it.",
                self.behind.rows,
            )
            return text % {"n": self.behind}
        told = {"before": self.before, "behind": self.behind}
        return _("%(before)s before it in its lane, %(behind)s behind it.") % told

    @property
    def target_badge(self) -> str:
        return badge(self.target_place) if self.target_place else ""


def standing(using: str, message: Message) -> Standing | None:
    """The place in the lane of a message that is in one; finished messages are in none."""
    if message.lane is None:
        return None
    head, holder = lanes.heads(using, [message.pk]).get(message.lane, (None, None))
    first = holder or head
    target = None
    if first is not None and first != message.pk:
        columns = ("event_key", "topic", "state", "due_at", "lease_token", "spent", "lane")
        target = clocked(Message.objects.using(using).only(*columns).filter(pk=first)).first()
    others = Message.objects.using(using).filter(lane=message.lane)
    return Standing(
        number=str(message.lane),
        before=capped_tally(others.filter(pk__lt=message.pk)),
        behind=capped_tally(others.filter(pk__gt=message.pk)),
        target=target,
        target_place=place_of(target, target.clock) if target else None,
    )
