"""The end-to-end handshake of a transport: Noise KK between its two ends, whatever the relay.

:ref:`spec-e2e-handshake`. Two state machines that do not know how their messages travel. A carrier moves the messages: A
inside REQUEST and ACCEPT, B inside the first FWD of each direction.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dmsg.crypto.aead import Cipher
from dmsg.crypto.errors import CryptoError
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import HandshakeResult, KnownPeer, NoiseHandshake, hmac_sha256
from dmsg.discovery.entry import SECURE_VERSION
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.ciphers import CIPHERS, agreed, offers_aes
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.tlv import Tlv, decode_tlvs, encode_padded_tlvs

#: Announces carrier B in the first FWD of each direction.
UPGRADE_MAGIC: Final = hashlib.sha256(b"dmsg/0.1 e2e upgrade").digest()[:16]
TOKEN_BYTES: Final = 16
#: The lists of messages 1 and 2 are padded to these sizes, so that their length tells a relay nothing: the longest contents
#: fit, a service name of 255 bytes and a ``resume`` included. Label ``kk-padding``.
LIST_1_BYTES: Final = 320
LIST_2_BYTES: Final = 64
#: The initiator has this long to prove itself, which takes it one round trip; a replayed or forged message 1 holds a place
#: for no longer.
CONFIRM_TIMEOUT_S: Final = 3.0
#: The same for a transport that goes on, which takes no place of others: behind a slow link, what all transports of a lost
#: relay send again is before the proof.
RESUME_CONFIRM_TIMEOUT_S: Final = 10.0

_PROLOGUE: Final = b"dmsg/0.1 e2e"
#: How each list begins; the key says whether its sender can do AES-256-GCM.
_HEADS: Final[Mapping[bool, Mapping[Tlv, bytes]]] = {
    False: {Tlv.VERSION: SECURE_VERSION.encode()},
    True: {Tlv.VERSION: SECURE_VERSION.encode(), Tlv.CIPHERS: CIPHERS},
}
#: The lists of a handshake for a new transport of the default listener, and of every answer to a new transport.
_ORDINARY_LIST_1, _ORDINARY_LIST_2 = (
    {aes: encode_padded_tlvs(head, size) for aes, head in _HEADS.items()} for size in (LIST_1_BYTES, LIST_2_BYTES)
)
_INITIATOR_TO_RESPONDER: Final = b"\x00"
_RESPONDER_TO_INITIATOR: Final = b"\x01"


@dataclass(frozen=True, slots=True)
class Resume:
    """TLV ``resume`` (:ref:`spec-resume-exchange`): which transport, and how many of its bytes were received here."""

    token: bytes
    received_bytes: int

    def encode(self) -> bytes:
        """Token, then the count as u64."""
        return self.token + self.received_bytes.to_bytes(8, "big")

    @classmethod
    def decode(cls, value: bytes) -> Resume:
        """The reverse; raises ``RemoteProtocolError``."""
        if len(value) != TOKEN_BYTES + 8:
            raise RemoteProtocolError("e2e", "malformed resume")
        return cls(value[:TOKEN_BYTES], int.from_bytes(value[TOKEN_BYTES:], "big"))


@dataclass(frozen=True, slots=True)
class SecureKeys:
    """What a finished handshake gives a stream; ``send_hash`` and ``receive_hash`` begin the rolling hashes."""

    send_key: bytes
    receive_key: bytes
    send_hash: bytes
    receive_hash: bytes
    token: bytes
    cipher: Cipher = Cipher.CHACHA

    def __repr__(self) -> str:
        return "<SecureKeys>"


def derive_keys(result: HandshakeResult, cipher: Cipher, *, initiator: bool) -> SecureKeys:
    """Keys, the starts of the rolling hashes (:ref:`spec-sealed-acks`) and the :ref:`token <spec-resume-token>`."""
    directions = (_INITIATOR_TO_RESPONDER, _RESPONDER_TO_INITIATOR)
    ours, theirs = directions if initiator else directions[::-1]
    binding = result.handshake_hash
    return SecureKeys(
        result.send_key,
        result.receive_key,
        hashlib.sha256(binding + ours).digest(),
        hashlib.sha256(binding + theirs).digest(),
        hmac_sha256(binding, b"resume")[:TOKEN_BYTES],
        cipher,
    )


def prologue(initiator: PublicKey, responder: PublicKey, server: PublicKey) -> bytes:
    """The prologue of the handshake: who asked, who was asked, and the relay in between."""
    return _PROLOGUE + initiator.raw + responder.raw + server.raw


def _list_1(service: str, resume: Resume | None, aes: bool) -> bytes:
    if not service and resume is None:
        return _ORDINARY_LIST_1[aes]
    values = dict(_HEADS[aes])
    if service:
        values[Tlv.SERVICE] = service.encode()
    if resume is not None:
        values[Tlv.RESUME] = resume.encode()
    return encode_padded_tlvs(values, LIST_1_BYTES)


def _list_2(resume: Resume | None, aes: bool) -> bytes:
    if resume is None:
        return _ORDINARY_LIST_2[aes]
    return encode_padded_tlvs({**_HEADS[aes], Tlv.RESUME: resume.encode()}, LIST_2_BYTES)


class SecureInitiator:
    """The side that dials: ``message`` goes out, ``finish`` takes the answer."""

    __slots__ = ("_aes", "_noise", "message")

    def __init__(
        self,
        static: SecretKey,
        responder: PublicKey,
        server: PublicKey,
        *,
        service: str = "",
        resume: Resume | None = None,
        aes: bool = False,
        random: Random = os.urandom,
        known: KnownPeer | None = None,
    ) -> None:
        """Begin; ``known`` is the responder's key prepared for ``static``, ``aes`` whether we can do AES-256-GCM."""
        self._noise = NoiseHandshake(
            "KK",
            initiator=True,
            static=static,
            remote_static=known or responder.raw,
            prologue=prologue(static.public_key, responder, server),
            random=random,
        )
        self._aes = aes
        self.message = self._noise.write_message(_list_1(service, resume, aes))

    def finish(self, message: bytes) -> tuple[SecureKeys, Resume | None]:
        """Take message 2. Raises ``IntegrityError`` unless the responder itself made it for this handshake."""
        try:
            values = decode_tlvs(self._noise.read_message(message), "e2e")
            resume = Resume.decode(values[Tlv.RESUME]) if Tlv.RESUME in values else None
        except (CryptoError, RemoteProtocolError) as error:
            raise IntegrityError(f"the peer's answer is not authentic: {error}", by="local") from None
        assert self._noise.result is not None
        cipher = agreed(ours=self._aes, theirs=offers_aes(values))
        return derive_keys(self._noise.result, cipher, initiator=True), resume


