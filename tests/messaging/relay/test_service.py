"""The relay as a service: handshakes, admission, the first 50 ms, limits, draining, and its entry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import ClientFactory, Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure

from dmsg.address import HostPort, PinnedServer
from dmsg.discovery.entry import MESSAGING, Entry
from dmsg.eventlog import schema as ev
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.core.errors import LinkRefused
from dmsg.messaging.core.limits import FIRST_FRAME_PAUSE_S, HANDSHAKE_TIMEOUT_S
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, GO, OPEN_CHANNEL, SEND
from dmsg.messaging.relay.backpressure import Backpressure
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.strategies import secret_key
from tests.links import MESSAGE, RawLink, Said

PORT = 8080
RELAY = secret_key(1)


class Accumulator(Protocol):
    """Keeps what it gets."""

    data = b""
    over = False

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.over = True


class Bytes(Protocol):
    """A stranger that says what it is told to say."""

    lost = False

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True


class Eager(RawLink):
    """A client that sends ``frames`` together with its second handshake object."""

    frames = b""

    def _go_on(self) -> None:
        said = self._core.data_to_send()
        self.transport.write(said + self.frames if b"sig2" in said else said)  # type: ignore[union-attr]


class Recorder(RawLink):
    """A client that keeps the objects of its handshake."""

    def connectionMade(self) -> None:
        self.written: list[bytes] = []
        super().connectionMade()

    def _go_on(self) -> None:
        said = self._core.data_to_send()
        if said:
            self.written.append(said)
            self.transport.write(said)  # type: ignore[union-attr]


class Listed:
    """A discovery that keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[Entry] = []

    async def get_entry(self, public_key: Any) -> Entry:
        from dmsg.discovery.errors import EntryNotFound

        if not self.posted:
            raise EntryNotFound
        return self.posted[-1]

    async def post_entry(self, entry: Entry) -> None:
        entry.verify()
        self.posted.append(entry)


class World:
    """A relay in memory."""

    def __init__(self) -> None:
        self.memory = MemoryNetwork()
        self.events: list[Any] = []
        self.relay: MessagingRelay | None = None

    def start(self, **options: Any) -> MessagingRelay:
        limits = {name: options.pop(name) for name in list(options) if name in RelayLimits.__dataclass_fields__}
        self.relay = MessagingRelay(
            self.memory, RELAY, TCP4ServerEndpoint(self.memory, PORT),  # type: ignore[arg-type]
            limits=RelayLimits(drain_timeout_s=0.0, **limits), events=self, **options,
        )  # fmt: skip
        self.relay.startService()
        return self.relay

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def connect(self, protocol: Any, host: str = "192.0.2.1") -> Any:
        factory = ClientFactory()
        factory.buildProtocol = lambda addr: protocol  # type: ignore[assignment, method-assign]
        self.memory.connectTCP("127.0.0.1", PORT, factory, bindAddress=(host, 0))
        self.memory.advance(0)
        return protocol

    def join(self, number: int, host: str = "192.0.2.1") -> RawLink:
        """A client whose link is up, and past the pause before the first frame."""
        client: RawLink = self.connect(RawLink(RELAY.public_key, secret_key(number)), host)
        self.memory.advance(FIRST_FRAME_PAUSE_S)
        return client


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    if made.relay is not None and made.relay.running:
        stopped = made.relay.stopService()
        made.memory.advance(10.0)
        assert stopped.called


