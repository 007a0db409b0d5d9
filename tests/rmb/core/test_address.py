"""The address of a session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.errors import InvalidAddress
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope

from .conftest import DERIVED

CONNECTIONS = st.none() | st.text(st.characters(codec="utf-8"), max_size=30)


@pytest.mark.parametrize(("text", "twin", "connection"), DERIVED["address/table"]["cases"])
def test_texts(text, twin, connection):
    assert SessionAddress.parse(text) == (twin, connection)
    assert str(SessionAddress(twin, connection)) == text


@pytest.mark.parametrize("text", [*DERIVED["address/table"]["invalid"], "+1", " 1", "١", "0" * 11])
def test_what_is_no_address(text):
    with pytest.raises(InvalidAddress, match=DERIVED["address/table"]["error"]):
        SessionAddress.parse(text)


@pytest.mark.parametrize("text", ["1:" + "é" * 65, "1:\ud800"])
def test_what_is_no_connection(text):
    with pytest.raises(InvalidAddress):
        SessionAddress.parse(text)


@pytest.mark.parametrize("case", DERIVED["ids/session-id"]["cases"], ids=lambda case: case["text"])
def test_sessions(case):
    address = SessionAddress.parse(case["text"])
    assert address == (case["twin"], case["connection"])
    assert f"stream:{address}" == case["redis_key"]


@given(st.integers(0, 2**32 - 1), CONNECTIONS)
def test_addresses_go_through_texts_and_envelopes(twin, connection):
    address = SessionAddress(twin, connection)
    assert SessionAddress.parse(str(address)) == address
    envelope = Envelope()
    envelope.source.connection = "another"
    address.write_to(envelope.source)
    assert SessionAddress.of(envelope.source) == address


def test_a_missing_address_is_twin_0():
    assert SessionAddress.of(Envelope().source) == (0, None)
