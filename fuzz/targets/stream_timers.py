"""The timers of a connection: new keys of its sealed streams, and acknowledgements that wait for data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from dmsg.crypto.aead import Cipher
from dmsg.crypto.errors import NonceExhausted
from dmsg.mux.core.held_acks import HELD_S, HeldAcks
from dmsg.mux.core.rekeying import KeyTimer
from dmsg.mux.core.sealed_frames import SealedFrames
from dmsg.mux.core.stream import StreamFault, StreamState
from dmsg.mux.core.wire import ACK, CLOSE, FWD, HEADER, HEADER_BYTES, split_frames
from fuzz.choices import Choices

_AFTER_S = 60.0
#: Seconds within which timers of other streams are handled together with this one.
_EARLY_S = _AFTER_S / 60
_REKEY_FRAMES = 5
_START_S = 1_000.0


@cache
def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class _Stream:
    """A sealed stream as seen by the timers, and its peer, which opens all frames."""

    def __init__(self, number: int, state: StreamState, cipher: Cipher, now: float) -> None:
        self.id = number
        self.state = state
        self.ack_due = False
        one, other = _key(2 * number), _key(2 * number + 1)
        self.frames = SealedFrames(number, one, other, _REKEY_FRAMES, cipher)
        self.peer = SealedFrames(number, other, one, _REKEY_FRAMES, cipher)
        self.sent = 0  # under the key in use
        self.due_s = now + _AFTER_S
        self.waits = False  # its acknowledgement was given to be held, and nothing has been acknowledged since
        self.dead = False

    def seal(self, kind: int) -> None:
        """Send a frame; the last frame under a key carries a marker, and the peer follows it."""
        inner = bytes((self.sent,)) * 3
        header, payload = self.frames.seal(kind, inner)
        if self.sent == _REKEY_FRAMES:
            self.take_marker(header[:-HEADER_BYTES])
        else:
            assert len(header) == HEADER_BYTES
        assert HEADER.unpack(header[-HEADER_BYTES:]) == (kind, self.id, len(payload))
        assert self.peer.open(kind, payload) == inner
        self.sent += 1

    def take_marker(self, marker: bytes) -> None:
        """The peer finds no data in a marker, and continues with the next key."""
        ((kind, stream_id, start, end),), used = split_frames(marker)
        assert kind == ACK and stream_id == self.id and used == len(marker)
        assert self.peer.open(ACK, marker[start:end]) == b""
        self.peer.follow_marker()
        self.sent = 0


class _World:
    """A connection's timers, and the streams it has."""

    def __init__(self, cipher: Cipher) -> None:
        self.now = _START_S
        self.cipher = cipher
        self.keys = KeyTimer(_AFTER_S, _START_S)
        self.held = HeldAcks()
        self.streams: dict[int, Any] = {}

    def begin(self, number: int, state: StreamState) -> None:
        """A stream has its keys."""
        stream: Any = _Stream(number, state, self.cipher, self.now)
        self.streams[number] = stream
        self.keys.now = self.now
        self.keys.watch(stream)

    def end(self, stream: Any) -> None:
        """A stream is over."""
        stream.state = StreamState.CLOSED
        self.keys.forget(stream.id)
        self.held.forget(stream)
        del self.streams[stream.id]

    def hold(self, stream: Any) -> None:
        """The acknowledgement of a stream may wait."""
        before = self.held.due_s
        stream.ack_due = stream.waits = True
        assert self.held.hold(stream, self.now) == (self.held.due_s != before)

    def look(self) -> None:
        """Do what is due now, as a connection does."""
        now = self.now
        due = self.keys.due_s is not None and now >= self.keys.due_s
        turn = [one for one in self.streams.values() if due and one.due_s <= now + _EARLY_S]
        expected = [one for one in turn if one.sent and one.state is not StreamState.CONFIRMING]
        markers = self.keys.frames(now)
        found = [self.streams[HEADER.unpack_from(marker)[1]] for marker in markers]
        assert sorted(one.id for one in found) == sorted(one.id for one in expected)
        for one, marker in zip(found, markers, strict=True):
            one.take_marker(marker)
        for one in turn:
            one.due_s = now + _AFTER_S
        if due:
            assert self.keys.due_s == min((one.due_s for one in self.streams.values()), default=None)
        due = self.held.due_s is not None and now >= self.held.due_s
        taken: list[Any] = list(self.held.take(now))
        assert len(taken) == len(set(taken)) and (due or not taken)
        waiting = {one for one in self.streams.values() if one.waits}
        assert not due or waiting <= set(taken)
        for one in taken:
            assert one.ack_due and one.id in self.streams
            one.ack_due = one.waits = False

    def check(self) -> None:
        """No waiting acknowledgement is forgotten, and no key is too old."""
        assert self.held.due_s is not None or not any(one.waits for one in self.streams.values())
        for one in self.streams.values():
            assert self.keys.due_s is not None and self.keys.due_s <= one.due_s
            assert one.frames.key_was_used == bool(one.sent)


