"""The XK handshake of a connection, both roles, with the cookie of a server under load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.crypto.aead import Cipher
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import HANDSHAKE_TIMEOUT_S, MESSAGE_LIMIT_BYTES, Handshake, Role
from dmsg.mux.core.hello import hello_payload, read_hello
from dmsg.mux.relay.handshake_budget import HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.serving.admission import Origin
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS

_CLIENT, _SERVER = KEYS[:2]
_BUSY = RelayLimits(handshake_burst_per_address=1, handshakes_per_s_per_address=0.5)
_ORIGIN = Origin("192.0.2.1", "192.0.2.0/24")


class _Gate:
    """A gate that records questions and answers, ``None`` for a refusal."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self.asked: list[bytes] = []
        self.said: list[tuple[bytes, bytes] | None] = []

    def judge(self, message: bytes, now: float) -> tuple[bytes, bytes]:
        self.asked.append(message)
        self.said.append(None)
        said: tuple[bytes, bytes] = self._gate.judge(message, now)
        self.said[-1] = said
        return said


class _Side:
    """A handshake, its data in flight, and how it ended.

    Beside it a model of the specification: the meaning of each packet that arrives, and the packets sent in response.
    """

    peer: _Side

    def __init__(self, core: Handshake, payload: bytes, *, is_client: bool) -> None:
        self.core = core
        self.payload = payload
        self.is_client = is_client
        self.sent = bytearray()
        self.done: HandshakeDone | None = None
        self.failed = False
        self.gate: _Gate | None = None
        self.takes_cookie = False
        self.knows_server = True
        self.silent_until: float | None = None
        self.deadline: float | None = HANDSHAKE_TIMEOUT_S
        #: The Noise messages it has sent; the packets it must send, as their content or the length of a new message.
        self.messages: list[bytes] = []
        self.due: list[bytes | int] = [49] if is_client else []
        self.begun = b""
        self.step = int(is_client)
        self.looked_at = self.judged = 0
        self.challenged = False
        self.send()

    def send(self) -> None:
        """Only whole packets are sent, each once: a message of the pattern, or known content."""
        if self.failed:
            return
        data = self.core.data_to_send()
        assert self.core.data_to_send() == b""
        self.sent += data
        while data:
            size = int.from_bytes(data[:2], "big")
            message, data = data[2 : 2 + size], data[2 + size :]
            due = self.due.pop(0)
            if isinstance(due, bytes):
                assert message == due and size == len(due)
            else:
                assert len(message) == size == due
                self.messages.append(message)
        assert not self.due

    def receive(self, data: bytes, now: float) -> None:
        """Feed bytes as a shell does, until the handshake is done or failed."""
        if self.done is not None or self.failed:
            return
        self.silent_until = None
        fault, done = "", None
        try:
            for event in self.core.receive_data(data, now):
                assert isinstance(event, HandshakeDone) and done is None
                done = event
        except RemoteProtocolError as error:
            fault = f"{error.stage}: {error.reason}" if error.stage != "accept" else "refused"
        assert (fault, done is not None) == self._expect(data)
        self.failed, self.done = bool(fault), done
        if done is not None:
            self._check_done(done)
        elif not self.failed:
            assert self.core._buffer == self.begun and len(self.begun) < 2 + MESSAGE_LIMIT_BYTES
        assert (self.core.messages, self.core.challenged) == (self.looked_at, self.challenged)
        assert self.gate is None or self.judged == len(self.gate.asked)
        self.check_time()
        self.send()

    def _expect(self, data: bytes) -> tuple[str, bool]:
        """The fault that ``data`` causes, or "", and whether the handshake is complete then."""
        self.begun += data
        while len(self.begun) >= 2:
            size = int.from_bytes(self.begun[:2], "big")
            if size > 1_500:
                return "handshake: message over the limit", False
            if len(self.begun) < 2 + size:
                break
            message, self.begun = self.begun[2 : 2 + size], self.begun[2 + size :]
            fault = self._expect_message(message)
            if fault or self.step == 3:
                return fault, not fault
        return "", False

    def _expect_message(self, message: bytes) -> str:
        if self.is_client:
            if len(message) == 32 and self.takes_cookie and not self.challenged:
                self.challenged = True
                self.due.append(self.messages[0] + message)
                return ""
        elif self.gate is not None and self.step == 0:
            assert self.gate.asked[self.judged] == message
            said = self.gate.said[self.judged]
            self.judged += 1
            if said is None:
                return "refused"
            message, cookie = said
            if cookie:
                if self.challenged:
                    return "handshake: no cookie"
                self.challenged = True
                self.due.append(cookie)
                return ""
        self.looked_at += 1
        if not self.is_client and self.step and self.due:
            return "handshake: message out of turn"
        # The peer's message of this turn opens, and nothing else does.
        number = int(self.step == 2)
        if not self.knows_server or message not in self.peer.messages[number : number + 1]:
            return f"handshake: message {self.step + 1} does not open"
        self.step += 1
        if self.is_client:
            self.due.append(65 + len(self.payload))
            self.step += 1
        elif self.step == 1:
            self.due.append(49 + len(self.payload))
            self.step += 1
        return ""

    def _check_done(self, done: HandshakeDone) -> None:
        """Both sides know each other, their features, and where the records begin."""
        assert done.remote == (_SERVER if self.is_client else _CLIENT).public_key
        assert done.leftover == self.begun
        ours, theirs = read_hello(self.payload), read_hello(self.peer.payload)
        assert done.peer == theirs
        assert done.records._cipher is (Cipher.AES if ours.aes and theirs.aes else Cipher.CHACHA)
        self.deadline = None

    def check_time(self) -> None:
        """The next timeout is that for silence before the first byte, then that of the whole handshake."""
        times = [time for time in (self.silent_until, self.deadline) if time is not None]
        assert self.core.next_timeout() == (min(times) if self.deadline is not None else None)

    def pass_time(self, now: float) -> None:
        """A side fails once, for its first reason; a completed handshake is not disturbed."""
        fault = ""
        if self.silent_until is not None and now >= self.silent_until:
            fault, self.silent_until, self.deadline = "silent", None, None
        elif self.deadline is not None and now >= self.deadline:
            fault, self.deadline = "timeout", None
        try:
            self.core.handle_timeout(now)
        except RemoteProtocolError as error:
            assert (error.stage, error.reason) == ("handshake", fault)
            self.failed, fault = True, ""
        assert not fault
        self.check_time()


