"""What the operator's commands share: which database, which messages, which form of output, which exit code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router

from outbox.management.arguments import as_parsed
from outbox.management.printing import Progress, to_json
from outbox.models import Message
from outbox.redaction import redacted
from outbox.texts import storable

THRESHOLD = 3  # an exit code
LARGEST_ID = 2**63 - 1


class OperatorCommand(BaseCommand):
    """A command that asks or changes one database. Subclasses define `add_options` and `run`.

    System checks are skipped: an operator must be able to look when the project's configuration is at fault.
    """

    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", metavar="ALIAS", choices=tuple(connections), help="Default: where the router sends messages."
        )
        parser.add_argument("--format", choices=("text", "json"), default="text", help="Default: text.")
        self.add_options(parser)

    def add_options(self, parser: CommandParser) -> None:
        """Add the command's own arguments."""

    def handle(self, *args: Any, **given: Any) -> None:
        options = as_parsed(self, given)
        self.using: str = options["database"] or router.db_for_write(Message)
        self.as_json: bool = options["format"] == "json"
        try:
            self.run(options)
        except Error as error:
            fact = redacted(str(error).strip(), "error")
            raise CommandError(f"Database {self.using!r} failed: {fact}. Does it run, and was it migrated?") from error

    def run(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def emit(self, data: object, lines: Iterable[str]) -> None:
        """Print one of the two forms: data as JSON for machines, or lines for people."""
        if self.as_json:
            self.stdout.write(to_json(data))
            return
        for line in lines:
            self.stdout.write(line)

    def paint(self, role: str, text: str) -> str:
        """Colour for a terminal: a role of Django's palette, SUCCESS, WARNING, ERROR, MIGRATE_HEADING."""
        painted: str = getattr(self.style, role)(text) if self.stdout.isatty() else text
        return painted

    def progress(self, label: str, total: int = 0) -> Progress:
        """A bar on stderr, if that is a terminal."""
        return Progress(self._draw if self.stderr.isatty() else None, label, total)

    def _draw(self, text: str) -> None:
        self.stderr.write(text, str, ending="")
        self.stderr.flush()

    # --- messages -----------------------------------------------------------------------------------------------------

    def messages(self, names: Iterable[str]) -> list[Message]:
        """The messages called by ids or event keys, by id. Raises CommandError, naming all that do not exist."""
        found: dict[int, Message] = {}
        missing = []
        for name in names:
            rows = self.named(name)
            found.update((row.pk, row) for row in rows)
            if not rows:
                missing.append(name)
        if missing:
            raise CommandError(
                f"No message in database {self.using!r} has the id or event key {', '.join(map(repr, missing))}. "
                "An event key that looks like a number is written key:123."
            )
        return [found[pk] for pk in sorted(found)]

    def named(self, name: str) -> list[Message]:
        """The messages of one id (digits) or event key; several handlers of a topic share a key."""
        rows = Message.objects.using(self.using).defer("payload", "headers").order_by("pk")
        if name.isascii() and name.isdigit():
            return list(rows.filter(pk=int(name))) if int(name) <= LARGEST_ID else []
        key = name.removeprefix("key:")
        return list(rows.filter(event_key=key)) if storable(key) == key else []
