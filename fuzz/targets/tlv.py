"""TLV lists."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.tlv import LIST_LIMIT_BYTES, Tlv, decode_tlvs, encode_tlvs
from fuzz.oracles import check_memory, outcome


def one_input(data: bytes) -> None:
    """The input is the list."""
    kind, values = outcome(lambda: decode_tlvs(data), RemoteProtocolError)
    if kind == "error":
        return
    assert len(data) <= LIST_LIMIT_BYTES
    assert decode_tlvs(encode_tlvs(values)) == values
    assert sum(map(len, values.values())) <= len(data)
    check_memory(values, len(data))


def seeds() -> Iterator[bytes]:
    """Each type, all of them, an unknown one, one twice, a cut one."""
    for kind in Tlv:
        yield encode_tlvs({kind: b"0.1.0"})
    yield encode_tlvs({kind: bytes((kind,)) * 3 for kind in Tlv})
    yield b"\xfe\x00\x01x" + encode_tlvs({Tlv.VERSION: b"0.1.0"})
    yield encode_tlvs({Tlv.VERSION: b"0.1.0"}) * 2
    yield b"\x01\x00\x05abc"
