"""A network on loopback in which sybil relays are many and honest ones few; each network (/24) is one of 127.0.0.0/8."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import AdoptedStreamServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.api import DiscoveryApi, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.entry import DMSG, Entry, ServerPart
from dmsg.discovery.limits import DiscoveryLimits
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.errors import DmsgError
from dmsg.glue.shell import Shell
from dmsg.mux.client.prover import XkProver
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay

HONEST, SYBILS, SYBIL_NETWORKS, NAMING_THE_THIRD = 10, 10_000, 50, 180


class ThirdParty(Protocol):
    """A service outside the network, which counts connections."""

    def connectionMade(self) -> None:
        self.factory.connections += 1


class SybilRelay:
    """Shakes hands with its key, and then says nothing: it is proved, and no use."""

    def __init__(self, reactor: Any, key: SecretKey) -> None:
        self.reactor, self.key = reactor, key
        self.shells: set[Shell] = set()

    def buildProtocol(self, address: Any) -> Shell:
        core = Handshake(Role.SERVER, self.key, now=self.reactor.seconds(), timeout_s=60.0)
        shell = Shell(core, self, self.reactor)
        self.shells.add(shell)
        return shell

    def doStart(self) -> None:
        """Nothing to prepare."""

    def doStop(self) -> None:
        """Let go of all that are connected."""
        for shell in list(self.shells):
            shell.fail(DmsgError("over"))

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Nothing comes of a handshake."""

    def after_read(self, shell: Shell) -> None:
        """Answer the first message."""
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Nothing waits for it."""

    def connection_lost(self, shell: Shell, error: Any, reason: Any) -> None:
        """One fewer."""
        self.shells.discard(shell)


class SybilWorld:
    """10,000 sybils in 50 networks, a third party whose address 180 of them name, and 10 honest relays that come last.

    One sybil in each network answers handshakes with its key and then admits no client: it is proved and listed. The others
    have keys only, and the same addresses. ``discovery`` asks over HTTP; ``honest`` are the honest relays.
    """

    def __init__(self, reactor: Any, *, limits: ProofLimits | None = None) -> None:
        self.reactor = reactor
        self.store = MemoryStore(random=Random(1))
        self.addresses = RelayAddresses(private=True)
        self.proofs = RelayProofs(
            self.store,
            {DMSG: XkProver(reactor)},
            reactor,
            now_ns=time.time_ns,
            random=Random(2),
            addresses=self.addresses,
            limits=limits,
        )
        self.honest: list[DmsgRelay] = []
        self.third_party = Factory.forProtocol(ThirdParty)
        self.third_party.connections = 0
        self.third_party.noisy = False
        self._closing: list[Callable[[], Any]] = []
        self._numbers = Random(3)

    async def __aenter__(self) -> SybilWorld:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """The sybils first; then the honest relays register. Returns when these are registered, not when listed."""
        limits = DiscoveryLimits(get_rate_per_s=None, post_rate_per_s=None)
        api = DiscoveryApi(
            self.store,
            clock_ns=time.time_ns,
            random=Random(4),
            limits=limits,
            addresses=self.addresses,
            proofs=self.proofs,
        )
        site = make_site(api.resource(), reactor=self.reactor, limits=limits)
        port = self.reactor.listenTCP(0, site, interface="127.0.0.1")
        self._closing.append(port.stopListening)
        self.url = f"http://127.0.0.1:{port.getHost().port}"
        self.discovery = HttpDiscovery.connect(self.url, self.reactor)
        self._closing.append(self.discovery.close)
        self.proofs.start()
        self._closing.append(self.proofs.stop)
        await self._add_sybils()
        for number in range(HONEST):
            await self._add_honest(f"127.2.{number}.1")

    async def stop(self) -> None:
        """Close everything, the last that was opened first."""
        for close in reversed(self._closing):
            await maybeDeferred(close)
        await deferLater(self.reactor, 0)

    def endpoint(self, host: str) -> tuple[AdoptedStreamServerEndpoint, HostPort]:
        """A listening endpoint in a network of its own, and where it is."""
        with socket.socket() as chosen:
            chosen.bind((host, 0))
            chosen.listen(128)
            chosen.setblocking(False)
            endpoint = AdoptedStreamServerEndpoint(self.reactor, os.dup(chosen.fileno()), socket.AF_INET)
            return endpoint, HostPort(host, chosen.getsockname()[1])

    async def _add_sybils(self) -> None:
        places = []
        for number in range(SYBIL_NETWORKS):
            endpoint, address = self.endpoint(f"127.1.{number}.1")
            key = SecretKey.generate()
            port = await endpoint.listen(SybilRelay(self.reactor, key))
            self._closing.append(port.stopListening)
            places.append(address)
            self._register(Entry("0.0.1", 0, 1, key.public_key, None, ServerPart(str(address), 10)).sign(key))
        await self.proofs.quiet()
        third, where = self.endpoint("127.66.6.6")
        port = await third.listen(self.third_party)
        self._closing.append(port.stopListening)
        for number in range(SYBILS - SYBIL_NETWORKS):
            address = where if number < NAMING_THE_THIRD else places[number % SYBIL_NETWORKS]
            public_key = SecretKey(self._numbers.randbytes(32)).public_key
            # No look at the signature: that these entries were taken is where the test begins.
            self._register(Entry("0.0.1", 0, 1, public_key, None, ServerPart(str(address), 10), "00" * 65))

    def _register(self, entry: Entry) -> Deferred[bool]:
        self.proofs.offer(entry, "9.9.9.9")
        return self.store.put(entry, time.time_ns())

    async def _add_honest(self, host: str) -> None:
        endpoint, address = self.endpoint(host)
        server = DmsgRelay(
            self.reactor,
            SecretKey.generate(),
            endpoint,
            public_address=address,
            discovery=self.discovery,
            limits=RelayLimits(drain_timeout_s=0.2),
            now_ns=time.time_ns,
        )
        server.startService()
        self._closing.append(server.stopService)
        self.honest.append(server)
        assert server.registrar is not None
        await server.registrar.published()
