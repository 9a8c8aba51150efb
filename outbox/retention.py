"""What is kept and for how long: prune settled messages gently, and sweep up lanes stranded by hand-written SQL.

Pruning never touches a pending message, nor a dead one unless told to, nor a row that blocks a lane. It works in short
transactions over at most `BATCH` rows found by one index range, waits a second at most for a lock, and rests after each
batch as long as the batch took.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import DatabaseError, connections, models
from django.db.models import Exists, OuterRef, Q

from outbox import wakeup
from outbox.conf import options
from outbox.database import ServerNow, again, impatient_transaction, is_race, locked, server_now
from outbox.fields import EPOCH, from_micros
from outbox.models import Attempt, Breaker, Dispatcher, Intervention, Message, MessageQuerySet, State

BATCH = 500  # rows in one transaction
REFUSALS = 20  # locks that did not come in time, after which all the rest is left for the next time
ORPHAN_WINDOW = 5000  # attempts or interventions looked at by one statement
FORGET_DISPATCHER = timedelta(days=1)  # after it was believed lost
FORGET_BREAKER = timedelta(days=7)  # after its last probe was due
CENTURY = 36525 * 86400.0  # seconds
SWEEP_WINDOW = 10_000  # unfinished rows of lanes looked at by one statement
SWEEP_WINDOWS = 10  # of one sweep
_SEEN = ("pk", "settled_at", "state", "payload_pruned", "lane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many rows were (or, in a dry run, would be) pruned.

    ``delivered``, ``discarded`` and ``dead`` count whole messages; ``payloads`` those that lost only payload and
    headers; ``orphans`` attempts and interventions whose message is gone; ``busy`` messages left for the next time,
    because somebody had them locked.
    """

    payloads: int = 0
    delivered: int = 0
    discarded: int = 0
    dead: int = 0
    orphans: int = 0
    dispatchers: int = 0
    breakers: int = 0
    busy: int = 0


@dataclass(slots=True, kw_only=True)
class _Run:
    using: str
    now: datetime
    dry_run: bool
    stopping: threading.Event
    progress: Callable[[int], None]
    busy: set[int] = field(default_factory=set)
    refusals: int = 0

    @property
    def goes_on(self) -> bool:
        return self.refusals < REFUSALS and not self.stopping.is_set()

    def rest(self, seconds: float) -> None:
        self.stopping.wait(max(seconds, 0.01))


