"""One post of a supervisor: which child holds it, how that one is, why it ended, and when the next one starts."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outbox.health import Problem, Verdict, judge, within
from outbox.offspring import Child, how, was_told_to_stop
from outbox.vitals import Condition

logger = logging.getLogger("outbox")

STARTUP = 60.0  # seconds that a child may take to its first report
FIRST_PAUSE = 0.5  # seconds until a child that failed is replaced; doubled with each failure
LONGEST_PAUSE = 60.0
GOOD_WHILE = 60.0  # seconds of work after which a failure counts as the first one again
LEAST_PATIENCE = 5.0  # seconds: a crowded machine may keep a healthy child from its report so long
SILENT = 3.0  # seconds without a report that a probe tells
LEAST_LIFE = 1.0  # seconds: what recycles itself sooner, and did nothing, has a limit that it cannot keep
CHANGING = "process_changing"  # a problem only while no other process works


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """``patience``: seconds without a report; ``leaving``: seconds for a stop. ``strict``: any failure ends all."""

    command: Sequence[str]
    processes: int
    patience: float
    leaving: float
    strict: bool = False


class Post:
    """One of the posts for a child, and who holds it."""

    def __init__(self, number: int, terms: Terms) -> None:
        self.name = f"process {number}"
        self.child: Child | None = None
        self.counts: Counter[str] = Counter()  # of those that were here before
        self.starts = 0
        self.has_started = False  # once, and for all
        self.refusal: tuple[str, int] | None = None
        self.failures: list[str] = []  # of a stop
        self._terms = terms
        self._start_at = time.monotonic()
        self._leave_by = float("inf")
        self._in_a_row = 0
        self._why = ""
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        if self.child is not None:
            self._ask_to_stop(self.child)

    def credit(self, seconds: float) -> None:
        """This process slept so long, and could hear nobody."""
        if self.child is not None:
            self.child.heard_at += seconds
            self._leave_by += seconds

    def look(self) -> None:
        """Do what is due: start, hear, kill, bury."""
        now = time.monotonic()
        if self.child is None:
            if not self._stopping and now >= self._start_at:
                self._start(now)
            return
        child = self.child
        child.listen()
        if (code := child.ended()) is not None:
            self._bury(child, code, now)
            return
        silence = now - child.heard_at
        if silence > (self._terms.patience if child.told else max(STARTUP, self._terms.patience)):
            self._kill(child, f"has not reported for {silence:.0f} s")
        elif now > self._leave_by:
            self._kill(child, "did not stop within its grace")
        elif self._leave_by == float("inf"):
            verdict = judge(conditions(child))
            self.has_started = self.has_started or (child.told and bool(verdict.details) and not verdict.started)
            if child.news.get("recycling"):
                self._leave_by = now + self._terms.leaving
            elif verdict.live:
                logger.error("Outbox %s (pid %s): %s; it is replaced.", self.name, child.pid, verdict.live[0].text)
                self._ask_to_stop(child)

    def verdict(self) -> Verdict:
        """How this child is; any thread may ask."""
        child = self.child
        here = {"process": self.name, "starts": self.starts}
        if child is None:
            text = "it is not running" if self.starts else "it was not started yet"
            down = [Problem(kind="process_down", where=self.name, text=text)]
            return Verdict(live=down, ready=down, started=self._beginning(down), details=[here | {"state": "waiting"}])
        silence = time.monotonic() - child.heard_at
        here |= {"pid": child.pid, "state": self._state(child), "silent": round(silence, 1)}
        if child.told and silence > SILENT:
            text = f"it has not reported for {silence:.0f} s: it is stopped, or hangs"
            silent = [Problem(kind="process_silent", where=self.name, text=text)]
            return Verdict(live=silent, ready=silent, started=self._beginning(silent), details=[here])
        if not child.news.get("dispatchers"):
            young = [Problem(kind=CHANGING, where=self.name, text="it has not reported yet")]
            return Verdict(ready=young, started=self._beginning(young), details=[here])
        seen = within(judge(conditions(child)), self.name)
        ready = seen.ready
        if self._leave_by < float("inf") and not self._stopping:
            ready = [Problem(kind=CHANGING, where=self.name, text="it makes room for a fresh one")]
        here["dispatchers"] = list(seen.details)
        return Verdict(live=seen.live, ready=ready, started=self._beginning(seen.started), details=[here])

    def _beginning(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        return () if self.has_started else problems

    def _state(self, child: Child) -> str:
        if self._leave_by < float("inf"):
            return "leaving"
        return "working" if child.told else "starting"

    def _start(self, now: float) -> None:
        self._leave_by, self._why = float("inf"), ""
        try:
            self.child = Child(self._terms.command)
        except OSError as error:
            self._put_off(now, f"could not be started: {error}", "")
        else:
            logger.info("Outbox %s started, pid %s.", self.name, self.child.pid)
        self.starts += 1

    def _ask_to_stop(self, child: Child) -> None:
        child.ask_to_stop()
        self._leave_by = min(self._leave_by, time.monotonic() + self._terms.leaving)

    def _kill(self, child: Child, why: str) -> None:
        if not self._why:
            logger.error("Outbox %s (pid %s) %s; it is killed.", self.name, child.pid, why)
            self._why = why
        child.kill()

    def _bury(self, child: Child, code: int, now: float) -> None:
        """Learn why a child ended, and when the next one starts."""
        self.child = None
        child.close()
        news = child.news
        self.counts.update(news.get("counts", {}))
        reasons = "; ".join(news.get("failures", ()))
        what = f"{self._why} and was killed" if self._why else how(code)
        if self._stopping:
            if self._why or (code != 0 and not (was_told_to_stop(code) and not child.told)):
                self.failures.append(f"{self.name} {what}" + (f": {reasons}" if reasons else ""))
        elif "refused" in news or (code == 2 and not news.get("dispatchers")) or (self._terms.strict and reasons):
            text = news.get("refused") or reasons or "a usage error; its output says which"
            self.refusal = f"{self.name}: {text}", news.get("code", code)
        elif code == 0 and news.get("recycling") and (news["counts"]["processed"] or now - child.born > LEAST_LIFE):
            logger.info("Outbox %s (pid %s) makes room: %s.", self.name, child.pid, news["recycling"])
            self._start_at, self._in_a_row = now, 0
        else:
            if now - child.born > GOOD_WHILE:
                self._in_a_row = 0
            self._put_off(now, f"(pid {child.pid}) {what}", reasons or news.get("recycling", ""))

    def _put_off(self, now: float, what: str, reasons: str) -> None:
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._in_a_row, 10))
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not secrecy
        self._in_a_row += 1
        self._start_at = now + pause
        text = f"{what}: {reasons}" if reasons else what
        logger.error("Outbox %s %s. It is replaced in %.1f s.", self.name, text, pause)


def conditions(child: Child) -> list[Condition]:
    """How the dispatchers of a child were when it reported last."""
    told: list[dict[str, Any]] = child.news.get("dispatchers", [])
    try:
        return [Condition.from_json(each) for each in told]
    except TypeError:  # it was started from newer code than this process
        return []
