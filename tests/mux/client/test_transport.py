"""What a transport does with bytes, producers, mistakes and ends, step by step on a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_twisted
from twisted.internet import error, interfaces
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.clients.access import AllowKeys
from dmsg.errors import DialError
from dmsg.glue.deadlines import LINGER_S
from dmsg.glue.inbox import JOINED_BYTES
from dmsg.glue.stream_transport import TransportLost
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import Busy, DeadlineExceeded, PeerGone, Refused, ServerDraining
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.window import AckGate
from dmsg.relays.errors import ServerLost
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

KIB = 1024
WINDOW = ConnectionConfig().send_window_bytes
PAUSE = ConnectionConfig().pause_bytes
RESUME = ConnectionConfig().resume_bytes
FRAME = ConnectionConfig().frame_data_bytes


class Recorder(Protocol):
    """Remembers everything in order: ``"made"``, pieces of data, and the reason of the end."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.on_data = None

    @property
    def received(self) -> bytes:
        return b"".join(one for one in self.events if isinstance(one, bytes))

    @property
    def reason(self):
        [reason] = [one for one in self.events if isinstance(one, Exception)]
        return reason

    def connectionMade(self) -> None:
        self.events.append("made")

    def dataReceived(self, data: bytes) -> None:
        self.events.append(data)
        if self.on_data is not None:
            self.on_data(data)

    def connectionLost(self, reason=None) -> None:
        self.events.append(reason.value.with_traceback(None))


@implementer(interfaces.IPushProducer, interfaces.IPullProducer)
class Producer:
    """Remembers what it is told, and does what ``work`` says when it is resumed."""

    def __init__(self, work=None) -> None:
        self.told: list[str] = []
        self.work = work

    def pauseProducing(self) -> None:
        self.told.append("pause")

    def resumeProducing(self) -> None:
        self.told.append("resume")
        if self.work is not None:
            self.work()

    def stopProducing(self) -> None:
        self.told.append("stop")


class Pair:
    """A transport on one side, its protocol and its other end on the other, and the network between."""

    def __init__(self, network: LocalNetwork, alice, bob, here, there) -> None:
        self.network, self.alice, self.bob, self.here, self.there = network, alice, bob, here, there
        #: The two ends as transports.
        self.near, self.far = here.transport, there.transport
        self.clock = network.reactor

    def settle(self) -> None:
        self.clock.advance(0.0)

    def frames_sent(self) -> int:
        """How many frames the server has had from our side."""
        [server] = self.network.relays
        return server.switch.members[self.alice.public_key.raw].frames_in

    def pipe_of(self, client):
        """The connection under one of the clients: the first client's is the first."""
        return self.network.reactor.pipes[0 if client is self.alice else 1]


@pytest.fixture
def connected(logged_errors):
    """``await connected()`` gives a :class:`Pair`; everything is taken down, and nothing may be left on the clock."""
    networks: list[LocalNetwork] = []

    async def connect(here=None, there=None, connection=None, attach=True) -> Pair:
        network = LocalNetwork(MemoryNetwork(), relays=1, discovery=None)
        networks.append(network)
        await network.start()
        config = ClientConfig(connection=connection or ConnectionConfig())
        alice = await network.client(config=config, security=Security.HOP)
        bob = await network.client(config=config, security=Security.HOP)
        here, there = here or Recorder(), there or Recorder()
        bob.listen(Factory.forProtocol(lambda: there))
        here.transport = await network.wait(alice.dial(bob.public_key))
        if attach:
            here.transport.attach(here)
        network.reactor.advance(0.0)
        return Pair(network, alice, bob, here, there)

    yield connect

    async def stop() -> None:
        for network in networks:
            await network.stop()
            assert network.reactor.getDelayedCalls() == []

    pytest_twisted.blockon(ensureDeferred(stop()))


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_addresses(connected):
    pair = await connected()
    [server] = pair.network.relays
    assert pair.near.getHost() == DmsgAddress(pair.alice.public_key, "", server.key.public_key)
    assert pair.near.getPeer() == DmsgAddress(pair.bob.public_key, "", server.key.public_key)
    assert pair.far.getHost() == pair.near.getPeer()
    assert pair.far.getPeer() == pair.near.getHost()
    assert pair.near.security == "hop"


