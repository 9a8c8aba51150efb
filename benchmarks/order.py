"""What order costs: the rate in one lane, in many, and behind a lane that is blocked, compared with no order at all.

    python benchmarks/order.py [--database URL] [--quick] [--json FILE]

Each case has a backlog of 100,000 due messages and works on it for some seconds, with what it costs at the start to put
the followers of a lane to sleep. Then claims and settlements of messages in lanes are timed, one after another, at a
tenth of the backlog and at the whole, from the start and once all followers sleep. Last, nine tenths of the backlog
stand behind one head that waits until tomorrow: it is measured when the first of the other lanes is delivered, when all
of them are, and whether messages that come later are delivered as fast as without that backlog. Exits with 1, and a
last line that names what fell short, when a limit is broken.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import Any

import bare
from ground import Sheet, arguments, dispatcher, empty, fill, rate, scratch_databases

SHARES = {"1 lane, lists of 100": 0.3, "100 lanes": 0.5, "50,000 lanes": 0.5}  # of our own unordered
MESSAGE_BY_MESSAGE = 1_000.0  # a second, in one lane
STEP_RATIO = 1.5  # of claim and settlement, at the whole backlog compared with a tenth
FIRST_SECONDS = 2.5  # until the first of the other lanes, behind a blocked one
BLOCKED_SHARE = 0.25  # of our own unordered: all of the other lanes
LATER_SHARE = 0.9  # of the rate without a parked backlog
UNORDERED = "benchmark.noop"
ORDERED = "benchmark.ordered"
LISTED = "benchmark.listed"
BARE = "bare loop"
SINGLY = "bare loop, one transaction per message"
BLOCKED_LANE = 7
BATCH = 100
LONGEST = 120.0  # seconds of one case


class Clock:
    """When the first message was handled."""

    def __init__(self) -> None:
        self.first: float | None = None

    def note(self, message: Any) -> None:
        if self.first is None:
            self.first = time.perf_counter()


CLOCK = Clock()


def fill_lanes(connection: Any, rows: int, lanes: int, prefix: str = "row", topic: str = ORDERED) -> None:
    """Due messages that take the lanes in turn."""
    fill(connection, rows, prefix=prefix, topic=topic, lane=f"1000 + n % {lanes}")


def rate_for(topic: str, seconds: float) -> float:
    """Messages a second of one dispatcher that works so long, or until nothing is left."""
    work = dispatcher([topic])
    thread = threading.Thread(target=work.run)
    start = time.perf_counter()
    thread.start()
    thread.join(seconds)
    count, elapsed = work.counts["delivered"], time.perf_counter() - start
    work.stop()
    thread.join()
    return float(count / elapsed)


def rate_until(topic: str, count: int, using: str = "default") -> float:
    """Messages a second of one dispatcher until it has delivered so many."""
    work = dispatcher([topic], using=using, mode="run")
    thread = threading.Thread(target=work.run)
    start = time.perf_counter()
    thread.start()
    while work.counts["delivered"] < count:
        if time.perf_counter() - start > LONGEST:
            raise SystemExit(f"{work.counts} after {LONGEST:g} s instead of {count}: no measurement.")
        time.sleep(0.005)
    elapsed = time.perf_counter() - start
    work.stop()
    thread.join()
    return count / elapsed


def rates(connection: Any, sheet: Sheet, *, rows: int, seconds: float, rounds: int) -> float:
    """Each case in turn; returns our rate without order."""
    cases = {
        "1 lane, message by message": (ORDERED, 1),
        "1 lane, lists of 100": (LISTED, 1),
        "100 lanes": (ORDERED, 100),
        "50,000 lanes": (ORDERED, 50_000),
    }
    found: dict[str, list[float]] = {name: [] for name in (BARE, SINGLY, "unordered", *cases)}
    for _ in range(rounds):
        empty(connection)
        fill(connection, rows // 5, prefix="row", topic=UNORDERED)
        found[BARE].append(rate(lambda: bare.in_batches(connection, UNORDERED), rows // 5))
        empty(connection)
        fill(connection, rows // 50, prefix="row", topic=UNORDERED)
        found[SINGLY].append(rate(lambda: bare.one_by_one(connection, UNORDERED), rows // 50))
        empty(connection)
        fill(connection, rows, prefix="row", topic=UNORDERED)
        found["unordered"].append(rate_for(UNORDERED, seconds))
        for name, (topic, lanes) in cases.items():
            empty(connection)
            fill_lanes(connection, rows, lanes, topic=topic)
            found[name].append(rate_for(topic, seconds))
    for name, values in found.items():
        sheet.note(name, values, "/s")
    for name in ("unordered", *cases):
        sheet.ratio(f"{name} / {BARE}", found[name], found[BARE])
    sheet.ratio(f"1 lane, message by message / {SINGLY}", found["1 lane, message by message"], found[SINGLY])
    for name in cases:
        sheet.ratio(f"{name} / unordered", found[name], found["unordered"])
    for name, share in SHARES.items():
        sheet.demand(f"{name} / unordered", at_least=share)
    sheet.demand("1 lane, message by message", at_least=MESSAGE_BY_MESSAGE)
    return statistics.median(found["unordered"])


def claimer(using: str) -> Any:
    from outbox.handlers import registry
    from outbox.leases import Claimer

    return Claimer(using=using, worker="order", handlers=[each for each in registry.handlers() if each.name == ORDERED])


def steps(using: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of so many claims, and of the settlements of what they and the hand-overs brought."""
    from outbox.leases import settle
    from outbox.verdicts import judge

    claiming = claimer(using)
    claims, settlements = [], []
    for _ in range(count):
        start = time.perf_counter()
        leases = claiming.claim(BATCH, seconds=60).leases
        claims.append((time.perf_counter() - start) * 1000)
        for _ in range(3):
            if not leases:
                break
            start = time.perf_counter()
            settled = settle(using, [judge(lease, None, 0.0) for lease in leases], hand_over=lambda lease: True)
            settlements.append((time.perf_counter() - start) * 1000)
            leases = [each.next for each in settled if each.next is not None]
        settle(using, [judge(lease, None, 0.0) for lease in leases])
    return claims, settlements


