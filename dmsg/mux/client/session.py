"""A client's session with one server: from the TCP connection to the last transport on it.

Owns the shell and the core; gives out streams as transports and tells the client what happens to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.clients.sessions import RelaySession
from dmsg.clients.sessions import SessionUser as RelaySessionUser
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.errors import DmsgError, RemoteProtocolError, StageError
from dmsg.glue.shell import Shell
from dmsg.glue.turns import Turns
from dmsg.mux.client.pending import OpenedPath, PendingRequest
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.errors import Busy, ConnectionRefusedByServer, ServerDraining, TransportClosed
from dmsg.mux.core.events import (
    Confirmed,
    DataReceived,
    EndAcked,
    EndReceived,
    HandshakeDone,
    Ready,
    Rejected,
    StreamClosed,
    StreamOffered,
    StreamOpened,
    UpgradeReceived,
)
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.hello import Capabilities, hello_payload
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import SEQUENCE_BYTES, CloseReason
from dmsg.relays.errors import ServerLost

#: The shortest limit on frames that a server may announce; a lower one counts as this, because a REQUEST may be longer.
_FRAME_FLOOR_BYTES: Final = 1_024
#: Flush after so many transports that opened, were offered, or whose handshake messages came in one read, so that the server and
#: the peers go on while the rest is handled. Otherwise each of many dials would wait for all others.
_FLUSH_ANSWERS: Final = 8


class SessionUser(RelaySessionUser, TypingProtocol):
    """The client that a session works for."""

    def requested(self, session: ServerSession, stream: PlainStream) -> None:
        """A peer asks for a transport."""

    def path_lost(self, session: ServerSession, transport: DmsgTransport, error: DmsgError) -> float:
        """A transport has lost its path. Gives the seconds that it may wait for another one, 0 if it may not."""


class ServerSession(RelaySession[SessionUser, DmsgTransport]):
    """One connection to one server. ``ready`` fires once the server has admitted it, or fails with a ``StageError``."""

    connection: Connection

    def __init__(
        self,
        server: PublicKey,
        key: SecretKey,
        user: SessionUser,
        clock: IReactorTime,
        *,
        config: ConnectionConfig,
        buffers: Buffers | None = None,
        random: Random = os.urandom,
        handshake_timeout_s: float = 10.0,
        extended: bool = True,
        aes: bool = False,
    ) -> None:
        core = Handshake(
            Role.CLIENT,
            key,
            server,
            now=clock.seconds(),
            payload=hello_payload(aes=aes) if extended else b"",
            timeout_s=handshake_timeout_s,
            takes_cookie=extended,
            random=random,
        )
        super().__init__(server, key, user, clock, core, DmsgTransport)
        self.capabilities = Capabilities()
        self._config = config
        self._buffers = buffers
        self._random = random
        self._answers: Sized = ()
        self._turns: Turns | None = None
        self._extended = extended
        self._aes = aes

    # --- what the client asks for ----------------------------------------------------------------------------------

    def request(
        self, target: PublicKey, carrier: Carrier = Carrier.NONE, *, service: str = "", resume: Resume | None = None
    ) -> Deferred[OpenedPath[ServerSession]]:
        """Ask ``target`` for a transport; cancelling sends CLOSE. Raises ``Busy`` when no id is free.

        Obeys the limits that the server announced: too many transports are ``Busy`` here, and requests are paced.
        """
        self._check_room()
        turn = self._turns.take() if self._turns is not None else None
        if turn is None:
            return self._request(target, carrier, service, resume)
        return turn.addCallback(lambda _: self._request(target, carrier, service, resume))

    def _check_room(self) -> None:
        limits = self.capabilities.limits
        if limits is not None and len(self.connection.streams) >= limits.transports:
            raise Busy("the server allows no more transports on this connection", by="local")

    def _request(
        self, target: PublicKey, carrier: Carrier, service: str, resume: Resume | None
    ) -> Deferred[OpenedPath[ServerSession]]:
        if not self.is_ready:
            raise StageError("request", "server connection lost")
        self._check_room()
        pending = PendingRequest(self, self.connection.open(target, carrier, service=service, resume=resume), service)
        self.flush_soon()
        return pending.done

    def abort_stream(self, stream: Stream, code: int = CloseReason.NORMAL) -> None:
        """End at once a stream that belongs to no transport, or refuse an offered one."""
        self.connection.abort(stream, code)
        stream.let_go()
        self.flush_soon()

    def turn_away(self, stream: Stream, *, busy: bool) -> None:
        """See :class:`dmsg.clients.sessions.ClientSession`."""
        self.abort_stream(stream, CloseReason.BUSY if busy else CloseReason.REFUSED)

    def transport_closed(self, transport: DmsgTransport, reason: str, *, local: bool, code: int = 0) -> None:
        """See :class:`dmsg.clients.transport.Carrier`."""
        super().transport_closed(transport, reason, local=local, code=code)
        if self.is_ready and self.spent:
            self.close()  # its record counters are high; the goal makes a new session

    def path_lost(self, transport: DmsgTransport, error: DmsgError) -> float:
        """See :class:`dmsg.mux.client.transport.Link`."""
        return self._user.path_lost(self, transport, error)

    @property
    def idle(self) -> bool:
        """See :class:`~dmsg.relays.session.Session`."""
        return not self.connection.streams and not self._turns

    @property
    def spent(self) -> bool:
        """Whether the record counters are high and nothing is open: a new session is to replace this one."""
        return not self.connection.streams and self.connection.near_exhaustion

    # --- from the shell --------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Pass on the events of the core. With many answers, flush in between."""
        self._pass_on(shell, events)
        while self._answers:
            shell.flush_between()
            self._pass_on(shell, self.connection.open_more())

    def _pass_on(self, shell: Shell, events: Sequence[object]) -> None:
        answers = 0
        for event in events:
            match event:
                case DataReceived():
                    event.stream.owner.deliver(event.data)
                case StreamClosed():
                    event.stream.owner.ended(event.code, local=event.local, proven=event.proven, detail=event.detail)
                case StreamOpened():
                    event.stream.owner.opened(event.stream, event.resume)
                    answers += 1
                case UpgradeReceived():
                    event.stream.owner.upgraded()
                    answers += 1
                case Confirmed():
                    event.stream.owner.confirmed()
                case EndAcked():
                    event.stream.owner.end_acked()
                case EndReceived():
                    event.stream.owner.end_received()
                case StreamOffered():
                    self._user.requested(self, event.stream)
                    answers += 1
                case HandshakeDone():
                    self._learn(event.peer if self._extended else Capabilities())
                    self.connection = Connection(
                        self.identity,
                        event.records,
                        now=self.clock.seconds(),
                        config=_within(self._config, self.capabilities),
                        random=self._random,
                        extended=self.capabilities.extended,
                        end_to_end=EndToEnd(self.key, self.server, aes=self._aes, random=self._random),
                        clock=self.clock.seconds,
                        buffers=self._buffers,
                    )
                    self._answers = self.connection.answers
                    shell.become(self.connection, event.leftover)
                case Ready():
                    self.admitted()
                case Rejected():
                    error = ServerDraining() if event.reason == ServerDraining.name else None
                    shell.fail(error or ConnectionRefusedByServer(event.reason))
                case _:
                    raise AssertionError(f"unexpected event {event!r}")
            if answers == _FLUSH_ANSWERS:
                answers = 0
                shell.flush_between()

    def _learn(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        if capabilities.limits is not None and capabilities.limits.requests_per_s:
            self._turns = Turns(self.clock, capabilities.limits.requests_per_s)

    def end_streams(self, loss: ServerLost) -> None:
        """See :class:`~dmsg.clients.sessions.RelaySession`."""
        if self._turns is not None:
            self._turns.stop()
        if isinstance(self.shell.core, Connection):
            for stream in list(self.connection.streams.values()):
                self.connection.abort(stream)
                stream.owner.lost(loss, CloseReason.PEER_GONE)

    def reason_of(self, error: DmsgError) -> str:
        """See :class:`~dmsg.clients.sessions.RelaySession`."""
        if isinstance(error, TransportClosed):
            return error.name
        return error.reason if isinstance(error, ConnectionRefusedByServer) else super().reason_of(error)

    def why_not_admitted(self, error: DmsgError | None) -> str:
        """See :class:`~dmsg.clients.sessions.RelaySession`."""
        if isinstance(error, ConnectionRefusedByServer):
            return error.reason
        if not isinstance(error, RemoteProtocolError) and isinstance(self.shell.core, Handshake):
            return "server under load" if self.shell.core.challenged else "connection lost"  # it hung up on its cookie
        return super().why_not_admitted(error)


def _within(config: ConnectionConfig, capabilities: Capabilities) -> ConnectionConfig:
    """``config`` with windows and frames within the limits of the server; but frames never get so short that they carry mostly
    overhead.
    """
    window = min(config.largest_window_bytes, max(config.secure_window_bytes, capabilities.window_bytes))
    plain, sealed = config.frame_data_bytes, config.sealed_data_bytes
    if capabilities.limits is not None:
        longest = max(_FRAME_FLOOR_BYTES, capabilities.limits.frame_payload_bytes) - SEQUENCE_BYTES
        plain, sealed = min(plain, longest), min(sealed, longest)
    return replace(config, largest_window_bytes=window, frame_data_bytes=plain, sealed_data_bytes=sealed)
