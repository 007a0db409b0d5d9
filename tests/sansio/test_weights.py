"""Weights against a Counter."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.weights import Weights


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-4, 6)), max_size=300))
def test_weights_are_a_counter_that_knows_its_largest(steps: list[tuple[int, int]]) -> None:
    weights, model = Weights[int](), Counter[int]()
    for key, weight in steps:
        if model[key] + weight < 0:
            with pytest.raises(ValueError, match="would weigh"):
                weights.add(key, weight)
        else:
            weights.add(key, weight)
            model[key] += weight
        model = +model
        assert weights.total == sum(model.values())
        assert len(weights) == len(model)
        assert all(weights[key] == model[key] for key in range(6))
        if model:
            assert model[weights.largest()] == max(model.values())
        else:
            with pytest.raises(KeyError):
                weights.largest()


def test_of_equals_the_one_that_has_weighed_so_for_longest_is_the_largest() -> None:
    weights = Weights[str]()
    for key in ("a", "b", "c"):
        weights.add(key, 2)
    assert weights.largest() == "a"
    weights.add("a", 1)
    weights.add("a", -1)
    assert weights.largest() == "b"
    weights.add("b", 0)
    assert weights.largest() == "b"


def test_weights_that_change_for_ever_keep_no_past() -> None:
    weights = Weights[int]()
    tracemalloc.start()
    try:
        for step in range(100_000):
            weights.add(step % 3, 1)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 64 * 1024
