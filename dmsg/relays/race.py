"""A race for sessions: who runs, who has been overtaken, and when the next may start. Pure.

Three candidates start at once. One that has no session after :attr:`RaceConfig.hedge_s` is *overtaken*: it runs on, and the
next candidate starts beside it. So a relay that accepts and then says nothing holds one of the three places for one second,
not for the time limit of a connect. A client without any session starts six at a time after three were overtaken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from dmsg.crypto.keys import PublicKey
from dmsg.sansio.rate import check_limits


@dataclass(frozen=True, slots=True)
class RaceConfig:
    """How candidates are raced. With these values, 39 have been started after 7 s. If 50 of 60 groups stall, one of the other
    10 is among these 39 with a probability of 99.9995 %, and has the rest of 10 s to answer.
    """

    #: Attempts that run at a time, not counting overtaken ones.
    width: int = 3
    #: The same for a client without a session once :attr:`width` attempts were overtaken: the list is not trustworthy.
    hurried_width: int = 6
    #: An attempt that has run for this long is overtaken. Connect, handshake and admission take three round trips, and a
    #: look-up one more: 1 s is enough for a relay at the other end of the world, even with a lost packet.
    hedge_s: float = 1.0
    #: Attempts that run in all; above that, the oldest is given up. An attempt given up for this reason had at least 4 s.
    attempts: int = 32

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a race without attempts."""
        check_limits(self, "attempts")


class _Runner(NamedTuple):
    group: str
    started_s: float


class Race:
    """The attempts of one client; ``now_s`` is any clock's time in seconds, the same one in every call."""

    def __init__(self, config: RaceConfig) -> None:
        self.config = config
        self._running: dict[PublicKey, _Runner] = {}

    def __contains__(self, key: PublicKey) -> bool:
        return key in self._running

    def __len__(self) -> int:
        return len(self._running)

    def start(self, key: PublicKey, group: str, now_s: float) -> None:
        """Note an attempt that has begun."""
        self._running[key] = _Runner(group, now_s)

    def end(self, key: PublicKey) -> None:
        """Forget an attempt that is over, if it is known."""
        self._running.pop(key, None)

    def overtaken(self, key: PublicKey, now_s: float) -> bool:
        """Whether the attempt has run for so long that others no longer wait for it."""
        return now_s >= self._running[key].started_s + self.config.hedge_s

    def room(self, group: str, now_s: float, *, of_a_group: int, hurried: bool) -> bool:
        """Whether one of ``group`` may start now. Of each group ``of_a_group`` may run, not counting overtaken ones."""
        fresh = [one.group for key, one in self._running.items() if not self.overtaken(key, now_s)]
        config = self.config
        wide = hurried and len(self._running) - len(fresh) >= config.width
        width = max(config.hurried_width if wide else config.width, of_a_group)
        return len(fresh) < width and fresh.count(group) < of_a_group

    def next_s(self, now_s: float) -> float | None:
        """When the next attempt is overtaken; ``None`` when all are."""
        due = [one.started_s + self.config.hedge_s for one in self._running.values()]
        return min((at_s for at_s in due if at_s > now_s), default=None)

    def surplus(self) -> PublicKey | None:
        """The oldest attempt, if one more would be too many."""
        return next(iter(self._running)) if len(self._running) >= self.config.attempts else None

    def unwanted(self, groups: Collection[str]) -> list[PublicKey]:
        """The attempts at relays of ``groups``."""
        return [key for key, one in self._running.items() if one.group in groups]

    def all(self) -> list[PublicKey]:
        """All attempts, the oldest first."""
        return list(self._running)