def park(using: str) -> None:
    """Claim until all followers sleep, and give back what the claims brought."""
    from outbox.leases import settle
    from outbox.verdicts import release

    claiming = claimer(using)
    leases = []
    while True:
        claim = claiming.claim(BATCH, seconds=600)
        leases += claim.leases
        if not (claim.leases or claim.more):
            break
    settle(using, [release(lease) for lease in leases])


def growth(few: Any, many: Any, sheet: Sheet, *, rows: int, count: int) -> None:
    """Claims and settlements at a tenth of the backlog and at the whole, in turn; at first, and once all is parked."""
    sizes = {rows // 10: few, rows: many}
    for lanes, parked in ((1, False), (1, True), (100, False), (100, True), (50_000, False)):
        for size, connection in sizes.items():
            if parked:
                park(connection.alias)
            else:
                empty(connection)
                fill_lanes(connection, size, lanes)
        times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in sizes}
        for _ in range(count):
            for size, connection in sizes.items():
                for into, values in zip(times[size], steps(connection.alias, 1), strict=True):
                    into += values
        for part, kind in enumerate(("claim", "settlement")):
            name = f"{lanes:,} lanes{', parked' * parked}, {kind} at"
            median = {size: sheet.note(f"{name} {size:,}", found[part], "ms") for size, found in times.items()}
            name = f"{name} {rows:,} / at {rows // 10:,}"
            sheet.note(name, median[rows] / median[rows // 10])
            sheet.demand(name, at_most=STEP_RATIO)


def blocked(connection: Any, clean: Any, sheet: Sheet, *, rows: int, rounds: int) -> None:
    """Nine tenths of the backlog behind one head that waits, the rest in lanes of ten messages."""
    others = rows // 10
    first, all_of_them, unordered, later, without = [], [], [], [], []
    for _ in range(rounds):
        empty(connection)
        fill(connection, 1, prefix="head", topic=ORDERED, due="tomorrow", lane=str(BLOCKED_LANE))
        fill(connection, rows - others, prefix="behind", topic=ORDERED, lane=str(BLOCKED_LANE))
        fill_lanes(connection, others, others // 10, "other")
        CLOCK.first = None
        start = time.perf_counter()
        all_of_them.append(rate_until(ORDERED, others))
        assert CLOCK.first is not None
        first.append(CLOCK.first - start)
        fill_lanes(connection, others, others // 10, "later")
        later.append(rate_until(ORDERED, others))
        empty(clean)
        fill_lanes(clean, others, others // 10, "later")
        without.append(rate_until(ORDERED, others, clean.alias))
        empty(clean)
        fill(clean, others, prefix="row", topic=UNORDERED)
        unordered.append(rate_until(UNORDERED, others, clean.alias))
    sheet.note("blocked lane: first of the others after", first, "s")
    sheet.demand("blocked lane: first of the others after", at_most=FIRST_SECONDS)
    sheet.note("blocked lane: all of the others", all_of_them, "/s")
    sheet.ratio("blocked lane: all of the others / unordered", all_of_them, unordered)
    sheet.demand("blocked lane: all of the others / unordered", at_least=BLOCKED_SHARE)
    sheet.note("blocked lane: messages that come later", later, "/s")
    sheet.ratio("blocked lane: later / without that lane", later, without)
    sheet.demand("blocked lane: later / without that lane", at_least=LATER_SHARE)


def main() -> int:
    given = arguments(__doc__ or "")
    rows, seconds, rounds, count = (40_000, 4.0, 1, 5) if given.quick else (100_000, 10.0, 3, 12)
    with scratch_databases(given.database, "many") as [connection, many]:
        from outbox import handler

        handler(UNORDERED, ordering="none")(lambda message: None)
        handler(ORDERED)(CLOCK.note)
        handler(LISTED, batch=BATCH)(lambda messages: None)
        sheet = Sheet(quick=given.quick)
        print(f"{connection.display_name}: a backlog of {rows:,}, {seconds:g} s of each, {rounds} rounds")
        rates(connection, sheet, rows=rows, seconds=seconds, rounds=rounds)
        growth(connection, many, sheet, rows=rows, count=count)
        blocked(connection, many, sheet, rows=rows, rounds=rounds)
        return sheet.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
