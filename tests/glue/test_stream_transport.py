"""A stream as a transport of Twisted, over the smallest stream there can be: each state meets each event."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IAddress, IHalfCloseableProtocol, IPullProducer, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DmsgError, LocalProtocolError
from dmsg.glue.deadlines import LINGER_S
from dmsg.glue.stream_transport import StreamTransport, TransportLost
from dmsg.glue.streams import AbortReason
from dmsg.glue.transport_state import CLOSED_HERE, TRANSITIONS, TransportState

PENDING_LIMIT = 20


class LineError(DmsgError):
    """What a line ends for."""


class Line:
    """A stream: what was written to it, and how far the test has let it come."""

    def __init__(self) -> None:
        self.blocked = False
        self.acked_bytes = 0
        self.sent = bytearray()
        self.drops = self.consumed_bytes = 0
        self.is_over = self.write_ended = self.closing = False
        self.aborted: AbortReason | None = None

    @property
    def drained(self) -> bool:
        return self.acked_bytes == len(self.sent)

    def drop(self) -> None:
        self.drops += 1


class LineConnection:
    """The connection of lines."""

    def send_data(self, stream: Line, data: bytes) -> bool:
        if stream.is_over or stream.closing:
            raise LocalProtocolError("the line takes no data")
        assert not stream.write_ended
        stream.sent += data
        if len(stream.sent) - stream.acked_bytes > PENDING_LIMIT:
            raise LineError("too much")
        return stream.blocked

    def consumed(self, stream: Line, size: int) -> bool:
        stream.consumed_bytes += size
        return not stream.is_over

    def close(self, stream: Line) -> bool:
        stream.closing = True
        stream.is_over = stream.is_over or stream.drained
        return stream.is_over


class LineTransport(StreamTransport[Line]):
    """The transport of a protocol whose streams can be closed by half."""

    def __init__(self, clock: Clock) -> None:
        self.flushes = 0
        self.ways: list[tuple[TransportState, TransportState]] = []
        super().__init__(Line(), LineConnection(), self._flush, clock)

    def _flush(self) -> None:
        self.flushes += 1

    def move(self, state: TransportState) -> None:
        self.ways.append((self.state, state))
        super().move(state)

    def getPeer(self) -> IAddress:
        raise NotImplementedError

    getHost = getPeer

    def loseWriteConnection(self) -> None:
        self._end_write(self._end_stream)

    def deadline_exceeded(self, what: str) -> None:
        self._abort(Failure(TransportLost(LineError(what))), AbortReason.DEADLINE)

    def _end_stream(self) -> None:
        self.stream.write_ended = True

    def _abort_stream(self, why: AbortReason) -> None:
        if not self.stream.is_over:
            self.stream.is_over = True
            self.stream.aborted = why


class Plain(Protocol):
    """Remembers in order what it is told, and does what the test asks for when it is told something."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.received = b""
        self.reason: Failure | None = None
        self.then: dict[str, Callable[[], object]] = {}

    def note(self, what: str) -> None:
        self.told.append(what)
        self.then.get(what, lambda: None)()

    def connectionMade(self) -> None:
        self.note("made")

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        self.note("data")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.reason = reason
        self.note("lost")


@implementer(IHalfCloseableProtocol)
class Halved(Plain):
    """The same, and may be closed by half."""

    def readConnectionLost(self) -> None:
        self.note("read lost")

    def writeConnectionLost(self) -> None:
        self.note("write lost")


