"""The checker's claims about attempts: what they cost, how they end, and which effects they leave behind."""

from collections import defaultdict

from tests.chaos import terms as given
from tests.chaos.evidence import LAPSED

REFUNDED = ("snoozed", "unavailable", "released", "interrupted")
EXPECTED = {  # how an attempt ends whose handler did this; what may befall all of them comes on top
    "sleep": {"delivered"},
    "close": {"delivered"},
    "raise": {"failed"},
    "false": {"failed"},
    "base": {"failed"},
    "leak": {"failed"},
    "snooze": {"snoozed"},
    "unavailable": {"unavailable"},
    "bury": {"buried"},
    "discard": {"discarded"},
    "kill": set(),
    "exit": set(),
}
BEFALLEN = {"lapsed", "crashed", "interrupted"}


def claim_attempts_are_charged_exactly(evidence):
    """Each claim up to ``attempt`` has one end and at most one start; ``spent`` counts those that cost something."""
    starts = defaultdict(set)
    for pk, number in evidence.executions:
        starts[pk].add(number)
    numbers = defaultdict(set)
    for pk, number in evidence.ended:
        numbers[pk].add(number)
    for row in evidence.messages:
        pk, claims = row["id"], set(range(1, row["attempt"] + 1))
        if numbers[pk] - {0} != claims:
            yield f"message {pk} counts {row['attempt']} attempts, and has ends of {sorted(numbers[pk])}"
        if not starts[pk] <= claims:
            yield f"message {pk} counts {row['attempt']} attempts, and started {sorted(starts[pk])}"
        least, most = charges(evidence, pk, claims, starts[pk])
        if not least <= row["spent"] <= most:
            yield f"message {pk} has spent {row['spent']}, by its attempts {least} to {most}"


def charges(evidence, pk, claims, starts):
    """What attempts cost, at least and at most: only a lapsed one that never started may or may not have been charged.

    (A claim that starts at once is charged by itself; if the process dies before its handler's first line, nobody but
    the row can tell it from one that was claimed in advance.)
    """
    least = most = 0
    for number in claims:
        end = evidence.ended.get((pk, number))
        if end is not None and end["outcome"] in REFUNDED:
            continue
        most += 1
        least += number in starts or (end is not None and end["outcome"] not in LAPSED)
    return least, most


def claim_attempts_end_as_their_handlers_did(evidence):
    """What a handler did is what is recorded of its attempt, unless its lease ran out or its process was stopped."""
    for key, each in evidence.executions.items():
        end = evidence.ended.get(key)
        topic = given.TOPICS[each.topic]
        expected = EXPECTED[each.step] | BEFALLEN
        if topic.timeout:
            expected = expected | {"timed_out"}
        if topic.atomic:
            expected = expected | {"failed"}  # its commit may be the victim of a restart
        if end is not None and end["outcome"] not in expected:
            yield f"attempt {each.attempt} of message {each.id} did {each.step}, and ended {end['outcome']}"
    for (pk, number), end in evidence.ended.items():
        if (
            end["outcome"] not in {"released", "lapsed", "crashed"}
            and number
            and (pk, number) not in evidence.executions
        ):
            yield f"attempt {number} of message {pk} ended {end['outcome']}, and no handler ran"


def claim_atomic_effects_are_there_exactly_once(evidence):
    """A delivered message of an atomic handler has its effect, by the attempt that counts; any other has none."""
    effects = defaultdict(list)
    for row in evidence.effects:
        effects[row["key"]].append(row["attempt"])
    for row in evidence.messages:
        expected = [row["attempt"]] if given.TOPICS[row["topic"]].atomic and row["state"] == "delivered" else []
        if (found := effects.pop(row["event_key"], [])) != expected:
            yield f"message {row['id']} has effects by attempts {found}, expected {expected}"
    for key in effects:
        yield f"an effect is there of {key}, which is not"
