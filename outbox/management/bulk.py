"""Requeue and discard from the command line: select, show, ask, act in batches, report exactly."""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser

from outbox.database import server_now
from outbox.fields import from_micros
from outbox.management.arguments import USAGE, since
from outbox.management.operator import OperatorCommand
from outbox.management.printing import number, table
from outbox.models import Message, MessageQuerySet, Reason, State
from outbox.operations import BATCH, Done
from outbox.texts import one_line

NAMED = 20  # skipped messages that are named one by one


class BulkCommand(OperatorCommand):
    """A verb applied to chosen messages."""

    verb: ClassVar[str]  # as an order: "requeue"
    past: ClassVar[str]  # as a report: "requeued"
    states: ClassVar[tuple[State, ...]]  # that may be selected; the first is the default
    operate: ClassVar[Callable[..., Done]]

    def add_options(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add(
            "messages", nargs="*", metavar="ID|KEY", help="Ids or event keys (key:123 for a key that looks like an id)."
        )
        add("--all", action="store_true", help=f"All {self.states[0].value} messages, or all in the --state.")
        add("--state", choices=[state.value for state in self.states], help=f"Default: {self.states[0].value}.")
        add("--topic", metavar="GLOB", help="Those of matching topics, as in 'billing.*'.")
        add("--handler", metavar="NAME", help="Those of one handler.")
        add("--error-type", metavar="GLOB", help="Those whose last error is of this type, as in '*.ConnectionError'.")
        add("--error-code", metavar="CODE", help="Those whose last error has this code.")
        add(
            "--reason",
            choices=[reason.value for reason in Reason if reason.value],
            help="Those settled for this reason.",
        )
        add("--since", type=since, metavar="TIME", help="Those settled since then: 2h, 30d, 2026-07-01T12:00.")
        add("--until", type=since, metavar="TIME", help="Those settled before then.")
        add("--note", default="", help="Why; kept with each message's history.")
        add("--dry-run", action="store_true", help="Show what matches and change nothing.")
        add("--no-input", action="store_true", help="Do not ask.")

    def run(self, options: dict[str, Any]) -> None:
        chosen = self._chosen(options)
        if options["dry_run"]:
            self._show(chosen)
            return
        if chosen and not options["no_input"]:
            self._confirm(chosen)
        self._report(self._act(list(chosen), options["note"]))

    # --- which --------------------------------------------------------------------------------------------------------

    def _chosen(self, options: dict[str, Any]) -> dict[int, str]:
        """Topic by id of each chosen message."""
        filters = ("all", "state", "topic", "handler", "error_type", "error_code", "reason", "since", "until")
        filtered = any(options[name] for name in filters)
        if bool(options["messages"]) == filtered:
            raise CommandError(
                f"Say which messages to {self.verb}: either ids and event keys, or a filter such as --topic, or --all.",
                returncode=USAGE,
            )
        if options["messages"]:
            return {row.pk: row.topic for row in self.messages(options["messages"])}
        rows = self._filtered(options).values_list("pk", "topic", "error_type")
        return {
            pk: topic
            for pk, topic, error_type in rows
            if fnmatchcase(topic, options["topic"] or "*") and fnmatchcase(error_type, options["error_type"] or "*")
        }

    def _filtered(self, options: dict[str, Any]) -> MessageQuerySet:
        rows: MessageQuerySet = Message.objects.using(self.using).filter(state=options["state"] or self.states[0])
        for name in ("handler", "error_code", "reason"):
            if options[name]:
                rows = rows.filter(**{name: options[name]})
        if options["since"]:
            rows = rows.filter(settled_at__gte=self._instant(options["since"]))
        if options["until"]:
            rows = rows.filter(settled_at__lt=self._instant(options["until"]))
        return rows

    def _instant(self, given: timedelta | datetime) -> datetime:
        return given if isinstance(given, datetime) else from_micros(server_now(self.using)) - given

    # --- may we -------------------------------------------------------------------------------------------------------

    def _show(self, chosen: dict[int, str]) -> None:
        topics = Counter(chosen.values())
        lines = [f"{number(len(chosen)) if chosen else 'No'} messages would be {self.past}."]
        if topics:
            lines += ["", *table(["topic", "messages"], sorted(topics.items()), left=["topic"])]
        self.emit({"matching": len(chosen), "topics": dict(sorted(topics.items()))}, lines)

    def _confirm(self, chosen: dict[int, str]) -> None:
        topics = Counter(chosen.values()).most_common()
        named = ", ".join(f"{n:,} of {one_line(topic)}" for topic, n in topics[:5]) + (", …" if len(topics) > 5 else "")
        what = "message" if len(chosen) == 1 else "messages"
        self.stderr.write(f"About to {self.verb} {len(chosen):,} {what} in database {self.using!r}: {named}.", str)
        self.stderr.write(f"{self.verb.capitalize()} now? [y/N] ", str, ending="")
        self.stderr.flush()
        try:
            answer = input()
        except EOFError:
            raise CommandError("Nobody answered, so nothing was changed; --no-input goes without asking.") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was changed.")

    # --- act ----------------------------------------------------------------------------------------------------------

    def _act(self, ids: list[int], note: str) -> Done:
        total = Done()
        progress = self.progress(self.verb.capitalize(), len(ids))
        try:
            for batch in _batches(sorted(ids)):
                total += type(self).operate(self.using, batch, actor=operating_user(), note=note)
                progress.add(len(batch))
        except KeyboardInterrupt:
            progress.finish()
            self._report(total)
            raise CommandError("Interrupted; what is reported above was done.", returncode=130) from None
        progress.finish()
        return total

    def _report(self, done: Done) -> None:
        reasons = Counter(str(reason) for reason in done.skipped.values())
        what = "message" if len(done.done) == 1 else "messages"
        lines = [
            self.paint("SUCCESS" if done.done else "WARNING", f"{self.past.capitalize()} {len(done.done):,} {what}.")
        ]
        if done.skipped:
            counts = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common())
            lines.append(self.paint("WARNING", f"Skipped {len(done.skipped):,}: {counts}."))
        if len(done.skipped) <= NAMED:
            lines += [f"  {pk}: {reason}" for pk, reason in done.skipped.items()]
        skipped = {str(pk): str(reason) for pk, reason in done.skipped.items()}
        self.emit({self.past: list(done.done), "skipped": skipped}, lines)


def _batches(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), BATCH):
        yield ids[start : start + BATCH]


def operating_user() -> str:
    """Who runs this command, as the operating system knows them."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
