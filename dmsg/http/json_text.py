"""Strict JSON: reading texts of strangers, and writing texts as Go writes them. Pure.

Signatures cover a text (:ref:`spec-canonical-json`), so both directions must be exact: the reader accepts strict JSON only,
and strings are quoted byte for byte like Go's ``encoding/json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from dmsg.http.errors import MalformedJson

#: Deepest nesting of arrays and objects. An entry needs 3 levels, a list of entries 4; more can only exhaust a stack.
DEPTH_LIMIT: Final = 16
#: Longest number in characters: "-9223372036854775808" has 20. Longer numbers are never in range.
_NUMBER_LIMIT: Final = 20
#: Characters of a list that are searched first for its next element: most elements are much shorter.
_WINDOW: Final = 2048
_SPACE: Final = re.compile(r"[ \t\n\r]*")

# A string without escapes, closed or cut off by the end of the text, or one bracket. The pattern behind the star matches
# wherever the star stops, so there is no backtracking and the scan takes linear time. The star repeats a single class: with a
# group it would keep a record of each round, 100 bytes for each character of a string.
_STRING_OR_BRACKET: Final = re.compile(r'"[^"]*(?:"|\Z)|[\[\]{}]')

_PLAIN: Final = re.compile(r"[ !#-%'-;=?-\[\]-~]*\Z")
_SPECIAL: Final = re.compile('[\x00-\x1f"\\\\<>&\u2028\u2029]')
_SHORT: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _NotAnInteger:
    """Stands for a number that is too long; fails every type check, but does no harm in members that are not read."""


def _integer(text: str) -> Any:
    return int(text) if len(text) <= _NUMBER_LIMIT else _NotAnInteger()


def _constant(text: str) -> Any:
    raise MalformedJson(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise MalformedJson("an object has two members of one name")
    return members


_decoder: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEPTH_LIMIT:
        return
    # Escaped quotes end no string. Remove pairs of backslashes first, from the left, so that each backslash left over
    # escapes a character. JSON has no backslashes outside of strings.
    text = text.replace("\\\\", "").replace('\\"', "")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > DEPTH_LIMIT:
                raise MalformedJson(f"nested deeper than {DEPTH_LIMIT}")
        elif first in "]}":
            depth -= 1


def decode(data: bytes, limit_bytes: int) -> Any:
    """Read one JSON value of at most ``limit_bytes`` of UTF-8, with nothing but white space after it.

    Raises :class:`~dmsg.http.errors.MalformedJson` and nothing else: too long, not UTF-8, not JSON, NaN or infinity,
    nested deeper than :data:`DEPTH_LIMIT`, an object with the same member twice.
    """
    if len(data) > limit_bytes:
        raise MalformedJson(f"longer than {limit_bytes} bytes")
    try:
        text = data.decode("utf-8")
        _check_depth(text)
        return _decoder.decode(text)
    except MalformedJson:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedJson(f"not JSON ({type(error).__name__})") from None


def elements(data: bytes, limit_bytes: int, element_limit: int) -> Iterator[Any]:
    """The elements of a JSON list of at most ``limit_bytes``, one by one: elements are read only when asked for.

    ``null`` is a list without elements, as in Go. Raises :class:`~dmsg.http.errors.MalformedJson` as :func:`decode` does,
    and also for a text that is no list and for an element of more than ``element_limit`` characters, when it reaches the
    fault. Reading one element takes time for at most ``element_limit`` characters.
    """
    if len(data) > limit_bytes:
        raise MalformedJson(f"longer than {limit_bytes} bytes")
    try:
        text = data.decode("utf-8")
    except ValueError:
        raise MalformedJson("not JSON (UnicodeDecodeError)") from None
    at = _skip_space(text, 0)
    if text.startswith("null", at) and _skip_space(text, at + 4) == len(text):
        return
    if not text.startswith("[", at):
        raise MalformedJson("not a list")
    at = _skip_space(text, at + 1)
    if not text.startswith("]", at):
        while True:
            value, at = _element(text, at, element_limit)
            yield value
            at = _skip_space(text, at)
            if not text.startswith(",", at):
                break
            at = _skip_space(text, at + 1)
    if not text.startswith("]", at) or _skip_space(text, at + 1) != len(text):
        raise MalformedJson("not JSON (the list does not end)")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _element(text: str, at: int, limit: int) -> tuple[Any, int]:
    """The JSON value at ``at`` and where it ends; reads up to ``limit`` characters if the first few are not enough."""
    try:
        return _value_in(text, at, min(_WINDOW, limit))
    except MalformedJson:
        return _value_in(text, at, limit)


def _value_in(text: str, at: int, size: int) -> tuple[Any, int]:
    window = text[at : at + size]
    try:
        _check_depth(window)
        value, end = _decoder.raw_decode(window)
    except MalformedJson:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedJson(f"not JSON ({type(error).__name__})") from None
    return value, at + end


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _SHORT.get(character) or f"\\u{ord(character):04x}"


def quote(text: str) -> str:
    """``text`` as Go writes it: ``<``, ``>``, ``&``, U+2028 and U+2029 escaped, all other non-ASCII characters raw.

    Backspace and form feed get their short forms, as in Go since 1.22; our entries never contain either.
    """
    if _PLAIN.match(text):
        return f'"{text}"'
    return f'"{_SPECIAL.sub(_escape, text)}"'
