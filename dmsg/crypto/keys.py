"""Identity: secp256k1 keys, recoverable signatures, key files.

:ref:`spec-diffie-hellman`, :ref:`spec-entry-signature`. The only module that touches coincurve; malformed input
raises :class:`~dmsg.crypto.errors.InvalidKey` or :class:`~dmsg.crypto.errors.InvalidSignature`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Collection
from typing import Any, Final

import coincurve
from coincurve._libsecp256k1 import ffi, lib

from dmsg.crypto.errors import InvalidKey, InvalidSignature, KeyFileError
from dmsg.crypto.private_files import create_private, read_private

PUBLIC_KEY_BYTES: Final = 33
SECRET_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 65
_HALF_ORDER: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
_KEY_FILE_LIMIT_BYTES: Final = 4096

#: A source of randomness: ``random(n)`` gives ``n`` bytes. ``os.urandom`` in production.
Random = Callable[[int], bytes]


_CONTEXT: Final = coincurve.context.GLOBAL_CONTEXT.ctx
_PARSED: Final = ffi.typeof("secp256k1_pubkey *")
_32_BYTES: Final = ffi.typeof("unsigned char [32]")
_33_BYTES: Final = ffi.typeof("unsigned char [33]")
_SIZE: Final = ffi.typeof("size_t *")


def _parse(raw: bytes) -> Any:
    """The library's object for a point in any SEC1 form. Raises ``InvalidKey``."""
    parsed = ffi.new(_PARSED)
    if not lib.secp256k1_ec_pubkey_parse(_CONTEXT, parsed, raw, len(raw)):
        raise InvalidKey("a public key is a point of the curve")
    return parsed


class PublicKey:
    """A point of secp256k1 in its 33-byte compressed form: the name of an entity.

    Hashable, comparable, immutable; can be copied and pickled. ``bytes(key)`` is the wire form, ``str(key)`` 66 lower-case
    hex digits.
    """

    __slots__ = ("raw",)
    raw: bytes

    def __init__(self, raw: bytes) -> None:
        """Check ``raw`` (33 bytes: prefix 2 or 3, x below the field prime, on the curve) or raise ``InvalidKey``."""
        raw = bytes(raw)
        if len(raw) != PUBLIC_KEY_BYTES or raw[0] not in (2, 3):
            raise InvalidKey("a public key is 33 bytes that begin with 02 or 03")
        _parse(raw)
        object.__setattr__(self, "raw", raw)

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Read 66 hex digits of either case; raises ``InvalidKey``."""
        key = cls.parse_unchecked(text)
        key.check_point()
        return key

    @classmethod
    def parse_unchecked(cls, text: str) -> PublicKey:
        """As :meth:`parse`, without checking that the point is on the curve: the check costs a square root, 6 µs.

        For keys that are not trusted in any way yet. ``InvalidKey`` unless ``text`` is 66 hex digits that begin with 02 or
        03. Call :meth:`check_point` before the key is used or passed on.
        """
        if not isinstance(text, str) or len(text) != 2 * PUBLIC_KEY_BYTES or not text.isascii():
            raise InvalidKey("a public key is written as 66 hex digits")
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raise InvalidKey("a public key is written as 66 hex digits") from None
        return cls._unchecked(raw)

    @classmethod
    def _unchecked(cls, raw: bytes) -> PublicKey:
        if len(raw) != PUBLIC_KEY_BYTES or raw[0] not in (2, 3):
            raise InvalidKey("a public key is 33 bytes that begin with 02 or 03")
        key = cls.__new__(cls)
        object.__setattr__(key, "raw", raw)
        return key

    def check_point(self) -> None:
        """Raise ``InvalidKey`` unless this is a point of the curve. Only needed after :meth:`parse_unchecked`."""
        _parse(self.raw)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a PublicKey cannot be changed")

    def __bytes__(self) -> bytes:
        return self.raw

    def __str__(self) -> str:
        return self.raw.hex()

    def __repr__(self) -> str:
        return f"PublicKey({self.raw.hex()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __lt__(self, other: object) -> bool:
        return self.raw < other.raw if isinstance(other, PublicKey) else NotImplemented

    def __reduce__(self) -> tuple[type[PublicKey], tuple[bytes]]:
        """A copy, or a pickle, is made from the bytes, which are checked again."""
        return PublicKey, (self.raw,)

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raise ``InvalidSignature`` unless ``signature`` is this key's over SHA-256 of ``message``."""
        if recover(signature, message) != self:
            raise InvalidSignature("the signature is not this key's")


class Point:
    """A public key for several Diffie-Hellmans: only the first one computes its square root, 5 µs."""

    __slots__ = ("_parsed", "raw")

    def __init__(self, raw: bytes) -> None:
        """Take 33 bytes or raise ``InvalidKey``. The first use checks that they are a point."""
        if len(raw) != PUBLIC_KEY_BYTES:
            raise InvalidKey("a public key is 33 bytes")
        self.raw = bytes(raw)
        self._parsed: Any = None

    @property
    def parsed(self) -> Any:
        """The library's object for the point. Raises ``InvalidKey``."""
        if self._parsed is None:
            self._parsed = _parse(self.raw)
        return self._parsed


