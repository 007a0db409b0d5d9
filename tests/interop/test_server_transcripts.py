"""The recorded clients talk to our server: what it answers must be what the reference's server answered.

The bytes go through the service as it runs in production (shells, handshakes, switch) on a clock that stands still. Each
difference is in a table below with the section of the specification that wants it; all else must be equal, the record
counters included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet.address import IPv4Address
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport

from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    OK,
    REQUEST,
    CloseReason,
    encode_close,
    encode_frame,
    split_frames,
)
from dmsg.mux.relay.service import DmsgRelay

ECHO = "connect, dial, accept, echo, close"
UNKNOWN_PEER = "request rejected: unknown peer"
DELAYED_ACK = "delayed acknowledgement"
BACKLOG = "accept backlog"
ODD_FRAMES = "server reaction to odd frames"
ANSWERS = "answers to REQUEST as the dialling Go client sees them"


def frames_of(plaintext: bytes) -> list[bytes]:
    frames, used = split_frames(plaintext)
    assert used == len(plaintext), "a server's record holds whole frames"
    return [plaintext[start - 5 : end] for _, _, start, end in frames]


class Client:
    """A recorded client, connected to our server."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.transport = StringTransport()
        self.shell = bench.server.build_shell(IPv4Address("TCP", "127.0.0.1", 1000))
        self.shell.makeConnection(self.transport)
        self._bench = bench
        core = Handshake(
            Role.CLIENT, bench.keys[name], bench.keys["server"].public_key, now=0.0, random=bench.ephemeral("initiator")
        )
        self.shell.dataReceived(core.data_to_send())
        bench.turns()
        [done] = core.receive_data(self._taken(), 0.0)
        assert isinstance(done, HandshakeDone)
        self.records: RecordLayer = done.records
        self.received: list[tuple[int, bytes]] = []
        self._opened = 0
        self._sent = 0
        bench.clients[name] = self
        self.shell.dataReceived(core.data_to_send())
        bench.turns()
        bench.settle()

    def _taken(self) -> bytes:
        data = self.transport.value()
        self.transport.clear()
        return data

    def send(self, plaintext: bytes, sequence: int | None = None) -> None:
        """Send one packet; ``sequence`` is the counter it must travel under."""
        self._sent += 1
        assert sequence in (None, self._sent)
        self.shell.dataReceived(self.records.seal(plaintext))
        self._bench.settle()

    def collect(self) -> None:
        for plaintext in self.records.open(self._taken()):
            self._opened += 1
            self.received += [(self._opened, frame) for frame in frames_of(plaintext)]

    @property
    def dropped(self) -> bool:
        return self.transport.disconnecting

    def take(self) -> list[tuple[int, bytes]]:
        taken, self.received = self.received, []
        return taken


class Bench:
    """Our server, with the ids and ephemeral keys of the recording."""

    def __init__(self, keys: dict[str, SecretKey]) -> None:
        self.keys = keys
        self.clock = Clock()
        self.clients: dict[str, Client] = {}
        # First transport ids: each client's are drawn when it is asked for the first time.
        self._ids: Iterator[int] = iter((0x0101, 0x0201, 0x0301))
        endpoint = TCP4ServerEndpoint(MemoryReactorClock(), 1)
        self.server = DmsgRelay(self.clock, keys["server"], endpoint, random=self._random)

    def ephemeral(self, side: str) -> Any:
        return lambda size: bytes(self.keys[f"{side}_ephemeral"])

    def _random(self, size: int) -> bytes:
        if size == 2:
            return next(self._ids).to_bytes(2, "big")
        return bytes(self.keys["responder_ephemeral"]) if size == 32 else os.urandom(size)

    def connect(self, name: str) -> Client:
        return Client(self, name)

    def turns(self) -> None:
        """What waits for a turn of its own has had it: each step of a handshake does."""
        for _ in range(4):
            self.clock.advance(0)

    def settle(self) -> None:
        self.clock.advance(0)
        for client in self.clients.values():
            client.collect()


