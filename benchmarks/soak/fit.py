"""Tests whether a level grew: with a straight line through it, the line's standard error, and a bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Consecutive samples of a level are not independent, so the line goes through the means of this many equal parts of the
#: time; otherwise its error would be far too small.
PARTS: Final = 24
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through a level: its mean, its slope an hour with standard error, and the ``hours`` it covers."""

    mean: float
    slope_per_h: float
    error_per_h: float
    hours: float

    def is_flat(self, bound_per_h: float) -> bool:
        """Whether the slope minus two standard errors is within the bound, so that only certain growth exceeds it."""
        return self.slope_per_h - 2 * self.error_per_h <= bound_per_h


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The line through (seconds, level) pairs in order of time; ``None`` if they are too few for an error."""
    parts = _means(points)
    if len(parts) < 4:
        return None
    at_s = [one[0] for one in parts]
    levels = [one[1] for one in parts]
    middle_s, mean = statistics.fmean(at_s), statistics.fmean(levels)
    spread = sum((one - middle_s) ** 2 for one in at_s)
    slope = sum((when - middle_s) * (level - mean) for when, level in parts) / spread
    rest = sum((level - mean - slope * (when - middle_s)) ** 2 for when, level in parts)
    error = math.sqrt(rest / (len(parts) - 2) / spread)
    return Fit(mean, slope * _HOUR_S, error * _HOUR_S, (points[-1][0] - points[0][0]) / _HOUR_S)


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return []
    begin, width = points[0][0], (points[-1][0] - points[0][0]) / PARTS
    parts: dict[int, list[tuple[float, float]]] = {}
    for one in points:
        parts.setdefault(min(PARTS - 1, int((one[0] - begin) / width)), []).append(one)
    return [tuple(statistics.fmean(column) for column in zip(*part, strict=True)) for _, part in sorted(parts.items())]  # type: ignore[misc]
