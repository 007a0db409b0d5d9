"""The client: a Twisted service that keeps sessions with servers, listens, and dials by public key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater

from dmsg.address import HostPort, PinnedServer, check_service_name
from dmsg.clients.config import RelayClientConfig
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.service import RelayClient
from dmsg.clients.services import Services
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import BASE_VERSION, SECURE_VERSION
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.errors import Attempt, DialError, DmsgError
from dmsg.glue.processor import uses_aes
from dmsg.interfaces import IAccessPolicy, IDiscovery, IEventLog
from dmsg.mux.client.dial import DialRequest
from dmsg.mux.client.incoming import IncomingTransport
from dmsg.mux.client.listener import DmsgPort
from dmsg.mux.client.pending import OpenedPath
from dmsg.mux.client.resumable import ResumableTransports
from dmsg.mux.client.session import ServerSession
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.client.unproved import UnprovedTransport, UnprovedTransports
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import Refused
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.wire import CloseReason
from dmsg.relays.choice import RelayChoice
from dmsg.sansio.backoff import SHORTEST_PAUSE_S, Backoff
from dmsg.sansio.rate import TokenBucket, check_limits, check_more_than_zero


@dataclass(frozen=True, slots=True)
class ClientConfig(RelayClientConfig):
    """All settings of a client, grouped by subject."""

    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    #: Whether to speak the extension with servers; without it carrier A is not available.
    extended: bool = True
    #: Whether AES-256-GCM is used with servers and peers that use it, too (:ref:`spec-ciphers`); ``None`` where this
    #: processor has instructions for it.
    aes: bool | None = None
    #: How long a transport may be without a path (:ref:`spec-resumption`); 0 switches resumption off.
    resume_grace_s: float = 30.0
    #: The pause between two searches for a path: the first, and the longest it grows to.
    resume_pause_s: float = 0.2
    resume_pause_limit_s: float = 2.0
    #: How often a transport may move, whichever side opened it, in the long run and at once. An honest transport behind a relay
    #: that cuts every second needs one move a second; each costs this side two key agreements and up to a window sent again.
    resume_rate_per_s: float = 2.0
    resume_burst: int = 16

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a search without pauses, and for transports that may never move."""
        RelayClientConfig.__post_init__(self)  # super() would fail: with slots, dataclass replaces this class
        check_more_than_zero(self, "resume_pause_s", "resume_pause_limit_s")
        check_limits(self)


