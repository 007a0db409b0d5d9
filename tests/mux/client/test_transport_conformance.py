"""Transports of dmsg pass the kit that TCP passes: over loopback sockets, and in memory on a fake clock."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.protocol import Factory

from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.window import AckGate
from dmsg.testing.conformance import TransportConformance
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

CONFIG = ConnectionConfig()


class DmsgConformance(TransportConformance):
    """Two clients, one server between them."""

    security = Security.E2E

    @property
    def in_flight_limit_bytes(self) -> int:  # type: ignore[override]
        """What a receiver acknowledges unread, the send window, what a writer may have waiting, and its last piece.

        No socket's buffer comes into it: the sessions go on reading when an application does not.
        """
        if self.security is Security.HOP:
            return AckGate.THRESHOLD_BYTES + CONFIG.send_window_bytes + CONFIG.pause_bytes + 16_384
        return CONFIG.ack_limit_bytes + CONFIG.secure_window_bytes + CONFIG.pause_bytes + 16_384

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
        self.client = await self.network.client(security=self.security)
        self.server = await self.network.client(security=self.security)

    def make_network(self, reactor: Any) -> LocalNetwork:
        """Over loopback, if nothing else is said."""
        return LocalNetwork(reactor, relays=1, discovery=None)

    def make_endpoints(self):
        public_key = self.server.public_key
        return DmsgServerEndpoint(self.server), lambda port: DmsgClientEndpoint(self.client, public_key)

    async def make_pair(self, client, server):
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(Factory.forProtocol(lambda: server)))
        await self.wait(client_endpoint_for(port).connect(Factory.forProtocol(lambda: client)))
        await self.wait(server.when(lambda: server.made > 0))
        await self.wait(port.stopListening())  # one port at a time; some cases want several pairs
        return client, server


@pytest.mark.system
class TestOverLoopback(DmsgConformance):
    """Real sockets."""


class TestInMemory(DmsgConformance):
    def make_network(self, reactor: Any) -> LocalNetwork:
        return LocalNetwork(MemoryNetwork(), relays=1, discovery=None)

    @property
    def reactor(self) -> Any:
        return self.network.reactor

    async def wait(self, deferred: Deferred[Any]) -> Any:
        return await self.network.wait(deferred.addTimeout(self.limit_s, self.reactor))

    async def settle(self) -> None:
        await self.network.settle()


@pytest.mark.system
class TestBaseOverLoopback(TestOverLoopback):
    """Hop by hop only, as towards base peers."""

    security = Security.HOP


class TestBaseInMemory(TestInMemory):
    """Hop by hop only, as towards base peers."""

    security = Security.HOP
