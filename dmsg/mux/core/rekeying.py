"""When the sealed streams of a connection get new keys because time has passed. Pure.

:ref:`spec-rekeying`. The other reason is the number of frames; the stream itself counts them.
"""

from __future__ import annotations

from typing import Final

from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamState

#: Streams that are due within this share of the time get their keys together, so that many streams make few timers.
_EARLY: Final = 1 / 60


class KeyTimer:
    """Has each sealed stream that sent something rekey after ``after_s`` seconds. ``due_s`` is when to look again."""

    __slots__ = ("_after_s", "_due", "due_s", "now")

    def __init__(self, after_s: float, now: float) -> None:
        self.now = now  # of the latest read
        self._after_s = after_s
        self._due: dict[int, tuple[SealedStream, float]] = {}  # by stream id
        self.due_s: float | None = None

    def watch(self, stream: SealedStream) -> None:
        """``stream`` has new keys."""
        due = self.now + self._after_s
        self._due[stream.id] = stream, due
        if self.due_s is None or due < self.due_s:
            self.due_s = due

    def forget(self, stream_id: int) -> None:
        """The stream is over; silent when it is not watched."""
        self._due.pop(stream_id, None)

    def frames(self, now: float) -> list[bytes]:
        """The rekey markers to send at the time ``now``, one for each stream that is due and has used its key."""
        if self.due_s is None or now < self.due_s:
            return []
        made = []
        limit = now + self._after_s * _EARLY
        for stream_id, (stream, due) in self._due.items():
            if due > limit:
                continue
            if stream.frames.key_was_used and stream.state is not StreamState.CONFIRMING:
                made.append(stream.frames.rekey())
            self._due[stream_id] = stream, now + self._after_s
        self.due_s = min((due for _, due in self._due.values()), default=None)
        return made
