"""The state machine: each rule does something to the database and tells the reference; both must agree after it."""

from datetime import timedelta
from types import SimpleNamespace

from django.db import transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox import EventKeyConflict, stage
from outbox.handlers import registry
from outbox.leases import ALONE_FROM as PRODUCT_ALONE_FROM
from outbox.leases import charge, claim, renew, settle
from outbox.models import Attempt, Intervention, Message, State
from outbox.operations import discard, make_due, requeue
from outbox.retention import prune, sweep
from tests import rows
from tests.model import reference
from tests.model.reference import ALONE_FROM, VERDICTS, Expected, Reference
from tests.specimens import BUDGET, check_invariants, claimer, hand_over, verdict

LONG = 7200.0  # seconds
FIRST_ID = 10**9  # ids grow in steps of ten from here, so that a late one may come between any two
COLUMNS = (
    "id", "state", "reason", "due_at", "lease_token", "holder", "lane", "attempt", "spent", "lapses", "expires_at",
    "payload_pruned",
)  # fmt: skip
WORKERS = {"all": None, "few": ("mail", "account"), "other": ("stock", "account", "ledger")}

picks = st.lists(st.integers(0, 9), min_size=1, max_size=4)
verdicts = st.one_of(st.just("delivered"), st.sampled_from(sorted(VERDICTS)))


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        assert (reference.BUDGET, ALONE_FROM) == (BUDGET, PRODUCT_ALONE_FROM)
        for model in (Attempt, Intervention, Message):
            model.objects.all().delete()
        self.reference = Reference()
        self.leases = []  # all that were granted and not settled, those of crashed workers too
        self.over = []  # leases whose row is settled, deleted or held by somebody else, as far as we know
        self.numbers = 0
        handlers = {
            name: None if names is None else [registry.by_name(each) for each in names]
            for name, names in WORKERS.items()
        }
        self.handlers = handlers
        self.claimers = {name: claimer(name, handlers=handlers[name]) for name in WORKERS}

    # --- staging

    @rule(
        name=st.sampled_from(["account", "account", "stock", "ledger", "mail"]),
        key=st.sampled_from(["a", "a", "b", None]),
        delay=st.sampled_from([None, None, None, 3600]),
        expires=st.booleans(),
        late=st.one_of(st.none(), st.none(), st.integers(0, 9)),
    )
    def stage(self, name, key, delay, expires, late):
        """A new message; ``late``: its id is lower than that of another, as if its transaction had committed late."""
        self.numbers += 1
        event_key = f"event-{self.numbers}"
        with transaction.atomic():
            staged = self._stage(name, key, event_key, self.numbers, delay, expires)
            assert staged.created
            pk = FIRST_ID + 10 * self.numbers
            if late is not None and self.reference.messages:
                pk = self._below(self._choose([late])[0])
            Message.objects.filter(pk__in=staged.ids).update(id=pk)
        row = Expected(id=pk, name=name, key=key, event_key=event_key, content=self.numbers)
        row.lane, row.expires = row.home(), "ahead" if expires else "never"
        row.when = "due" if delay is None else "later"
        self.reference.messages[pk] = row

    def _stage(self, name, key, event_key, content, delay=None, expires=False):
        return stage(
            name,
            {"n": content},
            event_key=event_key,
            ordering_key=key,
            deliver_at=None if delay is None else timedelta(seconds=delay),
            expires_at=timedelta(hours=9) if expires else None,
        )

    def _below(self, row):
        pk = row.id - 1
        while pk in self.reference.messages:
            pk -= 1
        return pk

    @precondition(lambda self: self.reference.messages)
    @rule(pick=st.integers(0, 9), same=st.booleans())
    def stage_again(self, pick, same):
        """A known event key: nothing happens, and other content is refused."""
        (row,) = self._choose([pick])
        with transaction.atomic():
            if same:
                staged = self._stage(row.name, row.key, row.event_key, row.content)
                assert (staged.created, staged.ids) == (False, (row.id,))
                return
            try:
                self._stage(row.name, row.key, row.event_key, -1)
            except EventKeyConflict:
                return
        raise AssertionError("two contents under one event key")

    # --- claims

    @rule(
        worker=st.sampled_from(sorted(WORKERS)),
        limit=st.integers(1, 3),
        start=st.sampled_from([None, None, 0, 1]),
        alone=st.booleans(),
        room=st.sampled_from([None, None, None, 0, 1]),
    )
    def claim(self, worker, limit, start, alone, room):
        caps = None if room is None else dict.fromkeys(("account", "mail", "stock"), room) | {"ledger": 2}
        found = self.claimers[worker].claim(limit, seconds=60, start=start, alone=alone, room=caps)
        names = WORKERS[worker] or tuple(self.handlers_known())
        room_of = {name: limit if caps is None else caps.get(name, 0) for name in names}
        assert len(found.leases) <= limit
        for name in names:
            assert sum(lease.handler.name == name for lease in found.leases) <= room_of[name]
        strange = [lease for lease in found.leases if self.reference.messages[lease.id].lapses >= ALONE_FROM]
        assert not strange or (alone and len(found.leases) == 1), "a repeat offender has company"
        able = [row for row in self.reference.messages.values() if row.name in names and room_of[row.name]]
        able = [row for row in able if self.reference.has_its_turn(row)]
        closed = self._take(found.leases, names, start=1 if strange else limit if start is None else start)
        if not (found.leases or closed or found.more):
            left = [row for row in able if row.lapses < ALONE_FROM or alone or self.reference.closing(row)]
            assert not left, f"left alone: {left}"
            assert found.lonely or not able

    def handlers_known(self):
        return [each.name for each in registry.handlers()]

    @precondition(lambda self: self.reference.messages)
    @rule(worker=st.sampled_from(sorted(WORKERS)), chosen=picks)
    def claim_by_id(self, worker, chosen):
        """Those messages and no others: the heads of their lanes that are due."""
        wanted = {row.id for row in self._choose(chosen)}
        names = WORKERS[worker] or tuple(self.handlers_known())
        asleep = set(Message.objects.filter(due_at=None).values_list("pk", flat=True))
        able = [self.reference.messages[pk] for pk in wanted - asleep]
        able = [row for row in able if row.name in names and self.reference.has_its_turn(row)]
        must = {row.id for row in able if row.lapses < ALONE_FROM or self.reference.closing(row)}
        before = {each: row.shown() for each, row in self.reference.messages.items()}
        found = claim(using="default", worker=worker, seconds=60, ids=wanted, handlers=self.handlers[worker])
        self._take(found, names, start=len(wanted))
        touched = {each for each, row in self.reference.messages.items() if row.shown() != before[each]}
        assert must <= touched <= wanted

    def _take(self, leases, names, *, start):
        """Each lease and each settlement that a claim made must have been right; returns the settled ones."""
        found, messages = self._rows(), self.reference.messages
        granted = {lease.id for lease in leases}
        assert len(granted) == len(leases)
        closed = [row for row in messages.values() if row.id not in granted and found.get(row.id) != row.shown()]
        for row in closed:
            assert row.name in names
            assert self.reference.has_its_turn(row), f"{row} was settled out of turn: {found.get(row.id)}"
            assert self.reference.closing(row), f"{row} was changed by a claim: {found.get(row.id)}"
        for lease in leases:
            assert lease.handler.name in names
            assert self.reference.may_start(messages[lease.id]), f"{messages[lease.id]} was leased"
        for row in closed:
            self.reference.close(row)
        charged = [lease.charged for lease in leases]
        # Each row that was settled may have stood in the place of one to be charged, whose charge is made at its start.
        assert min(start, len(leases)) - len(closed) <= sum(charged) <= start
        assert charged == sorted(charged, reverse=True), "those that start come first"
        for lease in leases:
            self._grant(lease)
        return closed

    def _grant(self, lease):
        row = self.reference.messages[lease.id]
        assert all(lease.token != each.token or lease.id != each.id for each in self.leases)
        self.reference.grant(row, lease.token, charged=lease.charged)
        assert (lease.attempt, lease.message.spent, lease.message.lapses) == (row.attempt, row.spent, row.lapses)
        self.leases.append(lease)

    # --- what holders do

    @precondition(lambda self: self.leases)
    @rule(chosen=picks)
    def charge(self, chosen):
        wanted = [lease for lease in self._leases(chosen) if not lease.charged]
        expected = [lease for lease in wanted if self._stands(lease)]
        assert charge("default", wanted) == expected
        for lease in expected:
            self.reference.messages[lease.id].spent += 1

    @precondition(lambda self: self.leases)
    @rule(chosen=picks)
    def renew(self, chosen):
        wanted = self._leases(chosen)
        standing = {lease for lease in wanted if self._stands(lease)}
        result = renew("default", wanted, 60)
        assert (result.renewed, result.lost, result.busy) == (standing, set(wanted) - standing, set())
        for lease in standing:
            self.reference.messages[lease.id].when = "later"

    @precondition(lambda self: self.leases)
    @rule(chosen=picks, names=st.lists(verdicts, min_size=4, max_size=4), onward=st.booleans(), twice=st.booleans())
    def settle(self, chosen, names, onward, twice):
        """A group, stale leases among it; a second word on the same lease comes too late."""
        leases = self._leases(chosen)
        given = [verdict(lease, name) for lease, name in zip(leases, names, strict=False)]
        if twice:
            given.append(verdict(leases[0], "dead"))
        standing = [self._stands(lease) for lease in leases] + [False] * twice
        results = settle("default", given, hand_over=hand_over if onward else None)
        assert [each.status for each in results] == ["settled" if each else "lost" for each in standing]
        handed = []
        for each, name, stands in zip(results, names, standing, strict=False):
            lease = each.settlement.lease
            if stands:
                row = self.reference.messages[lease.id]
                lane = row.lane
                self.reference.settle(row, name, charged=lease.charged, attempt=lease.attempt)
                handed.append((each, lane))
        for each, lane in handed:
            self._check_next(each, lane, onward)
        self.leases = [lease for lease in self.leases if lease not in leases]
        self.over = [*self.over, *leases][-6:]

    def _check_next(self, each, lane, onward):
        in_lane = [row for row in self.reference.messages.values() if lane is not None and row.lane == lane]
        settled = (
            each.settlement.lease.id
        )  # given back, it may be the first of its lane again, and does not follow itself
        able = [row for row in in_lane if self.reference.may_follow(row) and row.id != settled]
        if each.next is None:
            assert not (able and onward) or each.settlement.lease.run + 1 >= 20, f"not handed over: {able}"
            return
        assert onward
        assert able == [self.reference.messages[each.next.id]], f"handed over: {each.next.message}"
        assert each.next.charged
        self._grant(each.next)

    @precondition(lambda self: self.over)
    @rule(pick=st.integers(0, 9), name=verdicts)
    def settle_too_late(self, pick, name):
        """A lease that is over changes nothing, whatever it says."""
        lease = self.over[pick % len(self.over)]
        (result,) = settle("default", [verdict(lease, name)], hand_over=hand_over)
        assert (result.status, result.next) == ("lost", None)
        assert renew("default", [lease], 60).lost == {lease}
        lease.charged = False
        assert charge("default", [lease]) == []

    def _stands(self, lease):
        row = self.reference.messages.get(lease.id)
        return row is not None and row.token == lease.token

    # --- time passes, and processes die

    @rule(worker=st.sampled_from(sorted(WORKERS)))
    def crash(self, worker):
        """A process forgets what it holds, and nobody tells the database."""
        self.leases = [lease for lease in self.leases if lease.worker != worker]

    @precondition(lambda self: any(row.held for row in self.reference.messages.values()))
    @rule(chosen=picks)
    def lapse(self, chosen):
        """Leases run out; their holders may be dead, or only slow: they may still come back."""
        held = [row for row in self._sorted() if row.held]
        self._pass({held[number % len(held)].id for number in chosen}.__contains__)

    @rule()
    def time_passes(self):
        """Backoffs and delivery times are over."""
        self._pass(lambda pk: self.reference.messages[pk].token is None)

    def _pass(self, chosen):
        waiting = [row for row in self.reference.messages.values() if row.when == "later" and chosen(row.id)]
        for row in waiting:
            row.when = "due"
        Message.objects.filter(pk__in=[row.id for row in waiting]).update(due_at=rows.ago(900))

    @precondition(lambda self: any(row.expires == "ahead" for row in self.reference.messages.values()))
    @rule(pick=st.integers(0, 9))
    def expire(self, pick):
        able = [row for row in self._sorted() if row.expires == "ahead"]
        row = able[pick % len(able)]
        row.expires = "past"
        Message.objects.filter(pk=row.id).update(expires_at=rows.ago(1))

    # --- what people do

    @precondition(lambda self: self.reference.messages)
    @rule(verb=st.sampled_from([requeue, discard, make_due]), chosen=picks, unknown=st.booleans())
    def operate(self, verb, chosen, unknown):
        wanted = self._choose(chosen)
        answers = {row.id: getattr(self.reference, verb.__name__)(row) for row in wanted}
        done = verb("default", [row.id for row in wanted] + [1] * unknown, actor="Ann")
        skipped = dict(done.skipped)
        assert skipped.pop(1, None) == ("not found" if unknown else None)
        assert sorted(done.done) == sorted(pk for pk, refusals in answers.items() if refusals is None)
        assert all(reason in answers[pk] for pk, reason in skipped.items())

    @precondition(lambda self: any(row.state != "pending" for row in self.reference.messages.values()))
    @rule(what=st.sampled_from(["payloads", "rows", "dead too"]), chosen=picks)
    def prune(self, what, chosen):
        """Some settled messages have grown old."""
        settled = [row for row in self._sorted() if row.state != "pending"]
        for row in [settled[number % len(settled)] for number in chosen]:
            row.old = True
            Message.objects.filter(pk=row.id).update(settled_at=rows.ago(LONG))
        limit = LONG / 2
        if what == "payloads":
            self.reference.prune_payloads()
            prune("default", payloads_after=limit, after=0, dead_after=0)
        else:
            self.reference.prune(dead=what == "dead too")
            prune("default", payloads_after=0, after=limit, dead_after=limit if what == "dead too" else 0)

    @rule()
    def sweep(self):
        sweep("default")

    @precondition(lambda self: self.reference.messages)
    @rule(pick=st.integers(0, 9))
    def delete_by_hand(self, pick):
        """Hand-written SQL may strand a lane; a sweep heals it."""
        (row,) = self._choose([pick])
        Message.objects.filter(pk=row.id)._raw_delete("default")
        Attempt.objects.filter(message_id=row.id).delete()
        del self.reference.messages[row.id]
        sweep("default")

    # --- what holds after each step

    @invariant()
    def all_is_well(self):
        """Both agree, and nothing is illegal."""
        found = self._rows()
        expected = {row.id: row.shown() for row in self.reference.messages.values()}
        assert found == expected, difference(found, expected)
        check_invariants()

    def teardown(self):
        """With time passing and nobody meddling everything ends, and nobody sleeps for ever."""
        for _ in range(80):
            self._pass(lambda pk: True)
            self.claim("all", 3, None, True, None)
            self.all_is_well()
            while standing := [lease for lease in self.leases if self._stands(lease)]:
                self.leases = standing
                self.settle(list(range(len(standing))), ["delivered"] * len(standing), True, False)
                self.all_is_well()
            left = [row for row in self.reference.messages.values() if row.state == "pending"]
            if all(row.lane and self.reference.target(row.lane).state == "dead" for row in left):
                return
        raise AssertionError(f"never ends: {left}")

    # --- helpers

    def _sorted(self):
        return sorted(self.reference.messages.values(), key=lambda row: row.id)

    def _choose(self, numbers):
        known = self._sorted()
        return list({known[number % len(known)].id: known[number % len(known)] for number in numbers}.values())

    def _leases(self, numbers):
        return list(dict.fromkeys(self.leases[number % len(self.leases)] for number in numbers))

    def _rows(self):
        """What is stored, in the words of the reference."""
        now = rows.now()
        attempts = {}
        for pk, number, outcome in Attempt.objects.values_list("message_id", "number", "outcome"):
            attempts.setdefault(pk, []).append((number, str(outcome)))
        return {
            values[0]: shown(SimpleNamespace(**dict(zip(COLUMNS, values, strict=True))), now, attempts)
            for values in Message.objects.values_list(*COLUMNS)
        }


def shown(row, now, attempts):
    when = "due" if row.due_at is None or row.due_at <= now else "later"
    expires = "never" if row.expires_at is None else "past" if row.expires_at <= now else "ahead"
    return {
        "state": str(row.state),
        "reason": str(row.reason),
        "when": when if row.state == State.PENDING else row.due_at,
        "token": row.lease_token,
        "holds": row.holder is not None and row.holder == row.lane,
        "in_lane": row.lane is not None,
        "attempt": row.attempt,
        "spent": row.spent,
        "lapses": row.lapses,
        "expires": expires,
        "pruned": row.payload_pruned,
        "attempts": sorted(attempts.get(row.id, [])),
    }


def difference(found, expected):
    pairs = {pk: (found.get(pk), expected.get(pk)) for pk in {*found, *expected} if found.get(pk) != expected.get(pk)}
    return "\n".join(f"message {pk}\n  is       {one}\n  must be  {other}" for pk, (one, other) in pairs.items())
