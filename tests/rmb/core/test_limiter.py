"""How much a twin may send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.errors import InvalidLimit
from dmsg.rmb.core.limiter import FixedWindow, Limit, parse_limit

from .conftest import DERIVED


@pytest.mark.parametrize("case", DERIVED["limiter/fixed-window"]["cases"], ids=lambda case: case["note"])
def test_windows(case):
    window = FixedWindow(Limit(case["count"], case["size"]), case["window"])
    assert [window.admit(size, now) for now, size in case["sequence"]] == case["expect"]


def test_a_clock_that_is_set_back_begins_a_window():
    window = FixedWindow(Limit(1, 100))
    assert [window.admit(1, now) for now in (3600.0, 3601.0, 30.0, 31.0)] == [True, False, True, False]


@given(st.integers(0, 20), st.integers(0, 99), st.lists(st.tuples(st.floats(0, 300), st.integers(0, 50))))
def test_no_window_lets_more_through_than_its_limit(count, size, sent):
    window = FixedWindow(Limit(count, size))
    passed: dict[int, list[int]] = {}
    for at, number in sorted(sent):
        if window.admit(number, at):
            passed.setdefault(int(at // 60), []).append(number)
    assert all(len(sizes) <= count and sum(sizes) <= size for sizes in passed.values())


@pytest.mark.parametrize("text", ["5,1000", "5 1000", " 5 , 1000 ", "5\t1000"])
def test_limits_are_written_in_two_ways(text):
    assert parse_limit(text) == Limit(5, 1000)


@pytest.mark.parametrize("text", ["", "5", "5,", "5,1000,1", "-5,1000", "5;1000", "5,x", "٥,1000", "51000" * 9 + ",1"])
def test_what_is_no_limit(text):
    with pytest.raises(InvalidLimit):
        parse_limit(text)
