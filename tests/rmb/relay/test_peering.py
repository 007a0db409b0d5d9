"""The header by which relays know each other: its bytes, what it is good for, and everything it is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto import ed25519
from dmsg.errors import ConfigError
from dmsg.eventlog.reasons import Reason
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.relay.errors import NotTrusted
from dmsg.rmb.relay.peering import (
    Body,
    SignedPost,
    Signer,
    Verifier,
    join_envelopes,
    join_statuses,
    parse_trust,
    split_envelopes,
    split_statuses,
)

NOW = 1_700_000_000.25
KEY = ed25519.SigningKey(bytes(range(32)))
OTHER = ed25519.SigningKey(bytes(32))


class Nonces:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, size: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(size, "big")


@pytest.fixture
def signer() -> Signer:
    return Signer("A.example", KEY, Nonces())


@pytest.fixture
def verifier() -> Verifier:
    return Verifier(["B.example", "b2.example:444"], {"A.example": KEY.public_key})


def refusal(verifier: Verifier, header: bytes | None, body: bytes = b"body", now: float = NOW) -> Reason:
    with pytest.raises(NotTrusted) as caught:
        verifier.check(header, body, now)
    return caught.value.why


def test_the_bytes_of_a_header(signer: Signer) -> None:
    assert signer.header("B.example", Body.SEVERAL, b"body", NOW) == (
        b"1 a.example b.example 1700000000250 0000000000000001 several "
        + KEY.sign(
            b"dmsg rmb relay post\n1 a.example b.example 1700000000250 0000000000000001 several\n"
            + bytes.fromhex("230d8358dc8e8890b4c58deeb62912ee2f20357ae92a5cc861b98e68fe31acb5")
        )
        .hex()
        .encode()
    )


def test_a_header_is_short(verifier: Verifier) -> None:
    """Its nonce is remembered."""
    for size, is_taken in ((350, True), (500, False)):
        header = Signer("a.example", KEY, lambda _, size=size: bytes(size)).header("b.example", Body.ONE, b"body", NOW)
        if is_taken:
            verifier.check(header, b"body", NOW)
        else:
            assert refusal(verifier, header) is Reason.NOT_SIGNED


@pytest.mark.parametrize("kind", Body)
def test_a_good_header_says_who_posts_what(signer: Signer, verifier: Verifier, kind: Body) -> None:
    header = signer.header("b.EXAMPLE", kind, b"body", NOW)
    assert verifier.check(header, b"body", NOW) == SignedPost("a.example", kind)
    header = signer.header("b2.example:444", kind, b"body", NOW)
    assert verifier.check(header, b"body", NOW) == SignedPost("a.example", kind)


def test_a_header_is_good_once(signer: Signer, verifier: Verifier) -> None:
    header = signer.header("b.example", Body.ONE, b"body", NOW)
    verifier.check(header, b"body", NOW)
    for later_s in (0, 1, 29.9):
        assert refusal(verifier, header, now=NOW + later_s) is Reason.REPLAYED
    assert refusal(verifier, header, now=NOW + 31) is Reason.TIME_IS_OFF
    verifier.check(signer.header("b.example", Body.ONE, b"body", NOW), b"body", NOW)


def test_a_header_made_ahead_of_time_cannot_come_again_when_it_is_forgotten(signer: Signer, verifier: Verifier) -> None:
    header = signer.header("b.example", Body.ONE, b"body", NOW + 29)
    verifier.check(header, b"body", NOW)
    for later_s in range(0, 100):
        if later_s % 20 == 0:  # others are taken meanwhile, which is when old ones are forgotten
            verifier.check(signer.header("b.example", Body.ONE, b"", NOW + later_s), b"", NOW + later_s)
        assert refusal(verifier, header, now=NOW + later_s) in {Reason.REPLAYED, Reason.TIME_IS_OFF}


@pytest.mark.parametrize(("off_s", "good"), [(-30, True), (30, True), (-30.1, False), (30.1, False), (-1e9, False)])
def test_a_header_of_another_time_is_refused(signer: Signer, verifier: Verifier, off_s: float, good: bool) -> None:
    header = signer.header("b.example", Body.ONE, b"body", NOW + off_s)
    if good:
        verifier.check(header, b"body", NOW)
    else:
        assert refusal(verifier, header) is Reason.TIME_IS_OFF


def test_a_header_is_for_its_body_only(signer: Signer, verifier: Verifier) -> None:
    assert refusal(verifier, signer.header("b.example", Body.ONE, b"body", NOW), b"Body") is Reason.NOT_SIGNED


def test_a_header_is_for_one_receiver_only(signer: Signer, verifier: Verifier) -> None:
    assert refusal(verifier, signer.header("c.example", Body.ONE, b"body", NOW)) is Reason.UNKNOWN_RELAY


def test_a_relay_that_is_not_known_is_refused(verifier: Verifier) -> None:
    header = Signer("c.example", KEY, Nonces()).header("b.example", Body.ONE, b"body", NOW)
    assert refusal(verifier, header) is Reason.UNKNOWN_RELAY


def test_a_relay_that_says_it_is_another_is_refused(verifier: Verifier) -> None:
    header = Signer("a.example", OTHER, Nonces()).header("b.example", Body.ONE, b"body", NOW)
    assert refusal(verifier, header) is Reason.NOT_SIGNED


@pytest.mark.parametrize("word", range(6))
def test_every_word_is_signed(signer: Signer, verifier: Verifier, word: int) -> None:
    words = signer.header("b.example", Body.ONE, b"body", NOW).split(b" ")
    words[word] = [b"2", b"a.examplf", b"b2.example:444", b"1700000000251", b"00", b"several"][word]
    refusal(verifier, b" ".join(words))


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"1",
        b"1 a.example b.example 1700000000250 00 one zz",
        b"1 a.example b.example 1700000000250 00 one " + b"00" * 63,
        b"1 a.example b.example 1700000000250 00 one " + "é".encode(),
        b"1 a.example b.example " + "²".encode() + b" 00 one " + b"00" * 64,
        b"1 a.example b.example " + b"9" * 700 + b" 00 one " + b"00" * 64,
        b"1 a.example b.example 1700000000250 00 one " + b"00" * 64 + b" more",
        b"x" * 100_000,
    ],
)
def test_what_is_no_header_is_refused(verifier: Verifier, header: bytes | None) -> None:
    refusal(verifier, header)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_as_a_header(header: bytes) -> None:
    refusal(Verifier(["b.example"], {"a.example": KEY.public_key}), header)


def test_more_posts_than_can_be_remembered_are_refused_until_the_first_are_forgotten(signer: Signer) -> None:
    verifier = Verifier(["b.example"], {"a.example": KEY.public_key, "c.example": OTHER.public_key}, remembered=3)
    for _ in range(3):
        verifier.check(signer.header("b.example", Body.ONE, b"", NOW), b"", NOW)
    assert refusal(verifier, signer.header("b.example", Body.ONE, b"", NOW), b"") is Reason.LIMITS_EXCEEDED
    third = Signer("c.example", OTHER, Nonces())
    verifier.check(third.header("b.example", Body.ONE, b"", NOW), b"", NOW)
    verifier.check(signer.header("b.example", Body.ONE, b"", NOW + 61), b"", NOW + 61)


def test_a_clock_that_is_set_back_does_not_have_posts_refused_until_it_is_there_again(signer: Signer) -> None:
    verifier = Verifier(["b.example"], {"a.example": KEY.public_key}, remembered=3)
    for _ in range(3):
        verifier.check(signer.header("b.example", Body.ONE, b"", NOW), b"", NOW)
    for before_s in (3_600, 3_590, 3_580):
        last = signer.header("b.example", Body.ONE, b"", NOW - before_s)
        verifier.check(last, b"", NOW - before_s)
        assert refusal(verifier, last, b"", now=NOW - before_s) is Reason.REPLAYED
    assert refusal(verifier, signer.header("b.example", Body.ONE, b"", NOW - 3_580), b"", now=NOW - 3_580) is (
        Reason.LIMITS_EXCEEDED
    )
    verifier.check(signer.header("b.example", Body.ONE, b"", NOW - 3_530), b"", NOW - 3_530)


# --- several envelopes ---------------------------------------------------------------------------------------------------


def test_the_bytes_of_several_envelopes_and_of_their_statuses() -> None:
    assert join_envelopes([b"ab", b"c"]).hex() == "0000000261620000000163"
    assert join_statuses([202, 404]).hex() == "00ca0194"


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_several_envelopes_come_apart_as_they_were_joined(envelopes: list[bytes]) -> None:
    body = join_envelopes(envelopes)
    assert split_envelopes(body, 20) == envelopes
    for end in range(1, len(body)):
        try:
            assert len(split_envelopes(body[:end], 20)) < len(envelopes)
        except MalformedEnvelope:
            continue


@pytest.mark.parametrize("body", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2a", join_envelopes([b"a"] * 4)])
def test_what_is_not_one_to_three_envelopes_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedEnvelope):
        split_envelopes(body, 3)


@given(st.lists(st.integers(0, 65535), max_size=20), st.integers(0, 20))
def test_statuses_are_those_of_all_envelopes_or_none(statuses: list[int], count: int) -> None:
    assert split_statuses(join_statuses(statuses), count) == (statuses if count == len(statuses) else None)


# --- whom to trust -------------------------------------------------------------------------------------------------------


def test_a_relay_to_trust_is_a_name_and_a_key() -> None:
    assert parse_trust(f"Relay.Example:8080={'ab' * 32}") == ("relay.example:8080", b"\xab" * 32)


@pytest.mark.parametrize(
    "text", ["", "a.example", "=" + "ab" * 32, "a=" + "ab" * 31, "a=" + "zz" * 32, "a b=" + "ab" * 32]
)
def test_what_is_no_relay_to_trust_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_trust(text)
