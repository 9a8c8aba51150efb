"""Real transactions on random legal lanes, interleaved statement by statement; the invariants hold after each commit.

A seed chooses the lanes, what each actor does, and who takes the next step. A failure prints it; run that one again
with OUTBOX_SEED=<seed>.
"""

import os
import random
import time
from types import SimpleNamespace

import pytest
from django.db import connection, transaction

from outbox.handlers import registry
from outbox.leases import charge, draw_token, renew, settle
from outbox.leases.lease import hold
from outbox.models import Attempt, Message, State
from outbox.operations import discard, make_due, requeue
from tests import rows
from tests.specimens import (
    BUDGET,
    VERDICTS,
    broken_invariants,
    check_invariants,
    claimer,
    hand_over,
    specimens,
    verdict,
)
from tests.stepping import Actor, Director

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]

SECONDS = float(os.environ.get("OUTBOX_INTERLEAVING_SECONDS", "2"))  # of the short run
LONG_SECONDS = 100  # at most, on each database
NAMES = ("account", "stock")
FIRST_ID, STEP = 1000, 10  # between two messages there is room for a late one with a lower id


@pytest.fixture
def cast(monkeypatch):
    """Four actors; and nobody sleeps between two tries, for who takes the next step is chosen here."""
    monkeypatch.setattr("outbox.leases.settling.PAUSES", (0.0, 0.0))
    monkeypatch.setattr("outbox.database.transactions.time", SimpleNamespace(sleep=lambda seconds: None))
    actors = [Actor(f"actor-{number}") for number in range(4)]
    yield actors
    for actor in actors:
        actor.close()


# --- random legal lanes -----------------------------------------------------------------------------------------------


def bare_row(pk, name, key, now):
    """A message that was just staged."""
    return {
        "id": pk,
        "event_key": f"message-{pk}",
        "topic": name,
        "handler": name,
        "route": name,
        "payload": {},
        "digest": b"",
        "ordering_key": key,
        "staged_at": now,
        "lane": registry.by_name(name).lane(key),
        "state": State.PENDING,
        "due_at": now,
        "lease_token": None,
        "holder": None,
        "attempt": 0,
        "spent": 0,
        "lapses": 0,
        "expires_at": None,
    }


def draw_row(chance, number, now, keys):
    """A message somewhere in a lane of one of these keys, each a little different."""
    name = chance.choice(NAMES)
    row = bare_row(FIRST_ID + number * STEP, name, chance.choice(keys), now - number - 1)
    lane = row["lane"]
    where = chance.choice(["due", "due", "parked", "waiting", "leased", "lapsed", "blocking"])
    if where == "parked":
        row |= {"due_at": None}
    elif where == "waiting":
        row |= {"due_at": now + 3600 * 10**6, "attempt": 1, "spent": 1}
    elif where in ("leased", "lapsed"):
        due = now + 3600 * 10**6 if where == "leased" else now - 1000
        row |= {"due_at": due, "lease_token": draw_token(), "holder": lane, "attempt": 1, "spent": 1}
    elif where == "blocking":
        row |= {"state": State.DEAD, "due_at": None, "settled_at": now, "lane": lane if name == "stock" else None}
    elif chance.random() < 0.2:
        over = {"spent": BUDGET, "attempt": BUDGET}
        row |= chance.choice([{"expires_at": now - 1}, over, {"lapses": 1}, {"lapses": 2}])
    return row


def draw_lanes(chance):
    """Rows that are legal together."""
    now = int(time.time() * 10**6)
    keys = chance.choice([["a"], ["a", "a", "a", "b", None], ["a", "b"], [None]])
    while True:
        drawn = [draw_row(chance, number, now, keys) for number in range(chance.randint(2, 6))]
        holders = [row["holder"] for row in drawn if row["holder"] is not None]
        if len(holders) == len(set(holders)) and not broken_invariants(drawn, now):
            return drawn


# --- what actors do ---------------------------------------------------------------------------------------------------


