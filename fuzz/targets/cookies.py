"""The cookies and token buckets in front of a server's handshakes."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.crypto.noise import XK_MESSAGE_BYTES
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.handshake import COOKIE_BYTES
from dmsg.mux.relay.handshake_budget import COOKIE_SLOT_S, CookieJar, HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.sansio.rate import FairBucket, RateLimiterTable
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


class _Model:
    """The expected answer of a relay to each first message."""

    def __init__(self, cookies: bool) -> None:
        self.cookies = cookies
        limits = _LIMITS
        self._addresses: RateLimiterTable[str] = RateLimiterTable(
            limits.handshakes_per_s_per_address, limits.handshake_burst_per_address, 100
        )
        self._networks: RateLimiterTable[str] = RateLimiterTable(
            limits.handshakes_per_s_per_network, limits.handshake_burst_per_network, 100
        )
        self._all: FairBucket[str] = FairBucket(limits.handshakes_per_s, limits.handshake_burst, 0.0)
        self._secrets: dict[int, int] = {}  # which secret each slot has: the number of the first cookie made of it
        self._made: dict[bytes, tuple[bytes, str, int, int]] = {}  # cookie -> message, address, slot, secret

    def made(self, cookie: bytes, message: bytes, address: str, now: float) -> None:
        """A cookie was given."""
        slot = int(now // COOKIE_SLOT_S)
        if slot not in self._secrets:
            self._secrets = {at: secret for at, secret in self._secrets.items() if at == slot - 1}
            self._secrets[slot] = len(self._made)
        self._made[cookie] = message, address, slot, self._secrets[slot]

    def opens(self, cookie: bytes, message: bytes, address: str, now: float) -> bool:
        """Whether a cookie was given for the same in this slot or the last one, and its secret is still known."""
        first, maker, slot, secret = self._made.get(cookie, (b"", "", 0, -1))
        age = int(now // COOKIE_SLOT_S) - slot
        return (first, maker) == (message, address) and age in (0, 1) and self._secrets.get(slot) == secret

    def refusal(self, origin: Origin, now: float, kept: float) -> str:
        """The limit that is reached, or "" if one token of each bucket was taken."""
        buckets = self._addresses.bucket(origin.address, now), self._networks.bucket(origin.network, now)
        names = "handshakes_per_address", "handshakes_per_network"
        for name, bucket in zip(names, buckets, strict=True):
            if bucket.wait_s(now, 1 + kept * bucket.burst) > 0:
                return name
        if not self._all.take(origin.network, now, keep=kept * self._all.burst):
            return "handshakes"
        for bucket in buckets:
            assert bucket.take(now)
        return ""


def one_input(data: bytes) -> None:
    """Operations: a first message of one of four origins, with or without a cookie received, altered or not; time.

    A cookie opens only for the message and address group it was made for, in its time slot and the next. Handshakes with a
    cookie may use all of each bucket, others only the upper half, below which they get a cookie. Networks share the bucket of
    all. The message is passed on without our cookie.
    """
    choices = Choices(data)
    now = 0.0
    model = _Model(choices.flag())
    budget = HandshakeBudget(_LIMITS, now, random=repeatable(b"secrets"), cookies=model.cookies)
    jar = CookieJar(random=repeatable(b"jar"))
    made: list[tuple[bytes, bytes]] = []  # cookie, message
    while choices.left:
        origin = choices.pick(_ORIGINS)
        message = bytes((choices.byte(),)) * _MESSAGE_BYTES
        match choices.below(5):
            case 0:
                now += choices.byte() / 4
            case 1:
                now -= choices.byte() / 64  # clocks may jump
            case 2 if made:
                cookie, first = made[choices.byte() % len(made)]
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
        bare, rest = message[:_MESSAGE_BYTES], message[_MESSAGE_BYTES:]
        proved = model.cookies and model.opens(rest, bare, origin.address, now)
        refusal = model.refusal(origin, now, 0.5 if model.cookies and not proved else 0.0)
        try:
            go_on, answer = budget.gate(origin).judge(message, now)
        except RemoteProtocolError as error:
            assert error.stage == "accept" and error.reason == refusal
            assert proved or not model.cookies
            continue
        if refusal:
            assert model.cookies and not proved and not go_on and len(answer) == COOKIE_BYTES
            model.made(answer, bare, origin.address, now)
            made.append((answer, bare))
        else:
            assert not answer and go_on == (bare if proved else message)


def seeds() -> Iterator[bytes]:
    """Messages until a cookie is asked for, then with it; from others; later."""
    ask = b"\x00\x07\x05"
    yield b"\x01" + ask * 4
    yield b"\x01" + ask * 4 + b"\x00\x07\x02\x00\x01" * 3
    yield b"\x01" + ask * 4 + b"\x01\x07\x02\x00\x01" + b"\x00\x07\x00\x60" + b"\x00\x07\x02\x00\x01"
    yield b"\x01" + ask * 3 + b"\x00\x07\x02\x00\x01" * 3 + b"\x00\x07\x00\x40" + b"\x00\x07\x02\x00\x01"
    yield b"\x01" + ask * 4 + b"\x00\x07\x01\xff" + ask * 2 + b"\x00\x07\x00\x20" + b"\x00\x07\x02\x00\x01" * 2
    yield b"\x01" + (ask + b"\x01\x07\x05" + b"\x02\x07\x05" + b"\x03\x07\x05") * 6 + b"\x03\x07\x02\x03\x01" * 4
    yield b"\x01" + b"\x00\x07\x03\x20" + bytes(32) + ask * 4
    yield b"\x00" + ask * 4
    yield (
        b"\x01"
        + b"\x00\x07\x04\x00\x00"
        + b"\x00\x07\x04\x00\x60"
        + b"\x02\x07\x04\x03\x01"
        + b"\x00\x00\x03\x20"
        + bytes(40)
    )
