"""Writes ``e2e.json``: golden vectors of :ref:`spec-extension` and :ref:`spec-resumption`.

A second implementation, from the text of the extension and of Noise alone: it shares no line with the package, so that
the vectors say what the page says and not what the code does. Everything is fixed: keys, ephemerals, payloads. Run it
as a program to write the file again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import coincurve
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

PATH = Path(__file__).with_name("e2e.json")
NAME = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"
KEYS = {"initiator": 0x11, "responder": 0x22, "server": 0x33}
EPHEMERALS = {"initiator": 0x44, "responder": 0x55}
TRANSPORT_IDS = {"initiator": 0x1234, "responder": 0x0201}
UPGRADE_SEQUENCES = {"initiator": 0xFFFF, "responder": 0x0102}
FWD, ACK, CLOSE = b"\x0a", b"\x0b", b"\x03"


def secret(fill: int) -> bytes:
    return bytes((fill,)) * 32


def public(fill: int) -> bytes:
    return coincurve.PrivateKey(secret(fill)).public_key.format()


def dh(ours: int, theirs: int) -> bytes:
    return coincurve.PrivateKey(secret(ours)).ecdh(public(theirs)) + b"\0"


def hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


def nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "little")


class Symmetric:
    """Noise's symmetric state, seen from both sides at once."""

    def __init__(self, prologue: bytes) -> None:
        self.hash = self.chaining_key = hashlib.sha256(NAME).digest()
        self.key = b""
        self.number = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, shared: bytes) -> None:
        self.chaining_key, self.key = hkdf(self.chaining_key, shared)
        self.number = 0

    def encrypt(self, payload: bytes) -> bytes:
        sealed = ChaCha20Poly1305(self.key).encrypt(nonce(self.number), payload, self.hash)
        self.number += 1
        self.mix_hash(sealed)
        return sealed


class Direction:
    """One sealed direction: its counter and its rolling hash."""

    def __init__(self, key: bytes, start: bytes, cipher: type[AESGCM | ChaCha20Poly1305]) -> None:
        self.cipher = cipher
        self.key = key
        self.start = self.rolling = start
        self.number = 0

    def seal(self, kind: bytes, inner: bytes) -> str:
        sealed = self.cipher(self.key).encrypt(nonce(self.number), inner, kind)
        self.number += 1
        return sealed.hex()

    def rekey(self) -> str:
        """The marker, and the next key: Noise's REKEY. The counter goes on."""
        marker = self.seal(ACK, b"")
        self.key = self.cipher(self.key).encrypt(nonce(2**64 - 1), bytes(32), b"")[:32]
        return marker

    def fwd(self, sequence: int, data: bytes, ack: bytes = b"") -> str:
        """A FWD, or the ``ack`` with its note and the same behind it."""
        sealed = self.seal(ACK if ack else FWD, ack + sequence.to_bytes(2, "big") + data)
        self.rolling = hashlib.sha256(self.rolling + bytes.fromhex(sealed)[-16:]).digest()
        return sealed


def tlv(kind: int, value: bytes) -> bytes:
    return bytes((kind,)) + len(value).to_bytes(2, "big") + value


def padded(values: bytes, size: int) -> bytes:
    return values + tlv(6, bytes(size - len(values) - 3))


