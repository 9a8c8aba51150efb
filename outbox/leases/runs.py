"""Runs: several messages of one lane in one list. One claim leases them, and one settlement settles them, in order.

The head of the lane comes first and holds it. A run is made of blameless messages (`is_blameless`), next to each
other in the lane. It leaves no gap: what comes behind a message that stays in the lane is given back, whatever
its handler made of it, and is handed over again after that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from outbox import lanes
from outbox.handlers import Handler
from outbox.leases.lease import is_blameless
from outbox.leases.outcomes import Row, Settled, Settlement
from outbox.leases.terms import Terms
from outbox.models import Message, Outcome, State

Ours = Sequence[tuple[Settled, Row]]

MOST_LANES = 100  # that one claim looks at for runs


def extend(
    start: Sequence[tuple[Message, Handler]], terms: Terms, known: Sequence[Message]
) -> list[tuple[Message, Handler]]:
    """Let the rows next to the heads of list handlers start with them, as far as there is room.

    ``known``: further rows that this transaction has locked.
    """
    heads: dict[int | None, tuple[Message, Handler]] = {
        row.lane: (row, handler)
        for row, handler in start
        if handler.size > 1 and row.lane is not None and row.lease_token is None and is_blameless(row)
    }
    left = terms.limit - len(start)
    mixed = 0 < terms.start < terms.limit  # some would be charged now, and others later
    if not heads or left <= 0 or mixed or terms.solo or terms.only:
        return list(start)
    room = Counter(terms.room)
    room.subtract(handler.name for _, handler in start)
    firsts = [row for row, _ in list(heads.values())[:MOST_LANES]]
    runs: dict[int | None, list[tuple[Message, Handler]]] = {lane: [one] for lane, one in heads.items()}
    ended: set[int | None] = set()
    for row in lanes.followers(terms.using, firsts, known, -(-left // len(firsts))):
        head, handler = heads[row.lane]
        full = left <= 0 or room[handler.name] <= 0 or len(runs[row.lane]) >= handler.size
        if full or row.lane in ended or not _may_follow(head, row):
            ended.add(row.lane)
            continue
        runs[row.lane].append((row, handler))
        room[handler.name] -= 1
        left -= 1
    return [each for row, handler in start for each in runs.get(row.lane, [(row, handler)])]


def _may_follow(head: Message, row: Message) -> bool:
    free = row.lease_token is None
    due = row.due_at is None or row.due_at <= row.clock
    lasting = row.expires_at is None or row.expires_at > row.clock
    return row.state == State.PENDING and row.route == head.route and due and lasting and free and is_blameless(row)


def in_order(results: Sequence[Settled], ours: Ours, left: Collection[int]) -> Ours:
    """Let no message be settled for good that comes behind one that stays in its lane; returns what is settled now.

    ``left``: ids of messages that are not ours, any more, and still in their lanes. A run is settled as a whole, or
    when a row of it is locked by somebody not yet; what is settled without its head is given back.
    """
    runs: dict[int, list[Settled]] = {}
    for each in results:
        lease = each.settlement.lease
        if lease.handler.size > 1 and lease.message.lane is not None:
            runs.setdefault(lease.message.lane, []).append(each)
    if not runs:
        return ours
    held = {row.lane for _, row in ours if row.holder is not None}
    mine = {each.settlement.lease for each, _ in ours}
    for lane, run in runs.items():
        busy = any(each.status == "busy" for each in run)
        gap = lane not in held
        for each in sorted(run, key=lambda each: each.settlement.lease.id):
            done, is_mine = each.settlement, each.settlement.lease in mine
            if busy and is_mine:
                each.status = "busy"
            elif gap and is_mine and not done.stays:
                each.settlement = Settlement(
                    lease=done.lease, outcome=Outcome.RELEASED, refund=True, duration=done.duration
                )
            gap = gap or done.lease.id in left or (is_mine and done.stays)
    return [(each, row) for each, row in ours if each.status == "settled"]


def end_of_part(settlements: Sequence[Settlement], size: int) -> int:
    """How many of them go into one transaction of about this size: no run is cut."""
    end = size
    while end < len(settlements):
        lane = settlements[end].lease.message.lane
        if lane is None or lane != settlements[end - 1].lease.message.lane:
            break
        end += 1
    return end
