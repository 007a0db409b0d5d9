"""Strangers with many connections and addresses against a server's places and its time, on a clock that is turned.

Each test is an attack at the server's defaults unless it says otherwise, with honest clients beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import ClientFactory, Protocol

from benchmarks.heapclock import HeapClock
from dmsg.crypto.keys import SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import StageError
from dmsg.eventlog import schema as ev
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.handshake import COOKIE_BYTES
from dmsg.mux.core.wire import ACCEPT, REQUEST
from dmsg.mux.relay.limits import RelayLimits
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.raw import RawConnection, connect_raw, packet
from tests.memory_log import MemoryEventLog

sync = pytest_twisted.ensureDeferred


class Silent(Protocol):
    """A connection that sends ``first`` and no more; counts what is answered."""

    def __init__(self, first: bytes) -> None:
        self.first = first
        self.received = b""
        self.is_lost = False

    def connectionMade(self) -> None:
        if self.first:
            self.transport.write(self.first)

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any) -> None:
        self.is_lost = True

    @property
    def cost_a_handshake(self) -> bool:
        """Whether the server answered with message 2."""
        return len(self.received) > 2 + COOKIE_BYTES


class Attacked(LocalNetwork):
    """One server in memory, and strangers from any address."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.memory = MemoryNetwork(HeapClock(1_000.0), delay_s=0.05)
        self.log = MemoryEventLog()
        super().__init__(self.memory, relays=1, discovery=None, limits=limits, events=self.log)

    @property
    def server(self) -> Any:
        return self.relays[0]

    def recorded(self) -> bytes:
        """A valid first message of another key, as a recorder on the path has it."""
        return packet(self.noise(SecretKey.generate()).write_message())

    def noise(self, key: SecretKey) -> NoiseHandshake:
        remote = self.pinned[0].public_key.raw
        return NoiseHandshake("XK", initiator=True, static=key, remote_static=remote)

    def stranger(self, source: str, first: bytes = b"") -> Silent:
        """One connection more."""
        protocol = Silent(first)
        address = self.pinned[0].address
        self.memory.connectTCP(
            address.host, address.port, ClientFactory.forProtocol(lambda: protocol), bindAddress=(source, 0)
        )
        return protocol

    async def honest(self, source: str) -> RawConnection:
        """A base client that is admitted, or the loss it met."""
        address = self.pinned[0].address
        endpoint = TCP4ClientEndpoint(self.memory, address.host, address.port, bindAddress=(source, 0))
        raw: RawConnection = await self.wait(connect_raw(endpoint, self.pinned[0].public_key))
        await self.wait(raw.next_frame())
        return raw

    async def stop(self) -> None:
        for one in list(self.memory.pipes):
            if one.a.protocol.__class__ in (Silent, RawConnection):
                one.a.abortConnection()
        await super().stop()


def networks(prefix: int) -> Iterator[str]:
    """Addresses, each in a /24 of its own."""
    return (f"{prefix}.{number >> 8 & 255}.{number & 255}.7" for number in count(1))


@pytest.mark.parametrize("first", [b"", b"\0"], ids=["silent", "one byte"])
@sync
async def test_one_ipv6_host_with_all_its_addresses(first):
    """A /64 is what one host has. 512 half-open connections of one, each from its own address, took every place."""
    async with Attacked() as net:
        crowd = [net.stranger(f"2001:db8:0:1::{number:x}", first) for number in range(1, 513)]
        net.memory.advance(0.1)
        assert net.server.stats()["half_open"] == RelayLimits().half_open_per_address
        await net.honest("2001:db8:0:2::1")
        assert sum(not one.is_lost for one in crowd) == RelayLimits().half_open_per_address


@pytest.mark.system
@pytest.mark.parametrize("first", [b"", b"\0"], ids=["silent", "one byte"])
@sync
async def test_160_connections_a_second_that_do_not_go_on(first):
    """They filled the table of 512 with what 5 seconds bring. 20 seconds of them, from 40 networks; each honest client,
    one a second from 10 other networks, gets in at its first try."""
    async with Attacked() as net:
        sources, friends = networks(10), networks(20)
        crowd = [next(sources) for _ in range(40)]
        homes = [next(friends) for _ in range(10)]
        for second in range(20):
            for step in range(160):
                net.stranger(crowd[step % 40], first)
                net.memory.advance(1 / 160)
            began = net.memory.seconds()
            net.memory.advance(0.003)
            await net.honest(homes[second % 10])
            assert net.memory.seconds() - began < 1.0
        assert net.server.stats()["connections"] == 20


