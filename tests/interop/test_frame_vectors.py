"""Frames (:ref:`spec-frames`) against the vectors of the reference implementation."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core import wire
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import CloseReason, FrameType, encode_close, encode_frame, split_frames


def pattern(size: int) -> bytes:
    return bytes((i * 7 + 3) % 251 for i in range(size))


def keys(vectors: Any) -> dict[str, SecretKey]:
    return {pair["name"]: SecretKey(bytes.fromhex(pair["sk"])) for pair in vectors["keypairs"]}


def test_encoding(vectors: Any) -> None:
    alice, bob = (keys(vectors)[name].public_key.raw for name in ("alice", "bob"))
    ours = {
        "OK": encode_frame(FrameType.OK, 0),
        "REQUEST id=0x1234": encode_frame(FrameType.REQUEST, 0x1234, alice + bob),
        "CLOSE id=0x1234 reason=0": encode_close(0x1234, 0),
        "CLOSE id=0xffff reason=0xfe": encode_close(0xFFFF, 0xFE),
        "FWD id=0x1234 seq=0x0102 hello": encode_frame(FrameType.FWD, 0x1234, b"\x01\x02hello"),
        "FWD id=0 seq=0 max data 65508": encode_frame(FrameType.FWD, 0, b"\0\0" + pattern(65508)),
        "ACK id=0x4321 seq=0x0102": encode_frame(FrameType.ACK, 0x4321, b"\x01\x02"),
        "MakeFrame with a payload of 65535": encode_frame(FrameType.FWD, 2, pattern(65535)),
    }
    assert set(ours) == {case["name"] for case in vectors["frames"]["encode"]}
    for case in vectors["frames"]["encode"]:
        frame = ours[case["name"]]
        assert len(frame) == case["len"]
        if "hex" in case:
            assert frame.hex() == case["hex"]
        else:
            assert hashlib.sha256(frame).hexdigest() == case["sha256"]
            assert frame[:64].hex() == case["head64"]
            assert frame[-32:].hex() == case["tail32"]
        assert case["payload_len_field"] == case["payload_len_real"] == len(frame) - wire.HEADER_BYTES
        if case["len"] <= wire.RECORD_PLAINTEXT_LIMIT_BYTES:
            kind, transport_id, start, end = split_frames(frame)[0][0]
            assert (kind, transport_id, end - start) == (case["type"], case["id"], case["payload_len_real"])
        else:  # the reference makes frames of it that end the process they reach
            with pytest.raises(RemoteProtocolError, match="payload over the limit"):
                split_frames(frame)


def test_names_are_the_reference_s(vectors: Any) -> None:
    for case in vectors["frames"]["encode"]:
        assert case["go_string"].startswith(f"<type:{FrameType(case['type']).name}><id:{case['id']}>")


#: What ours makes of the streams of the vectors: frames as (type, id, payload), and the bytes that are left over.
DECODED: dict[str, tuple[list[tuple[int, int, bytes]], int]] = {
    "OK": ([(0, 0, b"")], 0),
    "OK with id and payload": ([(0, 5, b"ab")], 0),
    "unknown type 0xff": ([(0xFF, 1, b"")], 0),
    "header cut": ([], 4),
    "payload cut": ([], 7),
}


def test_decoding(vectors: Any) -> None:
    assert set(DECODED) == {case["name"] for case in vectors["frames"]["decode"]}
    for case in vectors["frames"]["decode"]:
        data = bytes.fromhex(case["hex"])
        frames, used = split_frames(data)
        expected, left = DECODED[case["name"]]
        assert [(kind, transport_id, data[start:end]) for kind, transport_id, start, end in frames] == expected
        assert len(data) - used == left
        # The reference reports one line for each frame and one for how the stream ended.
        assert len(case["go"]) == len(frames) + 1
        assert case["go"][-1] == ("error: unexpected EOF" if left else "error: EOF")


def test_two_keys_are_exactly_66_bytes(vectors: Any) -> None:
    pair = keys(vectors)
    alice, bob = pair["alice"].public_key.raw, pair["bob"].public_key.raw
    for case in vectors["frames"]["split_pks"]:
        connection = Connection(pair["bob"].public_key, RecordLayer(bytes(32), bytes(32)), now=0.0)
        payload = (alice + bob + b"\0")[: case["payload_len"]]
        ok_and_request = encode_frame(FrameType.OK, 0) + encode_frame(FrameType.REQUEST, 1, payload)
        connection.receive_data(RecordLayer(bytes(32), bytes(32)).seal(ok_and_request), 0.0)
        assert bool(connection.streams) == case["ok"]
        if not case["ok"]:
            [answer] = RecordLayer(bytes(32), bytes(32)).open(connection.data_to_send())
            assert answer == encode_close(1, CloseReason.MALFORMED)
