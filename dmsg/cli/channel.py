"""A transport as commands like it: awaited reads and writes, bounded in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.exits import CommandError
from dmsg.glue.waiters import Waiters

#: Unread bytes at which the other side is made to wait until they are read.
UNREAD_PAUSE_BYTES: Final = 1024 * 1024


class TransportBroken(CommandError):
    """A transport ended before what it was for was done; ``clean`` tells whether the other side closed it in order."""

    def __init__(self, message: str, *, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


class TimedOut(CommandError):
    """The other side did not answer in time."""


@implementer(IPushProducer)
class Channel(Protocol):
    """One transport. ``clock`` (``IReactorTime``) measures time limits, which are in seconds.

    ``opened`` is called with the channel once it is connected.
    """

    transport: Any

    def __init__(self, clock: Any, opened: Callable[[Channel], object] | None = None) -> None:
        self._clock = clock
        self._opened = opened
        self._unread = bytearray()  # in one piece: many small ones would cost far more than their bytes
        self._reading_paused = False
        self._readers: Waiters[None] = Waiters()
        self._writers: Waiters[None] = Waiters()
        self._writing_paused = False
        self._ended: Failure | None = None
        self._watchers: Waiters[None] = Waiters()

    # --- what commands use -----------------------------------------------------------------------------------------

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Everything that has come and was not read yet, at least one byte.

        Raises ``TransportBroken`` at the end, ``TimedOut`` after ``timeout_s``.
        """
        while not self._unread:
            if self._ended is not None:
                raise self._broken()
            await self._limited(self._readers.wait(), timeout_s)
        data = bytes(self._unread)
        self._unread.clear()
        self._resume_reading()
        return data

    @property
    def unread_bytes(self) -> int:
        """How much has come and was not read yet."""
        return len(self._unread)

    async def write(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send ``data``; returns when more may be written. Raises as :meth:`read` does."""
        if self._ended is not None:
            raise self._broken()
        self.transport.write(data)
        if self._writing_paused:
            await self._limited(self._writers.wait(), timeout_s)
        if self._ended is not None:
            raise self._broken()

    async def close(self, timeout_s: float) -> None:
        """Close once everything written has arrived; after ``timeout_s`` at once."""
        if self._ended is None:
            self.transport.unregisterProducer()
            self.transport.loseConnection()
            self._resume_reading()
        await self.wait_closed(timeout_s)

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for the end of the transport, and make it after ``timeout_s``."""
        if self._ended is not None:
            return
        # aborting ends the transport, and that is what is waited for
        late = self._clock.callLater(timeout_s, self.abort)
        try:
            await self._watchers.wait()
        finally:
            if late.active():
                late.cancel()

    def abort(self) -> None:
        """Close now; what has not been sent is dropped."""
        if self._ended is None:
            self.transport.abortConnection()

    # --- IPushProducer, towards our own transport ------------------------------------------------------------------

    def pauseProducing(self) -> None:
        self._writing_paused = True

    def resumeProducing(self) -> None:
        self._writing_paused = False
        self._writers.fire(None)

    def stopProducing(self) -> None:
        """The transport is over; ``connectionLost`` follows."""

    # --- IProtocol -------------------------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        self.transport.registerProducer(self, True)
        if self._opened is not None:
            self._opened(self)

    def dataReceived(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) >= UNREAD_PAUSE_BYTES and not self._reading_paused:
            self._reading_paused = True
            self.transport.pauseProducing()
        self._readers.fire(None)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._ended = reason
        self._readers.fire(None)
        self._writers.fire(None)
        self._watchers.fire(None)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _broken(self) -> TransportBroken:
        assert self._ended is not None
        if self._ended.check(ConnectionDone):
            return TransportBroken("the peer closed the transport", clean=True)
        cause = getattr(self._ended.value, "cause", self._ended.value)
        return TransportBroken(f"the transport was lost: {cause}")

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resumeProducing()

    async def _limited(self, waiting: Deferred[None], timeout_s: float | None) -> None:
        if timeout_s is None:
            await waiting
        else:
            await waiting.addTimeout(timeout_s, self._clock, _timed_out)


def _timed_out(result: object, timeout_s: float) -> None:
    raise TimedOut(f"the peer did not answer within {timeout_s:g} s")
