"""Waiting for another process, with a deadline."""

import time


def wait_until(condition, seconds=30):
    """Return the first true value of ``condition``; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {condition}"
        time.sleep(0.02)
    return value
