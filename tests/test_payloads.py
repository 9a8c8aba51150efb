"""What may be staged: every value that JSON and the databases hold alike, and no other."""

import json
import sys
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from types import MappingProxyType
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import TextChoices
from django.test import override_settings
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from outbox import payloads
from outbox.exceptions import InvalidIntent, InvalidPayload, OutboxError
from outbox.fields import from_micros
from outbox.inserting import FromNow

Point = namedtuple("Point", "x y")


class Colour(TextChoices):
    RED = "red", "Red"


class Level(IntEnum):
    HIGH = 3


class Whole(int):
    def __repr__(self):
        return "not JSON"

    __str__ = __repr__


class Fraction(float):
    def __repr__(self):
        return "not JSON"


def nested(depth, leaf=0):
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


# --- what is taken ---


@pytest.mark.parametrize(
    "value", [None, "", 0, False, [], {}, "text", 1.5, True, -1, 2**53 + 1, 1970670598291982290, 2**70]
)
def test_every_json_value_comes_back_identical(value):
    """Scenarios 9 and 13."""
    read = json.loads(payloads.encode(value))
    assert read == value
    assert type(read) is type(value)


def test_the_text_is_compact_and_keeps_the_order_of_the_keys():
    assert payloads.encode({"b": [1, 2], "a": "ü🍎"}) == '{"b":[1,2],"a":"ü🍎"}'


@pytest.mark.parametrize(
    "value",
    [
        datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        datetime(2030, 1, 2, 3, 4, 5, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2030, 1, 2, 3, 4, 5),
        date(2030, 1, 2),
        time(3, 4, 5, 678901),
        Decimal("12.340"),
        Decimal("1E+3"),
        UUID("12345678123456781234567812345678"),
    ],
    ids=str,
)
def test_dates_times_decimals_and_uuids_are_encoded_as_django_does(value):
    """P14."""
    assert payloads.encode({"a": [value]}) == json.dumps({"a": [value]}, cls=DjangoJSONEncoder, separators=(",", ":"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Colour.RED, '"red"'),
        (Level.HIGH, "3"),
        (Whole(7), "7"),
        (Fraction(1.5), "1.5"),
        (mark_safe("<b>"), '"<b>"'),
        ((1, 2), "[1,2]"),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        ({Colour.RED: 1}, '{"red":1}'),
    ],
    ids=repr,
)
def test_subclasses_are_stored_as_the_json_type_they_extend(value, text):
    assert payloads.encode(value) == text


@pytest.mark.parametrize("key", [1, 1.5, True, None, Level.HIGH, Whole(7)], ids=repr)
def test_keys_become_strings_as_json_dumps_makes_them(key):
    expected = "7" if isinstance(key, Whole) else json.loads(json.dumps({key: 0})).popitem()[0]
    assert json.loads(payloads.encode({key: 0})) == {expected: 0}


def test_text_of_any_script_is_taken():
    text = "".join(chr(c) for c in range(1, 0x3000)) + "🍎\U0010ffff"
    assert json.loads(payloads.encode({text: text})) == {text: text}


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_what_is_taken_survives_the_round_trip(value):
    document = payloads.document(value)
    assert json.loads(document.text) == value
    assert document.value == value


# --- what is refused, and where ---


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (float("nan"), "is nan"),
        (float("inf"), "is inf"),
        (float("-inf"), "is -inf"),
        (Fraction("nan"), "is nan"),
        (Decimal("NaN"), "no such number"),
        (Decimal("-Infinity"), "no such number"),
        ("a\0b", "the character NUL"),
        ("\ud800", "half a surrogate pair"),
        ("\ud83d\ude00", "half a surrogate pair"),
        (b"bytes", "is of type bytes"),
        ({1, 2}, "is of type set"),
        (frozenset(), "is of type frozenset"),
        (object(), "is of type object"),
        (1j, "is of type complex"),
        (iter([1]), "is of type list_iterator"),
        (range(3), "is of type range"),
        (MappingProxyType({}), "is of type mappingproxy"),
        (Enum("Plain", "A").A, "is of type Plain"),
        (timedelta(1), "is of type timedelta"),
        (gettext_lazy("lazy"), "is of type __proxy__"),
        (time(1, tzinfo=UTC), "timezone-aware"),
        (10**4300, "more than 4300 digits"),
        (-(10**4300), "more than 4300 digits"),
        ({1: "a", "1": "b"}, "two keys"),
        ({True: "a", "true": "b"}, "two keys"),
        ({None: "a", "null": "b"}, "two keys"),
        ({1: "a", Whole(1 << 70): "b", str(1 << 70): "c"}, "two keys"),
        ({(1, 2): "a"}, "a key of type tuple"),
        ({UUID(int=1): "a"}, "a key of type UUID"),
        ({float("nan"): 1}, "no such number"),
        ({10**4300: 1}, "more than 4300 digits"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_json_or_a_database_cannot_hold_is_refused_with_its_place(value, fact):
    """Scenario 8."""
    with pytest.raises(InvalidPayload, match=fact) as caught:
        payloads.encode({"items": [1, {"price": 2}, (), {"price": value}]})
    assert str(caught.value).startswith("payload.items[3].price")


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (float("nan"), "payload is"),
        ([float("nan")], "payload[0] is"),
        ({"a b": float("nan")}, "payload['a b'] is"),
        ({7: {"x": float("nan")}}, "payload[7].x is"),
        ({"a\0": 1}, r"payload['a\x00'] holds"),
        ({"\ud800": 1}, r"payload['\ud800'] holds"),
        ({"x": {1: 0, "1": 0}}, "payload.x['1'] stands for two keys"),
        ({"k" * 500: float("nan")}, f"payload['{'k' * 78}…] is"),
    ],
)
def test_the_path_can_be_read_whatever_the_keys_are(payload, path):
    with pytest.raises(InvalidPayload) as caught:
        payloads.encode(payload)
    assert str(caught.value).startswith(path)
    str(caught.value).encode()


