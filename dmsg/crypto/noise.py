"""Noise handshakes XK and KK over secp256k1, ChaCha20-Poly1305 and SHA-256.

XK: :ref:`spec-key-derivation`. KK: :ref:`spec-e2e-handshake`. The only module that touches noiseprotocol; every error
inside it becomes :class:`~dmsg.crypto.errors.CryptoError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal

from noise.constants import Empty
from noise.exceptions import NoiseHandshakeError, NoiseValueError
from noise.patterns import Pattern as NoisePattern
from noise.patterns import PatternKK, PatternXK
from noise.state import HandshakeState

from dmsg.crypto.aead import DoesNotOpen, nonce, opener, sealer
from dmsg.crypto.errors import CryptoError, InvalidKey
from dmsg.crypto.keys import Point, Random, SecretKey
from dmsg.errors import LocalProtocolError

Pattern = Literal["XK", "KK"]
#: Body sizes of the XK messages with empty payloads.
XK_MESSAGE_BYTES: Final = (49, 49, 65)
_DH_SUFFIX: Final = b"\x00"  # the shared secret is mixed in as 33 bytes: a SHA-256 and a zero
_UNKNOWN: Final = Empty()  # noiseprotocol's value for "no key yet"
_PATTERNS: Final[dict[Pattern, NoisePattern]] = {"XK": PatternXK(), "KK": PatternKK()}
#: Initial values of hash and chaining key.
_BEGINNINGS: Final = {
    pattern: sha256(f"Noise_{pattern}_Secp256k1_ChaChaPoly_SHA256".encode()).digest() for pattern in _PATTERNS
}
_FAILURES: Final = (DoesNotOpen, InvalidKey, NoiseHandshakeError, NoiseValueError)


class _KeyPair:
    """A key pair in the form that noiseprotocol expects; the private half is a :class:`SecretKey`."""

    __slots__ = ("private", "public", "public_bytes")

    def __init__(self, private: SecretKey | None, public: Point) -> None:
        self.private = private
        self.public = public
        self.public_bytes = public.raw

    @classmethod
    def from_public_bytes(cls, public: bytes) -> _KeyPair:
        """Take 33 bytes; the Diffie-Hellman that always follows checks that they are a point."""
        return cls(None, Point(public))


class KnownPeer:
    """The static key of a peer, for several KK handshakes with our key ``ours``: caches the Diffie-Hellman of the two keys.

    The cached value is as secret as our key, and must be erased with it.
    """

    __slots__ = ("ours", "pairs", "shared")

    def __init__(self, ours: SecretKey, theirs: bytes) -> None:
        """Take the peer's key, 33 bytes, or raise ``InvalidKey``. The first handshake checks that it is a point."""
        self.ours = ours
        self.pairs = _KeyPair(ours, Point(ours.public_key.raw)), _KeyPair(None, Point(theirs))
        self.shared = b""  # until the first handshake needs it

    def __repr__(self) -> str:
        return f"<KnownPeer {self.pairs[1].public_bytes.hex()}>"


class _Symmetric:
    """Noise's symmetric state, cipher state and DH, as noiseprotocol's interpreter of patterns uses them.

    It replaces five objects of the library, whose calls of each other take as long as the computation itself.
    """

    __slots__ = ("_known", "_random", "_sealed", "ck", "h", "k")

    # The same attributes as in NoiseProtocol.
    is_psk_handshake = False
    keypair_class = _KeyPair
    #: :ref:`spec-diffie-hellman`.
    dhlen = 33

    def __init__(self, beginning: bytes, random: Random, known: KnownPeer | None) -> None:
        self.ck = self.h = beginning
        self.k = b""
        self._sealed = 0  # messages sealed with k
        self._random = random
        self._known = known

    @property
    def dh_fn(self) -> _Symmetric:
        """The object that computes Diffie-Hellmans."""
        return self

    @property
    def cipher_state_handshake(self) -> _Symmetric:
        """The object that knows whether there is a key."""
        return self

    def has_key(self) -> bool:
        """Whether messages are encrypted by now."""
        return bool(self.k)

    def generate_keypair(self) -> _KeyPair:
        """A new pair, for this handshake alone."""
        secret = SecretKey.generate(self._random)
        return _KeyPair(secret, Point(secret.public_key.raw))

    def dh(self, private: SecretKey, public: Point) -> bytes:
        """SHA-256 of the compressed shared point, then one zero byte."""
        known = self._known
        if known is None or public is not known.pairs[1].public or private is not known.ours:
            return private.ecdh(public) + _DH_SUFFIX
        if not known.shared:
            known.shared = private.ecdh(public) + _DH_SUFFIX
        return known.shared

    def mix_key(self, material: bytes) -> None:
        """MixKey: a new chaining key, and a new key for sealing."""
        self.ck, self.k = _hkdf(self.ck, material)
        self._sealed = 0

    def mix_hash(self, data: bytes) -> None:
        """MixHash: bind all later messages to ``data``."""
        self.h = sha256(self.h + data).digest()

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        """EncryptAndHash. XK and KK encrypt nothing before the first :meth:`mix_key`."""
        sealed = sealer(self.k)(nonce(self._sealed), plaintext, self.h)
        self._sealed += 1
        self.mix_hash(sealed)
        return sealed

    def decrypt_and_hash(self, sealed: bytes) -> bytes:
        """DecryptAndHash."""
        plaintext = opener(self.k)(nonce(self._sealed), sealed, self.h)
        self._sealed += 1
        self.mix_hash(sealed)
        return plaintext

    def split(self) -> tuple[bytes, bytes]:
        """Split: the keys of both directions, the initiator's first as in the Noise specification."""
        return _hkdf(self.ck, b"")


