"""How much of the sealed streams between two clients is under way at once: as much as the path carries, and little more.

Pure. What is sent beyond the path's rate times its delay only waits somewhere on the way, in front of what everybody else
sends. So the window follows the path (:ref:`flow-path-window`). Each acknowledged frame tells how much was under way when it
was sent, and how long it took: if it took no longer than the shortest, that much fits, and the window may be larger; if all
of a round trip took longer, it is too large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

#: What a new path may have under way, and the least, however slow it is.
INITIAL_BYTES: Final = 256 * 1024
LEAST_BYTES: Final = 14 * 1024
#: The most of all streams of one path. Each has its own limit besides, for the sake of the relay's queue.
MOST_BYTES: Final = 32 * 1024 * 1024
#: A frame takes no longer than a sixteenth of the window does, because others wait behind it; down to what one packet of the
#: network holds.
LEAST_FRAME_BYTES: Final = 1280
FIRST_FRAME_BYTES: Final = 8 * 1024
#: A stream that has less than this under way sends although the window is full, so that it does not wait for others.
EXEMPT_BYTES: Final = 1024
#: What may wait on the way, as a share of the shortest round trip. On a short path it is what processes take that are woken
#: late, less two round trips: with a smaller window they are woken more often.
WAITING_SHARE: Final = 0.25
LATE_S: Final = 0.020
#: The window may be so many times what is known to fit. Of what is sent in one go, before the first answer, an eighth of a
#: round trip is allowed to wait, so the path carries eight times as much in a whole one. Later that tells less, still less
#: when it was known of the first that no more fits, and least once more was sent than fits.
BURST_GROWTH: Final = 8
FIRST_GROWTH: Final = 4
KNOWN_GROWTH: Final = 2
GROWTH: Final = 1.25
#: What was sent with so much of the window under way, one part of this many, shows whether it is too large.
FULL: Final = 3
#: The rate is the best of so many round trips: one that was slow for another reason does not shrink the window.
RATE_ROUNDS: Final = 32
#: So often the shortest round trip is measured anew, with half a window for one round trip; sooner at first, because the
#: first frames are long for a slow path.
MEASURE_EVERY_S: Final = 10.0
FIRST_MEASURE_S: Final = 1.0
#: After this time without data, the path may be another one.
FORGOTTEN_S: Final = 10.0
#: A smaller window shortens the wait after two round trips, one to send less and one to see it; another one for good
#: measure. If data then waits as long as this share of before, it is not ours that it waits for.
FELT_ROUNDS: Final = 3
STILL_WAITING: Final = 0.8

#: When a frame was sent, in seconds of the window's own, and what was under way then, itself included; 0 if that says
#: nothing of the path.
Stamp = tuple[float, int]


class _Shrinking(NamedTuple):
    """What was under way before the window was made smaller, how long data waited, and when the effect is felt."""

    window_bytes: int
    waiting_s: float
    felt_at: float


class PathWindow:
    """The window of all sealed streams of a connection with one peer. ``clock`` gives seconds.

    Each stream may have an equal share of it under way, whatever the others have: the peer of one may not read, and its data
    counts although it has left the path.
    """

    __slots__ = (
        "_allowed_s",
        "_behind_s",
        "_clock",
        "_fastest",
        "_full_s",
        "_growth",
        "_held_until",
        "_latest",
        "_measure_at",
        "_measure_every_s",
        "_measured_window",
        "_most_bytes",
        "_rates",
        "_round_began",
        "_round_over",
        "_round_trip_s",
        "_shortest_s",
        "_shrinking",
        "_waiting",
        "frame_bytes",
        "senders",
        "under_way_bytes",
        "window_bytes",
    )

    def __init__(self, clock: Callable[[], float], most_bytes: int = MOST_BYTES) -> None:
        self.window_bytes = min(INITIAL_BYTES, most_bytes)
        #: The most data of one frame, and of one record. It is short at first, since the path may be slow.
        self.frame_bytes = FIRST_FRAME_BYTES
        self.under_way_bytes = 0
        #: Streams with data under way.
        self.senders: set[object] = set()
        self._waiting: dict[object, None] = {}  # streams that have data and no room, in order
        self._most_bytes = most_bytes
        self._clock = clock
        self._behind_s = 0.0  # what the clock was set back since the beginning
        self._latest = 0.0
        self._shortest_s = 0.0
        self._allowed_s = 0.0  # what data may wait on the way
        self._growth: float = FIRST_GROWTH
        self._round_began = 0.0  # a round is over when a frame arrives that was sent after this
        self._round_trip_s = 0.0  # the shortest of this round; 0 if there is none yet
        self._full_s = 0.0  # the same of the frames that were sent when the window was in use
        self._round_over = False
        self._fastest = 0.0  # bytes a second, the best of those
        self._rates: deque[float] = deque(maxlen=RATE_ROUNDS)
        self._measure_at = 0.0
        self._measure_every_s = FIRST_MEASURE_S
        self._measured_window = 0  # the window before it was halved to measure; 0 if it is not
        self._shrinking: _Shrinking | None = None
        self._held_until = 0.0  # the window is not made smaller before

    def room_bytes(self, own_bytes: int, wanted_bytes: int) -> int:
        """What a stream may send that has ``own_bytes`` under way and ``wanted_bytes`` to send; not positive if nothing.

        When the window is full, it is what is missing to an equal share of it. Less than a whole frame is no room for
        more than that: each of them costs as much as a long one.
        """
        window = self.window_bytes
        room = window - self.under_way_bytes
        if room >= wanted_bytes or room >= self.frame_bytes:
            return room
        room = window // (len(self.senders) + (not own_bytes)) - own_bytes
        if room >= wanted_bytes or room >= self.frame_bytes:
            return room
        return EXEMPT_BYTES - own_bytes

    def wait(self, stream: object) -> None:
        """``stream`` has data that there is no room for."""
        self._waiting[stream] = None

    def take_waiting(self) -> list[object]:
        """The streams that wait, if there is room now; they wait no more."""
        if not self._waiting or (self.under_way_bytes + self.frame_bytes > self.window_bytes and not self._round_over):
            return []
        self._round_over = False  # shares may be larger than they were
        streams = list(self._waiting)
        self._waiting.clear()
        return streams

    def sent(self, stream: object, size: int, own_bytes: int) -> Stamp:
        """A frame of ``stream`` with ``size`` bytes goes out; with it, ``own_bytes`` of the stream are under way.

        What has much less than its share under way overtakes the others where each transport has a queue of its own, as at
        the relay: such a frame says nothing of how much fits.
        """
        now = self._now()
        if not self.under_way_bytes:
            self.senders.clear()
            if now - self._round_began > FORGOTTEN_S:
                self._growth = FIRST_GROWTH
                self._set_window(min(self.window_bytes, INITIAL_BYTES))
        self.senders.add(stream)
        self.under_way_bytes = under_way = self.under_way_bytes + size
        share = (under_way if under_way < self.window_bytes else self.window_bytes) // len(self.senders)
        return now, under_way if own_bytes * 2 >= share else 0

    def forget(self, stream: object, size: int) -> None:
        """``stream`` is over, with ``size`` bytes under way."""
        self.under_way_bytes -= size
        self.senders.discard(stream)
        self._waiting.pop(stream, None)

    def acknowledged(self, stamp: Stamp | None, size: int) -> None:
        """``size`` bytes have arrived, the last of them in the frame with ``stamp``; ``None`` if that came late."""
        self.under_way_bytes -= size
        if stamp is None:
            return
        now = self._now()
        sent_at, under_way_bytes = stamp
        round_trip_s = now - sent_at
        if round_trip_s <= 0.0 or not under_way_bytes:
            return  # the clock is too coarse, or the frame too short, to learn anything
        if not self._measure_at:
            self._measure_at = now + self._measure_every_s
        if not self._shortest_s or round_trip_s < self._shortest_s:
            self._set_shortest(round_trip_s)
        if not self._round_trip_s or round_trip_s < self._round_trip_s:
            self._round_trip_s = round_trip_s
        window = self.window_bytes
        if under_way_bytes * FULL >= window:
            if not self._full_s or round_trip_s < self._full_s:
                self._full_s = round_trip_s
            rate = under_way_bytes / round_trip_s
            self._fastest = max(self._fastest, rate)
        is_burst = not self._rates and sent_at < self._round_began
        growth = BURST_GROWTH if is_burst else self._growth
        if round_trip_s - self._shortest_s > self._allowed_s / 2:
            if is_burst:
                self._growth = KNOWN_GROWTH
        elif under_way_bytes * growth > window and not self._measured_window:
            self._set_window(int(under_way_bytes * growth))
            self._shrinking = None
        if sent_at >= self._round_began:
            self._end_round(now)

    def _now(self) -> float:
        """Seconds that never go back: when the clock was set back, what is under way would seem to have arrived sooner."""
        now = self._clock() + self._behind_s
        if now < self._latest:
            self._behind_s += self._latest - now
            return self._latest
        self._latest = now
        return now

    def _set_window(self, window_bytes: int) -> None:
        self.window_bytes = max(LEAST_BYTES, min(self._most_bytes, window_bytes))
        self.frame_bytes = max(LEAST_FRAME_BYTES, self.window_bytes >> 4)

    def _set_shortest(self, round_trip_s: float) -> None:
        self._shortest_s = round_trip_s
        self._allowed_s = max(round_trip_s * WAITING_SHARE, LATE_S - 2 * round_trip_s)

    def _end_round(self, now: float) -> None:
        round_trip_s, full_s = self._round_trip_s, self._full_s
        self._round_over = True
        if self._measured_window:
            self._measure_every_s = min(MEASURE_EVERY_S, 2 * self._measure_every_s)
            self._set_shortest(round_trip_s)
            self._measure_at = now + self._measure_every_s
            self._set_window(self._measured_window)
            self._measured_window = 0
            self._shrinking = None
        elif full_s:
            self._rates.append(self._fastest)
            waiting_s = full_s - self._shortest_s
            if waiting_s > self._allowed_s:
                self._shrink(waiting_s, full_s, now)
            if waiting_s <= self._allowed_s / 8 and self._measure_every_s == MEASURE_EVERY_S:
                self._measure_at = now + self._measure_every_s  # it is as short as ever
            elif now >= self._measure_at:
                self._measured_window = self.window_bytes
                self._set_window(self.window_bytes // 2)
        elif now >= self._measure_at:
            self._set_shortest(round_trip_s)  # nothing of ours has waited on the way
            self._measure_at = now + self._measure_every_s
        self._round_began = now
        self._round_trip_s = self._full_s = self._fastest = 0.0

    def _shrink(self, waiting_s: float, round_trip_s: float, now: float) -> None:
        """Data waits on the way for ``waiting_s``, more than it may."""
        self._growth = GROWTH
        rate = max(self._rates)
        window = int(rate * (self._shortest_s + self._allowed_s))
        if window >= self.window_bytes or now < self._held_until:
            return
        if self._shrinking is None:
            # The window may have just grown, and not been used yet: what was under way is what the wait is of.
            under_way_bytes = min(self.window_bytes, int(rate * round_trip_s))
            drained_s = (self.window_bytes - window) / rate
            self._shrinking = _Shrinking(under_way_bytes, waiting_s, now + drained_s + FELT_ROUNDS * round_trip_s)
        elif (
            now >= self._shrinking.felt_at
            and self.window_bytes <= self._shrinking.window_bytes // 2
            and waiting_s > STILL_WAITING * self._shrinking.waiting_s
        ):
            # Half as much of ours, and the wait is as long: others fill the path. Making room for them would not shorten it.
            window, self._shrinking = self._shrinking.window_bytes, None
            self._held_until = now + MEASURE_EVERY_S
        self._set_window(window)
