"""The checker: reads what a run left behind, and says what of the promises was broken, as sentences.

It trusts the journal, which is written outside of the databases by writers, handlers and the conductor, and asks of the
tables that they agree with it. Each claim is a function that yields violations; `test_checker` doctors a journal or a
table for each of them.
"""

from collections import Counter, defaultdict

from tests.chaos import terms as given
from tests.chaos.attempts import (
    claim_atomic_effects_are_there_exactly_once,
    claim_attempts_are_charged_exactly,
    claim_attempts_end_as_their_handlers_did,
)
from tests.chaos.evidence import LAPSED, worker_pid
from tests.specimens import broken_invariants

SLACK = 1.0  # seconds between a look at the head of a lane and the lease that is written because of it, at most
PATIENCE = 1.0  # seconds that a crowded machine may add to what is measured in peace
CLOCKS = 0.05  # seconds by which two readings of clocks may differ


def check(evidence):
    """All violations, by the claim that they break; a claim that holds has none."""
    return {claim.__name__.removeprefix("claim_"): list(claim(evidence)) for claim in CLAIMS}


# --- every message, and no other --------------------------------------------------------------------------------------


def claim_all_committed_is_there(evidence):
    """What was committed has one row; what was rolled back has none, and was never executed."""
    rows = Counter(row["event_key"] for row in evidence.messages)
    fates = evidence.fates()
    for key, fate in fates.items():
        if "committed" in fate and rows[key] != 1:
            yield f"{key} was committed and has {rows[key]} rows: LOST"
        elif fate == {"rolled back"} and rows[key]:
            yield f"{key} was rolled back and has a row"
    for key in rows.keys() - fates.keys():
        yield f"{key} has a row, and nobody staged it"
    for each in [*evidence.executions.values(), *evidence.doubles]:
        if fates.get(each.key, {"rolled back"}) == {"rolled back"}:
            yield f"{each.key} was executed, and never committed"


def claim_no_transaction_is_torn(evidence):
    """A transaction whose end nobody was told, since its writer or the server died, is there as a whole or not at all.

    Judged by the keys that no other transaction staged.
    """
    rows = {row["event_key"] for row in evidence.messages}
    keys_of = {line["transaction"]: line["keys"] for line in evidence.by_event["begun"]}
    times = Counter(key for keys in keys_of.values() for key in keys)
    for number, end in evidence.endings().items():
        own = [key for key in keys_of[number] if times[key] == 1]
        if end == "unknown" and 0 < len(rows.intersection(own)) < len(own):
            yield f"transaction {number} was torn: of {own} there is {sorted(rows.intersection(own))}"


def claim_each_key_is_created_once(evidence):
    """Among the committed transactions that staged a key, one created it, unless one is unknown that may have."""
    created = Counter(key for line in evidence.by_event["committed"] for key in line["created"])
    for key, fate in evidence.fates().items():
        if created[key] > 1:
            yield f"{key} was created {created[key]} times"
        elif "committed" in fate and "unknown" not in fate and not created[key]:
            yield f"{key} was committed, and nobody created it"


def claim_every_message_comes_to_its_end(evidence):
    """Delivered by an execution that ended well; dead with its budget spent or buried; discarded as planned."""
    if not evidence.drained:
        yield "not all messages came to an end in time"
    for row in evidence.messages:
        last = evidence.executions.get((row["id"], row["attempt"]))
        if wrong := wrong_end(row, evidence.planned[row["event_key"]], last):
            yield f"message {row['id']} ({row['event_key']}, {row['topic']}) {wrong}"


def wrong_end(row, draft, last):
    """What is wrong with the final state of a message, or "". ``last``: the execution of its last attempt."""
    end = f"is {row['state']} ({row['reason']}) at attempt {row['attempt']}, {row['spent']} spent"
    step = last.step if last is not None else "nothing"
    if row["state"] == "pending":
        return f"{end}, {'parked' if row['due_at'] is None else 'due or waiting'}: UNDELIVERED"
    if draft.life:
        as_planned = (row["state"], row["reason"], last) == ("discarded", "expired", None)
        return "" if as_planned else f"{end}, and was to expire"
    if row["state"] == "delivered":
        well = last is not None and last.result == "ok" and step in ("sleep", "close")
        return "" if well else f"{end}, and no execution of it ended well"
    if row["state"] == "dead" and row["reason"] != "buried":
        is_spent = row["spent"] >= given.TOPICS[row["topic"]].budget
        return "" if is_spent else f"{end}: its budget was not spent"
    asked = {"dead": "bury", "discarded": "discard"}[row["state"]]
    return "" if step == asked and row["reason"] != "expired" else f"{end}, and its handler did {step}"