def test_two_clients_open_a_channel_and_the_log_says_so(world: World) -> None:
    world.start()
    alice, bob = world.join(11), world.join(12)
    alice.ask(bob, 3)
    world.memory.advance(1.0)
    assert bob.take() == [Said(OPEN_CHANNEL, 255, alice.key.public_key.raw + MESSAGE)]
    bob.say(CHANNEL_OPENED, 255, MESSAGE)
    world.memory.advance(0)
    assert alice.take() == [Said(CHANNEL_OPENED, 3, MESSAGE)]
    alice.say(SEND, 3, b"twelve bytes")
    alice.say(CHANNEL_CLOSED, 3)
    world.memory.advance(0)
    assert bob.take() == [Said(SEND, 255, b"twelve bytes"), Said(CHANNEL_CLOSED, 255, b"")]
    [opened], [closed] = world.of(ev.TransportOpened), world.of(ev.TransportClosed)
    assert (opened.initiator, opened.responder) == (str(alice.key.public_key), str(bob.key.public_key))
    assert (opened.server, opened.transport_id, opened.accept_ms) == (str(RELAY.public_key), 3, 1_000.0)
    assert (closed.reason, closed.by, closed.bytes_out, closed.bytes_in) == ("normal", "initiator", 12, 0)
    assert [event.extended for event in world.of(ev.ConnectionOpened)] == [False, False]
    [started] = world.of(ev.ServerStarted)
    assert {each.protocol for each in (started, opened, closed)} == {"messaging"}
    assert started.address == f"0.0.0.0:{PORT}"


@pytest_twisted.ensureDeferred
async def test_our_own_clients_talk_through_it(world: World) -> None:
    relay = world.start()
    servers = [PinnedServer(RELAY.public_key, HostPort("127.0.0.1", PORT))]
    clients = [MessagingClient(world.memory, secret_key(number), servers=servers) for number in (11, 12)]  # type: ignore[arg-type]
    for client in clients:
        client.startService()
    world.memory.advance(1.0)
    alice, bob = clients
    bob.listen(Factory.forProtocol(Echo))
    talk = Accumulator()
    dialled = ensureDeferred(alice.connect(Factory.forProtocol(lambda: talk), bob.public_key))
    world.memory.advance(1.0)
    await dialled
    talk.transport.write(bytes(range(256)) * 1_000)
    world.memory.advance(60.0)
    assert talk.data == bytes(range(256)) * 1_000
    talk.transport.loseConnection()
    world.memory.advance(5.0)
    assert talk.over and relay.switch.open_transports == 0
    for client in clients:
        stopped = ensureDeferred(client.stopService())
        world.memory.advance(5.0)
        await stopped


def test_nothing_comes_in_the_first_50_ms_and_what_waits_comes_then(world: World) -> None:
    world.start()
    alice = world.join(11)
    bob = world.connect(RawLink(RELAY.public_key, secret_key(12)))
    assert bob.linked
    alice.ask(bob)
    world.memory.advance(FIRST_FRAME_PAUSE_S * 0.9)
    assert bob.said == []
    world.memory.advance(FIRST_FRAME_PAUSE_S * 0.2)
    assert [said.kind for said in bob.take()] == [OPEN_CHANNEL]
    bob.say(CHANNEL_OPENED, 255, MESSAGE)
    world.memory.advance(0)
    assert [said.kind for said in alice.take()] == [CHANNEL_OPENED]


def test_a_client_that_speaks_first_need_not_wait(world: World) -> None:
    world.start()
    bob = world.join(12)
    alice = world.connect(RawLink(RELAY.public_key, secret_key(11)))
    alice.ask(bob)
    world.memory.advance(0)
    assert [said.kind for said in bob.take()] == [OPEN_CHANNEL]


def test_frames_that_come_with_the_handshake_count_after_the_pause(world: World) -> None:
    world.start()
    bob, alice = world.join(12), Eager(RELAY.public_key, secret_key(11))
    alice.frames = GO.encode(OPEN_CHANNEL, 3, bob.key.public_key.raw + MESSAGE)
    world.connect(alice)
    world.memory.advance(FIRST_FRAME_PAUSE_S)
    world.memory.advance(0)
    assert bob.take() == [Said(OPEN_CHANNEL, 255, alice.key.public_key.raw + MESSAGE)]


