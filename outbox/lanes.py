"""The order within a lane: which row of a lane may be leased, who sleeps behind it, and who is next.

A row of a lane is *due* (a knock: somebody must look at the lane), *waiting* (due later), *leased* (it carries
``holder``), *parked* (due_at NULL, asleep behind another row) or *blocking* (dead under ``dead_head="block"``); once it
blocks nobody its ``lane`` is NULL. Invariants, after every commit: at most one row of a lane is leased, and a parked row
is never alone: some row of its lane is due, leased, waiting or blocking.

Rows are parked only under the lock of the row they sleep behind, which the settlement of that row needs, too; so the
wake-up cannot be lost. Lock order: own row, then the head of the same lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from django.db import connections
from django.db.models import F

from outbox.database import ServerNow, Stale, locked
from outbox.models import Message, State

LOOKS = 3  # at a lane that changes under our eyes, before the transaction is done again
PARKING_WINDOW = 500  # rows of a crowded lane that one claim parks at most
CROWDED = 4  # followers in one pick that make a lane crowded
_TABLE = Message._meta.db_table


@dataclass(slots=True)
class Targets:
    """What a claim found in the lanes of its picked rows.

    ``ready``: rows that may be leased; ``asleep``: parked rows that must be woken, since nobody will lease them now;
    ``behind``: for each lane the picked rows that sleep behind its target; ``stuck``: lanes whose target is locked.
    """

    ready: list[Message] = field(default_factory=list)
    asleep: list[Message] = field(default_factory=list)
    behind: dict[int, list[Message]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)


def heads(using: str, rows: Collection[int], *, without_self: bool = False) -> dict[int, tuple[int | None, int | None]]:
    """lane -> (id of its oldest unfinished row, id of its leased row), for the lanes of the given rows.

    ``lane >= x ORDER BY lane, id`` leaves the planner no index but (lane, id), however frequent the lane is.
    """
    connection = connections[using]
    name = connection.ops.quote_name(_TABLE)
    marks = ", ".join(["%s"] * len(rows))
    other = "AND h.id <> p.id" if without_self else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT p.lane, (SELECT CASE WHEN h.lane = p.lane THEN h.id END FROM {name} h "  # noqa: S608
            f"WHERE h.lane >= p.lane {other} ORDER BY h.lane, h.id LIMIT 1), "
            f"(SELECT k.id FROM {name} k WHERE k.holder = p.lane) "
            f"FROM {name} p WHERE p.id IN ({marks}) AND p.lane IS NOT NULL",
            list(rows),
        )
        return {lane: (head, holder) for lane, head, holder in cursor.fetchall()}


def targets(using: str, picked: Iterable[Message], routes: Collection[str]) -> Targets:
    """Look at the lanes of rows that are due and locked by us: lock each lane's target and judge it under the lock.

    The target is the leased row, else the oldest one. Behind a leased row everybody sleeps; behind any other only rows
    with a higher id, for a late lower row must never sleep behind a higher one.
    """
    by_lane: dict[int, list[Message]] = {}
    for row in picked:
        assert row.lane is not None
        by_lane.setdefault(row.lane, []).append(row)
    found = heads(using, [rows[0].pk for rows in by_lane.values()])
    obtained = {row.pk: row for rows in by_lane.values() for row in rows}
    wanted = {lane: holder or head for lane, (head, holder) in found.items() if holder or head}
    missing = [pk for pk in wanted.values() if pk not in obtained]
    if missing:
        look = Message.objects.using(using).filter(pk__in=missing).annotate(clock=ServerNow()).order_by("pk")
        obtained.update({row.pk: row for row in locked(look)})
    result = Targets()
    for lane, rows in by_lane.items():
        target = obtained.get(wanted.get(lane, 0))
        if target is None:
            if lane in wanted:
                result.stuck.add(lane)
        elif target.lane == lane:  # else it was settled meanwhile; its knocks stay
            _judge(target, rows, routes, result)
    return result


def _judge(target: Message, rows: list[Message], routes: Collection[str], result: Targets) -> None:
    assert target.lane is not None
    clock = target.clock
    due = target.due_at is None or target.due_at <= clock
    leased = target.lease_token is not None and not due
    behind = [row for row in rows if row is not target and (leased or row.pk > target.pk)]
    if target.state == State.PENDING and due:
        if target.route in routes:
            result.ready.append(target)
        elif target.due_at is None:
            result.asleep.append(target)  # not ours to run, so it must itself be seen by those who can
    if behind:
        result.behind[target.lane] = behind


def park(using: str, behind: dict[int, list[Message]]) -> None:
    """Put rows to sleep behind the locked targets of their lanes, and more of a lane that is crowded with due rows."""
    ids = [row.pk for rows in behind.values() for row in rows]
    for lane, rows in behind.items():
        if len(rows) >= CROWDED:
            ids += _crowd(using, lane, rows[-1].pk)
    if ids:
        due = Message.objects.using(using).filter(pk__in=ids, state=State.PENDING, due_at__lte=ServerNow(), holder=None)
        due.update(due_at=None, lease_token=None)


def _crowd(using: str, lane: int, after: int) -> list[int]:
    rows = Message.objects.using(using).filter(lane=lane, pk__gt=after).order_by("pk")
    window = list(rows.values_list("pk", flat=True)[:PARKING_WINDOW])
    if not window:
        return []
    due = Message.objects.using(using).filter(pk__in=window, lane=lane, due_at__lte=ServerNow(), holder=None)
    return list(locked(due.order_by("pk")).values_list("pk", flat=True))


def wake(using: str, ids: Collection[int]) -> None:
    """Make parked rows due, so that a claim looks at their lanes."""
    if ids:
        parked = Message.objects.using(using).filter(pk__in=ids, state=State.PENDING, due_at=None, lease_token=None)
        parked.update(due_at=ServerNow())


def snooze(using: str, ids: Collection[int], micros: int) -> None:
    """Look at these lanes later: one row that stays locked must not fill every claim with its followers' knocks."""
    if not ids:
        return
    due = Message.objects.using(using).filter(pk__in=ids, state=State.PENDING, lease_token=None, due_at__lte=ServerNow())
    due.update(due_at=ServerNow() + micros)


def advance(using: str, lane: int) -> None:
    """Wake the oldest row of a lane, after the caller changed a row of it in the same transaction.

    Waits for the lock of that row, for the settlement relies on what it finds. Raises Stale when the lane keeps changing.
    """
    for _ in range(LOOKS):
        first = Message.objects.using(using).filter(lane__gte=lane).order_by("lane", "pk").annotate(clock=ServerNow())
        head = first.only("lane", "state", "due_at", "lease_token", "attempt").first()
        if head is None or head.lane != lane or head.lease_token is not None:
            return
        same = Message.objects.using(using).filter(
            pk=head.pk, lane=lane, state=head.state, due_at=head.due_at, lease_token=None, attempt=head.attempt
        )
        if head.state == State.PENDING and (head.due_at is None or head.due_at <= head.clock):
            if same.update(due_at=ServerNow() if head.due_at is None else F("due_at")):
                return
        elif list(locked(same.only("pk"), skip=False)):
            return  # waiting or blocking, and so it stays until we have committed
    raise Stale(f"lane {lane} kept changing")