def claim_the_tables_are_legal(evidence):
    """The invariants of the rows hold, all dispatchers stopped in peace, and nobody's settlement is left over."""
    yield from broken_invariants(evidence.messages, evidence.now)
    for row in evidence.messages:
        if row["state"] == "delivered" and row["lapses"]:
            yield f"message {row['id']} is delivered and counts {row['lapses']} lapses"
    for name, code in evidence.codes.items():
        if code != 0:
            yield f"dispatcher {name} was asked to stop in peace, and ended with {code}"


# --- one at a time, and one settlement --------------------------------------------------------------------------------


def claim_each_attempt_starts_and_ends_once(evidence):
    """No attempt starts or is settled twice, and what was told of its end is what its row says."""
    for each in evidence.doubles:
        yield f"attempt {each.attempt} of message {each.id} started twice"
    numbers = Counter((row["message_id"], row["number"]) for row in evidence.attempts)
    for (pk, number), times in numbers.items():
        if times > 1:
            yield f"attempt {number} of message {pk} was settled {times} times: DOUBLE SETTLEMENT"
    for line in evidence.by_event["settled"]:
        end = evidence.ended.get((line["id"], line["attempt"]))
        if end is None or end["outcome"] != line["outcome"]:
            yield f"attempt {line['attempt']} of message {line['id']} was told as {line['outcome']}, its row says {end}"


def claim_one_delivery_for_each_message(evidence):
    """No message is delivered by two attempts, and the one that delivered it is its last."""
    delivered = defaultdict(set)
    for line in evidence.by_event["settled"]:
        if line["outcome"] == "delivered":
            delivered[line["id"]].add(line["attempt"])
    for (pk, number), end in evidence.ended.items():
        if end["outcome"] == "delivered":
            delivered[pk].add(number)
    for row in evidence.messages:
        attempts = delivered.pop(row["id"], set())
        if attempts != ({row["attempt"]} if row["state"] == "delivered" else set()):
            yield f"message {row['id']}, {row['state']}, was delivered by {sorted(attempts)}: DOUBLE SETTLEMENT"
    for pk in delivered:
        yield f"message {pk} was delivered, and is not there"


def claim_leases_are_not_taken_over_before_their_end(evidence):
    """No sooner than a lease after its claim, or after its last renewal; nor before the end that its row told."""
    ends = evidence.ends_of_leases()
    for line in evidence.by_event["held"]:
        key = line["id"], line["attempt"]
        ends[key] = max(ends.get(key, 0.0), line["ends"])
    for key, end in evidence.ended.items():
        if end["outcome"] in LAPSED:
            claimed = evidence.moment(end["started_at"])
            early = max(claimed + given.LEASE, ends.get(key, 0.0)) - evidence.moment(end["ended_at"])
            if early > CLOCKS:
                yield f"attempt {key[1]} of message {key[0]} was taken over {early:.2f} s before the end of its lease"


def claim_leases_run_out_for_a_reason(evidence):
    """A lease ran out only if its process had died, was frozen or starved, or had no database for a good while."""
    for (pk, number), end in evidence.ended.items():
        if end["outcome"] in LAPSED:
            taken = evidence.moment(end["ended_at"])
            if not evidence.cause(worker_pid(end["worker"]), evidence.moment(end["started_at"]), taken + CLOCKS):
                yield f"attempt {number} of message {pk} by {end['worker']} was taken over at {taken:.2f} for no reason"


def claim_what_a_killed_process_held_is_recovered_in_time(evidence):
    """In peace, with slots free: at the first lapse within the lease and one poll interval of the kill."""
    starts = {(line["key"], line["attempt"]): line["at"] for line in evidence.by_event["start"]}
    for line in evidence.by_event["calm kill"]:
        again = starts.get((line["key"], line["attempt"] + 1), float("inf"))
        if again - line["at"] > given.LEASE + given.POLL * 1.3 + PATIENCE:
            yield f"{line['key']} was started again {again - line['at']:.2f} s after its process was killed"


