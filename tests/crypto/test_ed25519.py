"""ed25519."""

from __future__ import annotations

from itertools import count

import pytest
from cryptography.exceptions import InvalidSignature as RefusedByLibrary
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto.ed25519 import _WEAK_KEYS, SigningKey, verify
from dmsg.crypto.errors import InvalidKey, InvalidSignature


def test_the_signature_of_rfc_8032():
    key = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public_key.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


@given(st.binary(max_size=200), st.integers(0, 63), st.integers(0, 7))
def test_a_changed_bit_is_noticed(message, byte, bit):
    key = SigningKey(bytes(32))
    signature = bytearray(key.sign(message))
    verify(key.public_key, message, bytes(signature))
    signature[byte] ^= 1 << bit
    with pytest.raises(InvalidSignature):
        verify(key.public_key, message, bytes(signature))


@pytest.mark.parametrize(
    ("public_key", "signature"), [(bytes(31), bytes(64)), (bytes(32), bytes(63)), (b"\xff" * 32, bytes(64))]
)
def test_what_is_no_key_and_no_signature(public_key, signature):
    with pytest.raises(InvalidSignature):
        verify(public_key, b"", signature)


def test_a_key_needs_its_seed_and_does_not_show_it():
    with pytest.raises(InvalidKey):
        SigningKey(bytes(31))
    key = SigningKey(b"\x01" * 32)
    assert key.public_key.hex() in repr(key) and "01" * 32 not in repr(key)


@pytest.mark.parametrize("sign", [0, 0x80])
@pytest.mark.parametrize("key", sorted(_WEAK_KEYS), ids=bytes.hex)
def test_nobody_signs_for_a_key_of_small_order(key, sign):
    """The library takes a signature that was made without a secret, for one message of eight at the latest."""
    key = key[:31] + bytes((key[31] | sign,))
    neutral = b"\x01" + bytes(31)
    for number in count():
        message = number.to_bytes(4, "big")
        signature = neutral + bytes(32)
        with pytest.raises(InvalidSignature):
            verify(key, message, signature)
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except RefusedByLibrary:
            assert number < 500
            continue
        break
