"""``manage.py outbox_status``: how much is where, and whether something is wrong."""

from __future__ import annotations

import operator
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.management.arguments import USAGE, duration
from outbox.management.operator import THRESHOLD, OperatorCommand
from outbox.management.printing import number, table
from outbox.models import Breaker, Dispatcher
from outbox.overview import COUNTS, Alias, Counts, Overview, aliases, overview
from outbox.texts import moment, one_line, span

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
MEASURES = (*COUNTS, "unroutable", "delivered", "oldest", "dispatchers", "abandoned", "breakers")
_EXPRESSION = re.compile(rf"\s*({'|'.join(MEASURES)})\s*({'|'.join(COMPARISONS)})\s*(\S.*)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A condition that makes the command fail, such as ``dead>0``."""

    text: str
    measure: str
    compare: Callable[[float, float], bool]
    limit: float


def threshold(text: str) -> Threshold:
    match = _EXPRESSION.match(text)
    if match is None:
        raise ArgumentTypeError(
            f"{text!r} is no condition: it takes one of {', '.join(MEASURES)}, a comparison and a number, "
            "as in 'dead>0' or 'oldest>5m'"
        )
    measure, sign, limit = match.groups()
    try:
        bound = duration(limit)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r}: {limit!r} is neither a number nor a duration such as 5m") from None
    return Threshold(text=text, measure=measure, compare=COMPARISONS[sign], limit=bound)


class Command(OperatorCommand):
    help = (
        "Count the messages of each topic by where they are. For monitoring: exit code 3 when a --fail-if condition "
        f"holds; its measures are {', '.join(MEASURES)} (oldest: seconds since the oldest due message became due; "
        "abandoned: databases with due messages and no live dispatcher; breakers: handlers that pause because their "
        "other side is down)."
    )

    def add_options(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--topic", metavar="GLOB", default="*", help="Only matching topics, as in 'billing.*'.")
        add(
            "--fail-if",
            type=threshold,
            action="append",
            default=[],
            metavar="EXPR",
            help="dead>0, oldest>5m; repeatable.",
        )
        add(
            "--delivered-within",
            type=duration,
            default=0.0,
            metavar="AGE",
            help="Count recent deliveries, too, as in 1h.",
        )

    def run(self, options: dict[str, Any]) -> None:
        if not options["delivered_within"] and any(each.measure == "delivered" for each in options["fail_if"]):
            raise CommandError("A condition on 'delivered' needs a period: --delivered-within 1h.", returncode=USAGE)
        found = overview(self.using, delivered_within=options["delivered_within"])
        topics = {name: counts for name, counts in found.topics.items() if fnmatchcase(name, options["topic"])}
        if options["fail_if"] and options["topic"] != "*" and not topics:
            raise CommandError(f"No topic matches {options['topic']!r}: nothing is watched.", returncode=USAGE)
        total = sum(topics.values(), Counts())
        others = aliases()
        measures = {
            **{name: getattr(total, name) for name in (*COUNTS, "unroutable")},
            "delivered": total.delivered or 0,
            "oldest": found.age(total) or 0.0,
            "dispatchers": sum(not each.stopping for each in found.dispatchers),
            "abandoned": sum(each.is_abandoned for each in others),
            "breakers": len(found.breakers),
        }
        breached = [each for each in options["fail_if"] if each.compare(measures[each.measure], each.limit)]
        data = {
            "database": found.using,
            "now": found.now,
            "total": measures,
            "topics": {name: {**_as_data(counts), "oldest": found.age(counts)} for name, counts in topics.items()},
            "unroutable": found.unroutable,
            "dispatchers": [_dispatcher(each) for each in found.dispatchers],
            "breakers": [_breaker(each) for each in found.breakers],
            "databases": [{**asdict(each), "abandoned": each.is_abandoned} for each in others],
            "breached": [each.text for each in breached],
        }
        self.emit(data, self._lines(found, topics, total, others))
        if breached:
            facts = ", ".join(f"{each.text} ({each.measure} is {measures[each.measure]:g})" for each in breached)
            raise CommandError(f"Threshold breached: {facts}.", returncode=THRESHOLD)

    def _lines(self, found: Overview, topics: dict[str, Counts], total: Counts, others: list[Alias]) -> Iterator[str]:
        headers = ["topic", *(name.replace("_", " ") for name in COUNTS), "oldest due"]
        if total.delivered is not None:
            headers.append("delivered")
        rows = [self._row(found, name, counts) for name, counts in topics.items()]
        if len(rows) > 1:
            rows.append(self._row(found, "all topics", total))
        if rows:
            yield from table(headers, rows, left=["topic"], style=lambda text: self.paint("MIGRATE_HEADING", text))
        else:
            yield "No topic matches." if found.topics else "No topic is declared, and no message is there."
        yield ""
        yield self._at_work(found)
        for breaker in found.breakers:
            yield self.paint("WARNING", _pause(breaker))
        if total.unroutable:
            routes = one_line(", ".join(f"{n:,} of {route}" for route, n in found.unroutable.items()))
            yield self.paint("WARNING", f"Messages wait for handlers that are not installed here: {routes}.")
        for each in others:
            if each.error:
                yield self.paint("ERROR", f"Database {each.name!r} does not answer: {one_line(each.error)}")
            elif each.is_abandoned:
                start = f"start one: manage.py outbox_dispatch --database {each.name}"
                what = f"Database {each.name!r} has {each.due_text} due messages but no live dispatcher; {start}."
                yield self.paint("ERROR", what)

    def _row(self, found: Overview, name: str, counts: Counts) -> list[str]:
        age = found.age(counts)
        row = [name, *(number(getattr(counts, column)) for column in COUNTS), "-" if age is None else span(age)]
        return row if counts.delivered is None else [*row, number(counts.delivered)]

    def _at_work(self, found: Overview) -> str:
        if not found.dispatchers:
            return self.paint("WARNING", f"No dispatcher reports on database {found.using!r}.")
        names = "; ".join(
            f"{one_line(each.name)} ({each.in_flight} of {each.concurrency} slots, seen "
            f"{span((found.now - each.seen_at).total_seconds())} ago{', stopping' if each.stopping else ''})"
            for each in found.dispatchers
        )
        return f"Dispatchers: {names}."


def _as_data(counts: Counts) -> dict[str, Any]:
    values = asdict(counts)
    return values if counts.delivered is not None else {key: n for key, n in values.items() if key != "delivered"}


def _pause(row: Breaker) -> str:
    wait = (row.probe_at - row.clock).total_seconds()
    probe = f"in {span(wait)}" if wait > 0 else "with the next message"
    return (
        f"Handler {row.handler!r} pauses since {moment(row.opened_at, row.clock)}, because its other side is down "
        f"({one_line(f'{row.error_type}: {row.error_text}', 200)}); the next probe is sent {probe}."
    )


def _breaker(row: Breaker) -> dict[str, Any]:
    names = ("handler", "opened_at", "probe_at", "probes", "error_type", "error_code", "error_text")
    return {name: getattr(row, name) for name in names}


def _dispatcher(row: Dispatcher) -> dict[str, Any]:
    names = ("name", "host", "pid", "version", "wakeup", "handlers", "concurrency", "in_flight")
    return {name: getattr(row, name) for name in (*names, "started_at", "seen_at", "stopping")}
