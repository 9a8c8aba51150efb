"""``manage.py outbox_prune``: remove settled messages that are old enough."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from outbox.management.arguments import duration
from outbox.management.operator import OperatorCommand
from outbox.management.printing import facts
from outbox.retention import Pruned, prune

NAMES = {
    "payloads": "payloads of delivered messages",
    "delivered": "delivered messages",
    "discarded": "discarded messages",
    "dead": "dead messages",
    "orphans": "attempts and interventions of nobody",
    "dispatchers": "dispatchers long lost",
    "breakers": "open breakers that nobody probes",
    "busy": "left for the next time, being locked",
}


class Command(OperatorCommand):
    help = (
        "Remove settled messages that are old enough, in small batches with pauses. Dispatchers do so by themselves; "
        "pending messages are never touched, dead ones only with --dead-after."
    )

    def add_options(self, parser: CommandParser) -> None:
        add = parser.add_argument
        never = "0: never. Default: as the OUTBOX setting says."
        add("--payloads-after", type=duration, metavar="AGE", help=f"Payloads of delivered messages, as in 7d. {never}")
        add("--after", type=duration, metavar="AGE", help=f"Delivered and discarded messages, as in 30d. {never}")
        add("--dead-after", type=duration, metavar="AGE", help=f"Dead messages. {never}")
        add("--dry-run", action="store_true", help="Count and change nothing.")

    def run(self, options: dict[str, Any]) -> None:
        progress = self.progress("Pruning")
        try:
            result = prune(
                self.using,
                payloads_after=options["payloads_after"],
                after=options["after"],
                dead_after=options["dead_after"],
                dry_run=options["dry_run"],
                stopping=threading.Event(),
                progress=progress.add,
            )
        finally:
            progress.finish()
        self.emit({"dry_run": options["dry_run"], **asdict(result)}, self._lines(result, options["dry_run"]))

    def _lines(self, result: Pruned, dry_run: bool) -> list[str]:
        counts = [(f"{n:,}", NAMES[name]) for name, n in asdict(result).items() if n]
        if not counts:
            return ["Nothing is old enough to be pruned."]
        return ["Would be pruned:" if dry_run else "Pruned:", *(f"  {line}" for line in facts(counts))]
