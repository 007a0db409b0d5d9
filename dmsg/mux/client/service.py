"""The client: a Twisted service that keeps sessions with servers, listens, and dials by public key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater

from dmsg.address import HostPort, PinnedServer, check_service_name
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import BASE_VERSION, SECURE_VERSION
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.errors import Attempt, DialError, DmsgError
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import RefusalReport
from dmsg.glue.connecting import client_endpoint
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IAccessPolicy, IDiscovery, IEventLog
from dmsg.mux.client.dialer import DialConfig, Dialer, DialRequest, attempts_json
from dmsg.mux.client.incoming import IncomingTransport
from dmsg.mux.client.listener import DmsgPort
from dmsg.mux.client.records import TransportRecord, TransportRecords
from dmsg.mux.client.services import Services
from dmsg.mux.client.session import ServerSession
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import Refused
from dmsg.mux.core.limits import ConnectionConfig, ListenerLimits
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import reason_name
from dmsg.relays.choice import RelayChoice
from dmsg.relays.pool import PoolConfig, SessionPool
from dmsg.relays.scores import RelayScores, ScoreConfig
from dmsg.relays.state import RelayFile
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Everything about a client that can be set, by what it concerns."""

    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    dial: DialConfig = field(default_factory=DialConfig)
    scores: ScoreConfig = field(default_factory=ScoreConfig)
    listener: ListenerLimits = field(default_factory=ListenerLimits)
    handshake_timeout_s: float = 10.0
    #: Whether to speak the extension with servers; without it carrier A is not to be had.
    extended: bool = True
    #: How long a transport may be without a path (:ref:`spec-resumption`); 0 switches resumption off.
    resume_grace_s: float = 30.0
    #: The pause between two searches for a path: the first, and the longest it grows to.
    resume_pause_s: float = 0.2
    resume_pause_limit_s: float = 2.0
    #: How often the peer may move a transport it opened, in the long run and at once. An honest one behind a relay that
    #: cuts every second needs one a second; each costs this side two key agreements and up to a window sent again.
    resume_rate_per_s: float = 2.0
    resume_burst: int = 16
    #: What is written when the client stops has this long to arrive.
    stop_timeout_s: float = 2.0


