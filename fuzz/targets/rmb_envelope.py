"""Envelopes of the Reliable Message Bus, as a relay reads and answers them."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import InvalidAddress
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import BadSignature, MalformedEnvelope, RelayProblem
from dmsg.rmb.core.lifetime import remaining, stamp
from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TTL_S
from dmsg.rmb.core.replies import answer_ping, error_reply, relay_error, response
from dmsg.rmb.core.signing import challenge, verify_envelope
from dmsg.rmb.core.tags import fails_fast
from dmsg.rmb.core.wire import Envelope, encode_envelope, parse_backlog, parse_envelope
from fuzz.oracles import outcome

_NOW = 1_700_000_000


def one_input(data: bytes) -> None:
    """The input is the envelope; it is also read as the notes a peer kept."""
    outcome(lambda: parse_backlog(data), MalformedEnvelope)
    kind, envelope = outcome(lambda: parse_envelope(data), MalformedEnvelope)
    if kind == "error":
        return
    for written in (envelope.SerializeToString(), encode_envelope(envelope)):
        assert len(written) <= len(data) + 2 * len(envelope.ListFields())
        again = parse_envelope(written)
        assert again == envelope and challenge(again) == challenge(envelope)
    assert outcome(lambda: verify_envelope(envelope, bytes(32)), BadSignature)[0] == "error"
    for address in (SessionAddress.of(envelope.source), SessionAddress.of(envelope.destination)):
        _, read = outcome(lambda text=str(address): SessionAddress.parse(text), InvalidAddress)  # type: ignore[misc]
        assert read in (address, InvalidAddress)
    assert isinstance(fails_fast(envelope.tags), bool)
    left = remaining(_NOW, envelope.timestamp, envelope.expiration)
    assert left is None or 0 < left <= MAX_TTL_S + MAX_AHEAD_S
    assert stamp(_NOW, envelope.timestamp, envelope.expiration)[0] == _NOW
    _check_answers(envelope)


def _check_answers(envelope: Envelope) -> None:
    source = SessionAddress.of(envelope.source)
    for answer in (
        relay_error(envelope, RelayProblem.OFFLINE, _NOW, source),
        error_reply(envelope, 5, envelope.error.message),
        response(envelope, envelope.plain),
    ):
        assert answer.uid == envelope.uid and SessionAddress.of(answer.destination) == source
        assert parse_envelope(answer.SerializeToString()) == answer
    pong = Envelope()
    pong.CopyFrom(envelope)
    answer_ping(pong)
    assert SessionAddress.of(pong.source) == SessionAddress.of(envelope.destination)
    assert SessionAddress.of(pong.destination) == source
    assert pong.plain == envelope.plain + b"hello world" and pong.HasField("pong")


def seeds() -> Iterator[bytes]:
    """Each kind, with and without payloads, with all fields; an unknown field; a text that is not UTF-8."""
    whole = Envelope(uid="u", tags="a,fail-fast", timestamp=_NOW, expiration=60, schema="s", federation="f")
    whole.signature = b"e" + bytes(64)
    whole.relays.append("relay")
    SessionAddress(7, "here").write_to(whole.source)
    SessionAddress(2**32 - 1).write_to(whole.destination)
    for kind in ("request", "response", "error", "ping", "pong"):
        for payload in ("plain", "cipher", None):
            envelope = Envelope()
            envelope.CopyFrom(whole)
            getattr(envelope, kind).SetInParent()
            if payload:
                setattr(envelope, payload, b"payload")
            yield encode_envelope(envelope)
    yield b""
    yield b"\xf8\x07\x01" + whole.SerializeToString()
    yield b"\x0a\x01\xff"
