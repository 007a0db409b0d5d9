"""The ends of transports between two clients: who is told that everything has arrived, and whether that is true."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from dmsg.errors import LocalProtocolError
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.endings import close_is_final, peers_reason
from dmsg.mux.core.errors import Busy
from dmsg.mux.core.events import DataReceived, EndAcked, EndReceived, StreamClosed
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import HEADER_BYTES, OK, CloseReason, encode_close, encode_frame, split_frames
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords
from fuzz.sealed import TEXT

#: Number of transports; the last one is plain.
_TRANSPORTS = 3
_PLAIN = _TRANSPORTS - 1
_SHARED_BYTES = 8 << 20
_TEXT = TEXT * 64
_CONFIG = ConnectionConfig(
    send_window_bytes=2_000,
    secure_window_bytes=3_000,
    ack_limit_bytes=1_000,
    largest_window_bytes=4 << 20,
    receive_limit_bytes=10_000,
    pause_bytes=4_000,
    resume_bytes=1_000,
    pending_limit_bytes=100_000,
    rekey_after_frames=40,
    rekey_after_s=2.0,
)


class _Side:
    """One application's side of a transport."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.written = 0
        self.given = b""
        self.read = 0
        self.ending = self.closing = self.blocked = False
        self.verdict: int | None = None  # the reason it was told, when it was over
        self.lost = self.aborted = False  # its path was lost, for the transport to look for another; or it gave up


