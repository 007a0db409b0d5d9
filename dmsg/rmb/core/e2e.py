"""Encryption from twin to twin: the payload of an envelope, which no relay can read. Pure.

Both keys are long-lived, so whoever learns one can also read earlier messages: see :ref:`spec-rmb-e2e`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from dmsg.crypto.aead import TAG_BYTES, Aead, Cipher, DoesNotOpen, pair
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import SecretKey
from dmsg.rmb.core.errors import E2eError
from dmsg.rmb.core.limits import SHARED_KEYS

NONCE_BYTES: Final = 12
#: Bytes by which a cipher is longer than its plain text.
OVERHEAD_BYTES: Final = NONCE_BYTES + TAG_BYTES


class EncryptionKey:
    """A twin's secp256k1 key, made of the same 32 bytes as its signing key. ``public_key`` (33 bytes) is published.

    The last :data:`~dmsg.rmb.core.limits.SHARED_KEYS` keys shared with other twins are cached: making one takes 30 µs.
    """

    __slots__ = ("_key", "_shared", "public_key")

    def __init__(self, secret: bytes) -> None:
        """Raises :class:`~dmsg.rmb.core.errors.E2eError` unless the secret is a number from 1 to the curve's order less 1."""
        try:
            self._key = SecretKey(secret)
        except InvalidKey:
            raise E2eError("k256: malformed or out-of-range secret key") from None
        self.public_key = self._key.public_key.raw
        self._shared: OrderedDict[bytes, tuple[Aead, Aead]] = OrderedDict()

    def _pair(self, their_pk: bytes) -> tuple[Aead, Aead]:
        known = self._shared.get(their_pk)
        if known is not None:
            self._shared.move_to_end(their_pk)
            return known
        try:
            made = pair(hashlib.sha256(self._key.shared_x(their_pk)).digest(), Cipher.AES)
        except InvalidKey:
            raise E2eError("k256: malformed public key") from None
        self._shared[their_pk] = made
        if len(self._shared) > SHARED_KEYS:
            self._shared.popitem(last=False)
        return made

    def encrypt(self, their_pk: bytes, data: bytes, nonce: bytes) -> bytes:
        """Encrypt ``data`` for the holder of ``their_pk``; ``nonce`` is 12 random bytes, never reused by the same two twins.

        Raises :class:`~dmsg.rmb.core.errors.E2eError` when ``their_pk`` is not a public key.
        """
        return nonce + self._pair(their_pk)[0](nonce, data, None)

    def decrypt(self, their_pk: bytes, cipher: bytes) -> bytes:
        """Decrypt what the holder of ``their_pk`` encrypted for us, or we for them; raises ``E2eError``."""
        open_ = self._pair(their_pk)[1]
        if len(cipher) < OVERHEAD_BYTES:
            raise E2eError("invalid cipher data")
        try:
            return open_(cipher[:NONCE_BYTES], cipher[NONCE_BYTES:], None)
        except DoesNotOpen:
            raise E2eError("invalid cipher data") from None
