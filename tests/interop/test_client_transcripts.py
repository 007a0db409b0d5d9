"""Our client in the place of the recorded ones: the recorded server's frames go in, the recorded client's must come out.

First the core, on every recording; then the whole service, on the first of them. Ids and sequences begin where the
recorded ones did. Differences are in a table, each with the section of the specification that wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.events import DataReceived, HandshakeDone, Ready, StreamClosed, StreamOffered, StreamOpened
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import CloseReason, encode_close, encode_frame, split_frames

ECHO = "connect, dial, accept, echo, close"
UNKNOWN_PEER = "request rejected: unknown peer"
DELAYED_ACK = "delayed acknowledgement"
BACKLOG = "accept backlog"
ODD_FRAMES = "server reaction to odd frames"
ANSWERS = "answers to REQUEST as the dialling Go client sees them"


def pattern(size: int) -> bytes:
    return bytes((i * 7 + 3) % 251 for i in range(size))


def numbers(*values: int) -> Callable[[int], bytes]:
    """Randomness that gives ``values`` for 2 bytes each, and real randomness for everything else."""
    rest = iter(values)
    return lambda size: next(rest).to_bytes(2, "big") if size == 2 else os.urandom(size)


class Program:
    """The application of a recording over our core; each method is something the recorded program did."""

    def __init__(self, name: str, keys: dict[str, SecretKey], random: Callable[[int], bytes]) -> None:
        self.keys = keys
        client = Handshake(Role.CLIENT, keys[name], keys["server"].public_key, now=0.0, random=random)
        server = Handshake(Role.SERVER, keys["server"], now=0.0)
        server.receive_data(client.data_to_send(), 0.0)
        [done] = client.receive_data(server.data_to_send(), 0.0)
        [there] = server.receive_data(client.data_to_send(), 0.0)
        assert isinstance(done, HandshakeDone) and isinstance(there, HandshakeDone)
        self.server: RecordLayer = there.records
        self.connection = Connection(keys[name].public_key, done.records, now=0.0, random=random)
        self.streams: list[Stream] = []
        self.closed: list[tuple[int, int, bool]] = []
        self.read = b""
        self.ready = False
        self.accepting = 20
        self.packets = 0

    def take(self, plaintext: bytes) -> None:
        """One packet from the server."""
        for event in self.connection.receive_data(self.server.seal(plaintext), 0.0):
            match event:
                case Ready():
                    self.ready = True
                case StreamOffered(stream=stream):
                    self._offered(stream)
                case DataReceived(data=data):
                    self.read += data
                case StreamClosed(stream=stream, code=code, local=local):
                    self.closed.append((stream.id, code, local))
                case StreamOpened(stream=stream):
                    assert stream is self.streams[-1]

    def _offered(self, stream: Stream) -> None:
        if self.accepting:
            self.accepting -= 1
            self.streams.append(stream)
            self.connection.accept(stream)
        else:
            self.connection.abort(stream, CloseReason.BUSY)

    def sent(self) -> list[tuple[bytes, ...]]:
        """The packets that went out, each as its frames."""
        packets = []
        for plaintext in self.server.open(self.connection.data_to_send()):
            self.packets += 1
            frames, used = split_frames(plaintext)
            assert used == len(plaintext)
            packets.append(tuple(plaintext[start - 5 : end] for _, _, start, end in frames))
        return packets

    # what programs did, by the notes of the recordings

    def dial(self, name: str) -> None:
        self.streams.append(self.connection.open(self.keys[name].public_key))

    def write(self, data: bytes) -> None:
        if data:
            self.connection.send_data(self.streams[-1], data)

    def consume(self, size: int) -> None:
        self.connection.consumed(self.streams[-1], size)

    def nothing_to_send(self) -> None:
        assert not self.connection.wants_write

    def close(self) -> None:
        assert self.connection.close(self.streams[-1])

    def cancel_dial(self) -> None:
        self.connection.abort(self.streams[-1])


Step = Callable[[Program], object]

#: (recording, client): its random numbers (first id, then a sequence for each stream) and what its program does after
#: how many packets of the server and of its own.
SCRIPTS: dict[tuple[str, str], tuple[tuple[int, ...], dict[tuple[int, int], Step]]] = {
    (ECHO, "alice"): (
        (0x2000, 0xFFFE, 0),
        {
            (1, 0): lambda p: p.dial("bob"),
            (2, 1): lambda p: p.write(b"hello"),
            (4, 3): lambda p: (p.consume(5), p.write(b"world")),
            (5, 4): lambda p: p.write(b""),
            (6, 5): lambda p: p.close(),
            (6, 6): lambda p: p.dial("bob"),
        },
    ),
    (ECHO, "bob"): (
        (0, 0x0FFE, 0),
        {(3, 2): lambda p: (p.consume(5), p.write(b"hello"))},
    ),
    (UNKNOWN_PEER, "alice"): ((0x1000, 0), {(1, 0): lambda p: p.dial("carol")}),
    (DELAYED_ACK, "alice"): (
        (0x2000, 0xFFFE),
        {
            (1, 0): lambda p: p.dial("bob"),
            (2, 1): lambda p: p.write(pattern(20000)),
            (3, 2): lambda p: p.write(pattern(20000)),
            (4, 3): lambda p: p.write(pattern(20000)),
            (5, 4): lambda p: p.write(pattern(20000)),
            (5, 5): lambda p: p.write(pattern(20000)),
            (5, 6): lambda p: p.write(pattern(20000)),
        },
    ),
    (DELAYED_ACK, "bob"): (
        (0, 0),
        {
            (8, 4): lambda p: (
                p.consume(45000),
                p.nothing_to_send(),
                p.consume(9465),
                p.nothing_to_send(),
                p.consume(1),
            ),
            (8, 5): lambda p: p.close(),
        },
    ),
    (BACKLOG, "alice"): (
        (0x2000, *range(21)),
        {(n, n - 1): lambda p: p.dial("bob") for n in range(1, 22)},
    ),
    (BACKLOG, "bob"): ((0, *range(21)), {}),
    (ODD_FRAMES, "bob"): ((0, *range(9)), {}),
    (ANSWERS, "alice"): (
        (0x1000, *range(5)),
        {
            (1, 0): lambda p: p.dial("bob"),
            (2, 1): lambda p: p.dial("bob"),
            (3, 3): lambda p: p.dial("bob"),
            (4, 5): lambda p: p.dial("bob"),
            (4, 6): lambda p: p.cancel_dial(),
            (4, 7): lambda p: p.dial("bob"),
        },
    ),
}

#: Our frames where they differ: (recording, client, counter there) -> (what ours sends in its place, why).
DEVIATIONS: dict[tuple[str, str, int], tuple[tuple[bytes, ...], str]] = {
    (ECHO, "alice", 5): ((), ":ref:`spec-frame-sizes`: an empty write sends nothing"),
    (BACKLOG, "bob", 21): (
        (encode_close(0x0129, CloseReason.BUSY),),
        ":ref:`spec-close-reasons`: a reason of its own when all places are taken",
    ),
    (ODD_FRAMES, "bob", 4): (
        (encode_close(0x0105, CloseReason.MALFORMED),),
        ":ref:`spec-close-reasons`: FWD without a sequence",
    ),
    (ODD_FRAMES, "bob", 6): (
        (encode_close(0x0107, CloseReason.MALFORMED),),
        ":ref:`spec-close-reasons`: ACK of 3 bytes",
    ),
    (ANSWERS, "alice", 3): (
        (encode_close(0x1002, CloseReason.MALFORMED),),
        ":ref:`spec-close-reasons`: ACCEPT with another payload",
    ),
    (ANSWERS, "alice", 5): (
        (encode_close(0x1004, CloseReason.MALFORMED),),
        ":ref:`spec-close-reasons`: FWD before ACCEPT",
    ),
}

#: Packets the reference sent in no fixed order (each by a goroutine of its own): ours keeps the order of the causes.
UNORDERED = {(ODD_FRAMES, "bob"): ({8, 9}, "two REQUESTs of one packet, accepted the other way round")}

#: How each stream ended, as (id, reason, by ourselves), in order.
ENDED: dict[tuple[str, str], list[tuple[int, int, bool]]] = {
    (ECHO, "bob"): [(0x101, 0, False)],
    (UNKNOWN_PEER, "alice"): [(0x1000, 0, False)],
    (DELAYED_ACK, "alice"): [(0x2000, 0, False)],
    (BACKLOG, "alice"): [(0x2028, 0, False)],
    (ODD_FRAMES, "bob"): [
        (0x105, CloseReason.MALFORMED, True),
        (0x107, CloseReason.MALFORMED, True),
        (0x109, 0, False),
    ],
    (ANSWERS, "alice"): [
        (0x1000, 0, False),
        (0x1002, CloseReason.MALFORMED, True),
        (0x1004, CloseReason.MALFORMED, True),
        (0x1008, 0, False),
    ],
}

READ = {
    (ECHO, "alice"): b"hello",
    (ECHO, "bob"): b"helloworld",
    (DELAYED_ACK, "bob"): pattern(20000) * 6,
}


@pytest.mark.parametrize(("name", "who"), SCRIPTS)
def test_our_client_says_what_was_recorded(
    recordings: dict[str, Any], identities: dict[str, SecretKey], name: str, who: str
) -> None:
    randomness, script = SCRIPTS[name, who]
    program = Program(who, identities, numbers(*randomness))
    unordered = UNORDERED.get((name, who), (set(), ""))[0]
    taken = sent = left_out = 0
    ours: list[tuple[bytes, ...]] = []
    loose: tuple[list[bytes], list[bytes]] = ([], [])
    for packet in recordings[name].packets():
        if packet.source == "server" and packet.destination == who:
            program.take(packet.plaintext)
            ours += program.sent()
            taken += 1
        elif packet.source == who:
            expected, why = DEVIATIONS.get((name, who, packet.sequence), (packet.frames, ""))
            assert expected != packet.frames or not why
            if not ours and (step := script.get((taken, sent))) is not None:
                step(program)
                ours += program.sent()
            sent += 1
            assert packet.sequence == sent
            if not expected:
                left_out += 1
            elif packet.sequence in unordered:
                loose[0].extend(expected)
                loose[1].extend(ours.pop(0))
            else:
                assert ours.pop(0) == expected, (packet.sequence, why)
    assert ours == []
    assert sorted(loose[0]) == sorted(loose[1])
    assert program.ready
    assert program.closed == ENDED.get((name, who), [])
    assert program.read == READ.get((name, who), b"")
    # The record layer takes nothing but 1, 2, 3, ...: one packet of ours for each of theirs is the same counters.
    assert program.packets == sent - left_out


def test_every_recorded_client_has_a_script(recordings: dict[str, Any]) -> None:
    library = {(name, who) for name, one in recordings.items() for who in one.clients}
    raw = {(ODD_FRAMES, "alice"), (ODD_FRAMES, "carol"), (ANSWERS, "bob")}  # no client sends such frames
    assert set(SCRIPTS) == library - raw
    for name, who, sequence in DEVIATIONS:
        assert any(packet.sequence == sequence for packet in recordings[name].packets(who, "server"))


# --- the whole service -----------------------------------------------------------------------------------------------


class Wire(StringTransport):
    """A transport the test reads; closing it closes the protocol on it."""

    protocol: Any = None

    def loseConnection(self) -> None:
        self.disconnecting = True

    abortConnection = loseConnection


class ServerOfTheRecording:
    """The endpoint our client connects to: shakes hands, then says what was recorded."""

    def __init__(self, keys: dict[str, SecretKey], clock: Clock) -> None:
        self.clock = clock
        self.transport = Wire()
        self._handshake = Handshake(Role.SERVER, keys["server"], now=0.0)
        self._records: RecordLayer | None = None
        self._opened = 0
        self.protocol: Any = None

    def connect(self, factory: Any) -> Deferred[Any]:
        self.protocol = factory.buildProtocol(None)
        self.protocol.makeConnection(self.transport)
        return succeed(self.protocol)

    def shake_hands(self) -> None:
        self._handshake.receive_data(self._taken(), 0.0)
        self.protocol.dataReceived(self._handshake.data_to_send())
        [done] = self._handshake.receive_data(self._taken(), 0.0)
        assert isinstance(done, HandshakeDone)
        self._records = done.records

    def _taken(self) -> bytes:
        data = self.transport.value()
        self.transport.clear()
        return data

    def say(self, plaintext: bytes) -> None:
        assert self._records is not None
        self.protocol.dataReceived(self._records.seal(plaintext))

    def heard(self) -> list[tuple[int, bytes]]:
        """The frames that came since the last time, each with the counter of its record."""
        assert self._records is not None
        self.clock.advance(0)
        found = []
        for plaintext in self._records.open(self._taken()):
            self._opened += 1
            frames, used = split_frames(plaintext)
            assert used == len(plaintext)
            found += [(self._opened, plaintext[start - 5 : end]) for _, _, start, end in frames]
        return found


class Reader(Protocol):
    def __init__(self) -> None:
        self.read = b""
        self.ended: Any = None

    def dataReceived(self, data: bytes) -> None:
        self.read += data

    def connectionLost(self, reason: Any = None) -> None:
        self.ended = reason.value


def service(
    keys: dict[str, SecretKey], who: str, random: Callable[[int], bytes]
) -> tuple[DmsgClient, ServerOfTheRecording, Clock]:
    clock = Clock()
    server = ServerOfTheRecording(keys, clock)
    pinned = PinnedServer(keys["server"].public_key, HostPort("127.0.0.1", 1))
    # the recordings are of base clients: no extension with the server, none with the peer
    client = DmsgClient(
        clock,
        keys[who],
        servers=[pinned],
        random=random,
        endpoint_for=lambda address: server,  # type: ignore[arg-type]
        security=Security.HOP,
        config=ClientConfig(extended=False),
    )
    client.startService()
    clock.advance(0)
    server.shake_hands()
    return client, server, clock


def end_service(client: DmsgClient, server: ServerOfTheRecording, clock: Clock) -> None:
    from twisted.internet.error import ConnectionDone
    from twisted.python.failure import Failure

    stopped = client.stopService()
    clock.advance(0)
    server.protocol.connectionLost(Failure(ConnectionDone()))
    for _ in range(100):
        clock.advance(1)
    assert stopped.called
    assert not [call for call in clock.getDelayedCalls() if call.active()]


def said(recording: Any, who: str) -> dict[int, tuple[bytes, ...]]:
    return {packet.sequence: packet.frames for packet in recording.packets(who, "server")}


def test_the_service_as_alice(recordings: dict[str, Any], identities: dict[str, SecretKey]) -> None:
    recording = recordings[ECHO]
    told = {packet.sequence: packet.plaintext for packet in recording.packets("server", "alice")}
    expected = said(recording, "alice")
    client, server, clock = service(identities, "alice", numbers(0x2000, 0xFFFE, 0))
    bob: PublicKey = identities["bob"].public_key
    server.say(told[1])
    dialled = Deferred.fromCoroutine(client.dial(bob))
    assert server.heard() == [(1, expected[1][0])]
    server.say(told[2])
    transport: Any = _result(dialled)
    reader = Reader()
    transport.attach(reader)
    transport.write(b"hello")
    assert server.heard() == [(2, expected[2][0])]
    server.say(told[3])
    server.say(told[4])
    assert server.heard() == [(3, expected[3][0])]
    assert reader.read == b"hello"
    transport.write(b"world")
    assert server.heard() == [(4, expected[4][0])]
    server.say(told[5])
    transport.write(b"")
    assert server.heard() == [], "an empty write sends nothing"
    server.say(told[6])
    transport.loseConnection()
    assert server.heard() == [(5, expected[6][0])]
    assert str(reader.ended) == "Connection was closed cleanly."
    again = Deferred.fromCoroutine(client.dial(bob))
    assert server.heard() == [(6, expected[7][0])]
    server.say(told[7])
    _result(again).attach(Reader())
    end_service(client, server, clock)


def test_the_service_as_bob(recordings: dict[str, Any], identities: dict[str, SecretKey]) -> None:
    recording = recordings[ECHO]
    expected = said(recording, "bob")
    client, server, clock = service(identities, "bob", numbers(0, 0x0FFE, 0))
    readers: list[Reader] = []

    class Accepting(Factory):
        noisy = False

        def buildProtocol(self, addr: Any) -> Reader:
            readers.append(Reader())
            return readers[-1]

    client.listen(Accepting())
    counter = 0
    for packet in recording.packets():
        if packet.destination == "bob":
            server.say(packet.plaintext)
        elif packet.source == "bob":
            if packet.sequence == 3:
                assert readers[0].read == b"hello"
                assert readers[0].transport is not None
                readers[0].transport.write(b"hello")
            counter += 1
            assert server.heard() == [(counter, expected[packet.sequence][0])]
    assert readers[0].read == b"helloworld"
    assert str(readers[0].ended) == "Connection was closed cleanly."
    assert len(readers) == 2
    end_service(client, server, clock)


def test_the_service_is_told_that_the_peer_is_unknown(
    recordings: dict[str, Any], identities: dict[str, SecretKey]
) -> None:
    recording = recordings[UNKNOWN_PEER]
    told = [packet.plaintext for packet in recording.packets("server", "alice")]
    client, server, clock = service(identities, "alice", numbers(0x1000, 0))
    server.say(told[0])
    dialled = Deferred.fromCoroutine(client.dial(identities["carol"].public_key))
    assert server.heard() == [(1, said(recording, "alice")[1][0])]
    failures: list[Any] = []
    dialled.addErrback(failures.append)
    server.say(told[1])
    clock.advance(0)
    assert failures[0].value.reason == "request rejected"
    end_service(client, server, clock)


def _result(deferred: Deferred[Any]) -> Any:
    results: list[Any] = []
    deferred.addCallback(results.append)
    assert results, "should have fired"
    return results[0]


def test_ok_is_taken_whatever_its_id_and_payload(identities: dict[str, SecretKey]) -> None:
    """The reference's client looks at neither; the vectors have such a frame."""
    program = Program("alice", identities, os.urandom)
    program.take(encode_frame(0, 5, b"ab"))
    assert program.ready
