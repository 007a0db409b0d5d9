"""Two clients, two relays, and everything that can go wrong between them: a secure transport is always one stream.

The clients, sessions, transports, cores and switches are the real ones. The network is bytes in buffers that Hypothesis
delivers, cuts and tampers with, on a clock that only it moves (:ref:`spec-extension`, :ref:`spec-resumption`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer
from dmsg.clients.dial import DialConfig
from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.hello import hello_payload
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.wire import ACCEPT, REQUEST, encode_close, encode_frame
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.switch import Switch
from dmsg.relays.pool import PoolConfig

WINDOW_BYTES = 2_000
ACK_LIMIT_BYTES = 600
FRAME_BYTES = 300
#: No example lasts so long that a transport without a path would be given up.
GRACE_S = 100_000.0
CONNECTION = ConnectionConfig(
    secure_window_bytes=WINDOW_BYTES,
    ack_limit_bytes=ACK_LIMIT_BYTES,
    frame_data_bytes=FRAME_BYTES,
    sealed_data_bytes=FRAME_BYTES,
    rekey_after_frames=5,
    receive_limit_bytes=WINDOW_BYTES + ACK_LIMIT_BYTES,
    pause_bytes=1_000,
    resume_bytes=500,
    flush_bytes=900,
)
CONFIG = ClientConfig(
    connection=CONNECTION,
    pool=PoolConfig(backoff_first_s=0.1, backoff_limit_s=0.2, poll_s=0.1),
    dial=DialConfig(timeout_s=3.0, stagger_s=0.05),
    resume_grace_s=GRACE_S,
    resume_pause_s=0.05,
    resume_pause_limit_s=0.2,
)
LIMITS = RelayLimits(requests_per_s=1e6, request_burst=10**6, strays_per_s=1e6, stray_burst=10**6)
#: A client stops writing to the network when so much is on the way.
HIGH_WATER_BYTES = 1_500
_STREAMS = {side: Random(side).randbytes(1 << 18) for side in (0, 1)}


class Wire:
    """One TCP connection between a client and a relay: what is on the way, and who still thinks that it is up.

    It is the client's transport at the same time.
    """

    def __init__(self, world: World, relay: Relay) -> None:
        self.world = world
        self.relay = relay
        self.up, self.down = bytearray(), bytearray()
        self.client_sees = self.relay_sees = True
        self.shell: Any = None
        self.core: Handshake | Member = Handshake(
            Role.SERVER, relay.key, now=world.clock.seconds(), payload=hello_payload(), random=world.random.randbytes
        )
        self.paused = False

    # the transport of the client's shell

    def registerProducer(self, producer: Any, streaming: bool) -> None: ...
    def unregisterProducer(self) -> None: ...
    def pauseProducing(self) -> None: ...
    def resumeProducing(self) -> None: ...

    def write(self, data: bytes) -> None:
        if self.client_sees:
            self.up += data
            if len(self.up) > HIGH_WATER_BYTES and not self.paused:
                self.paused = True
                self.shell.pauseProducing()

    def abortConnection(self) -> None:
        self.world.clock.callLater(0, self.client_loses)
        self.world.clock.callLater(0, self.relay_loses)

    loseConnection = abortConnection

    # what happens to it

    def client_loses(self) -> None:
        if self.client_sees:
            self.client_sees = False
            self.down.clear()
            self.shell.connectionLost(Failure(ConnectionLost()))

    def relay_loses(self) -> None:
        if self.relay_sees:
            self.relay_sees = False
            self.up.clear()
            if isinstance(self.core, Member):
                self.relay.switch.remove_member(self.core, 0)
                self.relay.flush()

    def deliver_up(self, size: int) -> None:
        data = bytes(self.up[:size])
        del self.up[:size]
        if self.relay_sees and data:
            self.relay.receive(self, data)
        elif data:
            self.client_loses()  # the client has left the relay
        if self.paused and len(self.up) <= HIGH_WATER_BYTES // 2 and self.client_sees:
            self.paused = False
            self.shell.resumeProducing()

    def deliver_down(self, size: int) -> None:
        data = bytes(self.down[:size])
        del self.down[:size]
        if self.client_sees and data:
            self.shell.dataReceived(data)


class Relay:
    """The switch of a server, and a record of the requests and answers that went through it."""

    def __init__(self, world: World, key: SecretKey) -> None:
        self.world = world
        self.key = key
        self.switch = Switch(LIMITS, random=world.random.randbytes)
        self.wires: list[Wire] = []
        self.seen: list[tuple[int, bytes, bytes]] = []
        """Type, whom it was for, payload."""

    def receive(self, wire: Wire, data: bytes) -> None:
        try:
            events = wire.core.receive_data(data, 0)
        except RemoteProtocolError as error:
            raise AssertionError(f"an honest client was dropped: {error}") from error
        if isinstance(wire.core, Handshake):
            wire.down += wire.core.data_to_send()
            for event in events:
                assert isinstance(event, HandshakeDone)
                extended = event.peer.extended
                older = self.switch.members.get(event.remote.raw)
                wire.core, _ = self.switch.add_member(event.remote, event.records, 0, extended=extended)
                for other in self.wires:
                    if other is not wire and other.core is older:
                        other.relay_sees = False
                        self.world.clock.callLater(0, other.client_loses)
                if event.leftover:
                    wire.core.receive_data(event.leftover, 0)
        self.flush()

    def flush(self) -> None:
        self.switch.dirty.clear()
        for wire in self.wires:
            if isinstance(wire.core, Member) and wire.relay_sees:
                while wire.core.wants_write:
                    self._note(wire.core)
                    wire.down += wire.core.data_to_send()

    def _note(self, member: Member) -> None:
        for frame in member.out:
            if frame[0] in (REQUEST, ACCEPT) and len(frame) == 5 + int.from_bytes(frame[3:5], "big") > 71:
                self.seen.append((frame[0], member.remote.raw, frame[5:]))

    def member_of(self, raw: bytes) -> Member | None:
        for wire in self.wires:
            if isinstance(wire.core, Member) and wire.relay_sees and wire.core.remote.raw == raw:
                return wire.core
        return None


class Endpoint:
    """Connects a shell to a relay."""

    def __init__(self, world: World, relay: Relay) -> None:
        self.world = world
        self.relay = relay

    def connect(self, factory: Any) -> Deferred[Any]:
        wire = Wire(self.world, self.relay)
        self.relay.wires.append(wire)
        wire.shell = factory.buildProtocol(None)
        wire.shell.makeConnection(wire)
        done: Deferred[Any] = Deferred()
        done.callback(wire.shell)
        return done


class App(Protocol):
    """One end's application: writes a known stream, keeps what it gets, remembers how it ended."""

    def __init__(self, side: int, chatty: bool) -> None:
        self.side = side
        self.chatty = chatty
        self.got = bytearray()
        self.said = 0
        self.peer_ended_at: int | None = None
        self.lost: BaseException | None = None
        self.closed = False
        self.aborted = False
        self.half_closed = False
        self.made = False

    def connectionMade(self) -> None:
        self.made = True
        if self.chatty:
            self.say(7)

    @property
    def may_write(self) -> bool:
        return self.lost is None and not self.half_closed and not self.transport.disconnecting  # type: ignore[union-attr]

    def say(self, size: int) -> None:
        if self.may_write and self.said + size < len(_STREAMS[self.side]):
            data = _STREAMS[self.side][self.said : self.said + size]
            self.said += size
            self.transport.write(data)  # type: ignore[union-attr]

    @property
    def written(self) -> bytes:
        return _STREAMS[self.side][: self.said]

    def dataReceived(self, data: bytes) -> None:
        assert self.lost is None and self.peer_ended_at is None
        self.got += data
        if self.chatty:
            self.say(11)

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        assert self.lost is None
        self.lost = reason.value


