"""Plans the file of every line, and the flaws of some lines, for the whole landing zone at once.

The numbers are exact: lines in the zone = good lines + copies of them + corrupt lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dmsg_logs.synthetic.fleet import DAY_S, HOUR_S, Bools, Ints
from dmsg_logs.synthetic.timeline import Timeline

#: A file is finished at this many lines, at the end of the day, and at this age: busy programs ship every 50 minutes,
#: quiet ones twice a day.
FILE_LINES: Final = 9_000
BUSY_S: Final = 3_000.0
QUIET_S: Final = 12 * HOUR_S
_BUSY_LINES: Final = 600
_HEAL_LINES: Final = 8
#: Draws for each copy before it fails for lack of different ones.
_DRAWS: Final = 10_000
_LATE_S: Final = 2 * DAY_S
_TRUNCATE_FROM_LINES: Final = 40

#: Flaws of a line that the writer wrote, and lines that no writer wrote.
REPLACED: Final = ("torn", "garbage", "wrong_type", "no_key", "bad_time")
INSERTED: Final = ("blank", "not_an_object", "no_key", "garbage")


@dataclass(frozen=True, slots=True)
class Shares:
    """Flaws as shares of all lines in the landing zone."""

    corrupt: float = 0.0
    duplicates: float = 0.0
    late: float = 0.0
    missing: float = 0.0
    newer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("corrupt", "duplicates", "late", "missing", "newer"):
            if not 0.0 <= getattr(self, name) <= 0.5:
                raise ValueError(f"{name} is a share from 0 to 0.5")


@dataclass(frozen=True, slots=True)
class Budget:
    """Flaws as numbers of lines."""

    total: int
    replaced: int
    inserted: int
    duplicates: int
    healed: int
    late: int
    missing: int
    newer: int

    @property
    def written(self) -> int:
        """Lines that runs of the fleet wrote."""
        return self.total - self.inserted - self.duplicates - self.healed + self.missing

    @property
    def corrupt(self) -> int:
        """Corrupt lines in the landing zone."""
        return self.replaced + self.inserted


def make_budget(total: int, shares: Shares) -> Budget:
    """Whole lines for ``shares`` of ``total``."""
    corrupt, duplicates = round(total * shares.corrupt), round(total * shares.duplicates)
    replaced = corrupt * 3 // 5
    # a few lines are corrupt where they landed first and whole where they were shipped again
    healed = min(replaced // 20, duplicates // (4 * _HEAL_LINES), 50)
    return Budget(
        total,
        replaced,
        corrupt - replaced,
        duplicates,
        healed,
        round(total * shares.late),
        round(total * shares.missing),
        round(total * shares.newer),
    )


@dataclass(slots=True)
class PlannedFile:
    """Lines ``first`` to ``last`` (exclusive) of the timeline, all of one run, in one file.

    ``copy`` marks a file that was shipped again: it leaves out lines that are corrupt in the first file, except
    ``healed``. ``kept`` is the number of lines left in a file that was cut (-1: not cut).
    """

    run: int
    number: int
    first: int
    last: int
    copy: bool = False
    late: bool = False
    kept: int = -1
    healed: tuple[int, ...] = ()
    inserted: list[tuple[int, int]] = field(default_factory=list)
    delay_s: float = 0.0

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class Plan:
    """Every file of the landing zone, and for each line of the timeline: the index of its flaw in ``REPLACED`` or -1,
    whether it has fields of a newer version, whether it was lost with the end of its file, whether a copy of it is whole.
    """

    files: list[PlannedFile]
    replaced: Ints
    newer: Bools
    lost: Bools
    healed: Bools

    @property
    def good(self) -> Bools:
        """Lines with one whole copy in the landing zone."""
        return (~self.lost & (self.replaced < 0)) | self.healed


def make_plan(timeline: Timeline, budget: Budget, updated: Bools, rng: np.random.Generator) -> Plan:
    """Files for all ``budget.written`` lines of ``timeline``, with their flaws.

    ``updated`` tells for each run whether its lines may be of a newer version.
    """
    files = _split(timeline)
    count = len(timeline)
    plan = Plan(
        files,
        np.full(count, -1, np.int64),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
    )
    whole = _cut_files(plan, budget.missing, rng)
    _make_late(plan, budget.late, rng)
    _corrupt(plan, timeline, budget, whole, rng)
    rows = np.flatnonzero(updated[timeline.run])
    plan.newer[rng.choice(rows, min(budget.newer, len(rows)), replace=False)] = True
    sources = [file for file in whole if not file.late]
    _ship_again(plan, budget, sources, rng)
    for file in plan.files:
        file.delay_s = float(rng.uniform(5, 60)) + (_LATE_S + float(rng.uniform(0, 2 * DAY_S)) if file.late else 0.0)
        if file.copy:
            file.delay_s += float(rng.uniform(60, 300))
    return plan


def _split(timeline: Timeline) -> list[PlannedFile]:
    files = []
    for run in range(len(timeline.first) - 1):
        first, end, number = int(timeline.first[run]), int(timeline.first[run + 1]), 0
        hours = (timeline.ts[end - 1] - timeline.ts[first]) / HOUR_S + 1.0 if end > first else 1.0
        age_s = BUSY_S if (end - first) / hours >= _BUSY_LINES else QUIET_S
        while first < end:
            ts = timeline.ts[first : min(end, first + FILE_LINES)]
            until = min((ts[0] // DAY_S + 1) * DAY_S, ts[0] + age_s)
            length = int(np.searchsorted(ts, until))
            files.append(PlannedFile(run, number, first, first + length))
            first, number = first + length, number + 1
    return files


def _cut_files(plan: Plan, missing: int, rng: np.random.Generator) -> list[PlannedFile]:
    """Cut off the ends of a few files; gives the whole files."""
    left = missing
    order = rng.permutation(len(plan.files))
    large = sorted(order.tolist(), key=lambda at: -min(len(plan.files[at]), FILE_LINES // 2))
    for at in large:
        file = plan.files[at]
        if not left:
            break
        gone = min(left, int(len(file) * 0.6))
        if len(file) < _TRUNCATE_FROM_LINES or gone < 1:
            continue
        file.kept = len(file) - gone
        plan.lost[file.first + file.kept : file.last] = True
        left -= gone
    if left:
        raise ValueError("there are not enough lines for so many missing ones")
    return [file for file in plan.files if file.kept < 0]


def _make_late(plan: Plan, lines: int, rng: np.random.Generator) -> None:
    """Make files with exactly ``lines`` lines in all arrive days late; the last file is split for that."""
    left = lines
    for at in rng.permutation(len(plan.files)).tolist():
        file = plan.files[at]
        if not left:
            return
        if file.kept >= 0 or len(file) < 2:
            continue
        if len(file) > left:
            plan.files.append(PlannedFile(file.run, file.number + 100_000, file.first + left, file.last))
            file.last = file.first + left
        file.late = True
        left -= len(file)


def _corrupt(
    plan: Plan, timeline: Timeline, budget: Budget, whole: list[PlannedFile], rng: np.random.Generator
) -> None:
    """Choose lines to spoil, never the first or last of a run, and places for lines that no writer wrote."""
    usable = np.zeros(len(timeline), np.bool_)
    for file in whole:
        usable[file.first : file.last] = True
    used = timeline.first[:-1][np.diff(timeline.first) > 0]
    usable[used] = False
    usable[timeline.first[1:][np.diff(timeline.first) > 0] - 1] = False
    rows = np.flatnonzero(usable)
    if len(rows) < budget.replaced or (budget.inserted and not whole):
        raise ValueError("there are not enough lines for so many corrupt ones")
    chosen = rng.choice(rows, budget.replaced, replace=False)
    plan.replaced[chosen] = rng.choice(len(REPLACED), budget.replaced, p=[0.55, 0.2, 0.15, 0.05, 0.05])
    weights = np.array([len(file) for file in whole], np.float64)
    none = np.zeros(0, np.int64)
    places = rng.choice(len(whole), budget.inserted, p=weights / weights.sum()) if budget.inserted else none
    for place, form in zip(places, rng.integers(0, len(INSERTED), budget.inserted).tolist(), strict=True):
        file = whole[int(place)]
        file.inserted.append((int(rng.integers(0, len(file) + 1)), form))


def _ship_again(plan: Plan, budget: Budget, sources: list[PlannedFile], rng: np.random.Generator) -> None:
    """Copies with ``budget.duplicates`` lines that are good elsewhere, and ``budget.healed`` that are not."""
    left = budget.duplicates
    if not left:
        return
    if not sources:
        raise ValueError("there are not enough lines to copy")
    good = plan.replaced < 0
    total = np.concatenate([[0], np.cumsum(good)])
    left = _heal(plan, budget, sources, total, left, rng)
    shipped: set[tuple[int, int]] = set()
    draws = 0
    while left:
        draws += 1
        if draws > _DRAWS * (1 + len(shipped)):
            raise ValueError("there are not enough lines to copy")
        file = sources[int(rng.integers(0, len(sources)))]
        first, last = file.first, file.last
        if rng.random() < 0.5:  # a tail that overlaps, as after a crash
            first += int(rng.integers(0, max(1, len(file) // 2)))
        # no more good lines than are left
        last = min(last, int(np.searchsorted(total, total[first] + left)))
        copied = int(total[last] - total[first])
        span = int(total[first]), int(total[last])
        if copied and span not in shipped:  # a second copy of the same lines would be the same file
            shipped.add(span)
            plan.files.append(PlannedFile(file.run, file.number, first, last, copy=True))
            left -= copied


def _heal(
    plan: Plan, budget: Budget, sources: list[PlannedFile], total: Ints, left: int, rng: np.random.Generator
) -> int:
    """Ship some corrupt lines again, whole, with a few around them; gives the number of copies still to make."""
    spoiled = [
        (file, row)
        for file in sources
        for row in (np.flatnonzero(plan.replaced[file.first : file.last] >= 0) + file.first).tolist()
    ]
    if len(spoiled) < budget.healed:
        raise ValueError("there are not enough corrupt lines in files that can be shipped again")
    for at in rng.choice(len(spoiled), budget.healed, replace=False).tolist():
        file, row = spoiled[at]
        first, last = max(file.first, row - _HEAL_LINES), min(file.last, row + _HEAL_LINES)
        plan.files.append(PlannedFile(file.run, file.number, first, last, copy=True, healed=(row,)))
        plan.healed[row] = True
        left -= int(total[last] - total[first])
    return left