@sync
async def test_a_connection_that_sends_nothing_is_over_after_a_second():
    """One that began has the time of a whole handshake."""
    async with Attacked() as net:
        silent, begun = net.stranger("10.0.0.1"), net.stranger("10.0.0.2", b"\0")
        net.memory.advance(1.2)
        assert silent.is_lost
        assert not begun.is_lost
        net.memory.advance(4.0)
        assert begun.is_lost
        assert [event.reason for event in net.log.of(ev.HandshakeFailed)] == ["silent", "timeout"]


@sync
async def test_strangers_of_one_address_drive_out_each_other_and_not_a_handshake_behind_the_same_router():
    """64 places of an address, all taken: the next ones go on, and the oldest of that address goes."""
    async with Attacked() as net:
        crowd = [net.stranger("10.0.0.1", b"\0") for _ in range(64)]
        net.memory.advance(0.1)
        await net.honest("10.0.0.1")
        assert [one.is_lost for one in crowd] == [True] + [False] * 63
        [event] = net.log.of(ev.HandshakeFailed)
        assert (event.stage, event.reason) == ("accept", "half_open_per_address")


@sync
async def test_idle_connections_of_few_networks_fill_the_table():
    """Each newcomer takes the place of one of them; a listener that is as idle, but not one of many, stays."""
    async with Attacked(RelayLimits(connections=40, drain_timeout_s=0.0)) as net:
        listener = await net.honest("20.0.0.1")
        crowd = [await net.honest(f"10.0.{number % 3}.{number}") for number in range(39)]
        assert net.server.available_connections > 0, "discovery would not list it any more"
        newcomers = [await net.honest(source) for source, _ in zip(networks(30), range(12), strict=False)]
        net.memory.advance(0.2)
        assert all(one.lost_reason is None for one in [listener, *newcomers])
        assert sum(one.lost_reason is not None for one in crowd) == 12
        assert net.server.stats()["connections"] == 40
        net.memory.advance(1.0)
        assert {(event.what, event.reason) for event in net.log.of(ev.Refused)} == {("connection", "evicted")}


@sync
async def test_idle_connections_that_had_a_transport_once_fill_the_table():
    """A transport to oneself costs a REQUEST. Such connections make room, too, if their network has more than others."""
    async with Attacked(RelayLimits(connections=20, drain_timeout_s=0.0)) as net:
        used = await net.honest("20.0.0.1")
        await with_itself(net, used)
        crowd = [await net.honest("10.0.0.1") for _ in range(19)]
        for one in crowd:
            await with_itself(net, one)
        newcomers = []
        for source, _ in zip(networks(30), range(8), strict=False):
            newcomers.append(await net.honest(source))
            await with_itself(net, newcomers[-1])
        net.memory.advance(0.2)
        assert all(one.lost_reason is None for one in [used, *newcomers])
        assert sum(one.lost_reason is not None for one in crowd) == 8


async def with_itself(net: Attacked, raw: RawConnection) -> None:
    """A transport of ``raw`` to its own key, opened and closed."""
    raw.send_request(raw.key.public_key, 2)
    request = await net.wait(raw.next_frame(REQUEST))
    raw.send_frame(ACCEPT, request.transport_id, request.payload)
    await net.wait(raw.next_frame(ACCEPT))
    raw.send_frame(0x3, 2)
    await net.settle()


@sync
async def test_a_connection_with_a_transport_is_never_ended_for_a_newcomer():
    async with Attacked(RelayLimits(connections=4, drain_timeout_s=0.0)) as net:
        crowd = [await net.honest("10.0.0.1") for _ in range(4)]
        for one in crowd:
            one.send_request(one.key.public_key, 2)
            request = await net.wait(one.next_frame(REQUEST))
            one.send_frame(ACCEPT, request.transport_id, request.payload)
            await net.wait(one.next_frame(ACCEPT))
        turned_away = await net.honest("20.0.0.1")
        net.memory.advance(0.2)
        assert turned_away.lost_reason is not None
        assert all(one.lost_reason is None for one in crowd)


