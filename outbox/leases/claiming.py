"""Take what is due and may start now, leaderless, at a cost that depends on the batch alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import zip_longest
from typing import NamedTuple

from django.db import DatabaseError, connections
from django.dispatch import Signal

from outbox import lanes
from outbox.database import ROUTES_PER_STATEMENT, ServerNow, again, due_candidates, is_loss, locked
from outbox.errors import ErrorRecord
from outbox.handlers import Handler, registry
from outbox.leases.lease import Lease, draw_token, grant
from outbox.leases.settling import Closing, event_of, record, write
from outbox.models import Message, Outcome, Reason, State
from outbox.signals import Event, send

ALONE_FROM = 2  # lapses in a row after which a message runs alone
WIDTH = 20  # rows that a look reads of a route at least, so that crowded lanes are seen
FEW_ROUTES = 8  # with more routes than this, a first look reads only a few rows of each
LANE_PATIENCE = 0.5  # seconds that a locked lane may fill claims before its knocks are snoozed
LAPSE = ErrorRecord(type="LeaseLapsed")


class Candidate(NamedTuple):
    """A due row as the look at the index saw it, without a lock."""

    route: str
    id: int
    lane: int | None
    lapses: int
    due_at: int


@dataclass(slots=True, kw_only=True)
class Claim:
    """What one claim brought.

    ``more``: look again at once, there was more than this claim could take. ``contended``: somebody else was at the same
    rows. ``lonely``: a message is due that only a process holding nothing else may run.
    """

    leases: list[Lease] = field(default_factory=list)
    events: list[tuple[Signal, Event]] = field(default_factory=list)
    more: bool = False
    contended: bool = False
    lonely: bool = False


@dataclass(slots=True, kw_only=True)
class _Terms:
    """On which terms one claim is made; ``room`` is how many messages each handler (by name) may get.

    ``solo``: the one row that is claimed may be one that must run alone. ``only``: touch no other rows than these.
    """

    using: str
    worker: str
    seconds: float
    token: int
    limit: int
    start: int
    room: dict[str, int]
    routes: Mapping[str, Handler]
    solo: bool = False
    only: frozenset[int] | None = None

    def take(self, row: Message) -> Handler | None:
        """The handler that may have this row, when there is room for it."""
        handler = self.routes[row.route]
        if self.limit <= 0 or self.room.get(handler.name, 0) <= 0:
            return None
        self.limit -= 1
        self.room[handler.name] -= 1
        return handler


def claim(
    *,
    using: str,
    worker: str,
    seconds: float,
    limit: int = 1,
    handlers: Iterable[Handler] | None = None,
    ids: Collection[int] | None = None,
) -> list[Lease]:
    """Claim up to ``limit`` due messages, of the given handlers (default: all of this process), for ``seconds``.

    With ``ids`` only those messages, each only if it is the head of its lane; no other row is touched.
    """
    claimer = Claimer(using=using, worker=worker, handlers=handlers)
    if ids is None:
        return claimer.claim(limit, seconds=seconds).leases
    return claimer.claim_only(ids, seconds=seconds)


class Claimer:
    """One thread's way of claiming for one process: it rotates the routes, and remembers lanes that stay locked."""

    def __init__(self, *, using: str, worker: str, handlers: Iterable[Handler] | None = None) -> None:
        self.using = using
        self.worker = worker
        self.routes: dict[str, Handler] = {
            route: each for each in (registry.handlers() if handlers is None else handlers) for route in each.routes
        }
        self._turn = 0
        self._stuck: dict[int, float] = {}
        self._doubtful: list[Lease] = []

    def claim(
        self,
        limit: int,
        *,
        seconds: float,
        start: int | None = None,
        room: Mapping[str, int] | None = None,
        alone: bool = True,
    ) -> Claim:
        """Lease up to ``limit`` due messages for ``seconds``; the first ``start`` of them are charged (default: all).

        ``room`` caps the messages by handler name. ``alone``: this process holds nothing else, so a message that
        crashed its workers may be taken, and then nothing besides.
        """
        if self._doubtful:
            return Claim(leases=self._adopt(), more=True)
        terms = self._terms(limit, seconds=seconds, start=start, room=room)
        candidates, full = self._look(terms)
        chosen, lonely = _choose(candidates, terms, alone=alone)
        if not chosen:
            return Claim(lonely=lonely)
        claim = self._take(chosen, terms)
        progress = bool(claim.leases or claim.events) or claim.more
        claim.more = progress and (full or len(chosen) < len(candidates))
        claim.lonely |= lonely
        return claim

    def claim_only(self, ids: Collection[int], *, seconds: float) -> list[Lease]:
        """Claim these messages and no others, as far as they are due, free, and the heads of their lanes."""
        terms = self._terms(len(ids), seconds=seconds, start=None, room=None)
        terms.only = frozenset(ids)
        return self._take(sorted(ids), terms).leases

    def _terms(
        self, limit: int, *, seconds: float, start: int | None, room: Mapping[str, int] | None
    ) -> _Terms:
        return _Terms(
            using=self.using,
            worker=self.worker,
            seconds=seconds,
            token=draw_token(),
            limit=limit,
            start=limit if start is None else start,
            room={each.name: limit if room is None else room.get(each.name, 0) for each in self.routes.values()},
            routes=self.routes,
        )

    def _take(self, chosen: Sequence[int], terms: _Terms) -> Claim:
        now = time.monotonic()
        patience_lost = {lane for lane, since in self._stuck.items() if now - since > LANE_PATIENCE}
        stuck: set[int] = set()

        def work() -> Claim:
            fresh = replace(terms, room=dict(terms.room))
            claim, found = _take(chosen, fresh, patience_lost)
            stuck.clear()
            stuck.update(found)
            self._doubtful = claim.leases  # ours as soon as COMMIT is sent, even if its reply is lost
            return claim

        try:
            claim = again(self.using, work)
        except DatabaseError as error:
            if not is_loss(connections[self.using], error):
                self._doubtful = []
            raise
        self._doubtful = []
        if terms.only is None:
            self._stuck = {lane: self._stuck.get(lane, now) for lane in stuck - patience_lost}
        for signal, event in claim.events:
            send(signal, event)
        return claim

    def _adopt(self) -> list[Lease]:
        """Leases of a claim whose COMMIT was sent but never answered: rows that carry its token are ours."""
        tokens = {lease.id: lease.token for lease in self._doubtful}
        rows = Message.objects.using(self.using).filter(pk__in=tokens, state=State.PENDING)
        mine = {pk for pk, token in rows.values_list("pk", "lease_token") if token == tokens[pk]}
        adopted = [lease for lease in self._doubtful if lease.id in mine]
        self._doubtful = []
        return adopted

    def _look(self, terms: _Terms) -> tuple[list[Candidate], bool]:
        """Due rows of the routes that have room, oldest first within a route; one statement when there are none.

        The second value tells whether there are more than were read.
        """
        names = [route for route, handler in self.routes.items() if terms.room[handler.name] > 0]
        if not names or terms.limit <= 0:
            return [], False
        self._turn = (self._turn + 1) % len(names)
        names = names[self._turn :] + names[: self._turn]
        width = max(terms.limit, WIDTH)
        few = width if len(names) <= FEW_ROUTES else max(2, 2 * width // len(names))
        found: list[Candidate] = []
        for first in range(0, len(names), ROUTES_PER_STATEMENT):
            found += self._read(names[first : first + ROUTES_PER_STATEMENT], few)
        counts = Counter(row.route for row in found)
        full = [route for route, count in counts.items() if count == few]
        if full and few < width and len(found) < width:
            known = {row.id for row in found}
            found += [row for row in self._read(full[:FEW_ROUTES], width) if row.id not in known]
        return found, bool(full)

    def _read(self, routes: Sequence[str], count: int) -> list[Candidate]:
        rows = due_candidates(self.using, Message._meta.db_table, [(route, count) for route in routes])
        return [Candidate(*row) for row in rows]


def _choose(candidates: Sequence[Candidate], terms: _Terms, *, alone: bool) -> tuple[list[int], bool]:
    """Ids to lock: in turn one of each handler, while there is room; all knocks at one lane count as one.

    The second value tells whether a message was left out because it must run alone.
    """
    queues: dict[str, list[Candidate]] = {}
    lonely = False
    for row in candidates:
        if row.lapses < ALONE_FROM:
            queues.setdefault(terms.routes[row.route].name, []).append(row)
        elif alone:
            terms.solo, terms.limit, terms.start = True, 1, 1
            return [row.id], False
        else:
            lonely = True
    chosen: list[int] = []
    left = terms.limit
    for layer in zip_longest(*(units[: terms.room[name]] for name, units in _units(queues).items())):
        for unit in layer:
            if unit and left > 0:
                chosen += unit
                left -= 1
    return chosen, lonely


def _units(queues: Mapping[str, Sequence[Candidate]]) -> dict[str, list[list[int]]]:
    """Ids by handler, in due order; all rows of one lane are one unit, since only one of them can be leased."""
    units: dict[str, list[list[int]]] = {}
    by_lane: dict[int, list[int]] = {}
    for name, rows in queues.items():
        mine = units.setdefault(name, [])
        for row in rows:
            if row.lane is not None and row.lane in by_lane:
                by_lane[row.lane].append(row.id)
                continue
            mine.append([row.id])
            if row.lane is not None:
                by_lane[row.lane] = mine[-1]
    return units


def _take(chosen: Sequence[int], terms: _Terms, patience_lost: Collection[int]) -> tuple[Claim, set[int]]:
    """Inside the claim's transaction: lock the chosen rows, judge them, lease what may start, park what must wait."""
    query = Message.objects.using(terms.using).filter(pk__in=chosen, state=State.PENDING, due_at__lte=ServerNow())
    rows = [row for row in locked(query.annotate(clock=ServerNow()).order_by("pk")) if row.route in terms.routes]
    laned = [row for row in rows if row.lane is not None]
    targets = lanes.targets(terms.using, laned, terms.routes) if laned else lanes.Targets()
    place = {pk: number for number, pk in enumerate(chosen)}
    ready = [row for row in rows if row.lane is None] + targets.ready
    claim = Claim(contended=len(rows) < len(chosen))
    start: list[tuple[Message, Handler]] = []
    closings: list[Closing] = []
    for row in sorted(ready, key=lambda row: place.get(row.pk, -1)):
        if terms.only is not None and row.pk not in terms.only:
            continue
        closing = _verdict(row, terms)
        handler = None
        if closing is not None:
            closings.append(closing)
        elif row.lapses >= ALONE_FROM and not terms.solo:
            claim.lonely = True
        else:
            handler = terms.take(row)
        if handler is not None:
            start.append((row, handler))
        elif closing is None and row.due_at is None:
            targets.asleep.append(row)
    if terms.only is None:
        _park(targets, laned, terms, patience_lost)
        claim.more = bool(targets.behind)
    _close(closings, claim, terms)
    _grant(start, claim, terms)
    return claim, targets.stuck


def _park(
    targets: lanes.Targets, laned: Sequence[Message], terms: _Terms, patience_lost: Collection[int]
) -> None:
    lanes.wake(terms.using, [row.pk for row in targets.asleep])
    lanes.park(terms.using, targets.behind)
    late = [row.pk for row in laned if row.lane in targets.stuck and row.lane in patience_lost]
    lanes.snooze(terms.using, late, int(LANE_PATIENCE * 1_000_000))


def _verdict(row: Message, terms: _Terms) -> Closing | None:
    """How a due row is settled by the claim itself, instead of being leased: expired, or its leases ran out too often."""
    policy = terms.routes[row.route].policy
    lapsed = row.lease_token is not None
    crashed = _lapse(row, Outcome.CRASHED) if lapsed else _closing(row, Outcome.DISCARDED)
    if row.expires_at is not None and row.expires_at <= row.clock:
        crashed.state, crashed.reason = State.DISCARDED, Reason.EXPIRED
        return crashed
    if row.spent >= policy.max_attempts:
        crashed.state, crashed.reason = State.DEAD, Reason.CRASHED if lapsed else Reason.EXHAUSTED
        crashed.outcome = Outcome.CRASHED if lapsed else Outcome.BURIED
        crashed.keeps_lane = terms.routes[row.route].dead_head == "block"
        return crashed
    if lapsed and row.lapses + 1 >= ALONE_FROM:
        crashed.due_at = row.clock + timedelta(seconds=policy.delay(max(row.spent, 1)) or policy.base)
        return crashed
    return None


def _closing(row: Message, outcome: Outcome) -> Closing:
    return Closing(
        row=row,
        token=row.lease_token,
        state=State.PENDING,
        outcome=outcome,
        due_at=row.clock,
        spent=row.spent,
        ended_at=row.clock,
    )


def _lapse(row: Message, outcome: Outcome) -> Closing:
    closing = _closing(row, outcome)
    closing.lapses = row.lapses + 1
    closing.started_at = row.leased_at
    closing.error = replace(LAPSE, text=f"The lease of {row.leased_by} ran out: the process died, hung or lost the database.")
    return closing


def _close(closings: list[Closing], claim: Claim, terms: _Terms) -> None:
    claim.events += [event_of(terms.using, each) for each in closings]
    write(terms.using, closings)
    for lane in sorted({each.row.lane for each in closings if each.row.lane is not None}):
        lanes.advance(terms.using, lane)


def _grant(start: list[tuple[Message, Handler]], claim: Claim, terms: _Terms) -> None:
    lapses = [_lapse(row, Outcome.LAPSED) for row, _ in start if row.lease_token is not None]
    claim.events += [event_of(terms.using, each) for each in lapses]
    record(terms.using, lapses)
    for part, charged in ((start[: terms.start], True), (start[terms.start :], False)):
        claim.leases += grant(
            terms.using, part, token=terms.token, worker=terms.worker, seconds=terms.seconds, charged=charged
        )