class SecretKey:
    """A secp256k1 secret key. Never printed: ``repr`` shows the public half only."""

    __slots__ = ("_raw", "_signer", "public_key")

    def __init__(self, raw: bytes) -> None:
        """Take 32 bytes in 1…n-1 or raise ``InvalidKey``."""
        if len(raw) != SECRET_KEY_BYTES:
            raise InvalidKey("a secret key is 32 bytes")
        self._raw = raw = bytes(raw)
        # coincurve's PrivateKey computes the public key twice, which would cost each handshake half a Diffie-Hellman.
        self._signer: coincurve.PrivateKey | None = None
        point, public, size = ffi.new(_PARSED), ffi.new(_33_BYTES), ffi.new(_SIZE, PUBLIC_KEY_BYTES)
        if not lib.secp256k1_ec_pubkey_create(_CONTEXT, point, raw):
            raise InvalidKey("the secret key is out of range")
        lib.secp256k1_ec_pubkey_serialize(_CONTEXT, public, size, point, lib.SECP256K1_EC_COMPRESSED)
        self.public_key = PublicKey._unchecked(ffi.buffer(public)[:])

    @classmethod
    def generate(cls, random: Random = os.urandom) -> SecretKey:
        """A new key from ``random``; a value out of range (probability 2^-127) is drawn again."""
        while True:
            try:
                return cls(random(SECRET_KEY_BYTES))
            except InvalidKey:
                continue

    def __bytes__(self) -> bytes:
        return self._raw

    def __repr__(self) -> str:
        return f"<SecretKey of {self.public_key}>"

    def ecdh(self, public_key: bytes | Point) -> bytes:
        """SHA-256 of the compressed shared point, 32 bytes. Raises ``InvalidKey`` for a bad point."""
        point = public_key if isinstance(public_key, Point) else Point(public_key)
        return self._multiply(point.parsed, ffi.NULL)

    def shared_x(self, public_key: bytes) -> bytes:
        """The X coordinate of the shared point, 32 bytes, big-endian, in time that does not depend on the secret.

        ``public_key`` is any SEC1 form of a point, compressed or not. Raises ``InvalidKey`` for a bad point.
        """
        return self._multiply(_parse(bytes(public_key)), _copy_x())

    def _multiply(self, parsed: Any, hash_function: Any) -> bytes:
        shared = ffi.new(_32_BYTES)
        lib.secp256k1_ecdh(_CONTEXT, shared, parsed, self._raw, hash_function, ffi.NULL)
        made: bytes = ffi.buffer(shared)[:]
        return made

    def sign(self, message: bytes, entropy: bytes = b"") -> bytes:
        """A 65-byte recoverable signature r ‖ s ‖ recovery id over SHA-256 of ``message``; s is always low.

        The same message gets the same signature; 32 bytes of ``entropy`` give a different one. ``ValueError`` for any other
        number of bytes.
        """
        if len(entropy) not in (0, 32):
            raise ValueError(f"entropy for a signature is 32 bytes, not {len(entropy)}")
        if self._signer is None:
            self._signer = coincurve.PrivateKey(self._raw)
        nonce = (ffi.NULL, ffi.new(_32_BYTES, entropy) if entropy else ffi.NULL)
        digest = hashlib.sha256(message).digest()
        signature: bytes = self._signer.sign_recoverable(digest, hasher=None, custom_nonce=nonce)
        return signature


@functools.cache
def _copy_x() -> Any:
    """The function that libsecp256k1 calls with the shared point. By default the library hashes the compressed point."""

    def copy_x(output: Any, x: Any, _y: Any, _data: Any) -> int:
        ffi.memmove(output, x, 32)
        return 1

    return ffi.callback("int(unsigned char *, const unsigned char *, const unsigned char *, void *)", copy_x, error=0)


def recover(signature: bytes, message: bytes) -> PublicKey:
    """The key that made ``signature`` over SHA-256 of ``message``; anything malformed raises ``InvalidSignature``."""
    if len(signature) != SIGNATURE_BYTES:
        raise InvalidSignature("a signature is 65 bytes")
    if signature[64] > 3:
        raise InvalidSignature("the recovery id is not 0 to 3")
    if int.from_bytes(signature[32:64], "big") > _HALF_ORDER:
        raise InvalidSignature("the signature is malleable: its s is high")
    try:
        point = coincurve.PublicKey.from_signature_and_message(
            bytes(signature), hashlib.sha256(message).digest(), hasher=None
        )
        return PublicKey._unchecked(point.format())  # a recovered point is on the curve
    except Exception as error:  # coincurve raises bare Exception when recovery fails
        raise InvalidSignature("no key can be recovered from the signature") from error


def write_key_file(path: str | os.PathLike[str], key: SecretKey) -> None:
    """Create ``path`` (mode 0600, must not exist) with the key as 64 hex digits and a line end; fsynced.

    Raises ``KeyFileError``, also for a directory where others may write, because :func:`read_key_file` refuses such
    directories. A failed write leaves no file behind.
    """
    create_private(path, bytes(key).hex().encode() + b"\n")


def read_key_file(path: str | os.PathLike[str], *, owners: Collection[int] = ()) -> SecretKey:
    """Read a key file, or raise ``KeyFileError`` when it is missing, not a plain file, malformed, or open to others.

    ``owners`` are uids that may own it besides this process's user and root, such as the user that a role runs as later.
    """
    content = read_private(path, _KEY_FILE_LIMIT_BYTES, owners, made_by="dmsg keygen")
    try:
        return SecretKey(bytes.fromhex(content.strip().decode("ascii")))
    except ValueError:
        raise KeyFileError(os.fspath(path), "does not hold a secret key (64 hex digits)") from None
