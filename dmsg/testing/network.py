"""A whole dmsg network in one process: discovery, relays and clients, for tests of programs that use dmsg.

On the real reactor everything listens on free ports of the loopback interface::

    async with LocalNetwork(reactor) as network:
        alice = await network.client()
        bob = await network.client()
        bob.listen(factory)
        protocol = await alice.connect(Factory.forProtocol(Echo), bob.public_key)

``messaging_relays=1`` adds the messaging system: :meth:`LocalNetwork.messaging_client`.

With a :class:`~dmsg.testing.memory.MemoryNetwork` in place of the reactor there are no sockets and no real time: await
everything through :meth:`LocalNetwork.wait`, which moves the clock on from one due call to the next.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from random import Random as StdlibRandom
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, cast

from twisted.internet.defer import Deferred, DeferredList, ensureDeferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import DMSG, MESSAGING, Entry
from dmsg.discovery.errors import DiscoveryError
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.endpoints.sharing import stop_idle_clients
from dmsg.glue.listening import TakenPort
from dmsg.interfaces import IDiscovery, IEntryStore, IEventLog
from dmsg.messaging.client.prover import LinkProver
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.relay.limits import RelayLimits as MessagingRelayLimits
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.mux.client.prover import XkProver
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.serving.service import RelayService
from dmsg.testing.memory import MemoryNetwork

T = TypeVar("T")
R = TypeVar("R", bound=RelayService)
C = TypeVar("C", DmsgClient, MessagingClient)

LOOPBACK: Final = "127.0.0.1"
#: Seconds that a stopping network waits for transports that were left open.
DRAIN_TIMEOUT_S: Final = 0.2
#: Seconds by which :meth:`LocalNetwork.wait` moves a fake clock before it gives up.
WAIT_LIMIT_S: Final = 120.0
_SERVERS_LISTED: Final = 64


@implementer(IDiscovery)
class MemoryDiscovery:
    """A discovery in this process, as strict as a real one. ``now_ns()`` is Unix time in nanoseconds.

    Set ``failure`` to a :class:`~dmsg.discovery.errors.DiscoveryError` and every call raises it until it is ``None`` again.
    """

    def __init__(self, now_ns: Callable[[], int], store: IEntryStore | None = None) -> None:
        self.store: IEntryStore = store if store is not None else MemoryStore(random=StdlibRandom(0))
        self.failure: DiscoveryError | None = None
        self._now_ns = now_ns

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        self._check()
        return await self.store.get(public_key, self._now_ns())

    async def post_entry(self, entry: Entry) -> None:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        self._check()
        entry.validate()
        entry.verify()
        await self.store.put(entry, self._now_ns())

    async def available_servers(self, protocol: str = DMSG) -> list[Entry]:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        self._check()
        return await self.store.available_servers(_SERVERS_LISTED, self._now_ns(), protocol)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class LocalNetwork:
    """Discovery, relays and clients on ``reactor``, as an asynchronous context manager; each use makes new ones.

    ``discovery`` is ``"memory"`` (in process, no HTTP), ``"http"`` (the real HTTP API on loopback, on the real reactor
    only) or ``None`` (clients get the relays as pinned ones). ``limits`` holds for every relay of dmsg; by default, relays
    drain for at most :data:`DRAIN_TIMEOUT_S`. ``events`` gets the events of relays and clients. ``random`` gives random
    bytes.

    ``relays``, ``clients`` and ``pinned`` are the parts of dmsg, ``messaging_relays``, ``messaging_clients`` and
    ``messaging_pinned`` those of the messaging system, ``discovery`` is the ``IDiscovery`` (or ``None``) and
    ``discovery_url`` the URL of a real discovery, otherwise "".
    """

    def __init__(
        self,
        reactor: Any,
        *,
        relays: int = 2,
        messaging_relays: int = 0,
        discovery: Literal["memory", "http"] | None = "memory",
        limits: RelayLimits | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
    ) -> None:
        if discovery == "http" and isinstance(reactor, MemoryNetwork):
            raise ValueError("Twisted's HTTP client does not live on a fake clock alone: take the memory discovery")
        self.reactor = reactor
        self.relays: list[DmsgRelay] = []
        self.clients: list[DmsgClient] = []
        self.pinned: list[PinnedServer] = []
        self.messaging_relays: list[MessagingRelay] = []
        self.messaging_clients: list[MessagingClient] = []
        self.messaging_pinned: list[PinnedServer] = []
        self.discovery: IDiscovery | None = None
        self.discovery_url = ""
        self.limits = limits or replace(RelayLimits(), drain_timeout_s=DRAIN_TIMEOUT_S)
        self._kind = discovery
        self._relay_counts = relays, messaging_relays
        self._events = events
        self._random = random
        self._http_port: IListeningPort | None = None
        self._proofs: RelayProofs | None = None
        self._runs = False

    # --- from start to end -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> LocalNetwork:
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
        """Start discovery, then the relays; returns when clients can find them. Nothing happens if the network runs already."""
        if self._runs:
            return
        if self._kind == "memory":
            self.discovery = MemoryDiscovery(self.now_ns)
        elif self._kind == "http":
            self._start_http()
        relays, messaging_relays = self._relay_counts
        for _ in range(relays):
            await self.add_relay()
        for _ in range(messaging_relays):
            await self.add_messaging_relay()
        self._runs = True

    async def stop(self) -> None:
        """Stop the clients, then the relays, then discovery; returns when nothing is left on the reactor.

        Before, it waits for clients of endpoint strings (:func:`~dmsg.endpoints.sharing.stop_idle_clients`).
        """
        self._runs = False
        await self.wait(stop_idle_clients(self.reactor))
        await self._stop_all(self.clients, self.messaging_clients)
        await self._stop_all(self.relays, self.messaging_relays)
        self.pinned.clear()
        self.messaging_pinned.clear()
        if self._http_port is not None:
            await cast(Any, self.discovery).close()
            await maybeDeferred(self._http_port.stopListening)
        if self._proofs is not None:
            await self._proofs.stop()
        await self.settle(2)

    async def _stop_all(self, *running: list[Any]) -> None:
        services = [service for several in running for service in several]
        for several in running:
            several.clear()
        await self.wait(DeferredList([maybeDeferred(one.stopService) for one in services], consumeErrors=True))

    def _start_http(self) -> None:
        # Klein and treq install the reactor when they are imported.
        from dmsg.discovery.api import DiscoveryApi, make_site
        from dmsg.discovery.client import HttpDiscovery
        from dmsg.discovery.limits import DiscoveryLimits

        random = StdlibRandom(0)
        # All nodes here have the same address.
        limits = DiscoveryLimits.unlimited_rates()
        store, addresses = MemoryStore(random=random), RelayAddresses(private=True)
        provers = {
            DMSG: XkProver(self.reactor, random=self._random),
            MESSAGING: LinkProver(self.reactor, random=self._random),
        }
        self._proofs = RelayProofs(store, provers, self.reactor, now_ns=self.now_ns, random=random, addresses=addresses)
        api = DiscoveryApi(
            store, clock_ns=self.now_ns, random=random, limits=limits, addresses=addresses, proofs=self._proofs
        )
        site = make_site(api.resource(), reactor=self.reactor, limits=limits)
        self._http_port = self.reactor.listenTCP(0, site, interface=LOOPBACK)
        self._proofs.start()
        self.discovery_url = f"http://{LOOPBACK}:{cast(Any, self._http_port).getHost().port}"
        self.discovery = HttpDiscovery.connect(self.discovery_url, self.reactor)

    # --- what is in it -----------------------------------------------------------------------------------------------

    async def add_relay(
        self, key: SecretKey | None = None, *, kind: type[DmsgRelay] = DmsgRelay, **options: Any
    ) -> DmsgRelay:
        """Start another relay; returns when it listens and, if there is a discovery, can be found there.

        ``options`` go to ``kind``, which is :class:`~dmsg.mux.relay.service.DmsgRelay` or a class like it.
        """
        return await self._add_relay(kind, key, {"limits": self.limits, **options}, self.relays, self.pinned)

    async def add_messaging_relay(self, key: SecretKey | None = None, **options: Any) -> MessagingRelay:
        """As :meth:`add_relay`; ``options`` go to :class:`~dmsg.messaging.relay.service.MessagingRelay`."""
        limits = replace(MessagingRelayLimits(), drain_timeout_s=DRAIN_TIMEOUT_S)
        options = {"limits": limits, **options}
        return await self._add_relay(MessagingRelay, key, options, self.messaging_relays, self.messaging_pinned)

    async def _add_relay(
        self,
        kind: Callable[..., R],
        key: SecretKey | None,
        options: dict[str, Any],
        relays: list[R],
        pinned: list[PinnedServer],
    ) -> R:
        key = key or SecretKey.generate(self._random)
        taken = await self.wait(TakenPort.take(TCP4ServerEndpoint(self.reactor, 0, interface=LOOPBACK)))
        address = HostPort(LOOPBACK, cast(Any, taken.port).getHost().port)
        settings = {**self._settings, "public_address": address, **options}
        try:
            relay = kind(self.reactor, key, taken, **settings)
        except BaseException:
            await maybeDeferred(taken.port.stopListening)
            raise
        relay.startService()
        relays.append(relay)
        pinned.append(PinnedServer(key.public_key, address))
        await self.wait(relay.listening())
        if relay.registrar is not None:
            await self.wait(relay.registrar.published())
        if self._proofs is not None:
            await self._proofs.quiet()
        return relay

    async def stop_relay(self, relay: DmsgRelay | MessagingRelay) -> None:
        """Stop a relay: it drains, withdraws and closes its connections. Returns when its clients know that.

        A second call changes nothing.
        """
        key = relay.key.public_key
        for pinned in (self.pinned, self.messaging_pinned):
            pinned[:] = [one for one in pinned if one.public_key != key]
        _discard(self.relays if isinstance(relay, DmsgRelay) else self.messaging_relays, relay)
        await self.wait(relay.stopService())
        clients: list[Any] = [*self.clients, *self.messaging_clients]
        for client in clients:
            while key in client.pool.sessions:
                await self.wait(client.sessions_change.wait())

    async def client(self, *, key: SecretKey | None = None, min_servers: int = 1, **options: Any) -> DmsgClient:
        """A client that is connected and can be dialled. ``options`` go to :class:`~dmsg.mux.client.service.DmsgClient`.

        All kinds of clients also take ``link``, a :class:`~dmsg.testing.link.Link` over which the client reaches the network,
        which has to be a :class:`~dmsg.testing.memory.MemoryNetwork`.
        """
        return await self._started(self.new_client(key=key, min_servers=min_servers, **options))

    async def messaging_client(
        self, *, key: SecretKey | None = None, min_servers: int = 1, **options: Any
    ) -> MessagingClient:
        """As :meth:`client`; ``options`` go to :class:`~dmsg.messaging.client.service.MessagingClient`."""
        return await self._started(self.new_messaging_client(key=key, min_servers=min_servers, **options))

    async def _started(self, client: C) -> C:
        client.startService()
        await self.wait(client.when_ready())
        return client

    def new_client(self, *, key: SecretKey | None = None, **options: Any) -> DmsgClient:
        """A client of this network that has not been started; it is stopped with the network anyway."""
        return self._new_client(DmsgClient, key, options, self.pinned, self.clients)

    def new_messaging_client(self, *, key: SecretKey | None = None, **options: Any) -> MessagingClient:
        """As :meth:`new_client`, of the messaging system."""
        return self._new_client(MessagingClient, key, options, self.messaging_pinned, self.messaging_clients)

    def _new_client(
        self,
        kind: type[C],
        key: SecretKey | None,
        options: dict[str, Any],
        pinned: list[PinnedServer],
        clients: list[C],
    ) -> C:
        servers = () if self.discovery is not None else tuple(pinned)
        key = key or SecretKey.generate(self._random)
        link = options.pop("link", None)
        reactor = self.reactor if link is None else self.reactor.through(link)
        client = kind(reactor, key, **{**self._settings, "servers": servers, **options})
        clients.append(client)
        return client

    async def stop_client(self, client: DmsgClient | MessagingClient) -> None:
        """Stop a client: it withdraws, and closes its transports and sessions. A second call changes nothing."""
        _discard(self.clients if isinstance(client, DmsgClient) else self.messaging_clients, client)
        await self.wait(client.stopService())

    @property
    def _settings(self) -> dict[str, Any]:
        """The common arguments of relays and clients."""
        return {
            "discovery": self.discovery,
            "events": self._events,
            "random": self._random,
            "now_ns": self.now_ns,
        }

    @property
    def endpoint_arguments(self) -> str:
        """The arguments with which an endpoint string reaches this network: ``f"dmsg:{pk}:{network.endpoint_arguments}"``."""
        return self._endpoint_arguments(self.pinned)

    @property
    def messaging_endpoint_arguments(self) -> str:
        """As :attr:`endpoint_arguments`, for ``messaging:`` in place of ``dmsg:``."""
        return self._endpoint_arguments(self.messaging_pinned)

    def _endpoint_arguments(self, pinned: list[PinnedServer]) -> str:
        if self.discovery_url:
            return "discovery=" + self.discovery_url.replace(":", "\\:")
        return "server=" + ",".join(str(one) for one in pinned).replace(":", "\\:")

    # --- time --------------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The reactor's time, in nanoseconds."""
        return int(self.reactor.seconds() * 1e9)

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """The outcome of ``awaitable``. Moves a fake clock on until there is one, at most :data:`WAIT_LIMIT_S`.

        If there is none by then, or nothing is left that could happen, ``awaitable`` is cancelled and ``AssertionError``
        raised. On another reactor it waits without a limit.
        """
        if not isinstance(self.reactor, MemoryNetwork):
            return await awaitable
        outcome: Deferred[T]
        outcome = awaitable if isinstance(awaitable, Deferred) else ensureDeferred(_as_coroutine(awaitable))
        clock = self.reactor.clock
        give_up = clock.seconds() + WAIT_LIMIT_S
        while not outcome.called or outcome.paused:
            due = min((call.getTime() for call in clock.getDelayedCalls()), default=None)
            if due is None or due > give_up:
                outcome.addErrback(lambda _: None).cancel()
                raise AssertionError(
                    "nothing is left that could happen" if due is None else f"it took more than {WAIT_LIMIT_S:g} s"
                )
            clock.advance(max(0.0, due - clock.seconds()))
        return await outcome

    async def settle(self, turns: int = 20) -> None:
        """Let everything happen that needs no time: a few turns of the reactor, or all calls that are due on a fake clock."""
        if not isinstance(self.reactor, MemoryNetwork):
            for _ in range(turns):
                await deferLater(self.reactor, 0)
            return
        self.reactor.advance(0)


def _discard(services: Any, service: object) -> None:
    if service in services:
        services.remove(service)


def _as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    async def run() -> T:
        return await awaitable

    return run()
