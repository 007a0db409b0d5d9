"""How a client scores relays: its own measurements, blended with what it was told. Pure.

A score is a number of thousandths, 500 is neutral. It is the mean of a Beta-like posterior: the prior counts as a stated
number of observations, each measurement of our own as one more, and measurements lose half of their weight with each
half-life. The prior is the signed rank. Without ranks it is neutral, or as good as the relays that this client has measured
lately, a little better or worse by the relay's place in discovery's list. While ranks fade, it is in between. So a client
that knows nothing goes by what it was told, a client that has measured goes by that, and a relay that has healed is tried
again.

Scores change the order in which relays are tried and never leave one out: a draw gives the worst relay at least a 64th
of an equal chance (:func:`dmsg.discovery.ranks.weight`). Discovery, or the signer of the ranks, cannot do more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.ranks import weight
from dmsg.sansio.rate import check_limits, check_more_than_zero

NEUTRAL: Final = 500.0
_BEST: Final = 1000.0
#: Scores that differ by less than this are equal for the order of a dial: chance decides.
CLOSE: Final = 100.0
#: A relay with a lower score is tried last, even if it is connected.
POOR: Final = 250.0
#: The first place in discovery's list adds this to a score, and the last place subtracts it.
_PLACES: Final = 150.0
#: The weight of an answer, or of a missing one, beside that of connecting: it depends on the peer as well as on the relay.
_ANSWER_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """How a client judges relays."""

    #: Whether the client uses its own measurements at all.
    measure: bool = True
    #: A measurement counts half after this many seconds: a relay that has healed is tried again within minutes.
    half_life_s: float = 300.0
    #: How many measurements of our own a signed rank is worth, and how many the prior without ranks.
    rank_weight: float = 4.0
    place_weight: float = 1.0
    #: How many good measurements a failure outweighs: it costs a dial seconds, while a good relay saves tenths of a second.
    failure_weight: float = 3.0
    #: Milliseconds that count as neither good nor bad: for connect and handshake, and from REQUEST to ACCEPT.
    connect_neutral_ms: float = 500.0
    accept_neutral_ms: float = 250.0
    #: The measurements of one relay count as this many at most, or the newest would weigh too little.
    observations: float = 20.0
    #: Relays remembered; the one without news for longest is forgotten first.
    relays: int = 1_024

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for numbers that no score can be computed with."""
        check_limits(self, "relays")
        check_more_than_zero(
            self, "half_life_s", "rank_weight", "place_weight", "connect_neutral_ms", "accept_neutral_ms"
        )


