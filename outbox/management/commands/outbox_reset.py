"""``manage.py outbox_reset``: close the breakers of handlers whose other side is back."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.breakers import reset
from outbox.management.arguments import USAGE
from outbox.management.operator import OperatorCommand
from outbox.overview import open_breakers


class Command(OperatorCommand):
    help = (
        "Close the breakers of handlers that pause because their other side was down, without waiting for a probe. "
        "Dispatchers go on within seconds; if the other side is still down they pause again."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("handlers", nargs="*", metavar="HANDLER", help="Names of handlers.")
        parser.add_argument("--all", action="store_true", help="All breakers that are open.")

    def run(self, options: dict[str, Any]) -> None:
        names: list[str] = options["handlers"]
        if bool(names) == options["all"]:
            raise CommandError("Say which: either names of handlers, or --all.", returncode=USAGE)
        opened = [each.handler for each in open_breakers(self.using)]
        closed = [name for name in (opened if options["all"] else dict.fromkeys(names)) if reset(self.using, name)]
        not_open = [name for name in names if name not in closed]
        lines = [self.paint("SUCCESS", f"Closed: {', '.join(closed)}.")] if closed else []
        lines += [f"Not open: {', '.join(not_open)}."] if not_open else []
        self.emit({"closed": closed, "not_open": not_open}, lines or ["No breaker is open."])
