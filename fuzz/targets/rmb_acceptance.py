"""What a receiver of the Reliable Message Bus takes, of messages that are sent, altered, forged and sent again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.rmb.core.acceptance import Receiver
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import EnvelopeExpired, EnvelopeRefused, MalformedEnvelope
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.limits import LATE_S, MAX_AHEAD_S, MAX_TTL_S
from dmsg.rmb.core.sender import Sender
from dmsg.rmb.core.signing import challenge
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, parse_envelope
from fuzz.choices import Choices
from fuzz.oracles import outcome

_OURS = SessionAddress(7)
_OUR_KEY = EncryptionKey(b"\x0f" * 32)
_AWAITED = "1"
_KEYS = {number: TwinKey(bytes((number,)) * 32, KeyType.ED25519) for number in (1, 2)}
_SECRETS = {number: EncryptionKey(key.secret) for number, key in _KEYS.items()}
_TWINS = {number: Twin(number, key.account, (), _SECRETS[number].public_key) for number, key in _KEYS.items()}
_SENDERS = {
    number: Sender(SessionAddress(number), key, _SECRETS[number], bytes, allow_plain=True)
    for number, key in _KEYS.items()
}


class _Bus:
    """A receiver, all that was written to it, and what it took."""

    def __init__(self) -> None:
        self.receiver = Receiver(_OURS, _OUR_KEY, _AWAITED.__eq__)
        self.now = 1_700_000_000
        self.sent: list[bytes] = []
        self.signed: dict[bytes, bytes] = {}
        self.taken: dict[tuple[int, str, str | None], float] = {}

    def send(self, choices: Choices) -> None:
        """A twin writes to us, or to another; encrypted or not."""
        envelope = Envelope(uid=str(choices.below(8)), expiration=choices.below(256) * 10, plain=choices.chunk(8))
        SessionAddress(7 + choices.below(8) // 7).write_to(envelope.destination)
        getattr(envelope, choices.pick(("request", "response", "error", "ping"))).SetInParent()
        number = choices.pick((1, 2))
        pk = _OUR_KEY.public_key if choices.below(4) else None
        plain = envelope.plain
        result, data = outcome(lambda: _SENDERS[number].seal(envelope, pk, self.now), EnvelopeExpired)
        if result == "value":
            self.signed[challenge(envelope)] = plain
            self.sent.append(data)
            self.deliver(data)

    def alter(self, choices: Choices) -> None:
        """A relay changes a byte of something it has seen."""
        if self.sent:
            data = bytearray(choices.pick(self.sent))
            data[choices.below(0x10000) % len(data)] ^= choices.byte()
            self.deliver(bytes(data))

    def deliver(self, data: bytes) -> None:
        """What arrives is taken or refused; what is taken was signed, and was not taken before."""
        result, envelope = outcome(lambda: parse_envelope(data), MalformedEnvelope)
        if result == "error":
            return
        result, source = outcome(lambda: self.receiver.admit(envelope, self.now), EnvelopeRefused)
        if result == "error":
            return
        if source is None:
            assert envelope.uid == _AWAITED and envelope.HasField("error") and not envelope.source.twin
            return
        result, payload = outcome(lambda: self.open(envelope, source), EnvelopeRefused)
        if result == "error":
            return
        signed = self.signed[challenge(envelope)]
        # The signature has no separators: what is not encrypted may lose its beginning or end to a text beside it. What it
        # lost of its end are relays, as ours are sent without.
        moved = "".join(envelope.relays).encode()
        assert payload == signed or (not envelope.cipher and signed.endswith(payload + moved))
        assert SessionAddress.of(envelope.destination) == _OURS
        key = (source, envelope.uid, envelope.WhichOneof("message"))
        assert self.taken.get(key, 0) <= self.now
        self.taken[key] = envelope.timestamp + min(envelope.expiration, MAX_TTL_S) + LATE_S
        assert self.now < self.taken[key] <= self.now + MAX_AHEAD_S + MAX_TTL_S + LATE_S
        assert len(self.receiver.seen) <= len(self.taken)

    def open(self, envelope: Envelope, source: int) -> Any:
        """As a program does that has asked the registry."""
        return self.receiver.open(envelope, _TWINS.get(source), self.now)


def one_input(data: bytes) -> None:
    """Bytes say what is sent, altered, sent again or forged, and how time goes by."""
    choices, bus = Choices(data), _Bus()
    # A signature takes 130 microseconds to make and to check.
    for _ in range(500):
        if not choices.left:
            break
        match choices.below(6):
            case 0 | 1:
                bus.send(choices)
            case 2:
                bus.alter(choices)
            case 3 if bus.sent:
                bus.deliver(choices.pick(bus.sent))
            case 4:
                bus.deliver(choices.chunk())
            case _:
                bus.now += choices.byte() * choices.byte()


def seeds() -> Iterator[bytes]:
    """Messages that come once, twice, changed and late; what relays write; random operations."""
    message = b"\x00\x03\x06\x01x\x00\x00\x00\x01"
    yield message + b"\x03\x00"
    yield message + b"\x05\x0a\x14\x03\x00"
    yield message * 3 + b"".join(b"\x02\x00\x00" + bytes((at, 1)) for at in range(0, 120, 3))
    error = Envelope(uid=_AWAITED, timestamp=1_700_000_000, expiration=60)
    error.destination.twin = 7
    error.error.message = "destination offline"
    forged = error.SerializeToString()
    yield b"\x04" + bytes((len(forged),)) + forged
    yield bytes(range(256)) * 2
    yield bytes((number * 7919) % 251 for number in range(900))
