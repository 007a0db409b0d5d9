"""Frames: their types, layouts and limits (:ref:`spec-frames`).

``FRAMES`` is the frame table: tests hold every encoder against it and the protocol pages are generated from it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dmsg.errors import RemoteProtocolError

HEADER: Final = struct.Struct(">BHH")
HEADER_BYTES: Final = 5
#: Plaintext that fits one record: 65,535 less the 4-byte counter and the 16-byte tag.
RECORD_PLAINTEXT_LIMIT_BYTES: Final = 65_515
#: A longer frame would not fit one record and kills base clients that get it (:ref:`spec-frame-sizes`).
FRAME_PAYLOAD_LIMIT_BYTES: Final = RECORD_PLAINTEXT_LIMIT_BYTES - HEADER_BYTES
SEQUENCE_BYTES: Final = 2
#: Two keys: who asks, who is asked.
REQUEST_BYTES: Final = 66
#: Longest CLOSE payload that is forwarded: a reason, and the same reason sealed by the peer.
CLOSE_LIMIT_BYTES: Final = 1 + 1 + 16
#: Longest REQUEST or ACCEPT between extended parties (:ref:`spec-frame-sizes`).
EXTENDED_REQUEST_LIMIT_BYTES: Final = REQUEST_BYTES + 1_200


class FrameType(IntEnum):
    """First byte of a frame."""

    OK = 0x0
    REQUEST = 0x1
    ACCEPT = 0x2
    CLOSE = 0x3
    FWD = 0xA
    ACK = 0xB


# plain ints for the hot loops: an IntEnum member costs an attribute look-up
OK, REQUEST, ACCEPT, CLOSE, FWD, ACK = (int(kind) for kind in FrameType)


class CloseReason(IntEnum):
    """The byte a CLOSE carries (:ref:`spec-close-reasons`); base peers send 0 and ignore ours."""

    NORMAL = 0
    REFUSED = 1
    UNKNOWN_PEER = 2
    BUSY = 3
    RATE_LIMITED = 4
    SLOW_CONSUMER = 5
    ABUSE = 6
    BAD_ID = 7
    MALFORMED = 8
    DOWNGRADE = 9
    UNSUPPORTED = 10
    HANDSHAKE_TIMEOUT = 11
    INTEGRITY = 12
    PEER_GONE = 13
    SERVER_DRAINING = 14
    DEADLINE = 15
    ACCESS_DENIED = 16
    NO_SUCH_SERVICE = 17


_REASON_NAMES: Final = {int(reason): reason.name.lower() for reason in CloseReason}


def reason_name(code: int) -> str:
    """The name of a CLOSE code as logs and metrics carry it; unknown codes are ``unknown``."""
    return _REASON_NAMES.get(code, "unknown")


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """One row of the frame table: payload fields as (name, bytes; 0 = the rest), who sends it, what it means."""

    kind: FrameType
    fields: tuple[tuple[str, int], ...]
    sender: str
    meaning: str


FRAMES: Final = (
    FrameLayout(FrameType.OK, (), "server", "the connection is admitted; first frame, once, transport id 0"),
    FrameLayout(FrameType.REQUEST, (("initiating key", 33), ("responding key", 33)), "client", "open a transport"),
    FrameLayout(FrameType.ACCEPT, (("initiating key", 33), ("responding key", 33)), "client", "the transport is open"),
    FrameLayout(FrameType.CLOSE, (("reason", 1),), "client or server", "the transport is over"),
    FrameLayout(FrameType.FWD, (("sequence", 2), ("data", 0)), "client", "bytes of the stream"),
    FrameLayout(FrameType.ACK, (("sequence", 2),), "client", "the FWD of that sequence arrived"),
)


def encode_frame(kind: int, transport_id: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return HEADER.pack(kind, transport_id, len(payload)) + payload


def encode_close(transport_id: int, reason: int) -> bytes:
    """A CLOSE frame."""
    return HEADER.pack(CLOSE, transport_id, 1) + bytes((reason,))


def answers_request(payload: bytes, request: bytes) -> bool:
    """Whether an ACCEPT repeats the keys of a REQUEST, and carries a message if that did (:ref:`spec-carriers`)."""
    if payload[:REQUEST_BYTES] != request[:REQUEST_BYTES]:
        return False
    if len(request) == REQUEST_BYTES:
        return len(payload) == REQUEST_BYTES
    return REQUEST_BYTES < len(payload) <= EXTENDED_REQUEST_LIMIT_BYTES


def close_reason(payload: bytes) -> int:
    """The reason in a CLOSE payload: 0 when there is none (:ref:`spec-frame-sizes`)."""
    return payload[0] if payload else 0


def split_frames(buffer: bytes) -> tuple[list[tuple[int, int, int, int]], int]:
    """All whole frames in ``buffer`` as ``(type, transport id, payload start, end)``, and how many bytes they take.

    Raises ``RemoteProtocolError`` as soon as a header announces more than ``FRAME_PAYLOAD_LIMIT_BYTES``.
    """
    frames: list[tuple[int, int, int, int]] = []
    append = frames.append
    unpack_from = HEADER.unpack_from
    position = 0
    total = len(buffer)
    while total - position >= HEADER_BYTES:
        kind, transport_id, size = unpack_from(buffer, position)
        if size > FRAME_PAYLOAD_LIMIT_BYTES:
            raise RemoteProtocolError("frame", "payload over the limit")
        start = position + HEADER_BYTES
        end = start + size
        if end > total:
            break
        append((kind, transport_id, start, end))
        position = end
    return frames, position