def test_the_errors_are_of_one_family():
    assert issubclass(InvalidPayload, InvalidIntent)
    assert issubclass(InvalidIntent, ValueError)
    assert issubclass(InvalidIntent, OutboxError)


def test_thirty_levels_are_the_limit_of_depth():
    assert json.loads(payloads.encode(nested(30))) == nested(30)
    assert payloads.encode({"a": nested(29, {})[0]})
    with pytest.raises(InvalidPayload, match="more than 30 levels"):
        payloads.encode(nested(31))


def test_a_value_that_contains_itself_is_refused():
    circle = {}
    circle["me"] = [circle]
    with pytest.raises(InvalidPayload, match="more than 30 levels"):
        payloads.encode(circle)


def test_4300_digits_are_taken():
    number = 10**4300 - 1
    assert json.loads(payloads.encode([number, -number])) == [number, -number]


def test_a_lower_limit_of_this_process_for_digits_holds():
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(700)
    try:
        assert payloads.encode(10**699)
        with pytest.raises(InvalidPayload, match="more than 700 digits"):
            payloads.encode({10**700: 1})
    finally:
        sys.set_int_max_str_digits(before)


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 100})
def test_the_size_is_limited_in_bytes_not_characters():
    """Scenario 12."""
    assert payloads.encode("x" * 98)
    with pytest.raises(
        InvalidPayload, match=r"takes at least 101 bytes as JSON, and OUTBOX\['MAX_PAYLOAD_BYTES'\] is 100"
    ):
        payloads.encode("x" * 99)
    assert payloads.encode("ü" * 49)
    with pytest.raises(InvalidPayload, match="takes 102 bytes"):
        payloads.encode("ü" * 50)
    with pytest.raises(InvalidPayload, match="takes 182 bytes"):
        payloads.encode("\x01" * 30)


def test_twenty_megabytes_are_refused_by_default_and_one_is_not():
    """Scenario 12."""
    assert payloads.encode("x" * (1024 * 1024 - 2))
    with pytest.raises(InvalidPayload, match=r"payload\.blob takes at least 200000\d\d bytes"):
        payloads.encode({"blob": "x" * 20_000_000})


def test_a_structure_that_shares_its_parts_ends_early():
    value = ["x" * 100]
    for _ in range(28):
        value = [value, value]  # 2 ** 28 strings when written out
    with pytest.raises(InvalidPayload, match="takes at least"):
        payloads.encode(value)


# --- content ---


def digest(value, **changes):
    given = {"topic": "a", "payload_version": 1, "ordering_key": None} | changes
    return payloads.digest(plain=payloads.document(value).value, **given)


def test_the_digest_is_sixteen_bytes_that_do_not_depend_on_the_order_of_keys():
    assert len(digest({"a": 1, "b": 2})) == 16
    assert digest({"a": {"x": 1, "y": 2}, "b": 2}) == digest({"b": 2, "a": {"y": 2, "x": 1}})


def test_the_digest_of_a_value_never_changes_between_versions():
    # Keys staged by an older version of the package must still be recognised.
    assert digest({"b": [1, 2.5, "ü"], "a": None}, ordering_key="k").hex() == "cd4e24ecef32970d9ee8b613f3828d6f"


def test_the_digest_tells_all_parts_of_the_content_apart():
    different = [
        digest(1),
        digest(1.0),
        digest("1"),
        digest(True),
        digest([1]),
        digest(1, topic="b"),
        digest(1, payload_version=2),
        digest(1, ordering_key="k"),
        digest(1, ordering_key=""),
    ]
    assert len(set(different)) == len(different)


def test_equal_content_has_equal_digests_whatever_python_types_it_came_from():
    assert digest((1, Level.HIGH, Colour.RED)) == digest([1, 3, "red"])
    assert digest({1: Decimal("1.10")}) == digest({"1": "1.10"})


# --- keys, versions, headers ---


