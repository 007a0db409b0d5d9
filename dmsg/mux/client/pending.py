"""Streams on their way to becoming transports: what we asked for, and what a peer asks of us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.errors import DmsgError, StageError
from dmsg.mux.core.e2e import Resume
from dmsg.mux.core.errors import DowngradeRefused, TransportClosed, Unsupported, close_error
from dmsg.mux.core.negotiation import Carrier, Outbound
from dmsg.mux.core.owner import StreamOwner
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import CloseReason


class RequestSession(TypingProtocol):
    """What a request goes through: a session with a relay."""

    clock: IReactorTime

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def abort_stream(self, stream: Stream, code: int = ...) -> None:
        """End ``stream`` at once, with a CLOSE of ``code``."""


S = TypeVar("S", bound=RequestSession)


@dataclass(frozen=True, slots=True)
class OpenedStream(Generic[S]):
    """What a request came to: the session, the open stream, what the peer said about resuming, and how long it took."""

    session: S
    stream: Stream
    resume: Resume | None = None
    accept_ms: float = 0.0


class PendingRequest(StreamOwner, Generic[S]):
    """The owner of a stream until the peer has answered our REQUEST. ``done`` fires once the stream is open."""

    def __init__(self, session: S, outbound: Outbound) -> None:
        self._session = session
        self._outbound = outbound
        self._since = session.clock.seconds()
        self.done: Deferred[OpenedStream[S]] = Deferred(self._cancelled)
        outbound.stream.owner = self

    def _cancelled(self, _: Deferred[OpenedStream[S]]) -> None:
        self._session.abort_stream(self._outbound.stream)  # a cancelled dial sends CLOSE

    def accepted(self, message: bytes) -> None:
        """The peer accepted: done, unless its handshake message is still to come."""
        sealed = self._outbound.carrier is not Carrier.NONE
        if self.done.called or (sealed and is_over(self._outbound.stream)):
            return  # given up, or closed by the peer, while the answer was on its way through the events of one read
        try:
            stream = self._outbound.accepted(message)
        except TransportClosed as error:
            self._refuse(error)
            return
        if stream is not None:
            self._succeed(stream)

    def upgraded(self, message: bytes) -> None:
        """The handshake message came."""
        if self.done.called or is_over(self._outbound.stream):
            return
        try:
            stream = self._outbound.upgraded(message)
        except TransportClosed as error:
            self._refuse(error)
            return
        self._succeed(stream)

    def deliver(self, data: bytes) -> None:
        """Data in the clear where the handshake should have been (:ref:`spec-carriers`)."""
        if not self.done.called and not is_over(self._outbound.stream):
            self._refuse(DowngradeRefused("the peer answered in the clear", by="local"))

    def _succeed(self, stream: Stream) -> None:
        self._session.flush_soon()
        accept_ms = (self._session.clock.seconds() - self._since) * 1000
        self.done.callback(OpenedStream(self._session, stream, self._outbound.resume, accept_ms))

    def _refuse(self, error: TransportClosed) -> None:
        self._session.abort_stream(self._outbound.stream, error.code)
        self.done.errback(StageError("accept", error.name, error))

    def ended(self, code: int, *, local: bool, proven: bool = False) -> None:
        """The peer or the server said no."""
        if self.done.called:
            return
        service, wanted = self._outbound.service, ""
        if code == CloseReason.NO_SUCH_SERVICE:
            wanted = f"nothing listens there as {service!r}"
        elif code == CloseReason.ACCESS_DENIED and service:
            wanted = f"{service!r} does not admit this key, or nothing listens there as that"
        error = close_error(code, wanted, by="local" if local else "peer")
        checked = local and code == CloseReason.MALFORMED
        reason = "accept check failed" if checked else (error.name if code else "request rejected")
        stage = "request" if isinstance(error, Unsupported) else "accept"
        self.done.errback(StageError(stage, reason, error))

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection went before an answer came."""
        if not self.done.called:
            self.done.errback(StageError("accept", "server connection lost", error))


def is_over(stream: Stream) -> bool:
    """Whether a stream has ended."""
    return stream.state is StreamState.CLOSED