@pytest.fixture
def bench(identities: dict[str, SecretKey]) -> Iterator[Bench]:
    bench = Bench(identities)
    yield bench
    for client in bench.clients.values():
        client.shell.connectionLost()
    assert bench.server.switch.open_transports == 0
    assert bench.server.switch.queued_bytes == 0
    assert not bench.server.switch.members


# --- everything but odd frames ---------------------------------------------------------------------------------------

#: Our frames where they differ: (recording, destination, counter there) -> (what ours sends in its place, why).
#: Nothing in its place: the frame is not sent at all.
DEVIATIONS: dict[tuple[str, str, int], tuple[bytes | None, str]] = {
    (UNKNOWN_PEER, "alice", 2): (
        encode_close(0x1000, CloseReason.UNKNOWN_PEER),
        ":ref:`spec-close-reasons`: a reason of its own",
    ),
    (ANSWERS, "alice", 3): (
        encode_close(0x1002, CloseReason.MALFORMED),
        ":ref:`spec-establishing`: an altered ACCEPT is not passed on",
    ),
    (ANSWERS, "bob", 4): (
        encode_close(0x0103, CloseReason.MALFORMED),
        ":ref:`spec-establishing`: CLOSE to both, at once",
    ),
    (ANSWERS, "alice", 4): (
        encode_close(0x1004, CloseReason.MALFORMED),
        ":ref:`spec-establishing`: FWD before ACCEPT is not passed on",
    ),
    (ANSWERS, "bob", 6): (
        encode_close(0x0105, CloseReason.MALFORMED),
        ":ref:`spec-establishing`: CLOSE to both, at once",
    ),
}

#: Record counters where they differ: (recording, destination) -> (recorded counter -> ours, why).
COUNTERS: dict[tuple[str, str], tuple[dict[int, int], str]] = {
    (DELAYED_ACK, "alice"): ({7: 6, 8: 6, 9: 7}, ":ref:`spec-records`: three ACKs that came together leave together"),
}


def test_the_tables_name_recordings_that_exist(recordings: dict[str, Any]) -> None:
    assert set(recordings) == {ECHO, UNKNOWN_PEER, DELAYED_ACK, BACKLOG, ODD_FRAMES, ANSWERS}
    for name, destination, sequence in DEVIATIONS:
        assert any(p.sequence == sequence for p in recordings[name].packets("server", destination))


@pytest.mark.parametrize("name", [ECHO, UNKNOWN_PEER, DELAYED_ACK, BACKLOG, ANSWERS])
def test_our_server_answers_as_recorded(bench: Bench, recordings: dict[str, Any], name: str) -> None:
    recording = recordings[name]
    for client in recording.clients:
        bench.connect(client)
    for packet in recording.packets():
        if packet.source != "server":
            bench.clients[packet.source].send(packet.plaintext, packet.sequence)
    counters = {client: COUNTERS.get((name, client), ({}, ""))[0] for client in recording.clients}
    for client in recording.clients:
        expected = []
        for packet in recording.packets("server", client):
            frames = packet.frames
            deviation = DEVIATIONS.get((name, client, packet.sequence))
            if deviation is not None:
                frames = () if deviation[0] is None else (deviation[0],)
            expected += [(counters[client].get(packet.sequence, packet.sequence), frame) for frame in frames]
        assert bench.clients[client].take() == expected
        assert not bench.clients[client].dropped


@pytest.mark.parametrize("name", [ECHO, BACKLOG, DELAYED_ACK, ANSWERS])
def test_each_answer_comes_with_the_read_that_caused_it(bench: Bench, recordings: dict[str, Any], name: str) -> None:
    """The recorded server wrote its frame before it looked at anything else; ours does not wait either."""
    recording = recordings[name]
    for client in recording.clients:
        bench.connect(client).take()
    for packet in recording.packets():
        if packet.source == "server":
            continue
        bench.clients[packet.source].send(packet.plaintext, packet.sequence)
        answers = {client: bench.clients[client].take() for client in recording.clients}
        assert sum(len({counter for counter, _ in frames}) for frames in answers.values()) <= 2
        if packet.frames and packet.frames[0][0] in (REQUEST, FWD, ACK):
            kind = packet.frames[0][0]
            late = (name, kind) == (ANSWERS, FWD)  # CLOSE to both instead
            got = [frame[0] for frames in answers.values() for _, frame in frames]
            assert got == ([CLOSE, CLOSE] if late else [kind] * len(packet.frames))


