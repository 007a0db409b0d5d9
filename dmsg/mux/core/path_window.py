"""How many bytes of the sealed streams between two clients are under way: as many as the path carries, and few more.

Pure. Data beyond the path's rate times its delay only waits somewhere on the way, in front of everybody else's data. So the
window follows the path (:ref:`flow-path-window`). Each acknowledged frame tells how many bytes were under way when it was sent,
and how long it took. If it took no longer than the shortest round trip, that many bytes fit, and the window may grow; if all
frames of a round trip took longer, the window is too large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

#: How many bytes a new path may have under way, and the least, however slow it is.
INITIAL_BYTES: Final = 256 * 1024
LEAST_BYTES: Final = 14 * 1024
#: The most for all streams of one path. Each stream has a limit of its own besides, because of the relay's queue.
MOST_BYTES: Final = 32 * 1024 * 1024
#: A frame is at most a sixteenth of the window, because other streams wait behind it, but not shorter than what one packet of
#: the network holds.
LEAST_FRAME_BYTES: Final = 1280
FIRST_FRAME_BYTES: Final = 8 * 1024
#: A stream that has less than this under way may send although the window is full, so that it does not wait for others.
EXEMPT_BYTES: Final = 1024
#: How long data may wait on the way, as a share of the shortest round trip. On a short path it is ``LATE_S``, by which
#: processes are woken late, less two round trips: with a smaller window they would be woken more often.
WAITING_SHARE: Final = 0.25
LATE_S: Final = 0.020
#: The window may be so many times what is known to fit. A burst before the first answer fits if it waits for an eighth of a
#: round trip at most, so the path carries eight times as much in a whole one. Later frames tell less (``FIRST_GROWTH``), still
#: less if the burst showed that no more fits (``KNOWN_GROWTH``), and least once more was sent than fits (``GROWTH``).
BURST_GROWTH: Final = 8
FIRST_GROWTH: Final = 4
KNOWN_GROWTH: Final = 2
GROWTH: Final = 1.25
#: Only a frame sent with at least one part in this many of the window under way shows whether the window is too large.
FULL: Final = 3
#: The rate is the best of so many round trips: a round trip that was slow for another reason does not shrink the window.
RATE_ROUNDS: Final = 32
#: Seconds between measurements of the shortest round trip, each with half a window for one round trip. The first comes sooner,
#: because the first frames are long for a slow path.
MEASURE_EVERY_S: Final = 10.0
FIRST_MEASURE_S: Final = 1.0
#: After this time without data, the path may be another one.
FORGOTTEN_S: Final = 10.0
#: A smaller window shortens the wait after two round trips, one to send less and one to see it; the third is a margin. If data
#: then still waits for more than ``STILL_WAITING`` times as long as before, it waits behind the data of others.
FELT_ROUNDS: Final = 3
STILL_WAITING: Final = 0.8

#: When a frame was sent, in seconds of the window's clock, and how many bytes were under way then, itself included; 0 if that
#: number says nothing about the path.
Stamp = tuple[float, int]


class _Shrinking(NamedTuple):
    """How much was under way before the window was made smaller, how long data waited, and when the effect will be felt."""

    window_bytes: int
    waiting_s: float
    felt_at: float


class PathWindow:
    """The window of all sealed streams of a connection with one peer. ``clock`` gives seconds.

    Each stream may have an equal share of it under way, whatever the others have: data that a peer does not read counts, too,
    although it has left the path.
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
        self._behind_s = 0.0  # by how much the clock was set back since the beginning
        self._latest = 0.0
        self._shortest_s = 0.0
        self._allowed_s = 0.0  # what data may wait on the way
        self._growth: float = FIRST_GROWTH
        self._round_began = 0.0  # a round is over when a frame arrives that was sent after this
        self._round_trip_s = 0.0  # the shortest of this round; 0 if there is none yet
        self._full_s = 0.0  # the same for the frames that were sent with enough of the window under way (FULL)
        self._round_over = False
        self._fastest = 0.0  # bytes a second, the best of those
        self._rates: deque[float] = deque(maxlen=RATE_ROUNDS)
        self._measure_at = 0.0
        self._measure_every_s = FIRST_MEASURE_S
        self._measured_window = 0  # the window before it was halved to measure; 0 if it is not
        self._shrinking: _Shrinking | None = None
        self._held_until = 0.0  # the window is not made smaller before

    def room_bytes(self, own_bytes: int, wanted_bytes: int) -> int:
        """How much a stream with ``own_bytes`` under way and ``wanted_bytes`` to send may send; not positive if nothing.

        When the window is full, the stream may fill up its equal share of it. Room for less than a whole frame counts only if
        everything wanted fits: a short frame costs as much as a long one.
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
        """``stream`` has data, but there is no room for it."""
        self._waiting[stream] = None

    def take_waiting(self) -> list[object]:
        """The streams that wait, if there is room now. They are forgotten here."""
        if not self._waiting or (self.under_way_bytes + self.frame_bytes > self.window_bytes and not self._round_over):
            return []
        self._round_over = False  # shares may be larger than they were
        streams = list(self._waiting)
        self._waiting.clear()
        return streams

    def sent(self, stream: object, size: int, own_bytes: int) -> Stamp:
        """A frame of ``stream`` with ``size`` bytes goes out; with it, ``own_bytes`` of the stream are under way.

        A stream with much less than its share under way overtakes the others where each transport has a queue of its own, as at
        the relay: its frames say nothing about how much fits.
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
        """Seconds that never go back. If the clock is set back, data under way would seem to have arrived sooner."""
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
                self._measure_at = now + self._measure_every_s  # the round trip is as short as ever
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
            # The window may have grown just now and not be in use yet: the wait comes from what was under way.
            under_way_bytes = min(self.window_bytes, int(rate * round_trip_s))
            drained_s = (self.window_bytes - window) / rate
            self._shrinking = _Shrinking(under_way_bytes, waiting_s, now + drained_s + FELT_ROUNDS * round_trip_s)
        elif (
            now >= self._shrinking.felt_at
            and self.window_bytes <= self._shrinking.window_bytes // 2
            and waiting_s > STILL_WAITING * self._shrinking.waiting_s
        ):
            # With half as much of our data the wait is as long: others fill the path, and giving way would not shorten it.
            window, self._shrinking = self._shrinking.window_bytes, None
            self._held_until = now + MEASURE_EVERY_S
        self._set_window(window)
