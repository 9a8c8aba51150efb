"""How rows are counted: never a whole table, and never a number that is not true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from outbox.admin.shown import number
from outbox.database import ServerNow

CAP = 10_000  # rows that are listed, and counted one by one, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A number of rows; ``capped`` when there are more than that."""

    rows: int
    capped: bool = False

    def __str__(self) -> str:
        return number(self.rows) + ("+" if self.capped else "")


def capped_tally(rows: QuerySet[Any]) -> Tally:
    """How many rows there are, up to ``CAP``, at the cost of no more than that many."""
    count = rows.order_by().values("pk")[: CAP + 1].count()
    return Tally(rows=min(count, CAP), capped=count > CAP)


def clocked(rows: QuerySet[Any], **more: Any) -> QuerySet[Any]:
    """The rows with ``clock``, the database's time, by which alone they are due, late or lost."""
    found: QuerySet[Any] = rows.annotate(clock=ServerNow(), **more)
    return found
