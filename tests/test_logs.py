"""The log lines of a message's life: one line per event, harmless whatever an error says, never the payload."""

import logging
from datetime import UTC, datetime

import pytest

from outbox import signals
from outbox.handlers import Envelope, LeaseView
from outbox.models import Outcome
from outbox.signals import Event, send

LATER = datetime(2026, 7, 1, 12, 0, 5, tzinfo=UTC)


def event(**fields):
    message = Envelope(
        id=12,
        event_key="order:84213:paid",
        topic="order.paid",
        payload={"secret": "hunter2"},
        payload_version=1,
        attempt=3,
        headers={"secret": "hunter2"},
        ordering_key=None,
        staged_at=LATER,
        lease=LeaseView(3),
    )
    return Event(**({"message": message, "handler": "order.paid", "using": "default", "worker": "host:1:aa"} | fields))


def failed(**fields):
    error = {"error_type": "requests.Timeout", "error_text": "no answer", "outcome": Outcome.FAILED}
    return event(**(error | fields))


@pytest.fixture
def lines(caplog):
    """A function that sends a signal and returns the level and text of the one line that it wrote."""
    caplog.set_level(logging.DEBUG, "outbox")

    def log(signal, event):
        caplog.clear()
        send(signal, event)
        (record,) = [record for record in caplog.records if record.name == "outbox"]
        assert "hunter2" not in record.getMessage()
        assert "\n" not in record.getMessage()
        assert (record.message_id, record.topic, record.attempt) == (12, "order.paid", 3)
        return record.levelname, record.getMessage()

    return log


DEAD = "it is dead (exhausted) and kept until somebody acts."
WHICH = "Message 12 (topic order.paid, attempt 3, key order:84213:paid)"


def test_a_failure_is_one_warning_with_id_topic_attempt_and_fate(lines):
    """A7."""
    assert lines(signals.retried, failed(due_at=LATER)) == (
        "WARNING",
        f"{WHICH} failed at host:1:aa: requests.Timeout: no answer; it will be retried, due 2026-07-01 12:00:05 UTC.",
    )


def test_a_death_is_one_warning_that_says_so(lines):
    """A7: the line tells whether it died."""
    assert lines(signals.buried, failed(reason="exhausted", error_code="E7")) == (
        "WARNING",
        f"{WHICH} failed at host:1:aa: requests.Timeout [E7]: no answer; {DEAD}",
    )


@pytest.mark.parametrize(
    ("signal", "outcome", "part"),
    [
        (signals.retried, Outcome.TIMED_OUT, "timed out at host:1:aa"),
        (signals.retried, Outcome.CRASHED, "crashed its worker or was abandoned by it at host:1:aa"),
        (signals.buried, Outcome.CRASHED, "crashed its worker or was abandoned by it at host:1:aa"),
        (signals.retried, Outcome.LAPSED, "lost its lease: the worker died or hung at host:1:aa"),
    ],
)
def test_how_an_attempt_failed_is_named(lines, signal, outcome, part):
    level, text = lines(signal, event(outcome=outcome, due_at=LATER))
    assert level == "WARNING"
    assert part in text


def test_a_lost_lease_is_logged_once_per_event(lines):
    """Scenarios 15 and 58."""
    level, text = lines(signals.lease_lost, event())
    assert level == "WARNING"
    assert text.startswith(f"{WHICH} lost its lease; ")


@pytest.mark.parametrize(
    ("signal", "fields", "level", "part"),
    [
        (signals.staged, {}, "DEBUG", "was staged."),
        (signals.delivered, {"duration": 0.0123}, "DEBUG", "was delivered in 12 ms."),
        (signals.delivered, {}, "DEBUG", "was delivered."),
        (signals.snoozed, {"outcome": Outcome.SNOOZED, "due_at": LATER}, "DEBUG", "was snoozed; due 2026-07-01"),
        (
            signals.snoozed,
            {"outcome": Outcome.UNAVAILABLE, "error_text": "no route", "due_at": LATER},
            "INFO",
            "found the other side unavailable: no route; due 2026-07-01",
        ),
        (signals.discarded, {"reason": "expired"}, "INFO", "was discarded (expired)."),
        (
            signals.discarded,
            {"reason": "handler", "error_text": "cancelled"},
            "INFO",
            "was discarded (handler: cancelled).",
        ),
        (signals.discarded, {"reason": "operator"}, "DEBUG", "was discarded (operator)."),
        (signals.released, {}, "DEBUG", "was given back; due now."),
        (
            signals.released,
            {"error_type": "builtins.OSError", "error_text": "broken"},
            "WARNING",
            "failed in its immediate delivery: builtins.OSError: broken; a dispatcher delivers it.",
        ),
    ],
)
def test_other_events_are_quieter(lines, signal, fields, level, part):
    logged, text = lines(signal, event(**fields))
    assert logged == level
    assert part in text


@pytest.mark.parametrize(
    "text", ["100% of %s %d %(x)s {0}", "a\nb\r\nc\td", "\x1b[2J\x9b31m", "‮evil", "\0", "x" * 100_000, "🍏 résumé", ""]
)
def test_a_record_never_fails_whatever_an_error_says(lines, text):
    """Scenario 25: the logs show it once."""
    _, line = lines(signals.retried, failed(error_text=text, error_type=text, error_code=text, due_at=LATER))
    assert len(line) < 1000
    assert line.isprintable()
    line.encode("utf-8")


def test_a_level_that_is_off_writes_nothing(caplog):
    caplog.set_level(logging.WARNING, "outbox")
    send(signals.delivered, event(duration=0.1))
    assert caplog.records == []
