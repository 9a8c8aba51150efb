"""For the test suites of projects: deliver what was staged, on the test's own connection, and assert what was staged.

::

    class CheckoutTests(TestCase):
        def test_a_paid_order_sends_a_receipt(self):
            checkout(cart)                                     # opens atomic() and stages, as in production
            assert_staged("order.paid", {"order_id": 1})
            report = drain()
            assert report.delivered == 1 and len(mail.outbox) == 1

Everything is real: the rows, the claim, the handlers, the settlement; only threads, waiting and commits are missing. In
a ``TestCase`` the block of the test case does not count as the caller's transaction, so the code under test must open
``atomic()`` itself, or `stage` refuses as it would in production.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import router
from django.db.models import F, Max
from django.utils import timezone

from outbox import delivery, payloads
from outbox.database import ServerNow, server_now
from outbox.exceptions import InvalidIntent, Verdict
from outbox.fields import to_micros
from outbox.handlers import Handler, Topic
from outbox.leases import Claimer, Lease, Settled, Settlement, announce, settle
from outbox.models import Message, Outcome, State
from outbox.queues import calls
from outbox.registration import worker_name
from outbox.registry import Registry, registry

LEASE = 3600.0  # seconds; nobody renews it
MOST = 10_000  # attempts of a drain() without limit
FOREVER = timedelta(days=3650)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a `drain` did: attempts by their outcome, and the last exception of each message that failed, by its id.

    ``skipped`` counts results that were thrown away because somebody else had taken the message meanwhile. Messages
    that expired before their claim count as discarded, and what was given back as retried.
    """

    delivered: int = 0
    retried: int = 0
    dead: int = 0
    discarded: int = 0
    snoozed: int = 0
    skipped: int = 0
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def processed(self) -> int:
        return self.delivered + self.retried + self.dead + self.discarded + self.snoozed + self.skipped


def drain(
    *,
    topics: Iterable[str | Topic] | str | Topic | None = None,
    handlers: Iterable[str] | str | None = None,
    using: str | None = None,
    limit: int | None = None,
    until: datetime | timedelta | None = None,
    ignore_delays: bool = False,
    raise_errors: bool = False,
) -> Report:
    """Deliver all due messages in this thread, and those that their handlers stage, until nothing is due.

    ``topics`` and ``handlers`` (names) restrict what is delivered, ``limit`` the attempts. ``until`` also delivers what
    becomes due until then, retries included: instead of waiting, the times of all waiting messages are moved back.
    ``ignore_delays`` goes on until nothing is left. ``raise_errors`` lets the first exception of a handler that is no
    verdict through, once it is settled. List handlers get lists.

    Inside a test's transaction a handler that leaves the transaction broken loses all its writes, and fails; otherwise
    its writes stay even if it fails, as in production. Raises AssertionError when there seems to be no end.
    """
    alias = using or router.db_for_write(Message)
    selected = _selected(topics, handlers)
    claimers = [(Claimer(using=alias, worker=worker_name(), handlers=part), most) for part, most in _parts(selected)]
    routes = [route for each in selected for route in each.routes]
    clock = _Clock(alias, FOREVER if ignore_delays else until)
    report = Report()
    while limit is None or report.processed < limit:
        if report.processed >= MOST:
            raise AssertionError(
                f"drain() gave up after {MOST} attempts ({report}): does a handler stage itself, or snooze for ever? "
                "Pass limit=… to stop earlier."
            )
        found = False
        for claimer, most in claimers:
            left = most if limit is None else min(most, limit - report.processed)
            claim = claimer.claim(left, seconds=LEASE)
            for _, event in claim.events:
                report.discarded += event.outcome == Outcome.DISCARDED
                report.dead += event.died
            for call in calls(claim.leases):
                _deliver(call, report, raise_errors)
            found = found or bool(claim.leases or claim.events or claim.more)
        if not (found or clock.advance(routes)):
            break
    return report


def staged_messages(topic: str | Topic | None = None, *, using: str | None = None) -> list[Message]:
    """One message per staged intent, in the order of staging, whatever became of it; of one topic or of all."""
    rows = Message.objects.using(using or router.db_for_write(Message)).filter(position=0).order_by("pk")
    return list(rows if topic is None else rows.filter(topic=str(topic)))


_ANY: Any = object()


def assert_staged(
    topic: str | Topic,
    payload: Any = _ANY,
    *,
    event_key: str | None = _ANY,
    ordering_key: str | None = _ANY,
    headers: dict[str, Any] = _ANY,
    count: int | None = None,
    using: str | None = None,
) -> list[Message]:
    """Assert that intents of this topic, with all the given parts, were staged: at least one, or exactly ``count``.

    The payload is compared as JSON makes it, and may hold ``mock.ANY``. Returns the messages.
    """
    wanted = {"payload": payload, "event_key": event_key, "ordering_key": ordering_key, "headers": headers}
    wanted = {name: _as_staged(value) for name, value in wanted.items() if value is not _ANY}
    there = staged_messages(topic, using=using)
    found = [row for row in there if all(_part(row, name) == value for name, value in wanted.items())]
    if len(found) != count if count is not None else not found:
        described = "".join(f", {name}={value!r}" for name, value in wanted.items())
        expected = "at least one" if count is None else f"exactly {count}"
        raise AssertionError(
            f"Staged were {len(found)} of {str(topic)!r}{described}; expected: {expected}.\n{_listing(there, using)}"
        )
    return found


