"""The window of a path, held against simulated paths: a rate, a delay, and a queue in front of the narrowest hop."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import pytest

from dmsg.mux.core.path_window import (
    EXEMPT_BYTES,
    INITIAL_BYTES,
    LEAST_BYTES,
    LEAST_FRAME_BYTES,
    MOST_BYTES,
    PathWindow,
    Stamp,
)

FRAME_BYTES = 32_750


@dataclass
class Stream:
    """A sender that always has data. ``reads`` is whether its peer's application takes what comes."""

    limit_bytes: int = MOST_BYTES
    reads: bool = True
    under_way: list[tuple[Stamp, int]] = field(default_factory=list)
    counted_bytes: int = 0
    delivered_bytes: int = 0

    __hash__ = object.__hash__


class Simulation:
    """Streams over one path of ``bits_per_s`` and ``round_trip_s``; ``waits`` are the times that data waited on the way."""

    def __init__(self, round_trip_s: float, bits_per_s: float, streams: list[Stream]) -> None:
        self.now = 0.0
        self.round_trip_s = round_trip_s
        self.bytes_per_s = bits_per_s / 8
        self.streams = streams
        self.window = PathWindow(lambda: self.now)
        self.waits: list[float] = []
        self._free_at = 0.0
        self._numbers = count()
        self._arriving: list[tuple[float, int, Stream]] = []
        self._turn = 0

    def run(self, until: float) -> float:
        """Go on until the time ``until``; gives the share of the path's rate that was used."""
        began, before = self.now, self._delivered()
        self.waits = []
        self._send()
        while self._arriving and self._arriving[0][0] <= until:
            self.now, _, stream = heapq.heappop(self._arriving)
            stamp, size = stream.under_way.pop(0)
            stream.delivered_bytes += size
            stream.counted_bytes -= size
            if not stream.under_way:
                self.window.senders.discard(stream)
            self.window.acknowledged(stamp, size)
            self.window.take_waiting()
            self._send()
        self.now = until
        return (self._delivered() - before) / (until - began) / self.bytes_per_s

    def _delivered(self) -> int:
        return sum(stream.delivered_bytes for stream in self.streams)

    def _send(self) -> None:
        skipped = 0
        while skipped < len(self.streams):
            self._turn = (self._turn + 1) % len(self.streams)
            skipped = 0 if self._send_frame(self.streams[self._turn]) else skipped + 1

    def _send_frame(self, stream: Stream) -> bool:
        own = sum(size for _, size in stream.under_way) if stream.limit_bytes < MOST_BYTES else 0
        room = min(stream.limit_bytes - own, self.window.room_bytes(stream.counted_bytes, FRAME_BYTES))
        if room <= 0:
            if own < stream.limit_bytes:
                self.window.wait(stream)
            return False
        size = min(FRAME_BYTES, self.window.frame_bytes, room)
        stream.counted_bytes += size
        stream.under_way.append((self.window.sent(stream, size, stream.counted_bytes), size))
        start = max(self.now, self._free_at)
        self.waits.append(start - self.now)
        self._free_at = start + size / self.bytes_per_s
        if stream.reads:
            heapq.heappush(self._arriving, (self._free_at + self.round_trip_s, next(self._numbers), stream))
        return True


