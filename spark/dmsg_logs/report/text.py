"""Numbers, times and foreign texts as they stand in the page. Pure.

Every text from a log is a stranger's text: it passes :func:`shown` (or :func:`key`, :func:`safe`) before it becomes part
of the page. They escape markup, and replace characters that change the direction or order of the text around.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Final

#: Characters of a foreign text that are shown, and that its title keeps.
SHOWN_CHARACTERS: Final = 48
TITLE_CHARACTERS: Final = 256
#: Hex digits of a key that are shown: enough to tell the relays and clients of a fleet apart.
KEY_CHARACTERS: Final = 8
#: The same of a node that has a given name instead.
NAME_CHARACTERS: Final = 16
_HEX: Final = frozenset("0123456789abcdefABCDEF")
NOTHING: Final = "–"
_THIN: Final = "\u202f"
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def plain(value: object, limit: int = TITLE_CHARACTERS) -> str:
    """A foreign value as text of at most ``limit`` characters; control and format characters become U+FFFD."""
    text = str(value)[: limit + 1]
    text = "".join(
        "\ufffd" if unicodedata.category(each)[0] == "C" or each in "\u2028\u2029" else each for each in text
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def safe(value: object, limit: int = TITLE_CHARACTERS) -> str:
    """The same, escaped for text and for attributes in quotes."""
    return html.escape(plain(value, limit), quote=True)


def shown(value: object) -> str:
    """A reason, stage or name: short, the rest of it in the title."""
    text = str(value)
    if not text:
        return NOTHING
    if len(text) <= SHOWN_CHARACTERS:
        return safe(text)
    return f'<span title="{safe(text)}">{safe(text, SHOWN_CHARACTERS)}</span>'


def short_key(value: object) -> str:
    """The start of a key, or a given name; not escaped."""
    text = str(value)
    shown = KEY_CHARACTERS if set(text) <= _HEX else NAME_CHARACTERS
    return plain(text if len(text) <= shown + 1 else text[:shown] + "…")


def key(value: object) -> str:
    """A key, abbreviated, the whole of it in the title."""
    if not str(value):
        return NOTHING
    return f'<code title="{safe(value)}">{html.escape(short_key(value))}</code>'


# --- numbers ---------------------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A number that can be drawn, or nothing: ``None``, NaN, infinities and texts are nothing."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def of(value: Any) -> float:
    """The same with nothing as 0."""
    return number(value) or 0.0


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    text = f"{value:.{min(max(2 - size, 0), 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: Any, units: Sequence[str], base: float = 1000.0) -> str:
    found = number(value)
    if found is None:
        return NOTHING
    index = 0
    while abs(found) >= base * 0.9995 and index < len(units) - 1:
        found /= base
        index += 1
    return f"{_digits(found)}{_THIN}{units[index]}".rstrip(_THIN)


def count(value: Any) -> str:
    """A count in full, thousands apart."""
    found = number(value)
    return NOTHING if found is None else f"{round(found):,}".replace(",", _THIN)


def about(value: Any) -> str:
    """A count as three digits and a unit."""
    found = number(value)
    if found is not None and abs(found) < 10_000:
        return count(found)
    return _scaled(found, ("", "k", "M", "G", "T"))


def size(value: Any) -> str:
    """Bytes, in decimal units."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def ms(value: Any) -> str:
    """Milliseconds."""
    found = number(value)
    if found is not None and abs(found) >= 10_000:
        return seconds(found / 1000)
    return _scaled(found, ("ms", "s"))


def seconds(value: Any) -> str:
    """A length of time in seconds, minutes, hours or days."""
    found = number(value)
    if found is None:
        return NOTHING
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(found) >= 2 * length:
            return f"{_digits(found / length)}{_THIN}{unit}"
    return f"{_digits(found)}{_THIN}s"


def percent(part: Any, whole: Any = 1) -> str:
    """A share; 100 % only if it is everything, 0 % only if it is nothing."""
    share, total = number(part), number(whole)
    if share is None or not total:
        return NOTHING
    value = 100 * share / total
    text = f"{value:.3f}" if 99.9 <= value < 100 or 0 < value < 0.1 else f"{value:.1f}"
    if float(text) == 100 and value < 100:
        return f"> 99.999{_THIN}%"
    if float(text) == 0 and value > 0:
        return f"< 0.001{_THIN}%"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{_THIN}%"


def many(value: Any, one: str, more: str | None = None) -> str:
    """A count and its noun: ``1 relay``, ``2 relays``, ``no relays``."""
    found = number(value) or 0
    noun = one if found == 1 else more or one + "s"
    return f"{'no' if not found else about(found)} {noun}"


def sentence(text: str) -> str:
    """``text`` as the beginning of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


# --- times (UTC) -----------------------------------------------------------------------------------------------------


def _moment(at: Any) -> datetime | None:
    found = number(at)
    if found is None or not 0 <= found < 253_402_300_800:  # the end of the year 9999
        return None
    return datetime.fromtimestamp(found, timezone.utc)


def day(at: Any) -> str:
    """``6 Mar`` of Unix seconds or of an ISO date."""
    if isinstance(at, str):
        try:
            moment = datetime.fromisoformat(at)
        except ValueError:
            return safe(at, 10)
    else:
        found = _moment(at)
        if found is None:
            return NOTHING
        moment = found
    return f"{moment.day} {_MONTHS[moment.month - 1]}"


def clock(at: Any) -> str:
    """``14:00`` of Unix seconds."""
    moment = _moment(at)
    return NOTHING if moment is None else f"{moment:%H:%M}"


def when(at: Any) -> str:
    """``6 Mar 2025, 14:00`` of Unix seconds."""
    moment = _moment(at)
    return NOTHING if moment is None else f"{day(at)} {moment.year}, {moment:%H:%M}"
