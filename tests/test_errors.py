"""What is recorded of an error: always something, never more than fits, never what a database refuses."""

import traceback

import pytest
from django.test import override_settings

from outbox import Bury, Retry
from outbox.errors import MAX_FRAMES, NO_ERROR, describe


class Silent(Exception):
    """Its author made recording hard."""

    def __str__(self):
        raise RuntimeError("no text today")


class Five(Exception):
    def __str__(self):
        return 5


class Quitting(Exception):
    def __str__(self):
        raise SystemExit(3)


class Liar(str):
    """A text that is no text when it is handled like one."""

    def __str__(self):
        return self

    def __getitem__(self, index):
        raise RuntimeError("cannot be cut")

    def replace(self, *args):
        raise RuntimeError("cannot be cleaned")


class Lying(Exception):
    def __str__(self):
        return Liar("a lie")


class Careless(Bury):
    """A verdict whose author forgot the base class."""

    def __init__(self):
        pass


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return raised


def storable(record):
    texts = (record.type, record.code, record.text, record.traceback)
    return all("\0" not in each and each.encode("utf-8").decode("utf-8") == each for each in texts)


def test_a_plain_error_keeps_its_type_text_and_traceback():
    record = describe(caught(ValueError("no such customer")))
    assert (record.type, record.code, record.text) == ("ValueError", "", "no such customer")
    assert "test_errors.py" in record.traceback
    assert record.traceback.endswith("ValueError: no such customer\n")


def test_the_type_of_an_error_of_a_project_is_dotted():
    assert describe(Silent()).type == "tests.test_errors.Silent"


def test_a_verdict_keeps_its_reason_and_code():
    record = describe(Bury("card expired", code="E17"), with_traceback=False)
    assert (record.text, record.code, record.traceback) == ("card expired", "E17", "")
    assert describe(Retry("busy")).text == "busy"


def test_no_error_is_empty():
    assert (NO_ERROR.type, NO_ERROR.text, NO_ERROR.traceback) == ("", "", "")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Silent(), "<this text could not be made: RuntimeError>"),
        (Five(), "<this text could not be made: TypeError>"),
        (Quitting(), "<this text could not be made: SystemExit>"),
        (Lying(), "a lie"),
        (ValueError("a\0b"), "a\N{REPLACEMENT CHARACTER}b"),
        (ValueError("a\udcffb"), "a?b"),
        (Bury(Silent()), "<this text could not be made: RuntimeError>"),
        (Bury(5, code=6), "5"),
    ],
    ids=["str-raises", "str-is-no-str", "str-exits", "str-lies", "nul", "surrogate", "reason-raises", "reason-number"],
)
def test_a_hostile_text_is_replaced(error, text):
    """Scenario 25."""
    record = describe(caught(error))
    assert record.text == text
    assert storable(record)
    assert record.traceback.startswith("Traceback (most recent call last)")


def test_a_verdict_without_its_base_class_is_recorded():
    assert storable(describe(Careless()))


def test_a_code_that_raises_is_named():
    assert describe(Bury("no", code=Silent())).code == "<this text could not be made: RuntimeError>"


def test_texts_are_cut_to_their_limits():
    """Scenario 25: 50 MB."""
    with override_settings(OUTBOX={"MAX_ERROR_CHARS": 100, "MAX_TRACEBACK_CHARS": 900}):
        record = describe(caught(ValueError("🍎" * 12_500_000)))
        code = describe(Bury("x", code="c" * 300)).code
    assert record.text == "🍎" * 100
    assert 0 < len(record.traceback) <= 900
    assert len(code) == 100


def test_a_type_with_a_long_name_is_cut():
    assert len(describe(type("E" * 500, (Exception,), {})()).type) == 255


def test_the_end_of_a_long_traceback_is_kept():
    def fall(depth):
        if depth:
            fall(depth - 1)
        else:
            raise ValueError("at the bottom")

    def outermost():
        fall(900)

    try:
        outermost()
    except ValueError as error:
        whole = len(traceback.format_exception(error))
        with override_settings(OUTBOX={"MAX_TRACEBACK_CHARS": 1500}):
            record = describe(error)
    assert whole > MAX_FRAMES or "Previous line repeated" in record.traceback
    assert record.traceback.endswith("ValueError: at the bottom\n")
    assert "outermost" not in record.traceback
    assert len(record.traceback) <= 1500


def test_a_traceback_that_is_cut_says_so():
    try:
        try:
            raise KeyError("x" * 1000)
        except KeyError as first:
            raise ValueError("y" * 1000) from first
    except ValueError as error:
        with override_settings(OUTBOX={"MAX_TRACEBACK_CHARS": 1400}):
            record = describe(error)
    assert record.traceback.startswith("[…]\n")
    assert "KeyError" not in record.traceback


def test_causes_that_go_in_a_circle_end():
    """Scenario 25."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert "one" in describe(caught(one)).traceback


def test_the_parts_of_a_group_are_named():
    """Scenario 24."""
    group = ExceptionGroup("several", [ValueError("one"), Silent(), *[KeyError(n) for n in range(20)]])
    text = describe(caught(group)).text
    assert text.startswith("several (22 sub-exceptions) [ValueError: one; Silent: <this text could not be made")
    assert len(text) < 1000


def test_groups_within_groups_do_not_multiply():
    group = ValueError("leaf")
    for _ in range(50):
        group = ExceptionGroup("g", [group] * 10)
    assert storable(describe(caught(group)))


@pytest.mark.django_db
def test_an_error_that_holds_a_queryset_is_recorded(django_user_model):
    """Scenario 25."""
    record = describe(caught(ValueError(django_user_model.objects.all())))
    assert record.text == "<QuerySet []>"
