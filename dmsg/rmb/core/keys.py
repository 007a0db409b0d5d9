"""The keys of twins: one secret, which signs with ed25519 or sr25519, and decrypts with secp256k1. Pure.

A signature is a letter for its kind, and 64 bytes. See :ref:`spec-rmb-signature`.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Final

from dmsg.crypto import ed25519
from dmsg.crypto.errors import InvalidSignature
from dmsg.rmb.core.errors import BadSignature, InvalidSecret, LibraryMissing

try:
    import mnemonic
except ImportError as error:
    raise LibraryMissing("mnemonic") from error
try:
    import sr25519
except ImportError as error:
    raise LibraryMissing("py-sr25519-bindings") from error

SECRET_BYTES: Final = 32
SIGNATURE_BYTES: Final = 65
_PHRASE_ROUNDS: Final = 2048
#: The neutral point of ristretto255: anyone can make sr25519 signatures that verify with it, without a secret key.
_NEUTRAL: Final = bytes(32)


class KeyType(Enum):
    """How a twin signs; the value is the name on command lines."""

    ED25519 = "ed25519"
    SR25519 = "sr25519"

    @property
    def letter(self) -> bytes:
        """The first byte of its signatures: ``e`` or ``s``."""
        return self.value[:1].encode()


def read_secret(text: str) -> bytes:
    """The 32 bytes that ``text`` stands for: ``0x`` and 64 hex digits, or the words of a BIP-39 phrase in English.

    The secret of a phrase is derived as in Substrate, from the phrase's entropy, and not as in BIP-39, from its words.
    Raises :class:`~dmsg.rmb.core.errors.InvalidSecret`, also for derivation paths (``//Alice``).
    """
    text = text.strip()
    if text.startswith("0x"):
        try:
            secret = bytes.fromhex(text[2:])
        except ValueError:
            raise InvalidSecret("invalid seed") from None
        if len(secret) != SECRET_BYTES or len(text) != 2 + 2 * SECRET_BYTES:
            raise InvalidSecret("invalid seed")
        return secret
    try:
        entropy = bytes(mnemonic.Mnemonic("english").to_entropy(text.split()))
    except (ValueError, LookupError):
        raise InvalidSecret("invalid bip39 phrase") from None
    return hashlib.pbkdf2_hmac("sha512", entropy, b"mnemonic", _PHRASE_ROUNDS)[:SECRET_BYTES]


class TwinKey:
    """The key with which a twin signs. ``account`` is its public key of 32 bytes. The secret is never printed."""

    __slots__ = ("_sign", "account", "kind", "secret")

    def __init__(self, secret: bytes, kind: KeyType = KeyType.SR25519) -> None:
        """Take the 32 bytes of :func:`read_secret`; raises :class:`~dmsg.rmb.core.errors.InvalidSecret`."""
        if len(secret) != SECRET_BYTES:
            raise InvalidSecret("invalid seed")
        self.secret = secret
        self.kind = kind
        self.account: bytes
        if kind is KeyType.ED25519:
            key = ed25519.SigningKey(secret)
            self.account = key.public_key
            self._sign = key.sign
        else:
            pair = sr25519.pair_from_seed(secret)
            self.account = pair[0]
            self._sign = lambda message: bytes(sr25519.sign(pair, message))

    def __repr__(self) -> str:
        return f"<TwinKey {self.kind.value} of {self.account.hex()}>"

    def sign(self, message: bytes) -> bytes:
        """The signature of 65 bytes over ``message``. An sr25519 signature differs each time; the library draws the nonce."""
        return self.kind.letter + self._sign(message)


def verify(account: bytes, message: bytes, signature: bytes) -> None:
    """Raise :class:`~dmsg.rmb.core.errors.BadSignature` unless ``account``'s key (32 bytes) signed ``message``."""
    if len(signature) != SIGNATURE_BYTES:
        raise BadSignature(f"invalid signature length, expected: {SIGNATURE_BYTES}, found: {len(signature)}")
    letter, rest = signature[:1], signature[1:]
    try:
        if letter == KeyType.ED25519.letter:
            ed25519.verify(account, message, rest)
        elif letter != KeyType.SR25519.letter:
            raise BadSignature("invalid signature type (expected either sr25519 or ed25519)")
        elif account == _NEUTRAL or not sr25519.verify(rest, message, account):
            raise BadSignature("sr25519 signature verification failed")
    except InvalidSignature:
        raise BadSignature("ed25519 signature verification failed") from None
    except ValueError:  # sr25519 raises it for bytes that no key could have made
        raise BadSignature("sr25519 signature verification failed") from None