def one_input(data: bytes) -> None:
    """Streams begin, send, owe acknowledgements and end; time passes, or is set back.

    A stream that sent something gets a new key after a time or a number of frames, and its peer can follow. A waiting
    acknowledgement is sent when it is due, unless it went along with data. After the end no frame opens.
    """
    choices = Choices(data)
    world = _World(Cipher.AES if choices.flag() else Cipher.CHACHA)
    for _ in range(200):
        if not choices.left:
            break
        operation = choices.byte()
        number = operation >> 4 & 3
        stream = world.streams.get(number)
        match operation & 15:
            case 0 | 1 if stream is None:
                world.begin(number, StreamState.CONFIRMING if operation & 1 else StreamState.OPEN)
            case 0 | 1 | 2 if stream is not None:
                stream.seal(ACK if operation & 1 else FWD)
            case 3 if stream is not None:
                stream.state = StreamState.OPEN
            case 4 | 5 if stream is not None:
                world.hold(stream)
                before = world.held.due_s
                assert before is not None and before <= world.now + HELD_S
            case 6 if stream is not None:
                stream.ack_due = stream.waits = False  # it went along with data
            case 7:
                before = world.held.due_s
                world.held.settle()
                any_due = any(one.ack_due for one in world.streams.values())
                assert world.held.due_s in (before, None) and (any_due or world.held.due_s is None)
            case 8 if stream is not None:
                world.end(stream)
            case 9 if stream is not None:
                _close(stream, choices.byte())
                world.end(stream)
            case 10 | 11:
                world.look()
            case 12:
                world.now += choices.byte() / 32_768
            case 13:
                world.now += choices.byte() / 2
            case 14:
                world.now -= choices.byte() / 16
            case _ if world.keys.due_s is not None:
                world.now = world.keys.due_s
                world.look()
                assert world.keys.due_s is None or world.keys.due_s > world.now, "it is due again at once for ever"
        world.check()


def _close(stream: Any, reason: int) -> None:
    """The peer believes a CLOSE that is sealed, with its reason; then the keys are erased."""
    frame = stream.frames.seal_close(reason)
    kind, stream_id, size = HEADER.unpack_from(frame)
    payload = frame[HEADER_BYTES:]
    assert (kind, stream_id, size) == (CLOSE, stream.id, len(payload)) and payload[0] == reason
    assert not stream.peer.proves_close(payload[:1])
    assert not stream.peer.proves_close(payload[:-1] + bytes((payload[-1] ^ 1,)))
    if reason & 1:
        assert not stream.peer.proves_close(bytes((reason ^ 1,)) + payload[1:])
    else:
        assert stream.peer.proves_close(payload)
    assert not stream.peer.proves_close(payload), "it is no proof twice"
    stream.frames.erase()
    for call in (lambda: stream.frames.seal(FWD, b""), lambda: stream.frames.seal_close(0), stream.frames.rekey):
        try:
            call()
        except NonceExhausted:
            continue
        raise AssertionError("an erased key has sealed")
    try:
        stream.frames.open(FWD, bytes(32))
    except StreamFault:
        return
    raise AssertionError("an erased key has opened")


def seeds() -> Iterator[bytes]:
    """Keys that are used and not, in time and in frames; acknowledgements that wait, go along or end with their stream."""
    begin = b"\x00\x10\x21\x30"
    send = b"\x02\x12\x22"
    for cipher in (b"\x00", b"\x01"):
        yield cipher + begin + send + b"\x0d\x7d" + b"\x0a" + send * 2 + b"\x23" + b"\x0f" + send + b"\x0f\x0f"
        yield cipher + begin + b"\x02\x00\x01" * 7 + b"\x0d\x78\x0a" * 2 + send
        yield cipher + b"\x00\x0d\x08\x10\x02\x12\x0f\x02\x0d\x02\x0a" + b"\x08\x18\x0a\x0d\xff\x0a"
        yield cipher + begin + b"\x04\x14\x0c\x40\x24\x07\x06\x07\x0c\xff\x0a\x04\x06\x16\x07\x0a"
        yield cipher + begin + b"\x04\x14\x0e\x20\x24\x0c\xa4\x0a" + b"\x04\x08\x14\x06\x0c\xff\x0a\x07"
        yield cipher + begin + send + b"\x09\x00\x19\x05\x29\xff\x39\x00"
