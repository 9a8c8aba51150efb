"""The transactions of the job service."""

from __future__ import annotations

from django.db import transaction

from example_project.ai_jobs.models import Job
from outbox import stage


def submit(prompt: str, queue: str = "") -> Job:
    """Order a job."""
    with transaction.atomic():
        job = Job.objects.create(prompt=prompt, queue=queue)
        stage("ai_job.event", {"type": "job.created", "jobId": str(job.pk)}, event_key=f"job:{job.pk}:created")
    return job


def restart(job: Job) -> None:
    """Order it again. Without an event key every restart is an event of its own; the queue knows the job by its id."""
    with transaction.atomic():
        job.state = Job.State.WAITING
        job.save(update_fields=["state"])
        stage("ai_job.event", {"type": "job.restarted", "jobId": str(job.pk)})
