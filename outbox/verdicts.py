"""What a handler's result or exception means for its message: the settlement that it asks for. Judging cannot fail."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from django.conf import settings
from django.utils import timezone

from outbox.conf import options
from outbox.errors import describe
from outbox.exceptions import Bury, Discard, HandlerTimeout, NotConfirmed, Retry, Snooze, Unavailable, Verdict
from outbox.leases import Lease, Settlement
from outbox.models import Outcome, Reason, State
from outbox.retries import RetryPolicy

LONGEST_WAIT = 3650 * 86400.0  # seconds; what the clock of no database can be added to is as good as this
RESTLESS = 10  # claims that cost nothing, after which a message that is put off until now has to rest all the same
REST = 1.0  # seconds; without it such a message would keep a process busy for ever
LATEST = datetime(9999, 12, 30, tzinfo=UTC)


def judge(lease: Lease, result: object, duration: float | None) -> Settlement:
    """The settlement that the result of a handler, or what it raised, asks for.

    A verdict or exception that is returned counts as raised. ``False``, and what shows that the handler's body never
    ran (a coroutine, a generator), are failures; anything else is success.
    """
    if result is None:
        return _delivered(lease, duration)
    try:
        return _judge(lease, result, duration)
    except Exception as broken:  # a verdict that cannot be read, or a project's own retry policy that raises
        return _failed(lease, broken, duration, policy=RetryPolicy())


def judge_list(leases: Sequence[Lease], result: object, duration: float | None) -> list[Settlement]:
    """The settlements that the result of a list handler, or what it raised, asks for, in the order of the leases.

    A list or tuple holds one result for each message; a mapping those of some messages, by their ids, and the others
    are delivered; anything else is the result of each. A failure of the whole call is a failure of each.
    """
    try:
        results = _one_for_each(leases, result)
    except Exception as broken:  # a mapping that cannot be read
        results = [broken] * len(leases)
    return [judge(lease, each, duration) for lease, each in zip(leases, results, strict=True)]


def _one_for_each(leases: Sequence[Lease], result: object) -> Sequence[object]:
    name = leases[0].handler.name
    match result:
        case list() | tuple():
            if len(result) == len(leases):
                return result
            result = TypeError(f"Handler {name!r} returned {len(result)} verdicts for {len(leases)} messages.")
        case Mapping():
            unknown = set(result).difference(lease.id for lease in leases)
            if not unknown:
                return [result.get(lease.id) for lease in leases]
            result = TypeError(f"Handler {name!r} returned verdicts for {unknown!r}, which are no ids of its messages.")
    return [result] * len(leases)


def _judge(lease: Lease, result: object, duration: float | None) -> Settlement:
    match result:
        case Retry(after=after):
            return _failed(lease, result, duration, wait=after)
        case Snooze(until=until, for_=wait):
            snoozed = _put_off(lease, result, duration, Outcome.SNOOZED, wait or 0.0)
            return snoozed if until is None else replace(snoozed, until=_instant(until))
        case Unavailable(after=after):
            wait = _patience(lease) if after is None else after
            return _put_off(lease, result, duration, Outcome.UNAVAILABLE, wait)
        case Bury():
            return _final(lease, result, duration, State.DEAD, Outcome.BURIED, Reason.BURIED)
        case Discard():
            return _final(lease, result, duration, State.DISCARDED, Outcome.DISCARDED, Reason.HANDLER)
        case BaseException():
            return _failed(lease, result, duration)
        case False:
            return _failed(lease, NotConfirmed("The handler returned False: not confirmed."), duration)
    mistake = _mistake(result)
    if mistake:
        return _failed(lease, TypeError(f"Handler {lease.handler.name!r} returned {mistake}."), duration)
    return _delivered(lease, duration)


def timed_out(lease: Lease) -> Settlement:
    """The settlement of a handler that did not return in time; the handler is told, its thread cannot be stopped."""
    lease.view.revoke()
    timeout = lease.handler.timeout
    error = HandlerTimeout(f"Handler {lease.handler.name!r} did not return within {timeout:g} s.")
    return replace(judge(lease, error, timeout), outcome=Outcome.TIMED_OUT)


def release(lease: Lease, outcome: Outcome = Outcome.RELEASED, *, wait: float = 0.0) -> Settlement:
    """Give a message back, at no cost to its budget."""
    return Settlement(lease=lease, outcome=outcome, refund=True, wait=wait)


def interrupted(call: Sequence[Lease], *, out_of_time: bool, rest: float) -> list[Settlement]:
    """The settlements of a call that still runs when its process leaves; the handler is told.

    In a lane its messages rest so many seconds, until the process is gone, so that nothing there overlaps; elsewhere
    those that are out of time are settled already.
    """
    ends = []
    for lease in call:
        lease.view.revoke()
        in_lane = lease.message.lane is not None
        if not out_of_time:
            ends.append(release(lease, Outcome.INTERRUPTED, wait=rest if in_lane else 0.0))
        elif in_lane:
            late = timed_out(lease)
            ends.append(replace(late, wait=max(rest, late.wait)))
    return ends


def _delivered(lease: Lease, duration: float | None) -> Settlement:
    return Settlement(lease=lease, outcome=Outcome.DELIVERED, state=State.DELIVERED, duration=duration)


def _failed(
    lease: Lease,
    error: BaseException,
    duration: float | None,
    *,
    wait: float | None = None,
    policy: RetryPolicy | None = None,
) -> Settlement:
    """A failure: again after ``wait`` or the policy's backoff, or dead when the budget is spent."""
    policy = policy or lease.handler.policy
    delay = policy.delay(max(lease.message.spent, 1))
    record = describe(error, topic=lease.message.topic)
    failed = Settlement(lease=lease, outcome=Outcome.FAILED, error=record, cause=error, duration=duration)
    if delay is None:
        return replace(failed, state=State.DEAD, reason=Reason.EXHAUSTED)
    return replace(failed, wait=_bounded(delay if wait is None else wait))


