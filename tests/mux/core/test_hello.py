"""What client and server tell each other in the handshake of a connection (:ref:`spec-hello`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.mux.core.hello import AnnouncedLimits, Capabilities, hello_payload, read_hello
from dmsg.mux.core.tlv import Tlv, encode_tlvs

LIMITS = AnnouncedLimits(1_024, 200, 65_510)
#: Later generations of the reference give payloads of these lengths a meaning.
TAKEN_LENGTHS = {1_184, 1_088}


def test_payload_vectors() -> None:
    vectors = json.loads((Path(__file__).parents[2] / "vectors" / "e2e.json").read_text("utf-8"))["hop"]
    assert hello_payload().hex() == vectors["client"]
    assert hello_payload(LIMITS).hex() == vectors["server"]
    assert hello_payload(aes=True).hex() == vectors["client_with_aes"]
    assert hello_payload(LIMITS, aes=True).hex() == vectors["server_with_aes"]


def test_both_sides_are_understood() -> None:
    assert read_hello(hello_payload()) == Capabilities(True, None)
    assert read_hello(hello_payload(LIMITS)) == Capabilities(True, LIMITS)
    assert len(hello_payload()) not in TAKEN_LENGTHS and len(hello_payload(LIMITS)) not in TAKEN_LENGTHS


def test_a_server_says_how_large_a_window_may_be() -> None:
    assert read_hello(hello_payload(LIMITS, 32 << 20)) == Capabilities(True, LIMITS, 32 << 20)
    assert len(hello_payload(LIMITS, 32 << 20)) not in TAKEN_LENGTHS
    version = {Tlv.VERSION: b"0.1.0"}
    assert read_hello(encode_tlvs({**version, Tlv.WINDOW: bytes(3) + b"\x01\x00"})) == Capabilities(True)


def test_a_base_peer_says_nothing() -> None:
    assert read_hello(b"") == Capabilities(False, None)


@given(st.binary(max_size=1_300))
def test_any_other_payload_is_a_base_peers(payload: bytes) -> None:
    read = read_hello(payload)
    assert read == Capabilities() or payload.startswith(b"\x01") or b"\x01" in payload


@pytest.mark.parametrize(
    "payload",
    [
        encode_tlvs({Tlv.VERSION: b"0.0.1"}),
        encode_tlvs({Tlv.VERSION: b"0.0.1", Tlv.LIMITS: bytes(12)}),
        encode_tlvs({Tlv.LIMITS: bytes(12)}),
        encode_tlvs({Tlv.VERSION: b"\xff.\xff"}),
        encode_tlvs({Tlv.VERSION: b""}),
        hello_payload()[:-1],
        hello_payload() * 2,
    ],
    ids=["base", "base with limits", "limits only", "no text", "empty", "cut", "twice"],
)
def test_without_a_version_that_promises_it_there_is_no_extension(payload: bytes) -> None:
    assert read_hello(payload) == Capabilities()


@pytest.mark.parametrize("raw", [b"", bytes(11), bytes(13)])
def test_limits_of_another_length_are_none(raw: bytes) -> None:
    assert read_hello(encode_tlvs({Tlv.VERSION: b"0.1.0", Tlv.LIMITS: raw})) == Capabilities(True, None)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_limits_are_cut_to_what_32_bits_hold(transports: int, requests: int, payload: int) -> None:
    limits = read_hello(hello_payload(AnnouncedLimits(transports, requests, payload))).limits
    assert limits == AnnouncedLimits(*(min(number, 2**32 - 1) for number in (transports, requests, payload)))
