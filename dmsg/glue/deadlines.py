"""The time limits of a transport: deadlines after Go's ``net.Conn``, the linger of a close, the wait for a slow reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime

#: A transport that closes, or whose halves have both ended, is cut off when its peer has acknowledged nothing for this many
#: seconds. A transport that is over waits as long for an application that has more to write and reads nothing, and a close as
#: long for a producer that may write and writes nothing.
LINGER_S: Final = 60.0


class Progress(TypingProtocol):
    """How far a stream has come."""

    @property
    def acked_bytes(self) -> int:
        """What the peer has acknowledged since the stream opened."""

    @property
    def drained(self) -> bool:
        """Whether everything written has been acknowledged."""


class Watched(TypingProtocol):
    """The transport that has the deadlines. Its stream may change between two calls."""

    @property
    def stream(self) -> Progress:
        """The stream under the transport."""

    def deadline_exceeded(self, what: str) -> None:
        """A deadline has passed; ``what`` says for people which one."""

    def linger_over(self) -> None:
        """The peer has acknowledged nothing for :data:`LINGER_S`, although this side has nothing more to write."""

    def writing_over(self) -> None:
        """The peer has acknowledged nothing for :data:`LINGER_S`, although the producer may write."""

    @property
    def unread_bytes(self) -> int:
        """Bytes received that the application has not read yet."""

    def unread_over(self) -> None:
        """The application has read none of the waiting data for :data:`LINGER_S`."""


class Deadlines:
    """All deadlines of one transport. Only a deadline that is set has a timed call, and a reference to the transport."""

    __slots__ = ("_calls", "_clock")

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._calls: dict[str, IDelayedCall] = {}

    def set_read(self, transport: Watched, at_s: float | None) -> None:
        """Call ``deadline_exceeded`` at ``at_s``, an absolute time on the clock; ``None`` takes the deadline back."""
        self._cancel("read")
        if at_s is not None:
            self._set("read", at_s - self._clock.seconds(), transport.deadline_exceeded, "read deadline")

    def set_write(self, transport: Watched, at_s: float | None) -> None:
        """The same, but only if data waits to be acknowledged then and none has been since the deadline was set.

        If some has, the deadline is set again for as long.
        """
        self._cancel("write")
        if at_s is not None:
            self._watch_writing(transport, at_s - self._clock.seconds(), transport.stream.acked_bytes)

    def linger(self, transport: Watched) -> None:
        """Call ``linger_over`` once the peer has acknowledged nothing for :data:`LINGER_S`."""
        self._watch("linger", lambda: transport.stream.acked_bytes, transport.linger_over)

    def await_writing(self, transport: Watched) -> None:
        """Call ``writing_over`` once the peer has acknowledged nothing for :data:`LINGER_S`."""
        self._watch("writing", lambda: transport.stream.acked_bytes, transport.writing_over)

    def await_reading(self, transport: Watched) -> None:
        """Call ``unread_over`` once the application has read none of the waiting data for :data:`LINGER_S`."""
        self._watch("unread", lambda: -transport.unread_bytes, transport.unread_over)

    def told(self) -> None:
        """The application is told of the end: of all this only the linger of its close may go on."""
        if self._calls:
            for name in ("read", "write", "writing", "unread"):
                self._cancel(name)

    def stop(self) -> None:
        """Cancel all deadlines: the transport is over."""
        for name in list(self._calls):
            self._cancel(name)

    def _watch_writing(self, transport: Watched, delay_s: float, acked_bytes: int) -> None:
        self._set("write", delay_s, self._check_writing, transport, delay_s, acked_bytes)

    def _check_writing(self, transport: Watched, delay_s: float, acked_bytes: int) -> None:
        stream = transport.stream
        if stream.drained:
            return
        if stream.acked_bytes > acked_bytes:
            self._watch_writing(transport, delay_s, stream.acked_bytes)
        else:
            transport.deadline_exceeded("write deadline")

    def _watch(self, name: str, progress: Callable[[], int], stuck: Callable[[], None]) -> None:
        """Call ``stuck`` once ``progress()`` has not grown for :data:`LINGER_S`, unless ``name`` is watched already."""
        if name not in self._calls:
            self._set(name, LINGER_S, self._check, name, progress, stuck, progress())

    def _check(self, name: str, progress: Callable[[], int], stuck: Callable[[], None], before: int) -> None:
        if progress() > before:
            self._watch(name, progress, stuck)
        else:
            stuck()

    def _set(self, name: str, delay_s: float, call: Callable[..., None], *arguments: object) -> None:
        def due() -> None:
            del self._calls[name]
            call(*arguments)

        self._calls[name] = self._clock.callLater(max(0.0, delay_s), due)

    def _cancel(self, name: str) -> None:
        call = self._calls.pop(name, None)
        if call is not None:
            call.cancel()
