"""Clients' connections and the switch in one memory, under schedules that Hypothesis makes up.

Opened, accepted, written, read, paused, closed and lost in any order, over networks that deliver any
number of bytes at a time: what arrives is the beginning of what was written, all of it after a clean close, and when
everything is over nothing is left anywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import SecretKey
from dmsg.errors import LocalProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.events import DataReceived, Event, HandshakeDone, Ready, StreamClosed, StreamOffered, StreamOpened
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import CloseReason
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import TransportStarted

SERVER, *CLIENTS = (SecretKey(hashlib.sha256(name).digest()) for name in (b"server", b"alice", b"bob"))
CONFIG = ConnectionConfig(
    send_window_bytes=3_000, frame_data_bytes=700, pause_bytes=2_000, resume_bytes=500, flush_bytes=4_000
)


@dataclass(eq=False)
class End:
    """One end of a transport as its application sees it."""

    stream: Stream
    serial: int
    written: bytearray = field(default_factory=bytearray)
    read: bytearray = field(default_factory=bytearray)
    unread: int = 0
    other: End | None = None
    over: bool = False
    #: This side ended it, so it may have dropped what arrived.
    gave_up: bool = False
    #: Closed with everything acknowledged.
    clean: bool = False

    def more(self, size: int) -> bytes:
        """Bytes that tell where in which stream they belong."""
        start = len(self.written)
        data = bytes((self.serial * 31 + at * 7 + at // 251) % 256 for at in range(start, start + size))
        self.written += data
        return data

    def check(self) -> None:
        if self.other is not None:
            assert self.written.startswith(self.other.read)


class Client:
    """A client with its connection and the two directions of the network in between."""

    def __init__(self, bench: Bench, key: SecretKey) -> None:
        self.bench = bench
        self.key = key
        self.ends: list[End] = []
        self.by_id: dict[int, End] = {}
        self.up = self.down = b""
        # any records will do: those of a real handshake cost too much for so many examples
        here, there = bench.record_pair(key)
        self.member: Member = bench.switch.add_member(key.public_key, there, 0.0)[0]
        self.connection = Connection(key.public_key, here, now=0.0, config=CONFIG, random=bench.random)
        self.down = self.member.data_to_send()
        assert [type(event) for event in self.receive(len(self.down))] == [Ready]

    # what an application does

    def pick(self, choice: int, *states: StreamState) -> End | None:
        found = [end for end in self.ends if end.stream.state in states]
        return found[choice % len(found)] if found else None

    def open(self, other: Client) -> None:
        stream = self.connection.open(other.key.public_key)
        self.add(stream)

    def add(self, stream: Stream) -> End:
        end = self.by_id[stream.id] = End(stream, next(self.bench.serials))
        self.ends.append(end)
        return end

    def close(self, end: End) -> None:
        if end.stream.state is StreamState.OPEN:
            end.gave_up = True
            # the application reads no more; what waits is taken, or the peer would wait for its acknowledgement
            self.consume(end, end.unread)
            if self.connection.close(end.stream):
                self.ended(end, clean=True)
        elif end.stream.state in (StreamState.REQUESTED, StreamState.OFFERED):
            self.abort(end)

    def abort(self, end: End) -> None:
        end.gave_up = True
        self.connection.abort(end.stream, CloseReason.REFUSED)
        self.ended(end, clean=False)

    def consume(self, end: End, size: int) -> None:
        end.unread -= size
        self.connection.consumed(end.stream, size)

    def ended(self, end: End, *, clean: bool) -> None:
        assert not end.over, "over once"
        end.over, end.clean = True, clean
        if clean and end.other is not None and not end.other.gave_up:
            assert end.other.read == end.written

    # what the network does

    def receive(self, size: int) -> list[Event]:
        data, self.down = self.down[:size], self.down[size:]
        with lent(data) as view:
            events = self.connection.receive_data(view, 0.0)
        for event in events:
            match event:
                case StreamOffered(stream=stream):
                    self.add(stream)
                case DataReceived(stream=stream, data=data):
                    end = self.by_id[stream.id]
                    assert end.stream is stream and not end.over
                    end.read += data
                    end.unread += len(data)
                    assert end.other is not None
                    end.other.check()
                case StreamClosed(stream=stream, code=code, local=local):
                    self.ended(self.by_id[stream.id], clean=local and code == CloseReason.NORMAL)
                case StreamOpened(stream=stream):
                    assert self.by_id[stream.id].stream is stream
        return events

    def send(self, size: int) -> None:
        data, self.up = self.up[:size], self.up[size:]
        with lent(data) as view:
            events = self.member.receive_data(view, 0.0)
        for event in events:
            if isinstance(event, TransportStarted):
                self.bench.join(event)


@contextmanager
def lent(data: bytes) -> Iterator[memoryview]:
    """A view of ``data`` as a read gives it: the next one overwrites it."""
    buffer = bytearray(data)
    yield memoryview(buffer)
    buffer[:] = b"?" * len(buffer)


class Bench:
    def __init__(self) -> None:
        self.switch = Switch(
            RelayLimits(stray_burst=100_000, request_burst=100_000, pending_requests=1_000), random=self.random
        )
        self.serials = iter(range(1, 1 << 30))
        self.clients: list[Client] = []
        self.gone: list[Client] = []
        for key in CLIENTS:
            self.clients.append(Client(self, key))

    @staticmethod
    def random(size: int) -> bytes:
        return b"\xff\xf8"[-size:]  # near the end, so that ids and sequences wrap

    @staticmethod
    def record_pair(key: SecretKey) -> Any:
        from dmsg.mux.core.record import RecordLayer

        secret = bytes(key)
        return RecordLayer(secret, secret[::-1]), RecordLayer(secret[::-1], secret)

    def client_of(self, member: Member) -> Client:
        return next(one for one in self.clients + self.gone if one.member is member)

    def join(self, event: TransportStarted) -> None:
        asking = self.client_of(event.asking.member).by_id[event.asking.id]
        asked = self.client_of(event.asking.other.member).by_id[event.asking.other.id]
        asking.other, asked.other = asked, asking

    def move(self) -> None:
        """What the cores have to say gets on its way, except where the network takes nothing."""
        for client in self.clients:
            if client.connection.wants_write:
                client.up += client.connection.data_to_send()
            client.connection.writable.clear()
            while not client.member.congested and client.member.wants_write:
                client.down += client.member.data_to_send()

    def lose(self, number: int) -> None:
        client = self.clients[number]
        self.switch.remove_member(client.member, 0.0)
        for end in client.ends:
            if not end.over:
                client.abort(end)
        self.gone.append(client)
        self.clients[number] = Client(self, client.key)

    def finish(self) -> None:
        """Everything is accepted, read and closed."""
        for _ in range(10_000):
            for client in self.clients:
                client.member.resume()
                for end in list(client.ends):
                    if end.stream.state is StreamState.OFFERED:
                        client.connection.accept(end.stream)
                    client.consume(end, end.unread)
            self.move()
            busy = False
            for client in self.clients:
                busy |= bool(client.up or client.down)
                client.send(len(client.up))
                client.receive(len(client.down))
            if not busy:
                break
        else:
            raise AssertionError("no end to it")
        self.check_ends()
        for client in self.clients:
            for end in client.ends:
                if not end.over:
                    assert end.stream.state is StreamState.OPEN, "nothing is left hanging between two states"
                    assert end.other is not None
                    assert end.other.read == end.written, "nothing was lost on the way"

    def check_ends(self) -> None:
        for client in self.clients + self.gone:
            for end in client.ends:
                end.check()

    def check_empty(self) -> None:
        switch = self.switch
        assert (switch.queued_bytes, switch.open_transports) == (0, 0)
        for client in self.clients:
            assert not client.connection.streams
            assert client.connection._openings.offered == 0
            assert all(end.over for end in client.ends)
            member = client.member
            assert (member.pending_requests, member.queued_from, len(member.legs), len(member.waiting)) == (0, 0, 0, 0)


#: Each as often as it stands here: what leads to data under way comes often, what ends everything seldom.
ACTIONS = (
    ["write"] * 8
    + ["read"] * 4
    + ["up", "down"] * 5
    + ["all"] * 4
    + ["open", "accept", "accept", "close", "pause", "pause", "resume", "resume"] * 2
    + ["refuse", "abort", "lose"]
)
steps = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS),
        st.integers(0, len(CLIENTS) - 1),
        st.integers(0, 7),
        st.sampled_from([0, 1, 5, 40, 300, 2_000, 9_000, 70_000]),
    ),
    min_size=30,
    max_size=120,
)
#: Transports that are there from the beginning, as (who asked, who was asked).
beginnings = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=3)


def do(bench: Bench, action: str, who: int, choice: int, size: int) -> None:
    client = bench.clients[who]
    if action == "open":
        client.open(bench.clients[choice % len(CLIENTS)])
    elif action == "accept":
        if (end := client.pick(choice, StreamState.OFFERED)) is not None:
            client.connection.accept(end.stream)
    elif action == "refuse":
        if (end := client.pick(choice, StreamState.OFFERED)) is not None:
            client.abort(end)
    elif action == "write":
        end = client.pick(choice, StreamState.OPEN)
        if end is not None and not end.stream.blocked:
            client.connection.send_data(end.stream, end.more(size))
    elif action == "read":
        if (end := client.pick(choice, StreamState.OPEN)) is not None:
            client.consume(end, min(size, end.unread))
    elif action == "close":
        if (end := client.pick(choice, *StreamState)) is not None:
            client.close(end)
    elif action == "abort":
        if (end := client.pick(choice, *set(StreamState) - {StreamState.CLOSED})) is not None:
            client.abort(end)
    elif action == "pause":
        client.member.pause()
    elif action == "resume":
        client.member.resume()
    elif action == "lose":
        if choice == 0:
            bench.lose(who)
    elif action == "up":
        client.send(size)
    elif action == "down":
        client.receive(size)
    else:
        for one in bench.clients:
            one.send(len(one.up))
        bench.move()
        for one in bench.clients:
            one.receive(len(one.down))


@given(beginnings, steps)
@settings(max_examples=150)
def test_any_schedule(beginning: list[tuple[int, int]], wanted: list[tuple[str, int, int, int]]) -> None:
    bench = Bench()
    for asking, asked in beginning:
        bench.clients[asking].open(bench.clients[asked])
    bench.finish()
    for step in wanted:
        do(bench, *step)
        bench.move()
    bench.check_ends()
    bench.finish()
    for client in bench.clients:
        for end in client.ends:
            if not end.over:
                client.close(end)
    bench.finish()
    bench.check_empty()
    bench.switch.handle_timeout(1e9)
    assert bench.switch.next_timeout() is None
    for client in bench.clients:
        bench.switch.remove_member(client.member, 0.0)
    assert not bench.switch.members


def transfer(bench: Bench, size: int, paused: bool = False) -> tuple[End, End]:
    """Open a transport, write ``size`` bytes, and close it; gives both ends once it is over."""
    alice, bob = bench.clients
    alice.open(bob)
    bench.finish()
    [end] = alice.ends
    if paused:
        bob.member.pause()
    alice.connection.send_data(end.stream, end.more(size))
    alice.close(end)
    bench.finish()
    assert end.other is not None
    return end, end.other


@pytest.mark.parametrize("size", [0, 1, 700, 3_000, 3_001, 100_000])
@pytest.mark.parametrize("paused", [True, False])
def test_a_clean_close_delivers_everything(size: int, paused: bool) -> None:
    bench = Bench()
    end, other = transfer(bench, size, paused)
    assert end.clean and other.over and not other.clean
    assert bytes(other.read) == bytes(end.written) and len(other.read) == size
    bench.check_empty()


def test_a_receiver_that_does_not_read_stops_its_sender_alone() -> None:
    bench = Bench()
    alice, bob = bench.clients
    for _ in range(2):
        alice.open(bob)
    bench.finish()
    stuck, free = alice.ends
    for end in (stuck, free):
        alice.connection.send_data(end.stream, end.more(200_000))
    for _ in range(500):
        bench.move()
        for client in bench.clients:
            client.send(len(client.up))
            client.receive(len(client.down))
        assert free.other is not None and stuck.other is not None
        bob.consume(free.other, free.other.unread)
    assert free.other.read == free.written
    limit = 65_535 + CONFIG.send_window_bytes
    assert 65_535 <= len(stuck.other.read) <= limit, "what is acknowledged unread, and one window"
    assert stuck.stream.blocked and not free.stream.blocked
    bench.finish()
    assert stuck.other.read == stuck.written


def test_through_real_handshakes() -> None:
    """Handshake, admission, transport and close as bytes alone, each core fed by the one before it."""
    switch = Switch()
    ends: list[tuple[Connection, Member]] = []
    for key in CLIENTS:
        client = Handshake(Role.CLIENT, key, SERVER.public_key, now=0.0)
        server = Handshake(Role.SERVER, SERVER, now=0.0)
        server.receive_data(client.data_to_send(), 0.0)
        [done] = client.receive_data(server.data_to_send(), 0.0)
        [there] = server.receive_data(client.data_to_send(), 0.0)
        assert isinstance(done, HandshakeDone) and isinstance(there, HandshakeDone)
        assert there.remote == key.public_key
        member, _ = switch.add_member(there.remote, there.records, 0.0)
        connection = Connection(key.public_key, done.records, now=0.0, random=os.urandom)
        assert connection.receive_data(member.data_to_send(), 0.0) == [Ready()]
        ends.append((connection, member))
    (alice, alice_port), (bob, bob_port) = ends

    def pass_on() -> tuple[list[Event], list[Event]]:
        alice_port.receive_data(alice.data_to_send(), 0.0)
        bob_port.receive_data(bob.data_to_send(), 0.0)
        to_alice = alice.receive_data(alice_port.data_to_send(), 0.0)
        return to_alice, bob.receive_data(bob_port.data_to_send(), 0.0)

    ours = alice.open(CLIENTS[1].public_key)
    _, [request] = pass_on()
    assert isinstance(request, StreamOffered)
    theirs = request.stream
    assert (theirs.remote, theirs.id % 2, ours.id % 2) == (CLIENTS[0].public_key, 1, 0)
    bob.accept(theirs)
    assert pass_on() == ([StreamOpened(ours)], [])
    alice.send_data(ours, b"hello")
    assert pass_on() == ([], [DataReceived(theirs, b"hello")])
    assert not alice.close(ours)
    assert pass_on() == ([StreamClosed(ours, 0, local=True)], [])
    assert pass_on() == ([], [StreamClosed(theirs, 0, local=False)])
    with pytest.raises(LocalProtocolError):
        bob.send_data(theirs, b"too late")
    assert switch.open_transports == 0