@pytest.mark.system
@sync
async def test_replayed_first_messages_of_one_network():
    """A recorded first message cost two Diffie-Hellmans each time. 300 a second of it for 6 seconds, from 4 addresses of
    one network: what is answered is bounded by the budget of that network, and others notice nothing."""
    limits = RelayLimits()
    async with Attacked() as net:
        first = net.recorded()
        crowd = []
        friends = networks(20)
        start = net.memory.seconds()
        for _ in range(6):
            for step in range(300):
                crowd.append(net.stranger(f"10.0.0.{1 + step % 4}", first))
                net.memory.advance(1 / 300)
            began = net.memory.seconds()
            await net.honest(next(friends))
            assert net.memory.seconds() - began < 1.0
        answered = sum(one.cost_a_handshake for one in crowd)
        elapsed_s = net.memory.seconds() - start
        bound = limits.handshake_burst_per_network / 2 + elapsed_s * limits.handshakes_per_s_per_network + 1
        assert 0 < answered <= bound < 0.7 * len(crowd)
        # the others got a cookie
        assert all(len(one.received) in (0, 2 + COOKIE_BYTES) for one in crowd if not one.cost_a_handshake)


@pytest.mark.system
@sync
async def test_a_flood_of_connections_of_one_network_is_not_even_accepted():
    """Beyond four connections for each handshake they may begin, those of a network are closed at once."""
    limits = RelayLimits(handshake_burst_per_network=200, handshake_burst_per_address=200, drain_timeout_s=0.0)
    async with Attacked(limits) as net:
        for step in range(1_000):
            net.stranger(f"10.0.0.{1 + step % 200}")
        net.memory.advance(0.2)
        assert net.server.stats()["half_open"] <= limits.half_open
        net.memory.advance(1.0)
        refused = sum(event.count for event in net.log.of(ev.Refused) if event.reason == "connects_per_network")
        assert refused == 1_000 - 4 * limits.handshake_burst_per_network
        await net.honest("20.0.0.1")


LOADED = RelayLimits(handshakes_per_s_per_address=0.01, handshake_burst_per_address=20, drain_timeout_s=0.0)


@sync
async def test_an_extended_client_behind_the_address_of_a_flood_brings_a_cookie():
    """The lower half of a bucket is for those who do, and who replay cannot; a base client is turned away as it was."""
    async with Attacked(LOADED) as net:
        first = net.recorded()
        base, client = net.new_client(config=ClientConfig(extended=False)), net.new_client()
        for _ in range(60):
            net.stranger("127.0.0.1", first)
        net.memory.advance(0.2)
        base.startService()
        with pytest.raises(StageError) as caught:
            await net.wait(base.pool.get(net.pinned[0].public_key))
        assert caught.value.stage == "handshake"
        client.startService()
        await net.wait(client.when_ready())
        assert net.server.stats()["connections"] == 1


@sync
async def test_a_client_learns_that_the_server_is_under_load():
    async with Attacked(LOADED) as net:
        clients = [net.new_client() for _ in range(21)]
        for client in clients:
            client.startService()
        waiting = [client.when_ready() for client in clients]
        net.memory.advance(1.0)
        assert net.server.stats()["connections"] == 20
        [late] = [client for client in clients if not client.pool.sessions]
        with pytest.raises(StageError) as caught:
            await net.wait(late.pool.get(net.pinned[0].public_key))
        assert (caught.value.stage, caught.value.reason) == ("handshake", "server under load")
        for one in waiting:
            one.addErrback(lambda failure: None)
            with suppress(Exception):
                one.cancel()


@sync
async def test_no_cookie_is_asked_for_without_load():
    """A base client sees nothing but a Noise handshake."""
    async with Attacked() as net:
        strangers = [net.stranger(source, net.recorded()) for source, _ in zip(networks(10), range(50), strict=False)]
        net.memory.advance(1.0)
        assert all(one.cost_a_handshake for one in strangers)
