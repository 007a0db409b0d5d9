"""Channels pass the kit that TCP passes, in each family of dialects: over loopback sockets, and in memory on a fake clock."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.protocol import Factory

from dmsg.address import DmsgAddress
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import CIPHERTEXT_LIMIT_BYTES
from dmsg.testing.conformance import TransportConformance
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

CONFIG = ConnectionConfig()


class ChannelConformance(TransportConformance):
    """Two clients, one relay between them."""

    dialect = "v0"
    #: One payload that the reader has not acknowledged, what a writer may have waiting, and its last piece.
    in_flight_limit_bytes = CIPHERTEXT_LIMIT_BYTES + CONFIG.pause_bytes + 16_384
    big_bytes = 4 * 1024 * 1024
    network: LocalNetwork

    @pytest.fixture(autouse=True)
    def _network(self, logged_errors: Any, reactor: Any) -> Any:
        self.flush_logged_errors = logged_errors.flush
        self.network = self.make_network(reactor)
        pytest_twisted.blockon(ensureDeferred(self._start()))
        yield
        pytest_twisted.blockon(ensureDeferred(self.network.stop()))

    async def _start(self) -> None:
        await self.network.start()
        config = MessagingConfig(dialect_name=self.dialect)
        self.client = await self.network.messaging_client(config=config)
        self.server = await self.network.messaging_client(config=config)

    def make_network(self, reactor: Any) -> LocalNetwork:
        """Over loopback, if nothing else is said."""
        return LocalNetwork(reactor, relays=0, messaging_relays=1, discovery=None)

    def make_endpoints(self):
        public_key = self.server.public_key
        return ServerEndpoint(self.server), lambda port: ClientEndpoint(
            self.client, DmsgAddress(public_key, scheme="messaging")
        )

    async def make_pair(self, client, server):
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(Factory.forProtocol(lambda: server)))
        await self.wait(client_endpoint_for(port).connect(Factory.forProtocol(lambda: client)))
        await self.wait(server.when(lambda: server.made > 0))
        await self.wait(port.stopListening())  # one port at a time; some cases want several pairs
        return client, server


@pytest.mark.system
class TestOverLoopback(ChannelConformance):
    """Real sockets."""


class TestInMemory(ChannelConformance):
    def make_network(self, reactor: Any) -> LocalNetwork:
        return LocalNetwork(MemoryNetwork(), relays=0, messaging_relays=1, discovery=None)

    @property
    def reactor(self) -> Any:
        return self.network.reactor

    async def wait(self, deferred: Deferred[Any]) -> Any:
        return await self.network.wait(deferred.addTimeout(self.limit_s, self.reactor))

    async def settle(self) -> None:
        await self.network.settle()


class WithoutAcks:
    """Nothing tells the writer what the reader has taken, so nothing but the network slows it down.

    A session that stopped to read its link would slow all channels of the link, and the end of them could not be read
    either. So a reader that does not read ends its channel instead, above ``receive_limit_bytes``; ``test_service`` tests
    that.
    """

    test_backpressure = None
    test_lose_connection_waits_for_a_paused_producer = None


@pytest.mark.system
class TestSeedOverLoopback(WithoutAcks, TestOverLoopback):
    dialect = "seed"


class TestSeedInMemory(WithoutAcks, TestInMemory):
    dialect = "seed"


@pytest.mark.system
class TestV5OverLoopback(WithoutAcks, TestOverLoopback):
    dialect = "v5"


class TestV5InMemory(WithoutAcks, TestInMemory):
    dialect = "v5"