@implementer(IHalfCloseableProtocol)
class HalfCloseApp(App):
    """An application that goes on in one direction when the other is through."""

    def readConnectionLost(self) -> None:
        assert self.peer_ended_at is None and self.lost is None
        self.peer_ended_at = len(self.got)

    def writeConnectionLost(self) -> None:
        assert self.half_closed or self.closed


class World(RuleBasedStateMachine):
    """The machine: rules are what applications, networks and relays do."""

    sides = st.sampled_from([0, 1])

    def __init__(self) -> None:
        super().__init__()
        self.apps: list[App] = []
        self.one_sided = False

    # --- the beginning ---------------------------------------------------------------------------------------------

    @initialize(half_closing=st.booleans(), chatty=st.booleans())
    def begin(self, half_closing: bool, chatty: bool) -> None:
        self.clock = Clock()
        self.random = Random(7)
        keys = [SecretKey(bytes((n,)) * 32) for n in range(1, 5)]
        self.relays = [Relay(self, key) for key in keys[2:]]
        pins = [PinnedServer(r.key.public_key, HostPort("127.0.0.1", n)) for n, r in enumerate(self.relays, 1)]
        self.clients = [
            DmsgClient(
                self.clock,
                key,
                servers=pins,
                min_servers=2,
                security=Security.E2E,
                config=CONFIG,
                random=self.random.randbytes,
                endpoint_for=lambda address: Endpoint(self, self.relays[address.port - 1]),  # type: ignore[arg-type,return-value]
                now_ns=lambda: 0,
            )
            for key in keys[:2]
        ]
        kind = HalfCloseApp if half_closing else App
        dialling, listening = kind(0, False), kind(1, chatty)
        for client in self.clients:
            client.startService()
        self.clients[1].listen(Factory.forProtocol(lambda: listening))
        self.settle(lambda: all(len(client.pool.sessions) == 2 for client in self.clients))
        dialled = ensureDeferred(self.clients[0].connect(Factory.forProtocol(lambda: dialling), keys[1].public_key))
        self.settle(lambda: dialled.called and listening.made)
        self.apps = [dialling, listening]
        self.transports: list[DmsgTransport] = [dialling.transport, listening.transport]  # type: ignore[list-item]
        assert all(one.security == "e2e" for one in self.transports)

    def turn(self) -> None:
        self.clock.advance(0)

    def wires(self) -> Iterator[Wire]:
        for relay in self.relays:
            yield from relay.wires

    def pick_wire(self, choice: int) -> Wire | None:
        alive = [wire for wire in self.wires() if wire.client_sees or wire.relay_sees]
        return alive[choice % len(alive)] if alive else None

    def deliver_all(self) -> None:
        for wire in list(self.wires()):
            wire.deliver_up(len(wire.up))
            wire.deliver_down(len(wire.down))
            if not wire.relay_sees:
                wire.client_loses()
        self.turn()

    def settle(self, done: Any, limit: int = 600) -> None:
        """Everything is delivered and time goes by, until ``done`` and nothing is on the way."""
        for _ in range(limit):
            self.deliver_all()
            self.check()
            if done() and not any(wire.up or wire.down for wire in self.wires()):
                return
            self.clock.advance(0.05)
        raise AssertionError("it does not settle")

    # --- what applications do --------------------------------------------------------------------------------------

    @rule(side=sides, size=st.one_of(st.integers(1, 40), st.integers(200, 3_000)))
    def write(self, side: int, size: int) -> None:
        self.apps[side].say(size)
        self.turn()

    @rule(side=sides)
    def pause(self, side: int) -> None:
        if self.apps[side].lost is None:
            self.transports[side].pauseProducing()

    @rule(side=sides)
    def resume(self, side: int) -> None:
        if self.apps[side].lost is None:
            self.transports[side].resumeProducing()
            self.turn()

    @precondition(lambda self: isinstance(self.apps[0], HalfCloseApp))
    @rule(side=sides)
    def half_close(self, side: int) -> None:
        app = self.apps[side]
        if app.lost is None and not self.transports[side].disconnecting:
            app.half_closed = True
            self.transports[side].loseWriteConnection()
            self.turn()

    @rule(side=sides)
    def close(self, side: int) -> None:
        if self.apps[side].lost is None:
            self.apps[side].closed = True
            self.transports[side].loseConnection()
            self.turn()

    # --- what the network does -------------------------------------------------------------------------------------

    @rule(choice=st.integers(0, 7), up=st.booleans(), size=st.one_of(st.integers(1, 60), st.integers(100, 4_000)))
    def deliver(self, choice: int, up: bool, size: int) -> None:
        wire = self.pick_wire(choice)
        if wire is not None:
            (wire.deliver_up if up else wire.deliver_down)(size)
            self.turn()

    @rule()
    def deliver_everything(self) -> None:
        self.deliver_all()

    @rule(rounds=st.integers(2, 10))
    def calm(self, rounds: int) -> None:
        """Long enough for another path to be found."""
        for _ in range(rounds):
            self.deliver_all()
            self.clock.advance(0.05)
            self.turn()

    @rule(side=sides, size=st.integers(1, 500), reason=st.sampled_from([0, 13, 14]))
    def end_of_the_path_right_behind_data(self, side: int, size: int, reason: int) -> None:
        """Both come in one read."""
        self.apps[1 - side].say(size)
        self.turn()
        for wire in list(self.wires()):
            wire.deliver_up(len(wire.up))
        self.relay_closes_all(0, reason)
        self.relay_closes_all(1, reason)
        for wire in list(self.wires()):
            wire.deliver_down(len(wire.down))
        self.turn()

    @rule(choice=st.integers(0, 7), who=st.sampled_from(["client", "relay", "both"]))
    def cut(self, choice: int, who: str) -> None:
        wire = self.pick_wire(choice)
        if wire is not None:
            if who != "relay":
                wire.client_loses()
            if who != "client":
                wire.relay_loses()
            self.turn()

    @rule(side=sides, who=st.sampled_from(["client", "relay", "both"]))
    def cut_the_path(self, side: int, who: str) -> None:
        """The connection the transport runs on, not just any."""
        server = self.transports[side].getHost().server_public_key  # type: ignore[attr-defined]
        for wire in list(self.wires()):
            session = self.clients[side].pool.sessions.get(server)
            if session is not None and wire.shell is session.shell:
                if who != "relay":
                    wire.client_loses()
                if who != "client":
                    wire.relay_loses()
        self.turn()

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.3]))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.turn()

    # --- what relays do --------------------------------------------------------------------------------------------

    # a REQUEST that is answered with "refused" is taken at its word: no relay lies about that here
    @rule(relay=st.sampled_from([0, 1]), reason=st.sampled_from([0, 3, 13, 14]))
    def relay_closes_all(self, relay: int, reason: int) -> None:
        self.relays[relay].switch.drop_transports(reason)
        self.relays[relay].flush()

    @rule(side=sides, reason=st.sampled_from([0, 1, 12, 13, 14]), extra=st.binary(max_size=17))
    def relay_makes_up_a_close(self, side: int, reason: int, extra: bytes) -> None:
        transport = self.transports[side]
        for relay in self.relays:
            member = relay.member_of(self.clients[side].public_key.raw)
            if member is not None and relay.key.public_key == transport.getHost().server_public_key:  # type: ignore[attr-defined]
                self.one_sided = True  # a relay that tells only one side can let the other wait for ever
                frame = encode_close(transport.stream.id, reason)
                member.send_control(frame[:3] + (1 + len(extra)).to_bytes(2, "big") + bytes((reason,)) + extra)
                relay.flush()

    @rule(relay=st.sampled_from([0, 1]), choice=st.integers(0, 30), transport_id=st.integers(0, 3))
    def relay_replays_a_request(self, relay: int, choice: int, transport_id: int) -> None:
        """Handshake message 1, and with it a wish to resume, can be played again by a relay that saw it."""
        one = self.relays[relay]
        requests = [(raw, payload) for kind, raw, payload in one.seen if kind == REQUEST]
        if requests:
            raw, payload = requests[choice % len(requests)]
            member = one.member_of(raw)
            unused = 2 * transport_id + 1
            client = next(client for client in self.clients if client.public_key.raw == raw)
            session = client.pool.sessions.get(one.key.public_key)
            if member is not None and session is not None and not session.connection.streams.get(unused):
                if unused in member.legs:
                    return
                member.send_control(encode_frame(REQUEST, unused, payload))
                one.flush()

    # --- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        if not self.apps:
            return
        for app, peer in (self.apps, self.apps[::-1]):
            got = bytes(app.got)
            assert peer.written.startswith(got), "what arrives is a prefix of what was written"
            if app.peer_ended_at is not None:
                assert app.peer_ended_at == peer.said, "the end came before everything else had"
                assert peer.half_closed or peer.closed or self.transports[peer.side].disconnecting
            transport = self.transports[app.side]
            stream = transport.stream
            assert isinstance(stream, SealedStream)
            assert stream._outstanding_bytes == sum(len(data) for _, data, _, _ in stream._outstanding)
            assert stream._outstanding_bytes <= WINDOW_BYTES
            assert stream.unread_bytes <= WINDOW_BYTES + ACK_LIMIT_BYTES, "the peer's window bounds what is unread"
            assert 0 <= stream.acked_bytes <= stream.sent_bytes
            if app.lost is not None:
                self.check_end(app, peer)

    def check_end(self, app: App, peer: App) -> None:
        # no application aborts here, and no relay can
        if not isinstance(app.lost, ConnectionDone):
            # who is through need not wait for the other side to hear of it; that side then cannot know
            assert isinstance(app.lost, ConnectionLost)
            cut = [one for one in self.transports if one.stream.was_cut]
            for one in cut:  # it wrote what the other side, which had closed, did not take
                other = self.transports[1 - self.transports.index(one)]
                assert other.disconnecting and other.stream.dropped
            assert cut or isinstance(peer.lost, ConnectionDone), (app.side, app.lost, peer.lost)
            return
        assert len(peer.got) == app.said or peer.lost is None or peer.closed, "what was not taken is never clean"
        peer_transport = self.transports[peer.side]
        if app.closed or not isinstance(app, HalfCloseApp):
            assert peer_transport.stream.received_bytes == app.said or peer.lost is not None
        if not app.closed:
            assert bytes(app.got) == peer.written, "a clean end says that nothing is missing"

    def teardown(self) -> None:
        if not self.apps:
            return
        for side in (0, 1):
            self.resume(side)

        def connected() -> bool:
            return any(app.lost for app in self.apps) or not any(one.detached for one in self.transports)

        if self.one_sided:
            for wire in list(self.wires()):
                wire.client_loses()
        self.settle(connected)
        for app, peer in (self.apps, self.apps[::-1]):
            if not app.lost and not app.closed and not self.transports[app.side].disconnecting:
                assert bytes(app.got) == peer.written, "nothing is lost"
        for side in (0, 1):
            self.close(side)
        self.settle(lambda: any(app.lost for app in self.apps))
        self.settle(lambda: True)
        if not all(app.lost for app in self.apps):
            # a relay finds out at last that a client has gone, and tells the other one
            for wire in list(self.wires()):
                if not wire.client_sees:
                    wire.relay_loses()
            self.turn()
            self.deliver_all()
        if not all(app.lost for app in self.apps):
            assert any(transport.detached for transport in self.transports)
            self.clock.advance(GRACE_S)  # the other side is through, and will not be heard of any more
        self.settle(lambda: all(app.lost for app in self.apps))
        self.settle(
            lambda: not any(one.stream.resumable for client in self.clients for one in client.transports), 3_000
        )
        self.settle(lambda: not any(s.connection.streams for c in self.clients for s in c.pool.sessions.values()))


