"""The core against a model: random stories of claims, crashes, verdicts, operators and time, in all orders.

After each step the database must hold what the reference says, and no invariant may be broken; after the last one
everything must come to an end. A seed chooses the stories: a failure prints it, with the shortest story that fails.

OUTBOX_SEED=<seed>              that seed alone
OUTBOX_MODEL_EXAMPLES=<number>  stories of one seed
OUTBOX_MODEL_SECONDS=<seconds>  of the long run, on new seeds
OUTBOX_MODEL_SHRINK=0           do not look for the shortest story
"""

import os
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Machine
from tests.specimens import specimens

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("specimens")]
__all__ = ["specimens"]

SEED = 20  # of the short run, which is the same every time
EXAMPLES = int(os.environ.get("OUTBOX_MODEL_EXAMPLES", "60"))
LONG_SECONDS = float(os.environ.get("OUTBOX_MODEL_SECONDS", "60"))
STEPS = 40
SHRINK = os.environ.get("OUTBOX_MODEL_SHRINK") != "0"


def tell(number):
    """Run the stories of one seed."""
    profile = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(type("Story", (Machine,), {})), settings=profile)
    except BaseException as error:
        error.add_note(f"OUTBOX_SEED={number}")
        raise


@pytest.mark.timeout(600)
def test_the_core_does_what_the_model_says():
    tell(int(os.environ.get("OUTBOX_SEED", SEED)))


@pytest.mark.slow
@pytest.mark.timeout(LONG_SECONDS + 900)
def test_the_core_does_what_the_model_says_for_a_long_time():
    fixed = os.environ.get("OUTBOX_SEED")
    end, done = time.monotonic() + LONG_SECONDS, 0
    while time.monotonic() < end:
        tell(int(fixed) if fixed else random.randrange(10**9))
        done += 1
    print(f"{done} seeds of {EXAMPLES} stories")
