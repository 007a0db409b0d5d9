"""A client's connection to one relay: what a client needs of it, and what the sessions of all protocols have in common."""

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

#: What is written when a session is closed has this long to leave, in seconds: a network that takes nothing would keep the
#: session for as long as TCP tries.
_CLOSE_TIMEOUT_S: Final = 10.0


class ClientSession(Session, TypingProtocol):
    """A session that streams to peers go through."""

    def transport(self, stream: Any, service: str = "", peer: DmsgAddress | None = None) -> Any:
        """The transport over an open stream, for ``service``; ``peer`` is the peer's address, if it has been made."""

    def abort_stream(self, stream: Any) -> None:
        """End a stream at once, or refuse an offered one."""

    def turn_away(self, stream: Any, *, busy: bool) -> None:
        """End a stream that the application did not take: for want of room, or because it does not want it."""


S = TypeVar("S", bound=ClientSession)
U = TypeVar("U", bound="SessionUser")
T = TypeVar("T")


class SessionUser(TypingProtocol):
    """Who a session works for: the client."""

    @property
    def scheme(self) -> str:
        """What addresses of its protocol begin with."""

    def transport_closed(self, session: Any, transport: Any, reason: str, *, local: bool, code: int = 0) -> None:
        """A transport of ``session`` is over; ``code`` is what stands for ``reason`` on the wire, if anything does."""

    def session_lost(self, session: Any, error: DmsgError) -> None:
        """A session that was ready is over."""


class RelaySession(ABC, Generic[U, T]):
    """One connection to one relay, which begins with ``core``, and whose transports ``make_transport`` makes.

    ``ready`` fires once the relay has admitted it, or fails with a ``StageError``. A protocol's own class handles the
    events of its cores.
    """

    #: The core of its streams, once there is one. Its ``take_writable`` gives those that take data again, each with an
    #: ``owner`` that is told by ``writable``.
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
        self._cut: IDelayedCall | None = None  # what ends a connection that does not close
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
        """End the connection once everything queued is written, or after some seconds; transports on it should be over."""
        self.shell.flush()
        self.shell.close(ServerLost(str(self.server), CLOSED))
        if self._cut is None and not self.shell.lost:
            self._cut = self.clock.callLater(_CLOSE_TIMEOUT_S, self.shell.cut)

    # --- from the shell --------------------------------------------------------------------------------------------

    @abstractmethod
    def handle_events(self, shell: Shell, events: Any) -> None:
        """Pass on what the core found out."""

    def after_read(self, shell: Shell) -> None:
        """Send what came of one read; only this connection is concerned."""
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Let writers go on that were told to pause."""
        connection = self.connection
        if connection is not None:
            for stream in connection.take_writable():
                stream.owner.writable()

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """End everything on this connection with the reason it ended for."""
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
        if was_ready:  # before the streams end: who dials again when told of that must not get this session
            self._user.session_lost(self, loss)
        self.end_streams(loss)
        if not was_ready and not self.ready.called:
            self.ready.errback(StageError("handshake", self.why_not_admitted(error), error or reason.value))

    @abstractmethod
    def end_streams(self, loss: ServerLost) -> None:
        """The connection is gone: end every stream on it."""

    # --- what a protocol may know better -----------------------------------------------------------------------------

    def admitted(self) -> None:
        """The relay lets this client open streams."""
        self.is_ready = True
        self.ready_at = self.clock.seconds()
        self.ready.callback(self)

    def reason_of(self, error: DmsgError) -> str:
        """What ``error``, which this side ended the connection for, is called in logs."""
        return error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__

    def why_not_admitted(self, error: DmsgError | None) -> str:
        """Why the connection ended before the relay admitted it; ``error`` is what this side ended it for, if it did."""
        return error.reason if isinstance(error, RemoteProtocolError) else "connection lost"