def _put_off(lease: Lease, verdict: Verdict, duration: float | None, outcome: Outcome, wait: float) -> Settlement:
    """Again after ``wait``, at no cost to the budget."""
    least = REST if lease.attempt - lease.message.spent >= RESTLESS else 0.0
    return Settlement(
        lease=lease,
        outcome=outcome,
        wait=_bounded(max(wait, least)),
        refund=True,
        error=describe(verdict, topic=lease.message.topic, with_traceback=False),
        cause=verdict,
        duration=duration,
    )


def _final(
    lease: Lease, verdict: Verdict, duration: float | None, state: State, outcome: Outcome, reason: Reason
) -> Settlement:
    return Settlement(
        lease=lease,
        outcome=outcome,
        state=state,
        reason=reason,
        error=describe(verdict, topic=lease.message.topic, with_traceback=False),
        cause=verdict,
        duration=duration,
    )


def _patience(lease: Lease) -> float:
    """The backoff of a message that costs no budget: by its claims, never None, and no longer than a breaker's pauses.

    In a lane one message alone meets the outage, and all that follow wait for it: no breaker opens to probe for it.
    """
    current = options()
    wait = replace(lease.handler.policy, max_attempts=lease.attempt + 1).delay(lease.attempt) or 0.0
    return min(wait, current.BREAKER_PAUSE_CAP) if current.BREAKER_FAILURES else wait


def _bounded(seconds: float) -> float:
    return min(max(0.0, float(seconds)), LONGEST_WAIT)


def _instant(moment: datetime) -> datetime:
    """The same rule as for staging: naive datetimes are taken only under USE_TZ=False, and are read in TIME_ZONE."""
    if timezone.is_naive(moment):
        if settings.USE_TZ:
            raise ValueError(f"Snooze(until={moment!r}) has no time zone. Make it aware: timezone.make_aware(...).")
        moment = moment.replace(tzinfo=timezone.get_default_timezone())
    return min(moment, LATEST).astimezone(UTC)


def _mistake(result: object) -> str:
    """What is wrong with a result that cannot mean success, or ""."""
    if isinstance(result, type) and issubclass(result, BaseException):
        return f"the class {result.__name__}: raise it, or return an instance"
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine that nobody has run: declare the handler with async def"
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        return f"a {type(result).__name__} that nobody has run: a handler does its work before it returns"
    return ""
