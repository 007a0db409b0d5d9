"""Repeats that say something about us, on a machine that is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from benchmarks.report import Stolen

#: With more than this share of the processors' time gone to other guests of the host, a tail is theirs.
_QUIET_SHARE: Final = 0.02
#: How many repeats there may be for each that is wanted.
_ATTEMPTS: Final = 2

T = TypeVar("T")


def least_disturbed(repeats: int, once: Callable[[], T], stolen: Callable[[], Stolen] = Stolen) -> list[T]:
    """What ``once`` gave in those ``repeats`` calls during which the host took least of the processors.

    It is called more often, up to twice, while too few calls were quiet. Which ones count does not depend on what they
    gave. In the order in which they were made.
    """
    runs: list[tuple[float, int, T]] = []
    while len(runs) < repeats or (
        sum(share <= _QUIET_SHARE for share, _, _ in runs) < repeats and len(runs) < _ATTEMPTS * repeats
    ):
        meanwhile = stolen()
        result = once()
        runs.append((meanwhile.share(), len(runs), result))
    chosen = sorted(runs, key=lambda run: run[:2])[:repeats]
    return [result for _, _, result in sorted(chosen, key=lambda run: run[1])]
