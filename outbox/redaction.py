"""What people and logs may see of payloads, headers and errors: one hook, whose default hides credentials.

``OUTBOX["REDACT"]`` names a function ``redact(text, *, kind, topic, **kwargs)`` that returns the text as it may be
seen. ``kind`` is payload, headers (both JSON text), error, traceback or log; ``topic`` is empty where it is unknown.
What handlers receive is never touched. Error texts and tracebacks pass it before they are stored.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from outbox.conf import Options, options

HIDDEN = "***"
MARGIN = 1000  # characters beyond a limit that are looked at: a secret must not be cut before it is recognised

_NAMES = (
    r"(?:passw(?:or)?d|passphrase|passcode|pwd|secret|token|credential|cookie|authorization"
    r"|(?:api|private|access|signing|encryption)[_-]?key)"
)
_SECRET_NAME = re.compile(rf"{_NAMES}s?(?=[\W_\d]|\Z)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JSON_WORD = re.compile(r'"(?:[^"\\]+|\\.)*"?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)

_PEM = re.compile(r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----)(?!\*\*\*).*?(?=-----END|\Z)", re.DOTALL)
_ROW = re.compile(r"(Failing row contains \().*?(?:\)\.?(?=\n|\Z)|\Z)", re.DOTALL)  # PostgreSQL quotes the whole row
_PORT = r"\d{1,5}(?:[/?#\s\"'),;]|\Z)"
_USER_AND_PASSWORD = re.compile(rf"(://[^\s/:@\"'<>]{{0,300}}:)(?!{_PORT})[^\s\"'<>]{{1,{MARGIN}}}(?:@|…(?=\n|\Z))")
_TOKEN_AS_USER = re.compile(r"(://)[^\s/:@\"'<>]{20,300}@")
_HEADER = re.compile(r"((?:authorization|cookie)[\"']?\s{0,3}[:=]\s{0,3}+[\"']?+)(?!\*\*\*)[^\r\n\"']+", re.IGNORECASE)
_BEARER = re.compile(r"\b((?:bearer|basic)\s{1,3})(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"({_NAMES}(?:s|\d{{1,4}}|[_-]?(?:key|id|value|hash))?[\"'\]]{{0,2}}\s{{0,3}}(?:=(?![=~])>?|:(?!:))\s{{0,3}}+)"
    r"(?:b?(?P<quote>[\"'])(?:(?!(?P=quote))[^\\\n]|\\.)*(?P=quote)?"
    r"|(?!(?:yes|no)\)|none\b|null\b|\*\*\*)[^\s,;&(){}\[\]\"'<>]+)",  # (using password: YES) says nothing secret
    re.IGNORECASE,
)


def _assigned(found: re.Match[str]) -> str:
    quote = found["quote"] or ""
    return f"{found[1]}{quote}{HIDDEN}{quote}"


_CLUES = ("passw", "passphrase", "passcode", "pwd", "secret", "token", "credential", "cookie", "authorization", "key")
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (("-----begin",), _PEM, rf"\1{HIDDEN}"),
    (("failing row",), _ROW, rf"\1{HIDDEN})"),
    (("://",), _USER_AND_PASSWORD, rf"\1{HIDDEN}@"),
    (("://",), _TOKEN_AS_USER, rf"\1{HIDDEN}@"),
    (("authorization", "cookie"), _HEADER, rf"\1{HIDDEN}"),
    (("bearer", "basic"), _BEARER, rf"\1{HIDDEN}"),
    (_CLUES, _ASSIGNED, _assigned),
)


def redacted(text: str, kind: str, *, topic: str = "") -> str:
    """The text as it may be seen. Never raises: where the function fails, a placeholder says so instead."""
    if not text:
        return text
    return safely(lambda given: _function(_path())(given, kind=kind, topic=topic), text)


def safely(function: Callable[[str], Any], text: str) -> str:
    """What a project's function makes of a text; a placeholder where it raises, or returns something else."""
    try:
        shown = function(text)
        if not isinstance(shown, str):
            raise TypeError("a redactor returns text")
        return "".join([shown])  # an exact str, whatever a subclass overrides
    except (Exception, SystemExit) as error:
        return f"({HIDDEN} the redactor failed: {type(error).__name__})"


