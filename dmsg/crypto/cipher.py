"""One direction of an end-to-end channel: ChaCha20-Poly1305 with Noise's implicit counter nonce.

:ref:`spec-sealed-frames`: no nonce is sent, so anything dropped, repeated, reordered, injected or altered fails to
open.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.crypto.aead import Aead
from dmsg.crypto.errors import CryptoError, NonceExhausted

BOX_OVERHEAD_BYTES: Final = 16
#: Noise reserves the last value of the 64-bit counter.
NONCE_LIMIT: Final = 2**64 - 1
_NONCE_HEAD: Final = bytes(4)
_KEY_BYTES: Final = 32
_ZEROS: Final = bytes(_KEY_BYTES)
_REKEY_NONCE: Final = _NONCE_HEAD + NONCE_LIMIT.to_bytes(8, "little")


class CipherState:
    """A key and the number of messages it has been used for."""

    __slots__ = ("_decrypt", "_encrypt", "nonce")

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        cipher = ChaCha20Poly1305(key)
        self._encrypt: Aead = cipher.encrypt
        self._decrypt: Aead = cipher.decrypt
        self.nonce = nonce

    def seal(self, associated: bytes, plaintext: bytes) -> bytes:
        """``plaintext`` sealed under the next nonce. Raises ``NonceExhausted`` before a nonce is used twice."""
        nonce = self.nonce
        if nonce >= NONCE_LIMIT:
            raise NonceExhausted("the nonces of this transport are used up")
        self.nonce = nonce + 1
        return self._encrypt(_NONCE_HEAD + nonce.to_bytes(8, "little"), plaintext, associated)

    def open(self, associated: bytes, sealed: bytes) -> bytes:
        """What was sealed under the next nonce. Raises ``CryptoError``; the channel is then dead."""
        nonce = self.nonce
        if nonce >= NONCE_LIMIT:
            raise NonceExhausted("the nonces of this transport are used up")
        try:
            plaintext = self._decrypt(_NONCE_HEAD + nonce.to_bytes(8, "little"), sealed, associated)
        except InvalidTag:
            raise CryptoError("a sealed frame does not open") from None
        self.nonce = nonce + 1
        return plaintext

    def rekey(self) -> None:
        """Go on with the next key: Noise's REKEY. It cannot be turned back; the counter goes on."""
        cipher = ChaCha20Poly1305(self._encrypt(_REKEY_NONCE, _ZEROS, b"")[:_KEY_BYTES])
        self._encrypt = cipher.encrypt
        self._decrypt = cipher.decrypt

    def erase(self) -> None:
        """Drop the key. ``seal`` and ``open`` raise ``NonceExhausted`` from now on."""
        self._encrypt = self._decrypt = _erased
        self.nonce = NONCE_LIMIT


def _erased(nonce: bytes, data: bytes, associated: bytes | None) -> bytes:
    raise NonceExhausted("the key was erased")
