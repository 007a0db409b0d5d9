"""The XK handshake of a connection, both roles, with the cookie of a server under load."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import LENGTH_BYTES, MESSAGE_LIMIT_BYTES, Handshake, Role
from dmsg.mux.core.hello import hello_payload
from dmsg.mux.relay.handshake_budget import HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.serving.admission import Origin
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS

_CLIENT, _SERVER = KEYS[:2]
_BUSY = RelayLimits(handshake_burst_per_address=1, handshakes_per_s_per_address=0.5)
_ORIGIN = Origin("192.0.2.1", "192.0.2.0/24")


class _Side:
    """A handshake, what it has sent that did not arrive yet, and how it ended."""

    def __init__(self, core: Handshake) -> None:
        self.core = core
        self.sent = bytearray()
        self.done: HandshakeDone | None = None
        self.failed = False
        self.send()

    def send(self) -> None:
        if not self.failed:
            self.sent += self.core.data_to_send()

    def receive(self, data: bytes, now: float) -> None:
        """What a shell does: bytes in until the handshake is done or failed, then nothing."""
        if self.done is not None or self.failed:
            return
        try:
            for event in self.core.receive_data(data, now):
                assert isinstance(event, HandshakeDone) and self.done is None
                self.done = event
        except RemoteProtocolError:
            self.failed = True
        if self.done is None and not self.failed:
            assert len(self.core._buffer) < LENGTH_BYTES + MESSAGE_LIMIT_BYTES
        self.send()

    def pass_time(self, now: float) -> None:
        try:
            self.core.handle_timeout(now)
        except RemoteProtocolError:
            self.failed = True


def one_input(data: bytes) -> None:
    """The first byte says what kind of server it is; then operations: deliver, alter, inject, drop, let time pass.

    Where nothing was touched and no time ran out both sides end with each other's key and the same channel binding.
    A side is done at most once, a message is looked at once for each turn, and what is kept is bounded.
    """
    choices = Choices(data)
    kind = choices.byte()
    gate = None
    if kind & 1:
        budget = HandshakeBudget(_BUSY, 0.0, random=repeatable(b"cookies"), cookies=not kind & 2)
        gate = budget.gate(_ORIGIN)
    client = _Side(
        Handshake(
            Role.CLIENT,
            _CLIENT,
            _SERVER.public_key if not kind & 4 else KEYS[2].public_key,
            now=0.0,
            payload=hello_payload(aes=bool(kind & 64)),
            takes_cookie=not kind & 8,
            random=repeatable(b"client"),
        )
    )
    server = _Side(
        Handshake(
            Role.SERVER,
            _SERVER,
            now=0.0,
            payload=choices.chunk() if kind & 16 else hello_payload(aes=bool(kind & 128)),
            first_byte_timeout_s=1.0 if kind & 32 else None,
            gate=gate,
            random=repeatable(b"server"),
        )
    )
    now, touched = 0.0, bool(kind & 4)
    for _ in range(64):
        if not choices.left:
            break
        to_server = choices.flag()
        sender, receiver = (client, server) if to_server else (server, client)
        match choices.below(6):
            case 0 | 1:
                size = choices.byte() or len(sender.sent)
                piece = bytes(sender.sent[:size])
                del sender.sent[:size]
                for part in choices.pieces(piece):
                    receiver.receive(part, now)
            case 2 if sender.sent:
                mask = choices.byte()
                sender.sent[choices.byte() % len(sender.sent)] ^= mask
                touched |= bool(mask)
            case 3:
                injected = choices.chunk()
                touched |= bool(injected)
                receiver.receive(injected, now)
            case 4 if sender.sent:
                del sender.sent[: 1 + choices.byte()]
                touched = True
            case _:
                now += choices.byte() / 8
                for side in (client, server):
                    side.pass_time(now)
    for side in (client, server):
        assert side.core.messages <= 2
    if not touched:
        # What is not delivered yet may be, and then both sides are done: unless time or the gate ended one of them.
        for _ in range(4):
            for sender, receiver in ((client, server), (server, client)):
                receiver.receive(bytes(sender.sent), now)
                sender.sent.clear()
        if not client.failed and not server.failed and (not kind & 8 or gate is None):
            assert client.done is not None and server.done is not None
            assert server.done.remote == _CLIENT.public_key and client.done.remote == _SERVER.public_key
            (plaintext,) = server.done.records.open(client.done.records.seal(b"first"))
            assert plaintext == b"first"


def seeds() -> Iterator[bytes]:
    """Handshakes that succeed, with each kind of server, whole and in pieces; then altered ones."""
    run = b"\x01\x00\x00\x00" + b"\x00\x00\x00\x00"
    for kind in (0, 1, 3, 4, 8, 9, 32):
        yield bytes((kind,)) + run * 3
        yield bytes((kind,)) + run.replace(b"\x00\x00\x00", b"\x00\x00\x01") * 4
        yield bytes((kind,)) + b"\x01\x02\x80\x05" + run * 2
        yield bytes((kind,)) + b"\x01\x03\x08garbage!" + run
        yield bytes((kind,)) + b"\x01\x04\x01" + run + b"\x01\x05\xff"
    yield b"\x10\x20" + bytes(32) + run * 3
