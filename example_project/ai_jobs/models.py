"""The ordered jobs, and the table that is the job queue where no RabbitMQ is configured."""

from __future__ import annotations

import uuid

from django.db import models


class Job(models.Model):
    class State(models.TextChoices):
        WAITING = "waiting"
        FINISHED = "finished"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    prompt = models.CharField(max_length=200)
    queue = models.CharField(max_length=50, blank=True, help_text="Empty: the default queue.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.prompt


class QueueEntry(models.Model):
    """An entry of the embedded queue. The business id is its primary key: it cannot be there twice."""

    job_id = models.UUIDField(primary_key=True)
    queue = models.CharField(max_length=50)
    body = models.JSONField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return str(self.job_id)