# The pads of HMAC-SHA256 for a key of 32 bytes, which every chaining key is.
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
_INNER_REST, _OUTER_REST = b"\x36" * 32, b"\x5c" * 32


def hmac_sha256(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256 with a ``key`` of 32 bytes."""
    return sha256(
        key.translate(_OUTER) + _OUTER_REST + sha256(key.translate(_INNER) + _INNER_REST + data).digest()
    ).digest()


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs, the only form that XK and KK use.

    Written out, because ``hmac`` and the HKDF of cryptography take 4 µs longer for each of the five HKDFs of a handshake.
    """
    inner = sha256(chaining_key.translate(_INNER) + _INNER_REST + material).digest()
    temporary = sha256(chaining_key.translate(_OUTER) + _OUTER_REST + inner).digest()
    inner_pad, outer_pad = temporary.translate(_INNER) + _INNER_REST, temporary.translate(_OUTER) + _OUTER_REST
    first = sha256(outer_pad + sha256(inner_pad + b"\x01").digest()).digest()
    return first, sha256(outer_pad + sha256(inner_pad + first + b"\x02").digest()).digest()


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """The result of a handshake: a 32-byte key for each direction, the channel binding, and the peer's static key."""

    send_key: bytes
    receive_key: bytes
    handshake_hash: bytes
    remote_static: bytes

    def __repr__(self) -> str:
        return f"<HandshakeResult with {self.remote_static.hex()}>"


class NoiseHandshake:
    """One side of a handshake: ``write_message`` and ``read_message`` in turn until ``result`` is there.

    After any :class:`CryptoError` the handshake is dead. XK gives the initiator the *second* key of the split to send
    with (:ref:`spec-swapped-keys`), KK the first.
    """

    __slots__ = ("_failed", "_initiator", "_our_turn", "_pattern", "_state", "result")

    def __init__(
        self,
        pattern: Pattern,
        *,
        initiator: bool,
        static: SecretKey,
        remote_static: bytes | KnownPeer | None = None,
        prologue: bytes = b"",
        random: Random = os.urandom,
    ) -> None:
        """Begin. All but the responder of XK give ``remote_static``; a :class:`KnownPeer` must be made with ``static``."""
        known = None
        theirs: Any = _UNKNOWN
        if isinstance(remote_static, KnownPeer):
            known = remote_static
            assert known.ours is static
            ours, theirs = known.pairs
        else:
            ours = _KeyPair(static, Point(static.public_key.raw))
            if remote_static is not None:
                theirs = _KeyPair.from_public_bytes(remote_static)
        symmetric = _Symmetric(_BEGINNINGS[pattern], random, known)
        self._state = state = HandshakeState()
        state.noise_protocol = state.symmetric_state = symmetric
        state.initiator = initiator
        state.s = ours
        state.rs = theirs
        state.e = state.re = _UNKNOWN
        state.message_patterns = _PATTERNS[pattern].tokens.copy()
        symmetric.mix_hash(prologue)
        if pattern == "KK":
            symmetric.mix_hash((ours if initiator else theirs).public_bytes)
        symmetric.mix_hash((theirs if initiator else ours).public_bytes)
        self._pattern = pattern
        self._initiator = initiator
        self._our_turn = initiator
        self._failed = False
        self.result: HandshakeResult | None = None

    def write_message(self, payload: bytes = b"") -> bytes:
        """The next message, carrying ``payload``. Raises ``CryptoError`` when the peer's key is not a point."""
        self._take_turn(writing=True)
        return self._step(self._state.write_message, payload, "cannot be made")

    def read_message(self, message: bytes) -> bytes:
        """Take the peer's next message and return its payload; raises ``CryptoError`` if it does not open."""
        self._take_turn(writing=False)
        return self._step(self._state.read_message, message, "does not open")

    def _step(self, step: Callable[[bytes, bytearray], Any], data: bytes, problem: str) -> bytes:
        made = bytearray()
        try:
            done = step(data, made)
        except _FAILURES as error:
            self._failed = True
            raise CryptoError(f"handshake message {problem}: {error or type(error).__name__}") from None
        if done:
            self._finish(*done)
        return bytes(made)

    def _take_turn(self, *, writing: bool) -> None:
        if self._failed or self.result is not None:
            raise LocalProtocolError("the handshake is over")
        if self._our_turn is not writing:
            raise LocalProtocolError("it is the other side's turn in the handshake")
        self._our_turn = not writing

    def _finish(self, *keys: bytes) -> None:
        state, self._state = self._state, None
        send_key, receive_key = keys if self._initiator is (self._pattern == "KK") else keys[::-1]
        self.result = HandshakeResult(send_key, receive_key, state.symmetric_state.h, state.rs.public_bytes)
