"""A client's session with one server: from the TCP connection to the last transport on it.

Owns the shell and the core; gives out streams as transports and tells the client what happens to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.errors import (
    ConnectionRefusedByServer,
    DmsgError,
    RemoteProtocolError,
    ServerDraining,
    ServerLost,
    StageError,
    close_error,
)
from dmsg.glue.shell import Shell
from dmsg.mux.connection import Connection, ConnectionConfig
from dmsg.mux.events import Accepted, DataReceived, HandshakeDone, Ready, Rejected, RequestReceived, StreamClosed
from dmsg.mux.handshake import Handshake, Role
from dmsg.mux.stream import Stream
from dmsg.mux.transport import DmsgTransport
from dmsg.mux.wire import CloseReason


class SessionUser(TypingProtocol):
    """Who a session works for: the client."""

    def session_lost(self, session: ServerSession, error: DmsgError) -> None:
        """A session that was ready is over."""

    def requested(self, session: ServerSession, stream: Stream) -> None:
        """A peer asks for a transport."""

    def transport_closed(self, session: ServerSession, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """A transport of this session is over."""


class PendingRequest:
    """Stands as owner of a stream until the peer has answered our REQUEST."""

    __slots__ = ("done", "session", "stream")

    def __init__(self, session: ServerSession, stream: Stream) -> None:
        self.session = session
        self.stream = stream
        self.done: Deferred[Stream] = Deferred(self._cancelled)
        stream.owner = self

    def _cancelled(self, _: Deferred[Stream]) -> None:
        self.session.connection.abort(self.stream)  # a cancelled dial sends CLOSE
        self.session.flush_soon()

    def answered(self) -> None:
        """The peer said yes."""
        if not self.done.called:
            self.done.callback(self.stream)

    def deliver(self, data: bytes) -> None:
        """Data of a transport that was given up in the very read that brought it: dropped."""

    def ended(self, code: int, *, local: bool) -> None:
        """The peer or the server said no."""
        if self.done.called:
            return  # given up while the answer was on its way through the events of one read
        error = close_error(code)
        reason = "accept check failed" if local else (error.name if code else "request rejected")
        self.done.errback(StageError("accept", reason, error))

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection went before an answer came."""
        if not self.done.called:
            self.done.errback(StageError("accept", "server connection lost", error))


