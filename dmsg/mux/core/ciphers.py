"""Which cipher two sides use: AES-256-GCM where both can do it in hardware (:ref:`spec-ciphers`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmsg.crypto.aead import Cipher
from dmsg.mux.core.tlv import Tlv

_AES: Final = 1
#: The value of TLV ``ciphers`` of a side that has AES-256-GCM. Every side has ChaCha20-Poly1305, which is not listed.
CIPHERS: Final = bytes((_AES,))


def offers_aes(values: Mapping[Tlv, bytes]) -> bool:
    """Whether the sender of a list offers AES-256-GCM."""
    return _AES in values.get(Tlv.CIPHERS, b"")


def agreed(*, ours: bool, theirs: bool) -> Cipher:
    """The cipher of both sides; the arguments say which of them can do AES-256-GCM."""
    return Cipher.AES if ours and theirs else Cipher.CHACHA
