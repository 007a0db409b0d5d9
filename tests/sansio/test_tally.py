"""A tally against a Counter."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.tally import Tally


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=200))
def test_a_tally_is_a_counter_that_knows_its_largest(steps: list[tuple[bool, int]]) -> None:
    tally, model = Tally[int](), Counter[int]()
    for adds, key in steps:
        if adds:
            tally.add(key)
            model[key] += 1
        elif model[key]:
            tally.remove(key)
            model[key] -= 1
        else:
            with pytest.raises(KeyError):
                tally.remove(key)
        model = +model
        assert tally.most == max(model.values(), default=0)
        assert len(tally) == len(model)
        assert all(tally[key] == model[key] for key in range(6))
        if model:
            assert model[tally.largest()] == tally.most
    if not model:
        with pytest.raises(KeyError):
            tally.largest()


def test_of_equals_the_first_is_the_largest() -> None:
    tally = Tally[str]()
    for key in ("a", "b", "c", "b", "a"):
        tally.add(key)
    assert tally.largest() == "b"
    tally.remove("b")
    assert tally.largest() == "a"
