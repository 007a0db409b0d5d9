"""What a soak decides by, and that it leaves nothing behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys

import pytest

from benchmarks.census import census
from benchmarks.processes import ROOT
from benchmarks.soak.fit import PARTS, fit
from benchmarks.soak.levels import FLOORS, Levels
from dmsg.mux.relay.switch import Switch
from dmsg.sansio.tally import Tally

_STOPPED_CHILD = """
import os, signal, sys
from benchmarks.processes import Child
child = Child("server")
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
sys.stdin.read()
"""


def noisy(
    slope_per_h: float, *, seed: int = 1, hours: float = 2.0, level: float = 60_000.0
) -> list[tuple[float, float]]:
    """A level with noise that lasts from one sample to the next, as memory has it."""
    chance, rest, points = random.Random(seed), 0.0, []
    for at_s in range(0, int(hours * 3600), 5):
        rest = 0.9 * rest + chance.gauss(0, 100)
        points.append((float(at_s), level + slope_per_h * at_s / 3600 + rest))
    return points


def test_a_line_is_found_exactly_where_there_is_one() -> None:
    line = fit([(float(at_s), 100 + at_s / 36) for at_s in range(0, 7200, 10)])
    assert line is not None
    assert line.slope_per_h == pytest.approx(100.0)
    assert line.error_per_h == pytest.approx(0.0, abs=1e-6)
    assert line.hours == pytest.approx(2.0, abs=0.01)
    assert fit([]) is None and fit([(0.0, 1.0)] * PARTS) is None


@pytest.mark.parametrize("seed", range(10))
def test_growth_of_two_bounds_is_told_from_noise(seed: int) -> None:
    bound_per_h = 600.0
    flat, grown = fit(noisy(0.0, seed=seed)), fit(noisy(2 * bound_per_h, seed=seed))
    assert flat is not None and flat.is_flat(bound_per_h)
    assert grown is not None and not grown.is_flat(bound_per_h)


def levels_with(points: list[tuple[float, float]], name: str) -> Levels:
    """Levels of one process with one level."""
    levels = Levels(lambda: 0.0)
    levels.watch("relay", 1)
    for at_s, value in points:
        levels.series[0].add(name, at_s, value)
    return levels


def test_the_warm_up_does_not_count_and_the_longest_life_does() -> None:
    steep = [(at_s, 60_000.0 + 50 * min(at_s, 900.0)) for at_s, _ in noisy(0.0)]
    levels = levels_with(steep, "rss")
    levels.watch("relay", 2)
    levels.series[1].add("rss", 10.0, 1.0)
    (early,) = levels.verdicts(warm_up_s=0.0)
    (late,) = levels.verdicts(warm_up_s=900.0)
    assert not early.flat and late.flat
    assert late.bound_per_h == pytest.approx(max(0.01 * late.fit.mean, FLOORS["rss"] / late.fit.hours))


def test_four_descriptors_more_in_two_hours_are_no_leak_and_ten_are() -> None:
    for number, flat in ((4, True), (10, False)):
        levels = levels_with([(at_s, 20 + number * at_s / 7200) for at_s, _ in noisy(0.0)], "descriptors")
        (verdict,) = levels.verdicts(warm_up_s=0.0)
        assert verdict.bound_per_h == pytest.approx(FLOORS["descriptors"] / verdict.fit.hours)
        assert verdict.flat is flat


def test_a_census_counts_what_is_reached_and_nothing_else() -> None:
    class Root:
        def __init__(self) -> None:
            self.tallies = [Tally[str]() for _ in range(3)]
            self.later = lambda: switch

    switch = Switch()
    root = Root()
    for number in range(5):
        root.tallies[0].add(f"key {number}")
    counted = census(root)
    assert counted["objects"]["Tally"] >= 3
    assert counted["tables"]["Tally._counts"] >= 5
    assert counted["objects"]["Switch"] == 1  # a callback that waits holds what it closes over
    assert "Switch" not in census(root.tallies)["objects"]


@pytest.mark.system
def test_a_stopped_child_dies_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPED_CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            ended, _, _ = select.select([child], [], [], 10)
            assert ended
        finally:
            os.close(child)
