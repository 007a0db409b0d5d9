"""The rate limit of a twin: a number of envelopes and of bytes in each window of time. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dmsg.rmb.core.errors import InvalidLimit

#: The window of the public relay, in seconds.
WINDOW_S: Final = 60
_LIMIT: Final = re.compile(r"\s*(\d{1,18})(?:\s*,\s*|\s+)(\d{1,18})\s*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``count`` envelopes and ``bytes`` bytes in a window."""

    count: int
    bytes: int


def parse_limit(text: str) -> Limit:
    """Read ``COUNT,BYTES`` or ``COUNT BYTES``; raises :class:`~dmsg.rmb.core.errors.InvalidLimit`."""
    match = _LIMIT.match(text)
    if not match:
        raise InvalidLimit("a limit is COUNT,BYTES")
    return Limit(int(match[1]), int(match[2]))


class FixedWindow:
    """Counts what one twin sends in windows that begin at multiples of ``window_s`` of Unix time.

    An envelope larger than a whole window's bytes is refused and not counted. All others are counted, also when they are
    refused, so a twin that goes on sending stays refused until the window ends.
    """

    __slots__ = ("_bytes", "_count", "_window", "_window_s", "limit")

    def __init__(self, limit: Limit, window_s: int = WINDOW_S) -> None:
        self.limit = limit
        self._window_s = window_s
        self._window = -1
        self._count = self._bytes = 0

    def admit(self, size: int, now: float) -> bool:
        """Whether an envelope of ``size`` bytes may pass at the Unix time ``now``."""
        if size > self.limit.bytes:
            return False
        window = int(now // self._window_s)
        if window != self._window:
            self._window = window
            self._count = self._bytes = 0
        self._count += 1
        self._bytes += size
        return self._count <= self.limit.count and self._bytes <= self.limit.bytes
