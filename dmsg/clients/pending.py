"""Streams that a client has requested and that the peer has not answered yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.clients.dial import R
from dmsg.clients.sessions import ClientSession
from dmsg.errors import DmsgError, StageError


class RequestSession(ClientSession, TypingProtocol):
    """The session with a relay through which a request goes."""

    @property
    def clock(self) -> IReactorTime:
        """Its clock."""

    def flush_soon(self) -> None:
        """Send what was queued at the end of this turn of the reactor."""


S = TypeVar("S", bound=RequestSession)


class PendingStream(Generic[S, R]):
    """A stream that ``session`` has asked for. ``done`` fires once it is open, or fails with a ``StageError``.

    Cancelling takes the request back.
    """

    def __init__(self, session: S, stream: Any) -> None:
        self.done: Deferred[R] = Deferred(lambda _: session.abort_stream(stream))
        self._session = session
        self._since = session.clock.seconds()

    def settle(self, stream: Any, make: Callable[[S, Any, float], R]) -> None:
        """The peer accepted: ``done`` fires with the result of ``make`` for the session, ``stream`` and ``accept_ms``."""
        session = self._session
        if self.done.called:  # it was given up by an earlier event of the same read
            session.abort_stream(stream)
            return
        session.flush_soon()
        self.done.callback(make(session, stream, (session.clock.seconds() - self._since) * 1000))

    def fail(self, stage: str, reason: str, error: DmsgError | None = None) -> None:
        """The peer or the relay refused: fail with a ``StageError``, unless ``done`` has fired already."""
        if not self.done.called:
            self.done.errback(StageError(stage, reason, error))

    def lose(self, error: DmsgError) -> None:
        """The connection was lost before an answer came."""
        self.fail("accept", "server connection lost", error)
