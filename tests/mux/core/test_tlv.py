"""TLV lists (:ref:`spec-tlv-lists`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.tlv import LIST_LIMIT_BYTES, Tlv, decode_tlvs, encode_tlvs


@given(st.dictionaries(st.sampled_from(Tlv), st.binary(max_size=150)))
def test_round_trip(values: dict[Tlv, bytes]) -> None:
    data = encode_tlvs(values)
    assert decode_tlvs(data) == values
    assert list(decode_tlvs(data)) == list(values)


@given(st.binary(max_size=1100))
def test_any_bytes_are_a_list_or_a_protocol_error(data: bytes) -> None:
    try:
        found = decode_tlvs(data, "hop")
    except RemoteProtocolError as error:
        assert error.stage == "hop"
    else:
        assert all(value in data for value in found.values())


@given(st.dictionaries(st.sampled_from(Tlv), st.binary(max_size=20), min_size=1), st.data())
def test_every_cut_is_noticed(values: dict[Tlv, bytes], data: st.DataObject) -> None:
    whole = encode_tlvs(values)
    borders, position = {0}, 0
    for value in values.values():
        position += 3 + len(value)
        borders.add(position)
    cut = data.draw(st.integers(0, len(whole)))
    if cut in borders:
        assert len(decode_tlvs(whole[:cut])) == sorted(borders).index(cut)
    else:
        with pytest.raises(RemoteProtocolError, match="cut"):
            decode_tlvs(whole[:cut])


def test_layout() -> None:
    assert encode_tlvs({Tlv.VERSION: b"0.1.0", Tlv.SERVICE: b""}).hex() == "010005" + b"0.1.0".hex() + "020000"


def test_unknown_types_are_skipped_even_twice() -> None:
    assert decode_tlvs(b"\x09\0\x01x\x01\0\x01v\x09\0\0\x00\0\0") == {Tlv.VERSION: b"v"}


def test_a_known_type_twice_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode_tlvs(b"\x01\0\0\x01\0\0")


def test_the_longest_list_and_one_byte_more() -> None:
    longest = encode_tlvs({Tlv.REASON: bytes(LIST_LIMIT_BYTES - 3)})
    assert len(longest) == LIST_LIMIT_BYTES
    assert decode_tlvs(longest) == {Tlv.REASON: bytes(LIST_LIMIT_BYTES - 3)}
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        decode_tlvs(encode_tlvs({Tlv.REASON: bytes(LIST_LIMIT_BYTES - 2)}))


@pytest.mark.parametrize("data", [b"\x01", b"\x01\0", b"\x01\0\x01", b"\x01\xff\xff", b"\xff\0\x02a"])
def test_cut_lists(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cut"):
        decode_tlvs(data)
