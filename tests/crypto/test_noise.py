"""Handshakes: what they agree on, what they carry, and that nothing but a typed error comes out of a bad one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.errors import CryptoError, InvalidKey
from dmsg.crypto.keys import SecretKey
from dmsg.crypto.noise import XK_MESSAGE_BYTES, KnownPeer, NoiseHandshake
from dmsg.errors import LocalProtocolError

ALICE, BOB, CAROL = (SecretKey(hashlib.sha256(name).digest()) for name in (b"alice", b"bob", b"carol"))
PATTERNS = ("XK", "KK")


def pair(
    pattern: Any, *, prologues: tuple[bytes, bytes] = (b"", b""), random: Any = os.urandom
) -> tuple[NoiseHandshake, NoiseHandshake]:
    return (
        NoiseHandshake(
            pattern,
            initiator=True,
            static=ALICE,
            remote_static=BOB.public_key.raw,
            prologue=prologues[0],
            random=random,
        ),
        NoiseHandshake(
            pattern,
            initiator=False,
            static=BOB,
            remote_static=ALICE.public_key.raw if pattern == "KK" else None,
            prologue=prologues[1],
            random=random,
        ),
    )


def run(one: NoiseHandshake, other: NoiseHandshake, payloads: list[bytes]) -> list[bytes]:
    """Shake hands with ``payloads`` in the messages; gives the payloads that came out."""
    received = []
    writer, reader = one, other
    for payload in payloads:
        received.append(reader.read_message(writer.write_message(payload)))
        writer, reader = reader, writer
    return received


@pytest.mark.parametrize("pattern", PATTERNS)
@given(payloads=st.lists(st.binary(max_size=100), min_size=3, max_size=3))
@settings(max_examples=20)
def test_both_sides_agree_and_payloads_arrive(pattern: str, payloads: list[bytes]) -> None:
    initiator, responder = pair(pattern)
    payloads = payloads[: 3 if pattern == "XK" else 2]
    assert run(initiator, responder, payloads) == payloads
    ours, theirs = initiator.result, responder.result
    assert ours is not None and theirs is not None
    assert (ours.send_key, ours.receive_key) == (theirs.receive_key, theirs.send_key)
    assert ours.send_key != ours.receive_key
    assert ours.handshake_hash == theirs.handshake_hash
    assert (ours.remote_static, theirs.remote_static) == (BOB.public_key.raw, ALICE.public_key.raw)


def test_sizes_of_messages_without_payload() -> None:
    initiator, responder = pair("XK")
    first = initiator.write_message()
    responder.read_message(first)
    second = responder.write_message()
    initiator.read_message(second)
    assert tuple(map(len, (first, second, initiator.write_message()))) == XK_MESSAGE_BYTES


def test_each_handshake_has_keys_of_its_own() -> None:
    results = set()
    for _ in range(3):
        initiator, responder = pair("XK")
        run(initiator, responder, [b""] * 3)
        assert initiator.result is not None
        results.add((initiator.result.send_key, initiator.result.handshake_hash))
    assert len(results) == 3


# --- known peers -----------------------------------------------------------------------------------------------------


def known_pair(random: Any = os.urandom) -> Callable[[], tuple[NoiseHandshake, NoiseHandshake]]:
    """Gives both sides of a new KK handshake each time it is called; both know the other from the time before."""
    bob, alice = KnownPeer(ALICE, BOB.public_key.raw), KnownPeer(BOB, ALICE.public_key.raw)
    return lambda: (
        NoiseHandshake("KK", initiator=True, static=ALICE, remote_static=bob, random=random),
        NoiseHandshake("KK", initiator=False, static=BOB, remote_static=alice, random=random),
    )


def fixed(size: int) -> bytes:
    return hashlib.sha256(b"fixed").digest()[:size]


def test_what_is_kept_of_a_peer_shows_in_no_message_and_no_key() -> None:
    make = known_pair(fixed)
    for _ in range(3):
        sides = [make(), pair("KK", random=fixed)]
        messages = [initiator.write_message(b"list 1") for initiator, _ in sides]
        answers = []
        for (_, responder), message in zip(sides, messages, strict=True):
            responder.read_message(message)
            answers.append(responder.write_message(b"list 2"))
        assert messages[0] == messages[1] and answers[0] == answers[1]
        for (initiator, _), answer in zip(sides, answers, strict=True):
            assert initiator.read_message(answer) == b"list 2"
        assert sides[0][0].result == sides[1][0].result and sides[0][1].result == sides[1][1].result


def test_no_ephemeral_key_is_used_twice_however_well_a_peer_is_known() -> None:
    make = known_pair()
    ephemeral, results = set(), set()
    for _ in range(50):
        initiator, responder = make()
        message = initiator.write_message()
        responder.read_message(message)
        answer = responder.write_message()
        initiator.read_message(answer)
        assert initiator.result is not None
        ephemeral |= {message[:33], answer[:33]}
        results |= {initiator.result.send_key, initiator.result.receive_key, initiator.result.handshake_hash}
    assert len(ephemeral) == 100 and len(results) == 150


def test_a_known_peer_is_the_only_one_who_can_answer() -> None:
    make = known_pair()
    run(*make(), [b"", b""])
    initiator, _ = make()
    thief = NoiseHandshake("KK", initiator=False, static=CAROL, remote_static=ALICE.public_key.raw)
    with pytest.raises(CryptoError):
        thief.read_message(initiator.write_message())
    _, responder = make()
    impostor = NoiseHandshake("KK", initiator=True, static=CAROL, remote_static=BOB.public_key.raw)
    with pytest.raises(CryptoError):
        responder.read_message(impostor.write_message())


def test_a_peer_that_is_no_point_is_never_known() -> None:
    bad = KnownPeer(ALICE, b"\x02" + b"\xff" * 32)
    for _ in range(2):
        with pytest.raises(CryptoError):
            NoiseHandshake("KK", initiator=True, static=ALICE, remote_static=bad).write_message()
    with pytest.raises(InvalidKey):
        KnownPeer(ALICE, b"\x02short")


def test_what_a_peer_shares_with_us_is_not_printed() -> None:
    known = KnownPeer(ALICE, BOB.public_key.raw)
    NoiseHandshake("KK", initiator=True, static=ALICE, remote_static=known).write_message()
    assert known.shared and known.shared.hex() not in repr(known)


def test_randomness_is_the_one_given() -> None:
    results = []
    for _ in range(2):
        initiator, responder = pair("XK", random=lambda size: hashlib.sha256(b"fixed").digest()[:size])
        run(initiator, responder, [b""] * 3)
        results.append(initiator.result)
    assert results[0] == results[1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_another_prologue_is_another_handshake(pattern: str) -> None:
    initiator, responder = pair(pattern, prologues=(b"here", b"there"))
    with pytest.raises(CryptoError):
        responder.read_message(initiator.write_message())


def test_kk_knows_who_speaks() -> None:
    initiator = NoiseHandshake("KK", initiator=True, static=CAROL, remote_static=BOB.public_key.raw)
    _, responder = pair("KK")
    with pytest.raises(CryptoError):
        responder.read_message(initiator.write_message())


@pytest.mark.parametrize("pattern", PATTERNS)
@given(data=st.binary(max_size=120), stage=st.integers(0, 2))
@settings(max_examples=60)
def test_any_message_at_any_stage_is_taken_or_a_crypto_error(pattern: str, data: bytes, stage: int) -> None:
    initiator, responder = pair(pattern)
    sides = [(initiator, responder), (responder, initiator), (initiator, responder)]
    sides = sides[: 3 if pattern == "XK" else 2]
    stage = min(stage, len(sides) - 1)
    for writer, reader in sides[:stage]:
        reader.read_message(writer.write_message())
    reader = sides[stage][1]
    with pytest.raises(CryptoError):
        reader.read_message(data)
    assert reader.result is None


@pytest.mark.parametrize("stage", [0, 1, 2])
@given(data=st.data())
@settings(max_examples=40)
def test_any_changed_bit_is_noticed(stage: int, data: st.DataObject) -> None:
    initiator, responder = pair("XK")
    sides = [(initiator, responder), (responder, initiator), (initiator, responder)]
    for writer, reader in sides[:stage]:
        reader.read_message(writer.write_message())
    writer, reader = sides[stage]
    message = bytearray(writer.write_message(b"payload"))
    bit = data.draw(st.integers(0, len(message) * 8 - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CryptoError):
        reader.read_message(bytes(message))


def test_dead_after_an_error_and_over_after_the_end() -> None:
    _, responder = pair("XK")
    with pytest.raises(CryptoError):
        responder.read_message(b"")
    with pytest.raises(LocalProtocolError):
        responder.read_message(b"")
    with pytest.raises(LocalProtocolError):
        responder.write_message()
    initiator, responder = pair("KK")
    run(initiator, responder, [b"", b""])
    for side in (initiator, responder):
        with pytest.raises(LocalProtocolError):
            side.write_message()


def test_speaking_out_of_turn_is_an_error_of_ours() -> None:
    initiator, responder = pair("XK")
    with pytest.raises(LocalProtocolError):
        initiator.read_message(b"")
    first = initiator.write_message()
    with pytest.raises(LocalProtocolError):
        initiator.write_message()
    with pytest.raises(LocalProtocolError):
        responder.write_message()
    responder.read_message(first)
    assert len(initiator.read_message(responder.write_message(b"goes on"))) == len(b"goes on")


def test_a_server_key_that_is_no_point_fails_when_it_is_used() -> None:
    bad = b"\x02" + b"\xff" * 32
    initiator = NoiseHandshake("XK", initiator=True, static=ALICE, remote_static=bad)
    with pytest.raises(CryptoError):
        initiator.write_message()
    with pytest.raises(InvalidKey):
        NoiseHandshake("XK", initiator=True, static=ALICE, remote_static=b"\x02short")


def test_an_initiator_key_that_is_no_point_is_noticed_by_the_responder() -> None:
    """A static key of message 3 is encrypted, so a bad one arrives only in a correct handshake."""
    initiator, responder = pair("XK")
    bad = b"\x02" + b"\xff" * 32
    initiator._state.s.public_bytes = bad
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    with pytest.raises(CryptoError):
        responder.read_message(initiator.write_message())


def test_nothing_secret_is_printed() -> None:
    initiator, responder = pair("KK")
    run(initiator, responder, [b"", b""])
    result = initiator.result
    assert result is not None
    text = repr(result)
    assert result.send_key.hex() not in text and result.receive_key.hex() not in text
    assert str(BOB.public_key) in text