@pytest.mark.parametrize("key", ["x", "x" * 255, "🍎" * 255, "order:1:paid", "a b", "ü/ß", "a\u200bb"])
def test_a_key_of_1_to_255_characters_is_taken(key):
    """Scenarios 10 and 11."""
    assert payloads.key(key, "event_key") == key


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        ("", "has 0 characters"),
        ("x" * 256, "has 256 characters"),
        (" a", "begins or ends with a blank"),
        ("a ", "begins or ends with a blank"),
        ("   ", "begins or ends with a blank"),
        ("a\n", "begins or ends with a blank"),
        ("a\xa0", "begins or ends with a blank"),
        ("a\0b", "control character"),
        ("a\tb", "control character"),
        ("a\x7fb", "control character"),
        ("a\x85b", "control character"),
        ("a\ud800b", "surrogate"),
        (1, "must be a string, not int"),
        (UUID(int=1), "must be a string, not UUID"),
        (b"key", "must be a string, not bytes"),
    ],
    ids=repr,
)
def test_a_key_that_a_database_could_alter_is_refused(key, fact):
    """Scenarios 10 and 11."""
    with pytest.raises(InvalidIntent, match=fact) as caught:
        payloads.key(key, "event_key")
    assert str(caught.value).startswith("event_key")
    str(caught.value).encode()


def test_a_key_of_a_subclass_becomes_a_plain_string():
    assert type(payloads.key(Colour.RED, "event_key")) is str


@pytest.mark.parametrize("version", [0, -1, 2**31, True, "1", 1.0, None])
def test_a_payload_version_is_a_positive_whole_number(version):
    with pytest.raises(InvalidIntent, match="payload_version must be a whole number"):
        payloads.version(version)


def test_the_largest_payload_version_fits_the_column():
    assert payloads.version(2**31 - 1) == 2**31 - 1


def test_headers_keep_any_json_value_under_names_that_are_strings():
    """P14."""
    assert payloads.headers({"trace": "t1", "n": 1, "tags": ["a"]}) == '{"trace":"t1","n":1,"tags":["a"]}'
    assert payloads.headers(MappingProxyType({"trace": "t1"})) == '{"trace":"t1"}'
    assert payloads.headers(None) is None
    assert payloads.headers({}) is None


@pytest.mark.parametrize(
    ("headers", "fact"),
    [
        ([("a", "b")], "headers must be a dict, not list"),
        ("a", "headers must be a dict"),
        ({1: "a"}, "must be a string"),
        ({"": "a"}, "has 0 characters"),
        ({"a\r\nSet-Cookie: b": "c"}, "control character"),
        ({"a": float("nan")}, r"headers\.a is nan"),
        ({"a": {"b": "\0"}}, r"headers\.a\.b holds the character NUL"),
        ({"a": "x" * 17_000}, r"OUTBOX\['MAX_HEADERS_BYTES'\] is 16384"),
    ],
)
def test_bad_headers_are_refused_with_their_place(headers, fact):
    with pytest.raises(InvalidIntent, match=fact):
        payloads.headers(headers)


# --- times ---


def test_an_aware_datetime_is_an_instant_whatever_its_zone():
    utc = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert from_micros(payloads.instant(utc, "deliver_at")) == utc
    elsewhere = utc.astimezone(timezone(timedelta(hours=5, minutes=45)))
    assert payloads.instant(elsewhere, "deliver_at") == payloads.instant(utc, "deliver_at")


def test_both_hours_of_an_autumn_night_are_told_apart():
    night = datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    first, second = (payloads.instant(night.replace(fold=fold), "deliver_at") for fold in (0, 1))
    assert second - first == 3600 * 1_000_000


def test_a_timedelta_counts_from_the_staging():
    assert payloads.instant(timedelta(hours=1, microseconds=1), "deliver_at") == FromNow(3_600_000_001)
    assert payloads.instant(timedelta(0), "deliver_at") == FromNow(0)


@override_settings(USE_TZ=True)
def test_a_naive_datetime_is_refused_under_use_tz():
    with pytest.raises(InvalidIntent, match="without a time zone"):
        payloads.instant(datetime(2030, 1, 1), "expires_at")


@override_settings(USE_TZ=False, TIME_ZONE="America/New_York")
def test_a_naive_datetime_is_read_in_time_zone_without_use_tz():
    aware = datetime(2030, 1, 1, 12, tzinfo=ZoneInfo("America/New_York"))
    assert payloads.instant(datetime(2030, 1, 1, 12), "deliver_at") == payloads.instant(aware, "deliver_at")
    assert payloads.instant(aware, "deliver_at") == payloads.instant(aware.astimezone(UTC), "deliver_at")


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (timedelta(microseconds=-1), "must not be negative"),
        (timedelta(days=-1), "must not be negative"),
        (timedelta.max, "after the year 9999"),
        (timedelta(days=365 * 8000), "after the year 9999"),
        (datetime.max.replace(tzinfo=UTC), "not every time zone"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "not every time zone"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=12))), "not every time zone"),
        (date(2030, 1, 1), "must be an aware datetime or a timedelta, not date"),
        (60, "must be an aware datetime or a timedelta, not int"),
        ("2030-01-01T00:00:00Z", "must be an aware datetime or a timedelta, not str"),
    ],
    ids=repr,
)
def test_a_time_that_could_mean_something_else_is_refused(value, fact):
    with pytest.raises(InvalidIntent, match=fact) as caught:
        payloads.instant(value, "deliver_at")
    assert str(caught.value).startswith("deliver_at")
