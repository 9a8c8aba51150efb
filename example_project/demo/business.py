"""What happens in the demo: the transactions of the three systems, of which some roll back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from django.db import transaction

from example_project.ai_jobs import services as ai_jobs
from example_project.demo import books
from example_project.media import services as media
from example_project.tasks import services as tasks
from outbox import PostCommitEffectError

Row = TypeVar("Row")


class ChangeOfMind(Exception):
    """Ends a business transaction without a commit, after everything was written and staged."""


@dataclass(slots=True)
class Tally:
    """How many transactions each system ended in which way, and the event keys that must never be delivered."""

    committed: Counter[str] = field(default_factory=Counter)
    rolled_back: Counter[str] = field(default_factory=Counter)
    void: set[str] = field(default_factory=set)
    at_once: int = 0
    postponed: int = 0


def play(size: int) -> Tally:
    """Let every system work on so many objects. One of the jobs wants a queue that nobody serves: it will die."""
    tally = Tally()
    for number in range(size):
        _media(number, tally)
        _tasks(number, tally)
        _ai_jobs(number, tally, doomed=number == size // 2)
    return tally


def _media(number: int, tally: Tally) -> None:
    item = _begin(tally, "media", number % 8 == 3, lambda: media.request(f"Film {number}"))
    if item is None or number % 8 == 5:
        return
    try:
        result = media.finish_download(item.pk)
        tally.at_once += len(result.completed_effects)
    except PostCommitEffectError:
        tally.postponed += 1  # committed; the notification failed and is left to the dispatchers
    tally.committed["media"] += 1


def _tasks(number: int, tally: Tally) -> None:
    height = 2160 if number % 2 else 1080
    recording = _begin(tally, "tasks", number % 8 == 6, lambda: tasks.import_recording(f"Recording {number}", height))
    if recording is None:
        return
    tasks.finish_probe(recording)
    tally.committed["tasks"] += 1
    if number % 8 == 1:
        tasks.delete(recording)
        tally.committed["tasks"] += 1


def _ai_jobs(number: int, tally: Tally, *, doomed: bool) -> None:
    queue = "experimental" if doomed else ("", "gpu", "batch")[number % 3]
    _begin(tally, "ai_jobs", number % 8 == 2 and not doomed, lambda: ai_jobs.submit(f"Question {number}", queue))


def _begin(tally: Tally, system: str, change_of_mind: bool, write: Callable[[], Row]) -> Row | None:
    """Run a service in a transaction of the caller; on a change of mind all it wrote and staged is undone."""
    try:
        with transaction.atomic():
            row = write()
            if change_of_mind:
                tally.void |= books.intents_of(row).keys()
                raise ChangeOfMind
    except ChangeOfMind:
        tally.rolled_back[system] += 1
        return None
    tally.committed[system] += 1
    return row
