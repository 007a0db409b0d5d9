"""A client's connection to one relay: its interface for a client, and the common part of the sessions of all protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import DmsgError, RemoteProtocolError, StageError
from dmsg.glue.shell import Shell
from dmsg.relays.errors import ServerLost
from dmsg.relays.session import CLOSED, Session
from dmsg.sansio.core import Core

#: Seconds in which a closing session has to write its queued data: a stalled network would keep it for as long as TCP retries.
_CLOSE_TIMEOUT_S: Final = 10.0


class ClientSession(Session, TypingProtocol):
    """A session that carries streams to peers."""

    def transport(self, stream: Any, service: str = "", peer: DmsgAddress | None = None) -> Any:
        """The transport over an open stream, for ``service``; ``peer`` is the peer's address, if it has been made."""

    def abort_stream(self, stream: Any) -> None:
        """End a stream at once, or refuse an offered one."""

    def turn_away(self, stream: Any, *, busy: bool) -> None:
        """End a stream that the application did not accept, for lack of room (``busy``) or for another reason."""


S = TypeVar("S", bound=ClientSession)
U = TypeVar("U", bound="SessionUser")
T = TypeVar("T")


class SessionUser(TypingProtocol):
    """The client that uses a session."""

    @property
    def scheme(self) -> str:
        """The prefix of addresses of its protocol."""

    def transport_closed(self, session: Any, transport: Any, reason: str, *, local: bool, code: int = 0) -> None:
        """A transport of ``session`` has ended; ``code`` is the code of ``reason`` on the wire, if it has one."""

    def session_lost(self, session: Any, error: DmsgError) -> None:
        """A session that was ready has ended."""


class RelaySession(ABC, Generic[U, T]):
    """One connection to one relay. It begins with the core ``core``, and ``make_transport`` makes its transports.

    ``ready`` fires once the relay has admitted it, or fails with a ``StageError``. A protocol's own class handles the
    events of its cores.
    """

    #: The core of its streams, once there is one. Its ``take_writable`` returns streams that accept data again, whose
    #: ``owner`` is then told by ``writable``.
    connection: Any = None

    def __init__(
        self,
        server: PublicKey,
        key: SecretKey,
        user: U,
        clock: IReactorTime,
        core: Core,
        make_transport: Callable[[Any, Any, DmsgAddress, DmsgAddress], T],
    ) -> None:
        self.server = server
        self.key = key
        self.identity = key.public_key
        self.clock = clock
        self.started_at = clock.seconds()
        self.ready_at = 0.0
        self.ready: Deferred[Any] = Deferred(lambda _: self.abort())
        self.is_ready = False
        self.shell = Shell(core, self, clock)
        self._cut: IDelayedCall | None = None  # cuts a connection that does not close in time
        self._user = user
        self._make_transport = make_transport
        #: This end's addresses, by the service.
        self._here: dict[str, DmsgAddress] = {}

    @property
    def spent(self) -> bool:
        """See :class:`~dmsg.relays.session.Session`: most sessions last as long as their connection."""
        return False

    @property
    @abstractmethod
    def idle(self) -> bool:
        """See :class:`~dmsg.relays.session.Session`."""

    # --- streams -----------------------------------------------------------------------------------------------------

    def transport(self, stream: Any, service: str = "", peer: DmsgAddress | None = None) -> T:
        """See :class:`ClientSession`."""
        near, far = ("", service) if stream.initiator else (service, "")
        here = self._here.get(near)
        if here is None:
            here = self._here[near] = DmsgAddress(self.identity, near, self.server, self._user.scheme)
        return self._make_transport(
            self, stream, here, peer or DmsgAddress(stream.remote, far, self.server, self._user.scheme)
        )

    def abort_stream(self, stream: Any) -> None:
        """End a stream at once, or refuse an offered one."""
        self.connection.abort(stream)
        self.flush_soon()

    def turn_away(self, stream: Any, *, busy: bool) -> None:
        """See :class:`ClientSession`; the peer is not told why."""
        self.abort_stream(stream)

    def transport_closed(self, transport: T, reason: str, *, local: bool, code: int = 0) -> None:
        """See :class:`dmsg.clients.transport.Carrier`."""
        self._user.transport_closed(self, transport, reason, local=local, code=code)

    # --- the connection ----------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""
        self.shell.flush_soon()

    def abort(self, error: DmsgError | None = None) -> None:
        """End the connection at once."""
        self.shell.fail(error or ServerLost(str(self.server), "given up"))

    def close(self) -> None:
        """End the connection once everything queued is written, or after 10 s; its transports should have ended before."""
        self.shell.flush()
        self.shell.close(ServerLost(str(self.server), CLOSED))
        if self._cut is None and not self.shell.lost:
            self._cut = self.clock.callLater(_CLOSE_TIMEOUT_S, self.shell.cut)

    # --- from the shell --------------------------------------------------------------------------------------------

    @abstractmethod
    def handle_events(self, shell: Shell, events: Any) -> None:
        """Pass on what the core found out."""

    def after_read(self, shell: Shell) -> None:
        """Send what one read has caused, which concerns only this connection."""
        shell.flush()
        self.flushed(shell)  # writers whose data was dropped may go on although nothing was written

    def flushed(self, shell: Shell) -> None:
        """Resume writers that were paused."""
        connection = self.connection
        if connection is not None:
            for stream in connection.take_writable():
                stream.owner.writable()

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """End everything on this connection, with the reason for its end."""
        if isinstance(error, ServerLost):
            loss = error
        elif error is not None:
            loss = ServerLost(str(self.server), self.reason_of(error), str(error))
        else:
            why = "closed by server" if reason.check(ConnectionDone) else "connection lost"
            loss = ServerLost(str(self.server), why, reason.getErrorMessage())
        if self._cut is not None and self._cut.active():
            self._cut.cancel()
        was_ready, self.is_ready = self.is_ready, False
        if was_ready:  # before the streams end, so that a dial made because of that does not get this session
            self._user.session_lost(self, loss)
        self.flushed(shell)  # if the record counter was used up, writers may go on although nothing was written
        self.end_streams(loss)
        if not was_ready and not self.ready.called:
            self.ready.errback(StageError("handshake", self.why_not_admitted(error), error or reason.value))

    @abstractmethod
    def end_streams(self, loss: ServerLost) -> None:
        """The connection is gone: end every stream on it."""

    # --- what a protocol may know better -----------------------------------------------------------------------------

    def admitted(self) -> None:
        """The relay lets this client open streams."""
        if self.ready.called:
            return  # given up in the read that is being handled, by an access policy that stops the client
        self.is_ready = True
        self.ready_at = self.clock.seconds()
        self.ready.callback(self)

    def reason_of(self, error: DmsgError) -> str:
        """The name in logs of ``error``, with which this side ended the connection."""
        return error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__

    def why_not_admitted(self, error: DmsgError | None) -> str:
        """Why the connection ended before the relay admitted it; ``error`` is set if this side ended it."""
        return error.reason if isinstance(error, RemoteProtocolError) else "connection lost"