@pytest_twisted.ensureDeferred
async def test_a_transport_has_no_dictionary_until_a_program_notes_something_on_it(connected):
    """A dictionary of 32 attributes takes 1.5 KiB, a fifth of all that a transport takes."""
    near = (await connected()).near
    assert vars(near) == {}
    near.note = "mine"
    assert vars(near) == {"note": "mine"}


@pytest_twisted.ensureDeferred
async def test_a_program_may_log_as_its_transport(connected):
    """SSHService of Conch does."""
    pair = await connected()
    key = str(pair.bob.public_key)[:8]
    assert pair.near.logPrefix() == f"{type(pair.here).__name__},{key}"
    pair.here.logPrefix = lambda: "me"
    assert pair.near.logPrefix() == f"me,{key}"
    pair.near.abortConnection()
    pair.settle()
    assert pair.near.logPrefix() == f"-,{key}"


@pytest_twisted.ensureDeferred
async def test_a_program_that_sets_options_of_tcp_runs(connected):
    pair = await connected()
    for end in (pair.near, pair.far):
        for option in (end.setTcpNoDelay, end.setTcpKeepAlive):
            option(True)
            option(False)
        assert end.getTcpNoDelay() and end.getTcpKeepAlive()
    pair.near.write(b"on")
    pair.settle()
    assert pair.there.received == b"on"


@pytest_twisted.ensureDeferred
async def test_the_writes_of_one_turn_go_out_in_one_frame(connected):
    pair = await connected()
    before = pair.frames_sent()
    for number in range(100):
        pair.near.write(b"%02d " % number)
    pair.near.writeSequence([b"and", b" ", b"done"])
    assert pair.frames_sent() == before  # not before the end of the turn
    pair.settle()
    assert pair.frames_sent() == before + 1
    assert pair.there.events == ["made", b"".join(b"%02d " % number for number in range(100)) + b"and done"]


@pytest_twisted.ensureDeferred
async def test_a_big_write_is_cut_into_frames(connected):
    pair = await connected()
    before = pair.frames_sent()
    pair.near.write(bytes(3 * FRAME + 1))
    pair.settle()
    assert pair.frames_sent() == before + 4
    assert pair.there.received == bytes(3 * FRAME + 1)


@pytest_twisted.ensureDeferred
async def test_what_can_be_written(connected):
    pair = await connected()
    pair.near.write(bytearray(b"bytearray "))
    pair.near.write(memoryview(b"memoryview"))
    pair.near.write(b"")
    for no_bytes in ("text", 5, [5], None):
        with pytest.raises(TypeError):
            pair.near.write(no_bytes)
    pair.settle()
    assert pair.there.received == b"bytearray memoryview"


@pytest_twisted.ensureDeferred
async def test_no_more_than_a_window_is_out_unacknowledged(connected):
    """A peer that does not read acknowledges its 64 KiB and no more; then a window is sent, and then nothing."""
    pair = await connected()
    pair.far.pauseProducing()
    data = bytes(2 * WINDOW)
    pair.near.write(data)
    pair.settle()
    stream = pair.near.stream
    assert stream.sent_bytes - stream.acked_bytes == WINDOW
    assert stream.acked_bytes <= AckGate.THRESHOLD_BYTES
    assert pair.far.stream.received_bytes == stream.sent_bytes
    pair.far.resumeProducing()
    pair.settle()
    assert (stream.sent_bytes, stream.acked_bytes) == (len(data), len(data))
    assert pair.there.received == data


