"""Settle leases: write how their attempts ended, and let the next message of each lane go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial

from django.db import Error, connections

from outbox import lanes
from outbox.conf import options
from outbox.database import Among, ServerNow, again, is_loss, locked, with_clock
from outbox.handlers import Handler, registry
from outbox.leases import runs
from outbox.leases.lease import ALONE_FROM, Lease, draw_token, grant, hold
from outbox.leases.outcomes import Closing, Row, Settled, Settlement, write
from outbox.leases.shortcut import deliver_at_once, go_on_at_once
from outbox.models import Message, Outcome, Reason, State

LONGEST_RUN = 100  # messages of one lane handed over in a row
LONGEST_RUN_SECONDS = 5.0  # then other processes get their chance
LONGEST_WAIT = 100 * 365 * 86_400.0  # seconds: no verdict, however absurd, may exceed what a datetime can hold
PAUSES = (0.0, 0.002, 0.01, 0.03, 0.06)  # before each try: a claim that looks at a lane is gone in a moment


@dataclass(slots=True, kw_only=True)
class _Group:
    """One settlement of several leases, as it is tried (again). ``patient``: wait for locked rows.

    Patience is for transactions of the caller: there nothing can be given up and tried again.
    """

    using: str
    settlements: Sequence[Settlement]
    token: int
    seconds: float
    hand_over: Callable[[Lease], bool] | None
    recheck: bool
    patient: bool
    results: list[Settled] = field(default_factory=list)


def settle(
    using: str,
    settlements: Sequence[Settlement],
    *,
    token: int | None = None,
    seconds: float = 60.0,
    hand_over: Callable[[Lease], bool] | None = None,
    recheck: bool = False,
) -> list[Settled]:
    """Settle a group of leases in one transaction, each fenced on its own. Sends no signals: see `announce`.

    ``hand_over(lease)`` says whether the same worker may go on with the next message of that lease's lane; it is then
    leased under ``token`` for ``seconds``; without it the next one is woken. ``recheck`` after a lost reply to COMMIT,
    with the token of that try: what that commit did is recognised as our own doing.
    """
    token = token or draw_token()
    patient = connections[using].in_atomic_block
    results = {} if recheck else deliver_at_once(using, settlements, patient=patient)
    if hand_over is not None:
        hand_over = cache(hand_over)
        if not (patient or recheck):
            may_follow = partial(_goes_on, hand_over)
            results |= go_on_at_once(using, settlements, token=token, seconds=seconds, may_follow=may_follow)
    left = [place for place in range(len(settlements)) if place not in results]
    for pause in PAUSES:
        if not left:
            break
        if pause:
            time.sleep(pause)
        group = _Group(
            using=using,
            settlements=[settlements[place] for place in left],
            token=token,
            seconds=seconds,
            hand_over=hand_over,
            recheck=recheck,
            patient=patient,
        )
        try:
            again(using, partial(_settle, group))
        except Error as error:
            if not results or is_loss(connections[using], error):
                raise
            break  # a part is committed, and its new leases are held: the rest stays busy, and fails by itself
        results.update(zip(left, group.results, strict=True))
        left = [place for place in left if results[place].status == "busy"]
    return [results.get(place) or Settled(settlement=each, status="busy") for place, each in enumerate(settlements)]


def _settle(group: _Group) -> None:
    group.results = []
    ours = _sort(group)
    in_lanes: dict[int, list[int]] = {}
    for _, row in ours:
        if row.lane is not None:
            in_lanes.setdefault(row.lane, []).append(row.pk)
    successors = lanes.successors(group.using, in_lanes, wait=group.patient, whole=group.hand_over is not None)
    free: list[tuple[Settled, Row]] = []
    closings: list[Closing] = []
    for each, row in ours:
        if row.lane is not None and row.lane not in successors:
            each.status = "busy"
            continue
        closing = _closing(each.settlement, row)
        each.due_at = closing.due_at if closing.state == State.PENDING else None
        free.append((each, row))
        closings.append(closing)
    write(group.using, closings)
    _go_on(group, free, successors)


def _sort(group: _Group) -> Sequence[tuple[Settled, Row]]:
    """Lock the rows and compare the tokens; the result of each lands in ``group.results``, what is ours is returned."""
    messages = Message.objects.using(group.using)
    ids = [each.lease.id for each in group.settlements]
    look = locked(with_clock(messages.filter(Among(ids)).order_by("pk")), skip=not group.patient)
    rows = {row.pk: row for row in map(Row._make, look.values_list(*Row._fields))}
    missing = set(ids).difference(rows)
    there = set(messages.filter(Among(missing)).values_list("pk", flat=True)) if missing else set()
    ours = []
    for given in group.settlements:
        row = rows.get(given.lease.id)
        each = given if row is None else _out_of_patience(given, row)
        result = Settled(settlement=each, status="lost")
        if row is None:
            result.status = "busy" if each.lease.id in there else "lost"
        elif row.state == State.PENDING and row.lease_token == each.lease.token:
            result.status = "settled"
            ours.append((result, row))
            del rows[row.pk]  # the first word stands: a second settlement of the same lease has lost it
        elif group.recheck and _was_ours(each, row):
            result = _recognised(group, each)
        group.results.append(result)
    return runs.in_order(group.results, ours, {row.pk for row in rows.values() if row.lane is not None})


def _out_of_patience(settlement: Settlement, row: Row) -> Settlement:
    """An outage costs no budget, until the message is old; from then on it is a failure like any other."""
    since = row.staged_at if row.deliver_at is None else max(row.staged_at, row.deliver_at)
    if settlement.outcome != Outcome.UNAVAILABLE or (row.clock - since).total_seconds() < options().OUTAGE_PATIENCE:
        return settlement
    if row.spent < settlement.lease.handler.max_attempts:
        return replace(settlement, refund=False)
    return replace(settlement, refund=False, state=State.DEAD, reason=Reason.EXHAUSTED)


def _was_ours(settlement: Settlement, row: Row) -> bool:
    """Whether a row is as our own commit would have left it: not as a claim (a lapse) or an operator leaves it."""
    as_written = (settlement.lease.attempt, settlement.state, settlement.reason)
    return row.lease_token is None and row.lapses == 0 and (row.attempt, row.state, row.reason) == as_written


def _recognised(group: _Group, settlement: Settlement) -> Settled:
    """A settlement that our own lost commit has written, and the lease it may have handed over."""
    result = Settled(settlement=settlement, status="settled")
    if settlement.state == State.PENDING:
        result.due_at = Message.objects.using(group.using).values_list("due_at", flat=True).get(pk=settlement.lease.id)
    lane = settlement.lease.message.lane
    if lane is None:
        return result
    ours = Message.objects.using(group.using).filter(holder=lane, lease_token=group.token, state=State.PENDING)
    for held in locked(ours, skip=False):
        handler = registry.by_route(held.route)
        if handler is not None:
            ours.update(due_at=ServerNow() + int(group.seconds * 1_000_000))
            deadline = time.monotonic() + group.seconds
            lease = hold(group.using, held, handler, deadline=deadline, charged=True)
            lease.follow(settlement.lease)
            result.next = lease
    return result


def _closing(settlement: Settlement, row: Row) -> Closing:
    refund = settlement.refund and settlement.lease.charged and row.spent > 0
    duration = settlement.duration
    again_at = row.clock + timedelta(seconds=min(settlement.wait, LONGEST_WAIT))
    if settlement.until is not None and settlement.until > row.clock:
        again_at = settlement.until
    return Closing(
        pk=row.pk,
        token=settlement.lease.token,
        attempt=settlement.lease.attempt,
        worker=settlement.lease.worker,
        state=settlement.state,
        outcome=settlement.outcome,
        stays=settlement.stays,
        reason=settlement.reason,
        due_at=again_at,
        spent=row.spent - int(refund),
        error=settlement.error,
        started_at=None if duration is None else row.clock - timedelta(seconds=duration),
        ended_at=row.clock,
    )


def _go_on(group: _Group, settled: Sequence[tuple[Settled, Row]], successors: lanes.Successors) -> None:
    """Lease the next message of each lane whose turn has come, or wake it."""
    over: list[tuple[Settled, Message, Handler]] = []
    wake: list[int] = []
    turns: dict[int, bool] = {}
    for each, row in settled:
        head = None if row.lane is None else successors[row.lane]
        if row.lane is not None and head is not None:
            turn = lanes.has_its_turn(head, after=row.pk, stays=each.settlement.stays)
            turns[row.lane] = turn and turns.get(row.lane, True)
    for each, row in settled:
        head = successors[row.lane] if row.lane is not None and turns.pop(row.lane, False) else None
        if head is None:
            continue
        handler = _may_follow(group, each.settlement.lease, head)
        if handler is not None:
            over.append((each, head, handler))
        elif head.due_at is None:
            wake.append(head.pk)
    lanes.wake(group.using, wake)
    pairs = [(head, handler) for _, head, handler in over]
    worker = group.settlements[0].lease.worker
    granted = grant(group.using, pairs, token=group.token, worker=worker, seconds=group.seconds, charged=True)
    for (each, _, _), lease in zip(over, granted, strict=True):
        lease.follow(each.settlement.lease)
        each.next = lease


def _may_follow(group: _Group, lease: Lease, head: Message) -> Handler | None:
    """The handler of a locked, due head, if it may be handed over: what a claim would take, within a bounded run."""
    if group.hand_over is None:
        return None
    handler = registry.by_route(head.route)
    if handler is None or handler.name != lease.handler.name or handler.batch:
        return None  # a list handler gets the next run by a claim
    if head.lease_token is not None or head.lapses >= ALONE_FROM or head.spent >= handler.max_attempts:
        return None
    if head.expires_at is not None and head.expires_at <= head.clock:
        return None
    return handler if _goes_on(group.hand_over, lease) else None


def _goes_on(hand_over: Callable[[Lease], bool], lease: Lease) -> bool:
    """Whether the run of a lane may be longer by one, by its length and by what its worker wants."""
    fresh = lease.run + 1 < LONGEST_RUN and time.monotonic() - lease.run_since < LONGEST_RUN_SECONDS
    return fresh and hand_over(lease)
