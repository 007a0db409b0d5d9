"""ACKs of small messages, which wait a moment for data that they can go along with (:ref:`spec-sealed-acks`). Pure."""

from __future__ import annotations

from typing import Final

from dmsg.mux.core.stream import Stream, StreamState

#: The longest wait of an ACK, in seconds. An answer that comes later does not save the frame of the ACK.
HELD_S: Final = 0.005


class HeldAcks:
    """The streams of a connection whose ACK waits; ``due_s`` is when to take them.

    All of them share one timeout, which begins with the first. Where messages and answers alternate, most streams have nothing
    left to acknowledge by then, and a timer for each message would cost more than its ACK.
    """

    __slots__ = ("_streams", "due_s")

    def __init__(self) -> None:
        self._streams: dict[Stream, None] = {}  # in the order in which their data came
        self.due_s: float | None = None

    def hold(self, stream: Stream, now: float) -> bool:
        """Let the ACK of ``stream`` wait; ``True`` if ``due_s`` is new."""
        self._streams[stream] = None
        if self.due_s is not None and self.due_s <= now + HELD_S:  # due_s is later than that if the clock was set back
            return False
        self.due_s = now + HELD_S
        return True

    def settle(self) -> None:
        """Forget the newest streams as long as they have nothing left to acknowledge; if none is left, nothing is due."""
        streams = self._streams
        while streams:
            stream, _ = streams.popitem()
            if stream.ack_due:
                streams[stream] = None
                return
        self.due_s = None

    def forget(self, stream: Stream) -> None:
        """``stream`` is over."""
        self._streams.pop(stream, None)

    def take(self, now: float) -> list[Stream]:
        """The streams that are due and still have something to acknowledge."""
        if self.due_s is None or now < self.due_s:
            return []
        self.due_s = None
        streams = [stream for stream in self._streams if stream.ack_due and stream.state is not StreamState.CLOSED]
        self._streams.clear()
        return streams
