"""The transaction of a claim: lock the chosen rows, judge each under its lock, lease or park it. It waits for no lock.

Rows that must not start are settled on the spot: those that expired, and those whose leases ran out too often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from django.dispatch import Signal

from outbox import lanes
from outbox.database import ServerNow, locked, with_clock
from outbox.errors import ErrorRecord
from outbox.handlers import Handler
from outbox.leases import runs
from outbox.leases.announcing import event_of
from outbox.leases.lease import ALONE_FROM, Lease, grant
from outbox.leases.outcomes import Closing, record, write
from outbox.leases.terms import Terms
from outbox.models import Message, Outcome, Reason, State
from outbox.signals import Event

SNOOZE = 500_000  # microseconds that a lane with a lastingly locked target is left alone


@dataclass(slots=True, kw_only=True)
class Taken:
    """What the transaction did. ``missed``: chosen rows that were not to be had; ``stuck``: lanes with a locked target.

    ``moved``: rows were put to sleep, snoozed or woken, so the next look sees others; ``snoozed``: some for `SNOOZE`;
    ``lonely``: one must run alone.
    """

    leases: list[Lease] = field(default_factory=list)
    events: list[tuple[Signal, Event]] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    lanes: set[int] = field(default_factory=set)
    moved: bool = False
    snoozed: bool = False
    lonely: bool = False


def take(chosen: Sequence[int], terms: Terms) -> Taken:
    """Do it, inside the caller's short transaction."""
    due = lanes.pending(terms.using, chosen).filter(due_at__lte=ServerNow())
    rows = [row for row in locked(with_clock(due.order_by("pk"))) if row.route in terms.routes]
    in_lanes = [row for row in rows if row.lane is not None]
    targets = lanes.targets(terms.using, in_lanes, terms.routes)
    place = {pk: number for number, pk in enumerate(chosen)}
    ready = [row for row in rows if row.lane is None]
    ready += [row for row in targets.ready if row.pk in place or not terms.only]
    taken = Taken(missed=set(chosen).difference(row.pk for row in rows), lanes=set(targets.lanes))
    start, closings = _judge(sorted(ready, key=lambda row: place.get(row.pk, -1)), terms, targets, taken)
    _close(closings, terms, targets, taken)
    start = runs.extend(start, terms, rows)
    _leave_out(start, targets)
    if not terms.only:
        _park(in_lanes, terms, targets, taken)
    _grant(start, terms, taken)
    taken.stuck = targets.stuck
    return taken


def _judge(
    ready: Sequence[Message], terms: Terms, targets: lanes.Targets, taken: Taken
) -> tuple[list[tuple[Message, Handler]], list[tuple[Message, Closing]]]:
    """Sort due rows into those that start and those that are settled here; a parked one that is neither is woken."""
    start: list[tuple[Message, Handler]] = []
    closings: list[tuple[Message, Closing]] = []
    room = dict(terms.room)
    for row in ready:
        handler = terms.routes[row.route]
        closing = _verdict(row, handler)
        if closing is not None:
            closings.append((row, closing))
        elif row.lapses >= ALONE_FROM and not terms.solo:
            taken.lonely = True
        elif len(start) < terms.limit and room.get(handler.name, 0) > 0:
            room[handler.name] -= 1
            start.append((row, handler))
            continue
        if closing is None and row.due_at is None:
            targets.asleep.append(row)
    return start, closings


def _verdict(row: Message, handler: Handler) -> Closing | None:
    """How a due row is settled by the claim itself, instead of being leased."""
    lapsed = row.lease_token is not None
    if row.expires_at is not None and row.expires_at <= row.clock:
        closing = _lapse(row, Outcome.CRASHED) if lapsed else _closing(row, Outcome.DISCARDED)
        closing.state, closing.reason, closing.stays = State.DISCARDED, Reason.EXPIRED, False
        return closing
    if row.spent >= handler.max_attempts:
        closing = _lapse(row, Outcome.CRASHED) if lapsed else _closing(row, Outcome.BURIED)
        closing.state, closing.stays = State.DEAD, handler.dead_head == "block"
        closing.reason = Reason.CRASHED if lapsed or row.lapses else Reason.EXHAUSTED
        return closing
    if lapsed and row.lapses + 1 >= ALONE_FROM:
        closing = _lapse(row, Outcome.CRASHED)
        wait = handler.policy.delay(max(row.spent, 1)) or handler.policy.base
        closing.due_at = row.clock + timedelta(seconds=wait)
        return closing
    return None


