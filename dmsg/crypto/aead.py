"""ChaCha20-Poly1305 with its nonces, and AES-GCM: the library's own functions, with nothing in between.

A Python function around each would cost a tenth of the sealing itself, so the one thing that can go wrong is given a name
here instead of being translated: the code that opens catches :data:`DoesNotOpen` and raises what it means there.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

KEY_BYTES: Final = 32
#: How much longer sealed data is than what it holds.
TAG_BYTES: Final = 16
#: Noise reserves the last value of the 64-bit counter.
NONCE_LIMIT: Final = 2**64 - 1

#: ``f(nonce of 12 bytes, data, associated data or None)``.
Aead = Callable[[bytes, bytes | memoryview, bytes | None], bytes]

#: ``nonce(counter)``: Noise's 12 bytes for a counter, four zeros and the counter as little-endian u64.
nonce: Final[Callable[[int], bytes]] = Struct("<4xQ").pack

#: What an :func:`opener` raises for data that was not sealed with its key and nonce.
DoesNotOpen = InvalidTag


def sealer(key: bytes) -> Aead:
    """The function that seals with ``key`` (32 bytes): ``TAG_BYTES`` longer than what it is given."""
    return ChaCha20Poly1305(key).encrypt


def opener(key: bytes) -> Aead:
    """The function that opens what was sealed with ``key`` (32 bytes), or raises :data:`DoesNotOpen`."""
    return ChaCha20Poly1305(key).decrypt


def pair(key: bytes) -> tuple[Aead, Aead]:
    """The :func:`sealer` and the :func:`opener` of one key."""
    cipher = ChaCha20Poly1305(key)
    return cipher.encrypt, cipher.decrypt


def gcm_pair(key: bytes) -> tuple[Aead, Aead]:
    """As :func:`pair`, of AES-GCM: with a ``key`` of 32 bytes, AES-256."""
    cipher = AESGCM(key)
    return cipher.encrypt, cipher.decrypt
