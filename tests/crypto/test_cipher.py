"""The counted cipher of an end-to-end channel (:ref:`spec-sealed-frames`)."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto.aead import NONCE_LIMIT, TAG_BYTES
from dmsg.crypto.cipher import CipherState
from dmsg.crypto.errors import CryptoError, NonceExhausted

KEY = bytes(range(32))
plaintexts = st.lists(st.binary(max_size=40), min_size=1, max_size=8)


@given(plaintexts, st.binary(max_size=3))
def test_what_is_sealed_in_order_opens_in_order(wanted: list[bytes], associated: bytes) -> None:
    sender, receiver = CipherState(KEY), CipherState(KEY)
    sealed = [sender.seal(associated, plaintext) for plaintext in wanted]
    assert [len(box) - TAG_BYTES for box in sealed] == [len(plaintext) for plaintext in wanted]
    assert [receiver.open(associated, box) for box in sealed] == wanted
    assert sender.nonce == receiver.nonce == len(wanted)


def test_the_nonce_is_noises_counter() -> None:
    sender = CipherState(KEY, 258)
    box = sender.seal(b"ad", b"plain")
    assert ChaCha20Poly1305(KEY).decrypt(bytes.fromhex("000000000201000000000000"), box, b"ad") == b"plain"


@given(st.integers(0, 4), st.integers(0, 4))
def test_only_the_next_one_opens(sealed_at: int, opened_at: int) -> None:
    box = CipherState(KEY, sealed_at).seal(b"", b"x")
    receiver = CipherState(KEY, opened_at)
    if sealed_at == opened_at:
        assert receiver.open(b"", box) == b"x"
    else:
        with pytest.raises(CryptoError):
            receiver.open(b"", box)


@given(st.binary(max_size=20), st.data())
def test_any_altered_bit_is_noticed(plaintext: bytes, data: st.DataObject) -> None:
    box = bytearray(CipherState(KEY).seal(b"ad", plaintext))
    bit = data.draw(st.integers(0, 8 * len(box) - 1))
    box[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CryptoError):
        CipherState(KEY).open(b"ad", bytes(box))


@given(st.binary(max_size=15))
def test_less_than_a_tag_does_not_open(box: bytes) -> None:
    with pytest.raises(CryptoError):
        CipherState(KEY).open(b"", box)


@pytest.mark.parametrize("other", [b"", b"\x0b", b"\x0a\x0a"])
def test_the_associated_data_is_part_of_it(other: bytes) -> None:
    box = CipherState(KEY).seal(b"\x0a", b"x")
    with pytest.raises(CryptoError):
        CipherState(KEY).open(other, box)


def test_another_key_does_not_open() -> None:
    with pytest.raises(CryptoError):
        CipherState(bytes(32)).open(b"", CipherState(KEY).seal(b"", b"x"))


def test_a_failure_does_not_move_the_counter() -> None:
    receiver = CipherState(KEY)
    with pytest.raises(CryptoError):
        receiver.open(b"", bytes(20))
    assert receiver.nonce == 0


def test_no_nonce_is_used_twice_and_the_last_one_never() -> None:
    sender, receiver = CipherState(KEY, NONCE_LIMIT - 1), CipherState(KEY, NONCE_LIMIT - 1)
    box = sender.seal(b"", b"last")
    assert receiver.open(b"", box) == b"last"
    for _ in range(2):
        with pytest.raises(NonceExhausted):
            sender.seal(b"", b"one too many")
        with pytest.raises(NonceExhausted):
            receiver.open(b"", box)
    assert sender.nonce == receiver.nonce == NONCE_LIMIT == 2**64 - 1


def test_rekeying_is_noises_and_the_counter_goes_on() -> None:
    sender, receiver = CipherState(KEY, 7), CipherState(KEY, 7)
    following = ChaCha20Poly1305(KEY).encrypt(bytes(4) + b"\xff" * 8, bytes(32), b"")[:32]
    for state in (sender, receiver):
        state.rekey()
    box = sender.seal(b"ad", b"plain")
    assert ChaCha20Poly1305(following).decrypt(bytes(4) + bytes((7,)) + bytes(7), box, b"ad") == b"plain"
    assert receiver.open(b"ad", box) == b"plain"
    assert sender.nonce == 8


def test_after_rekeying_nothing_of_before_opens() -> None:
    sender, receiver = CipherState(KEY), CipherState(KEY)
    box = sender.seal(b"", b"before")
    receiver.rekey()
    with pytest.raises(CryptoError):
        receiver.open(b"", box)


@pytest.mark.parametrize("what", ["seal", "open"])
def test_an_erased_key_does_nothing_more(what: str) -> None:
    state = CipherState(KEY)
    box = CipherState(KEY).seal(b"", b"x")
    state.erase()
    with pytest.raises(NonceExhausted):
        getattr(state, what)(b"", box)
    state.nonce = 0
    with pytest.raises(NonceExhausted):
        getattr(state, what)(b"", box)


def test_an_erased_key_leads_to_no_other() -> None:
    state = CipherState(KEY)
    state.erase()
    with pytest.raises(NonceExhausted):
        state.rekey()