@implementer(IPushProducer, IPullProducer)
class Source:
    """A producer that writes nothing of its own."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pauseProducing(self) -> None:
        self.told.append("pause")

    def resumeProducing(self) -> None:
        self.told.append("resume")

    def stopProducing(self) -> None:
        self.told.append("stop")


class World:
    """One transport, its application and its peer, and all that can happen to them."""

    def __init__(self, protocol: Plain) -> None:
        self.clock = Clock()
        self.transport = LineTransport(self.clock)
        self.line = self.transport.stream
        self.protocol = protocol
        self.source = Source()
        self.delivered = b""
        self.peer_ended = False

    # what the application does

    def attach(self) -> None:
        if self.transport.protocol is None and self.transport.connected:
            self.transport.attach(self.protocol)

    def write(self) -> None:
        self.transport.write(b"abc")

    def lose(self) -> None:
        self.transport.loseConnection()

    def lose_write(self) -> None:
        self.transport.loseWriteConnection()

    def abort(self) -> None:
        self.transport.abortConnection()

    def pause(self) -> None:
        self.transport.pauseProducing()

    def resume(self) -> None:
        self.transport.resumeProducing()

    def register(self) -> None:
        if self.transport.producer is None:
            self.transport.registerProducer(self.source, streaming=True)

    def unregister(self) -> None:
        self.transport.unregisterProducer()

    def register_paused(self) -> None:
        self.line.blocked = True
        self.register()

    def set_deadline(self) -> None:
        self.transport.set_deadline(self.clock.seconds() + 1.0)

    # what the peer and the network do

    def deliver(self) -> None:
        if not self.line.is_over and not self.peer_ended:
            self.delivered += (data := b"%03d" % (len(self.delivered) // 3))  # another one each time
            self.transport.deliver(data)

    def ack(self) -> None:
        self.line.acked_bytes = len(self.line.sent)
        self.line.blocked = False
        self.transport.writable()
        if self.line.write_ended:
            self.transport.end_acked()
        if self.line.closing and not self.line.is_over:
            self.line.is_over = True
            self.transport.over(Failure(ConnectionDone()))

    def peer_end(self) -> None:
        if not self.line.is_over:
            self.peer_ended = True
            self.transport.end_received()

    def over(self) -> None:
        self.line.is_over = True
        self.transport.over(Failure(TransportLost(LineError("cut"))))

    def turn(self) -> None:
        self.clock.advance(0.0)

    def deadline_passes(self) -> None:
        self.clock.advance(1.0)

    def linger_passes(self) -> None:
        self.clock.advance(LINGER_S)

    # what always holds

    def check(self) -> None:
        told, transport = self.protocol.told, self.transport
        assert all(target in TRANSITIONS[source] for source, target in transport.ways)
        assert told.count("made") <= 1
        assert told[:1] in ([], ["made"])
        assert told.count("lost") <= 1
        assert told.count("read lost") <= 1
        assert "lost" not in told[:-1]
        assert "data" not in told[told.index("read lost") :] if "read lost" in told else True
        assert self.delivered.startswith(self.protocol.received)
        assert transport.connected is ("lost" not in told) or transport.protocol is None
        assert transport.disconnecting or transport.connected
        if transport.state in CLOSED_HERE:
            assert not transport._inbox

    def finish(self) -> None:
        """The network goes, the application reads on: it is told of the end in every state."""
        self.attach()
        self.over()
        for _ in range(1 + len(self.delivered)):  # one that pauses after each message reads them one by one
            self.resume()
            self.turn()
        self.turn()
        assert self.transport.state is TransportState.ENDED
        assert not self.clock.getDelayedCalls()
        if self.transport.protocol is not None:
            assert self.protocol.told[-1] == "lost"
        assert self.transport.producer is None


EVENTS = [name for name in vars(World) if not name.startswith("_") and name not in ("check", "finish")]
protocols = st.sampled_from([Plain, Halved])


@given(protocols, st.lists(st.sampled_from(EVENTS), max_size=25))
def test_any_event_may_come_in_any_state(kind: type[Plain], events: list[str]) -> None:
    world = World(kind())
    for event in events:
        getattr(world, event)()
        world.check()
    world.finish()
    world.check()


@given(
    protocols,
    st.lists(st.sampled_from(EVENTS), max_size=15),
    st.sampled_from(["made", "data", "read lost", "write lost"]),
    st.sampled_from(["write", "lose", "lose_write", "abort", "pause", "register"]),
)
def test_an_application_may_do_anything_when_it_is_told_something(
    kind: type[Plain], events: list[str], when: str, what: str
) -> None:
    world = World(kind())
    world.protocol.then[when] = getattr(world, what)
    for event in events:
        getattr(world, event)()
        world.check()
    world.finish()


#: A way into each state, for a protocol that can be closed by half.
INTO = {
    TransportState.OPEN: ["attach"],
    TransportState.WRITE_ENDED: ["attach", "lose_write"],
    TransportState.READ_ENDED: ["attach", "peer_end", "turn"],
    TransportState.BOTH_ENDED: ["attach", "peer_end", "turn", "lose_write"],
    TransportState.FINISHING: ["attach", "register_paused", "lose"],
    TransportState.CLOSING: ["attach", "write", "lose"],
    TransportState.ENDING: ["attach", "pause", "deliver", "over"],
    TransportState.TELLING: ["attach", "abort"],
    TransportState.ENDED: ["attach", "abort", "turn"],
}


def _in(state: TransportState) -> World:
    world = World(Halved())
    for event in INTO[state]:
        getattr(world, event)()
    assert world.transport.state is state
    return world


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", TransportState, ids=lambda state: state.name)
def test_each_state_meets_each_event(state: TransportState, event: str) -> None:
    world = _in(state)
    getattr(world, event)()
    world.check()
    world.turn()
    world.check()
    world.finish()


def test_each_way_of_the_table_is_gone() -> None:
    ways = set()
    for state in TransportState:
        for event in EVENTS:
            for later in EVENTS:
                world = _in(state)
                for one in (event, later, "turn"):
                    getattr(world, one)()
                ways |= set(world.transport.ways)
    assert ways == {(source, target) for source, targets in TRANSITIONS.items() for target in targets}


def test_a_way_that_the_table_does_not_have() -> None:
    world = _in(TransportState.CLOSING)
    with pytest.raises(AssertionError):
        world.transport.move(TransportState.OPEN)


# --- what a state means ------------------------------------------------------------------------------------------------


WRITABLE = (TransportState.OPEN, TransportState.READ_ENDED, TransportState.FINISHING)


@pytest.mark.parametrize("state", TransportState, ids=lambda state: state.name)
def test_where_an_application_may_write(state: TransportState) -> None:
    world = _in(state)
    before = len(world.line.sent)
    world.transport.write(b"more")
    assert (len(world.line.sent) > before) is (state in WRITABLE)


@pytest.mark.parametrize("state", TransportState, ids=lambda state: state.name)
def test_what_twisted_reads_of_a_state(state: TransportState) -> None:
    transport = _in(state).transport
    assert transport.connected is (state is not TransportState.ENDED)
    assert transport.disconnecting is (
        state in (TransportState.FINISHING, TransportState.CLOSING, TransportState.TELLING, TransportState.ENDED)
    )


@pytest.mark.parametrize("state", [TransportState.FINISHING, TransportState.CLOSING], ids=lambda state: state.name)
def test_what_comes_behind_the_close_is_dropped_and_acknowledged(state: TransportState) -> None:
    world = _in(state)
    world.pause()
    world.deliver()
    assert (world.line.drops, world.line.consumed_bytes) == (1, 3)
    assert world.protocol.received == b""


@pytest.mark.parametrize("state", [TransportState.FINISHING, TransportState.CLOSING], ids=lambda state: state.name)
def test_what_was_not_read_before_the_close_is_dropped_and_acknowledged(state: TransportState) -> None:
    """The peer may read no more before its own data is taken: then it would never take what the producer has to write."""
    world = _in(TransportState.OPEN)
    for event in ("pause", "deliver", "register_paused" if state is TransportState.FINISHING else "write", "lose"):
        getattr(world, event)()
    assert world.transport.state is state
    assert (world.line.drops, world.line.consumed_bytes) == (1, 3)
    assert world.protocol.received == b""


def test_a_close_waits_for_a_paused_producer() -> None:
    world = _in(TransportState.FINISHING)
    assert not world.line.closing
    world.ack()
    assert world.source.told == ["pause", "resume"]
    assert not world.line.closing
    world.write()
    world.unregister()
    assert world.line.closing
    assert world.line.sent == b"abc"
    world.ack()
    world.turn()
    assert world.protocol.reason is not None
    assert world.protocol.reason.check(ConnectionDone)


@pytest.mark.parametrize("close", ["lose", "lose_write"])
def test_a_close_waits_no_longer_for_a_producer_that_may_write_and_of_which_nothing_arrives(close: str) -> None:
    """A tunnel does not unregister the other connection, and that has nothing more to write."""
    world = _in(TransportState.OPEN)
    for event in ("register_paused", "write", close, "ack"):
        getattr(world, event)()
    for _ in range(5):
        world.clock.advance(LINGER_S - 1)
        world.write()
        world.ack()
    world.line.blocked = True
    world.write()
    world.clock.advance(2 * LINGER_S)  # one that is paused again is waited for
    world.ack()
    world.clock.advance(LINGER_S - 1)
    assert not world.line.closing and not world.line.write_ended
    world.clock.pump([LINGER_S, LINGER_S])
    assert world.line.closing is (close == "lose") and world.line.write_ended is (close == "lose_write")
    assert world.line.sent == 7 * b"abc"
    world.over()
    world.turn()
    assert world.protocol.told[-1] == "lost" and not world.clock.getDelayedCalls()


def test_a_close_waits_for_no_producer_that_may_write() -> None:
    """One that is registered for good, such as the other connection of a forwarder, is never unregistered."""
    world = _in(TransportState.OPEN)
    for event in ("register", "write", "lose"):
        getattr(world, event)()
    assert world.line.closing
    world.ack()
    world.turn()
    assert world.line.sent == b"abc"
    assert world.source.told == ["stop"]
    assert world.protocol.reason is not None
    assert world.protocol.reason.check(ConnectionDone)


def test_the_end_of_a_half_waits_for_a_paused_producer_and_for_no_other() -> None:
    world = _in(TransportState.OPEN)
    for event in ("register", "lose_write"):
        getattr(world, event)()
    assert world.line.write_ended
    world = _in(TransportState.OPEN)
    for event in ("register_paused", "lose_write", "ack"):
        getattr(world, event)()
    assert not world.line.write_ended
    world.unregister()
    assert world.line.write_ended


def test_what_came_before_the_end_comes_first() -> None:
    world = _in(TransportState.ENDING)
    world.turn()
    assert world.protocol.told == ["made"]
    world.resume()
    world.turn()
    assert world.protocol.told == ["made", "data", "lost"]


@pytest.mark.parametrize("kind", [Plain, Halved])
@pytest.mark.parametrize("half", [["lose_write"], []], ids=["our half ended", "our half open"])
def test_the_end_of_the_peer_s_half_is_told_although_all_is_over(kind: type[Plain], half: list[str]) -> None:
    """The application has paused in front of it when the stream goes."""
    for before in (["deliver"], []):
        world = World(kind())
        for event in ["attach", *half, "pause", *before, "peer_end", "over", "turn", *["resume"] * len(before), "turn"]:
            getattr(world, event)()
        told = ["read lost"] if kind is Halved else []
        assert world.protocol.told == ["made", *["data"] * len(before), *told, "lost"]


def test_an_application_that_does_not_read_what_came_is_not_told_that_it_was_all() -> None:
    world = World(Halved())
    for event in ("attach", "register_paused", "pause", "deliver", "peer_end", "over", "turn"):
        getattr(world, event)()
    assert world.protocol.told == ["made", "lost"]


@pytest.mark.parametrize("before", [["deliver"], []])
def test_an_application_that_has_paused_is_told_of_an_orderly_end_when_it_resumes(before: list[str]) -> None:
    """It may hold back a part of what it was given, as a ``LineReceiver`` does."""
    world = World(Plain())
    for event in ("attach", *before, "pause"):
        getattr(world, event)()
    world.transport.over(Failure(ConnectionDone()))
    world.turn()
    assert world.protocol.told == ["made", *["data"] * len(before)]
    world.resume()
    world.turn()
    assert world.protocol.told[-1] == "lost"


def test_two_ends_of_a_tunnel_that_have_paused_do_not_wait_for_each_other() -> None:
    world = World(Plain())
    for event in ("attach", "register_paused", "pause"):
        getattr(world, event)()
    world.transport.over(Failure(ConnectionDone()))
    world.turn()
    assert world.protocol.told == ["made", "lost"]


def test_what_comes_after_resuming_does_not_overtake_what_came_before() -> None:
    world = _in(TransportState.OPEN)
    world.pause()
    world.deliver()
    world.deliver()
    world.resume()
    world.deliver()  # in the same turn of the reactor
    world.turn()
    world.deliver()
    assert world.protocol.received == world.delivered != b""


def test_a_write_deadline_that_was_taken_back_does_not_pass() -> None:
    world = _in(TransportState.OPEN)
    world.write()
    world.set_deadline()
    world.transport.set_deadline(None)
    assert not world.clock.getDelayedCalls()
    world.deadline_passes()
    assert world.protocol.told == ["made"]


def test_what_comes_in_small_pieces_and_is_not_read_takes_little_more_than_its_bytes() -> None:
    world = _in(TransportState.OPEN)
    world.pause()
    data = bytes(range(256)) * 256
    tracemalloc.start()
    try:
        for at in range(0, len(data), 2):
            world.transport.deliver(data[at : at + 2])
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * len(data)
    world.peer_end()
    world.resume()
    world.turn()
    assert world.protocol.received == data
    assert world.protocol.told[-1] == "read lost"
    assert world.line.consumed_bytes == len(data)


def test_closing_a_transport_that_has_ended_while_it_was_paused() -> None:
    """The application wants nothing of what came any more, and is told of the end without resuming."""
    world = _in(TransportState.ENDING)
    world.lose()
    world.turn()
    assert world.protocol.told == ["made", "lost"]


def test_an_end_waits_for_the_protocol_and_an_abort_does_not() -> None:
    world = World(Plain())
    ended: list[bool] = []
    world.transport.on_over = lambda: ended.append(True)
    world.deliver()
    world.over()
    world.turn()
    assert not ended
    world.attach()
    world.turn()
    assert world.protocol.told == ["made", "data", "lost"]
    assert ended == [True]

    world = World(Plain())
    world.transport.on_over = lambda: ended.append(True)
    world.abort()
    world.turn()
    assert ended == [True, True]
    assert world.protocol.told == []


def test_a_protocol_that_comes_after_the_end_is_told_of_it() -> None:
    world = World(Plain())
    world.abort()
    world.turn()
    world.transport.attach(world.protocol)
    world.turn()
    assert world.protocol.told == ["made", "lost"]
    assert world.protocol.reason is not None and world.protocol.reason.check(ConnectionAborted)
    assert world.transport.protocol is None


def test_a_producer_that_fails_when_it_is_stopped_keeps_the_end_from_nothing(logged_errors: Any) -> None:
    world = World(Plain())
    ended: list[bool] = []
    world.transport.on_over = lambda: ended.append(True)
    world.attach()
    world.source.stopProducing = lambda: 1 // 0  # type: ignore[assignment, method-assign]
    world.register()
    world.over()
    world.turn()
    assert world.protocol.told == ["made", "lost"] and ended == [True]
    assert len(logged_errors.flush(ZeroDivisionError)) == 1


def test_pull_producers_that_follow_each_other_are_asked_by_one_call_at_a_time() -> None:
    """Each has one piece, and lets the next begin when it is asked for another."""
    world = World(Plain())
    world.attach()
    waiting: list[int] = []

    @implementer(IPullProducer)
    class Piece:
        def __init__(self, number: int) -> None:
            self.number = number
            self.is_through = False

        def resumeProducing(self) -> None:
            waiting.append(len(world.clock.getDelayedCalls()))
            if self.is_through:
                world.transport.unregisterProducer()
                if self.number:
                    world.transport.registerProducer(Piece(self.number - 1), streaming=False)
            self.is_through = True

        def stopProducing(self) -> None:
            """It has nothing to close."""

    world.transport.registerProducer(Piece(20), streaming=False)
    world.turn()
    assert world.transport.producer is None
    assert max(waiting) <= 1


def test_a_peer_that_ends_its_half_closes_a_protocol_that_knows_no_halves() -> None:
    world = World(Plain())
    for event in ("attach", "peer_end", "turn"):
        getattr(world, event)()
    assert world.line.closing
    assert world.transport.state is TransportState.ENDED


def test_the_end_of_the_peer_s_half_is_told_in_the_read_that_brings_it() -> None:
    """So that the answer, the end of the other half above all, goes out with what else answers that read."""
    world = World(Plain())
    world.attach()
    world.peer_end()
    assert world.line.closing
    halved = World(Halved())
    halved.attach()
    halved.deliver()
    halved.peer_end()
    assert halved.protocol.told == ["made", "data", "read lost"]
    assert not halved.clock.getDelayedCalls()


def test_what_a_producer_had_still_to_say_does_not_look_complete() -> None:
    world = World(Plain())
    for event in ("attach", "register", "peer_end", "turn"):
        getattr(world, event)()
    assert world.line.aborted is AbortReason.APPLICATION
    assert world.protocol.reason is not None
    assert world.protocol.reason.check(ConnectionDone)


def test_nothing_is_lost_of_what_a_producer_wrote_before_its_application_ended_its_half() -> None:
    world = World(Plain())
    for event in ("attach", "register", "write", "lose_write", "peer_end", "turn"):
        getattr(world, event)()
    assert world.line.aborted is None and world.protocol.told == ["made"]
    world.ack()
    world.turn()
    assert world.protocol.reason is not None
    assert world.protocol.reason.check(ConnectionDone)


def test_an_end_that_is_told_twice() -> None:
    world = World(Halved())
    for event in ("attach", "pause", "deliver", "peer_end", "peer_end", "resume", "turn", "peer_end", "turn"):
        getattr(world, event)()
    assert world.protocol.told == ["made", "data", "read lost"]


def test_reasons_of_an_abort() -> None:
    world = _in(TransportState.OPEN)
    for _ in range(PENDING_LIMIT):
        world.write()
    world.turn()
    assert world.line.aborted is AbortReason.OVERFLOW
    assert isinstance(world.protocol.reason.value.cause, LineError)  # type: ignore[union-attr]

    world = _in(TransportState.OPEN)
    world.set_deadline()
    world.deadline_passes()
    world.turn()
    assert world.line.aborted is AbortReason.DEADLINE
    assert isinstance(world.protocol.reason.value, TransportLost)  # type: ignore[union-attr]

    world = _in(TransportState.CLOSING)
    world.linger_passes()
    world.turn()
    assert world.line.aborted is AbortReason.DEADLINE

    world = _in(TransportState.ENDING)
    world.abort()
    world.turn()
    assert world.protocol.reason.check(ConnectionAborted)  # type: ignore[union-attr]


def test_a_fault_of_the_application_ends_its_transport(logged_errors: Any) -> None:
    world = _in(TransportState.OPEN)
    world.protocol.then["data"] = lambda: 1 // 0
    world.deliver()
    world.turn()
    assert world.line.aborted is AbortReason.APPLICATION
    assert world.line.consumed_bytes == 3
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    assert world.protocol.reason.check(ZeroDivisionError)  # type: ignore[union-attr]
