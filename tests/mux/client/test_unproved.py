"""A path that is lost between the answer to a dial and the initiator's proof: the transport goes on over another one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock

from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.client.resumable import ResumableTransports
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.client.unproved import UnprovedTransport, UnprovedTransports
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S
from dmsg.mux.core.errors import Refused
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, CloseReason
from dmsg.testing.hostile import HostileNetwork, HostileRelay, RelayFrame, drop
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.probes import ConformanceProtocol, pattern
from tests.worlds import ended_cleanly

sync = pytest_twisted.ensureDeferred
SIZE = 300


class Net(HostileNetwork):
    """Relays, to all of which Alice and Bob are connected. What Alice sends over the first path is held back."""

    alice: DmsgClient
    bob: DmsgClient

    def __init__(self, config: ClientConfig | None = None, *, relays: int = 2) -> None:
        super().__init__(MemoryNetwork(), relays=0)
        self._config = config or ClientConfig()
        self._count = relays
        self.ends: list[ConformanceProtocol] = []
        self.held: list[RelayFrame] = []

    async def start(self) -> None:
        await super().start()
        for _ in range(self._count):
            await self.add_relay()
        self.bob = await self.client(min_servers=self._count, config=self._config)
        self.alice = await self.client(min_servers=self._count, config=self._config)
        self.bob.listen(Factory.forProtocol(self._end))

    def _end(self) -> ConformanceProtocol:
        self.ends.append(ConformanceProtocol())
        return self.ends[-1]

    def hold(self, relay: HostileRelay) -> None:
        """Keep back what ``relay`` is to give to Bob of the transports that are open."""

        def keep(frame: RelayFrame) -> list[RelayFrame]:
            self.held.append(frame)
            return []

        for kind in (FWD, ACK):
            relay.rule(keep, kind=kind, to=self.bob.public_key, times=None)

    async def dial(self) -> tuple[DmsgTransport, ConformanceProtocol, HostileRelay, HostileRelay]:
        """Alice's transport, on which she has written, her end, the relay of its path, and another one, which is honest."""
        for relay in self.relays:
            self.hold(relay)  # type: ignore[arg-type]
        transport = await self.wait(self.alice.dial(self.bob.public_key))
        end = ConformanceProtocol()
        transport.attach(end)
        transport.write(pattern(SIZE))
        self.reactor.advance(0.1)
        assert self.held and not self.ends
        server = transport.getHost().server_public_key
        first, other, *_ = sorted(self.relays, key=lambda relay: relay.key.public_key != server)
        other.be_honest()  # type: ignore[attr-defined]
        return transport, end, first, other  # type: ignore[return-value]

    def kill(self, relay: HostileRelay) -> None:
        """It takes no connections any more, and those that it has are reset."""
        address = next(one.address for one in self.pinned if one.public_key == relay.key.public_key)
        self.reactor.refuse(address.host, address.port)
        for client in (self.alice, self.bob):
            relay.cut(client.public_key)

    async def talk(self, end: ConformanceProtocol) -> None:
        """All that was written has come once, there is one end, and the other way works; then both end."""
        await self.wait(self.ends[0].when_received(SIZE))
        self.ends[0].transport.write(pattern(SIZE))  # type: ignore[union-attr]
        await self.wait(end.when_received(SIZE))
        end.transport.loseConnection()  # type: ignore[union-attr]
        for one in (end, self.ends[0]):
            await self.wait(one.when_lost())
        assert len(self.ends) == 1
        assert bytes(self.ends[0].received) == bytes(end.received) == pattern(SIZE)
        assert ended_cleanly(end, self.ends[0])

    def assert_nothing_left(self) -> None:
        self.reactor.advance(CONFIRM_TIMEOUT_S + 1)
        table = self.bob.unproved
        assert not table._by_name and not table._lost
        assert not self.bob.transports and not self.bob.resumable._by_peer
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, UnprovedTransport)]


