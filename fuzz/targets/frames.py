"""Frames in the plaintext of a connection."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import (
    EXTENDED_REQUEST_LIMIT_BYTES,
    FRAME_PAYLOAD_LIMIT_BYTES,
    FRAMES,
    HEADER_BYTES,
    REQUEST_BYTES,
    CloseReason,
    FrameType,
    answers_request,
    close_reason,
    encode_close,
    encode_frame,
    reason_name,
    split_frames,
)
from fuzz.oracles import check_memory

_LIMIT_BYTES = 65_510
_MORE_BYTES = 1_200
_LONGEST = bytes(_LIMIT_BYTES)

Frame = tuple[int, int, bytes]


def one_input(data: bytes) -> None:
    """The input is the plaintext, and then a REQUEST."""
    expected, rest, refused = _frames(data)
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        found, tail, gave_up = _split(pieces)
        assert gave_up == refused
        if len(pieces) > 1 or not refused:
            # Byte by byte, a frame over the limit is refused as soon as its header is complete.
            assert found == expected and tail == (rest[:HEADER_BYTES] if refused else rest)
    check_memory(expected, len(data))
    written = b"".join(encode_frame(*frame) for frame in expected)
    assert written + rest == data
    _check_limit(data[: len(data) - len(rest)], expected)
    for kind, transport_id, payload in expected[:4]:
        _check_close(kind, transport_id, payload)
    _check_answers(data)


def _frames(data: bytes) -> tuple[list[Frame], bytes, bool]:
    """All whole frames, the rest, and whether the rest announces too much."""
    found: list[Frame] = []
    while len(data) >= 5:
        size = data[3] * 256 + data[4]
        if size > _LIMIT_BYTES:
            return found, data, True
        if len(data) < 5 + size:
            break
        found.append((data[0], data[1] * 256 + data[2], data[5 : 5 + size]))
        data = data[5 + size :]
    return found, data, False


def _split(pieces: list[bytes]) -> tuple[list[Frame], bytes, bool]:
    """The frames that a reader of pieces finds, the rest it keeps, and whether it gave up."""
    found: list[Frame] = []
    tail = b""
    for piece in pieces:
        tail += piece
        try:
            frames, used = split_frames(tail)
        except RemoteProtocolError as error:
            assert error.stage == "frame"
            return found, tail, True
        found += [(kind, transport_id, tail[start:end]) for kind, transport_id, start, end in frames]
        tail = tail[used:]
        assert len(tail) < HEADER_BYTES + FRAME_PAYLOAD_LIMIT_BYTES
    return found, tail, False


def _check_limit(good: bytes, frames: list[Frame]) -> None:
    """After good frames, one of the greatest length is read; a longer one is refused as soon as its header is complete."""
    kind = len(good) % 256
    header = bytes((kind, 0, 7)) + _LIMIT_BYTES.to_bytes(2, "big")
    assert _split([good + header]) == (frames, header, False)
    over = header[:3] + (_LIMIT_BYTES + 1).to_bytes(2, "big")
    assert _split([good + over[:4]]) == (frames, over[:4], False)
    assert _split([good + over])[2]
    if len(good) % 8 == 0:  # the copies take long
        longest = good + encode_frame(kind, 7, _LONGEST)
        assert len(longest) == len(good) + 65_515
        assert _split([longest]) == ([*frames, (kind, 7, _LONGEST)], b"", False)
        assert _split([longest[:-1]])[0] == frames


def _check_close(kind: int, transport_id: int, payload: bytes) -> None:
    """A CLOSE has any number of bytes: the first is the reason, and 0 stands for none; an unknown one has a name, too."""
    reason = close_reason(payload)
    assert reason == int.from_bytes(payload[:1], "big")
    assert reason_name(reason) == (CloseReason(reason).name.lower() if reason <= 17 else "unknown")
    assert encode_close(transport_id, kind) == encode_frame(FrameType.CLOSE, transport_id, bytes((kind,)))


def _check_answers(data: bytes) -> None:
    """An ACCEPT repeats the 66 bytes, and has a message of up to 1,200 bytes exactly if the REQUEST had one."""
    keys = data[:66].ljust(66, b"\x02")
    message = data[66:][:_MORE_BYTES] or b"m"
    altered = bytearray(keys)
    altered[len(data) % 66] ^= 1
    for request, answered in ((keys, (66,)), (keys + message, (67, 66 + len(message), 66 + _MORE_BYTES))):
        for size in (0, 65, 66, 67, 66 + len(message), 66 + _MORE_BYTES, 67 + _MORE_BYTES):
            accept = (keys + message).ljust(size, b"\0")[:size]
            assert answers_request(accept, request) == (size in answered), (size, len(request))
            assert size < 66 or not answers_request(bytes(altered) + accept[66:], request)


def seeds() -> Iterator[bytes]:
    """Each frame alone, all in a row, headers at the limit and over it; the allowed values of each row of the table."""
    frames = [encode_frame(kind, 3, bytes(70)) for kind in FrameType] + [encode_close(2, 1), encode_frame(0, 0)]
    yield from frames
    yield b"".join(frames)
    yield b"\x0a\x00\x01\xff\xff"
    yield b"".join(frames) + b"\x0a\x00\x01\xff\xe7"
    yield b"".join(frames) + b"\x0a\x00\x01\xff\xe6"
    yield encode_close(2, 1) + b"\x0a\x00\x01\xff\xe7behind"
    yield b"".join(encode_frame(row.kind, 5, bytes(sum(size for _, size in row.fields))) for row in FRAMES)
    yield b"".join(encode_frame(FrameType.CLOSE, 5, bytes((reason,)) * 18) for reason in (0, 17, 18, 255))
    for size in (REQUEST_BYTES - 1, REQUEST_BYTES, REQUEST_BYTES + 1, EXTENDED_REQUEST_LIMIT_BYTES):
        yield bytes(size)
