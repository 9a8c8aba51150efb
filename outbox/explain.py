"""Why a message is not moving: the one reason, as one sentence that names the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from django.db import router

from outbox.conf import options
from outbox.database import with_clock
from outbox.handlers import Handler, registry
from outbox.lanes import heads
from outbox.models import Intervention, Message, Reason, State, Verb
from outbox.overview import live_dispatchers, open_breakers, serves
from outbox.texts import moment, one_line, span


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One reason. ``code`` is stable, for machines; ``fact`` follows "message 12" or "which"; ``way_out`` may be empty.

    ``behind`` is the id of the message that this one waits for.
    """

    message_id: int
    code: str
    fact: str
    way_out: str = ""
    behind: int | None = None

    def __str__(self) -> str:
        return f"Message {self.message_id} {self.fact}{'; ' if self.way_out else ''}{self.way_out}."


def explain(message: Message) -> str:
    """One sentence: why this message is not moving, by what the database says now."""
    return str(diagnose(message))


def diagnose(message: Message) -> Diagnosis:
    """The one reason why this message is not moving, by what the database says now."""
    using = message._state.db or router.db_for_write(Message)
    row = _read(using, message.pk)
    if row is None:
        return Diagnosis(message_id=message.pk, code="gone", fact="does not exist any more: it was pruned or deleted")
    return _Case(using, row).diagnose()


def _read(using: str, pk: int) -> Message | None:
    found: Message | None = with_clock(Message.objects.using(using).filter(pk=pk)).defer("payload", "headers").first()
    return found


