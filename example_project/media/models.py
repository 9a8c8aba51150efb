"""What the media manager keeps: the items of its library."""

from __future__ import annotations

import uuid

from django.db import models


class Item(models.Model):
    class State(models.TextChoices):
        REQUESTED = "requested"
        AVAILABLE = "available"
        REMOVED = "removed"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    title = models.CharField(max_length=200)
    state = models.CharField(max_length=10, choices=State.choices, default=State.REQUESTED)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.title
