"""The common part of the clients of all protocols: sessions, the published entry, dials, listening ports."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, cast

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import HostPort, PinnedServer
from dmsg.clients.config import RelayClientConfig
from dmsg.clients.dial import Dial, R, StreamRequest
from dmsg.clients.dialer import Dialer
from dmsg.clients.errors import ClientStopped
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.listener import ListeningPort
from dmsg.clients.parts import ClientParts
from dmsg.clients.record import ClientRecord
from dmsg.clients.services import Services
from dmsg.clients.sessions import S
from dmsg.clients.transports import T, TransportRecord, TransportRecords
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import BASE_VERSION
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.discovery.registrar import EntryPublisher, EntryRegistrar
from dmsg.errors import Attempt, ConfigError, DialError, DmsgError
from dmsg.glue.connecting import client_endpoint
from dmsg.glue.tasks import to_the_end
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IAccessPolicy, IDiscovery, IEventLog
from dmsg.relays.choice import RelayChoice
from dmsg.relays.pool import SessionPool
from dmsg.relays.scores import RelayScores
from dmsg.relays.state import RelayFile
from dmsg.sansio.jitter import Jitter

if TYPE_CHECKING:
    from typing import Self

_log = Logger()
_NO_RELAYS: Final = "no discovery, no server and no list of relays was given: there is nothing to connect to"


def _lack_of(known: int, wanted: int) -> tuple[str, str]:
    """The setting and the problem of a client that knows ``known`` relays, finds no others, and wants ``wanted`` sessions."""
    if not known:
        return "discovery", _NO_RELAYS
    if known < wanted:
        return "min_servers", f"is {wanted}, and {known} can be had: without a discovery there are no others"
    return "", ""


class RelayClient(Service, ABC, Generic[S, R, T]):
    """A client of relays as a Twisted service; a protocol's own class makes its sessions and transports.

    ``servers`` are relays known without discovery, which are kept connected. ``min_servers`` is how many sessions are kept up
    (0: only those that dials need). The default is two, with relays of different network groups, if discovery lists relays of
    more than one group and ``servers`` is empty; one is enough to be ready. The client publishes its delegated servers if
    ``publish`` is true and there is a discovery; a program that has several services with one key passes the registrar of that
    key to each of them as ``publish``. If discovery hands out relay ranks (:class:`~dmsg.interfaces.IRankedDiscovery`), they
    count when servers are chosen.
    ``relay_file`` is where relays that worked are kept for the next run (:class:`~dmsg.relays.state.RelayFile`), one file for
    each key and discovery; without it, nothing is kept. ``relays`` is an operator's list
    (:class:`~dmsg.relays.operator_list_source.RelayListSource`), started and stopped by the caller.
    ``promise`` is the version of the entry.
    """

    #: The protocol of its relays (:ref:`spec-entry-protocol`), and the prefix of its addresses and endpoint strings.
    scheme: ClassVar[str]
    #: The class of its configuration, which also makes the default one.
    config_class: ClassVar[type[RelayClientConfig]] = RelayClientConfig
    config: Any

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        *,
        config: RelayClientConfig | None = None,
        discovery: IDiscovery | None = None,
        servers: Sequence[PinnedServer] = (),
        min_servers: int | None = None,
        publish: bool | EntryRegistrar = True,
        events: IEventLog | None = None,
        relay_file: str | os.PathLike[str] | None = None,
        relays: RelayChoice | None = None,
        random: Random = os.urandom,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        promise: str = BASE_VERSION,
    ) -> None:
        self.config = config = config or self.config_class()
        self.reactor = reactor
        self.key = key
        self.public_key = key.public_key
        #: Called for each transport that is opened; and for each that has ended, after its protocol was told.
        self.hold: Callable[[], object] | None = None
        self.release: Callable[[], object] | None = None
        self.services: Services[Any] = Services(config.listener)
        #: Fires whenever a session is opened or lost.
        self.sessions_change: Waiters[None] = Waiters()
        self.transports: TransportRecords[T] = TransportRecords()
        self.registrar: EntryPublisher | None = None
        self._random = random
        self._record = ClientRecord(reactor, events, key.public_key, self.scheme)
        self._stopping = False
        self._stops = 0  # calls of stopService that are under way
        self._stopped: Waiters[None] = Waiters()  # for the end of the last one
        self._untold = 0  # transports whose protocols have not been told of their end
        self._noted: set[S] = set()
        self._min_servers = min_servers
        memory = RelayFile(relay_file, lambda: now_ns() / 1e9) if relay_file is not None else None
        #: The setting because of which it can never be ready, and the problem; usually ("", "").
        self._lack = "", ""
        if discovery is None and relays is None:
            known = {one.public_key for one in (*servers, *(memory.relays if memory is not None else ()))}
            self._lack = _lack_of(len(known), min_servers or 1)
        jitter = Jitter(random)
        self._uniform = jitter.random
        if isinstance(publish, EntryRegistrar):
            self.registrar = publish.publisher(promise)
        elif discovery is not None and publish:
            self.registrar = EntryRegistrar(
                discovery, key, clock=reactor, random=jitter, events=events, now_ns=now_ns, version=promise
            )
        self.pool: SessionPool[S] = SessionPool(
            reactor,
            self.make_session,
            endpoint_for or self._endpoint_for,
            discovery=discovery,
            pinned=[(server.public_key, server.address) for server in servers],
            goal=min_servers,
            config=config.pool,
            uniform=jitter.random,
            changed=self._sessions_changed,
            went_down=self._record.attempt_failed,
            urgent=lambda: self.in_haste,
            scores=RelayScores(config.scores),
            memory=memory,
            operator=relays,
            now_s=lambda: now_ns() / 1e9,
            protocol=self.scheme,
        )
        self.dialer: Dialer[S, R] = Dialer(reactor, self.pool, discovery, config.dial, jitter.random)

    @classmethod
    def from_parts(cls, parts: ClientParts[Any], **options: Any) -> Self:
        """A client that uses ``parts``, not started; ``options`` are further arguments."""
        return cls(parts.reactor, parts.key, config=parts.settings.config, **parts.arguments(), **options)

    @abstractmethod
    def make_session(self, relay: PublicKey) -> S:
        """A session with ``relay``, not connected yet."""

    @property
    def in_haste(self) -> bool:
        """Whether something urgent needs a session."""
        return False

    # --- service ---------------------------------------------------------------------------------------------------

    def privilegedStartService(self) -> None:
        """The client is about to be started: :meth:`when_ready` waits for it again if it has stopped, and dials may begin.

        A parent calls this of all its services first. Those that listen over the client then wait for it, and those that dial
        over it may be started before it.
        """
        super().privilegedStartService()  # type: ignore[no-untyped-call]
        if not self.running:
            self._stopping = False
            self.dialer.start()

    def startService(self) -> None:
        """Begin to connect; nothing happens if the client runs already.

        A client that is still stopping, because the wait for that was cancelled, begins once it has stopped.
        """
        if self.running:
            return
        super().startService()  # type: ignore[no-untyped-call]
        if not self._stops:
            self._begin()

    def _begin(self) -> None:
        self._stopping = False
        if self.registrar is not None:
            self.registrar.reopen()
        self.dialer.start()
        self.pool.start()

    def stopService(self) -> Deferred[None]:
        """Stop every port, withdraw from discovery, then close every transport and every session. Protocols are told of the end
        of their transports before the Deferred fires, except those that have paused reading what came before an end.

        A dial may succeed until the transports are closed; later ones fail. A port listens again after another start only if
        its ``startListening`` is called. Cancelling the Deferred, or a timeout of it, ends only the wait: the client goes on
        stopping. If it is called again meanwhile, each of these Deferreds fires when all are done.
        """
        super().stopService()  # type: ignore[no-untyped-call]
        return to_the_end(self._stop())

    async def _stop(self) -> None:
        self._stops += 1
        try:
            await self._stop_all()
        finally:
            self._stops -= 1
            others = self._stops
            if not others:
                if self.running:
                    self._begin()  # it was started again meanwhile
                self._stopped.fire(None)
        if others:
            await self._stopped.wait()

    async def _stop_all(self) -> None:
        for port in self.services.ports():
            await port.stopListening()
        if self.services.building:
            await deferLater(self.reactor, 0)  # a factory has called this; its transport is closed as others are
        if self.registrar is not None:
            await self.registrar.close(withdraw=True)
        self._stopping = True
        await self._close_transports()
        self.dialer.stop()
        if self._untold:
            await deferLater(self.reactor, 0)  # their protocols are told one turn after the end
        await self.pool.stop()
        self._record.close()
        self.sessions_change.fail(ClientStopped())

    async def _close_transports(self) -> None:
        for transport in self.transports:
            transport.loseConnection()
        if self.transports:
            await self.transports.when_empty(self.config.stop_timeout_s, self.reactor)
            await deferLater(self.reactor, 0)  # the last transport may have ended in a read that is still being handled
        for transport in self.transports:
            transport.abortConnection()

    def when_ready(self) -> Deferred[None]:
        """Fires once ``min_servers`` sessions, or one if no number or 0 was asked for, are up and published.

        With ``min_servers=0`` that is while a dial has a session up: before, it waits.

        Fails with ``ClientStopped`` when the client stops before, or has stopped. Fails at once with ``ConfigError`` for a
        client that has no way to find a relay, or fewer servers than ``min_servers`` and no way to find others.
        """
        return ensureDeferred(self._when_ready())

    async def _when_ready(self) -> None:
        if self._lack[1]:
            raise ConfigError(*self._lack)
        await self._connected()
        while self.registrar is not None:
            try:
                return await self.registrar.published()
            except DiscoveryUnavailable:
                if not self.running:
                    raise ClientStopped from None
                if not self._stops:
                    raise
            await self._connected()  # it was stopped and started again

    async def _connected(self) -> None:
        while self._stops or len(self.pool.sessions) < max(1, self._min_servers or 0):
            if self._stopping and not self.running:
                raise ClientStopped
            try:
                await self.sessions_change.wait()
            except ClientStopped:
                if not self.running:
                    raise

    @property
    def problem(self) -> str:
        """Why :meth:`when_ready` still waits, for people; empty if nothing is known to be wrong."""
        if self._lack[1]:
            return self._lack[1]
        problem = self.registrar.problem if self.registrar is not None else ""
        unpublished = f"the entry cannot be published: {problem}" if problem else ""
        return "; ".join(filter(None, (self.pool.problem, unpublished)))

    # --- dials and ports -------------------------------------------------------------------------------------------

    async def dial(self, target: PublicKey, service: str = "", *, timeout_s: float | None = None) -> T:
        """An open transport to ``target`` with no protocol yet: ``attach`` one. Raises ``DialError``, ``ValueError`` for a
        ``timeout_s`` below 0, and ``TypeError`` for a ``target`` that is no ``PublicKey``.

        Data that the peer sends meanwhile is buffered. Cancelling undoes everything.
        """
        return await self.open(StreamRequest(target, service), service, timeout_s)

    async def connect(self, factory: IProtocolFactory, target: PublicKey, service: str = "", **how: Any) -> IProtocol:
        """Dial and attach the protocol ``factory`` builds; ``how`` are further arguments of :meth:`dial`, which also says what
        this raises. If the factory builds no protocol, ``DialError``; an error of the factory is raised as it is. The factory
        is neither started nor stopped (``startFactory``): an endpoint does that. Cancelling undoes everything, also while the
        protocol is made and connected.
        """

        def attach(transport: T) -> IProtocol | None:
            try:
                protocol = factory.buildProtocol(cast(IAddress, transport.getPeer()))
                if not connecting.called:
                    if protocol is None:
                        raise DialError(str(target), [Attempt("accept", "", 0.0, "the factory built no protocol")])
                    transport.attach(protocol)
                if connecting.called:
                    transport.abortConnection()
            except BaseException:
                transport.abortConnection()
                raise
            return protocol

        def tell(result: Any) -> None:
            if not connecting.called:
                connecting.callback(result)
            elif isinstance(result, Failure) and not result.check(CancelledError):
                _log.failure("Unhandled error in {factory}.buildProtocol", result, factory=factory)

        # A coroutine does not learn that it is cancelled while it runs, so the factory is called while this one waits.
        connecting: Deferred[IProtocol] = Deferred(lambda _: dialing.cancel())
        dialing = ensureDeferred(self.dial(target, service, **how))
        dialing.addCallback(attach).addBoth(tell)
        return await connecting

    async def open(self, dial: Dial[S, R], service: str, timeout_s: float | None) -> T:
        """As :meth:`dial`, with the parameters in ``dial``."""
        if not isinstance(dial.target, PublicKey):
            raise TypeError(f"a peer is a PublicKey, as PublicKey.parse gives it, not {dial.target!r}")
        if timeout_s is not None and not timeout_s >= 0:  # NaN is refused too
            raise ValueError(f"timeout_s of a dial is 0 or more, not {timeout_s!r}")
        started = self.reactor.seconds()
        attempts: list[Attempt] = []
        try:
            opened = await self.dialer.dial(dial, timeout_s, attempts)
        except DialError as error:
            self._record.dialled(dial.target, None, "", error.reason, started, attempts)
            raise
        transport: T = opened.session.transport(opened.stream, service)
        self.transport_opened(opened.session, transport, accept_ms=opened.accept_ms)
        self._record.dialled(dial.target, opened.session.server, transport.security, "", started, attempts)
        return transport

    def listen(
        self,
        factory: IProtocolFactory | Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
    ) -> ListeningPort[T]:
        """Accept transports for ``service`` ("" is the default service). Raises ``CannotListenError`` if it is taken.

        ``limits`` default to those of the client's configuration.
        """
        limits = limits or self.config.listener
        port: ListeningPort[T] = ListeningPort(self, factory, service, policy=policy, limits=limits)
        port.startListening()
        return port

    # --- from ports and sessions -----------------------------------------------------------------------------------

    def refused(self, remote: PublicKey, reason: str) -> None:
        """Count a refused transport that was requested in the name of ``remote``."""
        self._record.refused(remote, reason)

    def transport_opened(
        self, session: S, transport: T, *, accept_ms: float = 0.0, closed: Callable[[T], object] | None = None
    ) -> None:
        """Note a transport that has just been opened; ``closed`` is called when it has ended."""
        first_id, relay = transport.stream.id, session.server
        self.transports.add(TransportRecord(transport, self.reactor.seconds(), first_id, relay, closed))
        self._record.opened(transport, relay, accept_ms)
        self._untold += 1
        transport.on_over = self._told
        if self.hold is not None:
            self.hold()
            transport.on_over = self._told_and_released

    def transport_closed(self, session: S, transport: T, reason: str, *, local: bool, code: int = 0) -> None:
        """Note a transport that has ended; ``code`` is the code of ``reason`` on the wire, if it has one."""
        record = self.transports.remove(transport)
        if record is None:
            return
        if record.closed is not None:
            record.closed(transport)
        self.pool.leave_idle()
        self._record.closed(record, session.server, reason, local=local, code=code)

    def session_lost(self, session: S, error: DmsgError) -> None:
        """A session was lost."""
        self._record.session_lost(session, error)
        self.pool.lost(session, error)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _told(self) -> None:
        self._untold -= 1

    def _told_and_released(self) -> None:
        self._untold -= 1
        if self.release is not None:
            self.release()

    def _endpoint_for(self, address: HostPort) -> IStreamClientEndpoint:
        # The pool enforces the exact limit itself.
        return client_endpoint(self.reactor, address, self.config.pool.connect_timeout_s)

    def _sessions_changed(self) -> None:
        sessions = self.pool.sessions.values()
        for session in sessions:
            if session not in self._noted:
                self._record.session_up(session)
        self._noted = set(sessions)
        if self.registrar is not None:
            self.registrar.set_client(self.pool.published())
        self.sessions_change.fire(None)
