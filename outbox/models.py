"""The rows: a message, its attempts, what people did to it, and the dispatchers; and in which state a message is.

::

                   stage            claim, renew               settle
    (nothing) ─────────────▶ pending ─────────▶ pending + lease ─────────▶ delivered
                               ▲  ▲                   │                    dead
                 requeue       │  └───────────────────┘                    discarded
          dead, discarded ─────┘   retry, snooze, release,
                                   or the lease runs out

Only ``state`` is stored. *Due, scheduled, retrying, in flight, waiting* are derived from ``due_at``, the lease token
and ``spent`` by the querysets below. This module does not write: `leases`, `lanes`, `operations`, `retention` do.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from outbox.database import ServerNow
from outbox.fields import ExactCharField, ExactTextField, InstantField, JsonTextField
from outbox.texts import one_line


class State(models.TextChoices):
    PENDING = "pending", _("pending")
    DELIVERED = "delivered", _("delivered")
    DEAD = "dead", _("dead")
    DISCARDED = "discarded", _("discarded")


class Outcome(models.TextChoices):
    """How an attempt ended."""

    DELIVERED = "delivered", _("delivered")
    FAILED = "failed", _("failed")
    TIMED_OUT = "timed_out", _("timed out")
    SNOOZED = "snoozed", _("snoozed")
    UNAVAILABLE = "unavailable", _("other side unavailable")
    BURIED = "buried", _("dead")
    DISCARDED = "discarded", _("discarded")
    RELEASED = "released", _("released")
    INTERRUPTED = "interrupted", _("interrupted by a stop")
    LAPSED = "lapsed", _("lease ran out")
    CRASHED = "crashed", _("crashed")


class Reason(models.TextChoices):
    """Why a message is dead or discarded."""

    NONE = "", ""
    EXHAUSTED = "exhausted", _("all attempts failed")
    CRASHED = "crashed", _("its worker died or hung each time")
    BURIED = "buried", _("the handler gave up on it")
    EXPIRED = "expired", _("expired before delivery")
    HANDLER = "handler", _("the handler discarded it")
    OPERATOR = "operator", _("discarded by a person")


class MessageQuerySet(models.QuerySet["Message"]):
    """Adjectives for messages; each pending message is in exactly one of the five live ones."""

    def pending(self) -> MessageQuerySet:
        return self.filter(state=State.PENDING)

    def due(self) -> MessageQuerySet:
        """Claimable now, expired leases included."""
        return self.pending().filter(due_at__lte=ServerNow())

    def scheduled(self) -> MessageQuerySet:
        """Not due yet, by its delivery time or a snooze, and no attempt has failed."""
        return self.pending().filter(due_at__gt=ServerNow(), lease_token=None, spent=0)

    def retrying(self) -> MessageQuerySet:
        """Failed, and waiting for the end of its backoff."""
        return self.pending().filter(due_at__gt=ServerNow(), lease_token=None, spent__gt=0)

    def in_flight(self) -> MessageQuerySet:
        """Leased to a dispatcher."""
        return self.pending().filter(due_at__gt=ServerNow(), lease_token__isnull=False)

    def waiting(self) -> MessageQuerySet:
        """Parked behind an earlier message of its lane."""
        return self.pending().filter(due_at=None)

    def delivered(self) -> MessageQuerySet:
        return self.filter(state=State.DELIVERED)

    def dead(self) -> MessageQuerySet:
        return self.filter(state=State.DEAD)

    def discarded(self) -> MessageQuerySet:
        return self.filter(state=State.DISCARDED)

    def unroutable(self) -> MessageQuerySet:
        """Pending messages that no handler of this process takes."""
        from outbox.handlers import registry  # deferred: handlers and models are of one layer

        routes = [each for handler in registry.handlers() for each in handler.routes]
        return self.pending().exclude(route__in=routes)


class Message(models.Model):
    """One staged intent for one handler."""

    id = models.BigAutoField(primary_key=True)
    event_key = ExactCharField(_("event key"), max_length=255)
    position = models.PositiveSmallIntegerField(_("position"), default=0)
    topic = ExactCharField(_("topic"), max_length=100)
    handler = ExactCharField(_("handler"), max_length=100)
    route = ExactCharField(_("route"), max_length=120)
    payload_version = models.PositiveIntegerField(_("payload version"), default=1)
    digest = models.BinaryField(_("digest"), max_length=16)
    ordering_key = ExactCharField(_("ordering key"), max_length=255, null=True)
    staged_at = InstantField(_("staged at"))
    deliver_at = InstantField(_("deliver at"), null=True)
    expires_at = InstantField(_("expires at"), null=True)

    state = ExactCharField(_("state"), max_length=10, choices=State.choices, default=State.PENDING)
    due_at = InstantField(_("due at"), null=True)
    lane = models.BigIntegerField(_("lane"), null=True)
    holder = models.BigIntegerField(_("holder"), null=True, unique=True)
    lease_token = models.BigIntegerField(_("lease token"), null=True)
    leased_by = ExactCharField(_("leased by"), max_length=120, default="")
    leased_at = InstantField(_("leased at"), null=True)
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    spent = models.PositiveIntegerField(_("budget spent"), default=0)
    lapses = models.PositiveSmallIntegerField(_("consecutive lapses"), default=0)

    settled_at = InstantField(_("settled at"), null=True)
    reason = ExactCharField(_("reason"), max_length=20, choices=Reason.choices, default="")
    error_type = ExactCharField(_("error type"), max_length=255, default="")
    error_code = ExactCharField(_("error code"), max_length=100, default="")
    payload_pruned = models.BooleanField(_("payload pruned"), default=False)

    # Last, since SQLite reads a row from its start: what is decided by must not lie behind a megabyte of payload.
    headers = JsonTextField(_("headers"), null=True)
    payload = JsonTextField(_("payload"), null=True)
    error_text = ExactTextField(_("error"), default="")

    objects: ClassVar[models.Manager[Any]] = MessageQuerySet.as_manager()

    if TYPE_CHECKING:
        clock: datetime  # the server's, where a query annotates it

    class Meta:
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        permissions: ClassVar = [
            ("view_payload", "Can view payloads and headers"),
            ("requeue_message", "Can requeue messages and make them due"),
            ("discard_message", "Can discard messages"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event_key", "position"], name="outbox_message_event_key"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["route", "due_at", "id"], name="outbox_message_due"),
            models.Index(fields=["lane", "id"], name="outbox_message_lane"),
            models.Index(fields=["state", "payload_pruned", "settled_at"], name="outbox_message_settled"),
        ]

    def __str__(self) -> str:
        return one_line(f"{self.topic} {self.event_key}")  # the admin's log and breadcrumbs show it as it is


class Attempt(models.Model):
    """How one claim ended; written for every outcome except a success at the first attempt."""

    id = models.BigAutoField(primary_key=True)
    # No constraint in the database: rows deleted by hand must not be stopped, nor a settlement wait for its parent row.
    message = models.ForeignKey(
        Message, models.CASCADE, related_name="attempts", db_constraint=False, verbose_name=_("message")
    )
    number = models.PositiveIntegerField(pgettext_lazy("of an attempt", "number"))
    outcome = ExactCharField(_("outcome"), max_length=12, choices=Outcome.choices)
    worker = ExactCharField(_("worker"), max_length=120, default="")
    started_at = InstantField(_("started at"), null=True)
    ended_at = InstantField(_("ended at"))
    error_type = ExactCharField(_("error type"), max_length=255, default="")
    error_code = ExactCharField(_("error code"), max_length=100, default="")
    error_text = ExactTextField(_("error"), default="")
    traceback = ExactTextField(_("traceback"), default="")

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering: ClassVar = ["number", "id"]

    def __str__(self) -> str:
        return f"#{self.number} {self.outcome}"


class Verb(models.TextChoices):
    """What people do to messages."""

    REQUEUE = "requeue", _("requeue")
    DISCARD = "discard", _("discard")
    MAKE_DUE = "make_due", _("make due now")


class Intervention(models.Model):
    """Who did what to a message, and when: the audit trail of `operations`."""

    id = models.BigAutoField(primary_key=True)
    message = models.ForeignKey(
        Message, models.CASCADE, related_name="interventions", db_constraint=False, verbose_name=_("message")
    )
    verb = ExactCharField(_("verb"), max_length=10, choices=Verb.choices)
    actor = ExactCharField(_("actor"), max_length=255, default="")
    note = ExactTextField(_("note"), default="")
    at = InstantField(_("at"))

    class Meta:
        verbose_name = _("intervention")
        verbose_name_plural = _("interventions")
        ordering: ClassVar = ["id"]

    def __str__(self) -> str:
        return one_line(f"{self.verb} {self.actor}")


class Dispatcher(models.Model):
    """A dispatcher process that reported lately. Correctness never depends on this row."""

    id = models.BigAutoField(primary_key=True)
    name = ExactCharField(_("name"), max_length=120, unique=True)
    host = ExactCharField(_("host"), max_length=255, default="")
    pid = models.BigIntegerField(_("process id"), default=0)
    version = ExactCharField(_("version"), max_length=50, default="")
    wakeup = ExactCharField(_("wake-up"), max_length=20, default="")
    handlers = JsonTextField(_("handlers"), null=True)
    concurrency = models.PositiveIntegerField(_("concurrency"), default=0)
    in_flight = models.PositiveIntegerField(_("in flight"), default=0)
    started_at = InstantField(_("started at"))
    seen_at = InstantField(_("seen at"))
    lost_at = InstantField(_("believed lost after"))
    stopping = models.BooleanField(_("stopping"), default=False)

    class Meta:
        verbose_name = _("dispatcher")
        verbose_name_plural = _("dispatchers")

    def __str__(self) -> str:
        return one_line(self.name)


class Breaker(models.Model):
    """A handler whose other side is down: until the row is gone, its messages are left alone but for a probe."""

    id = models.BigAutoField(primary_key=True)
    handler = ExactCharField(_("handler"), max_length=100, unique=True)
    opened_at = InstantField(_("open since"))
    probe_at = InstantField(_("next probe at"))
    probes = models.PositiveIntegerField(_("probes"), default=0)
    worker = ExactCharField(_("opened by"), max_length=120, default="")
    probed_by = ExactCharField(_("last probed by"), max_length=120, default="")
    error_type = ExactCharField(_("error type"), max_length=255, default="")
    error_code = ExactCharField(_("error code"), max_length=100, default="")
    error_text = ExactTextField(_("error"), default="")

    if TYPE_CHECKING:
        clock: datetime

    class Meta:
        verbose_name = _("open breaker")
        verbose_name_plural = _("open breakers")
        permissions: ClassVar = [("reset_breaker", "Can close breakers")]

    def __str__(self) -> str:
        return one_line(self.handler)
