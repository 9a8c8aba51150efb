"""The order within a lane: which rows of a lane may be leased, who sleeps behind them, and who is next.

A row of a lane is *due* (a knock: somebody must look at the lane), *waiting* (due later), *leased* (it carries
``holder``), *parked* (due_at NULL, asleep behind another row) or *blocking* (dead under ``dead_head="block"``); once it
blocks nobody its ``lane`` is NULL. Invariants, after every commit: at most one row of a lane is leased, and a parked
row is never alone: some row of its lane is due, leased, waiting or blocking.

A list handler may get a *run*: the head of a lane and the rows next to it, leased by one claim under one token, and
settled by one transaction (`outbox.leases.runs`). Only the head carries ``holder``, so that there is still one claim at
most in a lane; nobody looks at the others but through it.

Rows are parked only under the lock of the row they sleep behind, which the settlement of that row needs, too; so the
wake-up cannot be lost. Lock order: own row, then the head of the same lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Case, F, When

from outbox.database import (
    Among,
    ServerNow,
    Stale,
    Still,
    due_candidates,
    lane_followers,
    lane_heads,
    locked,
    with_clock,
)
from outbox.models import Message, State

LOOKS = 3  # at a lane that changes under our eyes, before the transaction is done again
WINDOW = 2000  # due rows, at most, that are looked through at once for those of a crowded lane
CROWDED = 4  # followers in one pick that make a lane crowded
_TABLE = Message._meta.db_table
_COLUMNS = ("state", "due_at", "lane", "lease_token")

Successors = dict[int, Message | None]


@dataclass(slots=True, kw_only=True)
class Followers:
    """Due rows of a lane that shall sleep behind its target. ``floor``: no row with an id up to this one may."""

    rows: list[Message]
    floor: int


@dataclass(slots=True, kw_only=True)
class Targets:
    """What a claim found in the lanes of its picked rows.

    ``lanes``: those of the picked rows; ``ready``: rows that may be leased; ``asleep``: parked rows that must be woken,
    since nobody will lease them now; ``behind``: by lane the picked rows that sleep behind its target; ``stuck``: lanes
    whose target somebody has locked.
    """

    lanes: Collection[int] = ()
    ready: list[Message] = field(default_factory=list)
    asleep: list[Message] = field(default_factory=list)
    behind: dict[int, Followers] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)


def pending(using: str, ids: Iterable[int]) -> Any:
    """These messages, as far as they are pending; found by their ids alone, so no other row is locked or waited for."""
    return Message.objects.using(using).filter(Among(ids), Still("state", State.PENDING))


def heads(
    using: str, rows: Iterable[int], *, without_self: bool = False, without: Collection[int] = ()
) -> dict[int, tuple[int | None, int | None]]:
    """lane -> (id of its oldest unfinished row, id of the row that holds it), for the lanes of the given rows.

    ``without_self``: the oldest besides the given row; ``without``: besides all of these.
    """
    found = lane_heads(using, _TABLE, rows, without_self=without_self, without=without)
    return {lane: (head, holder) for lane, head, holder in found}


# --- the claim --------------------------------------------------------------------------------------------------------


def targets(using: str, picked: Iterable[Message], routes: Collection[str]) -> Targets:
    """Look at the lanes of rows that are due and locked by us: lock each lane's target and judge it under the lock.

    The target is the leased row, else the oldest one. Behind a leased row everybody sleeps; behind any other only rows
    with a higher id, for a late lower row must never sleep behind a higher one.
    """
    by_lane: dict[int, list[Message]] = {}
    for row in picked:
        assert row.lane is not None
        by_lane.setdefault(row.lane, []).append(row)
    result = Targets(lanes=by_lane.keys())
    if not by_lane:
        return result
    found = heads(using, [rows[0].pk for rows in by_lane.values()])
    obtained = {row.pk: row for rows in by_lane.values() for row in rows}
    wanted = {lane: one for lane, (head, holder) in found.items() if (one := holder or head) is not None}
    missing = [pk for pk in wanted.values() if pk not in obtained]
    if missing:
        look = with_clock(Message.objects.using(using).filter(Among(missing)).order_by("pk"))
        obtained.update({row.pk: row for row in locked(look)})
    for lane, rows in by_lane.items():
        target = obtained.get(wanted[lane])
        if target is None:
            result.stuck.add(lane)
        elif target.lane == lane:  # else it was settled meanwhile; its knocks stay
            _judge(target, rows, routes, result)
    return result


def _judge(target: Message, rows: list[Message], routes: Collection[str], result: Targets) -> None:
    assert target.lane is not None
    due = target.due_at is None or target.due_at <= target.clock
    leased = target.lease_token is not None and not due
    floor = 0 if leased else target.pk
    behind = [row for row in rows if row is not target and row.pk > floor]
    if target.state == State.PENDING and due:
        if target.route in routes:
            result.ready.append(target)
        elif target.due_at is None:
            result.asleep.append(target)  # not ours to run, so it must itself be seen by those who can
    if behind:
        result.behind[target.lane] = Followers(rows=behind, floor=floor)


def followers(using: str, firsts: Collection[Message], known: Collection[Message], count: int) -> list[Message]:
    """The rows next to each of these in its lane, ``count`` of each at most, in order, up to the first we cannot lock.

    ``known``: rows that are locked by us already.
    """
    ids = lane_followers(using, _TABLE, [(row.lane, row.pk) for row in firsts if row.lane is not None], count)
    obtained = {row.pk: row for row in known}
    missing = [pk for _, pk in ids if pk not in obtained]
    if missing:
        look = with_clock(Message.objects.using(using).filter(Among(missing)).order_by("pk"))
        obtained.update({row.pk: row for row in locked(look)})
    ended: set[int] = set()
    found = []
    for lane, pk in ids:
        row = obtained.get(pk)
        if row is None or row.lane != lane:
            ended.add(lane)
        elif lane not in ended:
            found.append(row)
    return found


def park(using: str, behind: dict[int, Followers]) -> None:
    """Put rows to sleep behind the locked targets of their lanes, and more of a lane that is crowded with due rows."""
    rows = [row for each in behind.values() for row in each.rows]
    crowded = {lane: each.rows for lane, each in behind.items() if len(each.rows) >= CROWDED}
    ids = [row.pk for row in rows]
    ids += [pk for pk, lane in _more(using, crowded).items() if pk > behind[lane].floor]
    if ids:
        due = pending(using, ids).filter(Still("holder", None), due_at__lte=ServerNow())
        due.update(lapses=lapses_of(), due_at=None, lease_token=None)


def lapses_of() -> Case:
    """The lapses of a row that loses its lease now, if it still has one: one more.

    Must be assigned before the token: MySQL assigns from left to right, and reads what it has just assigned.
    """
    return Case(When(lease_token=None, then=F("lapses")), default=F("lapses") + 1)


def snooze(using: str, rows: dict[int, list[Message]], micros: int) -> None:
    """Look at these lanes later: one row that stays locked must not fill every claim with its followers' knocks."""
    ids = [row.pk for each in rows.values() for row in each] + list(_more(using, rows))
    if ids:
        pending(using, ids).filter(lease_token=None, due_at__lte=ServerNow()).update(due_at=ServerNow() + micros)