def assert_not_staged(topic: str | Topic | None = None, *, using: str | None = None, **parts: Any) -> None:
    """Assert that nothing of this topic (or nothing at all) was staged, or nothing with the given parts.

    The parts are those of `assert_staged`. Raises UnknownTopic for a topic that nobody declares, as a proof of nothing.
    """
    if topic is not None:
        if not staged_messages(topic, using=using):
            registry.check_topic(topic)
        assert_staged(topic, using=using, count=0, **parts)
    elif there := staged_messages(using=using):
        raise AssertionError(f"Nothing should have been staged.\n{_listing(there, using)}")


@contextmanager
def capture_staged(using: str | None = None) -> Iterator[list[Message]]:
    """Collect what is staged inside the block, one message per intent; the list is filled at the end of the block."""
    rows = Message.objects.using(using or router.db_for_write(Message))
    newest = rows.aggregate(newest=Max("pk"))["newest"] or 0
    captured: list[Message] = []
    yield captured
    captured += rows.filter(position=0, pk__gt=newest).order_by("pk")


def isolated_registry() -> AbstractContextManager[Registry]:
    """Forget all topics and handlers inside the block, for tests that register their own."""
    return registry.isolated()


# --- the parts of drain() ---------------------------------------------------------------------------------------------


def _selected(
    topics: Iterable[str | Topic] | str | Topic | None, handlers: Iterable[str] | str | None
) -> Sequence[Handler]:
    chosen = registry.handlers()
    if topics is not None:
        names = {registry.check_topic(each) for each in ([topics] if isinstance(topics, (str, Topic)) else topics)}
        chosen = tuple(each for each in chosen if each.topic in names)
    if handlers is not None:
        wanted = {handlers} if isinstance(handlers, str) else set(handlers)
        unknown = sorted(name for name in wanted if registry.by_name(name) is None)
        if unknown:
            known = ", ".join(sorted(each.name for each in registry.handlers())) or "none"
            raise LookupError(f"No handler is named {', '.join(map(repr, unknown))}. Registered: {known}.")
        chosen = tuple(each for each in chosen if each.name in wanted)
    return chosen


def _parts(handlers: Sequence[Handler]) -> list[tuple[list[Handler], int]]:
    """Handlers that are claimed for together, and how many messages at a time: a list handler by itself."""
    alone = [each for each in handlers if each.size == 1]
    lists = [([each], each.size) for each in handlers if each.size > 1]
    return [(alone, 1), *lists] if alone else lists


def _deliver(call: Sequence[Lease], report: Report, raise_errors: bool) -> None:
    """Let a handler have one message, or a list of them, and note what came of each."""
    ends = delivery.run_list(call)
    done = [each for each in ends if isinstance(each, Settled)]
    done += settle(call[0].using, [each for each in ends if isinstance(each, Settlement)])
    announce(done)
    for settled in done:
        _note(settled, report)
    if raise_errors:
        for settled in done:
            cause = settled.settlement.cause
            if cause is not None and not isinstance(cause, Verdict):
                raise cause


def _note(settled: Settled, report: Report) -> None:
    settlement = settled.settlement
    if settlement.cause is not None and settlement.outcome != Outcome.SNOOZED:
        report.errors[settlement.lease.id] = settlement.cause
    match settlement:
        case _ if settled.status != "settled":
            report.skipped += 1
        case object(state=State.DELIVERED):
            report.delivered += 1
        case object(state=State.DEAD):
            report.dead += 1
        case object(state=State.DISCARDED):
            report.discarded += 1
        case object(outcome=Outcome.SNOOZED | Outcome.UNAVAILABLE):
            report.snoozed += 1
        case _:
            report.retried += 1


class _Clock:
    """Lets time pass for waiting messages by moving their times back, up to a horizon."""

    def __init__(self, alias: str, until: datetime | timedelta | None) -> None:
        self._alias = alias
        self._rows = Message.objects.using(alias).pending().filter(lease_token=None, due_at__gt=ServerNow())
        self._left = 0
        if isinstance(until, datetime):
            moment = until if timezone.is_aware(until) else timezone.make_aware(until)
            self._left = to_micros(moment) - server_now(alias)
        elif until is not None:
            self._left = until // timedelta(microseconds=1)

    def advance(self, routes: Iterable[str]) -> bool:
        """Go to the next moment at which a message of these routes becomes due; False when that is too late."""
        if self._left <= 0:
            return False
        waiting = self._rows.filter(route__in=list(routes)).order_by("due_at")
        first: Any = waiting.values_list("due_at", flat=True).first()
        if first is None:
            return False
        step = max(0, to_micros(first) - server_now(self._alias))
        if step > self._left:
            return False
        self._left -= step
        self._rows.update(due_at=F("due_at") - step, expires_at=F("expires_at") - step)
        return True


# --- the parts of the assertions --------------------------------------------------------------------------------------


def _as_staged(value: Any) -> Any:
    try:
        return json.loads(payloads.encode(value))
    except InvalidIntent:
        return value  # it holds something that only compares, such as mock.ANY


def _part(row: Message, name: str) -> Any:
    value = getattr(row, name)
    return value or {} if name == "headers" else value


def _listing(rows: Sequence[Message], using: str | None) -> str:
    others = sorted({row.topic for row in staged_messages(using=using)} - {row.topic for row in rows})
    lines = [f"  {row.topic} {row.payload!r} (event_key={row.event_key!r})" for row in rows[:10]]
    if len(rows) > 10:
        lines.append(f"  … and {len(rows) - 10} more")
    return "\n".join(["There are:", *lines, f"  and of other topics: {', '.join(others) or 'nothing'}"])