class DmsgClient(RelayClient[ServerSession, OpenedPath[ServerSession], DmsgTransport]):
    """A dmsg client as a Twisted service.

    ``security``, a ``Security`` or its text (here and in what follows), says what the relay may read of transports; the other
    arguments are those of :class:`~dmsg.clients.service.RelayClient`.
    """

    scheme = "dmsg"
    config_class = ClientConfig
    config: ClientConfig

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        *,
        discovery: IDiscovery | None = None,
        servers: Sequence[PinnedServer] = (),
        min_servers: int | None = None,
        publish: bool | EntryRegistrar = True,
        security: Security | str = Security.PREFER,
        config: ClientConfig | None = None,
        events: IEventLog | None = None,
        relay_file: str | os.PathLike[str] | None = None,
        relays: RelayChoice | None = None,
        random: Random = os.urandom,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.security = security = Security(security)
        self.resumable = ResumableTransports()
        self.services: Services[DmsgPort]
        super().__init__(
            reactor,
            key,
            config=config,
            discovery=discovery,
            servers=servers,
            min_servers=min_servers,
            publish=publish,
            events=events,
            relay_file=relay_file,
            relays=relays,
            random=random,
            endpoint_for=endpoint_for,
            now_ns=now_ns,
            promise=BASE_VERSION if security is Security.HOP else SECURE_VERSION,
        )
        self._buffers = Buffers(self.config.connection.shared_buffer_bytes)
        limits = self.config.listener
        self.unproved = UnprovedTransports(
            reactor,
            self.resumable,
            self.config.resume_grace_s,
            limit=limits.offers,
            limit_per_share=limits.offers_per_key,
        )

    def make_session(self, relay: PublicKey) -> ServerSession:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        return ServerSession(
            relay,
            self.key,
            self,
            self.reactor,
            config=self.config.connection,
            buffers=self._buffers,
            random=self._random,
            handshake_timeout_s=self.config.handshake_timeout_s,
            extended=self.config.extended,
            aes=uses_aes(self.config.aes),
        )

    @property
    def in_haste(self) -> bool:
        """Whether any transport waits for another path, or will: a session is forgotten before its transports are told."""
        return self.config.resume_grace_s > 0 and any(transport.wants_path for transport in self.transports)

    # --- what an application uses ----------------------------------------------------------------------------------

    async def dial(
        self,
        target: PublicKey,
        service: str = "",
        *,
        security: Security | str | None = None,
        timeout_s: float | None = None,
    ) -> DmsgTransport:
        """An open transport to ``target`` with no protocol yet: ``attach`` one. Raises ``DialError``.

        Data that the peer sends before that waits. ``security`` is the client's unless given. ``timeout_s`` is in seconds.
        Cancelling undoes everything. Wrong arguments raise ``ValueError`` (``InvalidAddress`` for a service name), or
        ``TypeError`` for a ``target`` that is no ``PublicKey``.
        """
        chosen = Security(security) if security else self.security
        return await self.open(DialRequest(target, check_service_name(service), chosen), service, timeout_s)

    def listen(
        self,
        factory: IProtocolFactory | Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        security: Security | str | None = None,
    ) -> DmsgPort:
        """Accept transports for ``service`` ("" is the default one). Raises ``CannotListenError`` if that is taken,
        ``InvalidAddress`` for a name that is too long, and ``TypeError`` for a ``policy`` that is none.

        ``limits`` and ``security`` come from the client unless given, with one exception: with a ``policy``, a client's
        ``PREFER`` becomes ``E2E`` unless ``PREFER`` is given here, since in the clear a key is only the relay's word.
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

    def transport_opened(
        self,
        session: ServerSession,
        transport: DmsgTransport,
        *,
        accept_ms: float = 0.0,
        closed: Callable[[DmsgTransport], object] | None = None,
    ) -> None:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        transport.token = transport.stream.token
        if transport.token:
            self.resumable.add(transport)
        super().transport_opened(session, transport, accept_ms=accept_ms, closed=closed)

    def transport_closed(
        self, session: ServerSession, transport: DmsgTransport, reason: str, *, local: bool, code: int = 0
    ) -> None:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        if transport.token:
            self.resumable.remove(transport)
        if code == CloseReason.INTEGRITY and transport.stream.initiator:
            # No honest relay alters data: the next dial of the application should not lead through this one.
            self.pool.scores.refused(session.server, self.reactor.seconds())
        super().transport_closed(session, transport, reason, local=local, code=code)

    # --- resumption ------------------------------------------------------------------------------------------------

    def path_lost(self, session: ServerSession, transport: DmsgTransport, error: DmsgError) -> float:
        """A transport needs another path: its initiator looks for one, its responder waits to be found."""
        if self._stopping or transport not in self.transports:
            return 0.0
        if session.is_ready:
            transport.note_ended_by(session.server)
        grace_s = self.config.resume_grace_s
        if grace_s > 0 and transport.stream.initiator:
            search = ensureDeferred(self._search(transport, error, self.reactor.seconds()))
            search.addErrback(lambda failure: failure.trap(CancelledError))
            if not search.called:
                transport.search = search
        return grace_s

    async def _search(self, transport: DmsgTransport, cause: DmsgError, since: float) -> None:
        with self.dialer.searching(transport.stream.remote):
            await self._search_on(transport, cause, since)

    async def _search_on(self, transport: DmsgTransport, cause: DmsgError, since: float) -> None:
        config = self.config
        backoff = Backoff(config.resume_pause_s, config.resume_pause_limit_s, least=0.5, spread=1.0)
        failures = 0
        attempts: list[Attempt] = []
        while transport.detached:
            rate = self.move_rate_of(transport)
            wait_s = rate.wait_s(self.reactor.seconds())
            if wait_s > 0:  # the relay, or the peer, cuts each path at once
                await deferLater(self.reactor, max(SHORTEST_PAUSE_S, wait_s))
                continue
            stream = transport.stream
            told_bytes = stream.resume_bytes
            resume = Resume(transport.token, told_bytes)
            request = DialRequest(stream.remote, "", Security.E2E, resume, transport.ended_by)
            attempts.clear()
            try:
                opened = await self.dialer.dial(request, None, attempts)
            except DialError as error:
                transport.failed_to_resume(error)
                failures += 1
                await deferLater(self.reactor, backoff.pause_s(failures, self._uniform))
                continue
            transport.search = None
            if opened.resume is None or not transport.detached:
                opened.session.abort_stream(opened.stream)
                refusal = Refused("the peer does not know this transport any more")
                transport.failed_to_resume(refusal)
                transport.give_up(refusal)
                return
            rate.take(self.reactor.seconds())
            if transport.move_to(opened.session, opened.stream, opened.resume.received_bytes, told_bytes):
                self.resumed(transport, cause, since)

    def move_rate_of(self, transport: DmsgTransport | UnprovedTransport) -> TokenBucket:
        """How often ``transport`` may still be moved, by this side or by its peer."""
        if transport.move_rate is None:
            config, now = self.config, self.reactor.seconds()
            transport.move_rate = TokenBucket(config.resume_rate_per_s, config.resume_burst, now)
        return transport.move_rate

    def resumed(self, transport: DmsgTransport, cause: DmsgError | None, since: float) -> None:
        """Note that a transport goes on over another path."""
        server = str(transport.getHost().server_public_key)
        reason = getattr(cause, "name", type(cause).__name__ if cause is not None else "moved")
        self._record.resumed(transport.stream, server, reason, since)

    async def _close_transports(self) -> None:
        self.unproved.clear()
        for transport in self.transports:
            transport.stop_search()
        await super()._close_transports()
