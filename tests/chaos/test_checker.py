"""The checker itself: an honest story passes, and each lie about it is found out by the claim that it breaks."""

import copy
from dataclasses import replace

import pytest

from tests.chaos import checker, terms
from tests.chaos.attempts import REFUNDED
from tests.chaos.checker import CLAIMS
from tests.chaos.evidence import Evidence
from tests.chaos.figures import figures, table
from tests.chaos.plan import Draft, make

WALL = 1000.0  # what the time of day is ahead of the monotonic clock
LEASE = terms.LEASE
SQUARE = {"ordering_key": None, "lane": None, "holder": None, "lease_token": None, "due_at": None, "lapses": 0}


class Story:
    """Writes journal and tables, as a run would. Moments are monotonic."""

    def __init__(self, database="postgres"):
        self.lines = [{"event": "beginning", "at": 0.0, "wall": WALL}]
        self.messages, self.attempts, self.effects, self.planned = [], [], [], {}
        self.terms = terms.Terms(
            seed=1, database=database, seconds=60.0, messages=10, kill_every=2.0, restart_every=30.0
        )

    def note(self, event, at, **parts):
        self.lines.append({"event": event, "at": at, **parts})

    def write(self, number, at, *drafts, end="committed"):
        keys = [draft.key for draft in drafts]
        self.note("begun", at, transaction=number, writer=0, keys=keys)
        new = [draft for draft in drafts if draft.key not in self.planned]
        if end is not None:
            self.note(end, at + 0.1, transaction=number, writer=0, created=[draft.key for draft in new])
        for draft in new if end == "committed" else ():
            self.planned[draft.key] = draft
            self.messages.append(self.row(draft))

    def row(self, draft):
        self.planned.setdefault(draft.key, draft)
        pk = len(self.messages) + 1
        parts = {"id": pk, "event_key": draft.key, "topic": draft.topic, "state": "pending", "reason": ""}
        return {**SQUARE, **parts, "ordering_key": draft.lane, "attempt": 0, "spent": 0, "settled_at": None}

    def run(self, key, start, end, *, step="sleep", outcome="delivered", pid=1, taken=None, number=None):
        """A claim, its execution, and how it ended, settled at ``taken``; ``end`` None: the process died."""
        row = self[key]
        number = number or row["attempt"] + 1
        row["attempt"] = max(row["attempt"], number)
        me = {"id": row["id"], "attempt": number, "pid": pid}
        self.note("start", start, **me, key=key, topic=row["topic"], lane=row["ordering_key"], step=step)
        self.note("claim", start, **me, claimed=start - 0.05 + WALL)
        if end is not None:
            self.note("end", end, **me, result="ok" if step in ("sleep", "close") else "error")
        self.settle(row, number, start, end + 0.05 if taken is None else taken, outcome, pid)

    def settle(self, row, number, start, taken, outcome, pid):
        row["spent"] += outcome not in REFUNDED
        finals = {"delivered": "delivered", "buried": "dead", "discarded": "discarded"}
        if outcome in finals:
            reason = {"buried": "buried", "discarded": "handler"}.get(outcome, "")
            row.update(state=finals[outcome], reason=reason, settled_at=taken + WALL)
        if outcome != "delivered" or number > 1:
            moments = {"started_at": start - 0.05 + WALL, "ended_at": taken + WALL}
            end = {"message_id": row["id"], "number": number, "outcome": outcome, "worker": f"host:{pid}:x"}
            self.attempts.append(end | moments)
        row["leased_by"] = f"host:{pid}:x"
        self.note("settled", taken, id=row["id"], attempt=number, outcome=outcome, worker=f"host:{pid}:x", pid=pid)
        if outcome == "delivered" and terms.TOPICS[row["topic"]].atomic:
            self.effects.append({"key": row["event_key"], "attempt": number})

    def __getitem__(self, key):
        return next(row for row in self.messages if row["event_key"] == key)

    def line(self, event, **parts):
        """The one line of this event with these parts, to be altered."""
        found = [
            line
            for line in self.lines
            if line["event"] == event and all(line[name] == value for name, value in parts.items())
        ]
        assert len(found) == 1
        return found[0]

    def attempt(self, key, number):
        pk = self[key]["id"]
        return next(row for row in self.attempts if (row["message_id"], row["number"]) == (pk, number))

    def evidence(self):
        return Evidence(
            terms=self.terms,
            planned=self.planned,
            lines=sorted(copy.deepcopy(self.lines), key=lambda line: line["at"]),
            messages=self.messages,
            attempts=self.attempts,
            effects=self.effects,
            now=100.0 + WALL,
            codes={"single": 0},
        )

    def broken(self):
        """Which claims are broken."""
        return {name for name, sentences in checker.check(self.evidence()).items() if sentences}