class ServerSession:
    """One connection to one server. ``ready`` fires once the server has admitted it, or fails with a ``StageError``."""

    def __init__(
        self,
        server: PublicKey,
        key: SecretKey,
        user: SessionUser,
        clock: IReactorTime,
        *,
        config: ConnectionConfig,
        random: Random = os.urandom,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self.server = server
        self.identity = key.public_key
        self.clock = clock
        self.connection: Connection
        self.started_at = clock.seconds()
        self.ready_at = 0.0
        self.ready: Deferred[ServerSession] = Deferred(lambda _: self.abort())
        self.is_ready = False
        self._user = user
        self._config = config
        self._random = random
        self._stage = "handshake"
        self._host = DmsgAddress(self.identity, "", server)
        core = Handshake(Role.CLIENT, key, server, now=self.started_at, timeout_s=handshake_timeout_s, random=random)
        self.shell = Shell(core, self, clock)

    # --- what the client asks for ----------------------------------------------------------------------------------

    def request(self, remote: PublicKey) -> Deferred[Stream]:
        """Ask ``remote`` for a transport; cancelling sends CLOSE. Raises ``Busy`` when no id is free."""
        pending = PendingRequest(self, self.connection.open(remote))
        self.flush_soon()
        return pending.done

    def accept(self, stream: Stream) -> None:
        """Accept an offered stream."""
        self.connection.accept(stream)
        self.flush_soon()

    def refuse(self, stream: Stream, code: int) -> None:
        """Refuse an offered stream."""
        self.connection.abort(stream, code)
        self.flush_soon()

    def transport(self, stream: Stream, service: str = "") -> DmsgTransport:
        """The Twisted transport over an accepted stream."""
        here, there = (self._host, DmsgAddress(stream.remote, service, self.server))
        if not stream.initiator:
            here, there = (
                DmsgAddress(self.identity, service, self.server),
                DmsgAddress(stream.remote, "", self.server),
            )
        return DmsgTransport(self, stream, here, there)

    def flush_soon(self) -> None:
        """See :class:`dmsg.mux.transport.Link`."""
        self.shell.flush_soon()

    def transport_closed(self, transport: DmsgTransport, code: int, *, local: bool) -> None:
        """See :class:`dmsg.mux.transport.Link`."""
        self._user.transport_closed(self, transport, code, local=local)
        if self.is_ready and self.connection.worn and not self.connection.streams:
            self.close()  # its record counters are far on; the goal makes a new one

    def abort(self, error: DmsgError | None = None) -> None:
        """End the connection at once."""
        self.shell.fail(error or ServerLost(str(self.server), "given up"))

    def close(self) -> None:
        """End the connection once everything queued is written; transports on it should be over."""
        self.shell.flush()
        self.shell.close(ServerLost(str(self.server), "closed"))

    # --- from the shell --------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Pass on what the core found out."""
        for event in events:
            match event:
                case DataReceived():
                    event.stream.owner.deliver(event.data)  # type: ignore[attr-defined]
                case StreamClosed():
                    self._stream_closed(event)
                case Accepted():
                    pending = event.stream.owner
                    assert isinstance(pending, PendingRequest)
                    pending.answered()
                case RequestReceived():
                    self._user.requested(self, event.stream)
                case HandshakeDone():
                    self._stage = "admission"
                    self.connection = Connection(
                        self.identity,
                        event.records,
                        now=self.clock.seconds(),
                        config=self._config,
                        random=self._random,
                    )
                    shell.become(self.connection, event.leftover)
                case Ready():
                    self.is_ready = True
                    self.ready_at = self.clock.seconds()
                    self.ready.callback(self)
                case Rejected():
                    error = ServerDraining() if event.reason == ServerDraining.name else None
                    shell.fail(error or ConnectionRefusedByServer(event.reason))
                case _:
                    raise AssertionError(f"unexpected event {event!r}")

    def _stream_closed(self, event: StreamClosed) -> None:
        owner = event.stream.owner
        if owner is None:
            self._user.requested(self, event.stream)  # withdrawn before we decided
        else:
            owner.ended(event.code, local=event.local)  # type: ignore[attr-defined]

    def after_read(self, shell: Shell) -> None:
        """Nothing: only this connection is concerned."""

    def flushed(self, shell: Shell) -> None:
        """Let writers go on that were told to pause."""
        connection = shell.core
        if isinstance(connection, Connection) and connection.writable:
            streams, connection.writable = connection.writable, []
            for stream in streams:
                if isinstance(stream.owner, DmsgTransport):
                    stream.owner.writable()

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """End everything on this connection with the reason it ended for."""
        detail = str(error) if error is not None else reason.getErrorMessage()
        loss = error if isinstance(error, ServerLost) else ServerLost(str(self.server), detail)
        was_ready, self.is_ready = self.is_ready, False
        self._end_streams(loss)
        if not was_ready:
            if not self.ready.called:
                short = (
                    error.reason
                    if isinstance(error, RemoteProtocolError | ConnectionRefusedByServer)
                    else "connection lost"
                )
                self.ready.errback(StageError("handshake", short, error or reason.value))
            return
        self._user.session_lost(self, loss)

    def _end_streams(self, loss: ServerLost) -> None:
        if not isinstance(self.shell.core, Connection):
            return
        for stream in list(self.connection.streams.values()):
            owner = stream.owner
            self.connection.abort(stream)
            if owner is None:
                self._user.requested(self, stream)  # an offer nobody has decided on is withdrawn
            else:
                owner.lost(loss, CloseReason.PEER_GONE)  # type: ignore[attr-defined]
