"""What a run leaves behind, in the form in which the checker reads it: lines of the journal and rows of the tables.

All moments are seconds of the machine's monotonic clock.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from tests.chaos import terms as given

LAPSED = ("lapsed", "crashed")
LEAST = 0.5  # of the lease: it is renewed every third, so whoever was deaf for less than this has not lost it
RETURN = 2.0  # seconds that a process may take, on a crowded machine, to renew once it can again
LEAVING = 8.0  # seconds that a process may take to end, once it has given back what still ran


@dataclass(slots=True, kw_only=True)
class Execution:
    """One start of a handler. ``end`` is None when there was none: the process died. ``claimed`` is the
    time of day by the database's clock, None if unknown.
    """

    id: int
    attempt: int
    key: str
    topic: str
    lane: str | None
    pid: int
    step: str
    start: float
    end: float | None = None
    result: str = ""
    claimed: float | None = None


@dataclass(slots=True, kw_only=True)
class Evidence:
    """``messages``, ``attempts``, ``effects``: rows as dicts, in their final state; ``now``: the database's time then.

    ``planned``: by key, the draft that the plan has for it. ``codes``: exit codes of the dispatchers at the end.
    """

    terms: given.Terms
    planned: dict
    lines: list
    messages: list
    attempts: list
    effects: list
    now: object
    drained: bool = True
    codes: dict = field(default_factory=dict)

    executions: dict = field(init=False)  # (id, attempt) -> Execution
    doubles: list = field(init=False)  # executions of an attempt that had started before
    by_event: dict = field(init=False)
    ended: dict = field(init=False)  # (id, attempt) -> how that claim ended: the Attempt row, or what stands for it

    def __post_init__(self):
        self.by_event = defaultdict(list)
        for line in self.lines:
            self.by_event[line["event"]].append(line)
        self._read_executions()
        self.ended = {(row["message_id"], row["number"]): row for row in self.attempts}
        for row in self.messages:
            if row["state"] == "delivered" and row["attempt"] == 1:  # a success at the first attempt has no row
                end = {"outcome": "delivered", "worker": row["leased_by"], "ended_at": row["settled_at"]}
                self.ended.setdefault((row["id"], 1), end | {"message_id": row["id"], "number": 1, "started_at": None})

    def _read_executions(self):
        self.executions, self.doubles = {}, []
        names = ("id", "attempt", "key", "topic", "lane", "pid", "step")
        for line in self.by_event["start"]:
            started = Execution(**{name: line[name] for name in names}, start=line["at"])
            if (line["id"], line["attempt"]) in self.executions:
                self.doubles.append(started)
            else:
                self.executions[line["id"], line["attempt"]] = started
        for line in self.by_event["end"]:
            if (found := self.executions.get((line["id"], line["attempt"]))) is not None:
                found.end, found.result = line["at"], line["result"]
        for line in self.by_event["claim"]:
            if (found := self.executions.get((line["id"], line["attempt"]))) is not None:
                found.claimed = line["claimed"]

    @property
    def wall(self):
        """What to take from the time of day to get the monotonic time."""
        line = self.by_event["beginning"][0]
        return line["wall"] - line["at"]

    def moment(self, instant):
        """A time of the database as monotonic time: its clock is this machine's."""
        return instant - self.wall

    # --- what was written ---------------------------------------------------------------------------------------------

    def endings(self):
        """By transaction number how it ended: committed, rolled back, or unknown (also if its writer was killed)."""
        ends = {line["transaction"]: "unknown" for line in self.by_event["begun"]}
        for event in ("committed", "rolled back"):
            ends.update((line["transaction"], event) for line in self.by_event[event])
        return ends

    def fates(self):
        """By key how the transactions ended that staged it."""
        ends, found = self.endings(), defaultdict(set)
        for line in self.by_event["begun"]:
            for key in line["keys"]:
                found[key].add(ends[line["transaction"]])
        return dict(found)

    def visible_since(self):
        """By key the moment at which it was certainly visible: after the COMMIT that created it was answered."""
        return {key: line["at"] for line in self.by_event["committed"] for key in line["created"]}

    def ends_of_leases(self):
        """By (id, attempt) the moment before which its lease did not end, as the last renewal tells."""
        return {
            tuple(each): line["asked"] + line["seconds"] for line in self.by_event["renewed"] for each in line["leases"]
        }

    # --- why a lease may have run out ---------------------------------------------------------------------------------

    def death_of(self, pid, since):
        """(alive until, dead at) of the process that had this number then; None if it lived to the end."""
        for line in self.by_event["died"]:
            if line["pid"] == pid and line["at"] >= since:
                return max(line["after"], since), line["at"]
        return None

    def deaf(self, pid):
        """Long intervals in which a process could not renew: frozen, without a database, or the machine was stuck."""
        # on SQLite a frozen process may hold the lock that all need
        whose = [line for line in self.by_event["freeze"] if line["pid"] == pid or not self.terms.has_server]
        found = [(line["since"], self._thawed(line["pid"], line["since"])) for line in whose]
        found += [(line["since"], line["at"]) for line in self.by_event["back"]]
        found += [(line["since"], line["at"]) for event in ("stall", "slow") for line in self.by_event[event]]
        found += [(line["since"], line["at"]) for line in self.by_event["late"] if line["pid"] == pid]
        # A renewal that was under way is void, and the one before it may have found the row locked by a settlement.
        found += [(line["at"] - LEAST * given.LEASE, line["at"]) for line in self.by_event["cut"]]
        return [each for each in merged(sorted(found), RETURN) if each[1] - each[0] >= LEAST * given.LEASE]

    def cause(self, pid, since, taken):
        """Why a lease that a process held ``since`` then may have run out when it was ``taken`` over; "" if no reason.

        The process had died, or it was deaf from half a lease before on.
        """
        death = self.death_of(pid, since)
        if death is not None and death[0] <= taken:
            return "died"
        for begin, end in self.deaf(pid):
            if begin + LEAST * given.LEASE <= taken <= end + RETURN:
                return "deaf"
        return ""

    def _thawed(self, pid, since):
        """When a process that was stopped then went on; the end of the journal if it never did."""
        later = (line["at"] for line in self.by_event["thaw"] if line["pid"] == pid and line["at"] > since)
        return min(later, default=self.lines[-1]["at"])

    def taken_over(self, each):
        """When the lease of an execution was taken over, and why that was right; None if it was not.

        The reason is "" if there is none.
        """
        end = self.ended.get((each.id, each.attempt))
        if end is None or end["outcome"] not in LAPSED:
            return None
        taken = self.moment(end["ended_at"])
        return taken, self.cause(worker_pid(end["worker"]), self.moment(end["started_at"]), taken)

    def was_leaving(self, pid, moment):
        """Whether a process ended soon after this moment: it gave back what still ran, as its grace was over."""
        death = self.death_of(pid, moment)
        return death is not None and death[1] <= moment + LEAVING

    def over(self, each):
        """When an execution was over at the earliest: if it never said so, its process was last seen alive then."""
        if each.end is not None:
            return each.end
        death = self.death_of(each.pid, each.start)
        return float("inf") if death is None else death[0]

    def was_frozen(self, pid, since, until):
        """Whether a process was stopped in some part of this time, be it for ever so short."""
        return any(
            line["since"] <= until and self._thawed(pid, line["since"]) >= since
            for line in self.by_event["freeze"]
            if line["pid"] == pid
        )


def merged(intervals, gap):
    """Sorted intervals, those with a smaller gap between them joined into one."""
    found = []
    for since, until in intervals:
        if found and since <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found


def worker_pid(name):
    """The process in the name of a worker: host:pid:random."""
    return int(name.rsplit(":", 2)[1])