def draft(key, topic="work", lane=None, life=0.0):
    return Draft(key=key, topic=topic, lane=lane, do=(("sleep", 0),), life=life)


@pytest.fixture
def story():
    """All that a run may see, told honestly.

    Process 1 is healthy, 2 dies at 12, 3 is frozen from 20 to 30, 4 is stopped at 40.
    """
    story = Story()
    story.write(1, 1.0, draft("a"), draft("b", "lane", "k"), draft("c", "lane", "k"))
    story.write(2, 2.0, draft("never"), end="rolled back")
    story.write(3, 2.0, draft("lost reply"), draft("lost too"), end=None)
    story.write(4, 3.0, draft("a"), draft("effect", "effect"), draft("slow", "slow"), draft("late", "lane", "k"))
    story.write(5, 3.5, draft("dead", "doomed", "d"), draft("old", "expiring", life=1.0), draft("buried"))
    story.write(6, 3.6, draft("killed"), draft("frozen", "lane", "f"), draft("after", "lane", "f"), draft("stopped"))

    story.run("a", 4.0, 4.1, step="raise", outcome="failed")
    story.run("a", 4.5, 4.6)
    story.run("b", 4.0, 5.0)
    story.run("c", 5.1, 5.2)
    story.run("late", 5.3, 5.4)
    story.run("effect", 5.0, 5.1, step="raise", outcome="failed")
    story.run("effect", 6.0, 6.1)
    story.run("slow", 6.0, 8.0, outcome="timed_out", taken=7.0)
    story.run("slow", 7.2, 7.3)
    story.run("buried", 6.0, 6.1, step="bury", outcome="buried")
    for at in (6.0, 7.0, 8.0):
        story.run("dead", at, at + 0.1, step="raise", outcome="failed")
    story["dead"].update(state="dead", reason="exhausted", settled_at=8.2 + WALL)
    story["old"].update(state="discarded", reason="expired", settled_at=6.5 + WALL)
    story.attempts.append(
        {"message_id": story["old"]["id"], "number": 0, "outcome": "discarded", "worker": "", "ended_at": 6.5 + WALL}
    )

    story.note("kill", 12.0, pid=2, since=12.0)
    story.note("died", 12.1, pid=2, after=12.0)
    story.note("renewed", 11.0, pid=2, asked=11.0, seconds=LEASE, leases=[[story["killed"]["id"], 1]])
    story.note("held", 12.1, pid=2, id=story["killed"]["id"], attempt=1, lapses=0, ends=11.0 + LEASE)
    story.run("killed", 10.0, None, outcome="lapsed", pid=2, taken=11.1 + LEASE)
    story.run("killed", 11.2 + LEASE, 12.0 + LEASE)

    story.note("freeze", 20.0, pid=3, since=20.0)
    story.note("thaw", 30.0, pid=3)
    story.run("frozen", 19.0, 30.2, outcome="lapsed", pid=3, taken=20.2 + LEASE)
    story.run("frozen", 20.3 + LEASE, 20.4 + LEASE)
    story.run("after", 20.5 + LEASE, 20.6 + LEASE)

    story.note("stop", 40.0, pid=4, since=40.0)
    story.run("stopped", 39.0, None, outcome="interrupted", pid=4, taken=42.0)
    story.run("stopped", 42.1, 42.2)
    story.note("died", 42.5, pid=4, after=42.4)

    story.write(-1, 50.0, draft("calm"))
    story.run("calm", 50.5, None, outcome="lapsed", pid=5, taken=50.6 + LEASE)
    story.note("calm kill", 50.6, pid=5, key="calm", attempt=1)
    story.note("died", 50.7, pid=5, after=50.6)
    story.run("calm", 50.7 + LEASE, 50.8 + LEASE)
    return story


def test_an_honest_story_passes(story):
    assert checker.check(story.evidence()) == {claim.__name__.removeprefix("claim_"): [] for claim in CLAIMS}