def _cut_both(net: Net, relay: HostileRelay, transport: DmsgTransport) -> None:
    net.kill(relay)


def _cut_the_initiator(net: Net, relay: HostileRelay, transport: DmsgTransport) -> None:
    relay.cut(net.alice.public_key)


def _cut_the_responder(net: Net, relay: HostileRelay, transport: DmsgTransport) -> None:
    relay.cut(net.bob.public_key)


def _close(net: Net, relay: HostileRelay, transport: DmsgTransport) -> None:
    for client, transport_id in ((net.alice, transport.stream.id), (net.bob, net.held[0].transport_id)):
        relay.send(RelayFrame(client.public_key, CLOSE, transport_id, bytes((CloseReason.SERVER_DRAINING,))))


@pytest.mark.parametrize("lose", [_cut_both, _cut_the_initiator, _cut_the_responder, _close])
@sync
async def test_a_transport_whose_proof_is_lost_with_its_path_goes_on(lose: Callable[..., None]) -> None:
    async with Net() as net:
        transport, end, first, other = await net.dial()
        lose(net, first, transport)
        net.reactor.advance(0.1)
        assert not end.lost
        await net.talk(end)
        assert transport.getHost().server_public_key == other.key.public_key
        net.assert_nothing_left()


@sync
async def test_it_does_so_as_often_as_the_proof_is_lost() -> None:
    async with Net(relays=4) as net:
        transport, end, _, other = await net.dial()
        net.hold(other)
        for last in (False, False, True):
            if last:
                for relay in net.relays:
                    relay.be_honest()  # type: ignore[attr-defined]
            net.held.clear()
            server = transport.getHost().server_public_key
            net.kill(next(relay for relay in net.relays if relay.key.public_key == server))  # type: ignore[arg-type]
            net.reactor.advance(0.5)
            assert bool(net.held) is not last and bool(net.ends) is last
        await net.talk(end)
        net.assert_nothing_left()


@pytest.mark.parametrize("is_first", [True, False])
@sync
async def test_proofs_of_two_paths_open_one_transport(is_first: bool) -> None:
    """The responder does not hear that the first path is gone, and its proof comes before the one of the second, or behind."""
    async with Net() as net:
        _, end, first, other = await net.dial()
        first.rule(drop, kind=CLOSE, to=net.bob.public_key, times=None)
        of_first = list(net.held)
        if is_first:
            net.hold(other)
        net.held.clear()
        first.cut(net.alice.public_key)
        net.reactor.advance(0.5)
        assert len(net.ends) == (not is_first)
        of_second = list(net.held)
        for frame in of_first:
            first.send(frame)
        net.reactor.advance(0.1)
        other.be_honest()
        for frame in of_second:
            other.send(frame)
        await net.talk(end)
        net.assert_nothing_left()


@sync
async def test_what_another_path_has_opened_goes_on_over_a_third_one() -> None:
    """By the name that its first path gave it."""
    async with Net(relays=3) as net:
        transport, end, first, _ = await net.dial()
        for relay in net.relays:
            relay.be_honest()  # type: ignore[attr-defined]
        net.kill(first)
        net.reactor.advance(0.1)
        assert len(net.ends) == 1
        server = transport.getHost().server_public_key
        net.kill(next(relay for relay in net.relays if relay.key.public_key == server))  # type: ignore[arg-type]
        await net.talk(end)
        assert transport.getHost().server_public_key not in (server, first.key.public_key)
        net.assert_nothing_left()


