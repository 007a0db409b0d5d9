"""The line of a value in a TOML document, which the parser does not tell. Pure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module before it came into the standard library
    import tomli as tomllib

#: Characters of the longest document that is searched, and lines that are tried: each of these costs a run of the parser.
_LIMIT_CHARACTERS: Final = 64 * 1024
_LIMIT_LINES: Final = 64


def line_of(text: str, place: Sequence[str]) -> int:
    """The line, from 1, on which the value at ``place`` begins; 0 if that is not known.

    It is the last line with the name for which the part of the document before the line can be parsed and does not have the
    value. The part before a line inside of a longer value cannot be parsed.
    """
    if len(text) > _LIMIT_CHARACTERS or not _has(_parsed(text), place):
        return 0
    lines = text.split("\n")
    named = [number for number, line in enumerate(lines) if place[-1] in line]
    for number in reversed(named[-_LIMIT_LINES:]):
        before = _parsed("\n".join(lines[:number]) + "\n")
        if before is not None and not _has(before, place):
            return number + 1
    return 0


def _parsed(text: str) -> Any:
    """The document; ``None`` where it cannot be parsed, which may also be because less of the stack is left than before."""
    with contextlib.suppress(ValueError, RecursionError):
        return tomllib.loads(text)
    return None


def _has(found: Any, place: Sequence[str]) -> bool:
    for name in place:
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True