def _more(using: str, crowded: dict[int, list[Message]]) -> dict[int, int]:
    """id -> lane of further due rows of these lanes, out of a bounded window, as far as we can lock them."""
    if not crowded:
        return {}
    known = {row.pk for rows in crowded.values() for row in rows}
    window = due_candidates(using, _TABLE, sorted({row.route for rows in crowded.values() for row in rows}), WINDOW)
    ids = [pk for _, pk, lane, _, _ in window if lane in crowded and pk not in known]
    if not ids:
        return {}
    due = pending(using, ids).filter(lease_token=None, due_at__lte=ServerNow()).order_by("pk")
    return dict(locked(due).values_list("pk", "lane"))


# --- the settlement ---------------------------------------------------------------------------------------------------


def successors(using: str, rows: Mapping[int, Sequence[int]], *, wait: bool, whole: bool = False) -> Successors:
    """By lane the oldest row other than the given ones, locked as those are already; None where there is no other.

    Without ``wait`` a lane is left out when its next row is locked by somebody: it must be tried again, for whoever
    goes on without that lock may rely on a row that is being settled. ``whole``: load all columns.
    """
    found: Successors = {}
    left = dict(rows)
    for _ in range(LOOKS):
        if not left:
            return found
        runs = [pk for ids in left.values() if len(ids) > 1 for pk in ids]
        firsts = [ids[0] for ids in left.values()]
        without = [*firsts, *runs] if runs else ()
        next_of = {lane: head for lane, (head, _) in heads(using, firsts, without_self=True, without=without).items()}
        ids = [head for head in next_of.values() if head is not None]
        look = with_clock(Message.objects.using(using).filter(Among(ids)).order_by("pk"))
        rows_of = locked(look if whole else look.only(*_COLUMNS), skip=not wait)
        obtained = {row.pk: row for row in rows_of} if ids else {}
        changed = {}
        for lane, head in next_of.items():
            row = None if head is None else obtained.get(head)
            if head is None or (row is not None and row.lane == lane):
                found[lane] = row
            elif row is not None or wait:
                changed[lane] = left[lane]
        left = changed
    if left and wait:
        raise Stale(f"lanes kept changing: {sorted(left)}")
    return found


def has_its_turn(head: Message, *, after: int, stays: bool) -> bool:
    """Whether a locked successor may start now that another row of its lane was settled.

    Not while it waits or blocks; and not while the settled row ``stays`` in the lane, and comes first.
    """
    if head.state != State.PENDING or (stays and after < head.pk):
        return False
    return head.due_at is None or head.due_at <= head.clock


def wake(using: str, ids: Collection[int]) -> None:
    """Make parked rows due, so that a claim looks at their lanes."""
    if ids:
        pending(using, ids).filter(due_at=None, lease_token=None).update(due_at=ServerNow())


def advance(using: str, lane: int) -> None:
    """Wake the oldest row of a lane, after the caller changed a row of it in the same transaction.

    Waits for the lock of that row, for the caller relies on what it finds. Raises Stale when the lane keeps changing.
    """
    messages: Any = Message.objects.using(using)
    for _ in range(LOOKS):
        # "lane >= x" for the reason that `lane_heads` gives; the key alone, so that the index alone is read
        first = messages.filter(lane__gte=lane).order_by("lane", "pk").values_list("lane", "pk")[:1]
        ids = [pk for found, pk in first if found == lane]
        if not ids:
            return
        head = with_clock(messages.filter(pk__in=ids, lane=lane)).only(*_COLUMNS, "attempt").first()
        if head is None:
            continue
        if head.lease_token is not None:
            return
        same = messages.filter(
            pk=head.pk, lane=lane, state=head.state, due_at=head.due_at, lease_token=None, attempt=head.attempt
        )
        if head.state == State.PENDING and (head.due_at is None or head.due_at <= head.clock):
            if same.update(due_at=ServerNow() if head.due_at is None else F("due_at")):
                return
        elif list(locked(same.only("pk"), skip=False)):
            return  # waiting or blocking, and so it stays until we have committed
    raise Stale(f"lane {lane} kept changing")
