"""``manage.py outbox_show``: everything about a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypeVar

from django.core.management.base import CommandParser
from django.db.models import ExpressionWrapper, F, Model, TextField

from outbox.database import server_now
from outbox.explain import explain
from outbox.fields import from_micros
from outbox.management.operator import OperatorCommand
from outbox.management.printing import facts
from outbox.models import Attempt, Intervention, Message
from outbox.redaction import redacted
from outbox.texts import moment, one_line, printable

IDENTITY = ("id", "event_key", "position", "topic", "handler", "payload_version", "ordering_key")
PROGRESS = (
    *("state", "reason", "staged_at", "deliver_at", "expires_at", "due_at", "settled_at"),
    *("attempt", "spent", "lapses", "lane", "leased_by", "leased_at"),
)
DOCUMENTS = ("payload", "headers")
LAST_ERROR = ("error_type", "error_code", "error_text")
TEXTS = {"error_text": "error", "traceback": "traceback"}
OF_ATTEMPT = ("number", "outcome", "worker", "started_at", "ended_at", *LAST_ERROR, "traceback")
OF_INTERVENTION = ("at", "verb", "actor", "note")

Row = TypeVar("Row", Attempt, Intervention)


class Command(OperatorCommand):
    help = "Show all of a message: payload with exact digits, headers, attempts with tracebacks, what people did to it."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("messages", nargs="+", metavar="ID|KEY", help="Ids or event keys.")

    def run(self, options: dict[str, Any]) -> None:
        ids = [row.pk for row in self.messages(options["messages"])]
        rows = list(_as_stored(Message.objects.using(self.using)).filter(pk__in=ids).order_by("pk"))
        self.emit([_as_data(row) for row in rows], (line for row in rows for line in self._lines(row)))

    def _lines(self, row: Message) -> Iterator[str]:
        now = from_micros(server_now(self.using))
        yield self.paint("MIGRATE_HEADING", f"{one_line(row.topic)} {one_line(row.event_key)}")
        yield printable(_why(row))
        yield ""
        yield from facts((name.replace("_", " "), _shown(getattr(row, name), now)) for name in IDENTITY + PROGRESS)
        yield from facts((name.replace("_", " "), _value(row, name)) for name in LAST_ERROR)
        for name in DOCUMENTS:
            yield from ("", self.paint("MIGRATE_LABEL", name), "pruned" if row.payload_pruned else _pretty(row, name))
        for attempt in _of(row, Attempt):
            yield from ("", self.paint("MIGRATE_LABEL", f"attempt {attempt.number}: {attempt.get_outcome_display()}"))
            yield from facts((name.replace("_", " "), _shown(_value(attempt, name), now)) for name in OF_ATTEMPT[2:])
        for act in _of(row, Intervention):
            note = f": {one_line(act.note)}" if act.note else ""
            who = one_line(act.actor) or "somebody"
            yield from ("", f"{moment(act.at, now)} {act.get_verb_display()} by {who}{note}")
        yield ""


def _why(row: Message) -> str:
    return redacted(str(explain(row)), "error", topic=row.topic)  # it names the last error


def _shown(value: object, now: datetime) -> object:
    return moment(value, now) if isinstance(value, datetime) else value


def _as_stored(rows: Any) -> Any:
    """Read the documents as the text that was staged: one that is no JSON, written by hand, shall be seen, too."""
    texts = {f"{name}_text": ExpressionWrapper(F(name), output_field=TextField()) for name in DOCUMENTS}
    return rows.defer(*DOCUMENTS).annotate(**texts)


def _document(row: Message, name: str) -> Any:
    text = getattr(row, f"{name}_text")
    if text is None:
        return None
    text = redacted(text, name, topic=row.topic)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pretty(row: Message, name: str) -> str:
    return printable(json.dumps(_document(row, name), indent=2, ensure_ascii=False))


def _as_data(row: Message) -> dict[str, Any]:
    attempts, interventions = _of(row, Attempt), _of(row, Intervention)
    return {
        **_values(row, IDENTITY + PROGRESS + LAST_ERROR),
        "payload_pruned": row.payload_pruned,
        "payload": _document(row, "payload"),
        "headers": _document(row, "headers") or {},
        "explanation": _why(row),
        "attempts": [_values(each, OF_ATTEMPT) for each in attempts],
        "interventions": [_values(each, OF_INTERVENTION) for each in interventions],
    }


def _of(row: Message, model: type[Row]) -> list[Row]:
    """What belongs to the message, from its own database; the related manager would ask the router for a replica."""
    return list(model._default_manager.using(row._state.db).filter(message=row))


def _values(row: Model, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _value(row, name) for name in names}


def _value(row: Model, name: str) -> Any:
    """Errors were redacted before they were stored, but perhaps by rules that were less strict than today's."""
    value = getattr(row, name)
    return redacted(value, TEXTS[name]) if name in TEXTS else value