def test_what_is_no_frame_behind_the_handshake_ends_the_link(world: World) -> None:
    world.start()
    stranger = Eager(RELAY.public_key, secret_key(11))
    stranger.frames = b"\xff" * 8
    world.connect(stranger)
    world.memory.advance(FIRST_FRAME_PAUSE_S)
    world.memory.advance(0)
    assert stranger.lost
    assert [event.reason for event in world.of(ev.ConnectionClosed)] == ["first frame not recognised"]
    assert world.join(12).linked


def test_a_link_that_ends_in_its_first_50_ms_is_forgotten(world: World) -> None:
    relay = world.start()
    alice = world.join(11)
    bob = world.connect(RawLink(RELAY.public_key, secret_key(12)))
    alice.ask(bob)
    bob.transport.abortConnection()
    world.memory.advance(1.0)
    assert [said.kind for said in alice.take()] == [CHANNEL_CLOSED]
    assert list(relay.switch.members) == [alice.key.public_key.raw]
    assert len(world.of(ev.ConnectionClosed)) == 1


def test_the_newest_link_of_a_key_wins(world: World) -> None:
    world.start()
    alice, again = world.join(11), world.join(11)
    assert (alice.lost, again.lost) == (True, False)
    assert [event.reason for event in world.of(ev.ConnectionClosed)] == ["replaced"]


def test_a_link_that_was_recorded_replaces_none(world: World) -> None:
    world.start()
    alice = world.connect(Recorder(RELAY.public_key, secret_key(11)))
    world.memory.advance(FIRST_FRAME_PAUSE_S)
    assert alice.linked and len(alice.written) == 2
    mallory = world.connect(Bytes(), host="198.51.100.1")
    for data in alice.written:
        mallory.transport.write(data)
        world.memory.advance(0)
    world.memory.advance(HANDSHAKE_TIMEOUT_S)
    assert (alice.lost, mallory.lost) == (False, True)
    assert [event.reason for event in world.of(ev.HandshakeFailed)] == ["not an echo"]


def test_a_client_that_is_not_admitted_is_told(world: World) -> None:
    relay = world.start(connections_per_address=1, connections=2)
    alice = world.join(11)
    bob = world.join(12, "192.0.2.2")
    alice.ask(bob)
    world.memory.advance(0)
    bob.say(CHANNEL_OPENED, 255, MESSAGE)
    world.memory.advance(0)
    carol = world.join(13)
    assert isinstance(carol.error, LinkRefused) and carol.lost
    assert relay.available_connections == 0
    world.memory.advance(1.0)
    assert [(event.what, event.reason) for event in world.of(ev.Refused)] == [("connection", "too many connections")]


def test_an_idle_client_makes_room_for_a_newcomer(world: World) -> None:
    world.start(connections=2)
    one, two, three = world.join(11), world.join(12, "192.0.2.2"), world.join(13, "198.51.100.1")
    assert three.linked and not three.lost
    assert one.lost is not two.lost


def test_clients_whose_requests_wait_are_not_idle_and_the_relay_goes_on(world: World) -> None:
    world.start(connections_per_address=2)
    alice, bob = world.join(11), world.join(12)
    alice.ask(bob)
    world.memory.advance(0)
    assert isinstance(world.join(13).error, LinkRefused)
    assert not alice.lost and not bob.lost
    assert world.join(14, "192.0.2.2").linked


@pytest.mark.parametrize(
    ("said", "after_s", "reason"),
    [(b"", 1.0, "silent"), (b'{"version"', HANDSHAKE_TIMEOUT_S, "timeout")],
)
def test_a_stranger_has_little_time(world: World, said: bytes, after_s: float, reason: str) -> None:
    world.start()
    stranger = world.connect(Bytes())
    stranger.transport.write(said)
    world.memory.advance(after_s - 0.01)
    assert not stranger.lost
    world.memory.advance(0.02)
    assert stranger.lost
    [failed] = world.of(ev.HandshakeFailed)
    assert (failed.stage, failed.reason) == ("handshake", reason)


