"""TLV lists: ``type u8 ‖ length u16 ‖ value`` (:ref:`spec-tlv-lists`). Unknown types are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from dmsg.errors import RemoteProtocolError

LIST_LIMIT_BYTES: Final = 1_024
_HEADER_BYTES: Final = 3


class Tlv(IntEnum):
    """The types that mean something to us."""

    VERSION = 1
    SERVICE = 2
    LIMITS = 3
    RESUME = 4
    REASON = 5
    PADDING = 6
    WINDOW = 7
    CIPHERS = 8


_KNOWN: Final = {int(kind): kind for kind in Tlv}  # calling Tlv takes longer


def encode_tlvs(values: Mapping[Tlv, bytes]) -> bytes:
    """The list, in the order given. The caller keeps it within ``LIST_LIMIT_BYTES``."""
    return b"".join(bytes((kind,)) + len(value).to_bytes(2, "big") + value for kind, value in values.items())


def encode_padded_tlvs(values: Mapping[Tlv, bytes], size_bytes: int) -> bytes:
    """The list with a last entry of zeros that makes it exactly ``size_bytes`` long (:ref:`spec-padding`).

    Raises ``ValueError`` when there is no room for that entry.
    """
    content = encode_tlvs(values)
    missing = size_bytes - len(content) - _HEADER_BYTES
    if missing < 0:
        raise ValueError(f"the list does not fit {size_bytes} bytes")
    return content + encode_tlvs({Tlv.PADDING: bytes(missing)})


def decode_tlvs(data: bytes, stage: str = "tlv") -> dict[Tlv, bytes]:
    """The known entries of a list; raises ``RemoteProtocolError`` when it is cut, too long, or names one type twice."""
    if len(data) > LIST_LIMIT_BYTES:
        raise RemoteProtocolError(stage, "TLV list over the limit")
    found: dict[Tlv, bytes] = {}
    position = 0
    while position < len(data):
        start = position + _HEADER_BYTES
        end = start + int.from_bytes(data[position + 1 : start], "big")
        if start > len(data) or end > len(data):
            raise RemoteProtocolError(stage, "TLV list is cut")
        kind = _KNOWN.get(data[position])
        if kind is not None:
            if kind in found:
                raise RemoteProtocolError(stage, "TLV given twice")
            found[kind] = data[start:end]
        position = end
    return found
