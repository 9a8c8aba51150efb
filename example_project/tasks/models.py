"""The recordings of the video tool, and the table that is its task engine where no Redis is configured."""

from __future__ import annotations

import uuid

from django.db import models


class Recording(models.Model):
    class State(models.TextChoices):
        IMPORTED = "imported"
        PROBED = "probed"
        DELETED = "deleted"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    title = models.CharField(max_length=200)
    height = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.IMPORTED)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.title

    @property
    def is_uhd(self) -> bool:
        return self.height >= 2160


class EngineTask(models.Model):
    """A task of the embedded engine."""

    idempotency_key = models.CharField(max_length=255, unique=True)
    name = models.CharField(max_length=50)
    input = models.JSONField()
    trace_id = models.CharField(max_length=64)
    priority = models.IntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name