@pytest.mark.parametrize(
    "said",
    [
        b"null\n",
        b"[]\n",
        b"GET / HTTP/1.1\r\n",
        b"{" * 5_000,
        b'{"version":"0.1","initiator":"02' + b"f" * 64 + b'","responder":"%s","nonce":"%s"}\n',
        b'{"version":"0.2","initiator":"%s","responder":"%s","nonce":"%s"}\n',
    ],
)
def test_what_is_no_handshake_ends_and_others_go_on(world: World, said: bytes) -> None:
    world.start()
    key, nonce = str(RELAY.public_key).encode(), b"00" * 16
    stranger = world.connect(Bytes())
    stranger.transport.write(said % (key, key, nonce)[-said.count(b"%s") :] if b"%s" in said else said)
    world.memory.advance(0.1)
    assert stranger.lost
    assert world.join(11).linked


def test_handshakes_do_not_wait_for_one_that_stands_still(world: World) -> None:
    world.start()
    slow = [world.connect(Bytes()) for _ in range(20)]
    for one in slow:
        one.transport.write(b'{"version":"0.1",')
    clients = [world.connect(RawLink(RELAY.public_key, secret_key(100 + number))) for number in range(50)]
    world.memory.advance(0.1)
    assert all(client.linked for client in clients)


def test_handshakes_of_an_address_have_a_rate(world: World) -> None:
    world.start(handshakes_per_s_per_address=0.001, handshake_burst_per_address=2)
    assert world.join(11).linked and world.join(12).linked
    third = world.join(13)
    assert third.lost and not third.linked
    assert world.join(14, "192.0.2.2").linked
    [failed] = world.of(ev.HandshakeFailed)
    assert (failed.stage, failed.reason) == ("accept", "handshakes_per_address")


def test_networks_that_use_up_the_handshakes_of_all_do_not_keep_another_out(world: World) -> None:
    world.start(handshakes_per_s=0.001, handshake_burst=10)
    for number in range(40):
        world.connect(Bytes(), f"198.51.{number % 4}.1").transport.write(b"{")
        world.memory.advance(0)
    assert world.join(11).linked


def test_a_client_that_floods_the_relay_with_malformed_requests_is_dropped(world: World) -> None:
    world.start()
    alice, bob = world.join(11), world.join(12)
    alice.say(CHANNEL_CLOSED, 99)  # tells its layout
    alice.transport.write(GO.encode(OPEN_CHANNEL, 7) * 60_000)
    world.memory.advance(0)
    assert (alice.lost, bob.lost) == (True, False)
    assert [event.reason for event in world.of(ev.ConnectionClosed)] == ["abuse"]
    assert len(world.of(ev.Refused)) <= 100


def test_a_stranger_with_a_thousand_keys_keeps_nobody_out(world: World) -> None:
    relay = world.start(connections=100)
    alice, bob = world.join(11, "198.51.100.1"), world.join(12, "198.51.100.2")
    alice.ask(bob)
    world.memory.advance(0)
    bob.say(CHANNEL_OPENED, 255, MESSAGE)
    for number in range(1_000):
        world.connect(RawLink(RELAY.public_key, secret_key(1_000 + number)), f"203.0.113.{number % 200}")
        world.memory.advance(0.05)
    assert len(relay.switch.members) <= 100
    assert not alice.lost and not bob.lost
    assert world.join(13, "192.0.2.7").linked


@pytest_twisted.ensureDeferred
async def test_a_relay_that_stops_ends_channels_and_links_and_logs_the_rest(world: World) -> None:
    relay = world.start()
    alice, bob = world.join(11), world.join(12)
    alice.ask(bob)
    world.memory.advance(0)
    bob.say(CHANNEL_OPENED, 255, MESSAGE)
    world.memory.advance(0)
    alice.take(), bob.take()
    assert relay.stats() == {"connections": 2, "transports": 1, "half_open": 0, "queued_bytes": 0}
    stopped = relay.stopService()
    world.memory.advance(5.0)
    await stopped
    assert alice.take() == [Said(CHANNEL_CLOSED, 0, b"")] and bob.take() == [Said(CHANNEL_CLOSED, 255, b"")]
    assert alice.lost and bob.lost
    assert [event.transports for event in world.of(ev.Drained)] == [1]
    assert [type(event) for event in world.events[-1:]] == [ev.ServerStopped]


