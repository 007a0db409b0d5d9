"""Encryption from twin to twin."""

from __future__ import annotations

import coincurve
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import SecretKey
from dmsg.rmb.core.e2e import OVERHEAD_BYTES, EncryptionKey
from dmsg.rmb.core.errors import E2eError
from dmsg.rmb.core.keys import read_secret
from dmsg.rmb.core.limits import SHARED_KEYS
from dmsg.rmb.core.wire import parse_envelope

from .conftest import DERIVED, LIVE

SHARED = DERIVED["e2e/shared-and-cipher"]
ONE = EncryptionKey(bytes.fromhex(SHARED["sk1_hex"]))
TWO = EncryptionKey(read_secret(SHARED["sk2_mnemonic"]))
NONCE = bytes.fromhex(SHARED["nonce_hex"])
RECORDED = [one for one in LIVE["envelopes"] if one.get("receiver_seed")]


def test_the_derived_cipher():
    assert TWO.public_key.hex() == SHARED["pk2_compressed_hex"]
    shared = SecretKey(bytes.fromhex(SHARED["sk1_hex"])).shared_x(TWO.public_key)
    assert shared.hex() == SHARED["ecdh_x_hex"]
    cipher = ONE.encrypt(TWO.public_key, SHARED["plaintext"].encode(), NONCE)
    assert cipher.hex() == SHARED["cipher_hex"]
    assert TWO.decrypt(bytes.fromhex(SHARED["pk1_compressed_hex"]), cipher) == SHARED["plaintext"].encode()
    assert ONE.encrypt(TWO.public_key, b"", NONCE).hex() == DERIVED["e2e/empty"]["cipher_hex"]


@pytest.mark.parametrize("case", DERIVED["e2e/negative"]["cases"])
def test_what_is_no_cipher_and_no_key(case):
    with pytest.raises(E2eError) as caught:
        TWO.decrypt(bytes.fromhex(case.get("pk_hex", ONE.public_key.hex())), bytes.fromhex(case.get("cipher_hex", "")))
    assert caught.value.code == 106
    assert caught.value.text.startswith(case.get("error", case.get("error_prefix")))


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: one["name"])
def test_recorded_ciphers(one):
    envelope = parse_envelope(bytes.fromhex(one["hex"]))
    sender, receiver = (EncryptionKey(read_secret(one[f"{side}_seed"])) for side in ("sender", "receiver"))
    plain = receiver.decrypt(sender.public_key, envelope.cipher)
    assert plain.hex() == one.get("plain_hex", plain.hex())
    assert sender.encrypt(receiver.public_key, plain, envelope.cipher[:12]) == envelope.cipher


@given(st.binary(max_size=100), st.binary(min_size=12, max_size=12), st.integers(0, 1000))
def test_both_directions_and_a_changed_bit(data, nonce, bit):
    cipher = bytearray(ONE.encrypt(TWO.public_key, data, nonce))
    assert len(cipher) == len(data) + OVERHEAD_BYTES
    assert ONE.decrypt(TWO.public_key, bytes(cipher)) == data == TWO.decrypt(ONE.public_key, bytes(cipher))
    cipher[bit // 8 % len(cipher)] ^= 1 << bit % 8
    with pytest.raises(E2eError):
        TWO.decrypt(ONE.public_key, bytes(cipher))


@given(st.binary(max_size=70))
def test_keys_in_the_registry_may_be_anything(their_pk):
    with pytest.raises(E2eError):
        ONE.encrypt(their_pk, b"", NONCE)


def test_an_uncompressed_key_is_the_same_key():
    whole = coincurve.PublicKey(TWO.public_key).format(compressed=False)
    assert ONE.encrypt(whole, b"x", NONCE) == ONE.encrypt(TWO.public_key, b"x", NONCE)


@pytest.mark.parametrize("secret", [bytes(31), bytes(32), b"\xff" * 32])
def test_what_is_no_secret_key(secret):
    with pytest.raises(E2eError):
        EncryptionKey(secret)


def test_the_shared_point_is_that_of_another_library():
    """Also where its X coordinate begins with zeros."""
    with_zero = 0
    for number in range(1, 600):
        theirs = ec.derive_private_key(number, ec.SECP256K1())
        pk = SecretKey(number.to_bytes(32, "big")).public_key.raw
        ours = SecretKey(b"\x05" * 32)
        shared = ours.shared_x(pk)
        with_zero += shared[0] == 0
        if number < 10 or shared[0] == 0:
            key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), ours.public_key.raw)
            assert theirs.exchange(ec.ECDH(), key) == shared
    assert with_zero
    with pytest.raises(InvalidKey):
        ours.shared_x(bytes(33))


def test_shared_keys_that_are_kept_are_bounded():
    key = EncryptionKey(b"\x01" * 32)
    point = coincurve.PrivateKey(b"\x01" * 32).public_key
    for _ in range(SHARED_KEYS + 2):
        point = coincurve.PublicKey.combine_keys([point, coincurve.PublicKey(TWO.public_key)])
        key.encrypt(point.format(), b"", NONCE)
    assert len(key._shared) == SHARED_KEYS
