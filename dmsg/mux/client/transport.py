"""A transport of dmsg: a stream transport with addresses. With end-to-end security it outlives its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.clients.transport import Carrier, RelayTransport
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError
from dmsg.glue.stream_transport import CUT, TransportLost
from dmsg.glue.streams import AbortReason
from dmsg.glue.transport_state import OVER, TransportState
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.endings import close_is_final, peers_reason
from dmsg.mux.core.errors import Busy, DeadlineExceeded, IntegrityError, Refused, Unsupported, close_error
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.stream import UNOWNED, Stream, StreamFault, StreamOwner, StreamState
from dmsg.mux.core.wire import CloseReason, reason_name
from dmsg.sansio.rate import TokenBucket

#: The reasons that CLOSE gives the peer.
_CODES: Final[Mapping[AbortReason, CloseReason]] = {
    AbortReason.APPLICATION: CloseReason.REFUSED,
    AbortReason.OVERFLOW: CloseReason.SLOW_CONSUMER,
    AbortReason.DEADLINE: CloseReason.DEADLINE,
}
#: So many relays that have ended a path are remembered: as many as a dial tries.
_ENDED_BY_LIMIT: Final = 8


class PathState(Enum):
    """Whether a transport has a path: a stream over a relay."""

    __hash__ = object.__hash__  # identity is enough, and the hash of Enum is a function in Python

    CARRIED = "carried"  # it has one
    LOST = "lost"  # its path is gone, and another one may be found
    OVER = "over"  # nothing is left of it on the wire


#: The states that may follow each state; the state diagram in the documentation is drawn from this.
PATH_TRANSITIONS: Final[dict[PathState, frozenset[PathState]]] = {
    PathState.CARRIED: frozenset({PathState.LOST, PathState.OVER}),
    PathState.LOST: frozenset({PathState.CARRIED, PathState.OVER}),
    PathState.OVER: frozenset(),
}


class Link(Carrier, TypingProtocol):
    """The carrier of a transport: a session with a relay."""

    connection: Connection
    server: PublicKey
    is_ready: bool

    def path_lost(self, transport: DmsgTransport, error: DmsgError) -> float:
        """A transport has lost its path. Gives for how many seconds it may wait for another one; 0 if not at all."""


class DmsgTransport(RelayTransport[Stream], StreamOwner):
    """One end of a transport.

    ``stream`` tells how many bytes were sent, acknowledged by the peer, and received. With end-to-end security the transport
    outlives its path: while there is no path, written data waits and the application is told nothing
    (:ref:`spec-resumption`).
    """

    __slots__ = ("_grace", "_resume_error", "attempts", "ended_by", "move_rate", "path", "search", "token")

    _carrier: Link

    def __init__(self, link: Link, stream: Stream, host: DmsgAddress, peer: DmsgAddress) -> None:
        super().__init__(link, stream, host, peer)
        stream.owner = self
        self.path = PathState.CARRIED
        #: The peer's attempts to resume, if there were any.
        self.attempts: ResumeAttempts | None = None
        #: How often it may still be moved, if it ever was.
        self.move_rate: TokenBucket | None = None
        self.token = b""  # names the transport when it is resumed; fixed by its first path
        #: The relays that have ended its path without losing their connection, the last one at the end.
        self.ended_by: tuple[PublicKey, ...] = ()
        #: The search for another path, while there is one.
        self.search: Deferred[None] | None = None
        self._grace: IDelayedCall | None = None
        self._resume_error: DmsgError | None = None

    @property
    def security(self) -> str:
        """``"e2e"``, or ``"hop"``: encrypted on the way to the relay and from it."""
        return self.stream.security

    def loseWriteConnection(self) -> None:
        """Half-close: end this side's stream and go on reading. Waits for producers as a full close does.

        Raises ``Unsupported`` without end-to-end security, and under TLS of the program's own, which has no half-close.
        """
        if self.TLS or not self.stream.half_closes:
            raise Unsupported("only end-to-end transports can be closed by half, and none under startTLS", by="local")
        self._end_write(self._end_stream)

    def deadline_exceeded(self, what: str) -> None:
        """See :meth:`~dmsg.glue.stream_transport.StreamTransport.deadline_exceeded`."""
        error = DeadlineExceeded(what, by="local")
        self._abort(Failure(TransportLost(error)), AbortReason.DEADLINE)

    def linger_over(self) -> None:
        """See :meth:`~dmsg.glue.stream_transport.StreamTransport.linger_over`."""
        if self.detached:
            self._deadlines.linger(self)
        elif self.state in (TransportState.CLOSING, TransportState.BOTH_ENDED):
            super().linger_over()
        elif self.stream.state is not StreamState.CLOSED:  # the application was told; the peer never ended its side
            self._carrier.connection.abort(self.stream)
            self._release(CloseReason.NORMAL, local=True)
            self._flush_soon()

    # --- from the session ------------------------------------------------------------------------------------------

    def end_acked(self) -> None:
        """See :meth:`~dmsg.glue.stream_transport.StreamTransport.end_acked`."""
        if self.disconnecting:
            # the application is done; the peer may still be finishing its side
            code = CloseReason.REFUSED if self.stream.was_cut else CloseReason.NORMAL
            self._will_end(end_failure(self.stream, code, local=False))
        else:
            super().end_acked()

    def ended(self, code: int, *, local: bool, proven: bool = False, detail: str = "") -> None:
        """The stream is over, with a CLOSE of ``code`` from the other side or from this one."""
        if not local:
            if not close_is_final(self.stream, proven=proven, closing=self.disconnecting):
                if code in (CloseReason.NORMAL, CloseReason.REFUSED):
                    code = CloseReason.PEER_GONE  # the peer's word, which the relay may have made up
                self.lost(close_error(code), code)
                return
            code = peers_reason(self.stream, code, closing=self.disconnecting)
        self._release(code, local=local)
        if self.state not in OVER:  # else the application is told another reason
            self.over(end_failure(self.stream, code, local=local))

    def lost(self, error: DmsgError, code: int) -> None:
        """The path of the transport is gone: wait for another one, if there may be one."""
        if self.is_over or self.state in (TransportState.TELLING, TransportState.ENDED):
            self._release(code, local=True)
            return
        if self._may_move:
            self._move_path(PathState.LOST)
            grace_s = self._carrier.path_lost(self, error)
            if grace_s > 0:
                self._grace = self._clock.callLater(grace_s, self._grace_over, error)
                return
        self.give_up(error, code)

    # --- the path --------------------------------------------------------------------------------------------------

    def note_ended_by(self, relay: PublicKey) -> None:
        """``relay`` has ended the path: other relays are to be tried before it."""
        self.ended_by = (*(one for one in self.ended_by if one != relay), relay)[-_ENDED_BY_LIMIT:]

    @property
    def detached(self) -> bool:
        """Whether the transport has no path now."""
        return self.path is PathState.LOST

    @property
    def wants_path(self) -> bool:
        """Whether the transport waits for another path, or will: its session is gone, and the transport is told next."""
        return self.detached or (not self._carrier.is_ready and self.path is PathState.CARRIED and self._may_move)

    @property
    def _may_move(self) -> bool:
        return self.stream.resumable and not (self.disconnecting and self.stream.end_acked)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it on the wire."""
        return self.path is PathState.OVER

    @property
    def farewell(self) -> CloseReason:
        """What a path that comes too late is closed with: ``normal`` if only the peer does not know that nothing is missing."""
        nothing_missing = self.is_over and self.stream.close_reason is not None and not self.stream.dropped
        return CloseReason.NORMAL if nothing_missing else CloseReason.PEER_GONE

    def move_to(self, link: Link, stream: Stream, peer_received_bytes: int, told_bytes: int) -> bool:
        """Go on over another path: no byte is lost, none is delivered twice.

        ``peer_received_bytes`` is what the peer says it has, ``told_bytes`` what we told it that we have. Returns ``False`` when
        these cannot be true: then the transport has ended.
        """
        self._resume_error = None
        old = self.stream
        old.owner = UNOWNED  # data that still comes on the old path in the same read is dropped
        if not self.detached:
            self._carrier.connection.abort(old, CloseReason.PEER_GONE)
            self._flush_soon()
        try:
            stream.go_on_from(old, peer_received_bytes, told_bytes)
        except StreamFault as fault:
            link.connection.abort(stream, fault.code)
            link.flush_soon()
            stream.let_go()
            claim = "the peer claims to have what was never sent, or to miss what it has acknowledged"
            self.give_up(IntegrityError(claim, by="local"), fault.code)
            return False
        if self.detached:
            self._move_path(PathState.CARRIED)
        self._stop_grace()
        self._carrier = link
        self._run_on(stream, link.connection, link.flush_soon)
        stream.owner = self
        self._host = replace(self._host, server_public_key=link.server)
        self._peer = replace(self._peer, server_public_key=link.server)
        if self.disconnecting and self.state is not TransportState.FINISHING:
            link.connection.close(stream)
        link.connection.go_on(stream)
        link.flush_soon()
        return True

    def stop_search(self) -> None:
        """Look for no other path any more."""
        search, self.search = self.search, None
        if search is not None:
            search.cancel()

    def failed_to_resume(self, error: DmsgError) -> None:
        """A search for another path found none; its error becomes the cause if the grace period ends."""
        self._resume_error = error

    def give_up(self, error: DmsgError, code: int = CloseReason.PEER_GONE) -> None:
        """No other path was found, or none may be looked for: the transport is lost."""
        if self.stream.complete:
            # only the peer's acknowledgement of our end is missing, and no path is left that could bring it
            self._release(CloseReason.NORMAL, local=True)
            self.over(Failure(ConnectionDone()))
            return
        self._release(code, local=True)
        self.over(Failure(TransportLost(self._resume_error or error)))

    def _move_path(self, path: PathState) -> None:
        assert path in PATH_TRANSITIONS[self.path], (self.path, path)
        self.path = path

    def _grace_over(self, error: DmsgError) -> None:
        self._grace = None
        self.give_up(error)

    def _stop_grace(self) -> None:
        grace, self._grace = self._grace, None
        if grace is not None:
            grace.cancel()

    def _release(self, code: int, *, local: bool) -> None:
        """Nothing is left of the transport on the wire: tell the link, once."""
        if self.is_over:
            return
        self._move_path(PathState.OVER)
        self._stop_grace()
        self.stop_search()
        self._leave(reason_name(code), local=local, code=code)
        self.attempts = None
        self.stream.owner = UNOWNED
        self.stream.let_go(self._inbox.size)

    def _finish(self) -> None:
        super()._finish()
        if self.is_over:
            self.stream.let_go()  # of the unread data, too

    # --- the stream ------------------------------------------------------------------------------------------------

    @property
    def _may_go_on(self) -> bool:
        """Whether there is no path, or it has ended in the current read, and there may be another one."""
        return self.stream.state is StreamState.CLOSED and self.stream.resumable

    def _send_later(self, data: bytes) -> bool:
        stream = self.stream
        if not self._may_go_on:
            return super()._send_later(data)
        config = self._carrier.connection.config
        stream.pending.append(data)
        stream.cut_bytes += len(data)
        if stream.pending.size - stream.again_bytes > config.pending_limit_bytes:
            self._overflow(Busy("more was written than may wait to be sent", by="local"))
            return False
        if stream.pending.size > config.pause_bytes:
            stream.blocked = True  # otherwise as it was: a writer that had to pause on the last path waits to be told
        return stream.blocked

    def _cut_error(self) -> DmsgError:
        return Refused(CUT)

    def _end_stream(self) -> None:
        if self._may_go_on:
            self.stream.end()
        else:
            self._carrier.connection.end(self.stream)
            self._flush_soon()

    def _close_stream(self) -> None:
        if self.stream.state is StreamState.CLOSED:
            self.stream.end()  # on another path, if one is found
        else:
            self._flush_soon()
            if self._carrier.connection.close(self.stream):
                self.ended(CloseReason.NORMAL, local=True)
                return
        if self.stream.end_acked:
            self.end_acked()
        self._deadlines.linger(self)

    def _abort(self, reason: Failure, why: AbortReason) -> None:
        if self.state is not TransportState.ENDED:
            super()._abort(reason, why)
        elif self.detached or why is AbortReason.DEADLINE:
            self._abort_stream(why)  # the application was told, and the peer has not ended its side

    def _abort_stream(self, why: AbortReason) -> None:
        code = _CODES[why]
        if self.stream.state is not StreamState.CLOSED:
            self._carrier.connection.abort(self.stream, code)
            self._flush_soon()
        self._release(code, local=True)


def end_failure(stream: Stream, code: int, *, local: bool) -> Failure:
    """The reason for ``connectionLost`` of a transport that ended with ``code``."""
    if code == CloseReason.NORMAL:
        return Failure(ConnectionDone())
    if stream.was_cut:
        return Failure(TransportLost(Refused(CUT)))
    if code != CloseReason.REFUSED or local:
        return Failure(TransportLost(close_error(code, by="local" if local else "peer")))
    cut = f", which had {stream.cut_bytes} bytes to acknowledge" if stream.cut_bytes else ""
    return Failure(TransportLost(Refused(f"the peer aborted the transport{cut}")))
