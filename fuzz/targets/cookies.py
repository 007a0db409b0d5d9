"""The cookies and token buckets in front of a server's handshakes."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.crypto.noise import XK_MESSAGE_BYTES
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.handshake import COOKIE_BYTES
from dmsg.mux.relay.handshake_budget import COOKIE_SLOT_S, CookieJar, HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.serving.admission import Origin
from fuzz.choices import Choices, repeatable

_LIMITS = RelayLimits(
    handshakes_per_s_per_address=1.0,
    handshake_burst_per_address=2,
    handshakes_per_s_per_network=2.0,
    handshake_burst_per_network=4,
    handshakes_per_s=4.0,
    handshake_burst=8,
)
_ORIGINS = [Origin(f"192.0.{net}.{host}", f"192.0.{net}.0/24") for net in (1, 2) for host in (1, 2)]
_MESSAGE_BYTES = XK_MESSAGE_BYTES[0]


def one_input(data: bytes) -> None:
    """Operations: a first message of one of four origins, with or without a cookie received, altered or not; time.

    A cookie opens for the message and address group it was made for, in its time slot and the next, and for nothing else.
    """
    choices = Choices(data)
    now = 0.0
    budget = HandshakeBudget(_LIMITS, now, random=repeatable(b"secrets"), cookies=choices.flag())
    jar = CookieJar(random=repeatable(b"jar"))
    made: list[tuple[bytes, bytes, Origin, float]] = []  # cookie, message, origin, when
    passed = 0
    while choices.left:
        origin = choices.pick(_ORIGINS)
        message = bytes((choices.byte(),)) * _MESSAGE_BYTES
        match choices.below(5):
            case 0:
                now += choices.byte() / 4
            case 1:
                now -= choices.byte() / 64  # clocks may jump
            case 2 if made:
                cookie, first, _, _ = made[choices.byte() % len(made)]
                message = (first if choices.flag() else message) + cookie
            case 3:
                message = choices.chunk()
            case _:
                cookie = jar.make(origin.address, message, now)
                other = choices.pick(_ORIGINS)
                later = now + choices.byte() / 4
                age = int(later // COOKIE_SLOT_S) - int(now // COOKIE_SLOT_S)
                good = other.address == origin.address and age in (0, 1)
                assert jar.opens(cookie, other.address, message, later) is good
                assert not jar.opens(cookie[1:] + cookie[:1], origin.address, message, now) or len(set(cookie)) == 1
        try:
            go_on, answer = budget.judge(origin, message, now)
        except RemoteProtocolError as error:
            assert error.stage == "accept"
            continue
        assert bool(answer) != bool(go_on) or not message
        if answer:
            assert len(answer) == COOKIE_BYTES
            made.append((answer, message[:_MESSAGE_BYTES], origin, now))
        else:
            passed += 1
            assert message.startswith(go_on)
            if len(go_on) < len(message):
                assert any(
                    (message[_MESSAGE_BYTES:], go_on, origin.address) == (cookie, first, maker.address)
                    for cookie, first, maker, _ in made
                )
    assert passed <= _LIMITS.handshake_burst + _LIMITS.handshakes_per_s * 64 * len(data)


def seeds() -> Iterator[bytes]:
    """Messages until a cookie is asked for, then with it; from others; later."""
    ask = b"\x00\x07\x05"
    yield b"\x01" + ask * 4
    yield b"\x01" + ask * 4 + b"\x00\x07\x02\x00\x01" * 3
    yield b"\x01" + ask * 4 + b"\x01\x07\x02\x00\x01" + b"\x00\x07\x00\x60" + b"\x00\x07\x02\x00\x01"
    yield b"\x00" + ask * 4
    yield (
        b"\x01"
        + b"\x00\x07\x04\x00\x00"
        + b"\x00\x07\x04\x00\x60"
        + b"\x02\x07\x04\x03\x01"
        + b"\x00\x00\x03\x20"
        + bytes(40)
    )
