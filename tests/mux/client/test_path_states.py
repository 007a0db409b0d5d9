"""The path of a transport: each of its states meets each thing that can happen to the transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory
from zope.interface import directlyProvides

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DmsgError
from dmsg.eventlog.schema import TransportClosed, TransportResumed
from dmsg.glue.deadlines import LINGER_S
from dmsg.glue.transport_state import TransportState
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.client.transport import PATH_TRANSITIONS, DmsgTransport, PathState
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.record import COUNTER_LIMIT
from dmsg.mux.core.wire import CLOSE, FWD, REQUEST, CloseReason
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.hostile import HostileNetwork, HostileRelay, RelayFrame, drop
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.probes import PushProducer
from tests.memory_log import MemoryEventLog
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
GRACE_S = 5.0


class Net(HostileNetwork):
    """Two clients and a relay, with a transport in the middle of its life."""

    relay: HostileRelay
    alice: DmsgClient
    bob: DmsgClient
    t: DmsgTransport

    def __init__(self, connection: ConnectionConfig | None = None, events: MemoryEventLog | None = None) -> None:
        super().__init__(MemoryNetwork(), relays=0, events=events)
        self._connection = connection or ConnectionConfig()

    async def start(self) -> None:
        await super().start()
        self.relay = await self.add_relay()
        config = ClientConfig(resume_grace_s=GRACE_S, connection=self._connection)
        self.bob = await self.client(config=config)
        self.alice = await self.client(config=config)
        self.a, self.b = ConformanceProtocol(), ConformanceProtocol()
        self.bob.listen(Factory.forProtocol(lambda: self.b))
        self.t = await self.wait(self.alice.dial(self.bob.public_key))
        self.t.attach(self.a)
        await self.wait(self.b.when(lambda: self.b.made > 0))

    def cut(self) -> None:
        address = self.pinned[0].address
        self.reactor.refuse(address.host, address.port)
        self.relay.cut(self.alice.public_key)
        self.reactor.advance(0.0)

    def heal(self) -> None:
        address = self.pinned[0].address
        self.reactor.heal(address.host, address.port)


def _abort(net: Net) -> None:
    net.t.abortConnection()
    net.reactor.advance(0.0)


#: A way into each state.
INTO: dict[PathState, Callable[[Net], object]] = {
    PathState.CARRIED: lambda net: None,
    PathState.LOST: Net.cut,
    PathState.OVER: _abort,
}

EVENTS: dict[str, Callable[[Net], object]] = {
    "written": lambda net: net.t.write(b"x" * 1_000),
    "too much written": lambda net: [net.t.write(bytes(1 << 20)) for _ in range(70)],
    "closed": lambda net: net.t.loseConnection(),
    "closed by half": lambda net: net.t.loseWriteConnection(),
    "aborted": lambda net: net.t.abortConnection(),
    "a deadline passes": lambda net: net.t.deadline_exceeded("read deadline"),
    "the linger passes": lambda net: net.t.linger_over(),
    "given up": lambda net: net.t.detached and net.t.give_up(DmsgError("no path")),
    "a search fails": lambda net: net.t.failed_to_resume(DmsgError("none found")),
    "the peer ends": lambda net: net.t.end_received(),
    "the end arrives": lambda net: net.t.end_acked(),
    "closed by the relay alone": lambda net: (
        net.t.path is PathState.CARRIED and net.t.ended(CloseReason.NORMAL, local=False)
    ),
    "the grace passes": lambda net: net.reactor.advance(GRACE_S),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PathState, ids=lambda state: state.name)
@sync
async def test_each_state_meets_each_event(state: PathState, event: str) -> None:
    async with Net() as net:
        INTO[state](net)
        assert net.t.path is state
        EVENTS[event](net)
        assert net.t.path is state or net.t.path in PATH_TRANSITIONS[state]
        net.heal()
        net.t.abortConnection()
        await net.wait(net.a.when_lost())
        assert net.t.state is TransportState.ENDED
        assert net.t.path in (PathState.OVER, PathState.CARRIED)
        net.reactor.advance(200.0)
        assert net.t.path is PathState.OVER
        assert len(net.a.lost) == 1


@sync
async def test_a_lost_path_is_found_again() -> None:
    async with Net() as net:
        net.cut()
        net.t.write(b"meanwhile")
        assert net.t.path is PathState.LOST
        assert net.t.state is TransportState.OPEN
        net.heal()
        await net.wait(net.b.when_received(9))
        assert net.t.path is PathState.CARRIED


@sync
async def test_who_waits_to_be_found_is_back_at_its_relay_soon() -> None:
    """The side that was dialled looks for no path: it has to be where the other one finds it."""
    async with Net() as net:
        net.relay.cut(net.bob.public_key)
        net.reactor.advance(0.0)
        assert not net.bob.pool.sessions
        net.reactor.advance(net.bob.config.pool.urgent_backoff_s + 0.1)
        assert net.bob.pool.sessions
        net.t.write(b"found")
        await net.wait(net.b.when_received(5))


@sync
async def test_a_relay_that_nothing_waits_for_is_not_dialled_in_haste() -> None:
    async with Net() as net:
        net.t.abortConnection()
        net.reactor.advance(1.0)
        net.relay.cut(net.bob.public_key)
        net.reactor.advance(net.bob.config.pool.urgent_backoff_s + 0.1)
        assert not net.bob.pool.sessions


@sync
async def test_what_is_closed_without_a_path_and_not_taken_on_the_next_one_is_cut_off() -> None:
    async with Net() as net:
        net.b.transport.pauseProducing()
        net.t.write(bytes(3_000_000))
        net.reactor.advance(1.0)
        net.cut()
        net.t.loseConnection()
        net.heal()
        net.reactor.advance(5.0)
        assert net.t.path is PathState.CARRIED
        assert not net.a.lost
        net.reactor.advance(2 * LINGER_S)
        assert net.a.lost[0].value.cause.name == "deadline"
        assert net.t.path is PathState.OVER


@sync
async def test_a_peer_that_comes_back_to_a_closed_transport_and_never_ends_keeps_no_place() -> None:
    """It opens transports, cuts them off, and goes on with them once the listener's application has closed."""
    async with Net() as net:
        net.a.readConnectionLost = net.a.writeConnectionLost = lambda: None  # type: ignore[attr-defined]
        directlyProvides(net.a, IHalfCloseableProtocol)
        accepted = net.b.transport
        net.cut()
        accepted.loseConnection()
        net.heal()
        net.reactor.advance(5.0)
        assert accepted.path is PathState.CARRIED
        net.reactor.advance(2 * LINGER_S)
        assert accepted.path is PathState.OVER
        assert not net.bob.transports