@pytest_twisted.ensureDeferred
async def test_a_writer_that_never_stops_is_cut_off(connected):
    limit = 300 * KIB
    pair = await connected(connection=replace(ConnectionConfig(), pending_limit_bytes=limit))
    pair.far.pauseProducing()
    pair.near.write(bytes(limit))
    assert pair.near.connected
    pair.near.write(b"one too many")
    pair.settle()
    reason = pair.here.reason
    assert isinstance(reason, TransportLost)
    assert isinstance(reason.cause, Busy)
    assert reason.cause.by == "local"
    assert not pair.near.connected
    pair.far.resumeProducing()
    pair.settle()
    assert isinstance(pair.there.reason, error.ConnectionLost)


# --- producers -------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_push_producer_is_paused_and_resumed_once_each(connected):
    pair = await connected()
    producer = Producer()
    pair.near.registerProducer(producer, True)
    pair.far.pauseProducing()
    pair.near.write(bytes(AckGate.THRESHOLD_BYTES + WINDOW))
    assert producer.told == ["pause"]
    pair.settle()
    assert producer.told == ["pause", "resume"]  # all of it is under way
    pair.near.write(bytes(PAUSE))
    pair.near.write(bytes(KIB))
    pair.near.write(bytes(KIB))
    pair.settle()
    assert producer.told == ["pause", "resume", "pause"]
    pair.far.resumeProducing()
    pair.settle()
    assert producer.told == ["pause", "resume", "pause", "resume"]
    pair.near.unregisterProducer()
    pair.near.write(bytes(10 * PAUSE))
    pair.settle()
    assert producer.told == ["pause", "resume", "pause", "resume"]


@pytest_twisted.ensureDeferred
async def test_a_producer_that_registers_while_nothing_moves_is_paused_at_once(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(WINDOW + 4 * PAUSE))
    pair.settle()
    producer = Producer()
    pair.near.registerProducer(producer, True)
    assert producer.told == ["pause"]
    pair.far.resumeProducing()
    pair.settle()
    assert producer.told == ["pause", "resume"]
    pair.near.unregisterProducer()


@pytest_twisted.ensureDeferred
async def test_a_pull_producer_waits_while_nothing_moves(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pieces = 1000

    def work() -> None:
        pair.near.write(bytes(KIB))
        if len(producer.told) == pieces:
            pair.near.unregisterProducer()

    producer = Producer(work)
    pair.near.registerProducer(producer, False)
    pair.settle()
    asked = len(producer.told)
    assert WINDOW < asked * KIB <= AckGate.THRESHOLD_BYTES + WINDOW + PAUSE + 2 * KIB
    pair.settle()
    assert len(producer.told) == asked
    pair.far.resumeProducing()
    pair.settle()
    assert producer.told == ["resume"] * pieces
    assert len(pair.there.received) == pieces * KIB


@pytest_twisted.ensureDeferred
async def test_a_pull_producer_that_registers_while_nothing_moves(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(WINDOW + 4 * PAUSE))
    pair.settle()

    def work() -> None:
        pair.near.write(b"the end")
        pair.near.unregisterProducer()

    producer = Producer(work)
    pair.near.registerProducer(producer, False)
    pair.settle()
    assert producer.told == []
    pair.far.resumeProducing()
    pair.settle()
    assert producer.told == ["resume"]
    assert pair.there.received.endswith(b"the end")


@pytest_twisted.ensureDeferred
async def test_one_producer_at_a_time(connected):
    pair = await connected()
    pair.near.registerProducer(Producer(), True)
    with pytest.raises(RuntimeError):
        pair.near.registerProducer(Producer(), True)
    pair.near.unregisterProducer()


@pytest_twisted.ensureDeferred
async def test_unregistering_again_while_closing(connected):
    """A close that waits for the peer is not begun again by a second unregisterProducer."""
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(WINDOW))
    pair.near.loseConnection()
    pair.near.unregisterProducer()
    pair.near.unregisterProducer()
    pair.far.resumeProducing()
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionDone)
    assert isinstance(pair.there.reason, error.ConnectionDone)
    assert not [call for call in pair.clock.getDelayedCalls() if call.func.__name__ == "_lingered"]


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_data_before_a_protocol_is_attached_waits(connected):
    pair = await connected(attach=False)
    pair.far.write(b"early ")
    pair.settle()
    pair.far.write(b"bird")
    pair.settle()
    assert pair.here.events == []
    pair.near.attach(pair.here)
    assert pair.here.events == ["made"]
    pair.settle()
    assert pair.here.events == ["made", b"early bird"]


