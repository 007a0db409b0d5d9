"""Public keys, signatures and secret keys from bytes."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import PUBLIC_KEY_BYTES, SECRET_KEY_BYTES, SIGNATURE_BYTES, PublicKey, SecretKey, recover
from fuzz.oracles import KEYS, outcome

_OURS = KEYS[0]


def one_input(data: bytes) -> None:
    """The input is a key, a signature over a fixed text, and a text that is signed."""
    kind, key = outcome(lambda: PublicKey(data), InvalidKey)
    assert kind == "error" or (
        len(data) == PUBLIC_KEY_BYTES and bytes(key) == data and PublicKey.parse(str(key)) == key
    )
    assert outcome(lambda: _OURS.ecdh(data), InvalidKey)[0] == kind
    kind, secret = outcome(lambda: SecretKey(data), InvalidKey)
    if kind == "value":
        assert len(data) == SECRET_KEY_BYTES and bytes(secret) == data
        assert secret.ecdh(_OURS.public_key.raw) == _OURS.ecdh(secret.public_key.raw)
        assert data.hex() not in repr(secret)
    kind, signer = outcome(lambda: recover(data, b"text"), InvalidSignature)
    if kind == "value":
        assert len(data) == SIGNATURE_BYTES
        signer.verify(data, b"text")
        assert outcome(lambda: signer.verify(data, b"another"), InvalidSignature)[0] == "error"
        high = bytearray(data)
        high[32] |= 0x80
        assert outcome(lambda: recover(bytes(high), b"text"), InvalidSignature)[0] == "error"
    signature = _OURS.sign(data)
    _OURS.public_key.verify(signature, data)
    assert outcome(lambda: _OURS.public_key.verify(signature, data + b"\0"), InvalidSignature)[0] == "error"


def seeds() -> Iterator[bytes]:
    """Good ones and their borders: the order of the group, a point at infinity, x over the prime."""
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    yield _OURS.public_key.raw
    yield b"\x04" + _OURS.public_key.raw[1:]
    yield b"\x02" + b"\xff" * 32
    yield b"\x02" + bytes(32)
    yield _OURS.sign(b"text")
    yield bytes(65)
    for number in (0, 1, order - 1, order, order // 2):
        yield number.to_bytes(32, "big")