def test_an_older_attempt_to_resume_that_is_confirmed_late_changes_nothing() -> None:
    world = World()
    world.begin(half_closing=False, chatty=False)
    first, second = world.transports
    home = next(relay for relay in world.relays if relay.key.public_key == first.getHost().server_public_key)  # type: ignore[attr-defined]
    away = next(relay for relay in world.relays if relay is not home)
    dialling = world.clients[0].public_key.raw

    def of(relay: Relay, raw: bytes) -> Wire:
        return next(w for w in relay.wires if w.client_sees and w.relay_sees and w.core.remote.raw == raw)  # type: ignore[union-attr]

    # the path is lost; the next one is almost made: only the proof has not arrived
    of(home, dialling).client_loses()
    world.turn()
    held = of(away, dialling)
    held.deliver_up(1 << 16)
    of(away, world.clients[1].public_key.raw).deliver_down(1 << 16)
    world.turn()
    of(away, world.clients[1].public_key.raw).deliver_up(1 << 16)
    held.deliver_down(1 << 16)
    world.turn()
    assert held.up and not first.detached and isinstance(first.stream, SealedStream)
    proof, moved_to = bytes(held.up), second.stream
    # that one is lost as well before the proof is through, and a third is made
    held.up.clear()
    held.client_loses()
    for _ in range(20):
        for wire in list(home.wires):
            wire.deliver_up(len(wire.up))
            wire.deliver_down(len(wire.down))
        world.clock.advance(0.05)
    assert not first.detached and second.stream is not moved_to
    world.apps[0].say(100)
    world.apps[1].say(100)
    stream = second.stream
    held.up += proof
    held.deliver_up(len(proof))
    of(away, world.clients[1].public_key.raw).deliver_down(1 << 16)
    world.turn()
    assert second.stream is stream
    world.one_sided = True
    world.teardown()
    assert [bytes(app.got) for app in world.apps] == [world.apps[1].written, world.apps[0].written]


