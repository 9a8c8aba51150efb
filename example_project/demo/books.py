"""The proof: what the business rows ask for, compared with what arrived outside the outbox's tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from example_project import world
from example_project.ai_jobs.models import Job
from example_project.ai_jobs.queues import job_queue
from example_project.media import topics
from example_project.media.models import Item
from example_project.media.services import key as key_of
from example_project.tasks.engine import engine
from example_project.tasks.models import Recording
from example_project.tasks.routes import ROUTES
from example_project.tasks.services import facts
from outbox.models import Message

SYSTEMS = {"media": Item, "tasks": Recording, "ai_jobs": Job}
OUTSIDE = {"media": "journal", "tasks": "task engine", "ai_jobs": "job queue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One system: which event keys shall have an effect outside, which had one, and which are dead.

    ``unasked`` ones had an effect, though no committed row asks for it.
    """

    system: str
    committed: set[str]
    arrived: Counter[str]
    dead: set[str]
    unasked: set[str] = field(default_factory=set)
    without_effect: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)

    @property
    def missing(self) -> set[str]:
        return self.committed - self.arrived.keys() - self.dead

    @property
    def repeated(self) -> int:
        return self.arrived.total() - len(self.arrived)

    @property
    def balanced(self) -> bool:
        return not (self.missing or self.unasked or self.unsettled)


def audit(since: datetime, first_message: int) -> list[Account]:
    """The accounts of all rows created since then; of the outbox only what is dead is taken at its word."""
    states = dict(Message.objects.filter(pk__gt=first_message).values_list("event_key", "state"))
    return [_account(system, since, states) for system in SYSTEMS]


def _account(system: str, since: datetime, states: dict[str, str]) -> Account:
    rows = list(SYSTEMS[system].objects.all())
    asked = {key: has_effect for row in rows if row.created_at >= since for key, has_effect in intents_of(row).items()}
    earlier = {key for row in rows if row.created_at < since for key in intents_of(row)}
    without_effect = {key for key, has_effect in asked.items() if not has_effect}
    found = arrived(system)
    return Account(
        system=system,
        committed=asked.keys() - without_effect,
        arrived=Counter({key: count for key, count in found.items() if key in asked}),
        dead={key for key in asked if states.get(key) == "dead"},
        unasked=found.keys() - asked.keys() - earlier,
        without_effect=without_effect,
        unsettled={key for key in without_effect if states.get(key) not in ("delivered", "dead")},
    )


def intents_of(row: Item | Recording | Job) -> dict[str, bool]:
    """The event keys that a business row stands for in its present state, and whether each has an effect outside."""
    if isinstance(row, Item):
        happened = [topics.REQUESTED]
        if row.state != Item.State.REQUESTED:
            happened += [topics.DOWNLOAD_FINISHED, *topics.EFFECTS]
        if row.state == Item.State.REMOVED:
            happened += [topics.REMOVED]
        return {key_of(topic, row): True for topic in happened}
    if isinstance(row, Recording):
        return _intents_of_recording(row)
    return {f"job:{row.pk}:created": True}


def _intents_of_recording(row: Recording) -> dict[str, bool]:
    happened = ["imported"]
    if row.state != Recording.State.IMPORTED:
        happened += [f"progress:{percent}" for percent in (25, 50, 75, 100)] + ["probed"]
    if row.state == Recording.State.DELETED:
        happened += ["deleted"]
    # Some events become no task: the routes know.
    return {
        f"recording:{row.pk}:{name}": ROUTES[f"recording.{name.partition(':')[0]}"](facts(row)) is not None
        for name in happened
    }


def arrived(system: str) -> Counter[str]:
    """What is there outside the outbox: event keys, and how often each."""
    if system == "media":
        return Counter(line["key"] for line in world.received())
    if system == "tasks":
        return Counter(task["idempotency_key"] for task in engine().tasks())
    return Counter(f"job:{job_id}:created" for job_id in job_queue().waiting())