@sync
async def test_what_waits_for_a_path_is_bounded(logged_errors: Any) -> None:
    async with Net() as net:
        net.cut()
        for _ in range(70):
            net.t.write(bytes(1 << 20))
        await net.wait(net.a.when_lost())
        assert net.t.path is PathState.OVER
        assert "more was written than may wait" in str(net.a.lost[0].value)
        net.heal()


@sync
async def test_a_writer_goes_on_when_the_proof_of_a_path_takes_all_that_waited() -> None:
    """The initiator's first frame is its proof, with data if there is any."""
    async with Net(ConnectionConfig(pause_bytes=2_000, resume_bytes=1_000)) as net:
        net.cut()
        producer = PushProducer(net.t, net.reactor, total=50_000, piece=2_500)
        producer.start()
        assert producer.paused
        assert producer.written == 2_500
        net.heal()
        await net.wait(net.b.when_received(50_000))


@pytest.mark.parametrize("unread", [0, 60_000])
@sync
async def test_what_came_with_the_proof_is_acknowledged_unread_but_no_more_than_may_be(unread: int) -> None:
    """As it would be on the path before."""
    async with Net(ConnectionConfig(ack_limit_bytes=64 * 1024)) as net:
        net.b.transport.pauseProducing()
        net.t.write(bytes(unread))
        net.reactor.advance(1.0)
        assert net.t.stream.acked_bytes == unread
        net.cut()
        net.t.write(bytes(10_000))
        net.heal()
        net.reactor.advance(3.0)
        assert net.t.path is PathState.CARRIED
        assert net.b.transport.stream.received_bytes == unread + 10_000
        assert net.t.stream.acked_bytes == (unread or 10_000)


@sync
async def test_a_relay_that_has_ended_a_path_is_told_from_one_that_was_lost() -> None:
    async with Net() as net:
        net.cut()
        net.heal()
        net.reactor.advance(2.0)
        assert net.t.path is PathState.CARRIED
        assert net.t.ended_by == ()
        net.t.ended(CloseReason.PEER_GONE, local=False)
        assert net.t.ended_by == (net.relay.key.public_key,)


@sync
async def test_of_relays_that_have_ended_paths_the_last_eight_are_known_in_their_order() -> None:
    async with Net() as net:
        relays = [SecretKey(bytes((n,)) * 32).public_key for n in range(1, 11)]
        for relay in (*relays, relays[5]):
            net.t.note_ended_by(relay)
        assert net.t.ended_by == (*relays[2:5], *relays[6:], relays[5])


@sync
async def test_a_writer_that_was_paused_goes_on_on_the_next_path_whatever_else_is_written_without_one() -> None:
    """Less waits than made it pause, and more than lets it go on."""
    config = ConnectionConfig(pause_bytes=8_000, resume_bytes=2_000, secure_window_bytes=20_000, ack_limit_bytes=1_000)
    async with Net(config) as net:
        net.b.transport.pauseProducing()
        producer = PushProducer(net.t, net.reactor, total=52_000, piece=26_000)
        producer.start()
        net.reactor.advance(1.0)
        assert producer.paused
        assert config.resume_bytes < net.t.stream.pending.size < config.pause_bytes
        net.cut()
        net.t.write(b"x")
        net.heal()
        net.b.transport.resumeProducing()
        await net.wait(net.b.when_received(52_001))


