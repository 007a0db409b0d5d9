"""What encrypts a channel, against Go's handshakes and transport messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto.aead import NONCE_LIMIT
from dmsg.crypto.errors import CryptoError, NonceExhausted
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.crypto.noise import HandshakeResult, NoiseHandshake
from dmsg.messaging.core.channel_cipher import (
    ChannelCipher,
    CountedCipher,
    NumberedCipher,
    channel_cipher,
    channel_handshake,
)
from dmsg.messaging.core.dialect import DIALECTS, V0, V4, V5, Dialect

KEY = bytes(range(32))
dialects = st.sampled_from(list(DIALECTS.values()))


def handshake(made: dict[str, Any], role: str) -> NoiseHandshake:
    other = "responder" if role == "initiator" else "initiator"
    ephemeral = bytes.fromhex(made[f"{role}_ephemeral_sk"])
    return channel_handshake(
        SecretKey(bytes.fromhex(made[f"{role}_static_sk"])),
        PublicKey.parse(made[f"{other}_static_pk"]),
        initiator=role == "initiator",
        random=lambda size: ephemeral,
    )


def test_gos_handshake_in_both_roles(vectors: dict[str, Any]) -> None:
    made = vectors["noise_kk"]
    caller, callee = handshake(made, "initiator"), handshake(made, "responder")
    first = caller.write_message()
    assert first.hex() == made["message1"]
    callee.read_message(first)
    second = callee.write_message()
    assert second.hex() == made["message2"]
    caller.read_message(second)
    for role, side in (("initiator", caller), ("responder", callee)):
        assert isinstance(side.result, HandshakeResult)
        assert side.result.send_key.hex() == made[f"{role}_send_key"]
        assert side.result.handshake_hash.hex() == made["handshake_hash"]


def test_first_messages_that_go_was_given(vectors: dict[str, Any]) -> None:
    """Three of them end Go's process; here all but the good one are refused."""
    made = vectors["noise_kk"]
    outcomes = {}
    for case in made["message1_cases"]:
        try:
            handshake(made, "responder").read_message(bytes.fromhex(case["message1"]))
            outcomes[case["case"]] = "accepted"
        except CryptoError:
            outcomes[case["case"]] = "rejected"
    wanted = {case["case"]: case["outcome"] for case in made["message1_cases"]}
    assert "panic" in wanted.values()
    assert outcomes == {name: "rejected" if how == "panic" else how for name, how in wanted.items()}


@pytest.mark.parametrize("dialect", [V0, V4, V5], ids=lambda one: one.name)
@pytest.mark.parametrize("direction", ["initiator_to_responder", "responder_to_initiator"])
def test_gos_transport_messages(dialect: Dialect, direction: str, vectors: dict[str, Any]) -> None:
    made = vectors["noise_kk"] if dialect is V0 else vectors["variants"][f"{dialect.name}_noise"]["noise_kk"]
    key = bytes.fromhex(made[f"{direction.partition('_')[0]}_send_key"])
    sealer, opener = channel_cipher(key, dialect), channel_cipher(key, dialect)
    assert len(made[direction]) == 25
    for message in made[direction]:
        plaintext, ciphertext = bytes.fromhex(message["plaintext"]), bytes.fromhex(message["ciphertext"])
        assert sealer.seal(plaintext) == ciphertext
        assert len(ciphertext) == len(plaintext) + sealer.overhead_bytes
        assert opener.open(ciphertext) == plaintext


@given(dialects, st.lists(st.binary(max_size=30), max_size=40))
def test_what_is_sealed_opens(dialect: Dialect, plaintexts: list[bytes]) -> None:
    sealer, opener = channel_cipher(KEY, dialect), channel_cipher(KEY, dialect)
    assert [opener.open(sealer.seal(one)) for one in plaintexts] == plaintexts


def damage(ciphertexts: list[bytes], how: str, at: int) -> list[bytes]:
    if how == "dropped":
        return ciphertexts[:at] + ciphertexts[at + 1 :]
    if how == "repeated":
        return [*ciphertexts[: at + 1], ciphertexts[at]]
    if how == "swapped":
        return [*ciphertexts[:at], ciphertexts[at + 1], ciphertexts[at]]
    if how == "altered in front":
        return [*ciphertexts[:at], bytes((ciphertexts[at][0] ^ 1,)) + ciphertexts[at][1:], *ciphertexts[at + 1 :]]
    return [*ciphertexts[:at], ciphertexts[at][:-1] + bytes((ciphertexts[at][-1] ^ 1,)), *ciphertexts[at + 1 :]]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("how", ["dropped", "repeated", "swapped", "altered", "altered in front"])
@pytest.mark.parametrize("at", [0, 8, 9, 10, 19])
def test_what_was_tampered_with_does_not_open(dialect: Dialect, how: str, at: int) -> None:
    """Go's readers of v5 take repeated messages."""
    sealer, opener = channel_cipher(KEY, dialect), channel_cipher(KEY, dialect)
    ciphertexts = [sealer.seal(bytes((number,))) for number in range(22)]
    taken = []
    with pytest.raises(CryptoError):
        for ciphertext in damage(ciphertexts, how, at):
            taken.append(opener.open(ciphertext))
    assert taken == [bytes((number,)) for number in range(len(taken))]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("size", [0, 1, 3, 4, 15, 16, 19, 20])
def test_what_is_too_short_does_not_open(dialect: Dialect, size: int) -> None:
    with pytest.raises(CryptoError):
        channel_cipher(KEY, dialect).open(bytes(size))


def exhausted(cipher: Any, at: int) -> ChannelCipher:
    cipher._state.nonce = at
    result: ChannelCipher = cipher
    return result


def test_numbers_are_used_once() -> None:
    cipher = exhausted(NumberedCipher(KEY), 2**32 - 1)
    assert cipher.seal(b"last")[:4] == b"\xff" * 4
    with pytest.raises(NonceExhausted):
        cipher.seal(b"")


def test_counted_nonces_are_used_once() -> None:
    with pytest.raises(NonceExhausted):
        exhausted(CountedCipher(KEY, 10), NONCE_LIMIT).seal(b"")


def test_dialects_are_found_by_name() -> None:
    assert [(49 + d.own_ids, d.acks) for d in map(DIALECTS.get, ("v0", "seed", "v2", "v3", "v5")) if d] == [
        (49, True),
        (49, False),
        (50, True),
        (50, False),
        (50, False),
    ]
