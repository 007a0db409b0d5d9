"""Streams that we asked for and that are not transports yet."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.clients.dial import OpenedStream
from dmsg.clients.pending import PendingStream, S
from dmsg.errors import DmsgError
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.errors import Unsupported, close_error
from dmsg.mux.core.stream import Stream, StreamOwner
from dmsg.mux.core.wire import CloseReason


@dataclass(frozen=True, slots=True)
class OpenedPath(OpenedStream[S]):
    """The result of a request, with what the peer said about resuming."""

    resume: Resume | None


class PendingRequest(PendingStream[S, OpenedPath[S]], StreamOwner):
    """The owner of a stream until the peer has answered our REQUEST."""

    def __init__(self, session: S, stream: Stream, service: str) -> None:
        super().__init__(session, stream)
        self._service = service
        stream.owner = self

    def opened(self, stream: Stream, resume: Resume | None) -> None:
        """The peer accepted, and has proved itself if that was asked for."""
        self.settle(stream, lambda session, stream, accept_ms: OpenedPath(session, stream, accept_ms, resume))

    def ended(self, code: int, *, local: bool, proven: bool = False, detail: str = "") -> None:
        """The peer or the server said no."""
        if self.done.called:
            return
        service, wanted = self._service, detail
        if code == CloseReason.NO_SUCH_SERVICE:
            wanted = f"nothing listens there as {service!r}" if service else "nothing listens there"
        elif code == CloseReason.ACCESS_DENIED and service:
            wanted = f"{service!r} does not admit this key, or nothing listens there as that"
        error = close_error(code, wanted, by="local" if local else "peer")
        checked = local and code == CloseReason.MALFORMED
        reason = "accept check failed" if checked else (error.name if code else "request rejected")
        stage = "request" if isinstance(error, Unsupported) else "accept"
        self.fail(stage, reason, error)

    def lost(self, error: DmsgError, code: int) -> None:
        """The connection was lost before an answer came."""
        self.lose(error)
