"""How foreign text, JSON and points in time are shown to people: harmless, exact, and not endless; pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime

from django.utils import formats, timezone
from django.utils.dateformat import format as format_date
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, pgettext

from outbox.texts import printable, span

TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)
JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|"', re.DOTALL)
INDENT = "  "
NOTHING = "—"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The beginning of a text, and how many characters of it are left out."""

    text: str
    left_out: int = 0


NO_TEXT = Cut(text="")


def plain(text: str) -> str:
    """The text without terminal sequences; what is invisible or turns the reading direction is spelled ``\\u202e``."""
    return printable(TERMINAL.sub("", text).replace("\r\n", "\n").replace("\t", "    "))


def cut(text: str, limit: int) -> Cut:
    """At most ``limit`` characters, ending at a line's end where one is near."""
    if len(text) <= limit:
        return Cut(text=text)
    end = text.rfind("\n", limit * 4 // 5, limit)
    kept = text[: limit if end < 0 else end]
    return Cut(text=kept, left_out=len(text) - len(kept))


def middle(text: str, limit: int) -> str:
    """Cut out of the middle: both ends tell keys apart."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def short(text: str, limit: int) -> str:
    """One harmless line of at most ``limit`` characters."""
    line = " ".join(plain(text[: 8 * limit]).split())
    return line if len(line) <= limit and len(text) <= 8 * limit else line[: limit - 1] + "…"


def pretty(document: str) -> str:
    """JSON text, indented. Every number keeps the digits that were staged, for no number is ever parsed."""
    parts: list[str] = []
    depth, fresh = 0, False  # fresh: right behind an opening bracket
    for match in JSON_WORD.finditer(document):
        word = match[0]
        if word in "}]":
            depth = max(depth - 1, 0)
            parts.append(word if fresh else f"\n{INDENT * depth}{word}")
            fresh = False
            continue
        if fresh:
            parts.append(f"\n{INDENT * depth}")
        fresh = word in "{["
        depth += fresh
        parts.append(_spaced(word, depth))
    return "".join(parts)


def _spaced(word: str, depth: int) -> str:
    if word == ",":
        return f",\n{INDENT * depth}"
    if word == ":":
        return ": "
    if word.startswith('"') and len(word) > 1:
        return _readable(word)
    return printable(word)


def _readable(word: str) -> str:
    """A JSON string with letters instead of escapes; what cannot be shown harmlessly stays an escape."""
    try:
        text = json.dumps(json.loads(word), ensure_ascii=False)
    except ValueError:
        text = word
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def number(value: int) -> str:
    """With the separators of the reader's language: ``10,000``."""
    return str(formats.number_format(value, force_grouping=True))


def size(octets: int) -> str:
    """``412 bytes``, ``48 KiB``, ``1.2 MiB``."""
    if octets < 10_000:
        return gettext("%(count)s bytes") % {"count": number(octets)}
    if octets < 1_000_000:
        return f"{number(round(octets / 1024))} KiB"
    return f"{_tenths(octets / 1024**2)} MiB"


def duration(seconds: float) -> str:
    """How long something took: ``12 ms``, ``1.4 s``, ``4 min 12 s``."""
    if seconds < 1:
        return f"{max(round(seconds * 1000), 0)} ms"
    return f"{_tenths(seconds)} s" if seconds < 9.95 else span(seconds)


def _tenths(value: float) -> str:
    return str(formats.number_format(round(value, 1), 1))  # which alone would cut, not round


def about(seconds: float) -> str:
    """A length of time in its largest unit, for a glance: ``4 min``."""
    return " ".join(span(seconds).split()[:2])


def ago(instant: datetime, now: datetime) -> str:
    """``8 s ago``, ``in 4 min``."""
    seconds = (instant - now).total_seconds()
    if seconds >= 0.5:
        return pgettext("point in time", "in %(span)s") % {"span": about(seconds)}
    return gettext("%(span)s ago") % {"span": about(seconds)} if seconds <= -0.5 else gettext("now")


def lateness(due_at: datetime, now: datetime) -> str:
    """``in 8 s``, ``due now``, ``4 min late``."""
    seconds = (due_at - now).total_seconds()
    if seconds >= 0.5:
        return ago(due_at, now)
    return gettext("%(span)s late") % {"span": about(seconds)} if seconds <= -0.5 else gettext("due now")


def stamp(instant: datetime) -> str:
    """The absolute time in the reader's time zone, to the second."""
    return str(format_date(timezone.localtime(instant, timezone.get_current_timezone()), "Y-m-d H:i:s T"))


def time_tag(instant: datetime, text: str) -> SafeString:
    """A relative time that tells the absolute one in its title."""
    return format_html('<time datetime="{}" title="{}">{}</time>', instant.isoformat(), stamp(instant), text)


def key_tag(key: str, limit: int) -> SafeString:
    """An event key in one piece; the full one stands in the title. ``bdi`` keeps right-to-left text to itself."""
    whole = plain(key)
    return format_html('<bdi class="outbox-key" title="{}">{}</bdi>', whole, middle(whole, limit))


def error_line(error_type: str, error_text: str, limit: int) -> str:
    """``ConnectionError: gateway timed out``, without the module of the type."""
    name = error_type.rsplit(".", 1)[-1]
    return short(f"{name}: {error_text}" if name and error_text else name or error_text, limit)
