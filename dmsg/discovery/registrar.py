"""Publishes one key's entry: what the services of a program want in it, together (:ref:`spec-publishing`).

A program may have several services with one key, such as a client of each protocol. An entry has one client half, so each
names its relays to an :class:`EntryPublisher`, and the entry has them all. :mod:`~dmsg.discovery.keeper` brings it to
discovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.defer import Deferred, DeferredList, FailureGroup, race
from twisted.internet.interfaces import IReactorTime

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import BASE_VERSION, DMSG, MESSAGING, ClientPart, Entry, ServerPart, promises_security
from dmsg.discovery.keeper import DEFAULT_PACE, EntryKeeper, Pace
from dmsg.discovery.several import DiscoveryList
from dmsg.discovery.wanted import Unmanaged, WantedEntry
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.sansio.jitter import RandomNumbers


class EntryPublisher:
    """What one service publishes in the entry of its key. :meth:`EntryRegistrar.publisher` makes one.

    Nothing is published before the first :meth:`set_client` or :meth:`set_server`.
    """

    def __init__(self, registrar: EntryRegistrar, version: str) -> None:
        #: What the service promises as a client (``"0.1.0"``: end-to-end security), and its relays once it is one.
        self.promise = version
        self.relays: frozenset[PublicKey] | None = None
        #: The server half, if the service is a relay, and what that speaks.
        self.server: ServerPart | Unmanaged | None = Unmanaged.HALF
        self.protocol = DMSG
        self._registrar = registrar

    @property
    def public_key(self) -> PublicKey:
        """Whose entry this is."""
        return self._registrar.secret_key.public_key

    @property
    def entry(self) -> Entry | None:
        """The newest entry discovery is known to have; ``None`` before the first success."""
        return next((one.entry for one in self._registrar.keepers if one.entry is not None), None)

    @property
    def problem(self) -> str:
        """Why no discovery could be told of the entry, for people; "" if one was, or nothing has failed yet."""
        problems = [one.problem for one in self._registrar.keepers]
        return problems[0] if problems and all(problems) else ""

    def set_client(self, delegated_servers: Iterable[PublicKey]) -> None:
        """Publish these relays as ones this client can be reached through; their order does not matter."""
        self.relays = frozenset(delegated_servers)
        self._registrar.changed(self)

    def set_server(self, address: HostPort | None, available_connections: int = 0, *, protocol: str = DMSG) -> None:
        """Publish a relay at ``address`` that speaks ``protocol`` and has this many connections left.

        ``None`` says that there is none. A key has one relay, so one of its services calls this. Entries of messaging
        relays have the port a second time, by itself.
        """
        port = str(address.port) if address is not None and protocol == MESSAGING else ""
        self.server = None if address is None else ServerPart(str(address), available_connections, port)
        self.protocol = protocol
        self._registrar.changed(self)

    async def published(self) -> None:
        """Wait until what is wanted now (or something wanted later) is in discovery; in one of several.

        Raises ``DiscoveryUnavailable`` if the registrar is closed before that.
        """
        try:
            await race([Deferred.fromCoroutine(one.published()) for one in self._registrar.keepers])
        except FailureGroup as error:
            error.failures[0].raiseException()

    async def close(self, *, withdraw: bool = False) -> None:
        """Publish nothing more for this service; the last of a registrar's ends it.

        What other services publish goes on. With ``withdraw``, the last first says that nothing is to be had here: no
        relays, no connections left. That is tried once, for at most :data:`~dmsg.discovery.keeper.WITHDRAW_TIMEOUT_S`;
        failing to is only logged.
        """
        await self._registrar.leave(self, withdraw)

    def reopen(self) -> None:
        """Publish again what is set from now on; nothing happens unless it was closed."""
        self._registrar.rejoin(self)


class EntryRegistrar(EntryPublisher):
    """Looks after the entry of ``secret_key``'s public key in ``discovery``: an ``IDiscovery``, or several of them as a
    :class:`~dmsg.discovery.several.DiscoveryList`.

    A program has one for each key, and each of its services a :meth:`publisher` of it. A single service uses the
    registrar itself, which is a publisher, too: ``version`` is what that promises.

    ``clock`` (``IReactorTime``) drives pauses, ``now_ns()`` (Unix time in nanoseconds) gives timestamps, ``random``
    spreads retries. ``events`` gets an :class:`~dmsg.eventlog.schema.EntryPublished` for every POST.
    """

    def __init__(
        self,
        discovery: IDiscovery,
        secret_key: SecretKey,
        *,
        clock: IReactorTime,
        now_ns: Callable[[], int],
        random: RandomNumbers,
        version: str = BASE_VERSION,
        pace: Pace = DEFAULT_PACE,
        events: IEventLog | None = None,
    ) -> None:
        super().__init__(self, version)
        self.secret_key = secret_key
        self.keepers = [
            EntryKeeper(one, secret_key, clock=clock, now_ns=now_ns, random=random, pace=pace, events=events)
            for one in (discovery.discoveries if isinstance(discovery, DiscoveryList) else (discovery,))
        ]
        self._wanted = WantedEntry()
        self._publishers: list[EntryPublisher] = []
        self._left: set[EntryPublisher] = set()

    def publisher(self, version: str = BASE_VERSION) -> EntryPublisher:
        """A publisher for one service, which promises ``version``; the entry promises the most that any does."""
        made = EntryPublisher(self, version)
        self._publishers.append(made)
        return made

    def changed(self, publisher: EntryPublisher) -> None:
        """``publisher`` wants something else."""
        if publisher in self._left:
            return
        if publisher not in self._publishers:
            self._publishers.append(publisher)
        self._want()

    async def leave(self, publisher: EntryPublisher, withdraw: bool) -> None:
        """See :meth:`EntryPublisher.close`."""
        self._left.add(publisher)
        if publisher in self._publishers:
            self._publishers.remove(publisher)
            if self._publishers:
                self._want()
        if not self._publishers:
            closing = [Deferred.fromCoroutine(one.close(withdraw=withdraw)) for one in self.keepers]
            await DeferredList(closing, consumeErrors=True)

    def rejoin(self, publisher: EntryPublisher) -> None:
        """See :meth:`EntryPublisher.reopen`."""
        if publisher in self._left:
            self._left.remove(publisher)
            for keeper in self.keepers:
                keeper.reopen()

    def _want(self) -> None:
        gone = self._wanted.withdrawn()
        relays = [one.relays for one in self._publishers if one.relays is not None]
        servers = [one for one in self._publishers if not isinstance(one.server, Unmanaged)]
        promises = [one.promise for one in self._publishers if one.relays is not None or not relays]
        self._wanted = WantedEntry(
            ClientPart(tuple(sorted(frozenset().union(*relays)))) if relays else gone.client,
            servers[-1].server if servers else gone.server,
            max(promises, key=promises_security),
            servers[-1].protocol if servers else gone.protocol,
        )
        for keeper in self.keepers:
            keeper.want(self._wanted)