@sync
async def test_a_writer_goes_on_after_the_connection_could_not_send_what_made_room_for_it() -> None:
    """The record counter is used up just then."""
    async with Net(ConnectionConfig(pause_bytes=2_000, resume_bytes=1_000)) as net:
        [session] = net.alice.pool.sessions.values()
        session.connection._records._sent = COUNTER_LIMIT
        producer = PushProducer(net.t, net.reactor, total=50_000, piece=2_500)
        producer.start()
        await net.wait(net.b.when_received(50_000))
        assert net.alice.pool.sessions[session.server] is not session


@sync
async def test_an_impossible_claim_is_the_reason_and_not_the_search_that_failed_before() -> None:
    events = MemoryEventLog()
    async with Net(events=events) as net:
        net.cut()
        net.reactor.advance(1.0)
        net.b.transport.stream.received_bytes = 7  # Bob is about to claim that he has what Alice never sent
        net.heal()
        await net.wait(net.a.when_lost())
        assert isinstance(net.a.lost[0].value.cause, IntegrityError)
    assert events.of(TransportClosed) and not events.of(TransportResumed)


@sync
async def test_who_has_nothing_more_to_lose_and_closes_without_a_path_has_a_clean_end() -> None:
    """The peer has acknowledged all and the end behind it; only what it would have said further is missing."""
    async with Net() as net:
        directlyProvides(net.b, IHalfCloseableProtocol)
        net.b.readConnectionLost = lambda: None  # type: ignore[attr-defined]
        net.t.write(b"all of it")
        net.t.loseWriteConnection()
        net.reactor.advance(1.0)
        assert net.t.stream.end_acked
        net.cut()
        net.t.loseConnection()
        net.reactor.advance(0.0)
        assert net.a.lost[0].type is ConnectionDone
        assert net.t.path is PathState.LOST
        net.heal()
        net.reactor.advance(3.0)
        net.b.transport.loseConnection()
        await net.wait(net.b.when_lost())
        assert net.b.lost[0].type is ConnectionDone, "the next path is found for the peer's sake"
        assert net.t.path is PathState.OVER


@sync
async def test_a_client_that_stops_leaves_nothing_of_a_closed_transport_without_a_path() -> None:
    async with Net() as net:
        net.t.loseWriteConnection()
        directlyProvides(net.b, IHalfCloseableProtocol)
        net.b.readConnectionLost = lambda: None  # type: ignore[attr-defined]
        net.reactor.advance(1.0)
        net.cut()
        net.t.loseConnection()
        net.reactor.advance(0.0)
        assert (net.t.state, net.t.path) == (TransportState.ENDED, PathState.LOST)
        began = net.reactor.seconds()
        await net.stop_client(net.alice)
        assert net.t.path is PathState.OVER
        assert net.reactor.seconds() - began < GRACE_S
        net.heal()


@pytest.mark.parametrize("extended", [True, False], ids=["extended relay", "base relay"])
@sync
async def test_a_transport_goes_on_after_its_listener_has_stopped(extended: bool) -> None:
    async with AliceAndBob(extended=extended) as net:
        port = net.serve()
        transport = await net.wait(net.alice.dial(net.bob.public_key, security=Security.E2E))
        transport.attach(ConformanceProtocol())
        net.reactor.advance(0.0)
        await net.wait(port.stopListening())
        first = transport.stream
        net.relay.cut(net.alice.public_key)
        net.reactor.advance(0.1)
        transport.write(b"after")
        await net.wait(net.built[0].when_received(5))
        assert transport.stream is not first
        transport.abortConnection()


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in one read"])
@sync
async def test_who_has_everything_and_closes_when_the_path_ends_has_a_clean_end(apart: bool) -> None:
    """The end of the peer's stream, to which the application closes, and the relay's CLOSE come in one read or in two."""
    async with Net() as net:
        bob = net.bob.public_key
        gone: list[RelayFrame] = []

        def end_the_path(frame: RelayFrame) -> list[RelayFrame]:
            gone.append(replace(frame, kind=CLOSE, payload=bytes((CloseReason.PEER_GONE,))))
            return [frame] if apart else [frame, *gone]

        net.relay.rule(drop, kind=FWD, to=net.alice.public_key)
        net.relay.rule(drop, kind=REQUEST, to=bob, times=None)
        net.relay.rule(end_the_path, kind=FWD, to=bob)
        net.t.loseWriteConnection()
        net.reactor.advance(0.0)
        if apart:
            net.relay.send(gone[0])
        net.reactor.advance(GRACE_S + 1.0)
        assert net.b.lost[0].type is ConnectionDone
