"""WebSocket frames (RFC 6455, section 5): their codes, their masks, and what a close frame says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

from dmsg.sansio.errors import WebSocketViolation

#: Longest payload of a control frame, in bytes, and the longest reason of a close in it.
CONTROL_BYTES: Final = 125
REASON_BYTES: Final = CONTROL_BYTES - 2
#: Length in bytes from which four table look-ups are at least as fast as one long integer.
LONG_BYTES: Final = 2048
#: A multiple of 4.
_PIECE_BYTES: Final = 16 * 1024

FIN: Final = 0x80
MASKED: Final = 0x80
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
OPCODES: Final = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))
_SIZE_16: Final = Struct("!BBH")
_SIZE_64: Final = Struct("!BBQ")
_XOR: Final = tuple(bytes(value ^ key for value in range(256)) for key in range(256))


class CloseCode(IntEnum):
    """Codes of close frames that we send or make up (RFC 6455, section 7.4). 4000 to 4999 are free for applications."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    #: Never sent: their close frame was empty.
    NO_STATUS = 1005
    INVALID_TEXT = 1007
    POLICY = 1008
    TOO_BIG = 1009


#: Codes below 3000 that a close frame may carry: those that are registered, and not only for local use.
_SENDABLE: Final = frozenset((1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013))


@dataclass(frozen=True, slots=True)
class Closed:
    """The other side closed, with ``code`` (``NO_STATUS`` if it gave none) and ``reason``, its own text."""

    code: int
    reason: str


def apply_mask(data: bytes | bytearray, mask: bytes) -> bytes:
    """``data`` XOR the repeated ``mask`` of 4 bytes: masks and unmasks."""
    size = len(data)
    if size < LONG_BYTES:
        key = int.from_bytes((mask * ((size >> 2) + 1))[:size], "little")
        return (int.from_bytes(data, "little") ^ key).to_bytes(size, "little")
    result = bytearray(data)
    mask_in_place(result, mask)
    return bytes(result)


def mask_in_place(data: bytearray, mask: bytes) -> None:
    """:func:`apply_mask` without a copy. It works in pieces, so that temporary memory stays small and in the CPU's cache."""
    tables = [_XOR[key] for key in mask]
    for start in range(0, len(data), _PIECE_BYTES):
        end = start + _PIECE_BYTES
        for at, table in enumerate(tables, start):
            data[at:end:4] = data[at:end:4].translate(table)


def frame_head(first: int, size: int, masked: int) -> bytes:
    """The bytes before the mask and the payload: ``first`` is FIN and the opcode, ``masked`` is ``MASKED`` or 0."""
    if size <= 125:
        return bytes((first, masked | size))
    if size <= 0xFFFF:
        return _SIZE_16.pack(first, masked | 126, size)
    return _SIZE_64.pack(first, masked | 127, size)


def close_payload(code: int, reason: str) -> bytes:
    """The payload of a close frame, with as much of ``reason`` as fits."""
    if code == CloseCode.NO_STATUS:
        return b""
    return code.to_bytes(2, "big") + reason.encode("utf-8")[:REASON_BYTES].decode("utf-8", "ignore").encode("utf-8")


def read_close(payload: bytes) -> Closed:
    """Code and reason in the payload of a close frame. Raises ``WebSocketViolation``."""
    if not payload:
        return Closed(CloseCode.NO_STATUS, "")
    code = int.from_bytes(payload[:2], "big")
    if len(payload) < 2 or not (code in _SENDABLE or 3000 <= code <= 4999):
        raise WebSocketViolation("close code")
    return Closed(code, read_text(payload[2:]))


def read_text(payload: bytes) -> str:
    """The text of a message. Raises ``WebSocketViolation``."""
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError:
        raise WebSocketViolation("not UTF-8", CloseCode.INVALID_TEXT) from None
