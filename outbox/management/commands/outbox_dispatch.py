"""``manage.py outbox_dispatch``: deliver staged messages until stopped."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from outbox.conf import options
from outbox.crew import MARGIN, Crew
from outbox.dispatcher import LAST_WRITES, Dispatcher
from outbox.lifeline import Lifeline
from outbox.limits import Limits
from outbox.management.arguments import USAGE, as_parsed, duration
from outbox.management.preparing import limits_of, plans_of
from outbox.management.stopping import StopSignals, ignore, leave_at_once
from outbox.plans import Plan
from outbox.posts import LEAST_PATIENCE, Terms
from outbox.probes import LivenessFile, Probes
from outbox.registration import worker_name
from outbox.supervisor import Supervisor

logger = logging.getLogger("outbox")

GLANCE = 0.1  # seconds between two looks at the threads, or the processes
LAST_REPORT = 5.0  # seconds that a child may take to end, beyond what it allows itself
COUNTS = ("processed", "delivered", "retried", "dead", "discarded", "skipped")


def seconds(text: str) -> float:
    """A number of seconds, also ``1e-3``, or a duration with a unit; the plan says what is too small or too large."""
    try:
        return float(text)
    except ValueError:
        return duration(text)


class Command(BaseCommand):
    help = (
        "Deliver staged messages until stopped. The first SIGTERM or SIGINT stops claiming, lets running handlers "
        "finish within the grace and exits with 0; the second exits at once with 128 + the signal's number."
    )
    stealth_options = ("stop_event",)
    requires_system_checks = ("outbox",)  # all checks would ask databases, and one that is away is to be waited for
    _owns_the_process = False

    def run_from_argv(self, argv: list[str]) -> None:
        self._owns_the_process = True
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        current = options()
        add = parser.add_argument
        add("--topic", action="append", default=[], metavar="GLOB", help="only topics like this; may be repeated")
        add("--exclude-topic", action="append", default=[], metavar="GLOB", help="no topics like this; may be repeated")
        where = "may be repeated; default: where the router writes messages"
        add("--database", action="append", default=[], metavar="ALIAS", help=where)
        add("--concurrency", type=int, default=current.CONCURRENCY, help="handlers at once (%(default)s)")
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--once", action="store_true", help="one claim; deliver that and exit")
        mode.add_argument("--drain", action="store_true", help="deliver until nothing is due now, and exit")
        add("--limit", type=int, help="start at most so many messages, and exit")
        lease = "seconds that a claim lasts; renewed every third (%(default)s)"
        add("--lease", type=seconds, default=current.LEASE, help=lease)
        add("--poll", type=seconds, default=current.POLL, help="seconds between two looks (%(default)s)")
        add("--grace", type=seconds, default=current.GRACE, help="seconds a stop waits for handlers (%(default)s)")
        add("--batch", type=int, default=current.BATCH, help="messages in one claim at most (%(default)s)")
        add("--exit-on-db-error", action="store_true", help="exit with 1 instead of waiting for the database")
        add("--format", choices=("text", "json"), default="text", help="of the report (%(default)s)")
        self._add_arguments_of_processes(parser)

    def _add_arguments_of_processes(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--processes", type=int, default=1, help="processes, each with so many slots; replaced when they die")
        add("--max-messages", type=int, metavar="N", help="a process ends, and is replaced, after N messages")
        add("--max-rss", type=float, metavar="MB", help="the same, once it uses so much memory (Linux)")
        add("--max-seconds", type=seconds, metavar="S", help="the same, after S seconds, or up to a tenth more")
        add("--probe-port", type=int, metavar="PORT", help="answer /livez, /readyz and /startupz there")
        add("--probe-host", default="127.0.0.1", metavar="HOST", help="the address for it (%(default)s)")
        add("--liveness-file", metavar="PATH", help="touch this file about once a second while the process lives")

    def handle(self, *args: Any, stop_event: threading.Event | None = None, **options: Any) -> None:
        given = as_parsed(self, options)
        lifeline = Lifeline.inherited() if self._owns_the_process else None
        if lifeline is not None:
            self._work_for_a_parent(given, lifeline)
            return
        limits, plans = limits_of(given), plans_of(given)
        work = self._crew(plans, limits) if given["processes"] == 1 else self._family(plans, given["processes"])
        if not any(each.ends_by_itself for each in plans):
            self._say_what_starts(plans, given["processes"])
        further = partial(_kill_and_leave, work) if isinstance(work, Supervisor) else leave_at_once
        with StopSignals(further) as signals, ExitStack() as stack:
            note = _observe(work, given, stack)
            _run(work, signals, stop_event, note)
        self._print_report(work.counts, given["format"])
        if self._owns_the_process and isinstance(work, Crew) and work.left_running:
            _leave(work.failures)
        if work.failures:
            raise CommandError("; ".join(work.failures), returncode=work.code)

    def _work_for_a_parent(self, given: dict[str, Any], lifeline: Lifeline) -> None:
        """Work as one of several processes: report to the parent, and stop when it says so or is gone."""
        crews: list[Crew] = []
        with StopSignals(ignore) as signals:
            lifeline.watch(lambda: crews[0].report() if crews else {})
            try:
                limits, plans = limits_of(given), plans_of(given)
            except CommandError as error:
                lifeline.end(refused=str(error), code=error.returncode)
                raise
            crew = self._crew(plans, limits)
            crews.append(crew)
            lifeline.tell(**crew.report())  # from here on an exit code 2 is a handler's doing, not a usage error
            _run(crew, signals, lifeline.stopped)
        lifeline.end(**crew.report())
        if crew.left_running:
            _leave(crew.failures)
        if crew.failures:
            raise CommandError("; ".join(crew.failures), returncode=crew.code)

    def _crew(self, plans: Sequence[Plan], limits: Limits) -> Crew:
        return Crew([Dispatcher(each) for each in plans], limits)

    def _family(self, plans: Sequence[Plan], processes: int) -> Supervisor:
        """The parent of so many processes that run this very command line."""
        if not self._owns_the_process:
            text = "--processes needs a process of its own: start the command from a command line."
            raise CommandError(text, returncode=USAGE)
        terms = Terms(
            command=[sys.executable, *sys.orig_argv[1:]],
            processes=processes,
            patience=max(LEAST_PATIENCE, *(each.lease for each in plans)),
            leaving=max(each.grace for each in plans) + LAST_WRITES + MARGIN + LAST_REPORT,
            strict=any(each.exit_on_database_error for each in plans),
        )
        return Supervisor(terms)

    def _say_what_starts(self, plans: Sequence[Plan], processes: int) -> None:
        plan = plans[0]
        where = ", ".join(each.using for each in plans)
        topics = ", ".join(sorted({each.topic for each in plan.handlers}))
        who = f"as {worker_name()}" if processes == 1 else f"of each of {processes} processes"
        text = f"Delivering {topics} from {where} in {plan.concurrency} slots {who}. Ctrl-C stops."
        self.stderr.write(text, self.style.SUCCESS)

    def _print_report(self, counts: Counter[str], form: str) -> None:
        if form == "json":
            self.stdout.write(json.dumps({name: counts[name] for name in COUNTS}))
        else:
            self.stdout.write(", ".join(f"{name} {counts[name]}" for name in COUNTS))


def _observe(work: Crew | Supervisor, given: dict[str, Any], stack: ExitStack) -> Callable[[], None]:
    """Serve the probes; returns what is to be called now and then."""
    try:
        if given["probe_port"] is not None:
            probes = Probes(given["probe_host"], given["probe_port"], work.verdict)
            stack.callback(probes.close)
            logger.info("Probes are answered at %s.", probes.address)
        if given["liveness_file"]:
            file = LivenessFile(Path(given["liveness_file"]))
            stack.callback(file.close)
            return partial(file.note, work.verdict)
    except OSError as error:
        raise CommandError(f"The probes cannot be served: {error}", returncode=1) from None
    return lambda: None


def _run(
    work: Crew | Supervisor,
    signals: StopSignals,
    stop_event: threading.Event | None,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Let it work until it has ended. This thread only looks after it, and is free for signals."""
    work.start()
    while work.go_on():
        if signals.seen or (stop_event is not None and stop_event.is_set()):
            work.stop()
        note()
        signals.wait(GLANCE)


def _kill_and_leave(work: Supervisor, number: int) -> None:
    work.kill()
    leave_at_once(number)


def _leave(failures: Sequence[str]) -> None:
    """Leave the process although threads are stuck in handlers: interpreter shutdown must not wait for them."""
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failures else 0)
