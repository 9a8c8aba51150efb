"""The job queue: RabbitMQ when RABBITMQ_URL is set, a table otherwise. An entry's id is the id of its job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from django.conf import settings

from example_project import world
from example_project.ai_jobs.models import QueueEntry

DEFAULT_QUEUE = "standard"
ALLOWED_QUEUES = ("standard", "gpu", "batch")


class QueueUnreachable(Exception):
    """The queue did not confirm an entry."""


class JobQueue(Protocol):
    def add(self, job_id: str, queue: str, body: dict[str, Any]) -> None:
        """Put a job into a queue; a second time changes nothing. Raises QueueUnreachable."""

    def waiting(self) -> dict[str, str]:
        """The queue of every waiting job, by job id."""

    def forget(self) -> None:
        """Remove what is left outside the database."""


class TableQueue:
    def add(self, job_id: str, queue: str, body: dict[str, Any]) -> None:
        visit(job_id)
        QueueEntry.objects.get_or_create(job_id=job_id, defaults={"queue": queue, "body": body})

    def waiting(self) -> dict[str, str]:
        return {str(job_id): queue for job_id, queue in QueueEntry.objects.values_list("job_id", "queue")}

    def forget(self) -> None:
        pass


class RabbitQueue:
    """RabbitMQ keeps both copies of a repeated message; who takes them tells them apart by the message id."""

    def __init__(self, url: str) -> None:
        self.url = url

    def add(self, job_id: str, queue: str, body: dict[str, Any]) -> None:
        visit(job_id)
        import pika  # only where it is configured

        properties = pika.BasicProperties(message_id=job_id, delivery_mode=pika.DeliveryMode.Persistent)
        try:
            with self.channel() as channel:
                channel.confirm_delivery()
                channel.basic_publish("", self.declare(channel, queue), json.dumps(body).encode(), properties)
        except pika.exceptions.AMQPError as error:
            raise QueueUnreachable(f"RabbitMQ: {error!r}") from error

    def waiting(self) -> dict[str, str]:
        found = {}
        with self.channel() as channel:  # closing it gives back what was taken here
            for queue in ALLOWED_QUEUES:
                name = self.declare(channel, queue)
                while (got := channel.basic_get(name))[0] is not None:
                    found[got[1].message_id] = queue
        return found

    def forget(self) -> None:
        with self.channel() as channel:
            for queue in ALLOWED_QUEUES:
                channel.queue_delete(self.declare(channel, queue))

    def declare(self, channel: Any, queue: str) -> str:
        name = f"{settings.WORLD_NAMESPACE}.{queue}"
        channel.queue_declare(name, durable=True)
        return name

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """A channel on a connection of its own: connections of pika must not be shared by threads."""
        import pika

        connection = pika.BlockingConnection(pika.URLParameters(self.url))
        try:
            yield connection.channel()
        finally:
            connection.close()


def visit(job_id: str) -> None:
    try:
        world.visit("job queue", job_id)
    except world.Unreachable as error:
        raise QueueUnreachable(str(error)) from error


def job_queue() -> JobQueue:
    return RabbitQueue(settings.RABBITMQ_URL) if settings.RABBITMQ_URL else TableQueue()
