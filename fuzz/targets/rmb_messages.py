"""The JSON between programs and peers of the Reliable Message Bus, and the envelopes made of it."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import EnvelopeExpired, InvalidMessage
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.limits import MAX_DESTINATIONS, MAX_TTL_S
from dmsg.rmb.core.messages import IncomingRequest, IncomingResponse, JsonError, OutgoingRequest, OutgoingResponse
from dmsg.rmb.core.sender import Sender
from dmsg.rmb.core.wire import Envelope, parse_envelope
from fuzz import words
from fuzz.oracles import check_memory, outcome

DICTIONARY = words.members(
    *("ver", "ref", "src", "cmd", "exp", "dat", "tag", "dst", "ret", "shm", "now", "err", "code", "message")
)

_KINDS = (OutgoingRequest, IncomingRequest, OutgoingResponse, IncomingResponse)
_NOW = 1_700_000_000
_KEY = EncryptionKey(b"\x01" * 32)
_SENDER = Sender(SessionAddress(7), TwinKey(b"\x01" * 32, KeyType.ED25519), _KEY, bytes)


def one_input(data: bytes) -> None:
    """The first byte chooses one of the four messages, the rest is its text."""
    kind = _KINDS[(data[0] if data else 0) % len(_KINDS)]
    result, message = outcome(lambda: kind.from_json(data[1:]), InvalidMessage)
    if result == "error":
        return
    check_memory(message, len(data))
    assert kind.from_json(message.to_json()) == message
    if isinstance(message, OutgoingRequest):
        _check_request(message)
    elif isinstance(message, OutgoingResponse):
        envelope = message.envelope()
        _check_sealed(envelope)
        answer = IncomingResponse.of(message.envelope(), message.payload, message.uid)
        assert answer.error == message.error and answer.schema == message.schema


def _check_request(message: OutgoingRequest) -> None:
    assert 0 < len(set(message.destinations)) == len(message.destinations) <= MAX_DESTINATIONS
    result, envelopes = outcome(lambda: message.envelopes("uid", _NOW), EnvelopeExpired)
    ttl = message.backlog("uid", _NOW).ttl
    assert (result == "value") == bool(ttl) and ttl <= MAX_TTL_S
    if result == "value":
        assert [envelope.destination.twin for envelope in envelopes] == list(message.destinations)
        _check_sealed(envelopes[0])
        arrived = IncomingRequest.of(envelopes[0], message.payload)
        assert (arrived.command, arrived.tags, arrived.schema) == (message.command, message.tags, message.schema)
        assert IncomingRequest.from_json(arrived.to_json()) == arrived


def _check_sealed(envelope: Envelope) -> None:
    plain = envelope.plain
    result, data = outcome(lambda: _SENDER.seal(envelope, _KEY.public_key, _NOW), EnvelopeExpired)
    if result == "value":
        sealed = parse_envelope(data)
        assert _KEY.decrypt(_KEY.public_key, sealed.cipher) == plain
        assert sealed.timestamp == _NOW and 0 < sealed.expiration <= MAX_TTL_S


def seeds() -> Iterator[bytes]:
    """Each of the four, with all members and with few; an error; unpadded base64; a member twice."""
    here = SessionAddress(7, "here")
    error = JsonError(255, "boom")
    yield (
        b"\0"
        + OutgoingRequest(
            command="c", destinations=(10, 11), reply_to="list", expiration=60, timestamp=_NOW, payload=b"x", tags="t"
        ).to_json()
    )
    yield b"\0" + b'{"ver":1,"cmd":"c","exp":60,"dat":"MSAyYg","dst":[1],"ret":"r","now":0,"err":null,"src":null}'
    yield b"\0" + b'{"ver":1,"ref":"\\ud800","cmd":"","exp":0,"dat":"?","dst":[],"ret":"r","now":-1,"ver":2}'
    yield (
        b"\1"
        + IncomingRequest(
            uid="u", source=here, command="c", expiration=60, timestamp=_NOW, payload=b"\xff" * 9, schema="s"
        ).to_json()
    )
    for one in (None, error):
        yield b"\2" + OutgoingResponse(uid="u", destination=here, timestamp=_NOW, payload=b"", error=one).to_json()
        yield b"\3" + IncomingResponse(reference=None, source="0", timestamp=_NOW, error=one).to_json()