class DmsgClient(Service):
    """A dmsg client as a Twisted service.

    ``servers`` are relays known without discovery, which are kept connected. ``min_servers`` is how many sessions are kept up
    (0: only those that dials need). By default two are, with relays of different network groups, where discovery lists relays
    of more than one group and ``servers`` is empty; one is enough to be ready. The delegated servers are published while
    ``publish`` is true and there is a discovery. A discovery that hands out relay ranks
    (:class:`~dmsg.interfaces.IRankedDiscovery`) is listened to when servers are chosen.
    ``relay_file`` is where relays that worked are kept for the next run (:class:`~dmsg.relays.state.RelayFile`), one file for
    each key and discovery; without it, nothing is kept. ``relays`` is an operator's list
    (:class:`~dmsg.relays.operator_list_source.RelayListSource`), started and stopped by the caller.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        *,
        discovery: IDiscovery | None = None,
        servers: Sequence[PinnedServer] = (),
        min_servers: int | None = None,
        publish: bool = True,
        security: Security = Security.PREFER,
        config: ClientConfig | None = None,
        events: IEventLog | None = None,
        relay_file: str | os.PathLike[str] | None = None,
        relays: RelayChoice | None = None,
        random: Random = os.urandom,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.reactor = reactor
        self.key = key
        self.public_key = key.public_key
        self.security = security
        self.config = config or ClientConfig()
        self._events = events
        self._random = random
        self.services: Services[DmsgPort] = Services(self.config.listener)
        #: Fires whenever a session comes or goes.
        self.sessions_change: Waiters[None] = Waiters()
        self.transports = TransportRecords()
        self._report = RefusalReport(reactor, self._emit)
        self._stopping = False
        self._noted: set[ServerSession] = set()
        self._seen: set[PublicKey] = set()
        self._min_servers = min_servers
        self.registrar: EntryRegistrar | None = None
        jitter = Jitter(random)
        self._uniform = jitter.random
        if discovery is not None and publish:
            version = BASE_VERSION if security is Security.HOP else SECURE_VERSION
            self.registrar = EntryRegistrar(
                discovery, key, clock=reactor, random=jitter, events=events, now_ns=now_ns, version=version
            )
        self.pool = SessionPool(
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
            urgent=lambda: self.transports.any_detached,
            scores=RelayScores(self.config.scores),
            memory=RelayFile(relay_file, lambda: now_ns() / 1e9) if relay_file is not None else None,
            operator=relays,
            now_s=lambda: now_ns() / 1e9,
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
        for port in self.services.ports():
            await port.stopListening()
        if self.registrar is not None:
            await self.registrar.close(withdraw=True)
        await self._close_transports()
        await self.pool.stop()
        self._report.close()
        self.sessions_change.cancel()

    async def _close_transports(self) -> None:
        self._stopping = True
        for record in self.transports:
            record.stop_search()
        for record in self.transports:
            record.transport.loseConnection()
        if self.transports:
            await self.transports.when_empty(self.config.stop_timeout_s, self.reactor)
            await deferLater(self.reactor, 0)  # the last one has ended in a read that is still being handled
        for record in self.transports:
            record.transport.abortConnection()

    def when_ready(self) -> Deferred[None]:
        """Fires once ``min_servers`` sessions, or one if no number was asked for, are up and published."""
        return ensureDeferred(self._when_ready())

    async def _when_ready(self) -> None:
        while len(self.pool.sessions) < max(1, self._min_servers or 0):
            await self.sessions_change.wait()
        if self.registrar is not None:
            await self.registrar.published()

    # --- what an application uses ----------------------------------------------------------------------------------

    async def dial(
        self,
        target: PublicKey,
        service: str = "",
        *,
        security: Security | None = None,
        timeout_s: float | None = None,
    ) -> DmsgTransport:
        """An open transport to ``target`` with no protocol yet: ``attach`` one. Raises ``DialError``.

        What the peer sends meanwhile waits. ``security`` is the client's own unless given. Cancelling undoes everything.
        """
        request = DialRequest(target, check_service_name(service), security or self.security)
        started = self.reactor.seconds()
        attempts: list[Attempt] = []
        try:
            opened = await self.dialer.dial(request, timeout_s, attempts)
        except DialError as error:
            self._dial_finished(target, None, error.reason, started, attempts)
            raise
        transport = opened.session.transport(opened.stream, service)
        transport.accept_ms = opened.accept_ms
        self.transport_opened(opened.session, transport)
        self._dial_finished(target, transport, "", started, attempts)
        return transport

    async def connect(
        self,
        factory: IProtocolFactory,
        target: PublicKey,
        service: str = "",
        *,
        security: Security | None = None,
        timeout_s: float | None = None,
    ) -> IProtocol:
        """Dial and attach the protocol ``factory`` builds."""
        transport = await self.dial(target, service, security=security, timeout_s=timeout_s)
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
        limits: ListenerLimits | None = None,
        security: Security | None = None,
    ) -> DmsgPort:
        """Take transports for ``service`` ("" is the default one). Raises ``CannotListenError`` if that is taken.

        ``limits`` are those of the client's configuration unless given. So is ``security``, with one exception: under a
        ``policy``, ``PREFER`` has to be asked for here. Otherwise it becomes ``E2E``, since in the clear a key is only
        the relay's word.
        """
        if security is None:
            listed = policy is not None and self.security is Security.PREFER
            security = Security.E2E if listed else self.security
        limits = limits or self.config.listener
        port = DmsgPort(self, factory, service, policy=policy, limits=limits, security=security)
        port.startListening()
        return port

    # --- from ports and sessions -----------------------------------------------------------------------------------

    def promises(self, peer: PublicKey) -> Deferred[bool]:
        """Whether a peer must not be spoken to in the clear."""
        return ensureDeferred(self.dialer.promises(peer))

    def requested(self, session: ServerSession, stream: PlainStream) -> None:
        """A peer asks for a transport."""
        IncomingTransport(self, session, stream).start()

    def refused(self, remote: PublicKey, code: int) -> None:
        """Count a transport that was asked for in the name of ``remote`` and refused."""
        if self._events is not None:
            self._report.add(0, str(remote), "transport", reason_name(code))

    def transport_opened(self, session: ServerSession, transport: DmsgTransport, port: DmsgPort | None = None) -> None:
        """Note a transport that has just been opened; ``port`` is where it came in."""
        stream = transport.stream
        transport.token = stream.token
        self.transports.add(TransportRecord(transport, self.reactor.seconds(), stream.id, str(session.server), port))
        if self._events is not None:
            ends = (*self._ends(stream), str(session.server))
            self._emit(ev.TransportOpened(0, stream.id, *ends, transport.accept_ms, transport.security))

    def transport_closed(self, session: ServerSession, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """Note a transport that is over."""
        record = self.transports.remove(transport)
        if record is None:
            return
        if record.port is not None:
            record.port.transport_closed(transport)
        record.stop_search()
        if self._events is None:
            return
        stream = transport.stream
        self._emit(
            ev.TransportClosed(
                0,
                stream.id,
                *self._ends(stream),
                str(session.server),
                Reason.of(reason_name(code)),
                code,
                "local" if local else "peer",
                self.reactor.seconds() - record.since_s,
                stream.received_bytes,
                stream.sent_bytes,
                0,
                transport.security,
                record.first_id,
                record.first_server,
            )
        )

    # --- resumption ------------------------------------------------------------------------------------------------

    def path_lost(self, session: ServerSession, transport: DmsgTransport, error: DmsgError) -> float:
        """A transport needs another path: its initiator looks for one, its responder waits to be found."""
        record = self.transports.get(transport)
        if self._stopping or record is None:
            return 0.0
        grace_s = self.config.resume_grace_s
        if grace_s > 0 and transport.stream.initiator:
            search = ensureDeferred(self._search(record, error, self.reactor.seconds()))
            search.addErrback(lambda failure: failure.trap(CancelledError))
            if not search.called:
                record.search = search
        return grace_s

    async def _search(self, record: TransportRecord, cause: DmsgError, since: float) -> None:
        transport, config = record.transport, self.config
        backoff = Backoff(config.resume_pause_s, config.resume_pause_limit_s, least=0.5, spread=1.0)
        failures = 0
        attempts: list[Attempt] = []
        while transport.detached:
            stream = transport.stream
            told_bytes = stream.resume_bytes
            request = DialRequest(stream.remote, "", Security.E2E, Resume(transport.token, told_bytes))
            attempts.clear()
            try:
                opened = await self.dialer.dial(request, None, attempts)
            except DialError as error:
                transport.failed_to_resume(error)
                failures += 1
                await deferLater(self.reactor, backoff.pause_s(failures, self._uniform))
                continue
            record.search = None
            if opened.resume is None or not transport.detached:
                opened.session.abort_stream(opened.stream)
                refusal = Refused("the peer does not know this transport any more")
                transport.failed_to_resume(refusal)
                transport.give_up(refusal)
                return
            transport.move_to(opened.session, opened.stream, opened.resume.received_bytes, told_bytes)
            self.resumed(transport, cause, since)

    def resumed(self, transport: DmsgTransport, cause: DmsgError | None, since: float) -> None:
        """Note that a transport goes on over another path."""
        if self._events is not None:
            stream = transport.stream
            server = str(transport.getHost().server_public_key)
            elapsed_ms = (self.reactor.seconds() - since) * 1000
            reason = getattr(cause, "name", type(cause).__name__ if cause is not None else "moved")
            self._emit(ev.TransportResumed(stream.id, *self._ends(stream), server, Reason.of(reason), elapsed_ms))

    def session_lost(self, session: ServerSession, error: DmsgError) -> None:
        """A session that was up is down."""
        up_s = self.reactor.seconds() - session.ready_at
        reason = Reason.of(getattr(error, "reason", type(error).__name__))
        self._emit(ev.SessionDown(str(session.server), reason, up_s, 0))
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
            extended=self.config.extended,
        )

    def _endpoint_for(self, address: HostPort) -> IStreamClientEndpoint:
        # The pool's own limit is exact.
        return client_endpoint(self.reactor, address, self.config.pool.connect_timeout_s)

    def _sessions_changed(self) -> None:
        sessions = self.pool.sessions
        for server, session in sessions.items():
            if session not in self._noted:
                reason = Reason.RECONNECT if server in self._seen else Reason.FIRST
                self._emit(ev.SessionUp(str(server), reason, session.ready_at - session.started_at, 1))
                self._seen.add(server)
        self._noted = set(sessions.values())
        if self.registrar is not None:
            self.registrar.set_client(self.pool.sessions)
        self.sessions_change.fire(None)

    def _attempt_failed(self, server: PublicKey, reason: str, attempt: int) -> None:
        self._emit(ev.SessionDown(str(server), Reason.of(reason), 0.0, attempt))

    def _dial_finished(
        self, target: PublicKey, transport: DmsgTransport | None, reason: str, started: float, attempts: list[Attempt]
    ) -> None:
        if self._events is None:
            return
        server = str(transport.getHost().server_public_key) if transport else ""
        security = transport.security if transport else ""
        elapsed_ms = (self.reactor.seconds() - started) * 1000
        tree = attempts_json(attempts)
        ok, initiator = transport is not None, str(self.public_key)
        self._emit(ev.DialFinished(str(target), server, ok, Reason.of(reason), elapsed_ms, tree, security, initiator))

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)