def test_its_figures_are_told(story):
    evidence = story.evidence()
    found = figures(evidence)
    assert found["messages"] == 14
    assert found["overlaps"] == {"abandoned": 1, "deaf": 2, "leaving": 1}
    assert found["lapses"] == {"running": 3, "not started": 0, "in a row": 0}
    assert found["calm"] == [pytest.approx(LEASE + 0.1)]
    assert any("holds" in line for line in table(found, checker.check(evidence)))


def end_with(story, key, **parts):
    story[key].update(parts)


def lose(story, key):
    """The row is gone, and everything that hangs on it."""
    row = story[key]
    story.messages.remove(row)
    story.attempts[:] = [each for each in story.attempts if each["message_id"] != row["id"]]
    story.lines[:] = [line for line in story.lines if line.get("id") != row["id"]]


LIES = {
    "all_committed_is_there": [
        ("a committed message is lost", lambda s: lose(s, "buried")),
        ("a rolled-back one is there", lambda s: s.messages.append(s.row(draft("never")))),
        ("nobody staged it", lambda s: s.line("begun", transaction=5)["keys"].remove("buried")),
        ("a rolled-back one ran", lambda s: s.line("start", key="buried").update(key="never")),
    ],
    "no_transaction_is_torn": [("half of it is there", lambda s: s.messages.append(s.row(draft("lost too"))))],
    "each_key_is_created_once": [
        ("twice", lambda s: s.line("committed", transaction=4)["created"].append("a")),
        ("never", lambda s: s.line("committed", transaction=1)["created"].remove("a")),
    ],
    "every_message_comes_to_its_end": [
        ("due for ever", lambda s: end_with(s, "a", state="pending", due_at=1.0)),
        ("parked for ever", lambda s: end_with(s, "late", state="pending", lane=7)),
        ("delivered though it failed", lambda s: s.line("end", id=s["b"]["id"]).update(result="error")),
        ("delivered though nobody ran it", lambda s: s.lines.remove(s.line("start", key="c"))),
        ("dead before its budget was spent", lambda s: end_with(s, "dead", spent=2)),
        ("buried though nobody asked", lambda s: s.line("start", key="buried").update(step="raise")),
        ("discarded though nobody asked", lambda s: end_with(s, "buried", state="discarded", reason="handler")),
        ("expired without a life", lambda s: end_with(s, "buried", state="discarded", reason="expired")),
        ("delivered though it had expired", lambda s: s.run("old", 9.0, 9.1)),
    ],
    "the_tables_are_legal": [
        ("a token on a settled row", lambda s: end_with(s, "a", lease_token=1)),
        ("lapses on a delivered row", lambda s: end_with(s, "a", lapses=1)),
    ],
    "each_attempt_starts_and_ends_once": [
        ("started twice", lambda s: s.lines.append(s.line("start", key="b") | {"at": 9.0})),
        ("settled twice", lambda s: s.attempts.append(dict(s.attempt("a", 1)))),
        ("told otherwise", lambda s: s.line("settled", id=s["b"]["id"]).update(outcome="failed")),
    ],
    "one_delivery_for_each_message": [
        ("by two attempts", lambda s: s.attempt("killed", 1).update(outcome="delivered")),
        ("told of both", lambda s: s.line("settled", id=s["killed"]["id"], attempt=1).update(outcome="delivered")),
        ("dead all the same", lambda s: end_with(s, "b", state="dead", reason="buried")),
    ],
    "leases_are_not_taken_over_before_their_end": [
        ("before a lease was over", lambda s: s.attempt("frozen", 1).update(ended_at=18.9 + LEASE + WALL)),
        ("in spite of a renewal", lambda s: s.line("renewed").update(asked=11.5)),
        ("before the row said so", lambda s: s.line("held").update(ends=11.5 + LEASE)),
    ],
    "leases_run_out_for_a_reason": [
        ("nobody died", lambda s: s.lines.remove(s.line("died", pid=2))),
        ("nobody was frozen", lambda s: s.lines.remove(s.line("freeze"))),
        ("the freeze was short", lambda s: s.line("thaw").update(at=20.5)),
        ("another one was frozen", lambda s: [s.line(event).update(pid=9) for event in ("freeze", "thaw")]),
        ("it was frozen later", lambda s: s.line("freeze").update(since=19.5 + LEASE)),
    ],
    "what_a_killed_process_held_is_recovered_in_time": [
        ("late", lambda s: s.line("calm kill").update(at=48.0)),
        ("never", lambda s: s.lines.remove(s.line("start", key="calm", attempt=2))),
    ],
    "executions_of_a_message_overlap_only_after_a_lapse": [
        ("before the take-over", lambda s: s.line("start", key="killed", attempt=2).update(at=11.9)),
        ("in a frozen process that was not", lambda s: s.lines.remove(s.line("freeze"))),
        ("after a failure", lambda s: s.line("end", id=s["a"]["id"], attempt=1).update(at=4.55)),
        ("before the timeout", lambda s: s.line("start", key="slow", attempt=2).update(at=6.5)),
        ("in a process that went on", lambda s: s.line("died", pid=4).update(at=60.0, after=59.9)),
    ],
    "one_execution_per_lane": [
        ("two at a time", lambda s: s.line("end", id=s["b"]["id"]).update(at=5.15)),
        ("in a frozen process that was not", lambda s: s.lines.remove(s.line("freeze"))),
    ],
    "lanes_keep_their_order": [
        ("the second was claimed before", lambda s: s.line("claim", id=s["c"]["id"]).update(claimed=4.5 + WALL)),
    ],
    "attempts_are_charged_exactly": [
        ("too much", lambda s: end_with(s, "a", spent=3)),
        ("too little", lambda s: end_with(s, "killed", spent=1)),
        ("a refund was forgotten", lambda s: end_with(s, "stopped", spent=2)),
        ("an end is missing", lambda s: s.attempts.remove(s.attempt("a", 1))),
        ("a claim was not counted", lambda s: end_with(s, "effect", attempt=1)),
    ],
    "attempts_end_as_their_handlers_did": [
        ("a failure was called success", lambda s: s.line("start", key="b").update(step="raise")),
        ("a success was called failure", lambda s: s.line("start", key="a", attempt=1).update(step="sleep")),
        ("nothing ran", lambda s: s.lines.remove(s.line("start", key="a", attempt=1))),
    ],
    "atomic_effects_are_there_exactly_once": [
        ("twice", lambda s: s.effects.append({"key": "effect", "attempt": 2})),
        ("never", lambda s: s.effects.clear()),
        ("of the failed attempt", lambda s: s.effects[0].update(attempt=1)),
        ("of no message", lambda s: s.effects.append({"key": "never", "attempt": 1})),
    ],
}