@sync
async def test_a_proof_of_the_second_path_that_comes_behind_that_of_the_third_moves_nothing() -> None:
    """The transport was opened by its first path meanwhile."""
    async with Net(relays=3) as net:
        transport, end, first, _ = await net.dial()
        of_first = list(net.held)
        net.held.clear()
        for relay in net.relays:
            relay.rule(drop, kind=CLOSE, to=net.bob.public_key, times=None)  # type: ignore[attr-defined]
            net.hold(relay)  # type: ignore[arg-type]
        first.cut(net.alice.public_key)
        net.reactor.advance(0.1)
        server = transport.getHost().server_public_key
        second = next(relay for relay in net.relays if relay.key.public_key == server)
        assert second is not first and net.held and not net.ends
        for frame in of_first:
            first.send(frame)
        net.reactor.advance(0.01)
        assert len(net.ends) == 1
        of_second = list(net.held)
        third = next(relay for relay in net.relays if relay not in (first, second))
        third.be_honest()  # type: ignore[attr-defined]
        second.cut(net.alice.public_key)  # type: ignore[attr-defined]
        net.reactor.advance(0.1)
        assert transport.getHost().server_public_key == third.key.public_key and not transport.detached
        for frame in of_second:
            second.send(frame)  # type: ignore[attr-defined]
        net.reactor.advance(0.1)
        assert {str(one.getHost().server_public_key) for one in net.bob.transports} == {str(third.key.public_key)}
        await net.talk(end)
        net.assert_nothing_left()


@sync
async def test_what_is_lost_is_waited_for_no_longer_than_for_an_open_transport() -> None:
    grace_s = 5.0
    async with Net(ClientConfig(resume_grace_s=grace_s)) as net:
        _, end, first, other = await net.dial()
        other.rule(drop, kind=ACCEPT, to=net.alice.public_key, times=None)
        net.kill(first)
        net.reactor.advance(grace_s - 1)
        assert net.bob.unproved._by_name and not end.lost
        net.reactor.advance(1.5)
        assert end.lost
        net.assert_nothing_left()


@sync
async def test_so_many_are_waited_for_and_no_more() -> None:
    limits = ListenerLimits(offers=2, offers_per_key=2)
    async with Net(replace(ClientConfig(), listener=limits)) as net:
        ends = []
        for _ in range(3):
            _, end, first, _ = await net.dial()
            ends.append(end)
            # the path is gone, and Alice is not told
            first.rule(drop, kind=CLOSE, to=net.alice.public_key, times=None)
            frame = net.held[-1]
            first.send(RelayFrame(frame.to, CLOSE, frame.transport_id, bytes((CloseReason.PEER_GONE,))))
            net.reactor.advance(0.1)
        assert len(net.bob.unproved._by_name) == len(net.bob.unproved._lost) == 2
        for one in net.relays:
            one.be_honest()  # type: ignore[attr-defined]
        for one in net.relays:
            one.cut(net.alice.public_key)  # type: ignore[attr-defined]
        net.reactor.advance(5.0)
        causes = [type(one.value.cause) for end in ends for one in end.lost]  # type: ignore[attr-defined]
        assert causes == [Refused]
        assert [bytes(one.received) for one in net.ends] == 2 * [pattern(SIZE)]


@sync
async def test_a_dial_that_is_given_up_is_not_waited_for() -> None:
    async with Net() as net:
        for relay in net.relays:
            relay.rule(drop, kind=ACCEPT, to=net.alice.public_key, times=None)  # type: ignore[attr-defined]
        await net.wait(_failing(net.alice.dial(net.bob.public_key, timeout_s=0.2)))
        net.reactor.advance(0.1)
        net.assert_nothing_left()


@sync
async def test_a_transport_that_its_initiator_ends_at_once_is_not_waited_for() -> None:
    async with Net() as net:
        await net.wait(_aborted(net.alice.dial(net.bob.public_key)))
        net.reactor.advance(0.1)
        assert not net.ends and not net.bob.unproved._by_name
        net.assert_nothing_left()


async def _aborted(dial: Any) -> None:
    transport = await dial
    transport.abortConnection()


@sync
async def test_a_transport_that_was_refused_for_what_came_first_is_not_waited_for() -> None:
    async with Net() as net:
        _, _, first, _ = await net.dial()
        first.rule(drop, kind=CLOSE, to=net.alice.public_key)  # so that she looks for no other path
        frame = net.held[-1]
        first.send(replace(frame, payload=frame.payload[:-1] + bytes((frame.payload[-1] ^ 1,))))
        net.reactor.advance(0.1)
        assert not net.bob.unproved._by_name
        net.assert_nothing_left()


