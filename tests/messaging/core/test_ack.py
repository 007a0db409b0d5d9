"""Acknowledgements inside plaintexts: Go's exchange, bursts, and what is malformed."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.messaging.core.ack import ACKS_AT_ONCE, UNACKED_LIMIT, AckLayer
from dmsg.messaging.core.errors import ChannelEndReason, ChannelFault


def ack(number: int, data: bytes) -> bytes:
    return bytes((1, number)) + sha256(data).digest()


def payload(number: int, data: bytes) -> bytes:
    return bytes((0, number)) + data


def take(layer: AckLayer, plaintext: bytes) -> bytes:
    """Give a plaintext to a side whose application takes data at once."""
    data = layer.unwrap(plaintext)
    layer.consumed(len(data))
    return data


def test_gos_exchange(vectors: dict[str, Any]) -> None:
    """A: foo, bar and an empty payload; B answers the second one with a payload of its own."""
    sides = {"A": AckLayer(), "B": AckLayer()}
    say = [b"foo", None, b"bar", b"reply", None, b"", None]
    heard: list[tuple[str, bytes]] = []
    for made, data in zip(vectors["ack_layer"]["writes"], say, strict=True):
        other = "B" if made["from"] == "A" else "A"
        plaintext = sides[made["from"]].wrap(data)
        assert plaintext.hex() == made["bytes"]
        heard.append((other, take(sides[other], plaintext)))
    assert [one for one in heard if one[1]] == [("B", b"foo"), ("B", b"bar"), ("A", b"reply")]
    assert all(side.waiting_bytes is None and not side.has_due for side in sides.values())
    assert (sides["A"].acked_bytes, sides["B"].acked_bytes) == (6, 5)


def test_every_payload_of_a_burst_is_acknowledged() -> None:
    """Go acknowledges the last one only."""
    layer = AckLayer()
    for number in range(3):
        take(layer, payload(number, b"p%d" % number))
    assert layer.wrap(b"x") == b"".join(ack(number, b"p%d" % number) for number in range(3)) + payload(0, b"x")


def test_payloads_are_acknowledged_once_the_application_has_taken_them() -> None:
    layer = AckLayer()
    layer.unwrap(payload(0, b"abc"))
    layer.unwrap(payload(1, b""))
    layer.unwrap(payload(2, b"de"))
    assert not layer.has_due
    layer.consumed(2)
    assert not layer.has_due
    layer.consumed(1)
    assert layer.wrap(None) == ack(0, b"abc") + ack(1, b"")
    layer.consumed(2)
    assert layer.wrap(None) == ack(2, b"de")


def test_acknowledgements_beyond_those_of_one_plaintext_follow() -> None:
    layer = AckLayer()
    for number in range(ACKS_AT_ONCE + 1):
        layer.unwrap(payload(number, b""))
    assert layer.acks_bytes() == ACKS_AT_ONCE * 34 == len(layer.wrap(None))
    assert layer.wrap(None) == ack(ACKS_AT_ONCE, b"") and not layer.has_due


def test_one_payload_is_under_way_at_a_time() -> None:
    layer = AckLayer()
    layer.wrap(b"abc")
    assert layer.waiting_bytes == 3 and layer.acked_bytes == 0
    layer.unwrap(ack(0, b"abc"))
    assert layer.waiting_bytes is None and layer.acked_bytes == 3


def test_acknowledgements_of_nothing_mean_nothing() -> None:
    layer = AckLayer()
    assert layer.unwrap(ack(0, b"never sent")) == b""
    layer.wrap(b"abc")
    assert layer.unwrap(ack(1, b"abc") + payload(7, b"data")) == b"data"
    assert layer.waiting_bytes == 3


@pytest.mark.parametrize(
    ("plaintext", "reason"),
    [
        (b"\x01", ChannelEndReason.MALFORMED),
        (b"\x00", ChannelEndReason.MALFORMED),
        (ack(0, b"abc")[:-1], ChannelEndReason.MALFORMED),
        (b"\x01\x00" + bytes(5), ChannelEndReason.MALFORMED),
        (b"\x02\x00" + bytes(40), ChannelEndReason.MALFORMED),
        (ack(0, b"abc") + b"\x01", ChannelEndReason.MALFORMED),
        (ack(0, b"abd"), ChannelEndReason.INTEGRITY),
    ],
    ids=repr,
)
def test_what_is_malformed_is_a_fault(plaintext: bytes, reason: ChannelEndReason) -> None:
    """A truncated acknowledgement ends Go's process."""
    layer = AckLayer()
    layer.wrap(b"abc")
    with pytest.raises(ChannelFault) as caught:
        layer.unwrap(plaintext)
    assert caught.value.reason is reason


@pytest.mark.parametrize("data", [b"", b"x"])
def test_no_more_payloads_are_held_than_there_are_numbers(data: bytes) -> None:
    layer = AckLayer()
    for _ in range(UNACKED_LIMIT):
        layer.unwrap(payload(0, data))
    with pytest.raises(ChannelFault):
        layer.unwrap(payload(0, data))


@given(st.binary(max_size=120))
def test_any_plaintext_is_taken_or_a_fault(plaintext: bytes) -> None:
    layer = AckLayer()
    layer.wrap(b"abc")
    try:
        data = layer.unwrap(plaintext)
    except ChannelFault:
        return
    assert plaintext.endswith(data)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=9), st.integers(0, 9)), max_size=60))
def test_two_sides_lose_nothing(steps: list[tuple[bool, bytes, int]]) -> None:
    """In each step a side says what it may say, and the other takes some of what it was told."""
    sides = (AckLayer(), AckLayer())
    said, heard, unread = [b"", b""], [b"", b""], [0, 0]
    for first, data, size in [*steps, *((number % 2 == 0, b"", 9) for number in range(80))]:
        us, them = (0, 1) if first else (1, 0)
        wanted = data if data and sides[us].waiting_bytes is None else None
        said[us] += wanted or b""
        got = sides[them].unwrap(sides[us].wrap(wanted))
        heard[them] += got
        unread[them] += len(got)
        taken = min(size, unread[them])
        unread[them] -= taken
        sides[them].consumed(taken)
    assert heard == said[::-1]
    assert [side.acked_bytes for side in sides] == [len(one) for one in said]