class World:
    """The leases that are out, and what became of them."""

    def __init__(self, chance, leases):
        self.chance = chance
        self.free = leases  # nobody settles them yet
        self.granted = []
        self.ids = [FIRST_ID + number * STEP for number in range(6)]
        self.late_ids = chance.sample([pk - n for pk in self.ids for n in range(1, STEP)], 4)

    def draw_job(self):
        jobs = [self.claim, self.claim, self.claim, self.claim_one, self.stage_late, self.operate, self.operate]
        if self.free:
            jobs += [self.settle, self.settle, self.settle, self.renew]
        return self.chance.choice(jobs)()

    def claim(self):
        limit, alone = self.chance.randint(1, 3), self.chance.random() < 0.5
        seconds = self.chance.choice([60, 60, -1])
        start = self.chance.choice([None, 0, 1])

        def job():
            self.granted += claimer().claim(limit, seconds=seconds, start=start, alone=alone).leases

        return job

    def claim_one(self):
        pk = self.chance.choice(self.ids)

        def job():
            self.granted += claimer().claim_only([pk], seconds=60)

        return job

    def settle(self):
        leases = self.chance.sample(self.free, self.chance.randint(1, len(self.free)))
        settlements = [verdict(lease, self.chance.choice(["delivered", "delivered", *VERDICTS])) for lease in leases]
        onward = self.chance.choice([hand_over, None])

        def job():
            left = settlements
            for _ in range(10):
                results = settle("default", left, hand_over=onward)
                self.granted += [each.next for each in results if each.next]
                left = [each.settlement for each in results if each.status == "busy"]
                if not left:
                    break

        return job

    def renew(self):
        leases = list(self.free)

        def job():
            renew("default", leases, 60)
            charge("default", [lease for lease in leases if not lease.charged])

        return job

    def stage_late(self):
        name, key = self.chance.choice(NAMES), self.chance.choice("ab")
        row = bare_row(self.late_ids.pop(), name, key, int(time.time() * 10**6))

        def job():
            with transaction.atomic():
                Message.objects.bulk_create([Message(**row)])

        return job

    def operate(self):
        verb, pk = self.chance.choice([discard, requeue, make_due]), self.chance.choice(self.ids)
        return lambda: verb("default", [pk])


def leases_of(drawn):
    """The leases that the drawn rows carry, as their workers hold them."""
    held = Message.objects.filter(pk__in=[row["id"] for row in drawn if row["lease_token"]])
    handlers = [registry.by_name(row.handler) for row in held]
    now = time.monotonic()
    return [hold("default", *pair, deadline=now, charged=True) for pair in zip(held, handlers, strict=True)]


def explore(seed, actors):
    """One world, two to four jobs in it, one interleaving; then everything must still drain."""
    chance = random.Random(seed)
    Message.objects.all().delete()
    Attempt.objects.all().delete()
    drawn = draw_lanes(chance)
    Message.objects.bulk_create(Message(**row) for row in drawn)
    world = World(chance, leases_of(drawn))
    playing = actors[: chance.randint(2, 4)]
    for actor in playing:
        actor.begin(world.draw_job())
    Director(playing, one_writer=connection.vendor == "sqlite").play(chance, check_invariants)
    for actor in playing:
        if actor.error is not None:
            raise actor.error
    check_attempts(drawn, world)
    drain()


def check_attempts(drawn, world):
    """Each lease that was granted is one attempt, and no attempt is anything else."""
    expected = {row["id"]: row["attempt"] for row in drawn}
    for lease in world.granted:
        expected[lease.id] = expected.get(lease.id, 0) + 1
    found = dict(Message.objects.values_list("pk", "attempt"))
    assert {pk: attempt for pk, attempt in found.items() if attempt} == {pk: n for pk, n in expected.items() if n}
    numbers = [(lease.id, lease.attempt) for lease in world.granted]
    assert len(numbers) == len(set(numbers))


def drain():
    """With time passing and nobody meddling everything ends, in the order of its lane, and nobody sleeps for ever."""
    own, started = claimer(), []
    for _ in range(60):
        Message.objects.filter(state=State.PENDING, due_at__gt=rows.now()).update(due_at=rows.ago(1))
        claim = own.claim(10, seconds=60)
        leases = claim.leases
        while leases:
            started += [(lease.message.lane, lease.id, lease.message.lapses) for lease in leases]
            results = settle("default", [verdict(lease) for lease in leases], hand_over=hand_over)
            assert {each.status for each in results} == {"settled"}
            check_invariants()
            leases = [each.next for each in results if each.next]
        if not Message.objects.filter(state=State.PENDING, due_at__isnull=False).exists():
            break
    blocked = set(Message.objects.dead().exclude(lane=None).values_list("lane", flat=True))
    asleep = Message.objects.pending()
    assert {row.lane for row in asleep} <= blocked, list(asleep.values())
    return started


def run(actors, seconds, least):
    """Explore so many seconds, and so many interleavings at least; only the given one, if a seed is given."""
    fixed = os.environ.get("OUTBOX_SEED")
    seeds = [int(fixed)] if fixed else iter(lambda: random.randrange(10**9), None)
    end, done = time.monotonic() + seconds, 0
    for seed in seeds:
        try:
            explore(seed, actors)
        except BaseException as error:
            steps = "\n".join(f"{actor.name}: {step[:150]}" for actor in actors for step in actor.log)
            error.add_note(f"OUTBOX_SEED={seed}, after {done} interleavings\n{steps}")
            raise
        done += 1
        if done >= least and time.monotonic() > end:
            break
    print(f"{done} interleavings")


def test_no_interleaving_breaks_an_invariant(cast):
    run(cast, SECONDS, least=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_interleaving_of_thousands_breaks_an_invariant(cast):
    run(cast, LONG_SECONDS, least=100)
