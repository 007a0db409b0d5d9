"""Frames of a messaging link, in both layouts and before the layout is known."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.wire import GO, HEADER_BYTES, OPEN_CHANNEL, SEED, SEND, FrameReader, FrameType
from fuzz.oracles import check_memory

_LAYOUTS = (None, GO, SEED)


def one_input(data: bytes) -> None:
    """The first byte picks a layout; the rest is what was read."""
    layout = _LAYOUTS[data[0] % 3] if data else None
    data = data[1:]
    single = FrameReader(layout)
    found, refused = _read(single, [data[at : at + 1] for at in range(len(data))])
    whole, whole_refused = _read(FrameReader(layout), [data])
    assert refused == whole_refused
    assert refused or whole == found
    if single.layout is not None:
        written = b"".join(single.layout.encode(*frame) for frame in found)
        assert data.startswith(written)
        assert refused or len(single._tail) == len(data) - len(written)
    check_memory(whole, len(data))


def _read(reader: FrameReader, pieces: list[bytes]) -> tuple[list[tuple[int, int, bytes]], bool]:
    """The frames, and whether the reader gave up."""
    found: list[tuple[int, int, bytes]] = []
    for piece in pieces:
        try:
            data, frames = reader.read(piece)
        except RemoteProtocolError:
            return found, True
        found += [(kind, channel_id, data[start:end]) for kind, channel_id, start, end in frames]
    return found, False


def seeds() -> Iterator[bytes]:
    """All frames in a row, in each layout; headers that announce too much or too little."""
    for number, layout in enumerate(_LAYOUTS):
        written = layout or GO
        first = written.encode(OPEN_CHANNEL, 0, bytes(82))
        yield bytes((number,)) + first + b"".join(written.encode(kind, 3, bytes(7)) for kind in FrameType)
        yield bytes((number,)) + first + written.encode(SEND, 1, bytes(40))[:-1]
        for header in (b"\0\0\0", b"\0\x01\x04", b"\xff\xff\x04", b"\x04\0\0", b"\x04\xff\xff", b"\0\x53\0"):
            yield bytes((number,)) + header + bytes(HEADER_BYTES)
