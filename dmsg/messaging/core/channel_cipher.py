"""The encryption of a channel: Noise KK, then one cipher for each direction (:ref:`spec-messaging-ciphers`).

KK is that of :class:`~dmsg.crypto.noise.NoiseHandshake` without prologue and payloads. The ciphers of the dialects differ in
where their nonces and keys come from.
"""

from __future__ import annotations

from typing import Final, Protocol

from dmsg.crypto.aead import TAG_BYTES
from dmsg.crypto.cipher import CipherState
from dmsg.crypto.errors import CryptoError, NonceExhausted
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.messaging.core.dialect import Dialect

NUMBER_BYTES: Final = 4
_NUMBER_LIMIT: Final = 2**32 - 1


class ChannelCipher(Protocol):
    """One direction of a channel."""

    #: How much longer a ciphertext is than its plaintext.
    overhead_bytes: int

    def seal(self, plaintext: bytes) -> bytes:
        """The next ciphertext. Raises ``NonceExhausted``."""

    def open(self, ciphertext: bytes) -> bytes:
        """The plaintext of the next ciphertext. Raises ``CryptoError``; then nothing more of this direction opens."""


class CountedCipher:
    """Nonces are counted and not sent. Each ``rekey_every``-th message has a new key, the first at ``rekey_every``."""

    __slots__ = ("_left", "_rekey_every", "_state")

    overhead_bytes = TAG_BYTES

    def __init__(self, key: bytes, rekey_every: int) -> None:
        self._state = CipherState(key)
        self._rekey_every = self._left = rekey_every

    def seal(self, plaintext: bytes) -> bytes:
        """See :class:`ChannelCipher`."""
        self._count()
        return self._state.seal(b"", plaintext)

    def open(self, ciphertext: bytes) -> bytes:
        """See :class:`ChannelCipher`. Ciphertexts do not open after one was dropped, repeated, reordered or altered."""
        self._count()
        return self._state.open(b"", ciphertext)

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            self._left = self._rekey_every
            self._state.rekey()


class NumberedCipher:
    """Each ciphertext begins with its number (u32, from 1), which is its nonce.

    Go's readers accept any number. This one accepts the next number only, because TCP repeats, loses and reorders nothing.
    """

    __slots__ = ("_state",)

    overhead_bytes = NUMBER_BYTES + TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._state = CipherState(key, 1)

    def seal(self, plaintext: bytes) -> bytes:
        """See :class:`ChannelCipher`."""
        number = self._state.nonce
        if number > _NUMBER_LIMIT:
            raise NonceExhausted("the numbers of this channel are used up")
        return number.to_bytes(NUMBER_BYTES, "big") + self._state.seal(b"", plaintext)

    def open(self, ciphertext: bytes) -> bytes:
        """See :class:`ChannelCipher`."""
        if len(ciphertext) < NUMBER_BYTES or int.from_bytes(ciphertext[:NUMBER_BYTES], "big") != self._state.nonce:
            raise CryptoError("a ciphertext is out of sequence")
        return self._state.open(b"", ciphertext[NUMBER_BYTES:])


def channel_cipher(key: bytes, dialect: Dialect) -> ChannelCipher:
    """The cipher of one direction, under its 32-byte key."""
    return NumberedCipher(key) if dialect.numbered else CountedCipher(key, dialect.rekey_every)


def channel_handshake(key: SecretKey, remote: PublicKey, *, initiator: bool, random: Random) -> NoiseHandshake:
    """The KK handshake of a channel: two messages of 49 bytes."""
    return NoiseHandshake("KK", initiator=initiator, static=key, remote_static=remote.raw, random=random)
