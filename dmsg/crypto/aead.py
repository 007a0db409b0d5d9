"""ChaCha20-Poly1305 for the hot loops: the library's own functions, with nothing in between.

A Python function around each would cost a tenth of the sealing itself, so the one thing that can go wrong is given a name
here instead of being translated: whoever opens catches :data:`DoesNotOpen` and raises what it means in that place.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

__all__ = ["Aead", "DoesNotOpen", "opener", "sealer"]

#: ``f(nonce of 12 bytes, data, associated data or None)``.
Aead = Callable[[bytes, bytes, bytes | None], bytes]

#: What an :func:`opener` raises for data that was not sealed with its key and nonce.
DoesNotOpen = InvalidTag


def sealer(key: bytes) -> Aead:
    """The function that seals with ``key`` (32 bytes): 16 bytes longer than what it is given."""
    return ChaCha20Poly1305(key).encrypt


def opener(key: bytes) -> Aead:
    """The function that opens what was sealed with ``key`` (32 bytes), or raises :data:`DoesNotOpen`."""
    return ChaCha20Poly1305(key).decrypt