@pytest_twisted.ensureDeferred
async def test_an_end_before_a_protocol_is_attached_waits_behind_the_data(connected):
    pair = await connected(attach=False)
    pair.far.write(b"here and gone")
    pair.far.loseConnection()
    pair.settle()
    assert pair.near.connected
    pair.near.attach(pair.here)
    pair.settle()
    assert pair.here.events[:2] == ["made", b"here and gone"]
    assert isinstance(pair.here.reason, error.ConnectionDone)


@pytest_twisted.ensureDeferred
async def test_a_transport_without_a_protocol_can_be_aborted(connected):
    pair = await connected(attach=False)
    pair.near.abortConnection()
    pair.settle()
    assert isinstance(pair.there.reason, TransportLost)
    assert isinstance(pair.there.reason.cause, Refused)


@pytest_twisted.ensureDeferred
async def test_data_is_delivered_one_piece_after_another_around_a_pause(connected):
    pair = await connected()
    pair.there.on_data = lambda data: pair.far.pauseProducing()
    pieces = [b"%d" % number * JOINED_BYTES for number in range(3)]
    for piece in pieces:
        pair.near.write(piece)
        pair.settle()
    assert pair.there.received == pieces[0]
    pair.far.resumeProducing()
    assert pair.there.received == pieces[0]  # not from inside the call
    pair.settle()
    assert pair.there.received == pieces[0] + pieces[1]
    pair.there.on_data = None
    pair.far.resumeProducing()
    pair.settle()
    assert pair.there.received == b"".join(pieces)


@pytest_twisted.ensureDeferred
async def test_the_end_comes_behind_what_a_pause_has_held_back(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(b"last words")
    pair.near.loseConnection()
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionDone)
    assert pair.there.events == ["made"]
    pair.far.resumeProducing()
    pair.settle()
    assert pair.there.received == b"last words"
    assert isinstance(pair.there.reason, error.ConnectionDone)


@pytest_twisted.ensureDeferred
async def test_closing_while_paused_drops_what_was_not_read(connected):
    """The side that closes does not want it; the other side is not held up by it, and is told that it was cut."""
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(AckGate.THRESHOLD_BYTES + WINDOW))
    pair.settle()
    pair.far.write(b"bye")
    pair.far.loseConnection()
    pair.settle()
    assert pair.here.received == b"bye"
    assert isinstance(pair.here.reason, error.ConnectionLost)
    assert isinstance(pair.there.reason, error.ConnectionDone)
    assert pair.there.received == b""


@pytest_twisted.ensureDeferred
async def test_nothing_is_delivered_after_close_or_abort(connected):
    pair = await connected()
    pair.there.on_data = lambda data: pair.far.loseConnection()
    pair.near.write(bytes(3 * FRAME))  # three frames of one read
    pair.settle()
    assert len(pair.there.received) == FRAME
    assert isinstance(pair.there.reason, error.ConnectionDone)


@pytest_twisted.ensureDeferred
async def test_stop_producing_closes(connected):
    pair = await connected()
    pair.near.write(b"x")
    pair.near.stopProducing()
    pair.settle()
    assert pair.there.received == b"x"
    assert isinstance(pair.there.reason, error.ConnectionDone)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_calls_after_the_end_do_nothing(connected):
    pair = await connected()
    pair.near.loseConnection()
    pair.settle()
    events = list(pair.here.events)
    producer = Producer()
    pair.near.write(b"late")
    pair.near.loseConnection()
    pair.near.abortConnection()
    pair.near.pauseProducing()
    pair.near.resumeProducing()
    pair.near.unregisterProducer()
    pair.near.registerProducer(producer, True)
    pair.settle()
    assert producer.told == ["stop"]
    assert pair.here.events == events
    assert pair.there.received == b""


