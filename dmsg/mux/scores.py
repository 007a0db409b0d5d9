"""What a client thinks of relays: its own measurements, blended with what it was told. Pure.

A score is a number of thousandths, 500 is neutral. It is the mean of a Beta-like posterior: what was told (a signed rank,
or the place in discovery's list) counts as a stated number of observations, each measurement of our own as one more, and
measurements lose half of their weight with each half-life. So a client that knows nothing goes by what it was told, one
that knows better does not, and a relay that has healed is tried again.

Scores change the order in which relays are tried and never leave one out: a draw gives the worst relay at least a 64th
of an equal chance (:func:`weight`). Discovery, or whoever signs ranks, cannot do more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dmsg.crypto.keys import PublicKey

__all__ = ["NEUTRAL", "RelayScores", "ScoreConfig", "weight"]

NEUTRAL: Final = 500.0
_BEST: Final = 1000.0
#: The weights in a draw of the best and the worst, a neutral relay's being 1: the same as discovery's.
WEIGHT_LIMIT: Final = 8.0
WEIGHT_FLOOR: Final = 0.125
#: Scores that differ by less than this are equal as far as the order of a dial is concerned: chance decides.
CLOSE: Final = 100.0
#: A relay below this is tried after those with which there is no connection yet.
POOR: Final = 250.0
#: First and last place in discovery's list count as these scores.
_FIRST_PLACE: Final = 750.0
_LAST_PLACE: Final = 250.0
#: What an answer, or the lack of one, weighs beside connecting: it is the peer's doing as well as the relay's.
_ANSWER_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """How a client judges relays."""

    #: Whether the client goes by its own measurements at all.
    measure: bool = True
    #: What was measured counts half after so many seconds: a relay that has healed is tried again within minutes.
    half_life_s: float = 300.0
    #: How many measurements of our own a signed rank is worth, and how many a place in discovery's list, or nothing known.
    rank_weight: float = 4.0
    place_weight: float = 1.0
    #: How many good measurements a failure outweighs: it costs a dial seconds, where a good relay saves tenths of one.
    failure_weight: float = 3.0
    #: Milliseconds that count as neither good nor bad: to connect and shake hands, and from REQUEST to ACCEPT.
    connect_neutral_ms: float = 500.0
    accept_neutral_ms: float = 250.0
    #: Measurements of one relay count as no more than so many, or the newest would say too little.
    observations: float = 20.0
    #: Relays remembered; the one not heard of for longest is forgotten first.
    relays: int = 1_024


def weight(score: float) -> float:
    """The weight of a score in a draw: its third power, a neutral one's being 1; at least :data:`WEIGHT_FLOOR`."""
    relative = min(max(score, 0.0), _BEST) / NEUTRAL
    return max(WEIGHT_FLOOR, relative**3)


class RelayScores:
    """Scores of relays. ``now_s`` is any clock's time in seconds, the same one in every call."""

    def __init__(self, config: ScoreConfig | None = None) -> None:
        self.config = config or ScoreConfig()
        #: The score (thousandths) a signed document gives a relay now; ``None`` without one.
        self.ranks: Callable[[PublicKey], float] | None = None
        self._places: dict[PublicKey, float] = {}
        # relay -> weight of its measurements, that times their quality (0 to 1), and when both were right
        self._measured: dict[PublicKey, tuple[float, float, float]] = {}

    # --- what is learnt ----------------------------------------------------------------------------------------------

    def connected(self, relay: PublicKey, elapsed_ms: float, now_s: float) -> None:
        """Connecting and shaking hands took ``elapsed_ms``."""
        self._observe(relay, 1.0, _quality(elapsed_ms, self.config.connect_neutral_ms), now_s)

    def failed(self, relay: PublicKey, now_s: float) -> None:
        """There was no connection to be had, or one that was up is lost."""
        self._observe(relay, self.config.failure_weight, 0.0, now_s)

    def answered(self, relay: PublicKey, elapsed_ms: float, now_s: float) -> None:
        """A peer's ACCEPT came ``elapsed_ms`` after the REQUEST, or had not come by then and was waited for no longer."""
        self._observe(relay, _ANSWER_WEIGHT, _quality(elapsed_ms, self.config.accept_neutral_ms), now_s)

    def refused(self, relay: PublicKey, now_s: float) -> None:
        """A REQUEST came to nothing for a reason that may be the relay's."""
        self._observe(relay, _ANSWER_WEIGHT * self.config.failure_weight, 0.0, now_s)

    def listed(self, relays: Sequence[PublicKey]) -> None:
        """Discovery named these, in this order: a weak hint, in place of the one before."""
        step = (_FIRST_PLACE - _LAST_PLACE) / max(1, len(relays) - 1)
        best = _FIRST_PLACE if len(relays) > 1 else NEUTRAL
        self._places = {relay: best - step * place for place, relay in enumerate(relays[: self.config.relays])}

    def _observe(self, relay: PublicKey, amount: float, quality: float, now_s: float) -> None:
        config = self.config
        if not config.measure:
            return
        mass, value = self._decayed(relay, now_s)
        mass, value = mass + amount, value + amount * quality
        if mass > config.observations:
            mass, value = config.observations, value * config.observations / mass
        self._measured.pop(relay, None)
        while len(self._measured) >= config.relays:
            del self._measured[next(iter(self._measured))]
        self._measured[relay] = (mass, value, now_s)

    def _decayed(self, relay: PublicKey, now_s: float) -> tuple[float, float]:
        mass, value, at_s = self._measured.get(relay, (0.0, 0.0, now_s))
        left = 0.5 ** (max(0.0, now_s - at_s) / self.config.half_life_s)
        return mass * left, value * left

    # --- what follows ------------------------------------------------------------------------------------------------

    def score(self, relay: PublicKey, now_s: float) -> float:
        """The score of ``relay`` now, in thousandths."""
        if self.ranks is not None:
            told, count = min(max(self.ranks(relay), 0.0), _BEST), self.config.rank_weight
        else:
            told, count = self._places.get(relay, NEUTRAL), self.config.place_weight
        mass, value = self._decayed(relay, now_s)
        return (told * count + _BEST * value) / (count + mass)

    def draw(self, relays: Iterable[PublicKey], uniform: Callable[[], float], now_s: float) -> list[PublicKey]:
        """All of ``relays`` in the order of a weighted draw without replacement; ``uniform()`` is in [0, 1)."""
        waits = {relay: -math.log(1.0 - uniform()) / weight(self.score(relay, now_s)) for relay in relays}
        return sorted(waits, key=waits.__getitem__)

    def best_first(
        self,
        relays: Iterable[PublicKey],
        connected: Collection[PublicKey],
        uniform: Callable[[], float],
        now_s: float,
    ) -> list[PublicKey]:
        """All of ``relays``: those connected first unless they are poor, the best first, chance among close ones."""

        def key(relay: PublicKey) -> tuple[int, float]:
            score = self.score(relay, now_s)
            group = 2 if score < POOR else int(relay not in connected)
            return group, (uniform() - 0.5) * CLOSE - score

        return sorted(relays, key=key)


def _quality(elapsed_ms: float, neutral_ms: float) -> float:
    return neutral_ms / (neutral_ms + max(0.0, elapsed_ms))