class SecureResponder:
    """The side that is dialled. It can read message 1 before the application decides; the message may be a replay."""

    __slots__ = ("_aes", "_noise", "_values")

    def __init__(
        self,
        static: SecretKey,
        initiator: PublicKey,
        server: PublicKey,
        message: bytes,
        *,
        aes: bool = False,
        random: Random = os.urandom,
        known: KnownPeer | None = None,
    ) -> None:
        """Take message 1. Raises ``IntegrityError`` unless it was made for this pair of keys and this relay.

        ``known`` is the initiator's key prepared for ``static``, ``aes`` whether we can do AES-256-GCM.
        """
        self._aes = aes
        self._noise = NoiseHandshake(
            "KK",
            initiator=False,
            static=static,
            remote_static=known or initiator.raw,
            prologue=prologue(initiator, static.public_key, server),
            random=random,
        )
        try:
            self._values: Mapping[Tlv, bytes] = decode_tlvs(self._noise.read_message(message), "e2e")
        except (CryptoError, RemoteProtocolError) as error:
            raise IntegrityError(f"the peer's request is not authentic: {error}", by="local") from None

    @property
    def service(self) -> str:
        """The name of the wanted listener; text that is not UTF-8 names none that exists."""
        return self._values.get(Tlv.SERVICE, b"").decode("utf-8", "replace")

    @property
    def resume(self) -> Resume | None:
        """The transport to go on with. Raises ``RemoteProtocolError`` when malformed."""
        value = self._values.get(Tlv.RESUME)
        return None if value is None else Resume.decode(value)

    def answer(self, resume: Resume | None = None) -> tuple[bytes, SecureKeys]:
        """Message 2 and the keys."""
        message = self._noise.write_message(_list_2(resume, self._aes))
        assert self._noise.result is not None
        cipher = agreed(ours=self._aes, theirs=offers_aes(self._values))
        return message, derive_keys(self._noise.result, cipher, initiator=False)