@pytest_twisted.ensureDeferred
async def test_a_peer_that_takes_nothing_does_not_keep_a_transport_from_closing(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(2 * WINDOW))
    pair.near.loseConnection()
    pair.clock.advance(LINGER_S)
    assert "made" in pair.here.events and len(pair.here.events) == 1  # some was taken in the first interval
    pair.clock.advance(LINGER_S)
    reason = pair.here.reason
    assert isinstance(reason, TransportLost)
    assert isinstance(reason.cause, DeadlineExceeded)
    pair.far.resumeProducing()
    pair.settle()
    assert isinstance(pair.there.reason, TransportLost)


@pytest_twisted.ensureDeferred
async def test_both_ends_close_in_the_same_moment(connected):
    pair = await connected()
    for end in (pair.near, pair.far):
        end.write(b"bye")
        end.loseConnection()
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionDone)
    assert isinstance(pair.there.reason, error.ConnectionDone)


@pytest_twisted.ensureDeferred
async def test_our_own_session_is_lost(connected):
    """The reason names the server, and the other end hears of it from the server."""
    pair = await connected()
    producer = Producer()
    pair.near.registerProducer(producer, True)
    pair.pipe_of(pair.alice).a.abortConnection()
    pair.settle()
    reason = pair.here.reason
    assert isinstance(reason, TransportLost)
    assert isinstance(reason.cause, ServerLost)
    [server] = pair.network.relays
    assert reason.cause.server == str(server.key.public_key)
    assert producer.told == ["stop"]
    assert isinstance(pair.there.reason, TransportLost)
    assert isinstance(pair.there.reason.cause, PeerGone)


@pytest_twisted.ensureDeferred
async def test_who_dials_anew_when_a_dial_failed_with_its_session_gets_another_one():
    @implementer(IAccessPolicy)
    class Slow:
        """Never decides on the first one."""

        def __init__(self) -> None:
            self.asked = 0

        def allow(self, remote, service):
            self.asked += 1
            return Deferred() if self.asked == 1 else True

    async with LocalNetwork(MemoryNetwork(), relays=1, discovery=None) as network:
        alice, bob = await network.client(), await network.client()
        policy = Slow()
        bob.listen(Factory.forProtocol(Protocol), policy=policy)

        def dial(*_):
            return ensureDeferred(alice.dial(bob.public_key))

        dialling = dial().addErrback(dial)
        network.reactor.advance(1.0)
        assert policy.asked == 1
        network.reactor.pipes[0].a.abortConnection()
        transport = await network.wait(dialling)
        assert policy.asked == 2
        transport.abortConnection()


@pytest_twisted.ensureDeferred
async def test_data_that_came_before_the_session_was_lost_is_still_delivered(connected):
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(b"message in a bottle")
    pair.settle()
    pair.pipe_of(pair.bob).a.abortConnection()
    pair.settle()
    assert pair.there.events == ["made"]
    pair.far.resumeProducing()
    pair.settle()
    assert pair.there.received == b"message in a bottle"
    assert isinstance(pair.there.reason.cause, ServerLost)


@pytest_twisted.ensureDeferred
async def test_the_server_stops(connected):
    pair = await connected()
    [server] = pair.network.relays
    await pair.network.stop_relay(server)
    for protocol in (pair.here, pair.there):
        assert isinstance(protocol.reason, TransportLost)
        assert isinstance(protocol.reason.cause, ServerDraining)