class RelayScores:
    """Scores of relays. ``now_s`` is any clock's time in seconds, the same one in every call."""

    def __init__(self, config: ScoreConfig | None = None) -> None:
        self.config = config or ScoreConfig()
        #: The score (thousandths) a signed document gives a relay; ``None`` without one.
        self.ranks: Callable[[PublicKey], float] | None = None
        #: The weight of that document: 1 while it is new, 0 when it has expired.
        self.freshness: Callable[[], float] = lambda: 1.0
        self._places: dict[PublicKey, float] = {}
        self._listed_at = 0.0
        # relay -> weight of its measurements, weight times quality (0 to 1), and the time for which both hold
        self._measured: dict[PublicKey, tuple[float, float, float]] = {}
        self._all = (0.0, 0.0, 0.0)

    # --- what is learnt ----------------------------------------------------------------------------------------------

    def connected(self, relay: PublicKey, elapsed_ms: float, now_s: float) -> None:
        """Connect and handshake took ``elapsed_ms``."""
        self._observe(relay, 1.0, _quality(elapsed_ms, self.config.connect_neutral_ms), now_s)

    def failed(self, relay: PublicKey, now_s: float) -> None:
        """A connection failed, or one that was up is lost."""
        self._observe(relay, self.config.failure_weight, 0.0, now_s)

    def answered(self, relay: PublicKey, elapsed_ms: float, now_s: float) -> None:
        """A peer's ACCEPT came ``elapsed_ms`` after the REQUEST, or had not come by then and the wait was given up."""
        self._observe(relay, _ANSWER_WEIGHT, _quality(elapsed_ms, self.config.accept_neutral_ms), now_s)

    def refused(self, relay: PublicKey, now_s: float) -> None:
        """A REQUEST failed for a reason that may be the relay's."""
        self._observe(relay, _ANSWER_WEIGHT * self.config.failure_weight, 0.0, now_s)

    def listed(self, relays: Sequence[PublicKey], now_s: float) -> None:
        """Discovery named these, in this order: a weak hint, which replaces the one before."""
        step = 2 * _PLACES / max(1, len(relays) - 1)
        first = _PLACES if len(relays) > 1 else 0.0
        self._places = {relay: first - step * place for place, relay in enumerate(relays[: self.config.relays])}
        self._listed_at = now_s

    def _observe(self, relay: PublicKey, amount: float, quality: float, now_s: float) -> None:
        config = self.config
        if not config.measure:
            return
        self._all = self._with(self._all, amount, quality, now_s)
        measured = self._with(self._measured.pop(relay, (0.0, 0.0, now_s)), amount, quality, now_s)
        while len(self._measured) >= config.relays:
            del self._measured[next(iter(self._measured))]
        self._measured[relay] = measured

    def _with(
        self, measured: tuple[float, float, float], amount: float, quality: float, now_s: float
    ) -> tuple[float, float, float]:
        left, most = self._left(measured[2], now_s), self.config.observations
        mass, value = measured[0] * left + amount, measured[1] * left + amount * quality
        return (mass, value, now_s) if mass <= most else (most, value * most / mass, now_s)

    def _left(self, at_s: float, now_s: float) -> float:
        """The share that is left now of a weight that counted in full at ``at_s``."""
        left: float = 0.5 ** (max(0.0, now_s - at_s) / self.config.half_life_s)
        return left

    # --- what follows ------------------------------------------------------------------------------------------------

    def score(self, relay: PublicKey, now_s: float) -> float:
        """The score of ``relay`` now, in thousandths."""
        told, count, fresh = 0.0, self.config.place_weight, 0.0 if self.ranks is None else self.freshness()
        if fresh < 1.0:
            told = self._unranked(relay, now_s)
        if self.ranks is not None:
            told += (min(max(self.ranks(relay), 0.0), _BEST) - told) * fresh
            count += (self.config.rank_weight - count) * fresh
        mass, value, at_s = self._measured.get(relay, (0.0, 0.0, now_s))
        left = self._left(at_s, now_s)
        return (told * count + _BEST * value * left) / (count + mass * left)

    def _unranked(self, relay: PublicKey, now_s: float) -> float:
        """The prior of a relay without a document."""
        mass, value, at_s = self._all
        left = self._left(at_s, now_s)
        told = max(NEUTRAL, (NEUTRAL + _BEST * value * left) / (1.0 + mass * left))
        told += self._places.get(relay, 0.0) * self._left(self._listed_at, now_s)
        return min(max(told, 0.0), _BEST)

    def draw(self, relays: Iterable[PublicKey], uniform: Callable[[], float], now_s: float) -> list[PublicKey]:
        """All of ``relays`` in the order of a weighted draw without replacement; ``uniform()`` is in [0, 1)."""
        waits = {relay: -math.log(1.0 - uniform()) / weight(self.score(relay, now_s)) for relay in relays}
        return sorted(waits, key=waits.__getitem__)

    def best(self, relays: Iterable[PublicKey], now_s: float) -> PublicKey:
        """The one of ``relays`` with the highest score. There must be one."""
        return max(relays, key=lambda relay: self.score(relay, now_s))

    def best_first(
        self,
        relays: Iterable[PublicKey],
        connected: Collection[PublicKey],
        uniform: Callable[[], float],
        now_s: float,
    ) -> list[PublicKey]:
        """All of ``relays``: connected ones first unless they are poor, then the best; chance decides among close ones."""

        def key(relay: PublicKey) -> tuple[int, float]:
            score = self.score(relay, now_s)
            group = 2 if score < POOR else int(relay not in connected)
            return group, (uniform() - 0.5) * CLOSE - score

        return sorted(relays, key=key)


def _quality(elapsed_ms: float, neutral_ms: float) -> float:
    return neutral_ms / (neutral_ms + max(0.0, elapsed_ms))
