"""Frames of a link: their types, layouts and limits (:ref:`spec-messaging-frames`).

A frame has a type, a channel id and a payload. Two headers are known. The Go programs write the size first and count the
type byte in; the specification says type first. A relay tells them apart by the first frame of a link
(:func:`recognise_layout`). ``FRAMES`` is the frame table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dmsg.crypto.aead import TAG_BYTES
from dmsg.errors import LocalProtocolError, RemoteProtocolError

#: Header without the channel id, the same in both layouts.
HEADER_BYTES: Final = 3
KEY_BYTES: Final = 33
#: A Noise message of a channel: an ephemeral key and a tag.
NOISE_MESSAGE_BYTES: Final = KEY_BYTES + TAG_BYTES
#: The length in front of a ciphertext.
LENGTH_BYTES: Final = 2
#: Longest plaintext of one Send: what Go reads (65,517 bytes of body) less the channel id, the length and the tag.
PLAINTEXT_LIMIT_BYTES: Final = 65_498
#: Longest ciphertext of one Send, under the same limit.
CIPHERTEXT_LIMIT_BYTES: Final = PLAINTEXT_LIMIT_BYTES + TAG_BYTES

#: Type, channel id, where the payload begins and where it ends in what was read.
Frame = tuple[int, int, int, int]


class FrameType(IntEnum):
    """The type byte of a frame. Readers ignore types they do not know, as Go does."""

    OPEN_CHANNEL = 0
    CHANNEL_OPENED = 1
    CLOSE_CHANNEL = 2
    CHANNEL_CLOSED = 3
    SEND = 4


# plain ints for the hot loops: an IntEnum member costs an attribute look-up
OPEN_CHANNEL, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, SEND = (int(kind) for kind in FrameType)


@dataclass(frozen=True, slots=True)
class FrameFields:
    """One row of the frame table: what follows the channel id as (name, bytes; 0 = the rest), and what it means."""

    kind: FrameType
    fields: tuple[tuple[str, int], ...]
    meaning: str


FRAMES: Final = (
    # id ‖ key(33) ‖ noise message 1(49): to the relay with the callee's key, from the relay with the caller's
    FrameFields(
        FrameType.OPEN_CHANNEL,
        (("remote static", KEY_BYTES), ("noise message 1", NOISE_MESSAGE_BYTES)),
        "open a channel",
    ),
    # id ‖ noise message 2(49); from dialect v2 on: id ‖ the answering side's id(1) ‖ noise message 2(49)
    FrameFields(FrameType.CHANNEL_OPENED, (("noise message 2", NOISE_MESSAGE_BYTES),), "the channel is open"),
    # id
    FrameFields(FrameType.CLOSE_CHANNEL, (), "the sender will send nothing more; answered with ChannelClosed"),
    # id
    FrameFields(FrameType.CHANNEL_CLOSED, (), "the channel is over, or was never opened"),
    # id ‖ length(2) ‖ ciphertext
    FrameFields(FrameType.SEND, (("length", LENGTH_BYTES), ("ciphertext", 0)), "a piece of the stream"),
)

#: Payload of OpenChannel, and of ChannelOpened without and with an id of the answering side (see ``Dialect``).
OPEN_CHANNEL_BYTES: Final = KEY_BYTES + NOISE_MESSAGE_BYTES
CHANNEL_OPENED_BYTES: Final = NOISE_MESSAGE_BYTES


class Layout:
    """How a header is written. There are two of them: :data:`GO` and :data:`SEED`."""

    __slots__ = ("_header", "_send_header", "_size_first", "body_limit_bytes", "name")

    def __init__(self, name: str, *, size_first: bool, body_limit_bytes: int) -> None:
        self.name = name
        #: Longest body, including the channel id, that is written and read.
        self.body_limit_bytes = body_limit_bytes
        self._size_first = size_first  # and the type byte is counted in
        self._header = struct.Struct(">HBB" if size_first else ">BHB")
        self._send_header = struct.Struct(">HBBH" if size_first else ">BHBH")

    def __repr__(self) -> str:
        return f"<Layout {self.name}>"

    def encode(self, kind: int, channel_id: int, payload: bytes = b"") -> bytes:
        """One whole frame. Raises ``LocalProtocolError`` for a payload that the other side cannot read."""
        size = len(payload) + 1
        if size > self.body_limit_bytes:
            raise LocalProtocolError("the frame is over the limit")
        if self._size_first:
            return self._header.pack(size + 1, kind, channel_id) + payload
        return self._header.pack(kind, size, channel_id) + payload

    def send_header(self, channel_id: int, ciphertext_bytes: int) -> bytes:
        """The bytes before the ciphertext of a Send; at most ``CIPHERTEXT_LIMIT_BYTES`` of ciphertext follow."""
        size = ciphertext_bytes + LENGTH_BYTES + 1
        if self._size_first:
            return self._send_header.pack(size + 1, SEND, channel_id, ciphertext_bytes)
        return self._send_header.pack(SEND, size, channel_id, ciphertext_bytes)

    def split_frames(self, buffer: bytes) -> tuple[list[Frame], int, int]:
        """All whole frames in ``buffer``, how many bytes they take, and how many bytes are missing for the next one.

        Raises ``RemoteProtocolError`` as soon as a header announces too much, or no room for a channel id. The frames in
        front of it are lost, because the link is over.
        """
        frames: list[Frame] = []
        append = frames.append
        size_first, limit = self._size_first, self.body_limit_bytes
        position, total = 0, len(buffer)
        while True:
            start = position + HEADER_BYTES
            if start > total:
                return frames, position, start - total
            if size_first:
                size = (buffer[position] << 8 | buffer[position + 1]) - 1
                kind = buffer[position + 2]
            else:
                kind = buffer[position]
                size = buffer[position + 1] << 8 | buffer[position + 2]
            if size < 1:
                raise RemoteProtocolError("frame", "no channel id")
            if size > limit:
                raise RemoteProtocolError("frame", "payload over the limit")
            end = start + size
            if end > total:
                return frames, position, end - total
            append((kind, buffer[start], start + 1, end))
            position = end


#: size(2, big-endian, type byte included) ‖ type(1) ‖ body. Go reads bodies of up to 65,517 bytes.
GO: Final = Layout("go", size_first=True, body_limit_bytes=65_517)
#: type(1) ‖ size(2, big-endian) ‖ body.
SEED: Final = Layout("seed", size_first=False, body_limit_bytes=65_535)

_FIRST_HEADERS: Final = {
    layout.encode(kind, 0, bytes(size))[:HEADER_BYTES]: layout
    for layout in (GO, SEED)
    for kind, size in (
        (OPEN_CHANNEL, OPEN_CHANNEL_BYTES),
        (CHANNEL_OPENED, CHANNEL_OPENED_BYTES),
        (CHANNEL_OPENED, CHANNEL_OPENED_BYTES + 1),
        (CLOSE_CHANNEL, 0),
        (CHANNEL_CLOSED, 0),
    )
}


def recognise_layout(header: bytes) -> Layout:
    """The layout in which the first ``HEADER_BYTES`` of a link are written (:ref:`spec-messaging-layouts`).

    A client that dials begins with OpenChannel: ``00 54 00`` in Go's layout, ``00 00 53`` in the other. One that only
    answers begins with ChannelOpened, ChannelClosed or CloseChannel. Raises ``RemoteProtocolError`` for anything else.
    """
    layout = _FIRST_HEADERS.get(header)
    if layout is None:
        raise RemoteProtocolError("frame", "first frame not recognised")
    return layout


class FrameReader:
    """Splits the bytes of a link into frames. If ``layout`` is not given, the first frame decides it.

    Keeps one incomplete frame at most, and copies it once, however small the pieces are.
    """

    __slots__ = ("_missing", "_tail", "layout")

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout
        self._tail = bytearray()
        self._missing = HEADER_BYTES

    @property
    def held_bytes(self) -> int:
        """Received bytes of a frame that is not complete."""
        return len(self._tail)

    def read(self, data: bytes) -> tuple[bytes, list[Frame]]:
        """The bytes that the frames point into, and the frames that ``data`` completes. Raises ``RemoteProtocolError``."""
        if len(data) < self._missing:
            self._tail += data
            self._missing -= len(data)
            return b"", []
        if self._tail:
            data = b"".join((self._tail, data))
            self._tail.clear()
        if self.layout is None:
            self.layout = recognise_layout(data[:HEADER_BYTES])
        frames, used, self._missing = self._split(self.layout, data)
        if used < len(data):
            self._tail += data[used:]
        return data, frames

    def _split(self, layout: Layout, data: bytes) -> tuple[list[Frame], int, int]:
        return layout.split_frames(data)


#: The size of each frame that a relay may send to a client whose layout it does not know yet, by its header in each layout.
_EARLY: Final = {
    layout: {
        frame[:HEADER_BYTES]: len(frame)
        for frame in (
            layout.encode(OPEN_CHANNEL, 0, bytes(OPEN_CHANNEL_BYTES)),
            layout.encode(CLOSE_CHANNEL, 0),
            layout.encode(CHANNEL_CLOSED, 0),
        )
    }
    for layout in (GO, SEED)
}


class RelayFrameReader(FrameReader):
    """A client's reader of a link in ``layout``. The relay learns the layout from the client's first frame.

    Before that, the relay may send in the other layout: offers of channels, and that it takes them back. None of their headers
    begins a frame in ``layout`` that a relay sends (:ref:`spec-messaging-layouts`).
    """

    __slots__ = ("_other",)

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        #: The other layout; ``None`` once the relay has changed over.
        self._other: Layout | None = SEED if layout is GO else GO

    def _split(self, layout: Layout, data: bytes) -> tuple[list[Frame], int, int]:
        other = self._other
        if other is None:
            return layout.split_frames(data)
        at, total, sizes = 0, len(data), _EARLY[other]
        while (size := sizes.get(data[at : at + HEADER_BYTES])) is not None:
            if at + size > total:
                return other.split_frames(data)
            at += size
        if total - at >= HEADER_BYTES:
            self._other = None
        early, _, _ = other.split_frames(data[:at])
        frames, used, missing = layout.split_frames(data[at:])
        return early + [(kind, one, at + start, at + end) for kind, one, start, end in frames], at + used, missing
