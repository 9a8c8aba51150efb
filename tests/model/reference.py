"""What must be true of messages: a second opinion in plain Python, without a database and without anybody else.

It knows nothing of knocks, parking and waking: a message that sleeps behind another is due, and cannot start yet.
"""

from dataclasses import dataclass, field

BUDGET = 3
ALONE_FROM = 2  # lapses in a row
ORDER = {"mail": "none", "account": "key", "stock": "key", "ledger": "topic"}
BLOCKS = {"stock"}  # a dead message of these stops its lane

# verdict -> the state it leads to, the reason, the outcome that is recorded, due at once?, refunds?
VERDICTS = {
    "delivered": ("delivered", "", "delivered", False, False),
    "retry": ("pending", "", "failed", False, False),
    "timeout": ("pending", "", "timed_out", False, False),
    "dead": ("dead", "buried", "buried", False, False),
    "discarded": ("discarded", "handler", "discarded", False, False),
    "snooze": ("pending", "", "snoozed", False, True),
    "unavailable": ("pending", "", "unavailable", False, True),
    "release": ("pending", "", "released", True, True),
    "interrupted": ("pending", "", "interrupted", True, True),
}


@dataclass(kw_only=True)
class Expected:
    """One message. ``when``: "due", "later" or, once it is settled, None; a lease is held while it is "later"."""

    id: int
    name: str
    key: str | None
    event_key: str
    content: int
    when: str | None = "due"
    expires: str = "never"  # or "ahead", or "past"
    state: str = "pending"
    reason: str = ""
    token: int | None = None
    attempt: int = 0
    spent: int = 0
    lapses: int = 0
    lane: tuple | None = None
    old: bool = False  # settled long ago
    pruned: bool = False
    attempts: list = field(default_factory=list)  # (number, outcome)

    def home(self):
        """The lane it belongs to."""
        return {"none": None, "topic": (self.name, None)}.get(
            ORDER[self.name], None if self.key is None else (self.name, self.key)
        )

    @property
    def held(self):
        return self.token is not None and self.when == "later"

    def shown(self):
        """What can be compared with a row."""
        return {
            "state": self.state,
            "reason": self.reason,
            "when": self.when,
            "token": self.token,
            "holds": self.token is not None and self.lane is not None,
            "in_lane": self.lane is not None,
            "attempt": self.attempt,
            "spent": self.spent,
            "lapses": self.lapses,
            "expires": self.expires,
            "pruned": self.pruned,
            "attempts": sorted(self.attempts),
        }


class Reference:
    """All messages by id, and what may become of them."""

    def __init__(self):
        self.messages = {}

    # --- who may start

    def target(self, lane):
        """The one of a lane that is looked at: who holds it, else the oldest."""
        rows = sorted((each for each in self.messages.values() if each.lane == lane), key=lambda each: each.id)
        return next((each for each in rows if each.token is not None), rows[0])

    def has_its_turn(self, row):
        if row.state != "pending" or row.when != "due":
            return False
        return row.lane is None or self.target(row.lane) is row

    def closing(self, row):
        """What a claim makes of a row that has its turn, instead of a lease: (state, reason, outcome), or None."""
        lapsed = row.token is not None
        if row.expires == "past":
            return "discarded", "expired", "crashed" if lapsed else "discarded"
        if row.spent >= BUDGET:
            return "dead", "crashed" if lapsed or row.lapses else "exhausted", "crashed" if lapsed else "buried"
        if lapsed and row.lapses + 1 >= ALONE_FROM:
            return "pending", "", "crashed"
        return None

    def may_start(self, row):
        return self.has_its_turn(row) and self.closing(row) is None

    def may_follow(self, row):
        """Whether a settlement may hand it over."""
        return self.may_start(row) and row.token is None and row.lapses < ALONE_FROM

    # --- what happens

    def close(self, row):
        state, reason, outcome = self.closing(row)
        lapses = row.lapses + 1 if row.token is not None else 0
        row.attempts.append((row.attempt, outcome))
        self._end(row, state, reason, due=False)
        row.lapses = lapses

    def grant(self, row, token, *, charged):
        if row.token is not None:
            row.attempts.append((row.attempt, "lapsed"))
            row.lapses += 1
        row.token, row.when = token, "later"
        row.attempt += 1
        row.spent += charged

    def settle(self, row, verdict, *, charged, attempt):
        state, reason, outcome, due, refund = VERDICTS[verdict]
        if outcome != "delivered" or attempt > 1:
            row.attempts.append((attempt, outcome))
        if refund and charged and row.spent > 0:
            row.spent -= 1
        self._end(row, state, reason, due=due)

    def _end(self, row, state, reason, *, due):
        row.state, row.reason, row.token, row.lapses = state, reason, None, 0
        row.when = ("due" if due else "later") if state == "pending" else None
        if state != "pending" and not (state == "dead" and row.name in BLOCKS):
            row.lane = None

    def requeue(self, row):
        """Why it is left alone, or None and it is done."""
        if row.state == "pending":
            return {"in flight"} if row.held else {"pending already"}
        if row.state == "delivered":
            return {"delivered"}
        row.lane = row.lane or row.home()
        row.state, row.reason, row.when, row.expires = "pending", "", "due", "never"
        row.spent = row.lapses = 0
        row.old = False
        return None

    def discard(self, row):
        if row.held:
            return {"in flight"}
        if row.state in ("delivered", "discarded"):
            return {row.state}
        self._end(row, "discarded", "operator", due=False)
        row.old = False
        return None

    def make_due(self, row):
        if row.state != "pending":
            return {row.state}
        if row.when == "due":
            return {"due already", "waiting in its lane"}
        if row.token is not None:
            return {"in flight"}
        row.when = "due"
        return None

    def prune(self, *, dead):
        for row in list(self.messages.values()):
            if (
                row.old
                and row.lane is None
                and (row.state in ("delivered", "discarded") or (dead and row.state == "dead"))
            ):
                del self.messages[row.id]

    def prune_payloads(self):
        for row in self.messages.values():
            row.pruned |= row.old and row.state == "delivered"