async def _failing(dial: Any) -> None:
    with pytest.raises(Exception, match="timeout"):
        await dial


@sync
async def test_without_resumption_nothing_is_waited_for() -> None:
    async with Net(ClientConfig(resume_grace_s=0.0)) as net:
        _, end, first, _ = await net.dial()
        net.kill(first)
        net.reactor.advance(0.1)
        assert isinstance(end.lost[0].value, TransportLost)
        net.assert_nothing_left()


@sync
async def test_for_a_listener_that_has_stopped_nothing_is_waited_for() -> None:
    async with Net() as net:
        _, _, first, _ = await net.dial()
        await net.wait(net.bob.services.ports()[0].stopListening())
        first.rule(drop, kind=CLOSE, to=net.alice.public_key)  # so that she looks for no other path
        first.cut(net.bob.public_key)
        net.reactor.advance(0.1)
        assert not net.bob.unproved._by_name
        net.assert_nothing_left()


@sync
async def test_a_client_that_stops_waits_for_none() -> None:
    async with Net() as net:
        _, _, first, _ = await net.dial()
        first.rule(drop, kind=CLOSE, to=net.alice.public_key)  # so that she looks for no other path
        first.cut(net.bob.public_key)
        net.reactor.advance(0.0)
        assert net.bob.unproved._by_name
        await net.stop_client(net.bob)
        net.assert_nothing_left()


@sync
async def test_a_peer_that_claims_to_have_what_was_never_sent_is_given_up() -> None:
    async with Net() as net:
        transport, end, first, _ = await net.dial()
        transport.stream.received_bytes = 7
        net.kill(first)
        net.reactor.advance(2.0)
        assert end.lost and not net.ends
        net.assert_nothing_left()


# --- the table alone ------------------------------------------------------------------------------------------------


def _table(clock: Clock, limit: int, limit_per_share: int) -> tuple[UnprovedTransports, list[UnprovedTransport]]:
    """A table, and transports in it of which nothing is asked but their names."""
    port: Any = SimpleNamespace(service="")
    port.client = SimpleNamespace(services=SimpleNamespace(port=lambda service: port))
    table = UnprovedTransports(clock, ResumableTransports(), 30.0, limit=limit, limit_per_share=limit_per_share)
    streams: Any = [SimpleNamespace(remote=SecretKey.generate().public_key, token=bytes((n,))) for n in range(3)]
    first: Any = object()
    return table, [table.add(first, stream, port) for stream in streams]


def test_when_all_places_are_taken_the_one_that_has_waited_longest_is_forgotten() -> None:
    clock = Clock()
    table, ones = _table(clock, 2, 1)
    for share, one in enumerate(ones):
        table.lost(one, share)
    assert [one.is_over for one in ones] == [True, False, False] == [not table._by_name.get(_name(one)) for one in ones]
    assert len(clock.getDelayedCalls()) == 2
    clock.advance(30.0)
    assert not table._by_name and not table._lost


def test_one_key_has_its_share_over_each_relay() -> None:
    clock = Clock()
    table, ones = _table(clock, 3, 1)
    for one, share in zip(ones, "aab", strict=True):
        table.lost(one, share)
    assert [one.is_over for one in ones] == [False, True, False]
    table.clear()
    assert not table._by_name and not table._lost and not clock.getDelayedCalls()


def test_what_is_lost_when_none_is_waited_for_any_more_sets_no_timer() -> None:
    clock = Clock()
    table, ones = _table(clock, 3, 3)
    table.clear()
    for one in ones:
        table.lost(one, "")
    assert not table._lost and not clock.getDelayedCalls()


def _name(one: UnprovedTransport) -> tuple[PublicKey, bytes]:
    return one.stream.remote, one.stream.token