def problem() -> str:
    """What is wrong with ``OUTBOX["REDACT"]``, or nothing."""
    path = _path()
    try:
        return "" if callable(_function(path)) else f"{path} is no function"
    except Exception as error:
        return f"{path} cannot be imported ({type(error).__name__}: {error})"


def _path() -> str:
    try:
        return options().REDACT
    except ImproperlyConfigured:  # told by the system checks; what is shown meanwhile stays masked
        return Options().REDACT


@lru_cache(maxsize=8)
def _function(path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = import_string(path)
    return function


# --- the default ------------------------------------------------------------------------------------------------------


def mask(text: str, *, kind: str, **kwargs: Any) -> str:
    """Hide the values of secret names in JSON, and credentials in any text. All numbers keep their digits."""
    return _mask_json(text) if kind in ("payload", "headers") else _mask_text(text)


def _mask_text(text: str) -> str:
    lowered = text.lower()
    for clues, pattern, shown in _RULES:
        if any(clue in lowered for clue in clues):  # few texts hold any, and looking for one is quick
            text = pattern.sub(shown, text)
    return text


def _mask_json(text: str) -> str:
    """Replace what stands under secret names, and credentials within strings; the rest stays as it is, digit by digit.

    The words of the text are looked at, and no number is parsed: a text that is no JSON is masked as far as it goes.
    """
    return "".join(_masked_words(text))


def _masked_words(text: str) -> Iterator[str]:
    told = 0  # so much of the text has been given out
    name, hide, depth = "", False, 0
    for match in _JSON_WORD.finditer(text):
        word = match[0]
        if depth:  # inside an object or a list that is hidden
            depth += (word in "{[") - (word in "}]")
            if not depth:
                told = match.end()
            continue
        if word == ":":
            hide = _is_secret(name)
        elif hide and word not in ("null", ",", "}", "]"):
            yield text[told : match.start()] + f'"{HIDDEN}"'
            told, hide = match.end(), False
            depth = int(word in "{[")
        else:
            if word[0] == '"' and (masked := _masked_string(word)) != word:
                yield text[told : match.start()] + masked
                told = match.end()
            hide = False
        name = word if word[0] == '"' else ""
    if not depth:
        yield text[told:]


@lru_cache(maxsize=1024)
def _is_secret(word: str) -> bool:
    """Whether a JSON string is the name of a secret: dbPassword, X-Api-Key, refresh_tokens."""
    return _SECRET_NAME.search(_CAMEL.sub("_", _unquoted(word)).lower()) is not None


def _masked_string(word: str) -> str:
    if "=" not in word and ":" not in word and "-----" not in word:
        return word
    plain = _unquoted(word)
    masked = _mask_text(plain)
    return word if masked == plain else json.dumps(masked, ensure_ascii=False)


def _unquoted(word: str) -> str:
    try:
        return str(json.loads(word, strict=False))
    except ValueError:
        return word.strip('"')


# --- logs -------------------------------------------------------------------------------------------------------------


class RedactingFilter(logging.Filter):
    """Sits on the outbox's logger: every line and every traceback in it is shown as it may be seen.

    A record that needs no change keeps its arguments. One whose values cannot be printed is not lost.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
            shown = redacted(text, "log")
            if shown != text:
                record.msg, record.args = shown, None
        except (Exception, SystemExit) as error:
            record.msg = f"{record.msg} (its values cannot be shown: {type(error).__name__})"
            record.args = None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            trace = _formatter.formatException(record.exc_info)
            shown = redacted(trace, "traceback")
            if shown != trace:
                record.exc_text = shown  # which formatters then take instead of making it again
        return True


_formatter = logging.Formatter()
