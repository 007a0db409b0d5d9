"""Pauses after failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.backoff import Backoff


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_limit(failures: int, chance: float) -> None:
    backoff = Backoff(1.0, 60.0)
    pause = backoff.pause_s(failures, lambda: chance)
    assert 0.5 <= pause <= 60.0
    longest = min(60.0, 2.0 ** min(failures - 1, 10))
    assert longest / 2 <= pause <= longest
    assert backoff.pause_s(failures + 1, lambda: chance) >= pause


def test_pauses_double_from_the_first_to_the_limit() -> None:
    assert [Backoff(3.0, 60.0).longest_s(failures) for failures in range(1, 8)] == [3, 6, 12, 24, 48, 60, 60]


def test_a_limit_below_the_first_pause_holds() -> None:
    assert Backoff(3.0, 1.0).longest_s(1) == 1.0


@pytest.mark.parametrize(("chance", "pause_s"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_chance_spreads_them(chance: float, pause_s: float) -> None:
    assert Backoff(1.0, 1.0, least=0.8, spread=0.4).pause_s(9, lambda: chance) == pytest.approx(pause_s)