@pytest_twisted.ensureDeferred
async def test_over_is_told_after_the_protocol(connected):
    pair = await connected()
    pair.near.on_over = lambda: pair.here.events.append("over")
    pair.far.loseConnection()
    pair.settle()
    assert isinstance(pair.here.events[1], error.ConnectionDone)
    assert pair.here.events[2:] == ["over"]


# --- an application's mistakes ---------------------------------------------------------------------------------------


def _fail(*_: object) -> None:
    raise ZeroDivisionError("the application's own mistake")


async def _others_go_on(pair: Pair) -> None:
    """The two clients still have their sessions, and a new transport works."""
    other = Recorder()
    pair.there.events.clear()
    there = Recorder()
    for port in pair.bob.services.ports():
        await port.stopListening()
    pair.bob.listen(Factory.forProtocol(lambda: there))
    await pair.network.wait(pair.alice.connect(Factory.forProtocol(lambda: other), pair.bob.public_key))
    other.transport.write(b"others go on")
    pair.settle()
    assert there.received == b"others go on"
    [server] = pair.network.relays
    assert server.stats()["connections"] == 2


@pytest_twisted.ensureDeferred
async def test_a_fault_in_data_received(connected, logged_errors):
    pair = await connected()
    pair.there.on_data = _fail
    pair.near.write(bytes(3 * FRAME))
    pair.settle()
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    assert isinstance(pair.there.reason, ZeroDivisionError)
    assert isinstance(pair.here.reason, TransportLost)
    await _others_go_on(pair)


@pytest.mark.parametrize("where", ["connectionMade", "dataReceived", "buildProtocol", "admits_key"])
@pytest_twisted.ensureDeferred
async def test_a_fault_that_is_no_exception(connected, logged_errors, where):
    """sys.exit(), or a panic in Rust: the reactor ends one connection for it, and here others share that connection."""

    def leave(*_: object) -> None:
        raise SystemExit(3)

    pair = await connected()
    [port] = pair.bob.services.ports()
    await port.stopListening()
    broken = Recorder()
    factory, policy = Factory.forProtocol(lambda: broken), AllowKeys([pair.alice.public_key])
    setattr({"buildProtocol": factory, "admits_key": policy}.get(where, broken), where, leave)
    pair.bob.listen(factory, policy=policy, security=Security.HOP)
    dialling = ensureDeferred(pair.alice.dial(pair.bob.public_key))
    pair.settle()
    if where == "admits_key":
        with pytest.raises(DialError):
            await dialling
    else:
        end, transport = Recorder(), await dialling
        transport.attach(end)
        transport.write(b"leave")
        pair.settle()
        assert isinstance(end.reason, TransportLost)
    assert len(logged_errors.flush(SystemExit)) == 1
    pair.near.write(b"and I stay")
    pair.settle()
    assert pair.there.received == b"and I stay"
    await _others_go_on(pair)


@pytest_twisted.ensureDeferred
async def test_a_fault_in_connection_made(connected, logged_errors):
    class Broken(Recorder):
        connectionMade = _fail

    pair = await connected(there=Broken())
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    assert isinstance(pair.there.reason, ZeroDivisionError)
    assert isinstance(pair.here.reason, TransportLost)
    await _others_go_on(pair)


@pytest_twisted.ensureDeferred
async def test_a_fault_in_connection_lost(connected, logged_errors):
    class Broken(Recorder):
        connectionLost = _fail

    pair = await connected(there=Broken())
    over = []
    pair.far.on_over = lambda: over.append(True)
    with pytest.raises(ZeroDivisionError):  # a fake clock raises what a reactor logs
        pair.near.loseConnection()
        pair.settle()
    assert over == [True]
    pair.settle()
    await _others_go_on(pair)


