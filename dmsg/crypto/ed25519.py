"""Signatures of ed25519 (RFC 8032), for parties whose account is an ed25519 key, and for relays that know each other. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature as _Refused
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dmsg.crypto.errors import InvalidKey, InvalidSignature

PUBLIC_KEY_BYTES: Final = 32
SEED_BYTES: Final = 32
#: Points of small order in all their encodings, without the sign bit: anyone can sign for these.
_WEAK_KEYS: Final = frozenset(
    map(
        bytes.fromhex,
        (
            "00" * 32,
            "01" + "00" * 31,
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
            "ec" + "ff" * 30 + "7f",
            "ed" + "ff" * 30 + "7f",
            "ee" + "ff" * 30 + "7f",
        ),
    )
)


class SigningKey:
    """An ed25519 key, made from a seed of 32 bytes. ``public_key`` is 32 bytes."""

    __slots__ = ("_key", "public_key")

    def __init__(self, seed: bytes) -> None:
        """Raises :class:`~dmsg.crypto.errors.InvalidKey` for a seed of another length."""
        if len(seed) != SEED_BYTES:
            raise InvalidKey("a seed of ed25519 is 32 bytes")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<SigningKey of {self.public_key.hex()}>"

    def sign(self, message: bytes) -> bytes:
        """The signature of RFC 8032: 64 bytes, the same each time. It is not a form of :ref:`spec-entry-signature`."""
        return self._key.sign(message)


#: Most signatures come from the same few parties. A cached key takes some 300 bytes.
_public_key = lru_cache(maxsize=1024)(Ed25519PublicKey.from_public_bytes)


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Raise :class:`~dmsg.crypto.errors.InvalidSignature` unless ``public_key`` (32 bytes) signed ``message``.

    Keys of small order are always refused: anyone can make signatures for them without a secret.
    """
    try:
        if public_key[:31] + bytes((public_key[31] & 0x7F,)) in _WEAK_KEYS:
            raise InvalidSignature("the key is of small order")
        _public_key(public_key).verify(signature, message)
    except (_Refused, ValueError, IndexError):
        raise InvalidSignature("the signature is not this key's") from None
