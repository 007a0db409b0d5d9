"""The kinds of values of settings: one parser and one printer for each, wherever a value comes from. Pure.

Options, variables and arguments of endpoint strings are texts. TOML has texts, numbers, booleans and lists.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

from dmsg.address import HostPort, PinnedServer, check_http_url, check_service_name
from dmsg.crypto.keys import PublicKey
from dmsg.errors import InvalidAddress

T = TypeVar("T")

#: The text of a missing value, and of an empty list.
NONE: Final = "none"
_TRUE: Final = frozenset({"yes", "true", "on", "1"})
_FALSE: Final = frozenset({"no", "false", "off", "0"})
_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"\s*(\S*?)\s*(ms|min|s|m|h|d|)\s*")
_SIZE: Final = re.compile(r"\s*(\d{1,19})\s*([KMGT]i?B?|B)\s*", re.IGNORECASE)
_BINARY_UNITS: Final = ("TiB", "GiB", "MiB", "KiB")
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of values.

    ``parse`` takes a text, or a value of TOML, and raises ``ValueError``. ``text`` gives a text that ``parse`` makes the same
    value of. ``metavar`` stands for a value in help texts. A kind with ``many`` is a list of values, which may also be given
    one at a time.
    """

    metavar: str
    parse: Callable[[Any], T]
    text: Callable[[T], str] = str
    many: bool = False


# --- parsers ---------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    if "\0" in value:  # possible in TOML and endpoint strings
        raise ValueError("must not have a null character")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value))


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be yes or no")
    return word in _TRUE


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be a whole number")
    try:
        number = int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    return _in_range(number)


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        try:
            return _count(value)
        except ValueError as error:
            raise ValueError(str(error).replace("a whole number", "a size such as 1000, 64MiB or 2G")) from None
    unit = match[2].upper()
    base = 1000 if unit[1:] == "B" else 1024
    return _in_range(int(match[1]) * int(base ** "BKMGT".index(unit[0])))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return _in_range(number)


def _duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    amount, unit = (match[1], match[2]) if match else (value, "")
    try:
        return _number(_number(amount) * _SECONDS[unit])
    except ValueError as error:
        raise ValueError(str(error).replace("a number", "a duration such as 2.5, 500ms, 10s or 5m")) from None


_N = TypeVar("_N", int, float)


def _in_range(number: _N) -> _N:
    if number < 0:
        raise ValueError("must not be negative")
    if number > _LARGEST:
        raise ValueError("is too large")
    return number


def _address(value: Any) -> HostPort:
    try:
        return HostPort.parse(value)
    except InvalidAddress as error:
        raise ValueError(f"must be host:port ({error})") from None


def _service(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return check_service_name(value)


# --- kinds -----------------------------------------------------------------------------------------------------------


def _number_text(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _size_text(value: int) -> str:
    for power, unit in zip(range(4, 0, -1), _BINARY_UNITS, strict=True):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{unit}"
    return str(value)


def choice(options: type[Enum]) -> Kind[Any]:
    """One member of ``options``, by its value, which is a text."""
    values = [str(one.value) for one in options]

    def parse(value: Any) -> Enum:
        if value not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return options(value)

    return Kind("|".join(values), parse, lambda one: str(one.value))


def several(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list of ``kind``, each value once: a list in TOML, or a text with commas or white space in between."""

    def parse(value: Any) -> tuple[T, ...]:
        words = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)):
            raise ValueError("must be a list, or a text with commas in between")
        flat = [
            part for word in words for part in (word.replace(",", " ").split() if isinstance(word, str) else [word])
        ]
        if flat == [NONE]:
            return ()
        if not flat:
            raise ValueError("must not be an empty list; none stands for that")
        return tuple(dict.fromkeys(map(kind.parse, flat)))

    return Kind(f"{kind.metavar}[,…]", parse, lambda found: ",".join(map(kind.text, found)) or NONE, many=True)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """``kind`` or, as "none", ``None``."""

    def parse(value: Any) -> T | None:
        return None if isinstance(value, str) and value.lower() == NONE else kind.parse(value)

    return Kind(kind.metavar, parse, lambda value: NONE if value is None else kind.text(value), kind.many)


TEXT: Final = Kind("TEXT", _text)
PATH: Final = Kind("FILE", _path)
DIRECTORY: Final = Kind("DIR", _path)
#: A text, because a ``Path`` cannot hold a URL.
LOCATION: Final = Kind("FILE|URL", _text)
FLAG: Final = Kind("yes|no", _flag, lambda value: "yes" if value else "no")
COUNT: Final = Kind("NUMBER", _count)
SIZE: Final = Kind("SIZE", _size, _size_text)
NUMBER: Final = Kind("NUMBER", _number, _number_text)
DURATION: Final = Kind("SECONDS", _duration, _number_text)
ADDRESS: Final = Kind("HOST:PORT", _address)
URL: Final = Kind("URL", lambda value: check_http_url(_text(value)))
SERVICE: Final = Kind("NAME", _service)
KEY: Final = Kind("PK", lambda value: PublicKey.parse(_text(value)))
KEYS: Final = several(KEY)
RELAY: Final = Kind("PK@HOST:PORT", lambda value: PinnedServer.parse(_text(value)))
RELAYS: Final = several(RELAY)

_KINDS: Final[dict[Any, Kind[Any]]] = {
    str: TEXT,
    Path: PATH,
    bool: FLAG,
    int: COUNT,
    float: NUMBER,
    HostPort: ADDRESS,
    PublicKey: KEY,
    PinnedServer: RELAY,
}


def has_kind(hint: Any) -> bool:
    """Whether :func:`kind_of` knows ``hint``; a dataclass that it does not know is a group of settings."""
    return hint in _KINDS or not isinstance(hint, type) or issubclass(hint, Enum)


def kind_of(hint: Any, name: str) -> Kind[Any]:
    """The kind of a field, by its type and the unit in its ``name``: seconds (``_s``, but not ``per_s``), or bytes."""
    if get_origin(hint) in (Union, types.UnionType):
        [inner] = (one for one in get_args(hint) if one is not type(None))
        kind = kind_of(inner, name)
        # people would take "none" for the least of the choices, but it would mean that none was made
        return kind if isinstance(inner, type) and issubclass(inner, Enum) else optional(kind)
    if get_origin(hint) is tuple:
        return several(kind_of(get_args(hint)[0], name))
    if issubclass(hint, Enum):
        return choice(hint)
    if hint is float and name.endswith("_s") and not name.endswith("per_s"):
        return DURATION
    return SIZE if hint is int and "bytes" in name.split("_") else _KINDS[hint]


def more_than_zero(value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is more than 0, and finite."""
    if not 0 < value < math.inf:
        raise ValueError("must be more than 0, and finite")
