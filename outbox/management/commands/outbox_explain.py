"""``manage.py outbox_explain``: the one reason why a message is not moving."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.explain import diagnose
from outbox.management.operator import OperatorCommand


class Command(OperatorCommand):
    help = "Say in one sentence why a message is not moving, and what moves it."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("messages", nargs="+", metavar="ID|KEY", help="Ids or event keys.")

    def run(self, options: dict[str, Any]) -> None:
        rows = self.messages(options["messages"])
        found = [diagnose(row) for row in rows]
        data = [
            {
                "id": row.pk,
                "event_key": row.event_key,
                "handler": row.handler,
                "code": each.code,
                "behind": each.behind,
                "text": str(each),
            }
            for row, each in zip(rows, found, strict=True)
        ]
        self.emit(data, map(str, found))
