"""Publishes one key's entry for all services of a program (:ref:`spec-publishing`).

A program may have several services with one key, such as a client of each protocol. An entry has one client half, so each
service names its relays to an :class:`EntryPublisher`, and the entry has all of them. :mod:`~dmsg.discovery.keeper` brings
the entry to discovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.defer import Deferred, DeferredList, FailureGroup, race
from twisted.internet.interfaces import IReactorTime

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import BASE_VERSION, DMSG, MESSAGING, ClientPart, Entry, ServerPart, promises_security
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.discovery.keeper import DEFAULT_PACE, EntryKeeper, Pace
from dmsg.discovery.several import DiscoveryList
from dmsg.discovery.wanted import Unmanaged, WantedEntry
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.sansio.jitter import RandomNumbers


class EntryPublisher:
    """The part of one service in the entry of its key. :meth:`EntryRegistrar.publisher` makes one.

    Nothing is published before the first :meth:`set_client` or :meth:`set_server`.
    """

    def __init__(self, registrar: EntryRegistrar, version: str) -> None:
        #: The promise of the service as a client (``"0.1.0"``: end-to-end security), and its relays once it is a client.
        self.promise = version
        self.relays: frozenset[PublicKey] | None = None
        #: The server half, if the service is a relay, and the protocol of that relay.
        self.server: ServerPart | Unmanaged | None = Unmanaged.HALF
        self.protocol = DMSG
        #: Whether it was closed, and not reopened since.
        self.has_left = False
        self._registrar = registrar
        self._waiting: set[Deferred[tuple[int, None]]] = set()  # for the entry

    @property
    def public_key(self) -> PublicKey:
        """The key of the entry."""
        return self._registrar.secret_key.public_key

    @property
    def entry(self) -> Entry | None:
        """The newest entry discovery is known to have; ``None`` before the first success."""
        return next((one.entry for one in self._registrar.keepers if one.entry is not None), None)

    @property
    def problem(self) -> str:
        """Why no discovery has accepted the entry, for people; "" if one has, or nothing has failed yet."""
        problems = [one.problem for one in self._registrar.keepers]
        return problems[0] if problems and all(problems) else ""

    def set_client(self, delegated_servers: Iterable[PublicKey]) -> None:
        """Publish the relays through which this client can be reached; their order does not matter."""
        self.relays = frozenset(delegated_servers)
        self._registrar.changed(self)

    def set_server(self, address: HostPort | None, available_connections: int = 0, *, protocol: str = DMSG) -> None:
        """Publish a relay at ``address`` that speaks ``protocol`` and has this many connections left.

        ``None`` means that there is no relay. A key has one relay, so only one of its services calls this. Entries of
        messaging relays have the port a second time, in ``port``.
        """
        port = str(address.port) if address is not None and protocol == MESSAGING else ""
        self.server = None if address is None else ServerPart(str(address), available_connections, port)
        self.protocol = protocol
        self._registrar.changed(self)

    async def published(self) -> None:
        """Wait until the entry as it is wanted now (or later) is in discovery, or in one of several.

        Raises ``DiscoveryUnavailable`` if this publisher or the registrar is closed before that.
        """
        if self.has_left:  # the keepers may go on for others
            raise DiscoveryUnavailable("the registrar is closed")
        waiting = race([Deferred.fromCoroutine(one.published()) for one in self._registrar.keepers])
        self._waiting.add(waiting)
        try:
            await waiting
        except FailureGroup as error:
            if waiting not in self._waiting:
                raise DiscoveryUnavailable("the registrar was closed") from None
            error.failures[0].raiseException()
        finally:
            self._waiting.discard(waiting)

    def _end_waiting(self) -> None:
        """Nothing is published for this service any more, although the registrar may go on for others."""
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            one.cancel()

    async def close(self, *, withdraw: bool = False) -> None:
        """Publish nothing more for this service; the registrar ends with its last publisher.

        Other services go on publishing. With ``withdraw``, the last publisher first withdraws the entry: no relays, no
        connections left. It tries that once, for at most :data:`~dmsg.discovery.keeper.WITHDRAW_TIMEOUT_S`; a failure is
        only logged.
        """
        self.has_left = True  # before any that waits can wait again
        self._end_waiting()
        await self._registrar.leave(self, withdraw)

    def reopen(self) -> None:
        """Publish again, after :meth:`close`, what is set from now on; nothing happens unless it was closed."""
        self._registrar.rejoin(self)


class EntryRegistrar(EntryPublisher):
    """Keeps the entry of ``secret_key``'s public key in ``discovery``: an ``IDiscovery``, or several of them as a
    :class:`~dmsg.discovery.several.DiscoveryList`.

    A program has one registrar for each key, and each of its services a :meth:`publisher` of that registrar. A single service
    uses the registrar itself, which is a publisher, too, and promises ``version``.

    ``clock`` (``IReactorTime``) drives pauses, ``now_ns()`` (Unix time in nanoseconds) gives timestamps, ``random``
    spreads retries. ``events`` gets an :class:`~dmsg.eventlog.schema.EntryPublished` for every POST, and for every failed GET
    before one.
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

    def publisher(self, version: str = BASE_VERSION) -> EntryPublisher:
        """A publisher for one service, which promises ``version``; the entry has the highest promise of all services."""
        made = EntryPublisher(self, version)
        self._publishers.append(made)
        return made

    def changed(self, publisher: EntryPublisher) -> None:
        """``publisher`` wants something else."""
        if publisher.has_left:
            return
        if publisher not in self._publishers:
            self._publishers.append(publisher)
        self._want()

    async def leave(self, publisher: EntryPublisher, withdraw: bool) -> None:
        """See :meth:`EntryPublisher.close`."""
        if publisher in self._publishers:
            self._publishers.remove(publisher)
            if self._publishers:
                self._want()
        if not self._publishers:
            closing = [Deferred.fromCoroutine(one.close(withdraw=withdraw)) for one in self.keepers]
            await DeferredList(closing, consumeErrors=True)

    def rejoin(self, publisher: EntryPublisher) -> None:
        """See :meth:`EntryPublisher.reopen`."""
        if publisher.has_left:
            publisher.has_left = False
            publisher.relays, publisher.server = None, Unmanaged.HALF
            self._publishers.append(publisher)  # before it sets anything: the registrar must not end with others
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
