"""From an ordered job to an entry of the right queue. What can never succeed dies at once, with a code to look for."""

from __future__ import annotations

from django.core.exceptions import ValidationError

from example_project.ai_jobs.models import Job
from example_project.ai_jobs.queues import ALLOWED_QUEUES, DEFAULT_QUEUE, QueueUnreachable, job_queue
from outbox import Bury, Retry, RetryPolicy, Topic, handler

JOB_EVENT = Topic("ai_job.event", required=True, description="a job was created or shall run again")
EVENT_TYPES = {"job.created", "job.restarted"}

# 2, 4 seconds; dead at the third failure.
PATIENCE = RetryPolicy(max_attempts=3, base=2, factor=2, jitter=False)


@handler(JOB_EVENT, retry=PATIENCE)
def enqueue(message):
    job = job_of(message.payload)
    name = job.queue or DEFAULT_QUEUE
    if name not in ALLOWED_QUEUES:
        raise Bury(f"Job {job.pk} asks for the queue {name!r}, which nobody serves.", code="QUEUE_NOT_ALLOWED")
    # A finished job goes to the queue as well: its worker knows best whether there is anything left to do.
    try:
        job_queue().add(str(job.pk), name, {"prompt": job.prompt})
    except QueueUnreachable as error:
        raise Retry(str(error), code="QUEUE_UNREACHABLE") from error


def job_of(payload) -> Job:
    event_type, job_id = payload.get("type"), payload.get("jobId")
    if event_type not in EVENT_TYPES:
        raise Bury(f"Nothing is known of events of type {event_type!r}.", code="UNKNOWN_EVENT_TYPE")
    if not job_id:
        raise Bury("The payload names no job.", code="INVALID_PAYLOAD")
    try:
        return Job.objects.get(pk=job_id)
    except ValidationError as error:
        raise Bury(f"{job_id!r} is no id of a job.", code="INVALID_PAYLOAD") from error
    except Job.DoesNotExist as error:
        raise Bury(f"There is no job {job_id}.", code="JOB_NOT_FOUND") from error