def test_what_is_sent_again_on_a_new_path_makes_no_room_for_more_than_a_reader_who_pauses_has_got() -> None:
    world = World()
    world.begin(half_closing=True, chatty=False)
    world.end_of_the_path_right_behind_data(side=0, size=383, reason=0)
    world.end_of_the_path_right_behind_data(side=1, size=374, reason=14)
    world.write(side=0, size=2_388)
    world.pause(side=1)
    world.calm(rounds=5)
    assert not world.transports[0].stream.sendable
    assert WINDOW_BYTES * 0.9 < world.transports[1].stream.unread_bytes <= WINDOW_BYTES  # type: ignore[attr-defined]
    # everything unread comes a second time, a part of it in the read that proves who sends it
    world.relay_makes_up_a_close(side=0, reason=12, extra=b"")
    world.calm(rounds=9)
    assert WINDOW_BYTES * 0.9 < world.transports[1].stream.unread_bytes <= WINDOW_BYTES  # type: ignore[attr-defined]
    world.check()
    world.teardown()
    assert [bytes(app.got) for app in world.apps] == [world.apps[1].written, world.apps[0].written]


@pytest.mark.time_limit(120)
def test_a_secure_transport_is_one_stream_whatever_happens_below() -> None:
    # The same examples each time, so that a red run says something about the change; DMSG_EXPLORE=1 looks for new ones.
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=100 if "DMSG_EXPLORE" not in os.environ else 400,
            stateful_step_count=40,
            deadline=None,
            derandomize="DMSG_EXPLORE" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
