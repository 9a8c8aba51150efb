"""What the conditions of dispatchers mean: is the process alive, ready, started; and if not, why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outbox.vitals import Condition

TROUBLES = {
    "away": ("database_away", "the database is away and is waited for"),
    "locked": ("database_locked", "somebody keeps the tables locked"),
    "failing": ("claims_fail", "the database answers, but refuses what the dispatcher asks"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason for a bad answer: its kind, for machines; the database or process; and a sentence, for people."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The problems that speak against each of the three answers, and what was seen."""

    live: Sequence[Problem] = ()
    ready: Sequence[Problem] = ()
    started: Sequence[Problem] = ()
    details: Sequence[dict[str, Any]] = field(default_factory=tuple)

    @property
    def is_live(self) -> bool:
        return not self.live


def judge(conditions: Sequence[Condition]) -> Verdict:
    """The verdict on the dispatchers of one process."""
    live = [each for condition in conditions for each in _dying(condition)]
    return Verdict(
        live=live,
        ready=live + [each for condition in conditions for each in _hindered(condition)],
        started=[each for condition in conditions for each in _beginning(condition)],
        details=[condition.as_json() for condition in conditions],
    )


def within(verdict: Verdict, where: str) -> Verdict:
    """The same verdict, its problems placed in one process of several."""

    def place(problems: Sequence[Problem]) -> list[Problem]:
        return [replace(each, where=f"{where}, {each.where}") for each in problems]

    return replace(verdict, live=place(verdict.live), ready=place(verdict.ready), started=place(verdict.started))


def _dying(seen: Condition) -> Iterator[Problem]:
    """What only an end of the process mends."""
    if seen.silent > seen.patience and not seen.stopping:
        yield Problem(kind="loop_stuck", where=seen.using, text=f"the loop has been silent for {seen.silent:.0f} s")
    if seen.stuck >= seen.slots:
        text = f"{seen.stuck} handlers are stuck beyond their timeouts, as many as there are slots"
        yield Problem(kind="slots_stuck", where=seen.using, text=text)


def _hindered(seen: Condition) -> Iterator[Problem]:
    """What keeps a live process from delivering."""
    if seen.stopping:
        yield Problem(kind="stopping", where=seen.using, text="the process was told to stop")
    if seen.missing:
        text = f"the database lacks {', '.join(seen.missing)}; run manage.py migrate outbox --database {seen.using}"
        yield Problem(kind="tables_missing", where=seen.using, text=text)
    elif seen.trouble:
        kind, text = TROUBLES[seen.trouble]
        yield Problem(kind=kind, where=seen.using, text=f"{text} ({seen.error})")
    elif not seen.claimed:
        yield Problem(kind="not_started", where=seen.using, text="nothing was claimed yet")
    if seen.slots <= seen.slow:
        text = f"all {seen.slots} slots are held by handlers that run for more than half of their timeouts"
        yield Problem(kind="slots_hung", where=seen.using, text=text)


def _beginning(seen: Condition) -> Iterator[Problem]:
    """What keeps a process from having started; once it has claimed, nothing ever does."""
    if not seen.claimed:
        yield from (each for each in _hindered(seen) if each.kind != "slots_hung")
