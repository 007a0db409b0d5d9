"""Clients that several endpoints of one process share: started by the first use, stopped after the last.

One key may have only one connection to a server (:ref:`spec-newest-wins`), so two endpoint strings that name the same
key must not make two clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from typing import Protocol as TypingProtocol
from weakref import WeakValueDictionary

from twisted.internet.defer import Deferred, DeferredList, ensureDeferred, succeed
from twisted.internet.interfaces import IReactorCore, IReactorTime
from twisted.internet.task import deferLater

from dmsg.clients.parts import ClientParts, MakeDiscovery, T, http_discovery
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.endpoints.client import C
from dmsg.endpoints.shared_entry import SharedEntry, shared_entry
from dmsg.errors import ConfigError, DmsgError
from dmsg.glue.waiters import Waiters

C_co = TypeVar("C_co", covariant=True)

#: The reactor shuts down after this many seconds even if a client has not stopped, which takes some 20 s at most: trial cancels
#: the timers of a client when a test leaves it behind, and would wait for it for ever in the end.
SHUTDOWN_S: Final = 60.0


class MakeClient(TypingProtocol[T, C_co]):
    """A protocol's function that makes a client, not started."""

    def __call__(self, parts: ClientParts[T], *, publish: bool | EntryRegistrar, min_servers: int | None) -> C_co:
        """``publish`` is the registrar of its entry, or whether it has an entry; ``min_servers`` as in its settings."""


@dataclass(frozen=True, slots=True)
class SharedSettings(Generic[T]):
    """The key and settings from which a shared client is made. The settings of the client's first user count.

    ``key`` is ``None`` for a key that lives as long as the client; such a client is not published and keeps only the
    sessions that its transports need. All users of a client must agree on the settings that ``must_agree`` returns.
    """

    key: SecretKey | None
    client: T

    @property
    def identity(self) -> object:
        """The values that two settings must share for one client to serve both."""
        key = None if self.key is None else self.key.public_key
        return key, self.client.discovery, frozenset(self.client.servers)


class SharedClient(Generic[T, C]):
    """A :class:`~dmsg.endpoints.client.ClientSource` that makes its client when it is first held.

    It stops the client after the last release. Listening ports, dials under way and open transports, also accepted ones, hold
    the client.
    """

    def __init__(self, registry: SharedClients[T, C], settings: SharedSettings[T]) -> None:
        self.settings = settings
        self.client: C | None = None
        self._registry = registry
        self._holders = 0
        self._parts: ClientParts[T] | None = None
        self._stopping: Deferred[None] | None = None
        self._waiting: Waiters[None] = Waiters()
        key, url = settings.key, settings.client.discovery
        self._entry: SharedEntry | None = None
        if key is not None and url is not None:
            self._entry = shared_entry(registry.reactor, key, url, registry.make_discovery)

    @property
    def reactor(self) -> IReactorTime:
        """See :class:`~dmsg.endpoints.client.ClientSource`."""
        reactor: IReactorTime = self._registry.reactor
        return reactor

    @property
    def shutting_down(self) -> bool:
        """See :class:`~dmsg.endpoints.client.ClientSource`."""
        return self._registry.closed

    async def acquire(self) -> C:
        """See :class:`~dmsg.endpoints.client.ClientSource`. Raises ``DmsgError`` once the reactor shuts down."""
        self.hold()
        try:
            if self._stopping is not None:
                # The old client withdraws its entry from discovery, which must not happen after the new one is published.
                await self._waiting.wait()
            if self._entry is not None and self.client is None:
                await self._entry.free()
            self._registry.check_open()
            if self.client is None:
                self._start()
            assert self.client is not None
            return self.client
        except BaseException:
            self.release()
            raise

    @property
    def held(self) -> bool:
        """Whether anything uses the client."""
        return self._holders > 0

    def hold(self) -> None:
        """Count another holder of a client that is held already."""
        self._holders += 1

    def release(self) -> Deferred[None]:
        """See :class:`~dmsg.endpoints.client.ClientSource`."""
        self._holders -= 1
        if self._holders:
            return succeed(None)
        done: Deferred[None] = Deferred()

        def look() -> None:
            if self._holders:
                done.callback(None)  # it has a holder again
            else:
                self.stop().addBoth(lambda _: done.callback(None))

        # Not now, because the last holder may be in the middle of a call from this client.
        self._registry.reactor.callLater(0, look)
        return done

    def _start(self) -> None:
        settings, registry, lasting = self.settings.client, self._registry, self.settings.key is not None
        self._parts = parts = ClientParts(registry.reactor, settings, self.settings.key, registry.make_discovery)
        min_servers = settings.min_servers if lasting or settings.min_servers is not None else 0
        publish = lasting if self._entry is None else self._entry.join(self, parts.events)
        self.client = client = registry.make_client(parts, publish=publish, min_servers=min_servers)
        client.hold, client.release = self.hold, self.release
        registry.started(self)
        if parts.relays is not None:
            parts.relays.start()
        client.startService()

    def stop(self) -> Deferred[None]:
        """Stop the client if it runs, held or not; fires when it has stopped."""
        if self._stopping is None:
            if self.client is None:
                self._registry.stopped(self)
                return succeed(None)
            self._stopping = ensureDeferred(self._stop(self.client))
            self._stopping.addBoth(self._note_stopped)
            if self._stopping is None:
                return succeed(None)
        return self._waiting.wait()

    async def _stop(self, client: C) -> None:
        if self._entry is not None:
            self._entry.leave(self)
        await client.stopService()
        if self._entry is not None:
            await self._entry.left(self)
        if self._parts is not None:
            await self._parts.close()

    def _note_stopped(self, result: Any) -> Any:
        self.client = self._parts = self._stopping = None
        if not self._holders:
            self._registry.stopped(self)
        self._waiting.fire(None)
        return result