@pytest.mark.parametrize("streaming", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_fault_in_a_producer(connected, logged_errors, streaming):
    """It happens in the middle of the session's own work, and must not become the session's end."""
    pair = await connected()
    pair.far.pauseProducing()
    pair.near.write(bytes(WINDOW + 4 * PAUSE))
    pair.settle()
    pair.near.registerProducer(Producer(_fail), streaming)
    pair.far.resumeProducing()
    pair.settle()
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    assert isinstance(pair.here.reason, ZeroDivisionError)
    assert isinstance(pair.there.reason, TransportLost)
    await _others_go_on(pair)


@pytest_twisted.ensureDeferred
async def test_a_fault_in_a_pull_producer_that_runs(connected, logged_errors):
    pair = await connected()
    producer = Producer()
    pair.near.registerProducer(producer, False)
    producer.work = _fail
    pair.settle()
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    assert producer.told == ["resume", "resume", "stop"]
    assert isinstance(pair.there.reason, TransportLost)
    await _others_go_on(pair)


@pytest.mark.parametrize("pauses", ["before", "at the first piece"])
@pytest_twisted.ensureDeferred
async def test_an_abort_shows_to_an_application_that_waits_for_its_reader_and_its_writer(connected, pauses):
    """As one end of a tunnel does whose other end takes nothing as long as nothing is taken from it: it would wait for ever."""
    pair = await connected()
    producer = Producer()
    pair.near.registerProducer(producer, True)
    pair.far.pauseProducing()
    pair.near.write(bytes(AckGate.THRESHOLD_BYTES + WINDOW + 2 * PAUSE))
    pair.settle()
    assert producer.told[-1] == "pause"
    pair.near.pauseProducing()
    pair.far.write(b"not read".ljust(JOINED_BYTES))
    pair.settle()
    pair.far.write(b"nor that")
    pair.settle()
    if pauses != "before":
        pair.here.on_data = lambda data: pair.near.pauseProducing()
        pair.near.resumeProducing()
    pair.far.abortConnection()
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionLost)
    assert producer.told[-1] == "stop"
    assert b"nor that" not in pair.here.received


@pytest.mark.parametrize("ends", ["abortConnection", "loseConnection"])
@pytest_twisted.ensureDeferred
async def test_an_application_that_writes_on_and_does_not_read_is_told_of_the_end(connected, ends):
    """As one end of a tunnel does whose service streams and does not read: it would hold both connections for ever."""
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"not read")
    pair.settle()
    getattr(pair.far, ends)()
    pair.settle()
    for _ in range(round(LINGER_S)):
        assert pair.here.events == ["made"]
        pair.near.write(b"beat")
        pair.clock.advance(1.0)
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionLost)
    assert pair.here.received == b""


@pytest.mark.parametrize("streaming", [False, True])
@pytest_twisted.ensureDeferred
async def test_an_application_that_reads_on_when_its_producer_is_done_is_told_of_the_end(connected, streaming):
    """As one does that answers each question with a file, and found the first answer when the peer had closed."""
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"the next question")
    pair.settle()
    pair.far.loseConnection()
    pair.settle()
    producer = Producer()
    pair.near.registerProducer(producer, streaming)
    pair.clock.advance(LINGER_S - 1.0)
    pair.settle()
    assert pair.here.events == ["made"]
    pair.clock.advance(1.0)
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionLost)  # it had more to write
    assert producer.told[-1] == "stop"


@pytest.mark.parametrize("streaming", [False, True])
@pytest_twisted.ensureDeferred
async def test_an_application_that_reads_on_while_its_producer_waits_gets_everything(connected, streaming):
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"read later")
    pair.settle()
    pair.far.loseConnection()
    pair.settle()
    pair.near.registerProducer(Producer(), streaming)
    pair.clock.advance(LINGER_S - 1.0)
    pair.near.resumeProducing()
    pair.settle()
    assert pair.here.received == b"read later"
    assert isinstance(pair.here.reason, error.ConnectionDone)


