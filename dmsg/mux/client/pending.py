"""Streams on their way to becoming transports: what we asked for, and what a peer asks of us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.clients.dialer import OpenedStream
from dmsg.clients.sessions import ClientSession
from dmsg.errors import DmsgError, StageError
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.errors import Unsupported, close_error
from dmsg.mux.core.stream import Stream, StreamOwner
from dmsg.mux.core.wire import CloseReason


class RequestSession(ClientSession, TypingProtocol):
    """What a request goes through: a session with a relay."""

    clock: IReactorTime

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""

    def abort_stream(self, stream: Stream, code: int = ...) -> None:
        """End ``stream`` at once, with a CLOSE of ``code``."""


S = TypeVar("S", bound=RequestSession)


@dataclass(frozen=True, slots=True)
class OpenedPath(OpenedStream[S]):
    """What a request came to, with what the peer said about resuming."""

    resume: Resume | None


class PendingRequest(StreamOwner, Generic[S]):
    """The owner of a stream until the peer has answered our REQUEST. ``done`` fires once the stream is open."""

    def __init__(self, session: S, stream: Stream, service: str) -> None:
        self._session = session
        self._stream = stream
        self._service = service
        self._since = session.clock.seconds()
        self.done: Deferred[OpenedPath[S]] = Deferred(self._cancelled)
        stream.owner = self

    def _cancelled(self, _: Deferred[OpenedPath[S]]) -> None:
        self._session.abort_stream(self._stream)  # a cancelled dial sends CLOSE

    def opened(self, stream: Stream, resume: Resume | None) -> None:
        """The peer accepted, and has proved itself if that was asked for."""
        if self.done.called:  # given up while the answer was on its way through the events of one read
            self._session.abort_stream(stream)
            return
        self._session.flush_soon()
        accept_ms = (self._session.clock.seconds() - self._since) * 1000
        self.done.callback(OpenedPath(self._session, stream, accept_ms, resume))

    def ended(self, code: int, *, local: bool, proven: bool = False, detail: str = "") -> None:
        """The peer or the server said no."""
        if self.done.called:
            return
        service, wanted = self._service, detail
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