@pytest.mark.parametrize(
    ("claim", "lie"),
    [pytest.param(claim, lie, id=f"{claim}: {what}") for claim, lies in LIES.items() for what, lie in lies],
)
def test_a_lie_is_found_out(story, claim, lie):
    lie(story)
    assert claim in story.broken()


def test_every_claim_has_a_lie():
    assert LIES.keys() == {claim.__name__.removeprefix("claim_") for claim in CLAIMS}


@pytest.mark.parametrize(("field", "value"), [("codes", {"single": 1}), ("codes", {"single": None})])
def test_a_dispatcher_that_does_not_stop_in_peace_is_found_out(story, field, value):
    evidence = story.evidence()
    setattr(evidence, field, value)
    assert checker.check(evidence)["the_tables_are_legal"]


def test_a_run_that_does_not_come_to_its_end_is_found_out(story):
    evidence = story.evidence()
    evidence.drained = False
    assert checker.check(evidence)["every_message_comes_to_its_end"]


def test_a_late_committer_with_a_lower_id_may_be_overtaken(story):
    """Scenario 14: what was not visible at the claim, nobody could wait for."""
    story.line("committed", transaction=1).update(at=5.05)
    story.line("claim", id=story["late"]["id"]).update(claimed=5.0 + WALL)
    assert "lanes_keep_their_order" not in story.broken()


def test_an_outage_is_a_reason_for_a_lapse(story):
    story.lines.remove(story.line("freeze"))
    story.note("back", 23.0, since=20.0)
    assert "leases_run_out_for_a_reason" not in story.broken()


def test_on_sqlite_any_frozen_process_may_hold_the_lock(story):
    for event in ("freeze", "thaw"):
        story.line(event).update(pid=9)
    story.terms = Story("sqlite").terms
    assert "leases_run_out_for_a_reason" not in story.broken()


def test_on_sqlite_the_return_of_another_process_does_not_end_a_freeze(story):
    story.terms = Story("sqlite").terms
    story.note("thaw", 20.5, pid=9)
    assert "leases_run_out_for_a_reason" not in story.broken()


def test_a_seed_replays_a_plan():
    agreed = Story().terms
    assert make(agreed) == make(terms.load(agreed.dump()))
    assert make(agreed) != make(replace(agreed, seed=2))
