"""The window of a path: streams that send, wait and get acknowledged by any clock; and simulated paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dmsg.mux.core.path_window import (
    EXEMPT_BYTES,
    FIRST_FRAME_BYTES,
    INITIAL_BYTES,
    LATE_S,
    LEAST_BYTES,
    LEAST_FRAME_BYTES,
    MOST_BYTES,
    WAITING_SHARE,
    PathWindow,
    Stamp,
)
from fuzz.choices import Choices

_START_S = 10_000.0
#: Bytes written at once: much more than a frame.
_MUCH_BYTES = 1 << 20
#: Frames of a simulation, and the last ones, during which the path must be in use.
_FRAMES, _LAST_FRAMES = 1_000, 250
#: Least used share of the path's rate, and longest median wait as a share of a round trip (or the time that is allowed on
#: short paths).
_USED_SHARE = 0.7
_WAITING_ROUNDS = 0.6


class _Stream:
    """A sender, its frames in flight and their bytes."""

    def __init__(self) -> None:
        self.frames: deque[tuple[Stamp, int]] = deque()
        self.bytes = 0


class _World:
    """A window with a clock that the input sets, and its model."""

    def __init__(self, most_bytes: int) -> None:
        self.now, self.last_sent_at = _START_S, 0.0
        self.most_bytes = most_bytes
        self.window = PathWindow(lambda: self.now, most_bytes)
        self.streams = [_Stream() for _ in range(4)]
        self.waiting: list[_Stream] = []

    def send(self, stream: _Stream, wanted_bytes: int) -> bool:
        """Send a frame if there is room, as a sealed stream does, otherwise wait. Gives whether it was sent."""
        window = self.window
        room = window.room_bytes(stream.bytes, wanted_bytes)
        self._check_room(stream, wanted_bytes, room)
        if room <= 0 and wanted_bytes:
            window.wait(stream)
            if stream not in self.waiting:
                self.waiting.append(stream)
            return False
        size = min(wanted_bytes, window.frame_bytes, max(0, room))  # the end of a stream needs no room
        stream.bytes += size
        stamp = window.sent(stream, size, stream.bytes)
        assert stamp[0] >= max(self.now, self.last_sent_at), "the window's time goes back"
        assert stamp[1] in (0, window.under_way_bytes)
        self.last_sent_at = stamp[0]
        stream.frames.append((stamp, size))
        return True

    def _check_room(self, stream: _Stream, wanted_bytes: int, room: int) -> None:
        window = self.window
        enough = min(wanted_bytes, window.frame_bytes)
        free = window.window_bytes - window.under_way_bytes
        share = window.window_bytes // len(window.senders | {stream}) - stream.bytes
        assert room <= max(free, share, EXEMPT_BYTES - stream.bytes)
        assert room >= enough or (free < enough and share < enough)
        assert stream.bytes or room >= min(wanted_bytes, EXEMPT_BYTES)

    def acknowledge(self, stream: _Stream, frames: int, *, late: bool) -> None:
        """The next ``frames`` of a stream have arrived; if ``late``, their send times are no longer known."""
        size, stamp = 0, None
        for _ in range(min(frames, len(stream.frames))):
            stamp, one = stream.frames.popleft()
            size += one
        if stamp is None:
            return
        stream.bytes -= size
        if not stream.frames:
            self.window.senders.discard(stream)
        self.window.acknowledged(None if late else stamp, size)

    def forget(self, stream: _Stream) -> None:
        """A stream ends, and another one begins."""
        self.window.forget(stream, stream.bytes)
        self.streams[self.streams.index(stream)] = _Stream()
        self.waiting = [one for one in self.waiting if one is not stream]

    def round_trip(self, stream: _Stream, took_s: float) -> None:
        """A stream fills its window, and all of it arrives."""
        while self.send(stream, _MUCH_BYTES):
            pass
        self.now += took_s
        while stream.frames:
            self.acknowledge(stream, 6, late=False)

    def take_waiting(self) -> None:
        """All waiting streams may go on, or none because there is no room."""
        window, expected = self.window, self.waiting
        taken = window.take_waiting()
        if taken:
            assert taken == expected
            self.waiting = []
        else:
            assert not expected or window.under_way_bytes + window.frame_bytes > window.window_bytes

    def check(self) -> None:
        """All counters are correct, and no bound is exceeded."""
        window = self.window
        assert window.under_way_bytes == sum(stream.bytes for stream in self.streams)
        assert {stream for stream in self.streams if stream.bytes} <= window.senders
        assert window.senders <= {stream for stream in self.streams if stream.frames}
        assert LEAST_BYTES <= window.window_bytes <= self.most_bytes
        longest = max(LEAST_FRAME_BYTES, window.window_bytes // 16)
        assert window.frame_bytes in (longest, FIRST_FRAME_BYTES)


def one_input(data: bytes) -> None:
    """The first byte chooses between operations and a simulated path.

    The window stays within its bounds, the data in flight is what was sent and neither acknowledged nor forgotten, each
    stream has its share, and no waiting stream is forgotten. On a constant path, the window fills the path and little
    more, even after the clock was set back.
    """
    choices = Choices(data)
    how = choices.byte()
    if how == 0xFF:
        _simulate(choices)
        return
    world = _World(MOST_BYTES if how & 1 else INITIAL_BYTES // 2 << (how >> 1) % 8)
    for _ in range(250):
        if not choices.left:
            break
        operation = choices.byte()
        stream = world.streams[operation >> 4 & 3]
        match operation & 15:
            case 0 | 1 | 2:
                world.send(stream, choices.byte() << 8 | 64)
            case 3:
                for _ in range(choices.byte() % 32):
                    if not world.send(stream, _MUCH_BYTES):
                        break
            case 4:
                world.send(stream, 0)  # the end of a stream
            case 5 | 6 | 7:
                world.acknowledge(stream, 1 + choices.byte() % 32, late=False)
            case 8:
                world.acknowledge(stream, 1 + choices.byte() % 8, late=True)
            case 9:
                world.forget(stream)
            case 10:
                world.take_waiting()
            case 11:
                world.now += choices.byte() / 1024
            case 12:
                world.round_trip(stream, choices.byte() / 1024)
            case 13:
                world.now += choices.byte() / 16
            case 14:
                world.now -= choices.byte() / 64
            case _:
                world.now += choices.byte() * 8 - 1_024
        world.check()
    for stream in list(world.streams):
        world.acknowledge(stream, len(stream.frames), late=False)
        world.check()
    assert not world.window.under_way_bytes and not world.window.senders
    world.take_waiting()
    assert not world.waiting


def _simulate(choices: Choices) -> None:
    """One or more streams that always have data, over a path with a rate, a delay and an unbounded queue."""
    round_trip_s = (5 + choices.byte() % 196) / 1000
    fits_bytes = 4_096 + choices.byte() * 2_048
    rate = fits_bytes / round_trip_s
    streams = [_Stream() for _ in range(1 + choices.byte() % 4)]
    set_back_at, set_back_s = choices.byte() * 2, choices.byte() * 4
    now = _START_S
    shown_s = 0.0  # what the clock shows besides the time
    window = PathWindow(lambda: now + shown_s)
    on_path: deque[tuple[float, _Stream]] = deque()
    free_at, marked_at, marked_bytes, sent_bytes = now, now, 0, 0
    waits: list[float] = []
    for number in range(_FRAMES):
        if set_back_s and number == set_back_at:
            shown_s = -float(set_back_s)
        if number == _FRAMES - _LAST_FRAMES:
            marked_at, marked_bytes, waits = now, sent_bytes, []
        blocked = 0
        while blocked < len(streams):
            stream = streams[0]
            streams.append(streams.pop(0))
            room = window.room_bytes(stream.bytes, _MUCH_BYTES)
            if room <= 0:
                window.wait(stream)
                blocked += 1
                continue
            blocked = 0
            size = min(_MUCH_BYTES, window.frame_bytes, room)
            sent_bytes += size
            stream.bytes += size
            stream.frames.append((window.sent(stream, size, stream.bytes), size))
            begins = max(now, free_at)
            waits.append(begins - now)
            free_at = begins + size / rate
            on_path.append((free_at + round_trip_s, stream))
        assert on_path, "nothing is under way and nothing may be sent"
        now, stream = on_path.popleft()
        stamp, size = stream.frames.popleft()
        stream.bytes -= size
        if not stream.frames:
            window.senders.discard(stream)
        window.acknowledged(stamp, size)
        assert LEAST_BYTES <= window.window_bytes <= MOST_BYTES
        window.take_waiting()
    used = (sent_bytes - marked_bytes) / ((now - marked_at) * rate)
    assert used >= _USED_SHARE, f"{used:.2f} of the rate"
    allowed_s = max(_WAITING_ROUNDS * round_trip_s, LATE_S, (1 + WAITING_SHARE) * LEAST_BYTES / rate)
    waited_s = sorted(waits)[len(waits) // 2]
    assert waited_s <= allowed_s + LEAST_FRAME_BYTES / rate, f"{waited_s:.3f} s of {round_trip_s:.3f}"


def seeds() -> Iterator[bytes]:
    """Growth from round to round, a full window with streams that wait, shrinking, measuring, idleness, clocks set back."""
    fill, acknowledge, soon = b"\x03\x1f", b"\x05\x1f", b"\x0b\x20"
    rounds = (fill + soon + acknowledge) * 3
    slow = (fill + b"\x0b\xff" + acknowledge) * 4
    for how in (b"\x01", b"\x00", b"\x0e"):
        yield how + rounds
        yield how + rounds + slow * 3
        yield how + (b"\x0c\x20" * 4 + b"\x0d\x10") * 24 + b"\x0c\x50" * 80
        yield how + (b"\x0c\x04" * 4 + b"\x0d\x10") * 24 + b"\x0c\x80" * 100
        yield how + fill * 2 + b"\x13\x1f" + b"\x23\x1f" + b"\x0a" + soon + acknowledge + b"\x0a" + b"\x05\x01\x0a"
        yield how + rounds + b"\x0d\xff" + rounds + b"\x0d\xc0" + b"\x00\x04" + soon + acknowledge + rounds
        yield how + (fill + soon + b"\x0e\x40" + acknowledge) * 2 + rounds + b"\x0f\x00" + rounds
        yield how + fill + b"\x14\x00\x04\x19" + b"\x08\x01" + b"\x09" + fill + b"\x0b\x00" + acknowledge
        yield how + (b"\x10\x01" + fill + soon + b"\x15\x00" + acknowledge + b"\x0d\x20") * 12
        yield how + rounds + (fill + b"\x0b\xff\x0b\xff" + acknowledge + fill + b"\x0d\x10" + acknowledge) * 8
    for path in (b"\x00\x00", b"\x2d\x20", b"\xc3\xff", b"\x5f\x10"):
        yield b"\xff" + path + b"\x00"
        yield b"\xff" + path + b"\x02\xa0\x10"
        yield b"\xff" + path + b"\x00\x20\xff"
