"""Random numbers from random bytes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.jitter import Jitter


@given(st.binary(min_size=4, max_size=4))
def test_a_float_is_in_its_range(data: bytes) -> None:
    assert 0.0 <= Jitter(lambda _: data).random() < 1.0


@given(st.integers(1, 1 << 40), st.binary(min_size=8, max_size=8))
def test_an_integer_is_in_its_range(stop: int, data: bytes) -> None:
    assert 0 <= Jitter(lambda _: data).randrange(stop) < stop


@given(st.integers(0, 2**64), st.integers(0, 60), st.data())
def test_a_sample_has_different_elements(seed: int, size: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, size))
    drawn = Jitter(Random(seed).randbytes).sample(range(size), k)
    assert len(drawn) == len(set(drawn)) == k
    assert set(drawn) <= set(range(size))


def test_every_order_is_as_likely() -> None:
    numbers = Jitter(Random(1).randbytes)
    orders = Counter(tuple(numbers.sample("abcd", 3)) for _ in range(24_000))
    assert len(orders) == 24
    assert all(850 < count < 1150 for count in orders.values()), orders


@pytest.mark.parametrize("k", [-1, 4])
def test_there_is_no_sample_of_more_than_there_are(k: int) -> None:
    with pytest.raises(ValueError, match="of 3 elements"):
        Jitter(bytes).sample("abc", k)
