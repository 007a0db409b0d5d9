"""Clients that several endpoints of one process share: started by the first use, stopped after the last.

One key may have only one connection to a server (:ref:`spec-newest-wins`), so two endpoint strings that name the same
key must not make two clients.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol
from weakref import WeakValueDictionary

from twisted.internet.defer import Deferred, DeferredList, ensureDeferred, succeed
from twisted.internet.interfaces import IReactorCore
from twisted.internet.threads import deferToThreadPool

from dmsg.address import PinnedServer
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.endpoints.client import C
from dmsg.errors import ConfigError, DmsgError
from dmsg.eventlog.log import EventLog, check_directory, new_boot_id, short_node
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery
from dmsg.relays.choice import RelaysFrom, RelaysMode

MakeDiscovery = Callable[[str, Any, Collection[PublicKey]], Any]


class Settings(TypingProtocol):
    """What sharing has to know of the settings of any protocol's client."""

    @property
    def discovery(self) -> str | None:
        """The URL of the discovery, if there is one."""

    @property
    def servers(self) -> tuple[PinnedServer, ...]:
        """The relays that are known without it."""

    @property
    def ranks_keys(self) -> tuple[PublicKey, ...]:
        """Whose relay ranks are believed."""

    @property
    def events(self) -> Path | None:
        """The directory of the event log, if there is one."""

    def relay_list(self) -> RelaysFrom | None:
        """The operator's list, if there is one."""


T = TypeVar("T", bound=Settings)


class Holder(TypingProtocol):
    """What counts who needs a client."""

    def hold(self) -> None:
        """Count one holder more of a client that is held already."""

    def release(self) -> Deferred[None]:
        """Count one less; the client stops after the last."""


@dataclass(frozen=True, slots=True)
class ClientParts(Generic[T]):
    """What a shared client is made of. What is opened for it is closed after it has stopped.

    ``lasting`` is whether ``key`` will be there in another run. Each of the client's transports, those that it accepts
    included, holds ``holder`` from when it is open until its protocol knows that it is over (``on_over``).
    """

    reactor: Any
    key: SecretKey
    lasting: bool
    settings: T
    discovery: IDiscovery | None
    relays: Any
    events: EventLog | None
    holder: Holder


#: A protocol's own: a client, not started.
MakeClient = Callable[[ClientParts[T]], C]


@dataclass(frozen=True, slots=True)
class SharedSettings(Generic[T]):
    """What a shared client is made from: its key, and its settings, which hold as the first user of the client has them.

    ``key`` is ``None`` for a key that lives as long as the client; such a client is not published and keeps only the
    sessions its transports need. All users of a client must say the same of the operator's list of relays.
    """

    key: SecretKey | None
    client: T

    @property
    def identity(self) -> object:
        """What two settings must have in common for one client to serve both."""
        key = None if self.key is None else self.key.public_key
        return key, self.client.discovery, frozenset(self.client.servers)


