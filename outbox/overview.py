"""How much is where: the numbers that `outbox_status`, the system checks and the admin share.

Each function is a query or two, and each costs what is unfinished or dead, never what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import Error, connections
from django.db.models import Count, Min, Q

from outbox.database import ServerNow, server_now, with_clock
from outbox.fields import from_micros
from outbox.handlers import registry
from outbox.models import Breaker, Dispatcher, Message, State
from outbox.redaction import redacted

MANY = 1000  # due messages of a database that are counted to say that it is abandoned
COUNTS = ("due", "scheduled", "retrying", "in_flight", "waiting", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Messages by where they are. ``unroutable`` ones are pending, too: no handler of this process takes them.

    ``delivered`` counts those of the period that was asked for, else it is None; ``oldest_due_at`` is None when nothing
    is due.
    """

    due: int = 0
    scheduled: int = 0
    retrying: int = 0
    in_flight: int = 0
    waiting: int = 0
    dead: int = 0
    unroutable: int = 0
    delivered: int | None = None
    oldest_due_at: datetime | None = None

    def __add__(self, other: Counts) -> Counts:
        oldest = [each for each in (self.oldest_due_at, other.oldest_due_at) if each is not None]
        delivered = [each for each in (self.delivered, other.delivered) if each is not None]
        return Counts(
            **{name: getattr(self, name) + getattr(other, name) for name in (*COUNTS, "unroutable")},
            delivered=sum(delivered) if delivered else None,
            oldest_due_at=min(oldest) if oldest else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One database as of ``now``: counts by topic (declared ones always) and unroutable route, and who dispatches."""

    using: str
    now: datetime
    topics: dict[str, Counts]
    unroutable: dict[str, int]
    dispatchers: list[Dispatcher] = field(default_factory=list)
    breakers: list[Breaker] = field(default_factory=list)

    @property
    def total(self) -> Counts:
        return sum(self.topics.values(), Counts())

    def age(self, counts: Counts) -> float | None:
        """Seconds for which the oldest due message has been due."""
        return None if counts.oldest_due_at is None else max(0.0, (self.now - counts.oldest_due_at).total_seconds())


def overview(using: str, *, delivered_within: float = 0.0) -> Overview:
    """The numbers of one database; deliveries of the last ``delivered_within`` seconds are counted if it is not 0."""
    now = from_micros(server_now(using))
    topics: dict[str, Counts] = dict.fromkeys(registry.topics(), Counts())
    unroutable: dict[str, int] = {}
    for row in _live_and_dead(using):
        pending = row["pending"]
        stranded = pending if registry.by_route(row["route"]) is None else 0
        if stranded:
            unroutable[row["route"]] = unroutable.get(row["route"], 0) + stranded
        values = {name: row[f"n_{name}"] for name in COUNTS}
        counts = Counts(**values, unroutable=stranded, oldest_due_at=row["oldest_due_at"])
        topics[row["topic"]] = topics.get(row["topic"], Counts()) + counts
    if delivered_within:
        recent = _delivered_since(using, now - timedelta(seconds=delivered_within))
        for topic in {*topics, *recent}:
            topics[topic] = topics.get(topic, Counts()) + Counts(delivered=recent.get(topic, 0))
    return Overview(
        using=using,
        now=now,
        topics=dict(sorted(topics.items())),
        unroutable=dict(sorted(unroutable.items())),
        dispatchers=live_dispatchers(using),
        breakers=open_breakers(using),
    )


def _live_and_dead(using: str) -> Any:
    """Counts by topic and route. The index that begins with the state keeps delivered rows out."""
    pending = Q(state=State.PENDING)
    ahead, free = Q(due_at__gt=ServerNow()), Q(lease_token=None)
    due = pending & Q(due_at__lte=ServerNow())
    return (
        Message.objects.using(using)
        .filter(state__in=(State.PENDING, State.DEAD))
        .order_by()
        .values("topic", "route")
        .annotate(
            pending=Count("pk", filter=pending),
            n_due=Count("pk", filter=due),
            n_scheduled=Count("pk", filter=pending & ahead & free & Q(spent=0)),
            n_retrying=Count("pk", filter=pending & ahead & free & Q(spent__gt=0)),
            n_in_flight=Count("pk", filter=pending & ahead & ~free),
            n_waiting=Count("pk", filter=pending & Q(due_at=None)),
            n_dead=Count("pk", filter=Q(state=State.DEAD)),
            oldest_due_at=Min("due_at", filter=due),
        )
    )


def _delivered_since(using: str, since: datetime) -> dict[str, int]:
    counts: dict[str, int] = {}
    for payload_pruned in (False, True):  # each a range of the index (state, payload_pruned, settled_at)
        rows = Message.objects.using(using).filter(
            state=State.DELIVERED, payload_pruned=payload_pruned, settled_at__gte=since
        )
        for topic, n in rows.order_by().values_list("topic").annotate(n=Count("pk")):
            counts[topic] = counts.get(topic, 0) + n
    return counts


def live_dispatchers(using: str) -> list[Dispatcher]:
    """Dispatchers that reported lately, those that are stopping included, oldest first."""
    return list(Dispatcher.objects.using(using).filter(lost_at__gt=ServerNow()).order_by("started_at", "pk"))


def open_breakers(using: str) -> list[Breaker]:
    """Breakers of handlers whose other side is down, by the handlers' names."""
    return list(with_clock(Breaker.objects.using(using).order_by("handler")))


def serves(dispatcher: Dispatcher, message: Message) -> bool:
    """Whether a dispatcher runs the handler of this message, by that handler's present name or a former one."""
    handler = registry.by_route(message.route)
    names = {message.handler, handler.name if handler else message.handler}
    return not dispatcher.stopping and not names.isdisjoint(dispatcher.handlers or [])


# --- all databases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """One database of the project that has the outbox's tables: how many messages wait for how many dispatchers.

    ``due`` is counted to `MANY` only; ``error`` is set where the database could not be asked.
    """

    name: str
    due: int = 0
    dispatchers: int = 0
    error: str = ""

    @property
    def due_text(self) -> str:
        return f"{self.due:,}" if self.due < MANY else f"{MANY:,} or more"

    @property
    def is_abandoned(self) -> bool:
        """Whether messages are due here and no live dispatcher looks at this database."""
        return self.due > 0 and self.dispatchers == 0


def aliases(names: Iterable[str] | None = None) -> list[Alias]:
    """Those databases (of all in the project) that have the outbox's tables, or that do not answer."""
    found = (_alias(name) for name in (connections if names is None else names))
    return [alias for alias in found if alias is not None]


def _alias(name: str) -> Alias | None:
    try:
        if not has_tables(name):
            return None
        dispatchers = Dispatcher.objects.using(name).filter(lost_at__gt=ServerNow(), stopping=False).count()
        due = len(Message.objects.using(name).due().values_list("pk", flat=True)[:MANY])
        return Alias(name=name, due=due, dispatchers=dispatchers)
    except Error as error:
        return Alias(name=name, error=redacted(f"{type(error).__name__}: {error}", "error"))


def has_tables(using: str) -> bool:
    """Whether the outbox was migrated in this database."""
    connection = connections[using]
    with connection.cursor() as cursor:
        return {Message._meta.db_table, Dispatcher._meta.db_table} <= set(connection.introspection.table_names(cursor))
