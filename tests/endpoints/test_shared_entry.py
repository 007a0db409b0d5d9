"""Clients of two protocols with one key in one process: one entry names the relays of both, whichever comes and goes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import DeferredList, ensureDeferred
from twisted.internet.endpoints import clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.protocols.wire import Echo

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.sansio.jitter import Jitter
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol

SCHEMES = ("dmsg", "messaging")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DMSG_")]:
        monkeypatch.delenv(name)


def echo_factory() -> Factory:
    factory = Factory.forProtocol(Echo)
    factory.noisy = False
    return factory


async def echoed(reactor: Any, scheme: str, key: SecretKey, network: LocalNetwork) -> bool:
    """Whether the peer answers over ``scheme``."""
    string = f"{scheme}:{key.public_key}:{network.endpoint_arguments}"
    end = await connectProtocol(clientFromString(reactor, string), ConformanceProtocol())
    end.transport.write(scheme.encode())
    await end.when_received(len(scheme))
    end.transport.loseConnection()
    await end.when_lost()
    return bytes(end.received) == scheme.encode()


async def entry_names(reactor: Any, network: LocalNetwork, key: SecretKey, relays: set[Any]) -> None:
    """Wait until the entry of ``key`` names exactly ``relays``."""
    while set((await network.discovery.get_entry(key.public_key)).delegated_servers) != relays:
        await deferLater(reactor, 0.02)


@pytest_twisted.ensureDeferred
async def test_two_strings_with_one_key_publish_one_entry(reactor, key_file):
    key = SecretKey.generate()
    path = key_file(key, "key")
    async with LocalNetwork(reactor, relays=1, messaging_relays=1, discovery="http") as network:
        [mux], [messaging] = network.relays, network.messaging_relays
        both = {mux.key.public_key, messaging.key.public_key}
        strings = {scheme: f"{scheme}:key={path}:{network.endpoint_arguments}" for scheme in SCHEMES}
        listening = [ensureDeferred(_listen(reactor, strings[scheme])) for scheme in SCHEMES]
        first, second = [port for _, port in await DeferredList(listening, fireOnOneErrback=True)]
        await entry_names(reactor, network, key, both)
        entry = await network.discovery.get_entry(key.public_key)
        for scheme in SCHEMES:
            assert await echoed(reactor, scheme, key, network)
        again = await network.discovery.get_entry(key.public_key)
        assert again.sequence == entry.sequence, "nothing takes turns"
        # One stops, and the other one stays reachable; then the first comes back.
        await first.stopListening()
        await entry_names(reactor, network, key, {messaging.key.public_key})
        assert await echoed(reactor, "messaging", key, network)
        first = await _listen(reactor, strings["dmsg"])
        await entry_names(reactor, network, key, both)
        # The last one that stops takes the entry back, and one that starts meanwhile is not taken back with it.
        await first.stopListening()
        stopping = second.stopListening()
        for _ in range(3):
            await deferLater(reactor, 0)  # it has begun
        first = await _listen(reactor, strings["dmsg"])
        await stopping
        await entry_names(reactor, network, key, {mux.key.public_key})
        assert await echoed(reactor, "dmsg", key, network)
        await first.stopListening()
        await entry_names(reactor, network, key, set())


async def _listen(reactor: Any, string: str) -> Any:
    return await serverFromString(reactor, string).listen(echo_factory())


@pytest_twisted.ensureDeferred
async def test_two_clients_of_a_program_are_given_one_registrar():
    memory = MemoryNetwork()
    async with LocalNetwork(memory, relays=1, messaging_relays=1) as network:
        key = SecretKey.generate()
        registrar = EntryRegistrar(
            network.discovery, key, clock=memory, now_ns=network.now_ns, random=Jitter(os.urandom)
        )
        mux = await network.client(key=key, publish=registrar)
        messaging = await network.messaging_client(key=key, publish=registrar)
        relays = {network.relays[0].key.public_key, network.messaging_relays[0].key.public_key}
        entry = await network.wait(network.discovery.get_entry(key.public_key))
        assert set(entry.delegated_servers) == relays
        for client, dialler in ((mux, await network.client()), (messaging, await network.messaging_client())):
            end = ConformanceProtocol()
            client.listen(echo_factory())
            (await network.wait(dialler.dial(key.public_key))).attach(end)
            end.transport.write(b"hello")
            await network.wait(end.when_received(5))
        await network.stop_client(mux)
        memory.advance(1.0)
        entry = await network.wait(network.discovery.get_entry(key.public_key))
        assert set(entry.delegated_servers) == {network.messaging_relays[0].key.public_key}