# --- odd frames ------------------------------------------------------------------------------------------------------


class ReferenceClient:
    """What the recorded bob did with what he was sent: the reference's client library, as far as it shows here."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def answer(self, frame: bytes) -> list[bytes]:
        kind, transport_id, payload = frame[0], int.from_bytes(frame[1:3], "big"), frame[5:]
        if kind == REQUEST:
            self.live.add(transport_id)
            return [encode_frame(ACCEPT, transport_id, payload)]
        bad = (kind == FWD and len(payload) < 2) or (kind == ACK and len(payload) != 2)
        if bad:
            self.live.discard(transport_id)
            return [encode_close(transport_id, 0)]
        if kind == CLOSE:
            self.live.discard(transport_id)
        return []


def test_the_stand_in_for_bob_does_what_bob_did(recordings: dict[str, Any]) -> None:
    bob = ReferenceClient()
    answers = [
        a for packet in recordings[ODD_FRAMES].packets("server", "bob") for f in packet.frames for a in bob.answer(f)
    ]
    recorded = [f for packet in recordings[ODD_FRAMES].packets("bob", "server") for f in packet.frames]
    assert sorted(answers) == sorted(recorded)  # its goroutines answered two requests of one packet the other way round


class OddFrames:
    """Builds what is expected of a step; ``a`` and ``b`` are the keys of alice and bob."""

    def __init__(self, keys: dict[str, SecretKey]) -> None:
        self.a, self.b = keys["alice"].public_key.raw, keys["bob"].public_key.raw

    def steps(self) -> list[tuple[str, list[bytes], list[bytes], str]]:
        """What alice sends (as the recording's note says), what bob gets, what alice gets, and the row it deviates by.

        An empty row: as recorded, but for bob's ids, which run 2 behind for each REQUEST that ours refuses.
        """
        a, b = self.a, self.b

        def request(transport_id: int) -> bytes:
            return encode_frame(REQUEST, transport_id, a + b)

        def accept(transport_id: int) -> bytes:
            return encode_frame(ACCEPT, transport_id, a + b)

        reason = CloseReason
        return [
            ("FWD on an id never used", [], [encode_close(0x2000, 0)], ""),
            ("ACK on an id never used", [], [encode_close(0x2002, 0)], ""),
            ("CLOSE on an id never used", [], [], ":ref:`spec-late-frames`: a CLOSE is not answered with a CLOSE"),
            ("ACCEPT on an id never used", [], [encode_close(0x2006, 0)], ""),
            (
                "REQUEST with a 65-byte payload",
                [],
                [encode_close(0x2008, reason.MALFORMED)],
                ":ref:`spec-request-checks`",
            ),
            (
                "REQUEST with another's initiating key",
                [],
                [encode_close(0x200A, reason.MALFORMED)],
                ":ref:`spec-request-checks`",
            ),
            (
                "REQUEST with an odd id (0x2001)",
                [],
                [encode_close(0x2001, reason.BAD_ID)],
                ":ref:`spec-request-checks`",
            ),
            ("REQUEST id 0x2100", [request(0x101)], [accept(0x2100)], ""),
            (
                "REQUEST id 0x2100 again (id in use)",
                [encode_close(0x101, reason.BAD_ID)],
                [encode_close(0x2100, reason.BAD_ID)],
                ":ref:`spec-request-checks`: refused, and the old peer is told",
            ),
            (
                "FWD with a 1-byte payload on 0x2100",
                [],
                [],
                ":ref:`spec-request-checks`: that transport is over since the step before",
            ),
            ("REQUEST id 0x2102", [request(0x103)], [accept(0x2102)], ""),
            (
                "ACK with a 3-byte payload on 0x2102",
                [encode_frame(ACK, 0x103, bytes(3))],
                [encode_close(0x2102, 0)],
                "",
            ),
            ("REQUEST id 0x2104", [request(0x105)], [accept(0x2104)], ""),
            ("CLOSE with an empty payload on 0x2104", [encode_frame(CLOSE, 0x105)], [], ""),
            (
                "REQUEST id 0x2106 to itself (alice -> alice)",
                [],
                [encode_frame(REQUEST, 0x201, a + a)],
                "",
            ),
            (
                "two REQUEST frames in one noise packet",
                [request(0x107), request(0x109)],
                [accept(0x2200), accept(0x2202)],
                "",
            ),
            ("one REQUEST split over three noise packets", [request(0x10B)], [accept(0x2204)], ""),
            ("OK frame (type 0x0) from the client", [], [], ""),
        ]


#: What ours must not do, by step: the reference's frames that a deviation drops, as (to alice, to bob).
DROPPED = {
    "CLOSE on an id never used": (1, 0),
    "REQUEST with an odd id (0x2001)": (1, 1),
    "REQUEST id 0x2100 again (id in use)": (1, 1),
    "FWD with a 1-byte payload on 0x2100": (1, 1),
}


def odd_steps(recording: Any) -> dict[str, list[Any]]:
    """The recorded packets after each "alice (raw) sends: ..."."""
    steps: dict[str, list[Any]] = {}
    current: list[Any] = []
    for event in recording.events:
        if isinstance(event, str):
            head, found, step = event.partition(" (raw) sends: ")
            if found:
                current = steps.setdefault(f"{step}" if head == "alice" else f"{head}: {step}", [])
        else:
            current.append(event)
    return steps


def test_odd_frames(bench: Bench, recordings: dict[str, Any], identities: dict[str, SecretKey]) -> None:
    recorded = odd_steps(recordings[ODD_FRAMES])
    expected = OddFrames(identities).steps()
    assert [step for step, *_ in expected] == list(recorded)[:-1]
    bob, alice, library = bench.connect("bob"), bench.connect("alice"), ReferenceClient()
    bob.take(), alice.take()
    refused = 0
    for step, to_bob, to_alice, row in expected:
        packets = recorded[step]
        for packet in packets:
            if packet.source == "alice":
                alice.send(packet.plaintext, packet.sequence)
        got_bob = [frame for _, frame in bob.take()]
        for frame in got_bob:
            for answer in library.answer(frame):
                bob.send(answer)
        got_alice = [frame for _, frame in alice.take()]
        assert (got_bob, got_alice) == (to_bob, to_alice), step
        # The expectations above are the recorded frames, unless a row says otherwise.
        there_bob = [f for packet in packets if packet.destination == "bob" for f in packet.frames]
        there_alice = [f for packet in packets if packet.destination == "alice" for f in packet.frames]
        if row:
            assert (len(there_alice), len(there_bob)) == DROPPED.get(step, (len(to_alice), len(to_bob))), step
            refused += sum(frame[0] == REQUEST for frame in there_bob)
        else:
            shifted = [
                f[:1] + (int.from_bytes(f[1:3], "big") - 2 * refused).to_bytes(2, "big") + f[3:] for f in there_bob
            ]
            assert to_bob == shifted, step
            assert sorted(to_alice) == sorted(there_alice), step
    assert alice.dropped, "an OK from a client ends its connection"
    assert not bob.dropped
    assert refused == 2
    alice.shell.connectionLost()
    bench.settle()
    gone = [encode_close(transport_id, CloseReason.PEER_GONE) for transport_id in (0x107, 0x109, 0x10B)]
    assert [frame for _, frame in bob.take()] == gone, "her peers are told"


def test_unknown_type_from_a_client_ends_the_connection(bench: Bench, recordings: dict[str, Any]) -> None:
    [packet] = [p for p in odd_steps(recordings[ODD_FRAMES])["carol: frame type 0x04"] if p.source == "carol"]
    carol = bench.connect("carol")
    assert carol.take() == [(1, encode_frame(OK, 0))]
    carol.send(packet.plaintext, packet.sequence)
    assert carol.dropped
    assert carol.take() == []