class _End:
    """A client: its connection, the sides of its transports, and its frames on their way."""

    def __init__(self, number: int, world: _World) -> None:
        self.number = number
        records: Any = PlainRecords()
        self.buffers = Buffers(_SHARED_BYTES)
        key = KEYS[number].public_key
        self.core = Connection(
            key,
            records,
            now=world.now,
            config=_CONFIG,
            random=repeatable(b"%d" % number),
            extended=True,
            clock=lambda: world.now,
            buffers=self.buffers,
        )
        self.core.receive_data(encode_frame(OK, 0), world.now)
        self.sides = [_Side(self._open(path)) for path in range(_TRANSPORTS)]
        self.way: deque[bytes] = deque()

    def _open(self, path: int) -> Stream:
        """A stream whose handshake is through: id 2 × ``path`` at the first client, one more at the second."""
        opener = self.core._openings
        remote = KEYS[1 - self.number].public_key
        plain = opener._new_stream(2 * path + self.number, remote, b"", initiator=not self.number)
        plain.state = StreamState.CONFIRMING
        if path == _PLAIN:
            plain.move(StreamState.OPEN)
            return plain
        mine, theirs = self.number, 1 - self.number
        secrets = [hashlib.sha256(b"%d %d" % (path, n)).digest() for n in range(4)]
        keys = SecureKeys(secrets[mine], secrets[theirs], secrets[2 + mine], secrets[2 + theirs], b"t" * 16)
        plain.state = StreamState.UPGRADING
        return opener._seal(plain, keys, StreamState.OPEN)

    def side_of(self, stream: Stream) -> _Side:
        """The side that a stream of the core is."""
        return self.sides[stream.id // 2]

    def take(self, events: Any) -> None:
        """Handle a core's events as a transport does."""
        for event in events:
            side = self.side_of(event.stream)
            assert side.verdict is None and not side.lost, "an event behind the end"
            if isinstance(event, DataReceived):
                assert not side.closing and not side.stream.dropped
                side.given += event.data
            elif isinstance(event, EndReceived):
                assert side.stream.end_received
            elif isinstance(event, EndAcked):
                assert side.ending and side.stream.end_acked
            elif isinstance(event, StreamClosed):
                self._closed(side, event)

    def _closed(self, side: _Side, event: StreamClosed) -> None:
        if event.local:
            side.verdict = event.code
        elif close_is_final(side.stream, proven=event.proven, closing=side.closing):
            side.verdict = peers_reason(side.stream, event.code, closing=side.closing)
        else:
            assert side.stream.resumable and not event.proven
            side.lost = True

    def act(self, side: _Side, what: int, size: int) -> None:
        """Something an application does now."""
        core, stream = self.core, side.stream
        if stream.state is not StreamState.OPEN and what < 2:
            try:
                core.send_data(stream, b"x")
            except LocalProtocolError:
                return
            raise AssertionError("a stream that is not open has taken data")
        if what == 0 and not side.ending:
            data = _TEXT[side.written : side.written + size]
            side.written += len(data)
            try:
                side.blocked = core.send_data(stream, data)
            except Busy:
                assert stream.pending.size > _CONFIG.pending_limit_bytes
                side.aborted = True
                core.abort(stream, CloseReason.BUSY)
        elif what == 1:
            side.ending = True
            core.end(stream)
        elif what == 2 and side.read < len(side.given):
            size = min(size, len(side.given) - side.read)
            side.read += size
            core.consumed(stream, size)
        elif what == 3 and stream.state in (StreamState.OPEN, StreamState.CLOSING):
            side.ending = side.closing = True
            if core.close(stream) and side.verdict is None:
                side.verdict = CloseReason.NORMAL
        elif what == 4 and stream.state is not StreamState.CLOSED:
            side.aborted = True
            core.abort(stream, size & 0xFF)

    def flush(self) -> None:
        """Send everything that may be sent now."""
        core = self.core
        while core.wants_write:
            data = core.data_to_send()
            frames, used = split_frames(data)
            assert used == len(data)
            self.way += [data[start - HEADER_BYTES : end] for _, _, start, end in frames]
            for stream in core.take_writable():
                self.side_of(stream).blocked = False
                # It may have written since, as it was not told to pause again.
                assert not stream.blocked and stream.pending.size <= _CONFIG.pause_bytes

    def check(self, other: _End) -> None:
        """All counters are correct, and whoever was told a good end has received everything that he still wanted."""
        core = self.core
        for mine, theirs in zip(self.sides, other.sides, strict=True):
            stream = mine.stream
            assert _TEXT.startswith(mine.given) and len(mine.given) <= theirs.written
            assert stream.acked_bytes <= stream.sent_bytes <= mine.written
            assert (core.streams.get(stream.id) is stream) == (stream.state is not StreamState.CLOSED)
            if stream.state is StreamState.OPEN:
                assert stream.was_cut or stream.pending.size + stream.sent_bytes == mine.written
                assert stream.unread_bytes == len(mine.given) - mine.read
                assert not mine.blocked or stream.was_cut or stream.pending.size > _CONFIG.resume_bytes
            if mine.verdict == CloseReason.NORMAL and not mine.aborted:
                assert stream.acked_bytes == mine.written
            if mine.verdict == CloseReason.NORMAL and not mine.aborted and stream.resumable:
                assert len(theirs.given) == mine.written, "a good end, and something is missing there"
                assert mine.closing or len(mine.given) == theirs.written, "a good end, and something is missing here"
        paths = core._openings._paths.values()
        for path in paths:
            live: Any = [side.stream for side in self.sides[:_PLAIN] if side.stream.id in core.streams]
            assert path.under_way_bytes == sum(stream._outstanding_bytes for stream in live)
            assert set(path.senders) <= {stream for stream in live if stream._outstanding}
        counted: Any = [side.stream for side in self.sides[:_PLAIN]]
        assert self.buffers.used_bytes == sum(stream._window._counted_bytes for stream in counted)


class _World:
    """Two clients and the time."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.ends = _End(0, self), _End(1, self)

    def deliver(self, end: _End, count: int) -> None:
        """The next frames of a client reach the other in one read."""
        other = self.ends[1 - end.number]
        read = b""
        for _ in range(min(count, len(end.way))):
            frame = bytearray(end.way.popleft())
            frame[2] ^= 1  # the relay's translation of ids
            read += bytes(frame)
        other.take(other.core.receive_data(read, self.now))

    def look(self, end: _End) -> None:
        """Act on the timeouts of a client's connection."""
        due = end.core.next_timeout()
        if due is None or self.now < due:
            return
        held = end.core._held_acks.due_s
        owing = any(side.stream.ack_due and side.stream in end.core._held_acks._streams for side in end.sides)
        end.take(end.core.handle_timeout(self.now))
        if held is not None and self.now >= held:
            assert end.core.wants_write or not owing, "an acknowledgement is forgotten"
        due = end.core.next_timeout()
        assert due is None or due > self.now, "it is due again at once for ever"


def one_input(data: bytes) -> None:
    """Applications write, read, end, close and give up; the relay forges CLOSEs, and loses data on a path.

    Nobody is told a good end while some of his data is missing at the other side. Between honest clients over an honest
    relay everything arrives and all ends are good, and after the end all counters are zero.
    """
    choices = Choices(data)
    world = _World()
    ends = world.ends
    hostile = False
    for _ in range(160):
        if not choices.left:
            break
        operation = choices.byte()
        end = ends[operation >> 7]
        path = (operation >> 5 & 3) % _TRANSPORTS
        side = end.sides[path]
        match operation & 31:
            case 0 | 1 | 2:
                end.act(side, 0, 1 + choices.byte() * 4)
            case 3:
                end.act(side, 0, 1 + choices.byte() * 256)
            case 4:
                end.act(side, 1, 0)
            case 5 | 6 | 7:
                end.act(side, 2, 1 + choices.byte() * 256)
            case 8 | 9:
                end.act(side, 3, 0)
            case 10:
                end.act(side, 4, choices.byte())
            case 11 | 12 | 13 | 14:
                end.flush()
            case 15 | 16 | 17 | 18 | 19:
                world.deliver(end, 1 + choices.byte() % 16)
            case 20:
                world.deliver(end, len(end.way))
            case 21:
                world.now += choices.byte() / 1_024
                world.look(end)
            case 22:
                world.now = max(world.now, end.core.next_timeout() or 0.0)
                world.look(end)
            case 23 | 24:  # made up by the relay
                hostile = True
                frame = encode_close(side.stream.id, choices.pick((0, CloseReason.REFUSED, CloseReason.PEER_GONE)))
                alone = side.verdict is None and side.stream.resumable and not side.stream.end_acked
                end.take(end.core.receive_data(frame, world.now))
                assert side.verdict is None or not alone, "the relay alone has ended a transport"
            case 25:
                hostile = True
                end.way = deque(frame for frame in end.way if frame[2] >> 1 != path)
                frame = encode_close(side.stream.id, CloseReason.PEER_GONE)
                end.take(end.core.receive_data(frame, world.now))
            case 26 | 27 | 28:
                for each in ends:
                    each.flush()
                for each in ends:
                    world.deliver(each, len(each.way))
            case _:
                for one in end.sides:
                    end.act(one, 2, len(one.given))
        for each, other in (ends, ends[::-1]):
            each.check(other)
    if not hostile:
        _finish(world)
    for each in ends:
        for side in each.sides:
            each.core.abort(side.stream)
            side.stream.let_go()
        assert not each.core.streams and not each.buffers.used_bytes
        for window in each.core._openings._paths.values():
            assert not window.under_way_bytes and not window.senders and not window._waiting


def _finish(world: _World) -> None:
    """All sides that are still open end; everything is read; then all close."""
    ends = world.ends
    for close in (False, True):
        for end in ends:
            for side in end.sides:
                if close or side.stream.state is StreamState.OPEN:
                    end.act(side, 3 if close else 1, 0)
        for _ in range(3_000):
            for end in ends:
                for side in end.sides:
                    end.act(side, 2, len(side.given))
                end.flush()
            moved = any(end.way for end in ends)
            for end in ends:
                world.deliver(end, len(end.way))
            if not moved and not any(end.core.wants_write for end in ends):
                due = [at for end in ends if (at := end.core._held_acks.due_s) is not None]
                if not due:
                    break
                world.now = min(due)
                for end in ends:
                    world.look(end)
        for end, other in (ends, ends[::-1]):
            end.check(other)
            for mine, theirs in zip(end.sides, other.sides, strict=True):
                cut = (one.aborted or one.closing or one.verdict == CloseReason.SLOW_CONSUMER for one in (mine, theirs))
                if mine.stream.half_closes and not close and not any(cut):
                    assert mine.stream.end_acked and len(theirs.given) == mine.written
    for end in ends:
        for side in end.sides:
            over = side.verdict is not None or side.aborted
            assert over and side.stream.state is StreamState.CLOSED, "it never ends"


def seeds() -> Iterator[bytes]:
    """Both ways with half-closes and closes in each order, unread data, windows that grow, forged and lost CLOSEs."""
    write, back, both, read = b"\x00\x40", b"\x80\x40", b"\x1a", b"\x1d\x9d"
    talk = (write + back + both) * 2 + read + b"\x16\x96" + both
    for path in range(_TRANSPORTS):
        at = bytes((path << 5,))
        there = bytes((path << 5 | 0x80,))
        said = (at + b"\x40" + there + b"\x40" + both + read + both) * 2

        def op(number: int, *, peer: bool = False, path: int = path) -> bytes:
            return bytes((path << 5 | number | (0x80 if peer else 0),))

        end, close, give_up = op(4), op(8), op(10)
        their_end, their_close = op(4, peer=True), op(8, peer=True)
        yield said + end + both + read + both + their_end + both * 2 + close + both * 2
        yield said + end + their_end + both * 2 + their_close + both + close + both
        yield said + close + both + their_close + both * 2
        yield said + there + b"\x40" + close + both * 2 + there + b"\x40" + both * 3
        yield said + there + b"\x40" + close + both + their_end + both * 2
        yield (
            said
            + op(3, peer=True)
            + b"\x20"
            + their_close
            + both
            + at
            + b"\x40"
            + both * 2
            + op(10, peer=True)
            + b"\x00"
            + both
        )
        yield said + give_up + b"\x00" + both * 2
        yield said + end + their_end + both + there + b"\x20" + give_up + b"\x00" + both
        yield said + their_end + both + give_up + b"\x00" + both
        yield said + their_end + both + at + b"\x40" + op(10, peer=True) + b"\x00" + both
        stuck = said + op(3, peer=True) + b"\x20" + their_close + both + at + b"\x40" + close
        yield stuck + b"\x0b\x14\x8b" + op(10, peer=True) + b"\x00\x8b\x94"
        for forged in (b"\x00", b"\x01", b"\x02"):
            for number in (23, 25):
                more = forged if number == 23 else b""
                yield said + at + b"\x40" + op(number) + more + both * 2
                yield said + end + their_end + both * 2 + op(number) + more + both
                yield said + end + both * 2 + op(number) + more + op(number, peer=True) + more + both
                yield said + close + b"\x0b" + op(number) + more + both
        yield said + op(3) + b"\xff" + op(3) + b"\xff" + both * 4 + read + both
        yield said + (op(3) + b"\xa0" + both * 3 + read + both * 3) * 9
        yield (
            said
            + at
            + b"\x40" * 1
            + (at + b"\xff" + both) * 10
            + b"\x1d"
            + both * 2
            + op(5, peer=True)
            + b"\x01"
            + both
        )
    yield talk + b"\x00\x40\x20\x40\x40\x40" + both + b"\x16\x15\xff" * 12 + write + both * 2
    yield talk + b"\x03\xff\x23\xff" + b"\x0b\x0f\x02\x8b\x8f\x02" * 12
    yield write + b"\x0b\x14\x95\x10" + b"\x8b\x94" + talk
    yield (write + both + b"\x96" + both) * 30