class SharedClients(Generic[T, C]):
    """All the shared clients of one protocol on one reactor. They are stopped when it shuts down.

    ``make_client`` is the protocol's.
    """

    def __init__(
        self, reactor: Any, make_client: MakeClient[T, C], make_discovery: MakeDiscovery = http_discovery
    ) -> None:
        self.reactor = reactor
        self.make_client = make_client
        self.make_discovery = make_discovery
        #: Kept as long as endpoints made from strings, or running clients, use them.
        self._known: WeakValueDictionary[object, SharedClient[T, C]] = WeakValueDictionary()
        self._running: set[SharedClient[T, C]] = set()
        self._trigger: object = None
        #: Whether the reactor shuts down.
        self.closed = False

    def get(self, settings: SharedSettings[T]) -> SharedClient[T, C]:
        """The one source for all ``settings`` of the same identity.

        Raises ``ConfigError`` when they differ in a value that must agree, because chance would decide which one counts.
        """
        shared = self._known.get(settings.identity)
        if shared is not None:
            theirs = shared.settings.client.must_agree()
            for name, value in settings.client.must_agree().items():
                if value != theirs[name]:
                    raise ConfigError(name, "another endpoint of the same key and discovery says something else")
        else:
            shared = self._known[settings.identity] = SharedClient(self, settings)
        return shared

    def check_open(self) -> None:
        """Raise ``DmsgError`` once the reactor shuts down."""
        if self.closed:
            raise DmsgError("the reactor is shutting down")

    def started(self, shared: SharedClient[T, C]) -> None:
        """A client has been made."""
        self._running.add(shared)
        if self._trigger is None and IReactorCore.providedBy(self.reactor):
            self._trigger = self.reactor.addSystemEventTrigger("before", "shutdown", self._shut_down)

    def stopped(self, shared: SharedClient[T, C]) -> None:
        """A client is gone."""
        self._running.discard(shared)
        if not self._running and self._trigger is not None:
            trigger, self._trigger = self._trigger, None
            self.reactor.removeSystemEventTrigger(trigger)

    async def stop_idle(self) -> None:
        """Wait until no client runs that nothing uses."""
        while idle := [one for one in self._running if not one.held]:
            await DeferredList([one.stop() for one in idle])

    def _shut_down(self) -> Deferred[Any]:
        self.closed = True
        self._trigger = None
        stopped = DeferredList([shared.stop() for shared in list(self._running)], consumeErrors=True)
        return stopped.addTimeout(SHUTDOWN_S, self.reactor, onTimeoutCancel=lambda *_: None)


#: By the identity of their reactors, which they keep alive as long as they exist, and by the function that makes clients.
_registries: WeakValueDictionary[tuple[int, object], SharedClients[Any, Any]] = WeakValueDictionary()


def shared_clients(reactor: Any, make_client: MakeClient[T, C]) -> SharedClients[T, C]:
    """The clients of this process on ``reactor`` that ``make_client`` makes."""
    registry = _registries.get((id(reactor), make_client))
    if registry is None:
        registry = _registries[id(reactor), make_client] = SharedClients(reactor, make_client)
    return registry


async def stop_idle_clients(reactor: Any) -> None:
    """Wait until the clients of endpoint strings on ``reactor`` that nothing uses any more have stopped.

    An application is told that its last transport is over before the client withdraws its entry and leaves its relays. A test
    that must leave nothing on the reactor awaits this, too.
    """
    await deferLater(reactor, 0)  # what was released in this turn is looked at in the next one
    for registry in [one for (of, _), one in list(_registries.items()) if of == id(reactor)]:
        await registry.stop_idle()
