"""A transport that a peer asks for, from its REQUEST to the moment the application is told.

What is decided in which order: may this peer speak in the clear (extension, section 1); which service does it want; is
it a transport that goes on (section 8); does the access policy admit it; has it proved itself (section 2).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, maybeDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, TransportClosed
from dmsg.mux.negotiation import Security
from dmsg.mux.pending import StreamOwner
from dmsg.mux.secure import CONFIRM_TIMEOUT_S, Resume
from dmsg.mux.secure_stream import SecureStream
from dmsg.mux.stream import Stream, StreamState
from dmsg.mux.wire import CloseReason

if TYPE_CHECKING:
    from dmsg.mux.client import DmsgClient
    from dmsg.mux.listener import DmsgPort
    from dmsg.mux.session import ServerSession
    from dmsg.mux.transport import DmsgTransport

_log = Logger()


class IncomingTransport(StreamOwner):
    """The owner of an offered stream until it is open."""

    def __init__(self, client: DmsgClient, session: ServerSession, stream: Stream) -> None:
        self.stream = stream
        self._client = client
        self._session = session
        self._inbound = session.inbound(stream)
        self._port: DmsgPort | None = None
        self._resumed: DmsgTransport | None = None
        self._told_bytes = 0
        self._attempt = 0
        self._resume: Resume | None = None
        self._decision: Deferred[object] | None = None
        self._confirm_timer: IDelayedCall | None = None
        self._over = False
        stream.owner = self

    def start(self) -> None:
        """Take the REQUEST up."""
        if self.stream.state is StreamState.CLOSED:
            self._over = True  # taken back in the same read
            return
        if not self._inbound.is_plain:
            self._take_up(None)
            return
        default = self._client.port("")
        if default is not None and default.security is Security.HOP:
            self._choose(default, plain=True)
        elif default is not None and default.security is Security.PREFER:
            self._decide(self._client.promises(self.stream.remote), self._promised)
        else:
            self._promised(True)

    def _promised(self, promised: object) -> None:
        if not promised:
            self._choose(self._client.port(""), plain=True)
            return
        # The service is not known yet; until it is, the wait counts for the default listener, or any there is.
        port = self._client.port("") or self._client.any_port()
        if port is None:
            self._refuse(CloseReason.NO_SUCH_SERVICE)
        elif port.waiting >= port.backlog:
            self._refuse(CloseReason.BUSY)
        else:
            # who promises end-to-end security brings its handshake in the first FWD, or is not who it seems to be
            self._port = port
            self._session.connection.accept(self.stream, upgrade=True)
            self._await_peer()
            self._session.flush_soon()

    # --- with a handshake message ----------------------------------------------------------------------------------

    def upgraded(self, message: bytes) -> None:
        """The handshake message came in the first FWD; a second one is nothing an honest peer sends."""
        if self._over or self.stream.state is StreamState.CLOSED:
            return  # closed behind it in the same read
        if self._inbound.is_sealed:
            self._refuse(CloseReason.MALFORMED)
        else:
            if self._stop_timer() and self._port is not None:
                self._port.waiting -= 1
            self._port = None
            self._take_up(message)

    def _take_up(self, message: bytes | None) -> None:
        try:
            service, self._resume = self._inbound.read(message)
        except TransportClosed as error:
            self._refuse(error.code)
            return
        if self._resume is not None:
            self._go_on(self._resume)
        else:
            self._choose(self._client.port(service), plain=False)

    def _go_on(self, resume: Resume) -> None:
        transport = self._client.resumable(resume.token, self.stream.remote)
        if transport is None:
            # An answer that says nothing about resuming is the refusal: the relay cannot make that one up.
            self._accept(None)
            return
        self._resumed = transport
        transport.attempts += 1
        self._attempt = transport.attempts
        earlier = transport.stream
        assert isinstance(earlier, SecureStream)
        self._told_bytes = earlier.resume_bytes
        self._accept(Resume(resume.token, self._told_bytes))
        if isinstance(self.stream, SecureStream):
            self.stream.await_turn(earlier, self._told_bytes)

    # --- the application's decision --------------------------------------------------------------------------------

    def _choose(self, port: DmsgPort | None, *, plain: bool) -> None:
        if port is None:
            self._refuse(CloseReason.NO_SUCH_SERVICE)
        elif plain and port.security is Security.E2E:
            self._refuse(CloseReason.DOWNGRADE)
        elif port.waiting >= port.backlog:
            self._refuse(CloseReason.BUSY)
        elif port.policy is None:
            self._port = port
            self._admitted(True)
        else:
            self._port = port
            port.waiting += 1
            policy, remote, service = port.policy, self.stream.remote, port.service

            def ask() -> object:
                answer = policy.allow(remote, service)
                return ensureDeferred(answer) if isinstance(answer, Coroutine) else answer

            self._decide(maybeDeferred(ask), self._policy_answered)

    def _policy_answered(self, allowed: object) -> None:
        assert self._port is not None
        self._port.waiting -= 1
        self._admitted(allowed)

    def _admitted(self, allowed: object) -> None:
        if allowed is not True:
            self._refuse(CloseReason.ACCESS_DENIED)
        elif self._inbound.is_sealed:
            self._accept(None)
        else:
            assert self._port is not None
            self._session.connection.accept(self.stream)
            self._session.flush_soon()
            self._port.open(self._session, self.stream)

    def _decide(self, decision: object, then: object) -> None:
        """Call ``then`` with what ``decision`` (a value or a Deferred) comes to, unless the peer gives up before."""
        if not isinstance(decision, Deferred):
            then(decision)  # type: ignore[operator]
            return
        self._decision = decision

        def answered(answer: object) -> None:
            self._decision = None
            if not self._over:
                then(answer)  # type: ignore[operator]

        def failed(failure: Failure) -> None:
            self._decision = None
            if self._port is not None:
                self._port.waiting -= 1
            if not self._over:
                if failure.check(CancelledError) is None:
                    _log.failure("The access policy failed; access is denied", failure=failure)
                self._refuse(CloseReason.ACCESS_DENIED)

        decision.addCallbacks(answered, failed)

    # --- sealed ----------------------------------------------------------------------------------------------------

    def _accept(self, resume: Resume | None) -> None:
        try:
            if self.stream.state is StreamState.OFFERED:
                self.stream = self._inbound.accept(resume)
            else:
                self.stream = self._inbound.accept_upgrade(resume)
        except DmsgError as error:
            self._refuse(getattr(error, "code", CloseReason.MALFORMED))
            return
        self._await_peer()
        self._session.flush_soon()

    def _await_peer(self) -> None:
        """Nothing is done for the application before the initiator has proved itself; not for ever, though."""
        if self._port is not None:
            self._port.waiting += 1
        self._confirm_timer = self._session.clock.callLater(CONFIRM_TIMEOUT_S, self._not_confirmed)

    def _not_confirmed(self) -> None:
        self._confirm_timer = None
        self._refuse(CloseReason.HANDSHAKE_TIMEOUT, waited=True)

    def confirmed(self) -> None:
        """The initiator's first sealed frame opened."""
        waited = self._stop_timer()
        self._over = True
        if self._resumed is not None:
            assert isinstance(self.stream, SecureStream)
            assert self._resume is not None
            if self._resumed.is_over or self._attempt < self._resumed.attempt:
                # the proof was long on its way: the initiator has given this path up for the one in use now
                self._session.abort_stream(self.stream, CloseReason.PEER_GONE)
                return
            self._resumed.attempt = self._attempt
            self._resumed.move_to(self._session, self.stream, self._resume.received_bytes, self._told_bytes)
        elif self._port is not None:
            self._port.waiting -= int(waited)
            self._port.open(self._session, self.stream)
        else:
            self._session.abort_stream(self.stream, CloseReason.REFUSED)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _stop_timer(self) -> bool:
        timer, self._confirm_timer = self._confirm_timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _refuse(self, code: int, *, waited: bool = False) -> None:
        self._client.refused(self.stream.remote, code)
        self._end(waited=waited)
        self._session.abort_stream(self.stream, code)

    def _end(self, *, waited: bool = False) -> None:
        self._over = True
        if (self._stop_timer() or waited) and self._port is not None:
            self._port.waiting -= 1
        if self._decision is not None:
            self._decision.cancel()

    def ended(self, code: int, *, local: bool, proven: bool = False) -> None:
        """The peer gave up, or what it sent was not what it should be."""
        if local and not self._over:
            self._client.refused(self.stream.remote, code)
        self._end()

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection is gone."""
        self._end()
