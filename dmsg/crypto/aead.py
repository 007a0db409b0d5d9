"""ChaCha20-Poly1305 and AES-256-GCM with Noise's nonces: the library's own functions, without wrappers.

A Python function around each would cost a tenth of the sealing itself. So the library's only error is not translated but gets
a name here: code that opens catches :data:`DoesNotOpen` and raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

KEY_BYTES: Final = 32
#: Bytes by which sealed data is longer than its plaintext.
TAG_BYTES: Final = 16
#: Noise reserves the last value of the 64-bit counter.
NONCE_LIMIT: Final = 2**64 - 1
#: Messages of up to 64 KiB that one key of AES-256-GCM seals: 2^34 blocks. An observer without the key can tell them from
#: random bytes with an advantage of at most 2^-59. TLS 1.3 lets a key seal more.
AES_MESSAGES: Final = 2**22

#: ``f(nonce of 12 bytes, data, associated data or None)``.
Aead = Callable[[bytes, bytes | memoryview, bytes | None], bytes]

#: ``nonce(counter)``: Noise's 12 bytes for a counter, four zeros and the counter as little-endian u64.
nonce: Final[Callable[[int], bytes]] = Struct("<4xQ").pack

#: The error of an :func:`opener` for data that was not sealed with its key and nonce.
DoesNotOpen = InvalidTag


#: The nonce of Noise's REKEY, which no message uses.
_REKEY_NONCE: Final = nonce(NONCE_LIMIT)
_ZEROS: Final = bytes(KEY_BYTES)


class Cipher(Enum):
    """The cipher of a key. Both have keys of ``KEY_BYTES``, tags of ``TAG_BYTES`` and nonces of 12 bytes."""

    CHACHA = ChaCha20Poly1305
    AES = AESGCM  # AES-256-GCM


def sealer(key: bytes) -> Aead:
    """The function that seals with ``key`` (32 bytes) of ChaCha20-Poly1305; its result is ``TAG_BYTES`` longer."""
    return ChaCha20Poly1305(key).encrypt


def opener(key: bytes) -> Aead:
    """The function that opens data sealed with ``key`` (32 bytes) of ChaCha20-Poly1305, or raises :data:`DoesNotOpen`."""
    return ChaCha20Poly1305(key).decrypt


def pair(key: bytes, cipher: Cipher) -> tuple[Aead, Aead]:
    """The functions that seal and open with one ``key`` of ``cipher``."""
    made = cipher.value(key)
    return made.encrypt, made.decrypt


def next_key(seal: Aead) -> bytes:
    """The key after the one that ``seal`` uses: Noise's REKEY. The old key cannot be computed from the new one."""
    return seal(_REKEY_NONCE, _ZEROS, b"")[:KEY_BYTES]