def test_who_stops_waiting_for_a_relay_that_listens_late_stops_nothing_else(world: World) -> None:
    class Late:
        def __init__(self) -> None:
            self.listening: Deferred[Any] = Deferred()

        def listen(self, factory: Any) -> Deferred[Any]:
            self.listening.addCallback(lambda _: world.memory.listenTCP(PORT, factory))
            return self.listening

    endpoint = Late()
    world.relay = relay = MessagingRelay(world.memory, RELAY, endpoint)  # type: ignore[arg-type]
    relay.startService()
    given_up, patient = relay.listening(), relay.listening()
    given_up.addErrback(lambda failure: failure.trap(CancelledError))
    given_up.cancel()
    endpoint.listening.callback(None)
    assert patient.result.getHost().port == PORT
    assert world.join(11).linked


def test_it_registers_what_it_speaks_and_its_port_twice(world: World) -> None:
    listed = Listed()
    world.start(discovery=listed, public_address=HostPort("relay.example.org", 8083))
    world.memory.advance(2.0)
    entry = listed.posted[-1]
    assert (entry.version, entry.protocol) == ("0.0.1+messaging", MESSAGING)
    assert entry.server is not None
    assert (entry.server.address, entry.server.port) == ("relay.example.org:8083", "8083")
    assert entry.server.host_port == HostPort("relay.example.org", 8083)
    assert entry.server.available_connections == RelayLimits().connections


def test_it_warns_once_that_links_are_in_the_clear(world: World) -> None:
    with capturedLogs() as lines:
        world.start()
        world.join(11)
    assert [line["log_level"].name for line in lines if "neither encrypted" in line.get("log_format", "")] == ["warn"]


def test_a_port_that_is_taken_is_told(world: World, logged_errors: Any) -> None:
    from twisted.internet.error import CannotListenError

    world.memory.listenTCP(PORT, Factory())
    relay = world.start()
    assert not relay.ready
    assert len(logged_errors.flush(CannotListenError)) == 1


def test_a_client_that_reads_nothing_keeps_no_relay_from_stopping(world: World) -> None:
    relay = world.start()
    alice, bob = world.join(11), world.join(12)
    open_channel(world, alice, bob)
    bob.transport.pauseProducing()
    for _ in range(30):
        alice.say(SEND, 3, bytes(32_000))
    world.memory.advance(0)
    assert relay.switch.queued_bytes > 0
    stopped = relay.stopService()
    world.memory.advance(5.0)
    assert stopped.called and bob.lost


# --- back-pressure -----------------------------------------------------------------------------------------------------


def open_channel(world: World, alice: RawLink, bob: RawLink) -> int:
    """A channel of Alice's with the id 3; gives Bob's."""
    alice.ask(bob, 3)
    world.memory.advance(0)
    [offer] = bob.take()
    bob.say(CHANNEL_OPENED, offer.channel_id, MESSAGE)
    world.memory.advance(0)
    assert [said.kind for said in alice.take()] == [CHANNEL_OPENED]
    return offer.channel_id


def test_a_client_that_sends_faster_than_its_peer_reads_waits_and_loses_nothing(world: World) -> None:
    relay = world.start()
    alice, bob = world.join(11), world.join(12)
    open_channel(world, alice, bob)
    bob.transport.pauseProducing()
    pieces = [bytes([number % 256]) * 32_000 for number in range(200)]
    for piece in pieces:
        alice.say(SEND, 3, piece)
    world.memory.advance(5.0)
    assert relay.limits.queue_soft_bytes / 4 < relay.switch.queued_bytes < relay.limits.queue_soft_bytes
    bob.transport.resumeProducing()
    world.memory.advance(5.0)
    assert [said.payload for said in bob.take()] == pieces
    assert relay.switch.queued_bytes == 0 and not world.of(ev.TransportClosed)


