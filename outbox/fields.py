"""Columns that mean exactly the same on every database: exact text, JSON text and instants in microseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import models
from django.db.models.expressions import Combinable

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
LAST_CHARACTER = "\U0010ffff"


def to_micros(instant: datetime) -> int:
    """Microseconds since the epoch of an aware datetime."""
    return (instant - EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The aware datetime (UTC) of so many microseconds since the epoch."""
    return EPOCH + timedelta(microseconds=micros)


class InstantField(models.BigIntegerField):
    """A point in time: a 64-bit count of microseconds in the database, an aware UTC datetime in Python.

    DateTimeField would lose microseconds on SQLite, an hour in autumn on PostgreSQL with USE_TZ=False, and the zone's
    offset on MySQL with USE_TZ=False. Plain integers are taken as microseconds.
    """

    description = "Point in time (microseconds, UTC)"

    # What the attribute takes and gives, for the type checker's Django plugin.
    _pyi_private_set_type: datetime | int | Combinable  # type: ignore[assignment]
    _pyi_private_get_type: datetime  # type: ignore[assignment]

    def from_db_value(self, value: int | None, expression: Any, connection: Any) -> datetime | None:
        return None if value is None else from_micros(value)

    def to_python(self, value: Any) -> datetime | None:
        if value is None or isinstance(value, datetime):
            return value
        return from_micros(int(value))

    def get_prep_value(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return to_micros(value)
        return super().get_prep_value(value)

    def value_to_string(self, obj: models.Model) -> str:
        value: Any = self.value_from_object(obj)
        return "" if value is None else str(to_micros(value))


def _exact_collation(connection: Any) -> str | None:
    """The binary, non-padding collation where the default one folds case, accents and trailing blanks."""
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


class ExactCharField(models.CharField):
    """Text that is compared character by character on every database."""

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        return {**super().db_parameters(connection), "collation": _exact_collation(connection)}


@ExactCharField.register_lookup
class Begins(models.Lookup):
    """``event_key__begins="order:"``, character by character, over the column's index where that is in binary order.

    LIKE folds case on SQLite, and LIKE BINARY keeps MySQL off its index; PostgreSQL's indexes may be in the order of a
    language, but its LIKE is exact.
    """

    lookup_name = "begins"

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = self.process_lhs(compiler, connection)
        return f"({column} >= %s AND {column} < %s)", (*params, self.rhs, *params, self.rhs + LAST_CHARACTER)

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = self.process_lhs(compiler, connection)
        return f"{column} LIKE %s", (*params, connection.ops.prep_for_like_query(self.rhs) + "%")


class ExactTextField(models.TextField):
    """Long text that any database stores unchanged, whatever its default character set is."""

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        return {**super().db_parameters(connection), "collation": _exact_collation(connection)}


class JsonTextField(ExactTextField):
    """A JSON document kept as the text that was staged, so that no server alters its numbers or the order of its keys.

    SQL NULL (read as None) is no document at all; JSON ``null`` is the text ``null`` and is read as None, too. Text
    that is no JSON (written by hand) is read as `Unreadable`: one such row must not stop those who read many.
    """

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> Any:
        if value is None:
            return None
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            return Unreadable(value, str(error))

    def to_python(self, value: Any) -> Any:
        return value

    def get_prep_value(self, value: Any) -> Any:
        if isinstance(value, Unreadable):
            return value.text
        if value is None or isinstance(value, JsonText) or hasattr(value, "resolve_expression"):
            return value
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def value_to_string(self, obj: models.Model) -> str:
        return str(self.get_prep_value(self.value_from_object(obj)))


class JsonText(str):
    """Text that is already JSON."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The text of a JSON column that is no JSON, and why not."""

    text: str
    why: str

    def __str__(self) -> str:
        return self.text
