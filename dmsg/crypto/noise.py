"""Noise handshakes XK and KK over secp256k1, ChaCha20-Poly1305 and SHA-256.

XK: :ref:`spec-key-derivation`. KK: :ref:`spec-e2e-handshake`. The only module that touches noiseprotocol; every error
inside it becomes :class:`~dmsg.crypto.errors.CryptoError`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import proxy

from noise.backends.default import DefaultNoiseBackend
from noise.exceptions import NoiseHandshakeError, NoiseMaxNonceError, NoiseValueError
from noise.noise_protocol import NoiseProtocol

from dmsg.crypto.aead import DoesNotOpen, nonce, opener, sealer
from dmsg.crypto.errors import CryptoError, InvalidKey
from dmsg.crypto.keys import PUBLIC_KEY_BYTES, Random, SecretKey
from dmsg.errors import LocalProtocolError

Pattern = Literal["XK", "KK"]
#: Body sizes of the XK messages with empty payloads.
XK_MESSAGE_BYTES: Final = (49, 49, 65)
_DH_SUFFIX: Final = b"\x00"  # the shared secret is mixed in as 33 bytes: a SHA-256 and a zero


class _KeyPair:
    """A key pair in the shape noiseprotocol wants; the private half is a :class:`SecretKey`."""

    __slots__ = ("private", "public", "public_bytes")

    def __init__(self, private: SecretKey | None, public: bytes) -> None:
        self.private = private
        self.public = public
        self.public_bytes = public

    @classmethod
    def from_public_bytes(cls, public: bytes) -> _KeyPair:
        """Take 33 bytes; whether they are a point is checked by the Diffie-Hellman that always follows."""
        if len(public) != PUBLIC_KEY_BYTES:
            raise InvalidKey("the message is too short to hold a key")
        return cls(None, bytes(public))


class _Secp256k1:
    """:ref:`spec-diffie-hellman`: SHA-256 of the compressed shared point, then one zero byte."""

    dhlen = PUBLIC_KEY_BYTES

    def __init__(self) -> None:
        self.random: Random = os.urandom

    def generate_keypair(self) -> _KeyPair:
        secret = SecretKey.generate(self.random)
        return _KeyPair(secret, secret.public_key.raw)

    def dh(self, private: SecretKey, public: bytes) -> bytes:
        return private.ecdh(public) + _DH_SUFFIX


class _Sha256:
    """hashlib instead of the library's own wrapper: a third of the time of a handshake."""

    fn = "sha256"
    hashlen = 32
    blocklen = 64

    def hash(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()


def _hmac_sha256(key: bytes, data: bytes, algorithm: str) -> bytes:
    return hmac.digest(key, data, algorithm)


def _hkdf(chaining_key: bytes, material: bytes, outputs: int, hmac_hash_fn: object) -> tuple[bytes, bytes]:
    """HKDF with two outputs, all that XK and KK ever ask for."""
    assert outputs == 2
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


class _ChaChaPoly:
    """The cipher of a handshake: most keys seal or open one message, some none, so nothing is made before it is used."""

    def initialize(self, key: bytes) -> None:
        pass

    def encrypt(self, k: bytes, n: int, ad: bytes, plaintext: bytes) -> bytes:
        return sealer(k)(nonce(n), plaintext, ad)

    def decrypt(self, k: bytes, n: int, ad: bytes, ciphertext: bytes) -> bytes:
        return opener(k)(nonce(n), ciphertext, ad)


class _Backend(DefaultNoiseBackend):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.diffie_hellmans = {"Secp256k1": _Secp256k1}
        self.keypairs = {"Secp256k1": _KeyPair}
        self.hashes = {"SHA256": _Sha256}
        self.ciphers = {"ChaChaPoly": _ChaChaPoly}
        self.hmac = _hmac_sha256
        self.hkdf = _hkdf


_BACKEND: Final = _Backend()
_NAMES: Final[dict[Pattern, bytes]] = {
    "XK": b"Noise_XK_Secp256k1_ChaChaPoly_SHA256",
    "KK": b"Noise_KK_Secp256k1_ChaChaPoly_SHA256",
}
#: Read and looked up once: a third of what it takes to begin a handshake.
_PROTOCOLS: Final = {pattern: NoiseProtocol(name, _BACKEND) for pattern, name in _NAMES.items()}
_FAILURES: Final = (DoesNotOpen, InvalidKey, NoiseHandshakeError, NoiseMaxNonceError, NoiseValueError)


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """What a finished handshake leaves: a 32-byte key for each direction, the channel binding, and who the peer is."""

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

    __slots__ = ("_failed", "_initiator", "_our_turn", "_pattern", "_protocol", "_state", "result")

    def __init__(
        self,
        pattern: Pattern,
        *,
        initiator: bool,
        static: SecretKey,
        remote_static: bytes | None = None,
        prologue: bytes = b"",
        random: Random = os.urandom,
    ) -> None:
        protocol = copy(_PROTOCOLS[pattern])
        protocol.initiator = initiator
        protocol.prologue = prologue
        protocol.dh_fn = _Secp256k1()
        protocol.dh_fn.random = random
        protocol.keypairs = {"s": _KeyPair(static, static.public_key.raw), "e": None, "rs": None, "re": None}
        if remote_static is not None:
            protocol.keypairs["rs"] = _KeyPair.from_public_bytes(remote_static)
        protocol.initialise_handshake_state()
        self._protocol = protocol
        self._state = state = protocol.handshake_state
        # The state holds the protocol. Held in turn, a handshake that is broken off would wait for the garbage collector.
        protocol.handshake_state, protocol.symmetric_state = proxy(state), proxy(state.symmetric_state)
        self._pattern = pattern
        self._initiator = initiator
        self._our_turn = initiator
        self._failed = False
        self.result: HandshakeResult | None = None

    def write_message(self, payload: bytes = b"") -> bytes:
        """The next message, carrying ``payload``. Raises ``CryptoError`` when the peer's key is no point."""
        self._take_turn(writing=True)
        return self._step(self._state.write_message, payload, "cannot be made")

    def read_message(self, message: bytes) -> bytes:
        """Take the peer's next message and give back its payload; raises ``CryptoError`` if it does not open."""
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

    def _finish(self, first: object, second: object) -> None:
        keys = (bytes(first.k), bytes(second.k))  # type: ignore[attr-defined]
        first_is_ours = self._initiator is (self._pattern == "KK")
        send_key, receive_key = keys if first_is_ours else keys[::-1]
        self.result = HandshakeResult(
            send_key, receive_key, bytes(self._protocol.handshake_hash), bytes(self._state.rs.public_bytes)
        )
        self._protocol = self._state = None
