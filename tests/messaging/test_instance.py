"""Instances made from a Config: advertised or not, over several discoveries in order of preference."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory
from twisted.protocols.wire import Echo

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import EntryNotFound
from dmsg.errors import ConfigError
from dmsg.messaging.instance import ClientInstance, Config, ServerInstance
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol
from dmsg.testing.process import free_port


async def started(reactor: Any, config: Config, **options: Any) -> ClientInstance:
    client = ClientInstance(reactor, SecretKey.generate(), config, **options)
    client.startService()
    await client.when_ready()
    return client


async def talk(here: ClientInstance, there: ClientInstance) -> None:
    factory = Factory.forProtocol(Echo)
    factory.noisy = False
    port, end = there.listen(factory), ConformanceProtocol()
    (await here.dial(there.public_key)).attach(end)
    end.transport.write(b"hello")
    await end.when_received(5)
    end.transport.loseConnection()
    await end.when_lost()
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_clients_find_each_other_when_the_preferred_discovery_is_away(reactor):
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery="http") as network:
        config = Config(discovery_addresses=(f"http://127.0.0.1:{free_port()}", network.discovery_url))
        alice, bob = await started(reactor, config), await started(reactor, config)
        await talk(alice, bob)
        for client in (alice, bob):
            await client.stopService()


@pytest_twisted.ensureDeferred
async def test_an_instance_is_advertised_in_each_discovery(reactor):
    async with (
        LocalNetwork(reactor, relays=0, messaging_relays=1, discovery="http") as one,
        LocalNetwork(reactor, relays=0, messaging_relays=0, discovery="http") as other,
    ):
        config = Config(discovery_addresses=(other.discovery_url, one.discovery_url))
        client = await started(reactor, config)
        for keeper in client.registrar.keepers:
            await keeper.published()
        for network in (one, other):
            entry = await network.discovery.get_entry(client.public_key)
            assert entry.delegated_servers == (one.messaging_relays[0].key.public_key,)
        await client.stopService()


@pytest_twisted.ensureDeferred
async def test_an_instance_that_is_not_public_is_not_advertised_and_dials_all_the_same(reactor):
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery="http") as network:
        public = Config(discovery_addresses=(network.discovery_url,))
        bob = await started(reactor, public)
        alice = await started(reactor, Config(public=False, discovery_addresses=public.discovery_addresses))
        await talk(alice, bob)
        with pytest.raises(EntryNotFound):
            await network.discovery.get_entry(alice.public_key)
        for client in (alice, bob):
            await client.stopService()


@pytest.mark.parametrize("public", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_server_is_listed_if_it_is_public(reactor, public):
    async with LocalNetwork(reactor, relays=0, discovery="http") as network:
        port = free_port()
        server = ServerInstance(
            reactor,
            SecretKey.generate(),
            TCP4ServerEndpoint(reactor, port, interface="127.0.0.1"),
            Config(public, (network.discovery_url,)),
            public_address=HostPort("127.0.0.1", port),
        )
        server.startService()
        await server.listening()
        if public:
            await server.registrar.published()
            entry = await network.discovery.get_entry(server.key.public_key)
            assert (entry.protocol, entry.server.address) == ("messaging", f"127.0.0.1:{port}")
        else:
            with pytest.raises(EntryNotFound):
                await network.discovery.get_entry(server.key.public_key)
        await server.stopService()


@pytest_twisted.ensureDeferred
async def test_without_discoveries_servers_are_named(reactor):
    async with LocalNetwork(reactor, relays=0, messaging_relays=1, discovery=None) as network:
        alice, bob = [await started(reactor, Config(), servers=network.messaging_pinned) for _ in range(2)]
        assert alice.registrar is None
        await talk(alice, bob)
        for client in (alice, bob):
            await client.stopService()


def test_an_address_that_is_no_url_is_named(reactor):
    with pytest.raises(ConfigError, match="discovery"):
        ClientInstance(reactor, SecretKey.generate(), Config(discovery_addresses=("nonsense",)))
