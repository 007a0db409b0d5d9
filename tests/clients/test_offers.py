"""The places of offers that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.clients.offers import Offers


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1)])
def test_no_places_are_no_listener(limits):
    with pytest.raises(ValueError):
        Offers(*limits)


def test_the_oldest_offer_loses_its_place():
    offers = Offers(3, 3)
    assert [offers.add(name, "alice") for name in "abc"] == [None] * 3
    offers.remove("a")
    assert offers.add("d", "bob") is None
    assert offers.add("e", "bob") == "b"
    assert offers.add("f", "bob") == "c"
    assert len(offers) == 3


def test_a_key_has_its_share():
    offers = Offers(10, 2)
    offers.add("a", "alice")
    offers.add("b", "alice")
    assert not offers.has_room("alice") and offers.has_room("bob")
    offers.remove("a")
    offers.remove("a")
    assert offers.has_room("alice")


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 2))),
)
def test_never_more_than_there_are_places(limit, share, steps):
    """Against a list of what should be there, oldest first."""
    offers, expected = Offers(limit, share), []
    for adds, offer, key in steps:
        known = [one for one, _ in expected]
        if not adds or offer in known:
            offers.remove(offer)
            expected = [pair for pair in expected if pair[0] != offer]
        elif offers.has_room(key):
            lost = offers.add(offer, key)
            assert lost == (expected.pop(0)[0] if len(known) == limit else None)
            expected.append((offer, key))
        assert len(offers) == len(expected) <= limit
        for number in range(3):
            held = sum(one == number for _, one in expected)
            assert offers.has_room(number) == (held < share)
