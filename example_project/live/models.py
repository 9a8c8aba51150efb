"""The mirror: one row per delivery that is shown live. Only a view of what happened, never a source of truth."""

from __future__ import annotations

from django.db import models


class Delivery(models.Model):
    event_key = models.CharField(max_length=255)
    topic = models.CharField(max_length=100)
    handler = models.CharField(max_length=100)
    attempt = models.PositiveIntegerField()
    worker = models.CharField(max_length=120)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return self.event_key

    def as_json(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "handler": self.handler,
            "key": self.event_key,
            "attempt": self.attempt,
            "worker": self.worker,
            "at": self.at.isoformat(),
        }