def test_a_peer_that_reads_nothing_holds_a_client_up_for_a_limited_time(world: World) -> None:
    relay = world.start()
    alice, bob, carol = world.join(11), world.join(12), world.join(13)
    open_channel(world, alice, bob)
    alice.ask(carol, 4)
    world.memory.advance(0)
    [offer] = carol.take()
    carol.say(CHANNEL_OPENED, offer.channel_id, MESSAGE)
    world.memory.advance(0)
    bob.transport.pauseProducing()
    for _ in range(100):
        alice.say(SEND, 3, bytes(32_000))
    alice.say(SEND, 4, b"behind it")
    world.memory.advance(relay.limits.slow_consumer_timeout_s - 1.0)
    assert carol.take() == []
    world.memory.advance(2.0)
    assert carol.take() == [Said(SEND, offer.channel_id, b"behind it")]
    [closed] = world.of(ev.TransportClosed)
    assert (closed.reason, closed.responder) == ("slow_consumer", str(bob.key.public_key))


def test_clients_that_are_not_read_from_make_no_write_to_others_slower() -> None:
    class Reader:
        def __init__(self) -> None:
            self.member = object()

    class Held:
        """A client with much data in one queue towards ``receiver``."""

        def __init__(self, receiver: Any) -> None:
            self.queue = SimpleNamespace(queued_bytes=1_000_000, member=receiver)
            self.member = SimpleNamespace(queued_from=1_000_000, feeding=[self.queue])
            self.holds: list[bool] = []

        def hold(self, reason: str, held: bool) -> None:
            self.holds.append(held)

    pressure = Backpressure(Clock(), 1_000_000, 10.0)  # type: ignore[arg-type]
    readers: list[Any] = [Reader() for _ in range(5_000)]
    senders: list[Any] = [Held(reader.member) for reader in readers]
    for sender in senders:
        pressure.look_at(sender)
    cpu = time.process_time()
    for reader in readers:
        pressure.look_again(reader)
    assert time.process_time() - cpu < 0.2
    senders[0].queue.queued_bytes = 0
    pressure.look_again(readers[0])
    assert [sender.holds for sender in senders] == [[True, False]] + [[True]] * 4_999


def test_many_channels_of_a_peer_that_reads_nothing_hold_no_other_up(world: World) -> None:
    """Each has one message under way, as with acknowledgements."""
    relay = world.start()
    alice, bob, carol = world.join(11), world.join(12), world.join(13)

    def come_in(caller: RawLink, channel_id: int) -> int:
        caller.ask(alice, channel_id)
        world.memory.advance(0)
        [offer] = alice.take()
        alice.say(CHANNEL_OPENED, offer.channel_id, MESSAGE)
        return offer.channel_id

    to_bob = [come_in(bob, number) for number in range(20)]
    to_carol = come_in(carol, 0)
    world.memory.advance(0)
    carol.take()
    bob.transport.pauseProducing()
    for number in to_bob:
        alice.say(SEND, number, bytes(65_000))
    alice.say(SEND, to_carol, b"behind it")
    world.memory.advance(0)
    assert relay.switch.queued_bytes > relay.limits.queue_soft_bytes
    assert carol.take() == [Said(SEND, 0, b"behind it")]


def test_a_peer_that_goes_lets_the_client_that_sent_to_it_go_on(world: World) -> None:
    relay = world.start()
    alice, bob, carol = world.join(11), world.join(12), world.join(13)
    open_channel(world, alice, bob)
    bob.transport.pauseProducing()
    for _ in range(50):
        alice.say(SEND, 3, bytes(32_000))
    world.memory.advance(0)
    assert relay.switch.queued_bytes > 0
    bob.transport.abortConnection()
    world.memory.advance(0)
    alice.take()
    assert open_channel(world, alice, carol)
