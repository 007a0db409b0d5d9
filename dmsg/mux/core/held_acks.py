"""ACKs of small messages, which wait a moment for data that they can go along with (:ref:`spec-sealed-acks`). Pure."""

from __future__ import annotations

from typing import Final

from dmsg.mux.core.stream import Stream, StreamState

#: The longest that one waits, in seconds. An answer that comes later is a frame of its own beside the acknowledgement.
HELD_S: Final = 0.005


class HeldAcks:
    """The streams of a connection whose acknowledgement waits; ``due_s`` is when to take them.

    One time for all of them, which begins with the first: where messages and answers follow each other, most of the streams
    have nothing left to acknowledge by then, and a timer for each message would take longer than its acknowledgement.
    """

    __slots__ = ("_streams", "due_s")

    def __init__(self) -> None:
        self._streams: dict[Stream, None] = {}  # in the order in which something came
        self.due_s: float | None = None

    def hold(self, stream: Stream, now: float) -> bool:
        """Let the acknowledgement of ``stream`` wait; whether ``due_s`` is new."""
        self._streams[stream] = None
        if self.due_s is not None and self.due_s <= now + HELD_S:  # it is later if the clock was set back
            return False
        self.due_s = now + HELD_S
        return True

    def settle(self) -> None:
        """Forget streams that have nothing left to acknowledge, up to the first one that has; without any, nothing is due."""
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
