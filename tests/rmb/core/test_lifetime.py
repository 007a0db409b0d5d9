"""When envelopes end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.lifetime import remaining, stamp
from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TTL_S

from .conftest import DERIVED

U64 = st.integers(0, 2**64 - 1)
NOW = st.integers(0, 2**40)


@pytest.mark.parametrize(("given_", "expected"), DERIVED["stamp/table"]["cases"])
def test_stamping_keeps_the_end(given_, expected):
    assert stamp(*given_) == tuple(expected)


@pytest.mark.parametrize(("given_", "expected"), DERIVED["ttl/table"]["cases"])
def test_what_remains(given_, expected):
    assert remaining(*given_) == expected


@given(NOW, st.integers(1, 2**40), st.integers(0, MAX_TTL_S))
def test_a_stamp_does_not_prolong(now, timestamp, expiration):
    before = remaining(now, timestamp, expiration) if timestamp <= now else expiration or None
    assert remaining(now, *stamp(now, timestamp, expiration)) == before


@given(NOW, U64, U64, st.integers(0, 60))
def test_no_numbers_give_more_life_than_there_is(now, timestamp, expiration, late_s):
    left = remaining(now, timestamp, expiration, late_s=late_s)
    assert left is None or 0 < left <= MAX_TTL_S + MAX_AHEAD_S + late_s


def test_clocks_may_differ():
    assert remaining(1_000, 1_000 + MAX_AHEAD_S, 10) == 10 + MAX_AHEAD_S
    assert remaining(1_000, 1_001 + MAX_AHEAD_S, 10) is None
    assert remaining(1_009.9, 1_000, 5) is None
    assert remaining(1_009.9, 1_000, 5, late_s=10) == 6
