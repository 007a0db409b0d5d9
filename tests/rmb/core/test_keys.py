"""The keys of twins."""

from __future__ import annotations

import pytest
import sr25519
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import BadSignature, InvalidSecret
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret, verify

from .conftest import DERIVED, LIVE

ACCOUNTS = [DERIVED[f"keys/{name}"] for name in ("0", "1", "go", "e2e-sk2")]


@pytest.mark.parametrize("one", ACCOUNTS, ids=lambda one: one["id"])
def test_keys_of_phrases(one):
    secret = read_secret(one["mnemonic"])
    assert secret.hex() == one["mini_secret_hex"] == one.get("literal_seed_hex", secret.hex())
    assert read_secret(f" 0x{secret.hex()}\n") == secret
    assert TwinKey(secret).account.hex() == one["sr25519_public_hex"]
    assert TwinKey(secret, KeyType.ED25519).account.hex() == one["ed25519_public_hex"]
    assert EncryptionKey(secret).public_key.hex() == one["secp256k1_pk_compressed_hex"]


def test_keys_of_the_development_phrase():
    one = DERIVED["keys/alice"]
    assert read_secret(one["dev_phrase"]).hex() == one["dev_mini_secret_hex"]
    seed = bytes.fromhex(one["ed25519_seed_hex"])
    assert TwinKey(seed, KeyType.ED25519).account.hex() == one["ed25519_public_hex"]


def test_recorded_keys():
    for one in LIVE["twins"]:
        secret = read_secret(one["seed"])
        assert TwinKey(secret, KeyType.ED25519).account.hex() == one["account"]
        assert EncryptionKey(secret).public_key.hex() == (one["pk"] or EncryptionKey(secret).public_key.hex())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "invalid words",
        "//Alice",
        "box stage neck cup core magic produce exercise happy rely vocal then",
        "neck stage box",
        "zzz " * 12,
        f"{ACCOUNTS[0]['mnemonic']}//Alice",
    ],
)
def test_what_is_no_phrase(text):
    with pytest.raises(InvalidSecret, match="invalid bip39 phrase"):
        read_secret(text)


@pytest.mark.parametrize("text", ["0xinvalidseed", "0x", "0x" + "00" * 31, "0x" + "00" * 33, "0x" + "00 " * 32])
def test_what_is_no_seed(text):
    with pytest.raises(InvalidSecret, match="invalid seed"):
        read_secret(text)


@pytest.mark.parametrize("kind", KeyType)
@given(message=st.binary(max_size=100), changed=st.integers(0, 64 * 8 - 1))
def test_signatures(kind, message, changed):
    key = TwinKey(b"\x07" * 32, kind)
    signature = bytearray(key.sign(message))
    assert len(signature) == 65 and signature[:1] == kind.letter
    verify(key.account, message, bytes(signature))
    signature[1 + changed // 8] ^= 1 << changed % 8
    with pytest.raises(BadSignature) as caught:
        verify(key.account, message, bytes(signature))
    assert caught.value.problem == f"{kind.value} signature verification failed"
    assert caught.value.code == 104


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=70))
def test_only_signatures_pass(account, signature):
    with pytest.raises(BadSignature):
        verify(account, b"message", signature)


def test_keys_do_not_show_their_secret():
    for kind in KeyType:
        key = TwinKey(b"\x07" * 32, kind)
        assert key.account.hex() in repr(key) and "07" * 32 not in repr(key)
    with pytest.raises(InvalidSecret):
        TwinKey(bytes(31))


def test_another_program_verifies_ours():
    key = TwinKey(b"\x07" * 32)
    assert sr25519.verify(key.sign(b"message")[1:], b"message", key.account)


@pytest.mark.parametrize("kind", KeyType)
def test_nobody_signs_for_the_account_of_zeros(kind):
    """A signature of sr25519 whose scalar is zero fits that account, by the library."""
    signature = bytes(63) + b"\x80"
    assert kind is KeyType.ED25519 or sr25519.verify(signature, b"message", bytes(32))
    with pytest.raises(BadSignature):
        verify(bytes(32), b"message", kind.letter + signature)