def _closing(row: Message, outcome: Outcome) -> Closing:
    return Closing(
        pk=row.pk,
        token=row.lease_token,
        attempt=row.attempt,
        worker=row.leased_by,
        state=State.PENDING,
        outcome=outcome,
        stays=True,
        due_at=row.clock,
        spent=row.spent,
        ended_at=row.clock,
    )


def _lapse(row: Message, outcome: Outcome) -> Closing:
    closing = _closing(row, outcome)
    closing.lapses = row.lapses + 1
    closing.started_at = row.leased_at
    text = f"The lease of {row.leased_by} ran out: the process died, hung or lost the database."
    closing.error = ErrorRecord(type="LeaseLapsed", text=text)
    return closing


def _close(closings: Sequence[tuple[Message, Closing]], terms: Terms, targets: lanes.Targets, taken: Taken) -> None:
    """Settle rows and wake who comes next; a row whose successor is locked by somebody is left for another claim."""
    in_lanes = {row.lane: [row.pk] for row, _ in closings if row.lane is not None}
    successors = lanes.successors(terms.using, in_lanes, wait=False)
    done: list[Closing] = []
    wake: list[int] = []
    for row, closing in closings:
        if row.lane is not None and row.lane not in successors:
            targets.stuck.add(row.lane)
            if row.due_at is None:
                targets.asleep.append(row)
            continue
        done.append(closing)
        taken.events.append(event_of(terms.using, row, closing))
        if row.lane is not None:
            targets.behind.pop(row.lane, None)  # its picked rows stay due: they are looked at again
            head = successors[row.lane]
            if head is not None and lanes.has_its_turn(head, after=row.pk, stays=closing.stays):
                wake.append(head.pk)
    write(terms.using, done)
    lanes.wake(terms.using, wake)
    taken.moved = bool(wake)


def _leave_out(start: Sequence[tuple[Message, Handler]], targets: lanes.Targets) -> None:
    """Let rows that start behind their head sleep behind nobody."""
    starting = {row.pk for row, _ in start}
    for lane, each in list(targets.behind.items()):
        each.rows = [row for row in each.rows if row.pk not in starting]
        if not each.rows:
            del targets.behind[lane]


def _park(in_lanes: Sequence[Message], terms: Terms, targets: lanes.Targets, taken: Taken) -> None:
    late: dict[int, list[Message]] = {}
    for row in in_lanes:
        if row.lane in targets.stuck and row.lane in terms.lasting:
            late.setdefault(row.lane, []).append(row)
    taken.moved = taken.moved or bool(targets.behind or late)
    taken.snoozed = bool(late)
    _tell_lapses([row for each in targets.behind.values() for row in each.rows], terms, taken)
    lanes.wake(terms.using, [row.pk for row in targets.asleep])
    lanes.park(terms.using, targets.behind)
    lanes.snooze(terms.using, late, SNOOZE)


def _grant(start: Sequence[tuple[Message, Handler]], terms: Terms, taken: Taken) -> None:
    _tell_lapses([row for row, _ in start], terms, taken)
    for part, charged in ((start[: terms.start], True), (start[terms.start :], False)):
        taken.leases += grant(
            terms.using, part, token=terms.token, worker=terms.worker, seconds=terms.seconds, charged=charged
        )


def _tell_lapses(rows: Sequence[Message], terms: Terms, taken: Taken) -> None:
    """Record the leases that ran out; those of a run do so when their rows are put to sleep behind their head."""
    lapses = [(row, _lapse(row, Outcome.LAPSED)) for row in rows if row.lease_token is not None]
    taken.events += [event_of(terms.using, row, closing) for row, closing in lapses]
    record(terms.using, [closing for _, closing in lapses])
