"""TLV lists."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.tlv import LIST_LIMIT_BYTES, Tlv, decode_tlvs, encode_padded_tlvs, encode_tlvs
from fuzz.oracles import check_memory, outcome

_TYPES = range(1, 9)
_UNKNOWN = 0xFE


def one_input(data: bytes) -> None:
    """The input is the list. A second reader finds the same in it."""
    expected = _entries(data)
    stage = ("tlv", "handshake")[len(data) % 2]
    try:
        values = decode_tlvs(data, stage) if len(data) % 2 else decode_tlvs(data)
    except RemoteProtocolError as error:
        assert expected is None and error.stage == stage
        return
    assert list(values.items()) == expected
    check_memory(values, len(data))
    written = encode_tlvs(values)
    assert written == b"".join(_written(*entry) for entry in expected)
    assert decode_tlvs(written) == values
    _check_limit(data, values)
    _check_padding(values, len(data))


def _entries(data: bytes) -> list[tuple[int, bytes]] | None:
    """The entries of known types, in their order; ``None`` for a list that is cut, too long, or has one twice."""
    if len(data) > 1_024:
        return None
    found: list[tuple[int, bytes]] = []
    rest = data
    while rest:
        if len(rest) < 3:
            return None
        kind, size = rest[0], rest[1] * 256 + rest[2]
        value, rest = rest[3 : 3 + size], rest[3 + size :]
        if len(value) < size:
            return None
        found.append((kind, value))
    known = [entry for entry in found if entry[0] in _TYPES]
    return known if len({kind for kind, _ in known}) == len(known) else None


def _written(kind: int, value: bytes) -> bytes:
    return bytes((kind, len(value) >> 8, len(value) & 255)) + value


def _check_limit(data: bytes, values: dict[Tlv, bytes]) -> None:
    """An unknown entry up to the limit changes nothing. One byte more, or less than its length says, is refused."""
    room = LIST_LIMIT_BYTES - len(data) - 3
    if room < 0:
        return
    full = data + _written(_UNKNOWN, bytes(room))
    assert len(full) == LIST_LIMIT_BYTES and decode_tlvs(full) == values
    wrong = (data + _written(_UNKNOWN, bytes(room + 1)), full[:-1], data + b"\xfe", data + b"\xfe\0")[len(data) % 4]
    assert outcome(lambda: decode_tlvs(wrong), RemoteProtocolError)[0] == "error"


def _check_padding(values: dict[Tlv, bytes], more: int) -> None:
    """A padded list has the requested length, the same content, and zeros; from 3 bytes of room on."""
    values = {kind: value for kind, value in values.items() if kind is not Tlv.PADDING}
    content = encode_tlvs(values)
    size = len(content) + 3
    assert outcome(lambda: encode_padded_tlvs(values, size - 1), ValueError)[0] == "error"
    for room in {0, more}:
        assert encode_padded_tlvs(values, size + room) == content + _written(Tlv.PADDING, bytes(room))


def seeds() -> Iterator[bytes]:
    """Each type, all of them, an unknown one, one twice, a cut one; lists as long as the limit, and longer."""
    for kind in Tlv:
        yield encode_tlvs({kind: b"0.1.0"})
    yield encode_tlvs({kind: bytes((kind,)) * 3 for kind in Tlv})
    yield b"\xfe\x00\x01x" + encode_tlvs({Tlv.VERSION: b"0.1.0"})
    yield encode_tlvs({Tlv.VERSION: b"0.1.0"}) * 2
    yield b"\x01\x00\x05abc"
    yield b"\xfe\x00\x01x" * 2 + encode_tlvs({Tlv.VERSION: b"", Tlv.REASON: bytes(300)})
    yield encode_tlvs({Tlv.REASON: bytes(LIST_LIMIT_BYTES - 3)})
    yield encode_tlvs({Tlv.REASON: bytes(LIST_LIMIT_BYTES - 2)})
    yield b"\x01"
    yield b"\x01\x00\x00\x09\x00"
