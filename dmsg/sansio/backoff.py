"""How long to pause after failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Shortest time in seconds until a timer that is not due yet is looked at again: a sum of floats may fall just short of the
#: time at which it is due.
SHORTEST_PAUSE_S: Final = 0.001
#: The pause does not double more often than this, so that no number of failures overflows a float.
_DOUBLINGS: Final = 62


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses in seconds: ``first_s`` after the first failure, twice as long after each further one, up to ``limit_s``.

    Each pause is multiplied by a number drawn from [``least``, ``least`` + ``spread``), so that programs that failed at the
    same moment do not all try again at the same moment. The caller counts failures in a row; a success starts it at 0.
    """

    first_s: float = 1.0
    limit_s: float = 60.0
    least: float = 0.5
    spread: float = 0.5

    def longest_s(self, failures: int) -> float:
        """The pause after the ``failures``-th failure in a row (1 or more), before it is multiplied."""
        return min(self.limit_s, self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS))

    def pause_s(self, failures: int, uniform: Callable[[], float]) -> float:
        """Seconds to wait after the ``failures``-th failure in a row; ``uniform()`` is in [0, 1)."""
        return self.longest_s(failures) * (self.least + self.spread * uniform())
