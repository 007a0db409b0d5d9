"""A forecast of a short daily series, with an interval for its uncertainty. Pure; NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

#: Share of future days that shall lie within their interval.
COVERAGE: Final = 0.8
#: With less than a week, not even every weekday has been seen once.
LEVEL_DAYS: Final = 7
#: From three weeks on every weekday has been seen often enough to have a level of its own.
WEEKDAY_DAYS: Final = 21
#: Older days are left out: what a fleet did then is no guide to next week.
HISTORY_DAYS: Final = 56
#: Without enough history, the interval ends at this many times the busiest day.
GUESS_FACTOR: Final = 5.0
#: Highest correlation of the errors of neighbouring days that is taken into account.
_CORRELATION_LIMIT: Final = 0.7

#: Student's t, 90 % quantile (an interval of 80 %), for 1, 2, … 30 degrees of freedom.
_T90: Final = (
    *(3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372),
    *(1.363, 1.356, 1.350, 1.345, 1.341, 1.337, 1.333, 1.330, 1.328, 1.325),
    *(1.323, 1.321, 1.319, 1.318, 1.316, 1.315, 1.314, 1.313, 1.311, 1.310),
)
_Z90: Final = 1.2816


class Forecast(NamedTuple):
    """One day: the value expected, and the interval it lies in with probability ``COVERAGE``."""

    value: float
    low: float
    high: float


class Outlook(NamedTuple):
    """Forecasts in the order asked for, the days they are made from, and by which method."""

    days: list[Forecast]
    history_days: int
    method: str


def forecast(history: Sequence[float], steps: Sequence[int], seen: float = 0.0) -> Outlook:
    """The days ``steps`` days after the last of ``history`` (1 is the day after it), from one value a day, none left out.

    * ``weekday_trend``, from three weeks on: a straight line plus a level for each weekday, by least squares.
    * ``level``, from a week on: the mean; differences of weekdays and trends are part of the spread.
    * ``insufficient``: the mean, or ``seen`` if there is no whole day at all, and an interval from 0 to ``GUESS_FACTOR``
      times the busiest day.

    If every day has a value above zero, this is done in logarithms, because busy days also differ by more. Intervals are
    those of Student's t for a new day, wider for the uncertainty of line and levels, and wider still if the errors of
    neighbouring days are correlated. They hold as long as next week resembles the weeks before.
    """
    values = np.asarray(history[-HISTORY_DAYS:], dtype=float)
    count = len(values)
    if count < LEVEL_DAYS:
        value = float(values.mean()) if count else seen
        high = GUESS_FACTOR * max([seen, *values])
        return Outlook([Forecast(value, 0.0, high)] * len(steps), count, "insufficient")
    logarithms = bool((values > 0).all())
    y = np.log(values) if logarithms else values
    weekly = count >= WEEKDAY_DAYS
    past, future = (_design(np.asarray(days), count, weekly) for days in (range(count), [count - 1 + s for s in steps]))
    inverse = np.linalg.pinv(past.T @ past)
    weights = inverse @ past.T @ y
    errors = y - past @ weights
    freedom = count - past.shape[1]
    deviation = float(np.sqrt(errors @ errors / freedom))
    unknown = np.einsum("ij,jk,ik->i", future, inverse, future) * _inflation(errors)
    half = student_t90(freedom) * deviation * np.sqrt(1 + unknown)
    middle = future @ weights
    found = np.stack([middle, middle - half, middle + half], axis=1)
    found = np.exp(found) if logarithms else np.maximum(found, 0.0)
    return Outlook([Forecast(*map(float, row)) for row in found], count, "weekday_trend" if weekly else "level")


def _design(days: np.ndarray, count: int, weekly: bool) -> np.ndarray:
    """The columns of the model: the mean alone, or a line through the middle of the history and seven levels."""
    if not weekly:
        return np.ones((len(days), 1))
    line = (days - (count - 1) / 2) / count
    return np.column_stack([line, *[(days % 7 == weekday).astype(float) for weekday in range(7)]])


def _inflation(errors: np.ndarray) -> float:
    """Factor by which correlated errors tell less about line and levels than independent ones."""
    size = float(errors @ errors)
    if size == 0:
        return 1.0
    correlation = min(max(float(errors[1:] @ errors[:-1]) / size, 0.0), _CORRELATION_LIMIT)
    return (1 + correlation) / (1 - correlation)


def student_t90(freedom: int) -> float:
    """The 90 % quantile of Student's t: the table's, or its expansion for large degrees of freedom (error < 0.001)."""
    return _T90[freedom - 1] if freedom <= len(_T90) else _Z90 + (_Z90**3 + _Z90) / (4 * freedom)
