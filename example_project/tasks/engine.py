"""The task engine: Redis Streams when REDIS_URL is set, a table otherwise. Both refuse to know a task twice."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any, Protocol

from django.conf import settings

from example_project import world
from example_project.tasks.models import EngineTask
from example_project.tasks.routes import Task

# Remembering the key and adding the task are one step on the server: a client that dies in between loses neither.
ENQUEUE_ONCE = """
if redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[1]) then
    redis.call('XADD', KEYS[2], '*', 'key', ARGV[2], 'trace', ARGV[3], 'task', ARGV[4])
end
"""


class Engine(Protocol):
    def enqueue(self, task: Task, *, idempotency_key: str, trace_id: str) -> None:
        """Add a task, unless one came with the same key before."""

    def tasks(self) -> list[dict[str, Any]]:
        """All tasks, oldest first: their fields, with ``idempotency_key`` and ``trace_id``."""

    def forget(self) -> None:
        """Remove what is left outside the database."""


class TableEngine:
    def enqueue(self, task: Task, *, idempotency_key: str, trace_id: str) -> None:
        world.visit("task engine", idempotency_key)
        defaults = {**asdict(task), "trace_id": trace_id}
        EngineTask.objects.get_or_create(idempotency_key=idempotency_key, defaults=defaults)

    def tasks(self) -> list[dict[str, Any]]:
        fields = ("idempotency_key", "name", "input", "trace_id", "priority")
        return list(EngineTask.objects.order_by("pk").values(*fields))

    def forget(self) -> None:
        pass


class RedisEngine:
    REMEMBER = 30 * 86400  # seconds: as long as the outbox remembers an event key

    def __init__(self, url: str) -> None:
        import redis  # only where it is configured

        self.client = redis.Redis.from_url(url, decode_responses=True)
        self._enqueue_once = self.client.register_script(ENQUEUE_ONCE)

    @property
    def stream(self) -> str:
        return f"{settings.WORLD_NAMESPACE}:tasks"

    def enqueue(self, task: Task, *, idempotency_key: str, trace_id: str) -> None:
        world.visit("task engine", idempotency_key)
        self._enqueue_once(
            keys=[f"{self.stream}:{idempotency_key}", self.stream],
            args=[self.REMEMBER, idempotency_key, trace_id, json.dumps(asdict(task))],
        )

    def tasks(self) -> list[dict[str, Any]]:
        return [
            {**json.loads(entry["task"]), "idempotency_key": entry["key"], "trace_id": entry["trace"]}
            for _, entry in self.client.xrange(self.stream)
        ]

    def forget(self) -> None:
        keys = list(self.client.scan_iter(f"{self.stream}*"))
        if keys:
            self.client.delete(*keys)


def engine() -> Engine:
    return redis_engine(settings.REDIS_URL) if settings.REDIS_URL else TableEngine()


@cache
def redis_engine(url: str) -> RedisEngine:
    """One client per process: its connections are shared by all threads."""
    return RedisEngine(url)
