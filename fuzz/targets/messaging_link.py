"""The handshake of a messaging link, both roles: JSON of strangers, and the bytes behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.events import LinkDone, LinkRequested
from dmsg.messaging.core.limits import HANDSHAKE_OBJECT_LIMIT_BYTES
from dmsg.messaging.core.link import LinkInitiator, LinkResponder
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS
from fuzz.words import members

DICTIONARY = members("version", "initiator", "responder", "nonce", "sig1", "sig2", "accepted")

_CLIENT, _RELAY = KEYS[:2]


class _Side:
    """A handshake, its data in flight, and how it ended."""

    def __init__(self, core: LinkInitiator | LinkResponder, *, accepts: bool) -> None:
        self.core = core
        self.accepts = accepts
        self.sent = b""
        self.done: LinkDone | None = None
        self.asked = self.failed = False
        self.send()

    def send(self) -> None:
        if not self.failed:
            self.sent += self.core.data_to_send()

    def act(self, data: bytes | None, now: float) -> None:
        """Handle a read or a timeout as a shell does."""
        if self.done is not None or self.failed:
            return
        events: Any
        try:
            events = self.core.handle_timeout(now) if data is None else self.core.receive_data(data, now)
        except RemoteProtocolError:
            self.failed = True
            return
        for event in events:
            if isinstance(event, LinkRequested):
                assert isinstance(self.core, LinkResponder) and not self.asked
                self.asked = True
                if self.accepts:
                    self.core.accept(now)
                else:
                    self.core.refuse()
            else:
                assert isinstance(event, LinkDone) and self.done is None
                self.done = event
        if self.done is None:
            assert len(self.core._reader.buffer) <= HANDSHAKE_OBJECT_LIMIT_BYTES
        self.send()


def one_input(data: bytes) -> None:
    """The first byte says whether the client is let in; then operations: deliver, alter, inject, rewrite, let time pass.

    If nothing was altered and time sufficed, both sides learn each other's key. Whatever happens, a side that is done knows
    the other's key, because no other key has signed; and buffered data is bounded.
    """
    choices = Choices(data)
    accepts = not choices.flag()
    client = _Side(LinkInitiator(_CLIENT, _RELAY.public_key, now=0.0, random=repeatable(b"nonce")), accepts=True)
    relay = _Side(LinkResponder(_RELAY, now=0.0, random=repeatable(b"entropy")), accepts=accepts)
    now, touched = 0.0, False
    for _ in range(48):
        if not choices.left:
            break
        sender, receiver = (client, relay) if choices.flag() else (relay, client)
        match choices.below(6):
            case 0 | 1:
                size = choices.byte() * 4 or len(sender.sent)
                piece, sender.sent = sender.sent[:size], sender.sent[size:]
                for part in choices.pieces(piece):
                    receiver.act(part, now)
            case 2 if sender.sent:
                at, mask = choices.below(1 << 16) % len(sender.sent), choices.byte()
                sender.sent = sender.sent[:at] + bytes((sender.sent[at] ^ mask,)) + sender.sent[at + 1 :]
                touched |= bool(mask)
            case 3:
                injected = choices.chunk()
                touched |= bool(injected)
                receiver.act(injected, now)
            case 4 if sender.sent:
                sender.sent = _rewritten(sender.sent, choices)
                touched = True
            case _:
                now += choices.byte() / 64
                client.act(None, now)
                relay.act(None, now)
    if relay.asked or relay.done is not None:
        assert relay.done is None or relay.done.remote == _CLIENT.public_key
    assert client.done is None or client.done.remote == _RELAY.public_key
    assert relay.asked or relay.done is None
    if not touched and now < 2:
        for _ in range(4):
            for sender, receiver in ((client, relay), (relay, client)):
                piece, sender.sent = sender.sent, b""
                receiver.act(piece, now)
        relay.act(None, now + 1)
        assert relay.asked and not relay.failed
        assert (client.done is not None) is accepts and client.failed is not accepts
        assert (relay.done is not None) is accepts


def _rewritten(text: bytes, choices: Choices) -> bytes:
    """The object in flight, with one member changed."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    if not isinstance(parsed, dict):  # what is left of one that was cut into pieces
        return text
    name = choices.pick(("version", "initiator", "responder", "nonce", "sig1", "sig2", "accepted"))
    value = parsed.get(name)
    keys = (str(_CLIENT.public_key), str(_RELAY.public_key))
    others: tuple[object, ...] = (None, "", False, True, 0, {}, "0" * 130, *keys, "ff" * 16)
    if isinstance(value, str) and choices.flag():
        parsed[name] = value.upper()
    else:
        parsed[name] = choices.pick(others)
    return json.dumps(parsed, indent=choices.below(3) or None).encode() + b"\n"


def seeds() -> Iterator[bytes]:
    """Handshakes that succeed, whole and in pieces; altered, rewritten and forged objects."""
    run = b"\x01\x00\x00\x00" + b"\x00\x00\x00\x00"
    for kind in (0, 1):
        head = bytes((kind,))
        yield head + run * 3
        yield head + run.replace(b"\x00\x00\x00", b"\x00\x00\x01") * 3
        yield head + b"\x01\x02\x00\x10\x01" + run
        yield head + b"\x01\x03\x04null" + run
        yield head + b'\x01\x03\x0b{"x":"}\\""}' + run
        yield head + run + b"\x01\x05\xff"
        for member in range(7):
            for value in range(10):
                yield head + b"\x01\x04" + bytes((member, 0, value)) + b"\x00" + run * 2