@pytest.mark.parametrize("mbit_per_s", [10, 100, 1000])
@pytest.mark.parametrize("round_trip_ms", [10, 50, 100])
def test_a_path_is_filled_and_little_waits_on_it(round_trip_ms, mbit_per_s):
    round_trip_s = round_trip_ms / 1000
    simulation = Simulation(round_trip_s, mbit_per_s * 1e6, [Stream()])
    simulation.run(4.0)
    assert simulation.run(6.0) >= 0.95
    waits = sorted(simulation.waits)
    assert waits[len(waits) // 2] <= 0.35 * round_trip_s + LEAST_FRAME_BYTES / simulation.bytes_per_s


def test_streams_share_a_path():
    streams = [Stream() for _ in range(8)]
    simulation = Simulation(0.05, 100e6, streams)
    assert simulation.run(5.0) >= 0.9
    shares = [stream.delivered_bytes for stream in streams]
    assert max(shares) <= 1.3 * min(shares)


def test_a_stream_whose_peer_does_not_read_takes_no_room_from_others():
    stuck = Stream(limit_bytes=1 << 20, reads=False)
    simulation = Simulation(0.05, 100e6, [stuck, Stream()])
    simulation.run(2.0)
    assert simulation.run(5.0) >= 0.95


def test_a_path_that_others_fill_is_not_left_to_them():
    simulation = Simulation(0.05, 100e6, [Stream()])
    simulation.run(3.0)
    simulation.round_trip_s += 0.3
    simulation.run(20.0)
    assert simulation.run(30.0) >= 0.8


def test_a_wait_is_not_taken_for_that_of_others_before_the_window_was_in_use():
    """At first the window grows to more than is under way. That data still waits once it has shrunk says nothing then."""
    path = Simulation(0.005, 140_902_400, [Stream()])
    path.run(0.9)
    assert path.window.window_bytes < 300_000  # the path carries 88,000 in a round trip, and a little may wait


def test_a_path_that_becomes_wider_is_filled_again():
    simulation = Simulation(0.05, 10e6, [Stream()])
    simulation.run(3.0)
    simulation.bytes_per_s *= 10
    simulation.run(5.0)
    assert simulation.run(8.0) >= 0.9


def test_a_stream_with_little_to_say_does_not_wait_for_the_others():
    simulation = Simulation(0.05, 10e6, [Stream()])
    simulation.run(3.0)
    window = simulation.window
    assert window.under_way_bytes > window.window_bytes - window.frame_bytes
    assert window.room_bytes(0, 64) >= 64
    window.senders |= set(range(100_000))
    assert window.room_bytes(0, 64) == EXEMPT_BYTES
    assert window.room_bytes(EXEMPT_BYTES, 64) <= 0


def test_a_newcomer_has_an_equal_share_at_once():
    now = [0.0]
    window = PathWindow(lambda: now[0])
    first, second = Stream(), Stream()
    window.sent(first, window.window_bytes, window.window_bytes)
    assert window.room_bytes(window.window_bytes, FRAME_BYTES) <= 0
    share = window.room_bytes(0, FRAME_BYTES)
    assert share == window.window_bytes // 2
    window.sent(second, share, share)
    assert window.room_bytes(share, FRAME_BYTES) <= 0


def test_frames_that_overtake_the_others_say_nothing_of_the_path():
    """At the relay each transport has a queue of its own: a short message does not wait behind a transfer there."""
    now = [0.0]
    window = PathWindow(lambda: now[0])
    bulk, pings = Stream(), Stream()
    size = window.window_bytes
    transfer = window.sent(bulk, size, size)
    for _ in range(20):
        ping = window.sent(pings, 64, 64)
        now[0] += 0.01
        window.acknowledged(ping, 64)
    assert window.window_bytes == size
    window.acknowledged(transfer, size)
    assert window.window_bytes > size


def test_what_a_stream_leaves_behind_is_room_for_others():
    now = [0.0]
    window = PathWindow(lambda: now[0])
    first, second = Stream(), Stream()
    window.sent(first, window.window_bytes, window.window_bytes)
    window.wait(second)
    assert window.take_waiting() == []
    window.forget(first, window.window_bytes)
    assert window.take_waiting() == [second]
    assert window.take_waiting() == []
    assert window.senders == set()


@pytest.mark.parametrize(("idle_s", "remembered"), [(1.0, True), (11.0, False)])
def test_a_path_that_was_idle_for_long_begins_anew(idle_s, remembered):
    simulation = Simulation(0.05, 100e6, [Stream()])
    simulation.run(5.0)
    window = simulation.window
    before = window.window_bytes
    window.forget(simulation.streams[0], window.under_way_bytes)
    simulation.now += idle_s
    assert before > INITIAL_BYTES
    window.sent(simulation.streams[0], 1, 1)
    assert window.window_bytes == (before if remembered else INITIAL_BYTES)


def test_a_clock_that_stands_still_says_nothing():
    window = PathWindow(lambda: 5.0)
    before = window.window_bytes
    stream = Stream()
    for _ in range(100):
        window.acknowledged(window.sent(stream, 1000, 1000), 1000)
    assert window.window_bytes == before
    assert window.under_way_bytes == 0


def test_the_window_keeps_its_bounds_however_long_round_trips_are():
    now = [0.0]
    window = PathWindow(lambda: now[0])
    stream = Stream()
    for step in range(2000):
        stamp = window.sent(stream, window.window_bytes, window.window_bytes)
        window.wait(stream)
        now[0] += 0.001 * (1 + step * 7919 % 977)
        window.acknowledged(stamp, window.under_way_bytes)
        window.take_waiting()
        assert LEAST_BYTES <= window.window_bytes <= MOST_BYTES


@pytest.mark.parametrize(
    ("round_trip_s", "bits_per_s", "at_s", "set_back_s"),
    [(0.05, 100e6, 0.06, 3600.0), (0.2, 1000e6, 1.5, 3600.0), (0.1, 2e6, 0.5, 0.9)],
    ids=["at first", "measuring", "by less than data waits"],
)
def test_a_clock_that_is_set_back_leaves_neither_a_queue_nor_half_a_window(round_trip_s, bits_per_s, at_s, set_back_s):
    simulation = Simulation(round_trip_s, bits_per_s, [Stream()])
    clock_s = 1e6
    simulation.window = PathWindow(lambda: simulation.now + clock_s)
    simulation.run(at_s)
    clock_s -= set_back_s
    simulation.run(10.0)
    assert simulation.run(20.0) > 0.9
    assert max(simulation.waits) < round_trip_s


def test_of_a_round_with_half_a_window_the_shortest_trip_counts_not_the_last():
    """Data that waited for another reason while it was measured would pass for the path's own length otherwise."""
    now = [0.0]
    window = PathWindow(lambda: now[0])
    stream = Stream()

    def sent():
        size = window.window_bytes
        return window.sent(stream, size, size), size

    def trip(seconds):
        frame = sent()
        now[0] += seconds
        window.acknowledged(*frame)

    trip(0.050)
    while now[0] < 1.0:
        trip(0.058)
    full_bytes = window.window_bytes
    first = sent()
    now[0] += 0.007
    second = sent()
    now[0] += 0.050
    window.acknowledged(*first)
    assert window.window_bytes == full_bytes // 2, "it is measured"
    now[0] += 0.001
    window.acknowledged(*second)
    trip(0.080)
    assert window.window_bytes == full_bytes
    trip(0.060)
    assert window.window_bytes <= full_bytes, "data has waited again"
