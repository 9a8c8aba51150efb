"""The dispatchers of the demo: real processes, started like everybody starts them, and one of them killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from outbox.models import Dispatcher, Message

# Short, so that what a killed dispatcher held is taken over while somebody watches.
COMMAND = ("outbox_dispatch", "--concurrency", "8", "--lease", "2", "--poll", "0.2", "--grace", "5")


@contextmanager
def dispatchers(count: int, log: Path) -> Iterator[list[subprocess.Popen]]:
    """Start so many dispatchers; what still runs at the end is stopped the gentle way."""
    command = [sys.executable, str(settings.BASE_DIR / "manage.py"), *COMMAND]
    with log.open("ab") as output:
        running = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603 - our own
            for _ in range(count)
        ]
    try:
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def in_the_hands_of(process: subprocess.Popen) -> int:
    """How many messages this dispatcher has leased."""
    names = list(Dispatcher.objects.filter(pid=process.pid).values_list("name", flat=True))
    return Message.objects.in_flight().filter(leased_by__in=names).count()


def kill_one_in_mid_work(processes: list[subprocess.Popen]) -> tuple[subprocess.Popen, int] | None:
    """Kill a dispatcher that holds messages, without a chance to say goodbye. Returns it, and what it left behind."""
    for process in processes:
        if process.poll() is None and in_the_hands_of(process):
            process.kill()
            process.wait()
            return process, in_the_hands_of(process)
    return None
