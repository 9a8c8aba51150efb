"""Take what is due and may start now, leaderless, at a cost that depends on the batch alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from django.db import DatabaseError, connections
from django.dispatch import Signal

from outbox.database import again, is_loss, is_race
from outbox.handlers import Handler, registry
from outbox.leases.courtesy import Courtesy
from outbox.leases.floors import Floors
from outbox.leases.holding import renew
from outbox.leases.lease import Lease, draw_token
from outbox.leases.looking import MOST_HIDING, MOST_SPARE, Obstacles, choose, read
from outbox.leases.rivals import Rivals
from outbox.leases.shortcut import lease_at_once, leased_unanswered
from outbox.leases.taking import SNOOZE, Taken, take
from outbox.leases.terms import Terms
from outbox.signals import Event, send

LOOKS = 5  # at other rows, in one claim, when those that were seen cannot be had


@dataclass(slots=True, kw_only=True)
class Claim:
    """What one claim brought.

    ``more``: look again at once, there was more than this claim could take. ``contended``: somebody else was at the
    same rows. ``spared``: due rows in lanes of our own were left alone for a moment. ``snoozed``: rows were put off
    that will be due in a moment, for somebody had locked their lane for long. ``lonely``: a message is due that only
    a process holding nothing else may run.
    """

    leases: list[Lease] = field(default_factory=list)
    events: list[tuple[Signal, Event]] = field(default_factory=list)
    more: bool = False
    contended: bool = False
    spared: bool = False
    snoozed: bool = False
    lonely: bool = False


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
    """One thread's way of claiming for one process.

    It gives every route its turn, remembers what others have locked, and recognises what an unanswered COMMIT brought.
    """

    def __init__(self, *, using: str, worker: str, handlers: Iterable[Handler] | None = None) -> None:
        self.using = using
        self.worker = worker
        self.routes: dict[str, Handler] = {
            route: each for each in (registry.handlers() if handlers is None else handlers) for route in each.routes
        }
        self._order = list(self.routes)
        self._rows = Obstacles()
        self._lanes = Obstacles()
        self._hiding = 0
        self._rivals = Rivals()
        self._courtesy = Courtesy()
        self._snoozed_until = 0.0
        self._floors = Floors()
        self._doubtful: list[Lease] = []
        self._unanswered: tuple[Sequence[int], Terms] | None = None

    def claim(
        self,
        limit: int,
        *,
        seconds: float,
        start: int | None = None,
        room: Mapping[str, int] | None = None,
        alone: bool = True,
        ours: Collection[int] = (),
    ) -> Claim:
        """Lease up to ``limit`` due messages for ``seconds``; the first ``start`` of them are charged (default: all).

        ``room`` caps the messages by handler name. ``alone``: this process holds nothing else, so a message that
        crashed its workers may be taken, and then nothing besides. ``ours``: the lanes of which it holds a message.
        """
        if self._unanswered is not None:
            self._doubtful += leased_unanswered(*self._unanswered)
            self._unanswered = None
        if self._doubtful:
            return self._adopt(seconds)
        terms = self._terms(limit, seconds=seconds, start=start, room=room)
        for _ in range(LOOKS):
            hiding = self._hiding
            claim = self._claim(terms, alone=alone, ours=ours)
            if claim.leases or claim.events or not (self._hiding > hiding or self._rivals.just_met):
                break  # else rows that cannot be had are known now: try others, and look further
        return claim

    def claim_only(self, ids: Collection[int], *, seconds: float) -> list[Lease]:
        """Claim these messages and no others, as far as they are due, free, and the heads of their lanes."""
        terms = self._terms(len(ids), seconds=seconds, start=None, room=None)
        terms.only = True
        return self._take(sorted(ids), terms).leases

    def _terms(self, limit: int, *, seconds: float, start: int | None, room: Mapping[str, int] | None) -> Terms:
        return Terms(
            using=self.using,
            worker=self.worker,
            seconds=seconds,
            token=draw_token(),
            limit=limit,
            start=limit if start is None else start,
            room={each.name: limit if room is None else room.get(each.name, 0) for each in self.routes.values()},
            routes=self.routes,
        )

    def _claim(self, terms: Terms, *, alone: bool, ours: Collection[int]) -> Claim:
        started = time.monotonic()
        names = [route for route in self._order if terms.room[self.routes[route].name] > 0]
        if not names or terms.limit <= 0:
            return Claim()
        terms.lasting = self._lanes.lasting()
        blocks = self._rivals.blocks
        spare = min(self._hiding, MOST_SPARE) if blocks == 1 else 0
        width = terms.limit * blocks + 2 * min(self._hiding, MOST_HIDING)
        seen, full = read(self.using, names, width, self._floors)
        spared = self._courtesy.spared(ours)
        candidates = [row for row in seen if row.lane not in spared] if spared else seen
        choice = choose(
            candidates,
            self.routes,
            order=names,
            limit=terms.limit + spare,
            room={name: count + spare for name, count in terms.room.items() if count > 0},
            alone=alone,
            rows=self._rows.in_the_way(),
            lanes=self._lanes.in_the_way() - terms.lasting,
            blocks=blocks,
        )
        self._hiding = choice.hiding
        if not choice.ids:
            self._rivals.meet(0, tried=0)
            return Claim(
                lonely=choice.lonely,
                contended=bool(choice.avoided),
                spared=len(candidates) < len(seen),
                snoozed=self._has_snoozed(),
            )
        if choice.solo:
            terms.solo, terms.limit, terms.start = True, 1, 1
        taken = self._take_at_once(choice.ids, terms) if choice.plain and not spare else self._take(choice.ids, terms)
        if mine := [row for row in candidates if row.lane in ours]:
            self._courtesy.disturbed(started)
            self._rows.forget(row.id for row in mine)  # locked by a settlement of ours, if by anybody
            self._lanes.forget(ours)
        self._hiding += len(taken.missed)
        self._rivals.meet(len(taken.missed), tried=len(choice.ids))
        served = {lease.handler.name for lease in taken.leases}
        self._order.sort(key=lambda route: self.routes[route].name in served)  # who was served comes last next time
        progress = bool(taken.leases or taken.events or taken.moved)
        return Claim(
            leases=taken.leases,
            events=taken.events,
            more=progress and (full or choice.rest or taken.moved),
            contended=bool(choice.avoided or taken.missed or taken.stuck),
            spared=len(candidates) < len(seen),
            snoozed=self._has_snoozed(),
            lonely=choice.lonely or taken.lonely,
        )

    def _has_snoozed(self) -> bool:
        return time.monotonic() < self._snoozed_until

    def _take_at_once(self, chosen: Sequence[int], terms: Terms) -> Taken:
        """Lease rows that need no look by one statement, where there is one; and the rest of them as usual."""
        connection = connections[self.using]
        leases: list[Lease] = []
        try:
            if not connection.in_atomic_block:  # a statement that fails would spoil the open transaction
                leases = lease_at_once(chosen, terms)
        except DatabaseError as error:
            if not is_race(connection, error):
                self._unanswered = (chosen, terms) if is_loss(connection, error) else None
                raise
        got = {lease.id for lease in leases}
        rest = [pk for pk in chosen if pk not in got]
        if not rest:
            return Taken(leases=leases)
        room = Counter(terms.room)
        room.subtract(lease.handler.name for lease in leases)
        start = max(0, terms.start - sum(lease.charged for lease in leases))
        try:
            taken = self._take(rest, replace(terms, room=room, start=start, limit=terms.limit - len(leases)))
        except BaseException:
            self._doubtful = [*leases, *self._doubtful]  # held, but nobody was told
            raise
        taken.leases = [*leases, *taken.leases]
        return taken

    def _take(self, chosen: Sequence[int], terms: Terms) -> Taken:
        try:
            taken = again(self.using, partial(self._try, chosen, terms))
        except DatabaseError as error:
            if not is_loss(connections[self.using], error):
                self._doubtful = []
            raise
        self._doubtful = []
        self._rows.meet(taken.missed, tried=chosen)
        self._lanes.meet(taken.stuck, tried=taken.lanes)
        if taken.snoozed:
            self._snoozed_until = time.monotonic() + 2 * SNOOZE / 1_000_000  # until they have surely been looked at
        for signal, event in taken.events:
            send(signal, event)
        return taken

    def _try(self, chosen: Sequence[int], terms: Terms) -> Taken:
        taken = take(chosen, terms)
        self._doubtful = taken.leases  # ours as soon as COMMIT is sent, even if its reply is lost
        return taken

    def _adopt(self, seconds: float) -> Claim:
        """Leases of a claim whose COMMIT was sent but never answered: rows that carry its token are ours."""
        renewal = renew(self.using, self._doubtful, seconds)
        adopted = [lease for lease in self._doubtful if lease in renewal.renewed]
        self._doubtful = [lease for lease in self._doubtful if lease in renewal.busy]
        return Claim(leases=adopted, more=True)
