"""Repeats that are little disturbed, on a shared machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from benchmarks.report import Stolen

#: Share of the processors' time for other guests of the host, above which a tail is their fault.
_QUIET_SHARE: Final = 0.02
#: Most repeats for each wanted one.
_ATTEMPTS: Final = 2

T = TypeVar("T")


def least_disturbed(repeats: int, once: Callable[[], T], stolen: Callable[[], Stolen] = Stolen) -> list[T]:
    """The results of those ``repeats`` calls of ``once`` during which the host took least processor time, in order.

    While too few calls were quiet, ``once`` is called up to twice as often. The choice does not depend on the results.
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
