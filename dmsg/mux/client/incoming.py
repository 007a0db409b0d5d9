"""A transport that a peer asks for, from its REQUEST to the moment the application is told.

The decisions, in this order: may this key come in at all; may it speak in the clear (:ref:`spec-downgrade-rule`); which
service does it want; is it a transport that goes on (:ref:`spec-resume-exchange`); does the access policy admit it; has it
proved itself (:ref:`spec-confirmation`). While the offer waits for one of these, it holds a place
(:mod:`dmsg.clients.offers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from dmsg.clients.decision import ServiceOffer
from dmsg.clients.services import Services
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError
from dmsg.mux.client.listener import DmsgPort
from dmsg.mux.client.resumable import ResumableTransports
from dmsg.mux.client.session import ServerSession
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.client.unproved import UnprovedTransport, UnprovedTransports
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S, RESUME_CONFIRM_TIMEOUT_S, Resume
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import TransportClosed
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import UNOWNED, Stream, StreamOwner, StreamState
from dmsg.mux.core.wire import CloseReason, reason_name
from dmsg.sansio.rate import TokenBucket

_log = Logger()


class Host(TypingProtocol):
    """The client that is asked for a transport."""

    services: Services[DmsgPort]
    resumable: ResumableTransports
    unproved: UnprovedTransports

    def move_rate_of(self, transport: DmsgTransport | UnprovedTransport) -> TokenBucket:
        """How often ``transport`` may still be moved."""

    def promises(self, peer: PublicKey) -> Deferred[bool]:
        """Whether ``peer`` must not be spoken to in the clear."""

    def refused(self, remote: PublicKey, reason: str) -> None:
        """Count a refused request for a transport that came in the name of ``remote``."""


class IncomingTransport(StreamOwner, ServiceOffer[DmsgPort]):
    """The owner of an offered stream until it is open."""

    def __init__(self, client: Host, session: ServerSession, stream: PlainStream) -> None:
        super().__init__(session.server, stream.remote)
        self.stream: Stream = stream
        self._plain = stream
        self._path: SealedStream | None = None  # the new path of a transport that goes on
        self._client = client
        self._session = session
        self._services = client.services
        self._resumed: DmsgTransport | UnprovedTransport | None = None
        self._unproved: UnprovedTransport | None = None  # what is accepted here as the first path of a transport
        self._told_bytes = 0
        self._attempts: ResumeAttempts | None = None
        self._resume: Resume | None = None
        self._confirm_timer: IDelayedCall | None = None
        stream.owner = self

    def start(self) -> None:
        """Begin with the decisions about the REQUEST."""
        if self.stream.state is StreamState.CLOSED:
            self._over = True  # taken back in the same read
            return
        remote, services = self.stream.remote, self._services
        if not services.may_admit(remote) and not self._client.resumable.may_resume(remote):
            # Before the handshake is calculated: this costs next to nothing, and does not show which service is meant.
            self._refuse(CloseReason.ACCESS_DENIED)
            return
        if self._plain.wants_seal:
            self._take_up()
            return
        default = services.port("")
        if default is None or default.security is Security.E2E or not default.may_admit(remote):
            self._await_upgrade()  # in the clear there is no other service to ask for
        elif default.security is Security.HOP:
            self._choose(default, plain=True)
        elif self._hold(services.arrivals):
            self._decide(self._client.promises(remote), self._promised)

    def _promised(self, promised: object) -> None:
        if promised:
            self._await_upgrade()
        else:
            self._leave()
            self._choose(self._services.port(""), plain=True)

    def _await_upgrade(self) -> None:
        # a peer that promises end-to-end security brings its handshake in the first FWD; otherwise it is not that peer. Only the
        # handshake tells whether it wants a service or goes on with a transport
        if not self._services and not self._client.resumable.may_resume(self.stream.remote):
            self._refuse(CloseReason.NO_SUCH_SERVICE)
        elif self._hold(self._services.arrivals):
            self._session.connection.accept_for_upgrade(self._plain)
            self._await_peer()
            self._session.flush_soon()

    # --- with a handshake message ----------------------------------------------------------------------------------

    def upgraded(self) -> None:
        """The handshake message came in the first FWD."""
        if self._over or self.stream.state is StreamState.CLOSED:
            return  # closed after it in the same read
        self._stop_timer()
        self._leave()
        self._take_up()

    def _take_up(self) -> None:
        try:
            service, self._resume = self._session.connection.read_offer(self._plain)
        except TransportClosed as error:
            self._refuse(error.code)
            return
        if self._resume is not None:
            self._go_on(self._resume)
        else:
            self._choose(self._services.port(service), plain=False)

    def _go_on(self, resume: Resume) -> None:
        name = resume.token, self.stream.remote
        transport = self._client.resumable.get(*name) or self._client.unproved.get(*name)
        if transport is None:
            # A transport that is not known is admitted like a new one: a made-up token does not get past the policy.
            if not self._services:
                self._refuse(CloseReason.NO_SUCH_SERVICE)
            elif self._hold(self._services.arrivals):
                self._decide(ensureDeferred(self._services.admit(self.stream.remote)), self._unknown_admitted)
            return
        attempts = self._attempts_at(transport)
        if not attempts.may_begin(self._session.server, self._session.clock.seconds()):
            self._refuse(CloseReason.RATE_LIMITED)
            return
        self._resumed = transport
        self._told_bytes = attempts.tell_bytes()
        ours = Resume(resume.token, self._told_bytes)
        self._path, displaced = self._session.connection.accept_path(self._plain, ours, attempts)
        self._attempts = attempts
        self._accepted(self._path)
        if displaced is not None:
            displaced.owner.crowded_out()

    def _attempts_at(self, transport: DmsgTransport | UnprovedTransport) -> ResumeAttempts:
        if transport.attempts is None:
            transport.attempts = ResumeAttempts(transport.stream, self._client.move_rate_of(transport))
        return transport.attempts

    def _unknown_admitted(self, allowed: object) -> None:
        if allowed is True:
            # An answer without a word about resuming is the refusal: the relay cannot make it up.
            self._accept()
        else:
            self._refuse(CloseReason.ACCESS_DENIED)

    # --- the application's decision --------------------------------------------------------------------------------

    def _decide(self, decision: Deferred[Any], then: Callable[[object], None]) -> None:
        def answered(answer: object) -> None:
            if self.stream.state is not StreamState.CLOSED:
                then(answer)  # otherwise it was taken back in the read that is being handled, and is told so next

        super()._decide(decision, answered)

    def _choose(self, port: DmsgPort | None, *, plain: bool) -> None:
        remote = self.stream.remote
        if port is None:
            # A key that some listener does not admit gets the same answer as if it had asked for that listener.
            told = None if self._services.are_open_to(remote) else CloseReason.ACCESS_DENIED
            self._refuse(CloseReason.NO_SUCH_SERVICE, told=told)
        elif plain and port.security is Security.E2E and port.may_admit(remote):
            self._refuse(CloseReason.DOWNGRADE)
        else:
            self._put_to(port)

    def take(self, port: DmsgPort) -> None:
        """See :class:`~dmsg.clients.decision.ServiceOffer`."""
        if self._plain.wants_seal:
            if self._hold(port.offers):
                self._accept()
        else:
            self._over = True
            self._leave()
            self._session.connection.accept(self._plain)
            self._session.flush_soon()
            port.open(self._session, self.stream)

    # --- sealed ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        stream = self._session.connection.accept(self._plain)
        if self._port is not None:
            self._unproved = self._client.unproved.add(self, stream, self._port)
        self._accepted(stream)

    def _accepted(self, stream: Stream) -> None:
        self.stream = stream
        self._await_peer()
        self._session.flush_soon()

    def _await_peer(self) -> None:
        """Wait until the initiator has proved itself, but not for ever; the application is not told before."""
        timeout_s = CONFIRM_TIMEOUT_S if self._path is None else RESUME_CONFIRM_TIMEOUT_S
        self._confirm_timer = self._session.clock.callLater(timeout_s, self._not_confirmed)

    def _not_confirmed(self) -> None:
        self._confirm_timer = None
        self._refuse(CloseReason.HANDSHAKE_TIMEOUT)

    def confirmed(self) -> None:
        """The initiator's first sealed frame opened."""
        self._stop_timer()
        self._leave()
        self._over = True
        unproved, self._unproved = self._unproved, None
        if self._resumed is not None:
            assert self._path is not None
            assert self._resume is not None
            if self._resumed.is_over or self._path.is_late:
                # The proof came late: the initiator has given up this path for the one in use now, or we have given up. Data
                # that came with the proof was neither given to the application nor acknowledged.
                self._session.abort_stream(self.stream, self._resumed.farewell)
                return
            if self._attempts is not None:
                self._attempts.moved(self._session.clock.seconds())
            self._resumed.move_to(self._session, self._path, self._resume.received_bytes, self._told_bytes)
        elif unproved is not None:
            unproved.open(self._session, self.stream)
        else:
            self._session.abort_stream(self.stream, CloseReason.REFUSED)

    # --- ends ------------------------------------------------------------------------------------------------------

    def overtaken(self) -> None:
        """See :class:`~dmsg.mux.client.unproved.FirstPath`."""
        self.stream.owner = UNOWNED  # a proof that comes in this very read opens no second transport
        self._end()
        self._session.abort_stream(self.stream, CloseReason.PEER_GONE)

    def _stop_timer(self) -> None:
        timer, self._confirm_timer = self._confirm_timer, None
        if timer is not None:
            timer.cancel()

    def deny(self) -> None:
        """See :class:`~dmsg.clients.decision.PendingOffer`."""
        self._refuse(CloseReason.ACCESS_DENIED)

    def crowded_out(self) -> None:
        """See :class:`~dmsg.clients.decision.PendingOffer`."""
        self._refuse(CloseReason.BUSY)

    def _refuse(self, code: int, *, told: int | None = None) -> None:
        """Refuse for the reason ``code``, and tell the peer that reason, or ``told``."""
        self._client.refused(self.stream.remote, reason_name(code))
        self._end()
        self._session.abort_stream(self.stream, code if told is None else told)

    def _end(self) -> None:
        self._stop_timer()
        if self._attempts is not None:
            self._attempts.failed(self.stream)
        unproved, self._unproved = self._unproved, None
        if unproved is not None:
            unproved.forget()
        super()._end()

    def ended(self, code: int, *, local: bool, proven: bool = False, detail: str = "") -> None:
        """The peer gave up, or sent something wrong; or the relay says that the path is gone."""
        if local and not self._over:
            self._client.refused(self.stream.remote, reason_name(code))
        if not local and not proven and code != CloseReason.NORMAL:  # a dial that is given up ends as "normal"
            self._lose_path()
        self._end()

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection is gone."""
        self._lose_path()
        self._end()

    def _lose_path(self) -> None:
        """To the initiator, the transport may be open: wait for its next path."""
        unproved, self._unproved = self._unproved, None
        if unproved is not None:
            self.stream.owner = UNOWNED  # it is kept, and this offer is not
            self._client.unproved.lost(unproved, self._share)
