"""The plan of a run, a pure function of its terms: who commits what when, how handlers behave, and which trouble comes.

What a run does beyond its plan is the machine's doing: which message a killed process happened to hold, for example.
"""

import random
from dataclasses import dataclass

from tests.chaos.terms import LEASE, TIMEOUT, TOPICS

WRITERS = 3
LANES = 12  # ordering keys of each topic with lanes
RECENT = 40  # keys from which a repetition is chosen
SIZES = (1, 1, 1, 2, 3, 5)  # messages of a transaction
HONEST = 0.72  # part of the messages whose handlers behave at once
CALM = 3  # messages whose process is killed in peace, after all the trouble
KILLERS = 0.008  # part of the messages that kill their process at first

MISDEEDS = {  # what a handler may do at first, with a weight
    "raise": 8,
    "false": 4,
    "base": 4,
    "leak": 3,
    "close": 3,
    "snooze": 4,
    "bury": 1,
    "discard": 1,
}
ATOMIC_MISDEEDS = {"raise": 6, "false": 3, "base": 3, "snooze": 2, "bury": 1}
LONG = 1.2 * LEASE  # a handler that lives on renewals


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One message to stage. ``do``: what its handler does at attempt 1, 2, ...; at last it behaves.

    ``delay``: seconds until it may be delivered; ``life``: until it expires, or 0.
    """

    key: str
    topic: str
    lane: str | None
    do: tuple
    delay: float = 0.0
    life: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """``at`` seconds from the beginning; ``pause`` seconds between the last message and the end."""

    number: int
    writer: int
    at: float
    drafts: tuple
    pause: float
    commits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """``target`` picks the victim among those that are there; ``seconds``: how long it lasts."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``bursts``: when, in seconds from the beginning, the other side is down. ``calm``: written in peace."""

    transactions: tuple
    troubles: tuple
    bursts: tuple
    calm: tuple

    def drafts(self):
        return {draft.key: draft for each in (*self.transactions, *self.calm) for draft in each.drafts}


def make(terms):
    return Plan(
        transactions=tuple(_transactions(terms, random.Random(f"{terms.seed} writers"))),
        troubles=tuple(sorted(_troubles(terms, random.Random(f"{terms.seed} troubles")), key=lambda each: each.at)),
        bursts=tuple(bursts(terms)),
        calm=tuple(_calm(number) for number in range(CALM)),
    )


# --- what is written --------------------------------------------------------------------------------------------------


def _transactions(terms, source):
    made, number = 0, 0
    recent = []
    while made < terms.messages:
        drafts = [_draft(source, made + n) for n in range(source.choice(SIZES))]
        made += len(drafts)
        if recent and source.random() < 0.08:
            drafts.append(source.choice(recent))
        recent = (recent + drafts)[-RECENT:]
        number += 1
        yield Transaction(
            number=number,
            writer=number % WRITERS,
            at=terms.seconds * min(1.0, made / terms.messages),
            drafts=tuple(drafts),
            pause=_pause(terms, source),
            commits=source.random() >= 0.12,
        )


def _pause(terms, source):
    """Now and then a transaction commits late, with ids that are lower than those others have committed meanwhile."""
    if source.random() >= 0.12:
        return 0.0
    return source.uniform(0.2, 1.2) if terms.has_server else 0.05  # on SQLite it keeps everybody from writing


def _draft(source, number):
    topic = source.choices(list(TOPICS), [each.weight for each in TOPICS.values()])[0]
    options = TOPICS[topic]
    delay = source.uniform(0.5, 3.0) if topic in ("work", "lane") and source.random() < 0.08 else 0.0
    return Draft(
        key=f"m{number}",
        topic=topic,
        lane=str(source.randrange(LANES)) if options.lane else None,
        do=tuple(_behaviour(topic, options, source)),
        delay=3.0 if topic == "expiring" else delay,
        life=1.0 if topic == "expiring" else 0.0,
    )


def _behaviour(topic, options, source):
    """Steps of the first attempts: (name, argument)."""
    if topic == "doomed":
        step = source.choice(["raise", "raise", "false", "base", "kill", "exit"])
        return [(step, 0)] * options.budget
    if options.timeout:
        sleeps = [("sleep", round(TIMEOUT + source.uniform(0.3, 1.2), 2))] * source.choice([0, 1, 1, 2])
        return [*sleeps, ("sleep", 0.05)]
    steps = []
    if source.random() < KILLERS:
        steps = [(source.choice(["kill", "exit"]), 0)]
    elif source.random() >= HONEST:
        misdeeds = ATOMIC_MISDEEDS if options.atomic else MISDEEDS
        steps = [(step, 0) for step in source.choices(list(misdeeds), misdeeds.values(), k=source.choice([1, 1, 2]))]
    naps = (0, 0, 0.01, 0.05) if options.atomic else (0, 0, 0.01, 0.05, 0.2, LONG if source.random() < 0.2 else 0.4)
    return [*steps, ("sleep", source.choice(naps))]


def _calm(number):
    """At its first attempt its handler waits for the kill."""
    draft = Draft(key=f"calm{number}", topic="work", lane=None, do=(("sleep", 30.0), ("sleep", 0)))
    return Transaction(number=-1 - number, writer=-1, at=0.0, drafts=(draft,), pause=0.0, commits=True)


def bursts(terms):
    """When, in seconds from the beginning, the other side of the shaky topic is down."""
    source = random.Random(f"{terms.seed} bursts")
    at = source.uniform(5.0, 15.0)
    while at < terms.seconds:
        length = source.uniform(1.0, 4.0)
        yield at, at + length
        at += length + source.uniform(10.0, 30.0)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _troubles(terms, source):
    """SQLite has no sessions to cut and no server to restart; a frozen process may hold its only lock."""
    yield from _now_and_then(terms, source, "kill", terms.kill_every)
    yield from _now_and_then(terms, source, "freeze", 5.0, lengths=(0.3, 1.5 * LEASE, 2.5 * LEASE, 2.5 * LEASE))
    yield from _now_and_then(terms, source, "stop", 15.0)
    yield from _now_and_then(terms, source, "kill writer", 20.0)
    if terms.has_server:
        yield from _now_and_then(terms, source, "cut", 8.0)
        for each in _now_and_then(terms, source, "restart", terms.restart_every, spread=0.15):
            yield Trouble(at=each.at, kind=source.choice(["restart", "crash"]), seconds=source.choice([0.0, 0.0, 1.5]))


def _now_and_then(terms, source, kind, every, *, lengths=(0.0,), spread=None):
    """At random with this mean distance; with a spread, near a regular beat."""
    at = 0.0
    while every:
        at += source.expovariate(1 / every) if spread is None else every * source.uniform(1 - spread, 1 + spread)
        if at >= terms.seconds:
            return
        yield Trouble(at=at, kind=kind, target=source.randrange(10**6), seconds=source.choice(lengths))
