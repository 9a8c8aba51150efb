"""Foreign text and times, made fit for a person's line and for a database column."""

from __future__ import annotations

from datetime import UTC, datetime

SECOND, MINUTE, HOUR, DAY = 1, 60, 3600, 86400


def printable(text: object) -> str:
    """Text that cannot move the cursor, colour the terminal or turn the reading direction; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in str(text))


def one_line(text: object, limit: int = 200) -> str:
    """The text in one harmless line of at most ``limit`` characters."""
    head = str(text)[: 4 * limit]
    line = printable(" ".join(head.split()))
    return line if len(line) <= limit and len(head) == len(str(text)) else line[: limit - 1] + "…"


def storable(text: str, limit: int | None = None) -> str:
    """The text without what a database refuses (NUL, lone surrogates), cut to ``limit`` characters."""
    cut = text if limit is None else text[:limit]
    return cut.replace("\0", "�").encode("utf-8", "replace").decode("utf-8")


def span(seconds: float) -> str:
    """A length of time in its two largest units: ``8 s``, ``4 min 12 s``, ``2 d 3 h``."""
    whole = round(abs(seconds))
    if whole < MINUTE:
        return f"{whole} s"
    for unit, name, smaller, smaller_name in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
        (MINUTE, "min", SECOND, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name} {rest} {smaller_name}" if rest else f"{whole // unit} {name}"
    raise AssertionError("unreachable")


def moment(instant: datetime, now: datetime) -> str:
    """A point in time in UTC, and how far from now it is."""
    seconds = (instant - now).total_seconds()
    distance = f"in {span(seconds)}" if seconds > 0 else f"{span(seconds)} ago"
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({distance})"


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
