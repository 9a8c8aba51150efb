"""Dispatchers die, freeze and lose the database while messages come in; afterwards the books must balance.

The books are the journal that handlers keep outside the database, and the test's own list of what it committed.
"""

import random
import signal
import threading
import time
from collections import Counter
from itertools import pairwise

import pytest
from django.db import Error, connection, connections, transaction

from outbox import stage
from outbox.database import server_now
from outbox.fields import from_micros
from outbox.models import Attempt, Message, State
from tests.running import cut_sessions
from tests.specimens import broken_invariants
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

LEASE = 1.2
SECONDS = 15.0
LANES = 8
STEPS = ([], [], [["sleep", 0.05]], [["sleep", 0.3]], [["fail", 1]])


class Business:
    """Commits and rolls back in a thread, and remembers which."""

    def __init__(self, seed):
        self.committed = {}  # key -> when it was visible at the latest
        self.rolled_back = set()
        self._random = random.Random(seed)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self):
        self._stopped.set()
        self._thread.join()

    def _work(self):
        number = 0
        while not self._stopped.wait(self._random.uniform(0.01, 0.06)):
            keys = [f"{number + n}" for n in range(self._random.choice([1, 1, 3]))]
            number += len(keys)
            try:
                committed = self._transact(keys)
            except Error:  # its session was cut, too; whether before or after the commit can only be asked
                connection.close()
                committed = Message.objects.filter(event_key__in=keys).exists()
            if committed:
                now = time.monotonic()
                self.committed.update(dict.fromkeys(keys, now))
            else:
                self.rolled_back.update(keys)
        connections.close_all()

    def _transact(self, keys):
        rolls_back = self._random.random() < 0.15
        with transaction.atomic():
            for key in keys:
                topic = self._random.choice(["lane", "lane", "work"])
                lane = str(self._random.randrange(LANES)) if topic == "lane" else None
                stage(topic, {"do": self._random.choice(STEPS)}, event_key=key, ordering_key=lane)
            if connection.vendor != "sqlite" and self._random.random() < 0.2:
                time.sleep(0.3)  # the late committer with the lower ids
            transaction.set_rollback(rolls_back)
        return not rolls_back


def torment(dispatch, frozen, source):
    """Let three dispatchers work, and do things to them; returns those that work at the end."""
    processes = [dispatch(lease=LEASE, grace=1) for _ in range(3)]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(source.uniform(0.1, 0.6))
        place = source.randrange(3)
        process = processes[place]
        match source.choice(["kill", "freeze", "freeze", "stop", "cut"]):
            case _ if process.poll() is not None:
                processes[place] = dispatch(lease=LEASE, grace=1)
            case "kill":
                process.kill()
            case "stop":
                process.terminate()
            case "freeze":
                process.send_signal(signal.SIGSTOP)
                since = time.monotonic()
                time.sleep(source.choice([0.3, 1.5 * LEASE]))
                process.send_signal(signal.SIGCONT)
                frozen.setdefault(process.pid, []).append((since, time.monotonic()))
            case "cut" if connection.vendor != "sqlite":
                cut_sessions()
    return [each if each.poll() is None else dispatch(lease=LEASE) for each in processes]


@pytest.mark.timeout(180)
def test_the_books_balance_whatever_happens_to_the_dispatchers(dispatch, journal):
    """Invariants 4 to 7 and 11; nothing is parked for ever, and no sweep helps."""
    seed = random.randrange(10**6)
    print("seed", seed)
    business, frozen = Business(seed), {}
    try:
        torment(dispatch, frozen, random.Random(seed))
    finally:
        business.stop()
    wait_until(lambda: not Message.objects.pending().exists(), 90)
    rows = {row["event_key"]: row for row in Message.objects.values()}
    assert rows.keys() == business.committed.keys()
    assert {row["state"] for row in rows.values()} == {State.DELIVERED}
    assert broken_invariants(rows.values(), from_micros(server_now("default"))) == []
    starts, ends = journal.lines("start"), journal.lines("end")
    assert {line["key"] for line in ends} == business.committed.keys()
    assert not {line["key"] for line in starts} & business.rolled_back
    assert max(Counter(Attempt.objects.filter(outcome="delivered").values_list("message_id", flat=True)).values()) == 1
    for lane in map(str, range(LANES)):
        check_lane([x for x in starts if x["lane"] == lane], [x for x in ends if x["lane"] == lane], business, frozen)


def check_lane(starts, ends, business, frozen):
    """One at a time, unless the first one's process was frozen; and in the order of ids among what was visible."""
    end_of = {(line["id"], line["attempt"]): line["at"] for line in ends}
    for before, after in pairwise(starts):
        over = end_of.get((before["id"], before["attempt"]), before["at"])
        thawed = any(since <= after["at"] and until >= before["at"] for since, until in frozen.get(before["pid"], ()))
        assert over <= after["at"] or thawed, f"{before} and {after} overlap"
    first = {}
    for line in starts:
        first.setdefault(line["id"], line)
    done = {pk: min(at for (each, _), at in end_of.items() if each == pk) for pk in first}
    for pk, line in first.items():
        for earlier in (each for each in first.values() if each["id"] < pk):
            if business.committed[earlier["key"]] + 2 * LEASE + 1 < line["at"]:
                assert done[earlier["id"]] <= line["at"], f"{line} overtook {earlier}"
