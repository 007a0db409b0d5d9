"""The client: a Twisted service that keeps sessions with servers, listens, and dials by public key."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from twisted.application.service import Service
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.errors import Attempt, DialError, DmsgError, Unsupported
from dmsg.interfaces import IAccessPolicy, IDiscovery, IEventLog
from dmsg.mux.connection import ConnectionConfig
from dmsg.mux.dialer import DialConfig, Dialer, attempts_json
from dmsg.mux.listener import DEFAULT_BACKLOG, DmsgPort
from dmsg.mux.pool import PoolConfig, ServerPool
from dmsg.mux.registrar import EntryRegistrar
from dmsg.mux.session import ServerSession
from dmsg.mux.stream import Stream, StreamState
from dmsg.mux.transport import DmsgTransport
from dmsg.mux.wire import CloseReason, reason_name
from dmsg.ops import events as ev
from dmsg.sansio.jitter import Jitter


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Everything about a client that can be set, by what it concerns."""

    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    dial: DialConfig = field(default_factory=DialConfig)
    handshake_timeout_s: float = 10.0


class DmsgClient(Service):
    """A dmsg client as a Twisted service.

    ``servers`` are relays known without discovery; ``min_servers`` is how many sessions are kept up (0: only those that dials
    need). The delegated servers are published while ``publish`` is true and there is a discovery.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        *,
        discovery: IDiscovery | None = None,
        servers: Sequence[PinnedServer] = (),
        min_servers: int = 1,
        publish: bool = True,
        config: ClientConfig | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.reactor = reactor
        self.key = key
        self.public_key = key.public_key
        self.config = config or ClientConfig()
        self._events = events
        self._random = random
        self._ports: dict[str, DmsgPort] = {}
        self._ready_waiters: list[Deferred[None]] = []
        self._opened_at: dict[DmsgTransport, float] = {}
        self._min_servers = min_servers
        self.registrar: EntryRegistrar | None = None
        jitter = Jitter(random)
        if discovery is not None and publish:
            self.registrar = EntryRegistrar(discovery, key, clock=reactor, random=jitter, events=events, now_ns=now_ns)
        self.pool = ServerPool(
            reactor,
            self._make_session,
            endpoint_for or self._endpoint_for,
            discovery=discovery,
            pinned=[(server.public_key, server.address) for server in servers],
            goal=min_servers,
            config=self.config.pool,
            uniform=jitter.random,
            changed=self._sessions_changed,
            went_down=self._attempt_failed,
        )
        self.dialer = Dialer(reactor, self.pool, discovery, self.config.dial, jitter.random)

    # --- service ---------------------------------------------------------------------------------------------------

    def startService(self) -> None:
        """Begin to connect."""
        super().startService()  # type: ignore[no-untyped-call]
        self.pool.start()

    def stopService(self) -> Deferred[None]:
        """Withdraw from discovery, close every transport and every session."""
        super().stopService()  # type: ignore[no-untyped-call]
        return ensureDeferred(self._stop())

    async def _stop(self) -> None:
        for port in list(self._ports.values()):
            await port.stopListening()
        if self.registrar is not None:
            await self.registrar.close(withdraw=True)
        await self.pool.stop()
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.cancel()

    def when_ready(self) -> Deferred[None]:
        """Fires once ``min_servers`` sessions (or one for each pinned server) are up and published."""
        return ensureDeferred(self._when_ready())

    async def _when_ready(self) -> None:
        while len(self.pool.sessions) < max(1, self._min_servers):
            waiter: Deferred[None] = Deferred()
            self._ready_waiters.append(waiter)
            await waiter
        if self.registrar is not None:
            await self.registrar.published()

    # --- what an application uses ----------------------------------------------------------------------------------

    async def dial(self, target: PublicKey, service: str = "", *, timeout_s: float | None = None) -> DmsgTransport:
        """An open transport to ``target`` with no protocol yet: ``attach`` one. Raises ``DialError``.

        What the peer sends meanwhile waits. Cancelling undoes everything.
        """
        started = self.reactor.seconds()
        attempts: list[Attempt] = []
        try:
            if service:
                error = Unsupported("named services need end-to-end security", by="local")
                attempts.append(Attempt("request", "", 0.0, error.name, error))
                raise DialError(str(target), attempts)
            session, stream = await self.dialer.dial(target, timeout_s, attempts)
        except DialError as error:
            self._dial_finished(target, None, error.reason, started, attempts)
            raise
        transport = session.transport(stream, service)
        self.transport_opened(session, transport)
        self._dial_finished(target, session, "", started, attempts)
        return transport

    async def connect(
        self, factory: IProtocolFactory, target: PublicKey, service: str = "", *, timeout_s: float | None = None
    ) -> IProtocol:
        """Dial and attach the protocol ``factory`` builds."""
        transport = await self.dial(target, service, timeout_s=timeout_s)
        protocol = factory.buildProtocol(cast(IAddress, transport.getPeer()))
        if protocol is None:
            transport.abortConnection()
            raise DialError(str(target), [Attempt("accept", "", 0.0, "the factory built no protocol")])
        transport.attach(protocol)
        return protocol

    def listen(
        self,
        factory: Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        backlog: int = DEFAULT_BACKLOG,
    ) -> DmsgPort:
        """Take transports for ``service`` ("" is the default one). Raises ``CannotListenError`` if that is taken."""
        port = DmsgPort(self, factory, service, policy=policy, backlog=backlog)
        port.startListening()
        return port

    # --- from ports and sessions -----------------------------------------------------------------------------------

    def add_port(self, port: DmsgPort) -> None:
        """Register a listening port; ``ValueError`` when its service is taken."""
        if port.service in self._ports:
            raise ValueError(f"service {port.service!r} is listened on already")
        self._ports[port.service] = port

    def remove_port(self, port: DmsgPort) -> None:
        """Forget a listening port."""
        if self._ports.get(port.service) is port:
            del self._ports[port.service]

    def requested(self, session: ServerSession, stream: Stream) -> None:
        """A peer asks for a transport, or takes its request back."""
        port = self._ports.get("")
        if stream.state is StreamState.CLOSED:
            if port is not None:
                port.withdrawn(stream)
        elif port is None:
            session.refuse(stream, CloseReason.NO_SUCH_SERVICE)
        else:
            port.requested(session, stream)

    def transport_opened(self, session: ServerSession, transport: DmsgTransport) -> None:
        """Note a transport that has just been opened."""
        now = self.reactor.seconds()
        self._opened_at[transport] = now
        stream = transport.stream
        initiator, responder = self._ends(stream)
        server = str(session.server)
        self._emit(ev.TransportOpened(0, stream.id, initiator, responder, server, 0.0, transport.security))

    def transport_closed(self, session: ServerSession, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """Note a transport that is over."""
        opened = self._opened_at.pop(transport, None)
        if opened is None:
            return
        stream = transport.stream
        initiator, responder = self._ends(stream)
        self._emit(
            ev.TransportClosed(
                0,
                stream.id,
                initiator,
                responder,
                str(session.server),
                reason_name(code),
                code,
                "local" if local else "peer",
                self.reactor.seconds() - opened,
                stream.received_bytes,
                stream.sent_bytes,
                0,
                transport.security,
            )
        )

    def session_lost(self, session: ServerSession, error: DmsgError) -> None:
        """A session that was up is down."""
        up_s = self.reactor.seconds() - session.ready_at
        self._emit(ev.SessionDown(str(session.server), getattr(error, "reason", str(error)), up_s, 0))
        self.pool.lost(session, error)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ends(self, stream: Stream) -> tuple[str, str]:
        ends = (str(self.public_key), str(stream.remote))
        return ends if stream.initiator else ends[::-1]

    def _make_session(self, server: PublicKey) -> ServerSession:
        return ServerSession(
            server,
            self.key,
            self,
            self.reactor,
            config=self.config.connection,
            random=self._random,
            handshake_timeout_s=self.config.handshake_timeout_s,
        )

    def _endpoint_for(self, address: HostPort) -> IStreamClientEndpoint:
        timeout = math.ceil(self.config.pool.connect_timeout_s)  # the pool's own limit is exact
        if isIPAddress(address.host):
            return TCP4ClientEndpoint(self.reactor, address.host, address.port, timeout)
        if isIPv6Address(address.host):
            return TCP6ClientEndpoint(self.reactor, address.host, address.port, timeout)
        return HostnameEndpoint(self.reactor, address.host, address.port, timeout)

    def _sessions_changed(self) -> None:
        if self.registrar is not None:
            self.registrar.set_client(self.pool.sessions)
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.callback(None)

    def _attempt_failed(self, server: PublicKey, reason: str, attempt: int) -> None:
        self._emit(ev.SessionDown(str(server), reason, 0.0, attempt))

    def _dial_finished(
        self, target: PublicKey, session: ServerSession | None, reason: str, started: float, attempts: list[Attempt]
    ) -> None:
        if self._events is None:
            return
        server = str(session.server) if session else ""
        elapsed_ms = (self.reactor.seconds() - started) * 1000
        security = "hop" if session else ""
        self._emit(
            ev.DialFinished(
                str(target), server, session is not None, reason, elapsed_ms, attempts_json(attempts), security
            )
        )

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)
