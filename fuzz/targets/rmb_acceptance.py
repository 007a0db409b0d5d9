"""Acceptance by receivers of the Reliable Message Bus of messages that are sent, altered, forged and sent again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dmsg.rmb.core.acceptance import Receiver, SeenMessages
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import (
    BadSignature,
    E2eError,
    EnvelopeExpired,
    EnvelopeRefused,
    MalformedEnvelope,
    NoKeyHere,
    NoMessage,
    NoSenderKey,
    OverlongText,
    PlainRefused,
    Replayed,
    UnknownSource,
    UnsignedSource,
    WrongDestination,
)
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
_KEYLESS = {number: replace(twin, pk=None) for number, twin in _TWINS.items()}
#: Texts with a limit, which a short input could not exceed.
_TEXTS = {"tags": 1_024, "schema": 255, "command": 255, "federation": 1_024, "uid": 128}
#: A memory that is full after a few messages, and a twin whose message stays in it for long.
_FEW = 6
_LASTING = 200


class _Side:
    """A receiver, the permissions of its program, and the messages it took."""

    def __init__(self, encryption: EncryptionKey | None, twins: dict[int, Twin], *, allow_plain: bool = False) -> None:
        self.receiver = Receiver(_OURS, encryption, _AWAITED.__eq__, allow_plain=allow_plain)
        self.twins = twins
        self.encrypts = encryption is not None
        self.allow_plain = allow_plain
        #: Expiry by source, uid and kind.
        self.taken: dict[tuple[int, str, str], int] = {}


class _Bus:
    """Receivers, everything written to them, and the messages they took."""

    def __init__(self) -> None:
        self.main = _Side(_OUR_KEY, _TWINS)
        #: Each fourth envelope goes to one of these, too.
        self.others = (_Side(_OUR_KEY, _TWINS, allow_plain=True), _Side(None, _TWINS), _Side(_OUR_KEY, _KEYLESS))
        self.now = 1_700_000_000
        self.sent: list[bytes] = []
        self.count = 0
        #: Signed texts with signer and kind; encrypted texts with their author.
        self.signed: dict[bytes, bytes] = {}
        self.signatures: set[tuple[int, bytes, bytes]] = set()
        self.ciphers: dict[tuple[int, bytes], bytes] = {}
        self.memory = _Memory(self.now)

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
            signed = challenge(envelope)
            self.signed[signed] = plain
            self.signatures.add((number, signed, envelope.signature))
            self.ciphers[number, envelope.cipher] = plain
            self.sent.append(data)
            self.deliver(data)

    def alter(self, choices: Choices) -> None:
        """A relay changes a byte of something it has seen."""
        if self.sent:
            data = bytearray(choices.pick(self.sent))
            data[choices.below(0x10000) % len(data)] ^= choices.byte()
            self.deliver(bytes(data))

    def forge(self, data: bytes, how: int) -> None:
        """Anyone writes anything; ``how`` chooses a text at or over its limit."""
        result, envelope = outcome(lambda: parse_envelope(data), MalformedEnvelope)
        if result == "value" and how >= 0:
            size, which = divmod(how, len(_TEXTS))
            name, limit = tuple(_TEXTS.items())[which]
            text = ("x" * limit, "x" * (limit + 1), "\u00e4" * (limit // 2), "\u00e4" * (limit // 2 + 1))[size % 4]
            setattr(envelope.request if name == "command" else envelope, name, text)
            data = envelope.SerializeToString()
        self.deliver(data)

    def deliver(self, data: bytes) -> None:
        """A message is taken or refused by the rules, in their order; a message that is taken was signed."""
        result, envelope = outcome(lambda: parse_envelope(data), MalformedEnvelope)
        if result == "error":
            return
        self.count += 1
        self.memory.look(envelope, self.now)
        payload = self.offer(self.main, envelope)
        if payload is not None:
            signed = self.signed[challenge(envelope)]
            # The signature has no separators: plain text may lose its beginning or end to a neighbouring text.
            # A lost end stands in the relays, without which ours are sent.
            moved = "".join(envelope.relays).encode()
            assert payload == signed or (not envelope.cipher and signed.endswith(payload + moved))
        # Looking at signatures is most of the time of an input.
        if self.count % 4 == 0:
            self.offer(self.others[self.count // 4 % 3], envelope)

    def offer(self, side: _Side, envelope: Envelope) -> bytes | None:
        """A receiver checks it, as a program does that asks the registry in between; gives the payload if it was taken."""
        receiver, source, now = side.receiver, envelope.source.twin, self.now
        kind = envelope.WhichOneof("message") or ""
        end = envelope.timestamp + min(envelope.expiration, MAX_TTL_S) + LATE_S
        known = side.taken.get((source, envelope.uid, kind), 0)
        # A receiver may remember it for one more second.
        again = (True, False) if known == now else (known > now,)
        refused = self.refusal(envelope, kind, end)
        late = refused is None and again[0]
        result, found = outcome(lambda: receiver.admit(envelope, now), EnvelopeRefused)
        if result == "error":
            assert found is (refused or Replayed) and (refused or late)
            return None
        assert refused is None and False in again and found == (source or None)
        if not source:
            return None
        twin = side.twins.get(source)
        refused, payload = self.opened(side, envelope, kind)
        result, found = outcome(lambda: receiver.open(envelope, twin, now), EnvelopeRefused)
        if result == "error":
            assert found is refused
            return None
        assert refused is None and found == payload
        assert now < end <= now + MAX_AHEAD_S + MAX_TTL_S + LATE_S
        side.taken[source, envelope.uid, kind] = end
        assert len(receiver.seen) <= len(side.taken)
        if self.count % 8 == 1:  # what was looked up by two at the same time
            assert outcome(lambda: receiver.open(envelope, twin, now), EnvelopeRefused) == ("error", Replayed)
        return payload

    def refusal(self, envelope: Envelope, kind: str, end: int) -> type[EnvelopeRefused] | None:
        """Why it is refused before the registry is asked and before it is checked for a repetition."""
        if kind not in ("request", "response", "error"):
            return NoMessage
        if (
            len(envelope.uid.encode()) > 128
            or len(envelope.tags.encode()) > 1_024
            or len(envelope.schema.encode()) > 255
            or len(envelope.source.connection.encode()) > 128
            or len(envelope.request.command.encode()) > 255
            or len(envelope.federation.encode()) > 1_024
            or len(envelope.relays) > 16
        ):
            return OverlongText
        of_relay = kind == "error" and envelope.source.twin == 0
        to = SessionAddress.of(envelope.destination)
        if to != _OURS and (to.twin or not of_relay):
            return WrongDestination
        if envelope.timestamp > self.now + MAX_AHEAD_S or end <= self.now:
            return EnvelopeExpired
        if envelope.source.twin == 0 and not (of_relay and envelope.uid == _AWAITED):
            return UnsignedSource
        return None

    def opened(self, side: _Side, envelope: Envelope, kind: str) -> tuple[type[EnvelopeRefused] | None, bytes]:
        """The content of an envelope that arrives for the first time, or why it is not opened."""
        source = envelope.source.twin
        twin = side.twins.get(source)
        if twin is None:
            return UnknownSource, b""
        if (source, challenge(envelope), envelope.signature) not in self.signatures:
            return BadSignature, b""
        keys = side.encrypts and twin.pk is not None
        if envelope.WhichOneof("payload") != "cipher":
            is_plain = envelope.plain != b"" or kind == "request"
            return PlainRefused if is_plain and keys and not side.allow_plain else None, envelope.plain
        if not keys:
            return NoSenderKey if side.encrypts else NoKeyHere, b""
        payload = self.ciphers.get((source, envelope.cipher))
        return (E2eError, b"") if payload is None else (None, payload)


class _Memory:
    """A memory of earlier messages with room for a few, and a model of its possible content."""

    def __init__(self, now: int) -> None:
        self.seen = SeenMessages(_FEW)
        #: Expiry by twin, uid and kind, the oldest first.
        self.model: dict[tuple[int, str, str], int] = {}
        self._add((_LASTING, "", ""), now, now + 10**9)

    def look(self, envelope: Envelope, now: int) -> None:
        """An envelope of anyone arrives."""
        key = envelope.source.twin % 5, envelope.uid, envelope.WhichOneof("message") or ""
        self._add(key, now, now + 1 + envelope.expiration % 300)

    def _add(self, key: tuple[int, str, str], now: int, until: int) -> None:
        seen, model = self.seen, self.model
        new = model.get(key, now) <= now
        assert seen.has(*key, now) is not new
        assert seen.is_new(*key, now, until) is new
        if new:
            model.pop(key, None)
            model[key] = until
        for one in [one for one, until in model.items() if until <= now]:
            del model[one]
        gone = [one for one in model if not seen.has(*one, now)]
        if len(model) > _FEW:
            # Nothing has expired. Only the oldest of the twin with the most is forgotten.
            (lost,) = gone
            mine = [one for one in model if one[0] == lost[0]]
            assert lost == mine[0] and all(sum(one[0] == each[0] for one in model) <= len(mine) for each in model)
            del model[lost]
        else:
            assert not gone
        assert len(model) <= len(seen) <= _FEW

    def end(self, now: int) -> None:
        """Expired messages do not stay. The lasting one may still have to make room for the first."""
        for number in range(1_000, 1_000 + _FEW + 1):
            assert self.seen.is_new(100, str(number), "", now + number, now + number + 1)
        assert len(self.seen) == 1 + self.seen.has(_LASTING, "", "", now)


def one_input(data: bytes) -> None:
    """Bytes choose messages to send, alter, send again or forge, and let time pass."""
    choices, bus = Choices(data), _Bus()
    # A signature takes 130 microseconds to make and to check.
    for _ in range(500):
        if not choices.left:
            break
        more, what = divmod(choices.byte(), 6)
        match what:
            case 0 | 1:
                bus.send(choices)
            case 2:
                bus.alter(choices)
            case 3 if bus.sent:
                bus.deliver(choices.pick(bus.sent))
            case 4:
                bus.forge(choices.chunk(), more - 22)
            case _:
                bus.now += choices.byte() * choices.byte()
    bus.memory.end(bus.now)


def seeds() -> Iterator[bytes]:
    """Messages that arrive once, twice, changed and late; texts that relays write; random operations."""
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
    yield from _more_seeds(message)


def _more_seeds(message: bytes) -> Iterator[bytes]:
    """Until the last second of a message, and after it; plain ones, of all kinds; texts of any length; many of few twins."""
    for age in (69, 70, 71):
        yield message + b"\x05\x01" + bytes((age,)) + b"\x03\x00" + message
    for key in (0, 1):
        kinds = b"".join(bytes((0, 1, 6, 1, 120, 0, kind, 0, key)) for kind in range(4))
        yield kinds * 3 + b"\x03\x00\x03\x01\x03\x02" * 3
        empty = b"".join(bytes((0, 1, 6, 0, 0, kind, 1, key)) for kind in range(3))
        yield empty * 4
    yield b"".join(bytes((0, number % 8, number % 5, 0, 0, number % 3, number % 2, 1)) for number in range(40))
    yield b"".join(bytes((0, number % 8, 1 + number % 5, 0, 0, 0, 1, 1)) + b"\x05\x03\x02" for number in range(40))
    for twin in (0, 1, 3):
        forged = Envelope(uid="9", timestamp=1_700_000_000, expiration=60)
        forged.destination.twin, forged.source.twin = 7, twin
        forged.request.command = "a"
        for how in range(4 * len(_TEXTS)):
            data = forged.SerializeToString()
            yield bytes((4 + 6 * (22 + how), len(data))) + data
        for relays in (16, 17):
            forged.relays[:] = [""] * relays
            data = forged.SerializeToString()
            yield bytes((4, len(data))) + data
        del forged.relays[:]
        for name in (128, 129):
            forged.source.connection = "x" * name
            data = forged.SerializeToString()
            yield bytes((4, len(data))) + data
        forged.source.connection = ""
        for ahead in (-71, -70, -69, 300, 301):
            forged.timestamp = 1_700_000_000 + ahead
            data = forged.SerializeToString()
            yield bytes((4, len(data))) + data
    for address in (SessionAddress(0), SessionAddress(0, "x"), SessionAddress(7, ""), SessionAddress(8)):
        for uid in (_AWAITED, "2"):
            error = Envelope(uid=uid, timestamp=1_700_000_000, expiration=60)
            address.write_to(error.destination)
            error.error.message = "destination offline"
            data = error.SerializeToString()
            yield bytes((4, len(data))) + data
