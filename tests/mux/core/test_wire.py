"""Frames: layouts, codes, and taking a stream of bytes apart (:ref:`spec-frames`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core import wire
from dmsg.mux.core.errors import CLOSE_ERRORS, TransportClosed, close_error
from dmsg.mux.core.wire import (
    FRAME_PAYLOAD_LIMIT_BYTES,
    FRAMES,
    CloseReason,
    FrameType,
    close_reason,
    encode_close,
    encode_frame,
    reason_name,
    split_frames,
)
from dmsg.testing.strategies import cuts, hostile_bytes

KEY_A, KEY_B = b"\x02" + bytes(32), b"\x03" + bytes(32)

GOLDEN = {
    FrameType.OK: (encode_frame(FrameType.OK, 0), "00 0000 0000"),
    FrameType.REQUEST: (
        encode_frame(FrameType.REQUEST, 0x1234, KEY_A + KEY_B),
        "01 1234 0042" + KEY_A.hex() + KEY_B.hex(),
    ),
    FrameType.ACCEPT: (
        encode_frame(FrameType.ACCEPT, 0x1235, KEY_A + KEY_B),
        "02 1235 0042" + KEY_A.hex() + KEY_B.hex(),
    ),
    FrameType.CLOSE: (encode_close(0xFFFE, CloseReason.PEER_GONE), "03 fffe 0001 0d"),
    FrameType.FWD: (encode_frame(FrameType.FWD, 2, b"\x01\x02data"), "0a 0002 0006 0102 64617461"),
    FrameType.ACK: (encode_frame(FrameType.ACK, 3, b"\xff\xff"), "0b 0003 0002 ffff"),
}

Frame = tuple[int, int, bytes]
frames = st.tuples(st.integers(0, 255), st.integers(0, 0xFFFF), st.binary(max_size=40))


def split(data: bytes) -> tuple[list[Frame], int]:
    found, used = split_frames(data)
    return [(kind, transport_id, data[start:end]) for kind, transport_id, start, end in found], used


@pytest.mark.parametrize("kind", FrameType)
def test_golden_bytes(kind: FrameType) -> None:
    frame, expected = GOLDEN[kind]
    assert frame == bytes.fromhex(expected)


@pytest.mark.parametrize("layout", FRAMES, ids=lambda layout: layout.kind.name)
def test_the_frame_table_describes_the_golden_bytes(layout: wire.FrameLayout) -> None:
    frame = GOLDEN[layout.kind][0]
    fixed = sum(size for _, size in layout.fields)
    open_ended = any(size == 0 for _, size in layout.fields)
    assert len(frame) - wire.HEADER_BYTES >= fixed if open_ended else len(frame) - wire.HEADER_BYTES == fixed
    assert layout.sender and layout.meaning


def test_the_frame_table_is_complete() -> None:
    assert [layout.kind for layout in FRAMES] == list(FrameType)
    plain = (wire.OK, wire.REQUEST, wire.ACCEPT, wire.CLOSE, wire.FWD, wire.ACK)
    assert plain == tuple(FrameType)
    assert all(type(kind) is int for kind in plain)


def test_limits_fit_one_record() -> None:
    assert FRAME_PAYLOAD_LIMIT_BYTES == 65_510
    assert wire.FRAME_PAYLOAD_LIMIT_BYTES - wire.SEQUENCE_BYTES == 65_508
    assert len(encode_frame(FrameType.FWD, 0, bytes(FRAME_PAYLOAD_LIMIT_BYTES))) == wire.RECORD_PLAINTEXT_LIMIT_BYTES
    assert wire.EXTENDED_REQUEST_LIMIT_BYTES == 1_266


@given(st.lists(frames, max_size=8))
def test_round_trip(wanted: list[Frame]) -> None:
    data = b"".join(encode_frame(*frame) for frame in wanted)
    assert split(data) == (wanted, len(data))


@given(st.lists(frames, max_size=5), st.binary(max_size=4), st.data())
def test_in_any_pieces_is_the_same_as_whole(wanted: list[Frame], rest: bytes, draw: st.DataObject) -> None:
    data = b"".join(encode_frame(*frame) for frame in wanted) + rest
    buffer, found = b"", []
    for piece in draw.draw(cuts(data)):
        buffer += piece
        more, used = split(buffer)
        found += more
        buffer = buffer[used:]
    assert found == wanted
    assert buffer == rest
    assert split(data) == (wanted, len(data) - len(rest))


@given(hostile_bytes(400))
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes) -> None:
    try:
        found, used = split_frames(data)
    except RemoteProtocolError as error:
        assert error.stage == "frame"
        return
    position = 0
    for _, _, start, end in found:
        assert start == position + wire.HEADER_BYTES
        assert start <= end <= len(data)
        position = end
    assert used == position
    left = data[used:]
    assert len(left) < wire.HEADER_BYTES or len(left) < wire.HEADER_BYTES + int.from_bytes(left[3:5], "big")


@pytest.mark.parametrize("size", [FRAME_PAYLOAD_LIMIT_BYTES + 1, 65_514, 0xFFFF])
def test_a_header_that_announces_too_much_is_refused_at_once(size: int) -> None:
    header = bytes((FrameType.FWD, 0, 0)) + size.to_bytes(2, "big")
    for data in (header, encode_frame(FrameType.OK, 0) + header):
        with pytest.raises(RemoteProtocolError, match="payload over the limit"):
            split_frames(data)
    assert split_frames(header[:4]) == ([], 0)


def test_the_longest_frame_passes() -> None:
    data = encode_frame(FrameType.FWD, 9, bytes(FRAME_PAYLOAD_LIMIT_BYTES))
    assert split(data) == ([(FrameType.FWD, 9, bytes(FRAME_PAYLOAD_LIMIT_BYTES))], len(data))
    assert split(data[:-1]) == ([], 0)


def test_close_reasons_have_one_exception_each() -> None:
    assert set(CLOSE_ERRORS) == set(CloseReason) - {CloseReason.NORMAL}
    for reason in CloseReason:
        assert reason_name(reason) == reason.name.lower()
        error = close_error(reason)
        assert error.code == reason
        assert error.name == reason.name.lower()


@pytest.mark.parametrize("code", [18, 99, 255])
def test_codes_we_do_not_know(code: int) -> None:
    assert reason_name(code) == "unknown"
    error = close_error(code, by="local")
    assert type(error) is TransportClosed
    assert str(code) in str(error)
    assert error.by == "local"


def test_close_may_carry_no_reason_or_several() -> None:
    assert close_reason(b"") == 0
    assert close_reason(b"\x05\x06") == 5