class SharedClient(Generic[T, C]):
    """A :class:`~dmsg.endpoints.client.ClientSource` that makes its client when it is first held.

    It stops the client after the last release. Listening ports, dials under way and open transports hold it, accepted ones
    included.
    """

    def __init__(self, registry: SharedClients[T, C], settings: SharedSettings[T]) -> None:
        self.settings = settings
        self.client: C | None = None
        self._registry = registry
        self._holders = 0
        self._discovery: Any = None
        self._relays: Any = None
        self._log: EventLog | None = None
        self._stopping: Deferred[None] | None = None
        self._waiting: Waiters[None] = Waiters()

    async def acquire(self) -> C:
        """See :class:`~dmsg.endpoints.client.ClientSource`. Raises ``DmsgError`` once the reactor shuts down."""
        self.hold()
        try:
            if self._stopping is not None:
                # The old client takes its entry back from discovery: that must not come after the new one's.
                await self._waiting.wait()
            self._registry.check_open()
            if self.client is None:
                self._start()
            assert self.client is not None
            return self.client
        except BaseException:
            self.release()
            raise

    def hold(self) -> None:
        """Count one holder more of a client that is held already."""
        self._holders += 1

    def release(self) -> Deferred[None]:
        """See :class:`~dmsg.endpoints.client.ClientSource`."""
        self._holders -= 1
        if self._holders:
            return succeed(None)
        done: Deferred[None] = Deferred()

        def look() -> None:
            if self._holders:
                done.callback(None)  # it was taken in the meantime
            else:
                self.stop().addBoth(lambda _: done.callback(None))

        # Not now: what was the last holder may be in the middle of a call from this very client.
        self._registry.reactor.callLater(0, look)
        return done

    def _start(self) -> None:
        settings, lasting = self.settings.client, self.settings.key is not None
        reactor, key = self._registry.reactor, self.settings.key or SecretKey.generate()
        listed = settings.relay_list()
        if settings.events is not None:
            check_directory(settings.events)
            node, boot = short_node(key.public_key), new_boot_id(os.urandom)
            self._log = EventLog.to_directory(settings.events, role="client", node=node, boot=boot)
        if settings.discovery is not None:
            self._discovery = self._registry.make_discovery(settings.discovery, reactor, settings.ranks_keys)
        self._relays = open_relay_list(listed, reactor) if listed is not None else None
        discovery: IDiscovery | None = self._discovery
        self.client = self._registry.make_client(
            ClientParts(reactor, key, lasting, settings, discovery, self._relays, self._log, self)
        )
        self._registry.started(self)
        if self._relays is not None:
            self._relays.start()
        self.client.startService()

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
        await client.stopService()
        if self._relays is not None:
            await self._relays.stop()
        if self._discovery is not None:
            await self._discovery.close()
        if self._log is not None:
            reactor = self._registry.reactor
            await deferToThreadPool(reactor, reactor.getThreadPool(), self._log.close)

    def _note_stopped(self, result: Any) -> Any:
        self.client = self._discovery = self._relays = self._log = self._stopping = None
        if not self._holders:
            self._registry.stopped(self)
        self._waiting.fire(None)
        return result


class SharedClients(Generic[T, C]):
    """All the shared clients of one protocol on one reactor. They are stopped when it shuts down.

    ``make_client`` is the protocol's, ``make_discovery(url, reactor, ranks_keys)`` gives an ``IDiscovery`` with a ``close``.
    """

    def __init__(self, reactor: Any, make_client: MakeClient[T, C], make_discovery: MakeDiscovery) -> None:
        self.reactor = reactor
        self.make_client = make_client
        self.make_discovery = make_discovery
        #: As long as they are used: by endpoints made from strings, and the clients that run.
        self._known: WeakValueDictionary[object, SharedClient[T, C]] = WeakValueDictionary()
        self._running: set[SharedClient[T, C]] = set()
        self._trigger: object = None
        self._closed = False

    def get(self, settings: SharedSettings[T]) -> SharedClient[T, C]:
        """The one source for all ``settings`` of the same identity.

        Raises ``ConfigError`` when the others have another list of relays: which one held would be up to chance.
        """
        shared = self._known.get(settings.identity)
        if shared is not None and shared.settings.client.relay_list() != settings.client.relay_list():
            raise ConfigError("relays", "another endpoint of the same key and discovery has another list of relays")
        if shared is None:
            shared = self._known[settings.identity] = SharedClient(self, settings)
        return shared

    def check_open(self) -> None:
        """Raise ``DmsgError`` once the reactor shuts down."""
        if self._closed:
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

    def _shut_down(self) -> Deferred[Any]:
        self._closed = True
        self._trigger = None
        return DeferredList([shared.stop() for shared in list(self._running)])


#: By the identity of their reactors, which they keep alive while they live themselves, and by what makes their clients.
_registries: WeakValueDictionary[tuple[int, object], SharedClients[Any, Any]] = WeakValueDictionary()


def shared_clients(reactor: Any, make_client: MakeClient[T, C]) -> SharedClients[T, C]:
    """The clients of this process on ``reactor`` that ``make_client`` makes."""
    registry = _registries.get((id(reactor), make_client))
    if registry is None:
        registry = _registries[id(reactor), make_client] = SharedClients(reactor, make_client, _http_discovery)
    return registry


def open_relay_list(relays: RelaysFrom, reactor: Any) -> Any:
    """The source of an operator's list, not started."""
    from dmsg.relays.operator_list_source import RelayListSource  # only where there is a list

    only = relays.mode is RelaysMode.ONLY
    return RelayListSource(relays.location, relays.keys, reactor, only=only, now_s=time.time)


def _http_discovery(url: str, reactor: Any, ranks_keys: Collection[PublicKey]) -> Any:
    from dmsg.discovery.client import HttpDiscovery  # treq, which a program with pinned servers does without

    return HttpDiscovery.connect(url, reactor, ranks_keys=ranks_keys)
