"""A hostile relay between two honest ends of a sealed transport, by either carrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.events import (
    Confirmed,
    DataReceived,
    EndReceived,
    StreamClosed,
    StreamOffered,
    StreamOpened,
    UpgradeReceived,
)
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import HEADER, HEADER_BYTES, OK, REQUEST, CloseReason, encode_frame, split_frames
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords
from fuzz.sealed import TEXT

_RELAY = KEYS[2].public_key
_CONFIG = ConnectionConfig(secure_window_bytes=2_000, ack_limit_bytes=500, sealed_data_bytes=300, flush_bytes=2_000)


class _End:
    """A client with one transport: its connection, the data it wrote and was given."""

    def __init__(self, key: SecretKey, name: bytes) -> None:
        records: Any = PlainRecords()
        self.key = key
        self.core = Connection(
            key.public_key,
            records,
            now=0.0,
            config=_CONFIG,
            random=repeatable(name),
            extended=True,
            end_to_end=EndToEnd(key, _RELAY, aes=True, random=repeatable(b"e2e" + name)),
        )
        self.core.receive_data(encode_frame(OK, 0), 0.0)
        self.frames: deque[bytes] = deque()  # sent, and in the relay's hands
        self.stream: Any = None
        self.dials = False
        self.confirmed = self.over = self.ended = self.closed = False
        self.written = 0
        self.received = b""
        self.service = ""

    def feed(self, frame: bytes) -> None:
        if self.over:
            return
        try:
            events = self.core.receive_data(frame, 0.0)
        except RemoteProtocolError:
            self.over = True
            return
        for event in events:
            self._on(event)

    def _on(self, event: Any) -> None:
        core = self.core
        try:
            match event:
                case StreamOffered(stream=stream) if self.stream is None:
                    self.stream = stream
                    if stream.wants_seal:
                        self.service, _ = core.read_offer(stream)
                        self.stream = core.accept(stream)
                    else:
                        core.accept_for_upgrade(stream)
                case StreamOffered(stream=stream):
                    core.abort(stream, CloseReason.BUSY)
                case StreamOpened(stream=stream):
                    self.stream = stream
                case UpgradeReceived(stream=offered):
                    self.service, _ = core.read_offer(offered)
                    self.stream = core.accept(offered)
                case Confirmed():
                    self.confirmed = True
                case DataReceived(stream=stream, data=data):
                    assert stream.resumable, "data came in the clear"
                    self.received += data
                    core.consumed(stream, len(data))
                case EndReceived():
                    self.ended = True
                case StreamClosed(stream=stream) if stream is self.stream:
                    self.over = True
        except IntegrityError as error:
            core.abort(event.stream, error.code)
            self.over = True

    def act(self, choices: Choices) -> None:
        stream = self.stream
        if stream is None or self.over or not stream.resumable:
            return
        what = choices.below(4)
        if what < 2 and stream.state is StreamState.OPEN and not stream.end_wanted:
            data = TEXT[self.written : self.written + 1 + 4 * choices.byte()]
            self.written += len(data)
            self.core.send_data(stream, data)
        elif what == 2:
            self.core.end(stream)
        elif what == 3 and choices.byte() > 200:
            self.closed = True
            self.core.close(stream)

    def flush(self) -> None:
        data = self.core.data_to_send()
        self.core.take_writable()
        frames, _ = split_frames(data)
        self.frames += (data[start - HEADER_BYTES : end] for _, _, start, end in frames)


def one_input(data: bytes) -> None:
    """The first byte chooses the carrier; then operations of both ends and of the relay that stands between them.

    Whatever the relay does, an end is given a prefix of the data that the other end wrote for it, and a confirmed listener
    knows the requested service. If the relay is honest, everything arrives.
    """
    choices = Choices(data)
    carrier = Carrier.REQUEST if choices.flag() else Carrier.FORWARD
    dialler, listener = _End(KEYS[0], b"dialler"), _End(KEYS[1], b"listener")
    dialler.dials = True
    dialler.stream = dialler.core.open(listener.key.public_key, carrier, service="chat")
    ends = dialler, listener
    dialler_id = dialler.stream.id
    ids = {0: 7, 1: dialler_id}  # what a frame of an end is called at the other
    touched = False
    for _ in range(200):
        if not choices.left:
            break
        side = choices.byte() & 1
        end, other = ends[side], ends[1 - side]
        match choices.below(8):
            case 0 | 1:
                end.act(choices)
            case 2 | 3 | 4:
                end.flush()
                if end.frames:
                    _pass_on(end.frames.popleft(), ids[side], other)
            case 5 if end.frames:
                frame = bytearray(end.frames[0])
                mask, at = choices.byte(), choices.below(0x10000)
                frame[HEADER_BYTES + at % max(1, len(frame) - HEADER_BYTES) if len(frame) > HEADER_BYTES else 0] ^= mask
                touched |= bool(mask)
                end.frames[0] = bytes(frame)
            case 6 if end.frames:
                touched = True
                match choices.below(3):
                    case 0:
                        end.frames.popleft()
                    case 1:
                        end.frames.append(end.frames[0])
                    case _:
                        end.frames.rotate(1)
            case _:
                kind, payload = choices.byte(), choices.chunk()
                if choices.flag() and other.frames:
                    kind, payload = other.frames[-1][0], other.frames[-1][HEADER_BYTES:]  # reflected
                touched = True
                other.feed(encode_frame(kind & 15, ids[side] if choices.flag() else choices.byte(), payload))
        _check(dialler, listener)
    if not touched and not any(end.over or end.closed for end in ends):
        _finish(ends, ids)


def _pass_on(frame: bytes, transport_id: int, other: _End) -> None:
    kind, _, _ = HEADER.unpack_from(frame)
    if kind == REQUEST and other.dials:
        return
    other.feed(encode_frame(kind, transport_id, frame[HEADER_BYTES:]))


def _check(dialler: _End, listener: _End) -> None:
    for end, other in ((dialler, listener), (listener, dialler)):
        assert TEXT[: other.written].startswith(end.received)
        assert not end.ended or end.closed or len(end.received) == other.written
    if listener.confirmed:
        assert listener.service == "chat" and dialler.stream and dialler.stream.resumable


def _finish(ends: tuple[_End, _End], ids: dict[int, int]) -> None:
    for _ in range(400):
        for end in ends:
            if end.stream and end.stream.resumable and end.stream.state is StreamState.OPEN:
                end.core.end(end.stream)
        moved = False
        for side, end in enumerate(ends):
            end.flush()
            while end.frames:
                moved = True
                _pass_on(end.frames.popleft(), ids[side], ends[1 - side])
        if not moved:
            break
    for end, other in (ends, ends[::-1]):
        assert end.stream and end.stream.resumable and not (end.over and not end.ended)
        assert len(end.received) == other.written and end.ended


def seeds() -> Iterator[bytes]:
    """Handshakes by both carriers with data and ends; then each thing a relay may do at each point of them."""
    over, back = b"\x00\x02", b"\x01\x02"
    for carrier in (b"\x00", b"\x01"):
        shake = over + back + over + back + over
        talk = b"\x00\x00\x00\x40" + over * 2 + b"\x01\x00\x00\x20" + back * 3
        yield carrier + shake + talk * 2 + b"\x00\x00\x02" + b"\x01\x00\x02" + over * 2 + back * 2
        for steps in range(5):
            begun = carrier + b"".join((over, back)[n % 2] for n in range(steps))
            for side in (b"\x00", b"\x01"):
                yield begun + side + b"\x05\x01\x00\x42" + shake + talk
                yield begun + side + b"\x06\x00" + shake + talk
                yield begun + side + b"\x06\x01" + shake + talk
                yield begun + side + b"\x07\x0a\x03abc\x00\x01" + shake
                yield begun + side + b"\x07\x03\x00\x01\x01" + shake + talk
