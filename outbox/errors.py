"""Turn any exception into text that any database stores and people may see; recording cannot fail."""

from __future__ import annotations

import traceback as tracebacks
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from outbox.conf import options
from outbox.exceptions import Verdict
from outbox.redaction import MARGIN, redacted
from outbox.texts import storable

MAX_LINE = 2000  # characters of one line of a traceback
MAX_FRAMES = 50  # of each traceback in a chain: the innermost
MAX_PARTS = 10  # exceptions of a group that are named
MAX_CHAIN = 200  # exceptions that hang together (causes, members of groups); of more, only the outermost is shown
MAX_TYPE = 255
MAX_CODE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as clean, bounded text: its dotted type, a code the handler gave, its message, its traceback."""

    type: str = ""
    code: str = ""
    text: str = ""
    traceback: str = ""


NO_ERROR = ErrorRecord()


def describe(error: BaseException, *, topic: str = "", with_traceback: bool = True) -> ErrorRecord:
    """The record of an exception. NUL and surrogates are replaced, long text is cut, a broken ``__str__`` is named.

    Text and traceback are redacted before they are cut, so that no secret is kept because only half of it fits.
    """
    current = options()
    code = partial(getattr, error, "code", "") if isinstance(error, Verdict) else str
    trace = partial(_traceback, error, current.MAX_TRACEBACK_CHARS) if with_traceback else str
    limit, most = current.MAX_ERROR_CHARS, current.MAX_TRACEBACK_CHARS
    text = redacted(_text(partial(_message, error), limit + MARGIN), "error", topic=topic)
    traceback = redacted(_text(trace, most), "traceback", topic=topic)
    return ErrorRecord(
        type=_text(partial(_dotted_name, type(error)), MAX_TYPE),
        code=_text(code, MAX_CODE),
        text=storable(text, limit),
        traceback=storable(traceback[max(0, len(traceback) - most) :]),
    )


def _text(make: Callable[[], object], limit: int) -> str:
    """What ``make`` gives, as storable text. Foreign code that raises in it must not hide that the attempt failed."""
    try:
        return storable("".join([str(make())]), limit)  # join: an exact str, whatever a subclass overrides
    except BaseException as broken:
        return storable(f"<this text could not be made: {type(broken).__name__}>", limit)


def _dotted_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> object:
    text = getattr(error, "reason", error) if isinstance(error, Verdict) else str(error)
    if not isinstance(error, BaseExceptionGroup):
        return text
    limit = options().MAX_ERROR_CHARS
    parts = [f"{type(each).__name__}: {_text(partial(str, each), limit)}" for each in error.exceptions[:MAX_PARTS]]
    return f"{text} [{'; '.join(parts)}]"


def _traceback(error: BaseException, limit: int) -> str:
    """The end of a traceback matters most: when it is too long, the beginning goes."""
    if _is_endless(error):
        lines = [*tracebacks.format_tb(error.__traceback__, limit=-MAX_FRAMES), f"{type(error).__name__}: […]\n"]
    else:
        lines = list(tracebacks.TracebackException.from_exception(error, limit=-MAX_FRAMES).format())
    return "".join(reversed(list(_last(lines, limit))))


def _is_endless(error: BaseException) -> bool:
    """Whether too many exceptions hang together; groups within groups multiply, and Python would format them all."""
    left, seen = [error], {id(error)}
    for _ in range(MAX_CHAIN):
        if not left:
            return False
        each = left.pop()
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
        for link in (each.__cause__, each.__context__):
            if link is not None and id(link) not in seen:
                seen.add(id(link))
                left.append(link)
    return bool(left)


def _last(lines: list[str], limit: int) -> Iterator[str]:
    """The last lines, backwards, as far as they fit."""
    for line in reversed(lines):
        short = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…\n"
        limit -= len(short)
        if limit < 0:
            yield "[…]\n"
            return
        yield short