def one_input(data: bytes) -> None:
    """The first byte chooses the kind of server; then operations: deliver, alter, inject, drop, let time pass.

    Each side handles each packet as the specification says, with the specified reason if it fails. If nothing was altered
    and no time ran out, both sides end with each other's key, and each opens the other's records.
    A side is done at most once, a message is checked once for each turn, and the buffered data is bounded.
    """
    choices = Choices(data)
    kind = choices.byte()
    gate = None
    if kind & 1:
        budget = HandshakeBudget(_BUSY, 0.0, random=repeatable(b"cookies"), cookies=not kind & 2)
        gate = _Gate(budget.gate(_ORIGIN))
    payload = hello_payload(aes=bool(kind & 64))
    client = _Side(
        Handshake(
            Role.CLIENT,
            _CLIENT,
            _SERVER.public_key if not kind & 4 else KEYS[2].public_key,
            now=0.0,
            payload=payload,
            takes_cookie=not kind & 8,
            random=repeatable(b"client"),
        ),
        payload,
        is_client=True,
    )
    payload = choices.chunk() if kind & 16 else hello_payload(aes=bool(kind & 128))
    server = _Side(
        Handshake(
            Role.SERVER,
            _SERVER,
            now=0.0,
            payload=payload,
            first_byte_timeout_s=1.0 if kind & 32 else None,
            gate=gate,
            random=repeatable(b"server"),
        ),
        payload,
        is_client=False,
    )
    client.peer, server.peer = server, client
    client.takes_cookie, server.knows_server = not kind & 8, not kind & 4
    server.gate, server.silent_until = gate, 1.0 if kind & 32 else None
    for side in (client, server):
        side.check_time()
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
        # Deliver the rest: then both sides are done, unless time or the gate ended one of them.
        for _ in range(4):
            for sender, receiver in ((client, server), (server, client)):
                receiver.receive(bytes(sender.sent), now)
                sender.sent.clear()
        if not client.failed and not server.failed and (not kind & 8 or gate is None):
            assert client.done is not None and server.done is not None
            assert server.done.remote == _CLIENT.public_key and client.done.remote == _SERVER.public_key
            for one, other in ((client.done, server.done), (server.done, client.done)):
                assert other.records.open(one.records.seal(b"first")) == [b"first"]


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
    # Both ciphers, a second message before the answer, a cookie given twice, more bytes behind the last message.
    for kind in (0x40, 0x80, 0xC0):
        yield bytes((kind,)) + run * 3
    yield b"\x00" + b"\x01\x00\x00\x00" + b"\x00\x00\x00\x00" + b"\x01\x03\x03\x00\x01x" + run
    again = b"\x00\x03\x22\x00\x20" + bytes(32)
    yield b"\x00" + again * 2
    yield b"\x08" + again
    once = b"\x01\x03\x33\x00\x31" + bytes(49)
    yield b"\x01" + once * 2
    yield b"\x03" + once
    yield b"\x00\x01\x03\x02\x05\xdc" + run
    yield b"\x00\x01\x03\x02\x05\xdd" + run
    for kind in (0, 0x20):
        for time in (7, 8, 79, 80):
            yield bytes((kind, 1, 5, time)) + run
        yield bytes((kind,)) + b"\x01\x00\x01\x00" + b"\x01\x05\x08" + b"\x01\x05\x48" + run
