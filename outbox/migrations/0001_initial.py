import django.db.models.deletion
from django.db import migrations, models

import outbox.fields


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Dispatcher",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("name", outbox.fields.ExactCharField(max_length=120, unique=True, verbose_name="name")),
                ("host", outbox.fields.ExactCharField(default="", max_length=255, verbose_name="host")),
                ("pid", models.BigIntegerField(default=0, verbose_name="process id")),
                ("version", outbox.fields.ExactCharField(default="", max_length=50, verbose_name="version")),
                ("wakeup", outbox.fields.ExactCharField(default="", max_length=20, verbose_name="wake-up")),
                ("handlers", outbox.fields.JsonTextField(null=True, verbose_name="handlers")),
                ("concurrency", models.PositiveIntegerField(default=0, verbose_name="concurrency")),
                ("in_flight", models.PositiveIntegerField(default=0, verbose_name="in flight")),
                ("started_at", outbox.fields.InstantField(verbose_name="started at")),
                ("seen_at", outbox.fields.InstantField(verbose_name="seen at")),
                ("lost_at", outbox.fields.InstantField(verbose_name="believed lost after")),
                ("stopping", models.BooleanField(default=False, verbose_name="stopping")),
            ],
            options={
                "verbose_name": "dispatcher",
                "verbose_name_plural": "dispatchers",
            },
        ),
        migrations.CreateModel(
            name="Breaker",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("handler", outbox.fields.ExactCharField(max_length=100, unique=True, verbose_name="handler")),
                ("opened_at", outbox.fields.InstantField(verbose_name="open since")),
                ("probe_at", outbox.fields.InstantField(verbose_name="next probe at")),
                ("probes", models.PositiveIntegerField(default=0, verbose_name="probes")),
                ("worker", outbox.fields.ExactCharField(default="", max_length=120, verbose_name="opened by")),
                ("probed_by", outbox.fields.ExactCharField(default="", max_length=120, verbose_name="last probed by")),
                ("error_type", outbox.fields.ExactCharField(default="", max_length=255, verbose_name="error type")),
                ("error_code", outbox.fields.ExactCharField(default="", max_length=100, verbose_name="error code")),
                ("error_text", outbox.fields.ExactTextField(default="", verbose_name="error")),
            ],
            options={
                "verbose_name": "open breaker",
                "verbose_name_plural": "open breakers",
                "permissions": [("reset_breaker", "Can close breakers")],
            },
        ),
        migrations.CreateModel(
            name="Message",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("event_key", outbox.fields.ExactCharField(max_length=255, verbose_name="event key")),
                ("position", models.PositiveSmallIntegerField(default=0, verbose_name="position")),
                ("topic", outbox.fields.ExactCharField(max_length=100, verbose_name="topic")),
                ("handler", outbox.fields.ExactCharField(max_length=100, verbose_name="handler")),
                ("route", outbox.fields.ExactCharField(max_length=120, verbose_name="route")),
                ("payload_version", models.PositiveIntegerField(default=1, verbose_name="payload version")),
                ("digest", models.BinaryField(max_length=16, verbose_name="digest")),
                ("ordering_key", outbox.fields.ExactCharField(max_length=255, null=True, verbose_name="ordering key")),
                ("staged_at", outbox.fields.InstantField(verbose_name="staged at")),
                ("deliver_at", outbox.fields.InstantField(null=True, verbose_name="deliver at")),
                ("expires_at", outbox.fields.InstantField(null=True, verbose_name="expires at")),
                (
                    "state",
                    outbox.fields.ExactCharField(
                        choices=[
                            ("pending", "pending"),
                            ("delivered", "delivered"),
                            ("dead", "dead"),
                            ("discarded", "discarded"),
                        ],
                        default="pending",
                        max_length=10,
                        verbose_name="state",
                    ),
                ),
                ("due_at", outbox.fields.InstantField(null=True, verbose_name="due at")),
                ("lane", models.BigIntegerField(null=True, verbose_name="lane")),
                ("holder", models.BigIntegerField(null=True, unique=True, verbose_name="holder")),
                ("lease_token", models.BigIntegerField(null=True, verbose_name="lease token")),
                ("leased_by", outbox.fields.ExactCharField(default="", max_length=120, verbose_name="leased by")),
                ("leased_at", outbox.fields.InstantField(null=True, verbose_name="leased at")),
                ("attempt", models.PositiveIntegerField(default=0, verbose_name="attempt")),
                ("spent", models.PositiveIntegerField(default=0, verbose_name="budget spent")),
                ("lapses", models.PositiveSmallIntegerField(default=0, verbose_name="consecutive lapses")),
                ("settled_at", outbox.fields.InstantField(null=True, verbose_name="settled at")),
                (
                    "reason",
                    outbox.fields.ExactCharField(
                        choices=[
                            ("", ""),
                            ("exhausted", "all attempts failed"),
                            ("crashed", "its worker died or hung each time"),
                            ("buried", "the handler gave up on it"),
                            ("expired", "expired before delivery"),
                            ("handler", "the handler discarded it"),
                            ("operator", "discarded by a person"),
                        ],
                        default="",
                        max_length=20,
                        verbose_name="reason",
                    ),
                ),
                ("error_type", outbox.fields.ExactCharField(default="", max_length=255, verbose_name="error type")),
                ("error_code", outbox.fields.ExactCharField(default="", max_length=100, verbose_name="error code")),
                ("payload_pruned", models.BooleanField(default=False, verbose_name="payload pruned")),
                ("headers", outbox.fields.JsonTextField(null=True, verbose_name="headers")),
                ("payload", outbox.fields.JsonTextField(null=True, verbose_name="payload")),
                ("error_text", outbox.fields.ExactTextField(default="", verbose_name="error")),
            ],
            options={
                "verbose_name": "message",
                "verbose_name_plural": "messages",
                "permissions": [
                    ("view_payload", "Can view payloads and headers"),
                    ("requeue_message", "Can requeue messages and make them due"),
                    ("discard_message", "Can discard messages"),
                ],
                "indexes": [
                    models.Index(fields=["route", "due_at", "id"], name="outbox_message_due"),
                    models.Index(fields=["lane", "id"], name="outbox_message_lane"),
                    models.Index(fields=["state", "payload_pruned", "settled_at"], name="outbox_message_settled"),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("event_key", "position"), name="outbox_message_event_key")
                ],
            },
        ),
        migrations.CreateModel(
            name="Intervention",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "verb",
                    outbox.fields.ExactCharField(
                        choices=[("requeue", "requeue"), ("discard", "discard"), ("make_due", "make due now")],
                        max_length=10,
                        verbose_name="verb",
                    ),
                ),
                ("actor", outbox.fields.ExactCharField(default="", max_length=255, verbose_name="actor")),
                ("note", outbox.fields.ExactTextField(default="", verbose_name="note")),
                ("at", outbox.fields.InstantField(verbose_name="at")),
                (
                    "message",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="interventions",
                        to="outbox.message",
                        verbose_name="message",
                    ),
                ),
            ],
            options={
                "verbose_name": "intervention",
                "verbose_name_plural": "interventions",
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField(verbose_name="number")),
                (
                    "outcome",
                    outbox.fields.ExactCharField(
                        choices=[
                            ("delivered", "delivered"),
                            ("failed", "failed"),
                            ("timed_out", "timed out"),
                            ("snoozed", "snoozed"),
                            ("unavailable", "other side unavailable"),
                            ("buried", "dead"),
                            ("discarded", "discarded"),
                            ("released", "released"),
                            ("interrupted", "interrupted by a stop"),
                            ("lapsed", "lease ran out"),
                            ("crashed", "crashed"),
                        ],
                        max_length=12,
                        verbose_name="outcome",
                    ),
                ),
                ("worker", outbox.fields.ExactCharField(default="", max_length=120, verbose_name="worker")),
                ("started_at", outbox.fields.InstantField(null=True, verbose_name="started at")),
                ("ended_at", outbox.fields.InstantField(verbose_name="ended at")),
                ("error_type", outbox.fields.ExactCharField(default="", max_length=255, verbose_name="error type")),
                ("error_code", outbox.fields.ExactCharField(default="", max_length=100, verbose_name="error code")),
                ("error_text", outbox.fields.ExactTextField(default="", verbose_name="error")),
                ("traceback", outbox.fields.ExactTextField(default="", verbose_name="traceback")),
                (
                    "message",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="attempts",
                        to="outbox.message",
                        verbose_name="message",
                    ),
                ),
            ],
            options={
                "verbose_name": "attempt",
                "verbose_name_plural": "attempts",
                "ordering": ["number", "id"],
            },
        ),
    ]
