"""The times a transport keeps: deadlines, the linger of a close, the grace between two paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.errors import DmsgError

if TYPE_CHECKING:
    from dmsg.mux.client.transport import DmsgTransport

#: A closing transport whose peer acknowledges nothing for so long is cut off, in seconds.
LINGER_S: Final = 60.0


class Deadlines:
    """The deadlines of a transport, after Go's ``net.Conn``."""

    _timers: TransportTimers

    def set_deadline(self, at_s: float | None) -> None:
        """Set both deadlines: an absolute time on the client's clock, or ``None`` for none."""
        self.set_read_deadline(at_s)
        self.set_write_deadline(at_s)

    def set_read_deadline(self, at_s: float | None) -> None:
        """End the transport with ``DeadlineExceeded`` at ``at_s`` unless the deadline is moved before."""
        self._timers.set_read_deadline(at_s)

    def set_write_deadline(self, at_s: float | None) -> None:
        """End the transport with ``DeadlineExceeded`` when something waits to be acknowledged at ``at_s`` and nothing
        has been since the deadline was set. A slow but moving transfer never trips it: it gets as long again.
        """
        self._timers.set_write_deadline(at_s)


class TransportTimers:
    """All timers of one transport; nothing is scheduled unless it is needed."""

    __slots__ = ("_calls", "_clock", "_transport")

    def __init__(self, transport: DmsgTransport, clock: IReactorTime) -> None:
        self._transport = transport
        self._clock = clock
        self._calls: dict[str, IDelayedCall] = {}

    def _set(self, name: str, delay_s: float, call: object, *arguments: object) -> None:
        self._cancel(name)

        def due() -> None:
            del self._calls[name]
            call(*arguments)  # type: ignore[operator]

        self._calls[name] = self._clock.callLater(max(0.0, delay_s), due)

    def _cancel(self, name: str) -> None:
        call = self._calls.pop(name, None)
        if call is not None:
            call.cancel()

    def stop(self) -> None:
        """The transport is over."""
        for name in list(self._calls):
            self._cancel(name)

    # --- deadlines -------------------------------------------------------------------------------------------------

    def set_read_deadline(self, at_s: float | None) -> None:
        """See :meth:`DmsgTransport.set_read_deadline`."""
        self._cancel("read")
        if at_s is not None and not self._transport.is_over:
            self._set("read", at_s - self._clock.seconds(), self._transport.deadline_exceeded, "read deadline")

    def set_write_deadline(self, at_s: float | None) -> None:
        """See :meth:`DmsgTransport.set_write_deadline`."""
        self._cancel("write")
        if at_s is not None and not self._transport.is_over:
            self._watch_writing(at_s - self._clock.seconds(), self._transport.stream.acked_bytes)

    def _watch_writing(self, delay_s: float, acked_bytes: int) -> None:
        self._set("write", delay_s, self._check_writing, delay_s, acked_bytes)

    def _check_writing(self, delay_s: float, acked_bytes: int) -> None:
        stream = self._transport.stream
        if stream.drained:
            return
        if stream.acked_bytes > acked_bytes:
            self._watch_writing(delay_s, stream.acked_bytes)
        else:
            self._transport.deadline_exceeded("write deadline")

    # --- closing ---------------------------------------------------------------------------------------------------

    def linger(self, acked_bytes: int) -> None:
        """Wait for the peer to take what was written, but not for a peer that takes nothing."""
        if not self._transport.is_over and "linger" not in self._calls:
            self._set("linger", LINGER_S, self._check_linger, acked_bytes)

    def _check_linger(self, acked_bytes: int) -> None:
        now_acked = self._transport.stream.acked_bytes
        if now_acked > acked_bytes or self._transport.detached:
            self.linger(now_acked)
        else:
            self._transport.linger_over()

    # --- between two paths -----------------------------------------------------------------------------------------

    def start_grace(self, grace_s: float, error: DmsgError) -> None:
        """Give up with ``error`` unless another path is found in time."""
        self._set("grace", grace_s, self._transport.give_up, error)

    def stop_grace(self) -> None:
        """Another path was found."""
        self._cancel("grace")