def prune(
    using: str,
    *,
    payloads_after: float | None = None,
    after: float | None = None,
    dead_after: float | None = None,
    dry_run: bool = False,
    stopping: threading.Event | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Pruned:
    """Prune one database; ages are seconds since the settlement, by the database's clock.

    None means as ``settings.OUTBOX`` says, 0 never. Ends early, between two batches, once ``stopping`` is set.
    ``progress`` is called with the rows of each batch.
    """
    current = options()
    run = _Run(
        using=using,
        now=from_micros(server_now(using)),
        dry_run=dry_run,
        stopping=stopping or threading.Event(),
        progress=progress,
    )
    payload_age = current.PRUNE_PAYLOADS_AFTER if payloads_after is None else payloads_after
    age = current.PRUNE_AFTER if after is None else after
    dead_age = current.PRUNE_DEAD_AFTER if dead_after is None else dead_after
    result = Pruned(
        payloads=_payloads(run, payload_age, age),
        delivered=_rows(run, State.DELIVERED, age),
        discarded=_rows(run, State.DISCARDED, age),
        dead=_rows(run, State.DEAD, dead_age),
        orphans=_orphans(run, Attempt) + _orphans(run, Intervention),
        dispatchers=_dispatchers(run),
        breakers=_breakers(run),
    )
    return replace(result, busy=len(run.busy))


# --- settled messages -------------------------------------------------------------------------------------------------


def _payloads(run: _Run, age: float, row_age: float) -> int:
    """Empty payload and headers of delivered messages, but not of those that this run deletes anyway."""
    if not age:
        return 0
    rows = _settled(run, State.DELIVERED, False, age)
    if row_age:
        rows = rows.filter(settled_at__gt=_ago(run, row_age))

    def empty(ids: Sequence[int]) -> None:
        Message.objects.using(run.using).filter(pk__in=ids).update(payload=None, headers=None, payload_pruned=True)

    return _each_batch(run, rows, empty)


def _rows(run: _Run, state: State, age: float) -> int:
    def delete(ids: Sequence[int]) -> None:
        # The ids alone are loaded; attempts, interventions and whatever else points here goes with them.
        Message.objects.using(run.using).filter(pk__in=ids).only("pk").delete()

    return sum(_each_batch(run, _settled(run, state, pruned, age), delete) for pruned in (True, False)) if age else 0


def _settled(run: _Run, state: State, payload_pruned: bool, age: float) -> MessageQuerySet:
    """One range of the index (state, payload_pruned, settled_at), without rows that block a lane."""
    rows: MessageQuerySet = Message.objects.using(run.using).filter(
        state=state, payload_pruned=payload_pruned, settled_at__lte=_ago(run, age), lane=None
    )
    return rows


def _ago(run: _Run, seconds: float) -> datetime:
    """So long before now, but not before the epoch, however long somebody wants to keep things."""
    return max(EPOCH, run.now - timedelta(seconds=min(seconds, CENTURY)))


def _each_batch(run: _Run, rows: MessageQuerySet, change: Callable[[Sequence[int]], None]) -> int:
    if run.dry_run:
        return rows.count()
    done = 0
    floor: datetime | None = None  # passes over what was deleted just now and is not yet vacuumed away
    while run.goes_on:
        started = time.monotonic()
        left = rows if floor is None else rows.filter(settled_at__gte=floor)
        found = list(left.exclude(pk__in=run.busy).order_by("settled_at").values_list(*_SEEN)[:BATCH])
        if not found:
            break
        floor = found[-1][1]
        changed = _change(run, found, change)
        done += changed
        run.progress(changed)
        run.rest(time.monotonic() - started)
    return done


def _change(run: _Run, found: Sequence[tuple[Any, ...]], change: Callable[[Sequence[int]], None]) -> int:
    """Change those of the found rows that are as they were and that nobody has locked; note the others as busy.

    A lock on an index entry is met only by the change itself (a duplicate being staged on MariaDB holds one until it
    commits); then the batch is done again in smaller parts, so that one such row keeps no others.
    """
    ids = [row[0] for row in found]
    if not run.goes_on:
        run.busy.update(ids)
        return 0
    try:
        with impatient_transaction(run.using):
            # By their ids alone: told that lane is NULL, MariaDB would read all rows without one.
            rows = locked(Message.objects.using(run.using).filter(pk__in=ids).order_by("pk"))
            free = [row[0] for row in set(found).intersection(rows.values_list(*_SEEN))]
            if free:
                change(free)
    except DatabaseError as error:
        if not is_race(connections[run.using], error):
            raise
        run.refusals += 1
        if len(ids) == 1:
            run.busy.update(ids)
            return 0
        part = max(1, len(ids) // 10)
        return sum(_change(run, found[at : at + part], change) for at in range(0, len(ids), part))
    run.busy.update(set(ids) - set(free))
    return len(free)


# --- what belongs to nobody -------------------------------------------------------------------------------------------


def _orphans(run: _Run, model: type[models.Model]) -> int:
    """Attempts or interventions of messages that were deleted by hand."""
    manager = model._default_manager.using(run.using)
    there = Message.objects.using(run.using).filter(pk=OuterRef("message_id"))
    done = 0
    for low, high in _windows(run, manager):
        started = time.monotonic()
        orphans = manager.filter(~Exists(there), pk__gt=low, pk__lte=high)
        ids = list(orphans.values_list("pk", flat=True))
        if ids and not run.dry_run:
            again(run.using, manager.filter(pk__in=ids).delete)
            run.progress(len(ids))
        done += len(ids)
        run.rest(time.monotonic() - started)
    return done


def _windows(run: _Run, manager: Any) -> Iterator[tuple[int, int]]:
    low = 0
    while run.goes_on:
        ids = manager.filter(pk__gt=low).order_by("pk").values_list("pk", flat=True)
        high = next(iter(ids[ORPHAN_WINDOW - 1 : ORPHAN_WINDOW]), None) or ids.last()
        if high is None:
            return
        yield low, high
        low = high


def _breakers(run: _Run) -> int:
    """Breakers that nobody probes any more: their handlers are gone, or have had nothing to do."""
    rows = Breaker.objects.using(run.using).filter(probe_at__lt=run.now - FORGET_BREAKER)
    return rows.count() if run.dry_run else again(run.using, rows.delete)[0]


def _dispatchers(run: _Run) -> int:
    rows = Dispatcher.objects.using(run.using).filter(lost_at__lt=run.now - FORGET_DISPATCHER)
    return rows.count() if run.dry_run else again(run.using, rows.delete)[0]


# --- lanes ------------------------------------------------------------------------------------------------------------


def sweep(using: str) -> int:
    """Wake the heads of lanes in which all sleep and nobody would wake them, as rows deleted by hand leave them.

    Looks at `SWEEP_WINDOWS` times `SWEEP_WINDOW` unfinished rows at most, from a random lane on, so that each lane has
    its turn. It locks nothing: a head woken in vain goes back to sleep at its next claim. Returns how many it woke.
    """
    start = random.randrange(-(2**63), 2**63)  # noqa: S311 - fairness, not secrecy
    after, wrapped, woken = start, False, 0
    for _ in range(SWEEP_WINDOWS):
        last, stranded = _stranded(using, after)
        if stranded:
            asleep = Message.objects.using(using).filter(pk__in=stranded, state=State.PENDING, due_at=None)
            woken += again(using, partial(asleep.exclude(lane=None).update, due_at=ServerNow()))
        if last is None and wrapped:
            break
        if last is None:
            after, wrapped = -(2**63), True
        else:
            after = last
        if wrapped and after >= start:
            break
    if woken:
        wakeup.hint(using)
    return woken


def _stranded(using: str, after: int) -> tuple[int | None, list[int]]:
    """The last lane of the window behind lane ``after`` (None: there is none), and its heads that nobody wakes."""
    connection = connections[using]
    table = connection.ops.quote_name(Message._meta.db_table)
    window = f"(SELECT w.lane, w.id FROM {table} w WHERE w.lane > %s ORDER BY w.lane, w.id LIMIT {SWEEP_WINDOW}) AS v"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT MAX(v.lane) FROM {window}", [after])
        (last,) = cursor.fetchone()
        if last is None:
            return None, []
        cursor.execute(
            f"SELECT h.head FROM (SELECT MIN(v.id) AS head FROM {window} GROUP BY v.lane) AS h "
            f"JOIN {table} m ON m.id = h.head WHERE m.state = %s AND m.due_at IS NULL",
            [after, State.PENDING],
        )
        parked = [head for (head,) in cursor.fetchall()]
    in_lane = Message.objects.using(using).filter(lane=OuterRef("lane"))
    alarm = in_lane.filter(Q(due_at__lte=ServerNow()) | Q(lease_token__isnull=False))
    return last, list(Message.objects.using(using).filter(~Exists(alarm), pk__in=parked).values_list("pk", flat=True))
