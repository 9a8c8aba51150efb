"""The life of one message as a list, newest first: what it does now, every attempt, what people did, its staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from outbox.admin.places import Place
from outbox.admin.shown import NO_TEXT, Cut, ago, cut, duration, lateness, plain, stamp
from outbox.models import Attempt, Intervention, Message, Outcome, Reason, State, Verb
from outbox.texts import span

ERROR_LENGTH = 500  # characters of an error text, and of a traceback, that a page shows
TRACEBACK_LENGTH = 6000
TONES = {
    Outcome.DELIVERED: "good",
    Outcome.BURIED: "bad",
    Outcome.DISCARDED: "calm",
    Outcome.RELEASED: "calm",
    Outcome.INTERRUPTED: "calm",
    Outcome.SNOOZED: "calm",
}
Redact = Callable[[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry. ``tone`` colours it: good, bad, warn, calm or now. ``facts`` stand behind the title, in order."""

    title: str
    tone: str
    at: datetime
    when: str
    facts: Sequence[str] = ()
    error_type: str = ""
    error: Cut = NO_TEXT
    traceback: Cut = NO_TEXT
    note: str = ""
    attempt_id: int | None = None  # of the row that holds the whole texts
    unfolded: bool = False

    @property
    def stamp(self) -> str:
        return stamp(self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known of a message; attempts and interventions oldest first. ``whole``: no attempt is missing."""

    message: Message
    place: Place
    attempts: Sequence[Attempt]
    interventions: Sequence[Intervention]
    whole: bool
    redact: Redact

    @property
    def now(self) -> datetime:
        return self.message.clock

    def events(self) -> list[Event]:
        """All entries, newest first."""
        since = None if self.whole else self.attempts[0].ended_at
        found = [*self._attempts(), *(_deed(each, self.now) for each in self.interventions)]
        known = [event for event in found if since is None or event.at >= since]
        known.sort(key=lambda event: event.at, reverse=True)
        return [*self._present(), *known, *([self._staged()] if self.whole else [])]

    def _staged(self) -> Event:
        message, facts = self.message, []
        if message.deliver_at is not None:
            facts.append(_("for delivery at %(time)s") % {"time": stamp(message.deliver_at)})
        if message.expires_at is not None:
            facts.append(_("expires at %(time)s") % {"time": stamp(message.expires_at)})
        when = ago(message.staged_at, self.now)
        return Event(title=_("staged"), tone="calm", at=message.staged_at, when=when, facts=facts)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _attempts(self) -> list[Event]:
        found: list[Event] = []
        later: Attempt | None = None
        told: Attempt | None = None  # the attempt in which the present error is written out
        for attempt in reversed(self.attempts):
            same = told is not None and attempt.error_type != "" and _error(attempt) == _error(told)
            found.append(self._attempt(attempt, later, told if same else None, unfolded=later is None))
            told = told if same else attempt
            later = attempt
        return found

    def _attempt(self, attempt: Attempt, later: Attempt | None, same: Attempt | None, *, unfolded: bool) -> Event:
        died = self._died(attempt, later)
        facts = []
        if attempt.started_at is not None:
            facts.append(duration((attempt.ended_at - attempt.started_at).total_seconds()))
        if attempt.worker:
            facts.append(plain(attempt.worker))
        if same is not None:
            facts.append(_("same error as #%(number)s") % {"number": same.number})
        title = f"#{attempt.number} {Outcome(attempt.outcome).label}"
        fate = _("dead") if died and attempt.outcome != Outcome.BURIED else self._next(attempt, later)
        return Event(
            title=f"{title} → {fate}" if fate else title,
            tone="bad" if died else TONES.get(Outcome(attempt.outcome), "warn"),
            at=attempt.ended_at,
            when=ago(attempt.ended_at, self.now),
            facts=facts,
            error_type=plain(attempt.error_type) if same is None else "",
            error=NO_TEXT if same else cut(plain(self.redact("error", attempt.error_text)), ERROR_LENGTH),
            traceback=NO_TEXT if same else cut(plain(self.redact("traceback", attempt.traceback)), TRACEBACK_LENGTH),
            attempt_id=attempt.pk,
            unfolded=unfolded and died,
        )

    def _died(self, attempt: Attempt, later: Attempt | None) -> bool:
        """Whether the message was dead after this attempt: it is so still, or only a requeue let it go on."""
        if attempt.outcome in (Outcome.DELIVERED, Outcome.DISCARDED):
            return False
        if later is None and self.place == Place.DEAD:
            return True
        until = later.ended_at if later else self.now
        return any(each.verb == Verb.REQUEUE and attempt.ended_at <= each.at <= until for each in self.interventions)

    def _next(self, attempt: Attempt, later: Attempt | None) -> str:
        """What the message did after an attempt that did not end it."""
        if attempt.outcome in (Outcome.DELIVERED, Outcome.DISCARDED, Outcome.BURIED):
            return ""
        if later is not None:
            pause = ((later.started_at or later.ended_at) - attempt.ended_at).total_seconds()
            return _("again after %(span)s") % {"span": span(max(pause, 0))}
        if self.place in (Place.RETRYING, Place.SCHEDULED) and self.message.due_at is not None:
            return _("again %(when)s") % {"when": ago(self.message.due_at, self.now)}
        return ""

    # --- the present --------------------------------------------------------------------------------------------------

    def _present(self) -> list[Event]:
        """What it does now, or how it ended where no attempt and no person is on record for that."""
        message, now = self.message, self.now
        if message.state != State.PENDING:
            ended = message.settled_at or now
            return [] if self._end_is_told() else [self._end(ended)]
        due_at = message.due_at or now
        if self.place == Place.IN_FLIGHT:
            facts = [plain(message.leased_by), _("its lease ends %(when)s") % {"when": ago(due_at, now)}]
            since = message.leased_at or now
            title = _("#%(number)s in flight") % {"number": message.attempt}
            when = _("for %(span)s") % {"span": span(max((now - since).total_seconds(), 0))}
            return [Event(title=title, tone="now", at=since, when=when, facts=facts)]
        when = "" if self.place == Place.WAITING else lateness(due_at, now)
        return [Event(title=str(self.place.label), tone="now", at=due_at, when=when)]

    def _end_is_told(self) -> bool:
        if self.message.state == State.DISCARDED and self.message.reason == Reason.OPERATOR:
            return any(each.verb == Verb.DISCARD for each in self.interventions)
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.number != self.message.attempt:
            return False
        return self.message.state == State.DEAD or last.outcome in (Outcome.DELIVERED, Outcome.DISCARDED)

    def _end(self, ended: datetime) -> Event:
        message = self.message
        facts = [str(Reason(message.reason).label)] if message.reason else []
        if message.leased_by:
            facts.append(plain(message.leased_by))
        title = str(self.place.label)
        if self.place == Place.DELIVERED:
            title = f"#{message.attempt} {title}"
        tone = {Place.DELIVERED: "good", Place.DEAD: "bad"}.get(self.place, "calm")
        return Event(title=title, tone=tone, at=ended, when=ago(ended, self.now), facts=facts)


def _deed(each: Intervention, now: datetime) -> Event:
    verb = {
        Verb.REQUEUE: _("requeued"),
        Verb.DISCARD: _("discarded"),
        Verb.MAKE_DUE: _("made due"),
    }[Verb(each.verb)]
    actor = plain(each.actor) or _("somebody")
    title = _("%(verb)s by %(actor)s") % {"verb": verb, "actor": actor}
    return Event(title=title, tone="calm", at=each.at, when=ago(each.at, now), note=plain(each.note))


def _error(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.error_type, attempt.error_code, attempt.error_text
