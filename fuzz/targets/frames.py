"""Frames out of the plaintext of a connection."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import (
    FRAME_PAYLOAD_LIMIT_BYTES,
    HEADER_BYTES,
    FrameType,
    encode_close,
    encode_frame,
    split_frames,
)
from fuzz.oracles import check_memory


def one_input(data: bytes) -> None:
    """The input is the plaintext."""
    whole, whole_refused = _split([data])
    single, single_refused = _split([data[at : at + 1] for at in range(len(data))])
    assert single_refused == whole_refused
    assert whole == single[: len(whole)] and (whole_refused or len(whole) == len(single))
    written = b"".join(encode_frame(kind, transport_id, payload) for kind, transport_id, payload in single)
    assert data.startswith(written)
    check_memory(whole, len(data))


def _split(pieces: list[bytes]) -> tuple[list[tuple[int, int, bytes]], bool]:
    """The frames, as a reader of pieces finds them, and whether it gave up."""
    found: list[tuple[int, int, bytes]] = []
    tail = b""
    for piece in pieces:
        tail += piece
        try:
            frames, used = split_frames(tail)
        except RemoteProtocolError:
            return found, True
        found += [(kind, transport_id, tail[start:end]) for kind, transport_id, start, end in frames]
        tail = tail[used:]
        assert len(tail) < HEADER_BYTES + FRAME_PAYLOAD_LIMIT_BYTES
    return found, False


def seeds() -> Iterator[bytes]:
    """Each frame alone, all in a row, and a header over the limit."""
    frames = [encode_frame(kind, 3, bytes(70)) for kind in FrameType] + [encode_close(2, 1), encode_frame(0, 0)]
    yield from frames
    yield b"".join(frames)
    yield b"\x0a\x00\x01\xff\xff"
