"""One direction of an end-to-end channel: a cipher with Noise's implicit counter nonce.

:ref:`spec-sealed-frames`: no nonce is sent, so anything dropped, repeated, reordered, injected or altered fails to
open.
"""

from __future__ import annotations

from dmsg.crypto.aead import NONCE_LIMIT, Cipher, DoesNotOpen, next_key, nonce, pair
from dmsg.crypto.errors import CryptoError, NonceExhausted


class CipherState:
    """A key and the number of messages it has been used for."""

    __slots__ = ("_cipher", "_decrypt", "_encrypt", "nonce")

    def __init__(self, key: bytes, first: int = 0, *, cipher: Cipher = Cipher.CHACHA) -> None:
        self._cipher = cipher
        self._encrypt, self._decrypt = pair(key, cipher)
        self.nonce = first

    def seal(self, associated: bytes, plaintext: bytes) -> bytes:
        """``plaintext`` sealed under the next nonce. Raises ``NonceExhausted`` before a nonce is used twice."""
        number = self.nonce
        if number >= NONCE_LIMIT:
            raise NonceExhausted("the nonces of this transport are used up")
        self.nonce = number + 1
        return self._encrypt(nonce(number), plaintext, associated)

    def open(self, associated: bytes, sealed: bytes | memoryview) -> bytes:
        """The plaintext of data sealed under the next nonce. Raises ``CryptoError``; the channel is then dead."""
        number = self.nonce
        if number >= NONCE_LIMIT:
            raise NonceExhausted("the nonces of this transport are used up")
        try:
            plaintext = self._decrypt(nonce(number), sealed, associated)
        except DoesNotOpen:
            raise CryptoError("a sealed frame does not open") from None
        self.nonce = number + 1
        return plaintext

    def rekey(self) -> None:
        """Change to the next key: Noise's REKEY, which cannot be reversed. The counter goes on."""
        self._encrypt, self._decrypt = pair(next_key(self._encrypt), self._cipher)

    def erase(self) -> None:
        """Drop the key. ``seal``, ``open`` and ``rekey`` raise ``NonceExhausted`` from now on."""
        self._encrypt = self._decrypt = _erased


def _erased(unused: bytes, data: bytes | memoryview, associated: bytes | None) -> bytes:
    raise NonceExhausted("the key was erased")