def claim_executions_of_a_message_overlap_only_after_a_lapse(evidence):
    """An earlier attempt runs beyond the start of a later one only if its lease ran out, or its slot was given up."""
    for a, b in overlapping(evidence, by_message(evidence)):
        first, second = sorted((a, b), key=lambda each: each.attempt)
        if first.attempt != second.attempt and not excuse(evidence, first, max(a.start, b.start)):
            yield f"attempts {first.attempt} and {second.attempt} of message {a.id} overlap at {b.start:.2f}: {a} {b}"


def claim_one_execution_per_lane(evidence):
    """The same among the messages of a lane; there no slot is given up before the handler has ended."""
    for a, b in overlapping(evidence, by_lane(evidence)):
        if a.id != b.id and not any(excuse(evidence, each, b.start) for each in (a, b)):
            yield f"messages {a.id} and {b.id} of one lane overlap at {b.start:.2f}: {a} {b}"


def by_message(evidence):
    groups = defaultdict(list)
    for each in evidence.executions.values():
        groups[each.id].append(each)
    return groups.values()


def by_lane(evidence):
    groups = defaultdict(list)
    for each in evidence.executions.values():
        if each.lane is not None:
            groups[each.topic, each.lane].append(each)
    return groups.values()


def overlapping(evidence, groups):
    """Pairs of a group that ran at the same time, the one that started first in front."""
    for group in groups:
        active = []
        for b in sorted(group, key=lambda each: each.start):
            active = [a for a in active if evidence.over(a) > b.start]
            yield from ((a, b) for a in active)
            active.append(b)


def excuse(evidence, superseded, moment):
    """Why an execution may still have run when another one started at this moment; "" if it may not."""
    taken = evidence.taken_over(superseded)
    if taken is not None:
        at, cause = taken
        return cause if at <= moment + CLOCKS else ""
    end = evidence.ended.get((superseded.id, superseded.attempt))
    if end is None or superseded.lane is not None:
        return ""
    timeout = given.TOPICS[superseded.topic].timeout
    if end["outcome"] == "timed_out" and timeout and moment >= superseded.start + timeout - CLOCKS:
        return "abandoned"
    return "leaving" if end["outcome"] == "interrupted" and evidence.was_leaving(superseded.pid, moment) else ""


def claim_lanes_keep_their_order(evidence):
    """Whatever was visible in a lane when a later message was claimed had been settled before."""
    since = {key: at + evidence.wall for key, at in evidence.visible_since().items()}
    lanes = defaultdict(list)
    for row in sorted(evidence.messages, key=lambda row: row["id"]):
        if row["ordering_key"] is not None:
            settled = row["settled_at"] if row["settled_at"] else float("inf")
            visible = since.get(row["event_key"], float("inf"))
            lanes[row["topic"], row["ordering_key"]].append((row["id"], visible, settled))
    for group in by_lane(evidence):
        for each in group:
            if each.claimed is None:
                continue
            for pk, visible, settled in lanes[each.topic, each.lane]:
                if pk >= each.id:
                    break
                overtook = visible + SLACK <= each.claimed < settled
                if overtook and not evidence.was_frozen(
                    each.pid, visible - evidence.wall, each.claimed - evidence.wall
                ):
                    yield f"message {each.id} was claimed at {each.claimed:.3f}, before {pk} was settled: ORDER"


CLAIMS = [
    claim_all_committed_is_there,
    claim_no_transaction_is_torn,
    claim_each_key_is_created_once,
    claim_every_message_comes_to_its_end,
    claim_the_tables_are_legal,
    claim_each_attempt_starts_and_ends_once,
    claim_one_delivery_for_each_message,
    claim_leases_are_not_taken_over_before_their_end,
    claim_leases_run_out_for_a_reason,
    claim_what_a_killed_process_held_is_recovered_in_time,
    claim_executions_of_a_message_overlap_only_after_a_lapse,
    claim_one_execution_per_lane,
    claim_lanes_keep_their_order,
    claim_attempts_are_charged_exactly,
    claim_attempts_end_as_their_handlers_did,
    claim_atomic_effects_are_there_exactly_once,
]
