"""How the commands print: aligned tables, JSON, and a progress bar for those who watch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any

from outbox.texts import printable, span

GAP = "  "
BAR = 30  # characters
REDRAW = 0.1  # seconds


def to_json(value: object) -> str:
    """JSON for machines: times in ISO 8601 (UTC), only ASCII, exact integers."""
    return json.dumps(value, indent=2, default=_plain)


def _plain(value: Any) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} has no JSON form")


def number(value: object) -> str:
    """A count with separated thousands; "-" for none, so that the others stand out."""
    if isinstance(value, int):
        return f"{value:,}" if value else "-"
    return "-" if value is None else str(value)


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    style: Callable[[str], str] = str,
) -> list[str]:
    """Aligned lines: text in the columns named ``left``, numbers to the right; ``style`` paints the header."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if header in left else cell.rjust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        return GAP.join(parts).rstrip()

    return [style(line(headers)), *map(line, cells)]


def facts(pairs: Iterable[tuple[str, object]]) -> list[str]:
    """Lines of names and values; a value of several lines hangs below its name's column."""
    known = [(name, printable(value).rstrip()) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in known), default=0)
    hanging = "\n" + " " * (width + len(GAP))
    return [f"{name.ljust(width)}{GAP}{value}".replace("\n", hanging) for name, value in known]


class Progress:
    """A bar with rate and time left, redrawn by ``write`` (None: nobody watches); ``total`` 0 is unknown."""

    def __init__(self, write: Callable[[str], object] | None, label: str, total: int = 0) -> None:
        self._write = write
        self._label = label
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def add(self, n: int) -> None:
        self._done += n
        if self._write and time.monotonic() - self._drawn >= REDRAW:
            self._draw(self._write)

    def finish(self) -> None:
        """Remove the bar: the result is printed in its place."""
        if self._write and self._drawn:
            self._write("\r\x1b[K")

    def _draw(self, write: Callable[[str], object]) -> None:
        self._drawn = time.monotonic()
        rate = self._done / max(self._drawn - self._started, 0.001)
        text = f"{self._label} {self._done:,}"
        if self._total:
            filled = min(BAR, BAR * self._done // self._total)
            left = span((self._total - self._done) / rate) if rate else "?"
            text = (
                f"{self._label} [{'#' * filled}{'.' * (BAR - filled)}] {self._done:,} of {self._total:,}"
                f" · {rate:,.0f}/s · {left} left"
            )
        write(f"\r{text}\x1b[K")
