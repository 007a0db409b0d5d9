"""Which relay first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.limits import RANKED_FAILURES, RANKED_RELAYS
from dmsg.rmb.core.ranker import Ranker

from .conftest import DERIVED


@pytest.mark.parametrize("case", DERIVED["ranker/order"]["cases"])
def test_recorded_orders(case):
    ranker = Ranker(Random(1), case.get("window_s", 3600))
    for relay in case.get("downvotes", ()):
        ranker.failed(relay, 0.0)
    for age_s in sorted(case.get("failures_age_s", ()), reverse=True):
        ranker.failed("relay", -age_s)
    order = ranker.order(case.get("input", ()), 0.0)
    assert order == case.get("expect", order)
    assert not order or order[-1] == case.get("expect_last", order[-1])
    assert ranker.rate("relay", 0.0) == case.get("expect_rate", 0.0)


def test_a_relay_heals():
    ranker = Ranker(Random(1), 60)
    ranker.failed("a", 0.0)
    assert ranker.order(["a", "b"], 59.9) == ["b", "a"]
    assert ranker.rate("a", 60.0) == 0.0
    assert {tuple(ranker.order(["a", "b"], 60.0)) for _ in range(30)} == {("a", "b"), ("b", "a")}


def test_equal_relays_share_the_load():
    ranker = Ranker(Random(1))
    first = [ranker.order(["a", "b", "c"], 0.0)[0] for _ in range(300)]
    assert all(70 < first.count(relay) < 130 for relay in "abc")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 100)), max_size=30))
def test_each_relay_stands_in_the_order_once_and_rates_rise(failures):
    ranker = Ranker(Random(1), 50)
    for relay, at in sorted(failures, key=lambda one: one[1]):
        ranker.failed(relay, at)
    order = ranker.order("abcd", 100.0)
    rates = [ranker.rate(relay, 100.0) for relay in order]
    assert sorted(order) == list("abcd") and rates == sorted(rates)


def test_what_is_remembered_is_bounded():
    ranker = Ranker(Random(1))
    for number in range(RANKED_FAILURES + 10):
        ranker.failed("often", number / 1000)
    assert ranker.rate("often", 2.0) == RANKED_FAILURES
    for number in range(RANKED_RELAYS):
        ranker.failed(f"r{number}", 2.0)
    assert ranker.rate("often", 3.0) == 0.0
    assert ranker.rate("r0", 3.0) == 1.0
    ranker.failed("r0", 3.0)
    ranker.failed("one more", 3.0)
    assert (ranker.rate("r0", 3.0), ranker.rate("r1", 3.0)) == (2.0, 0.0), "those that failed last are remembered"