class _Case:
    """One message under examination. Each ``_look`` finds its reason or nothing; the first that finds one is right."""

    def __init__(self, using: str, row: Message) -> None:
        self.using = using
        self.row = row
        self.handler: Handler | None = registry.by_route(row.route)
        self.dispatchers = live_dispatchers(using) if row.state == State.PENDING else []

    def diagnose(self, *, in_lane: bool = True) -> Diagnosis:
        looks: list[Callable[[], Diagnosis | None]] = [self._settled, self._in_flight, self._unroutable]
        looks += [self._behind] if in_lane else []
        looks += [self._asleep, self._later, self._ends_at_its_claim, self._unattended, self._paused, self._lapsed]
        for look in looks:
            found = look()
            if found is not None:
                return found
        return self._say("due", f"is due since {self._at(self.row.due_at)} and about to be claimed")

    def _say(self, code: str, fact: str, way_out: str = "") -> Diagnosis:
        return Diagnosis(message_id=self.row.pk, code=code, fact=fact, way_out=way_out)

    def _at(self, instant: datetime | None) -> str:
        return "an unknown time" if instant is None else moment(instant, self.row.clock)

    def _error(self) -> str:
        row = self.row
        if not (row.error_type or row.error_text or row.error_code):
            return "an error that was not recorded"
        name = one_line(row.error_type, 100) + (f" [{one_line(row.error_code, 100)}]" if row.error_code else "")
        text = one_line(row.error_text, 160).rstrip(".")
        return f"{name}: {text}" if name and text else name or text

    def _spent(self) -> str:
        budget = f" of {self.handler.max_attempts}" if self.handler else ""
        return f"{self.row.spent}{budget} attempts"

    def _verb(self, verb: str) -> str:
        return self._command(f"outbox_{verb} {self.row.pk}")

    def _command(self, command: str) -> str:
        database = "" if self.using == router.db_for_write(Message) else f" --database {self.using}"
        return f"manage.py {command}{database}"

    # --- settled ------------------------------------------------------------------------------------------------------

    def _settled(self) -> Diagnosis | None:
        row = self.row
        if row.state == State.DELIVERED:
            return self._say("delivered", f"was delivered {self._at(row.settled_at)} by attempt {row.attempt}")
        if row.state == State.DEAD:
            blocks = " and blocks its lane" if row.lane is not None else ""
            fact = f"is dead since {self._at(row.settled_at)}{blocks}, because {self._cause_of_death()}"
            return self._say("dead", fact, f"once the cause is mended: {self._verb('requeue')}")
        if row.state == State.DISCARDED:
            return self._say(
                "discarded", f"was discarded {self._at(row.settled_at)}, because {self._cause_of_discard()}"
            )
        return None

    def _cause_of_death(self) -> str:
        causes = {
            Reason.EXHAUSTED: f"{self._spent()} failed, the last with {self._error()}",
            Reason.CRASHED: f"its worker died or hung in each of {self._spent()}",
            Reason.BURIED: f"its handler gave up on it with {self._error()}",
        }
        return causes.get(Reason(self.row.reason), f"of {self._error()}")

    def _cause_of_discard(self) -> str:
        if self.row.reason == Reason.OPERATOR:
            acts = Intervention.objects.using(self.using).filter(message_id=self.row.pk, verb=Verb.DISCARD)
            act = acts.last()
            who = one_line(act.actor, 100) if act and act.actor else "somebody"
            return f"{who} decided so" + (f" ({one_line(act.note)})" if act and act.note else "")
        if self.row.reason == Reason.EXPIRED:
            return f"it expired {self._at(self.row.expires_at)} before it could be delivered"
        return f"its handler decided so: {one_line(self.row.error_text) or 'no reason given'}"

    # --- pending ------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> Diagnosis | None:
        row = self.row
        if row.lease_token is None or row.due_at is None or row.due_at <= row.clock:
            return None
        worker = one_line(row.leased_by) or "an unnamed worker"
        return self._say(
            "in_flight",
            f"is in flight: attempt {row.attempt} with {worker}, whose lease runs until {self._at(row.due_at)}",
        )

    def _unroutable(self) -> Diagnosis | None:
        row, known = self.row, registry.by_name(self.row.handler)
        if self.handler is not None:
            return None
        if known is not None:
            versions = ", ".join(map(str, known.payload_versions))
            return self._say(
                "unroutable",
                f"has payload version {row.payload_version}, but handler {known.name!r} takes only {versions}",
                "deploy code whose handler names that version in payload_versions",
            )
        if any(serves(each, row) for each in self.dispatchers):
            return None  # the code of that dispatcher is ahead of the code here
        return self._say(
            "unroutable",
            f"has no handler: the code installed here registers none named {row.handler!r}",
            "deploy an outbox_handlers module with such a handler, or with one that names it in aliases",
        )

    def _behind(self) -> Diagnosis | None:
        """Waiting for, or about to be parked behind, another row of its lane: then that row's reason is the reason."""
        if self.row.lane is None:
            return None
        head, holder = heads(self.using, [self.row.pk]).get(self.row.lane, (None, None))
        first = holder or head
        other = None if first in (None, self.row.pk) else _read(self.using, first)
        if other is None:
            return None
        reason = _Case(self.using, other).diagnose(in_lane=False)
        return Diagnosis(
            message_id=self.row.pk,
            code="waiting",
            fact=f"waits in its lane behind message {other.pk}, which {reason.fact}",
            way_out=reason.way_out,
            behind=other.pk,
        )

    def _asleep(self) -> Diagnosis | None:
        if self.row.due_at is not None:
            return None
        if self.row.lane is None:
            return self._say("stranded", "is never due and in no lane", "its row was changed by hand: set its due_at")
        return self._say(
            "stranded",
            "sleeps at the head of its lane, where nobody is left to wake it",
            f"a dispatcher's sweep wakes it within {span(options().SWEEP_EVERY)}",
        )

    def _later(self) -> Diagnosis | None:
        row = self.row
        if row.due_at is None or row.due_at <= row.clock:
            return None
        if row.spent:
            fact = f"is retrying: the next attempt is due {self._at(row.due_at)}, after {self._spent()} failed"
            return self._say(
                "retrying", f"{fact}, the last with {self._error()}", "make it due now in the admin to skip the wait"
            )
        how = "snoozed" if row.attempt else "scheduled"
        return self._say("scheduled", f"is {how} until {self._at(row.due_at)}")

    def _ends_at_its_claim(self) -> Diagnosis | None:
        row, handler = self.row, self.handler
        if not self.dispatchers:
            return None
        if row.expires_at is not None and row.expires_at <= row.clock:
            return self._say("expired", f"expired {self._at(row.expires_at)} and will be discarded when it is claimed")
        if handler is not None and row.spent >= handler.max_attempts:
            return self._say("exhausted", f"has spent its budget ({self._spent()}) and dies when it is claimed")
        return None

    def _unattended(self) -> Diagnosis | None:
        at_work = [each for each in self.dispatchers if not each.stopping]
        due = f"is due since {self._at(self.row.due_at)}"
        if not at_work:
            start = f"start one: manage.py outbox_dispatch --database {self.using}"
            return self._say(
                "no_dispatcher", f"{due}, but no live dispatcher reports on database {self.using!r}", start
            )
        if not any(serves(each, self.row) for each in at_work):
            names = one_line(", ".join(each.name for each in at_work))
            return self._say(
                "no_dispatcher_for_handler",
                f"{due}, but none of the live dispatchers ({names}) runs handler {self.row.handler!r}",
                "restart them with the present code, or start one that does not exclude it",
            )
        return None

    def _paused(self) -> Diagnosis | None:
        name = self.handler.name if self.handler else self.row.handler
        for breaker in open_breakers(self.using):
            if breaker.handler == name:
                cause = one_line(f"{breaker.error_type}: {breaker.error_text}", 160).rstrip(".")
                return self._say(
                    "paused",
                    f"is due since {self._at(self.row.due_at)}, but its handler pauses since "
                    f"{self._at(breaker.opened_at)}, because the other side is down ({cause})",
                    "it goes on by itself once a probe is answered; if you know better: "
                    + self._command(f"outbox_reset {name}"),
                )
        return None

    def _lapsed(self) -> Diagnosis | None:
        row = self.row
        if row.lapses >= 2:
            return self._say(
                "alone",
                f"runs alone, because its lease ran out {row.lapses} times in a row: it may kill its worker",
                "it is claimed as soon as a dispatcher holds nothing else",
            )
        if row.lease_token is not None:
            worker = one_line(row.leased_by) or "its worker"
            return self._say(
                "lapsed",
                f"was in flight with {worker} until its lease ran out {self._at(row.due_at)}; it will be claimed again",
            )
        return None
