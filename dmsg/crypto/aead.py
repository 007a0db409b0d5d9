"""ChaCha20-Poly1305 and AES-256-GCM with Noise's nonces: the library's own functions, with nothing in between.

A Python function around each would cost a tenth of the sealing itself, so the one thing that can go wrong is given a name
here instead of being translated: the code that opens catches :data:`DoesNotOpen` and raises what it means there.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

KEY_BYTES: Final = 32
#: How much longer sealed data is than what it holds.
TAG_BYTES: Final = 16
#: Noise reserves the last value of the 64-bit counter.
NONCE_LIMIT: Final = 2**64 - 1
#: So many messages of up to 64 KiB are sealed with one key of AES-256-GCM: 2^34 blocks. Who does not have the key tells them
#: from random bytes no better than by guessing but for 2^-59. As many as that are fewer than TLS 1.3 lets a key seal.
AES_MESSAGES: Final = 2**22

#: ``f(nonce of 12 bytes, data, associated data or None)``.
Aead = Callable[[bytes, bytes | memoryview, bytes | None], bytes]

#: ``nonce(counter)``: Noise's 12 bytes for a counter, four zeros and the counter as little-endian u64.
nonce: Final[Callable[[int], bytes]] = Struct("<4xQ").pack

#: What an :func:`opener` raises for data that was not sealed with its key and nonce.
DoesNotOpen = InvalidTag


#: Of Noise's REKEY, which no message has.
_REKEY_NONCE: Final = nonce(NONCE_LIMIT)
_ZEROS: Final = bytes(KEY_BYTES)


class Cipher(Enum):
    """What a key is for. Both have keys of ``KEY_BYTES``, tags of ``TAG_BYTES`` and nonces of 12 bytes."""

    CHACHA = ChaCha20Poly1305
    AES = AESGCM  # AES-256-GCM


def sealer(key: bytes) -> Aead:
    """What seals with ``key`` (32 bytes) of ChaCha20-Poly1305: ``TAG_BYTES`` longer than what it is given."""
    return ChaCha20Poly1305(key).encrypt


def opener(key: bytes) -> Aead:
    """What opens what was sealed with ``key`` (32 bytes) of ChaCha20-Poly1305, or raises :data:`DoesNotOpen`."""
    return ChaCha20Poly1305(key).decrypt


def pair(key: bytes, cipher: Cipher) -> tuple[Aead, Aead]:
    """The function that seals and the one that opens, of one ``key`` of ``cipher``."""
    made = cipher.value(key)
    return made.encrypt, made.decrypt


def next_key(seal: Aead) -> bytes:
    """The key behind the one that ``seal`` seals with: Noise's REKEY. It cannot be turned back."""
    return seal(_REKEY_NONCE, _ZEROS, b"")[:KEY_BYTES]
