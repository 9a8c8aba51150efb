"""What a run is made of: its length and rates, the topics and their handlers' options. The plan follows from these."""

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "CHAOS_TERMS"

LEASE = 4.0
POLL = 0.25
GRACE = 2.0
CONCURRENCY = 3
BATCH = 20  # a process takes that many with it when it is killed
TIMEOUT = 1.0  # of the slow topics
BUDGET = 25  # of all topics but the doomed ones
DOOMED_BUDGET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """``kill_every`` and ``restart_every`` are means in seconds; 0: never."""

    seed: int
    database: str  # postgres, mariadb or sqlite
    seconds: float
    messages: int
    kill_every: float
    restart_every: float

    @property
    def has_server(self):
        return self.database != "sqlite"

    def dump(self):
        return json.dumps(asdict(self))


def load(text=None):
    return Terms(**json.loads(text or os.environ[VARIABLE]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTerms:
    """How the messages of a topic are handled, and which part of all messages they are."""

    weight: int
    lane: bool = False
    atomic: bool = False
    timeout: float | None = None
    budget: int = BUDGET


TOPICS = {
    "work": TopicTerms(weight=26),
    "lane": TopicTerms(weight=36, lane=True),
    "effect": TopicTerms(weight=10, atomic=True),
    "effect.lane": TopicTerms(weight=12, atomic=True, lane=True),
    "slow": TopicTerms(weight=2, timeout=TIMEOUT),
    "slow.lane": TopicTerms(weight=2, timeout=TIMEOUT, lane=True),
    "shaky": TopicTerms(weight=8),
    "doomed": TopicTerms(weight=1, lane=True, budget=DOOMED_BUDGET),
    "expiring": TopicTerms(weight=2),
}
