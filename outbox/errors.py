"""Turn any exception into text that any database stores, whatever its author did to it; recording cannot fail."""

from __future__ import annotations

import traceback as tracebacks
from collections.abc import Iterator
from dataclasses import dataclass

from outbox.conf import options
from outbox.exceptions import Verdict
from outbox.texts import storable

MAX_LINE = 2000  # characters of one line of a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as clean, bounded text: its dotted type, a code the handler gave, its message, its traceback."""

    type: str = ""
    code: str = ""
    text: str = ""
    traceback: str = ""


NO_ERROR = ErrorRecord()


def describe(error: BaseException, *, code: str = "", with_traceback: bool = True) -> ErrorRecord:
    """The record of an exception. NUL and surrogates are replaced, long text is cut, a broken ``__str__`` is named."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = error.reason if isinstance(error, Verdict) else _text(error)
    current = options()
    return ErrorRecord(
        type=storable(name, 255),
        code=storable(str(code or getattr(error, "code", "") if isinstance(error, Verdict) else code), 100),
        text=storable(str(text), current.MAX_ERROR_CHARS),
        traceback=_traceback(error, current.MAX_TRACEBACK_CHARS) if with_traceback else "",
    )


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as broken:  # whatever a foreign __str__ raises must not hide that the attempt failed
        return f"<{type(error).__name__} whose text could not be made: {type(broken).__name__}>"
    if isinstance(error, BaseExceptionGroup):
        text += " [" + "; ".join(f"{type(each).__name__}: {_text(each)}" for each in error.exceptions[:10]) + "]"
    return text


def _traceback(error: BaseException, limit: int) -> str:
    """The end of the traceback matters most: when it is too long, the beginning goes."""
    try:
        lines = list(_lines(error))
    except BaseException as broken:
        return f"<no traceback: {type(broken).__name__}>"
    kept: list[str] = []
    room = limit
    for line in reversed(lines):
        room -= len(line)
        if room < 0:
            kept.append("[…]\n")
            break
        kept.append(line)
    return storable("".join(reversed(kept)), limit)


def _lines(error: BaseException) -> Iterator[str]:
    for line in tracebacks.TracebackException.from_exception(error, limit=-50).format():
        yield line if len(line) <= MAX_LINE else line[:MAX_LINE] + "…\n"
