"""The ciphers behind records, against published test vectors (RFC 8439, NIST's of GCM) and what must not open."""

from __future__ import annotations

import pytest

from dmsg.crypto.aead import NONCE_LIMIT, TAG_BYTES, Cipher, DoesNotOpen, next_key, nonce, opener, pair, sealer

# RFC 8439, section 2.8.2
KEY = bytes(range(0x80, 0xA0))
NONCE = bytes.fromhex("070000004041424344454647")
ASSOCIATED = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
PLAIN = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it."
TAG = bytes.fromhex("1ae10b594f09e26a7e902ecbd0600691")


def test_published_vector():
    sealed = sealer(KEY)(NONCE, PLAIN, ASSOCIATED)
    assert sealed[:8].hex() == "d31a8d34648e60db"
    assert sealed[-16:] == TAG
    assert opener(KEY)(NONCE, sealed, ASSOCIATED) == PLAIN


def test_what_was_altered_does_not_open():
    sealed = sealer(KEY)(NONCE, PLAIN, None)
    opens = opener(KEY)
    assert opens(NONCE, sealed, None) == PLAIN
    for number, data, associated in (
        (NONCE, sealed[:-1] + bytes([sealed[-1] ^ 1]), None),
        (NONCE, sealed[:-1], None),
        (NONCE, b"", None),
        (NONCE, sealed, b"x"),
        (bytes(12), sealed, None),
    ):
        with pytest.raises(DoesNotOpen):
            opens(number, data, associated)
    with pytest.raises(DoesNotOpen):
        opener(bytes(32))(NONCE, sealed, None)


def test_nonces_are_four_zeros_and_the_counter():
    assert nonce(0) == bytes(12)
    assert nonce(0x0102).hex() == "000000000201000000000000"
    assert nonce(NONCE_LIMIT) == bytes(4) + b"\xff" * 8


def test_published_vector_of_aes():
    """Test case 14 of the paper GCM comes from: AES-256, all zeros."""
    seal, opens = pair(bytes(32), Cipher.AES)
    sealed = seal(bytes(12), bytes(16), b"")
    assert sealed.hex() == "cea7403d4d606b6e074ec5d3baf39d18" + "d0d1c8a799996bf0265b98b5d48ab919"
    assert opens(bytes(12), sealed, b"") == bytes(16)


@pytest.mark.parametrize("cipher", Cipher)
def test_the_next_key_is_noises_rekey(cipher: Cipher):
    """The first 32 bytes of 32 zeros, sealed with the nonce that no message has."""
    seal, _ = pair(KEY, cipher)
    assert next_key(seal) == seal(nonce(NONCE_LIMIT), bytes(32), b"")[:32] != KEY


@pytest.mark.parametrize("cipher", Cipher)
def test_the_functions_of_a_pair_belong_together(cipher: Cipher):
    seal, opens = pair(KEY, cipher)
    sealed = seal(NONCE, PLAIN, ASSOCIATED)
    assert len(sealed) == len(PLAIN) + TAG_BYTES
    assert opens(NONCE, sealed, ASSOCIATED) == PLAIN
