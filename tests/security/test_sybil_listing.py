"""Sybil relays do not take the list: over real sockets, with 10,000 of them in 50 networks beside 10 honest relays."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.task import deferLater

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.mux.client.service import DmsgClient

from .sybils import SYBIL_NETWORKS, SybilWorld

pytestmark = pytest.mark.system
CLIENTS, LIMIT_S, INTERVAL_S = 20, 10.0, 2.0


@pytest.mark.time_limit(60)
@pytest_twisted.ensureDeferred
async def test_each_of_twenty_clients_is_told_of_all_honest_relays(reactor: Any) -> None:
    """Within 10 seconds of the honest relays' registration; and a third party's service sees a handful of connections.

    An honest relay that dies without a word leaves the list at its next proof.
    """
    async with SybilWorld(reactor, limits=ProofLimits(interval_s=INTERVAL_S)) as world:
        honest = {server.key.public_key for server in world.honest}
        began = reactor.seconds()
        while not all(map(world.proofs.is_proved, honest)):
            assert reactor.seconds() - began < LIMIT_S
            await deferLater(reactor, 0.01)
        for _ in range(CLIENTS):
            listed = await world.discovery.available_servers()
            assert honest <= {entry.static for entry in listed}
            assert len(listed) == len(honest) + SYBIL_NETWORKS, "and of one proved sybil in each network"
        assert world.third_party.connections <= 4
        dead = world.honest[0]
        await dead.port.stopListening()
        began = reactor.seconds()
        while world.proofs.is_proved(dead.key.public_key):
            assert reactor.seconds() - began < 1.2 * INTERVAL_S + 1.0
            await deferLater(reactor, 0.05)
        listed = await world.discovery.available_servers()
        assert {entry.static for entry in listed} & honest == honest - {dead.key.public_key}


@pytest.mark.time_limit(90)
@pytest_twisted.ensureDeferred
async def test_twenty_of_twenty_clients_connect_within_ten_seconds(reactor: Any) -> None:
    """New clients with nothing but the discovery's URL; the sybils on their lists shake hands and then say nothing."""
    async with SybilWorld(reactor) as world:
        books = [HttpDiscovery.connect(world.url, reactor) for _ in range(CLIENTS)]
        clients = [DmsgClient(reactor, SecretKey.generate(), discovery=book) for book in books]
        honest = {server.key.public_key for server in world.honest}
        try:
            for client in clients:
                client.startService()
            ready = [Deferred.fromCoroutine(_ready(client)).addTimeout(LIMIT_S, reactor) for client in clients]
            outcomes = await DeferredList(ready, consumeErrors=True)
            assert all(ok for ok, _ in outcomes), outcomes[0]
            for client in clients:
                assert honest & set(client.pool.sessions)
        finally:
            await DeferredList([maybeDeferred(client.stopService) for client in clients], consumeErrors=True)
            for book in books:
                await book.close()
        assert world.third_party.connections <= 4


async def _ready(client: DmsgClient) -> None:
    await client.when_ready()