@pytest_twisted.ensureDeferred
async def test_an_application_whose_producer_is_done_has_all_the_time_to_read(connected):
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"read later")
    pair.settle()
    pair.far.loseConnection()
    pair.settle()
    pair.near.registerProducer(Producer(), False)
    pair.clock.advance(1.0)
    pair.near.unregisterProducer()
    pair.clock.advance(10 * LINGER_S)
    pair.near.resumeProducing()
    pair.settle()
    assert pair.here.received == b"read later"
    assert isinstance(pair.here.reason, error.ConnectionDone)


async def unread_to_the_end(connected):
    """A pair of which one side has paused, and the other has sent the returned pieces and closed."""
    pair = await connected()
    pair.there.on_data = None
    pair.near.pauseProducing()
    pieces = [bytes((number,)) * JOINED_BYTES for number in range(4)]
    for piece in pieces:
        pair.far.write(piece)
        pair.settle()
    pair.far.loseConnection()
    pair.settle()
    return pair, pieces


@pytest_twisted.ensureDeferred
async def test_an_application_that_writes_on_and_reads_slowly_gets_everything(connected):
    pair, pieces = await unread_to_the_end(connected)
    pair.here.on_data = lambda data: pair.near.pauseProducing()
    for _ in pieces:
        pair.near.write(b"beat")
        pair.clock.advance(LINGER_S - 1.0)
        pair.near.resumeProducing()
        pair.settle()
    pair.near.resumeProducing()
    pair.settle()
    assert pair.here.received == b"".join(pieces)
    assert isinstance(pair.here.reason, error.ConnectionLost)  # what was written did not arrive


@pytest.mark.parametrize("first", ["write", "register"])
@pytest_twisted.ensureDeferred
async def test_an_application_that_writes_on_while_its_producer_waits_gets_everything(connected, first):
    """The end was in order, and stays so for the reader, although what is written after it makes it a loss."""
    pair, pieces = await unread_to_the_end(connected)
    if first == "write":
        pair.near.write(b"beat")
    pair.near.registerProducer(Producer(), True)
    pair.near.write(b"beat")
    pair.here.on_data = lambda data: pair.near.pauseProducing()
    for _ in pieces:
        pair.clock.advance(LINGER_S - 1.0)
        pair.near.resumeProducing()
        pair.settle()
    pair.near.resumeProducing()
    pair.settle()
    assert pair.here.received == b"".join(pieces)
    assert isinstance(pair.here.reason, error.ConnectionLost)  # what was written did not arrive


@pytest_twisted.ensureDeferred
async def test_an_application_that_writes_on_while_its_producer_waits_and_never_reads_is_told_of_the_end(connected):
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"not read")
    pair.settle()
    pair.far.loseConnection()
    pair.settle()
    pair.near.write(b"beat")
    pair.near.registerProducer(Producer(), True)
    pair.clock.advance(LINGER_S - 1.0)
    pair.settle()
    assert pair.here.events == ["made"]
    pair.clock.advance(1.0)
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionLost)
    assert pair.here.received == b""


@pytest_twisted.ensureDeferred
async def test_an_abort_shows_to_an_application_that_does_not_read_and_whose_producer_is_pulled(connected):
    pair = await connected()
    pair.near.pauseProducing()
    pair.far.write(b"not read")
    pair.settle()
    producer = Producer(lambda: pair.near.write(b"x"))
    pair.near.registerProducer(producer, False)
    pair.far.abortConnection()
    pair.settle()
    assert isinstance(pair.here.reason, error.ConnectionLost)
    assert producer.told[-1] == "stop"


@pytest_twisted.ensureDeferred
async def test_what_came_before_an_abort_waits_for_an_application_that_only_does_not_read(connected):
    pair = await connected()
    pair.near.registerProducer(Producer(), True)
    pair.near.pauseProducing()
    pair.far.write(b"not read yet")
    pair.settle()
    pair.far.abortConnection()
    pair.settle()
    assert pair.here.events == ["made"]
    pair.near.resumeProducing()
    pair.settle()
    assert pair.here.received == b"not read yet"
    assert isinstance(pair.here.reason, error.ConnectionLost)