def session(
    first_payload: bytes, second_payload: bytes, cipher: type[AESGCM | ChaCha20Poly1305] = ChaCha20Poly1305
) -> dict[str, Any]:
    """One handshake and a short conversation under its keys."""
    prologue = b"dmsg/0.1 e2e" + b"".join(public(fill) for fill in KEYS.values())
    state = Symmetric(prologue)
    state.mix_hash(public(KEYS["initiator"]))
    state.mix_hash(public(KEYS["responder"]))
    first = public(EPHEMERALS["initiator"])
    state.mix_hash(first)
    state.mix_key(dh(EPHEMERALS["initiator"], KEYS["responder"]))  # es
    state.mix_key(dh(KEYS["initiator"], KEYS["responder"]))  # ss
    first += state.encrypt(first_payload)
    second = public(EPHEMERALS["responder"])
    state.mix_hash(second)
    state.mix_key(dh(EPHEMERALS["responder"], EPHEMERALS["initiator"]))  # ee
    state.mix_key(dh(EPHEMERALS["responder"], KEYS["initiator"]))  # se
    second += state.encrypt(second_payload)
    keys = hkdf(state.chaining_key, b"")
    out = Direction(keys[0], hashlib.sha256(state.hash + b"\x00").digest(), cipher)
    back = Direction(keys[1], hashlib.sha256(state.hash + b"\x01").digest(), cipher)
    frames = {
        "initiator_ack_nothing_yet": out.seal(ACK, b"\xff\xff" + back.start[:4]),
        "initiator_fwd_0": out.fwd(0, b"hello"),
        "initiator_fwd_1": out.fwd(1, b"dmsg"),
        "initiator_end_of_stream": out.fwd(2, b""),
        "responder_ack_2": back.seal(ACK, b"\x00\x02" + out.rolling[:4]),
        "responder_fwd_0": back.fwd(0, bytes(range(256))),
        "responder_ack_2_and_fwd_1": back.fwd(1, b"with an ACK", b"\x00\x02" + out.rolling[:4] + b"\x00"),
        "responder_ack_2_not_taken": back.seal(ACK, b"\x00\x02" + out.rolling[:4] + b"\x01"),
        "responder_rekey": back.rekey(),
        "responder_fwd_2": back.fwd(2, b"under the next key"),
        "responder_close_refused": "01" + back.seal(CLOSE, b"\x01"),
    }
    return {
        "prologue": prologue.hex(),
        "payload_1": first_payload.hex(),
        "kk1": first.hex(),
        "payload_2": second_payload.hex(),
        "kk2": second.hex(),
        "handshake_hash": state.hash.hex(),
        "initiator_to_responder_key": keys[0].hex(),
        "responder_to_initiator_key": keys[1].hex(),
        "responder_to_initiator_key_after_rekey": back.key.hex(),
        "initiator_to_responder_hash_0": out.start.hex(),
        "responder_to_initiator_hash_0": back.start.hex(),
        "token": hmac.digest(state.hash, b"resume", "sha256")[:16].hex(),
        "frames": frames,
    }


def carry(one: dict[str, Any]) -> dict[str, Any]:
    """How the two messages travel with each carrier."""
    ends = public(KEYS["initiator"]) + public(KEYS["responder"])
    magic = hashlib.sha256(b"dmsg/0.1 e2e upgrade").digest()[:16]
    kk1, kk2 = bytes.fromhex(one["kk1"]), bytes.fromhex(one["kk2"])
    first, second = (UPGRADE_SEQUENCES[side].to_bytes(2, "big") for side in ("initiator", "responder"))
    return {
        "A": {"request_payload": (ends + kk1).hex(), "accept_payload": (ends + kk2).hex()},
        "B": {
            "magic": magic.hex(),
            "request_payload": ends.hex(),
            "accept_payload": ends.hex(),
            "initiator_fwd_payload": (first + magic + kk1).hex(),
            "responder_fwd_payload": (second + magic + kk2).hex(),
        },
    }


def make() -> dict[str, Any]:
    """All vectors."""
    version = tlv(1, b"0.1.0")
    aes = tlv(8, b"\x01")
    plain = session(padded(version + tlv(2, b"web"), 320), padded(version, 64))
    token = bytes.fromhex(plain["token"])
    offered, answered = token + (1_000_000).to_bytes(8, "big"), token + (2**40).to_bytes(8, "big")
    limits = b"".join(number.to_bytes(4, "big") for number in (1_024, 200, 65_510))
    return {
        "keys": {name: {"secret": secret(fill).hex(), "public": public(fill).hex()} for name, fill in KEYS.items()},
        "ephemerals": {name: secret(fill).hex() for name, fill in EPHEMERALS.items()},
        "upgrade_sequences": UPGRADE_SEQUENCES,
        "transport_ids": TRANSPORT_IDS,
        "session": plain,
        "carriers": carry(plain),
        "aes_session": session(padded(version + aes + tlv(2, b"web"), 320), padded(version + aes, 64), AESGCM),
        "resumed_session": session(padded(version + tlv(4, offered), 320), padded(version + tlv(4, answered), 64)),
        "resume": {"initiator": offered.hex(), "responder": answered.hex()},
        "hop": {
            "client": version.hex(),
            "server": (version + tlv(3, limits)).hex(),
            "client_with_aes": (version + aes).hex(),
            "server_with_aes": (version + tlv(3, limits) + aes).hex(),
        },
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make(), indent=1) + "\n", "utf-8")
