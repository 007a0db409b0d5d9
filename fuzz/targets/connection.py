"""A client's connection with a hostile server and an application that does anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.errors import Busy
from dmsg.mux.core.events import DataReceived, StreamOffered
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import ConnectionState, Stream, StreamState
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    OK,
    REQUEST,
    encode_frame,
    split_frames,
)
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords

_US, *_PEERS = [key.public_key for key in KEYS]
#: Small limits, so that a short input reaches every one of them.
_CONFIG = ConnectionConfig(
    send_window_bytes=600,
    receive_limit_bytes=70_000,
    frame_data_bytes=100,
    sealed_data_bytes=100,
    pause_bytes=300,
    resume_bytes=100,
    pending_limit_bytes=2_000,
    flush_bytes=500,
    control_limit_bytes=2_000,
    offered_limit=4,
)


class _World:
    """The connection and its application's view of it."""

    def __init__(self, choices: Choices, *, extended: bool) -> None:
        self.choices = choices
        self.now = 0.0
        self.core = Connection(
            _US,
            PlainRecords(),  # type: ignore[arg-type]
            now=0.0,
            config=_CONFIG,
            random=repeatable(b"ids"),
            extended=extended,
        )
        self.streams: list[PlainStream] = []
        self.unread: dict[Stream, int] = {}
        self.received_bytes = 0
        self.sent = b""

    def feed(self, data: bytes) -> bool:
        """Handle a read as a shell does; ``False`` if the connection is to be dropped."""
        self.received_bytes += len(data)
        events: Any
        try:
            events = self.core.receive_data(data, self.now)
            alive = True
        except RemoteProtocolError as error:
            events, alive = error.events, False
        given = 0
        for event in events:
            if isinstance(event, StreamOffered):
                self.streams.append(event.stream)
            elif isinstance(event, DataReceived):
                given += len(event.data)
                self.unread[event.stream] = self.unread.get(event.stream, 0) + len(event.data)
        assert given <= self.received_bytes
        return alive

    def frame(self) -> bytes:
        """A frame of a hostile server that knows what is open."""
        choices, core = self.choices, self.core
        kind = choices.pick((FWD, ACK, REQUEST, ACCEPT, CLOSE, OK, choices.below(256)))
        known = list(core.streams)
        stream_id = known[choices.byte() % len(known)] if known and choices.flag() else choices.below(0x10000)
        stream = core.streams.get(stream_id)
        match choices.below(5):
            case 0 if stream is not None:
                payload = stream.request + choices.chunk(64)
            case 1:
                payload = choices.pick(_PEERS).raw + _US.raw + choices.chunk(64)
            case 2:
                payload = choices.below(0x10000).to_bytes(2, "big") + choices.chunk()
            case 3:
                payload = bytes(2) + bytes(1_000 * choices.below(64))
            case _:
                payload = choices.chunk()
        return encode_frame(kind, stream_id, payload)

    def act(self) -> None:
        """Something an application may do now."""
        choices, core = self.choices, self.core
        what = choices.below(8)
        if what == 0:
            if core.state is ConnectionState.READY:
                self.streams.append(core.open(choices.pick(_PEERS)))
            return
        if not self.streams:
            return
        stream = self.streams[choices.byte() % len(self.streams)]
        if what == 1 and stream.state is StreamState.OFFERED:
            (core.accept_for_upgrade if choices.flag() else core.accept)(stream)
        elif what == 2 and stream.state is StreamState.OPEN:
            try:
                core.send_data(stream, bytes(4 * choices.byte()))
            except Busy:
                core.abort(stream)
        elif what == 3 and self.unread.get(stream):
            size = min(self.unread[stream], 1 + choices.byte() * 256)
            self.unread[stream] -= size
            core.consumed(stream, size)
        elif what == 4:
            core.close(stream)
        elif what == 5:
            core.abort(stream, choices.byte())
        elif what == 6:
            core.end(stream)

    def flush(self) -> None:
        """The network takes data: only whole frames of lengths that peers accept."""
        core = self.core
        data = core.data_to_send()
        core.take_writable()
        frames, used = split_frames(data)
        assert used == len(data), "a part of a frame was sent"
        for kind, _, start, end in frames:
            assert kind in (REQUEST, ACCEPT, CLOSE, FWD, ACK)
            assert kind != FWD or end - start <= 100 + 80
        assert not core._out._control and not core._out.control_bytes and not core.overloaded

    def check(self) -> None:
        """Check the invariants between any two operations."""
        core = self.core
        assert core._out.control_bytes == sum(map(len, core._out._control))
        assert core._openings.offered == sum(one.state is StreamState.OFFERED for one in core.streams.values())
        assert core._openings.offered <= _CONFIG.offered_limit
        assert len(core._tail) < 70_000
        for stream_id, stream in core.streams.items():
            assert isinstance(stream, PlainStream)
            assert stream.id == stream_id and stream.state is not StreamState.CLOSED
            assert stream.unread_bytes <= _CONFIG.receive_limit_bytes
            assert 0 <= stream.window.outstanding_bytes <= _CONFIG.send_window_bytes
            assert stream.acked_bytes <= stream.sent_bytes
            assert stream.queued == (stream in core._out._sending)
            assert not stream.sendable or stream.queued
        for stream in self.streams:
            assert (core.streams.get(stream.id) is stream) == (stream.state is not StreamState.CLOSED)


def one_input(data: bytes) -> None:
    """The first byte chooses the kind of server; then operations of the server, application, network and clock.

    Only ``RemoteProtocolError`` is raised; the connection's counters are correct, and no limit is exceeded.
    """
    choices = Choices(data)
    kind = choices.byte()
    world = _World(choices, extended=bool(kind & 1))
    alive = True
    if not kind & 2:
        alive = world.feed(encode_frame(OK, 0))
    for _ in range(256):
        if not choices.left or not alive:
            break
        match choices.below(8):
            case 0 | 1 | 2:
                alive = world.feed(world.frame())
            case 3:
                frames = b"".join(world.frame() for _ in range(choices.below(6)))
                cut = choices.below(0x10000) % (len(frames) + 1)
                alive = world.feed(frames[:cut]) and world.feed(frames[cut:])
            case 4:
                alive = world.feed(choices.chunk())
            case 5:
                world.flush()
            case 6:
                world.act()
            case _:
                world.now += choices.byte()
                try:
                    world.core.handle_timeout(world.now)
                except RemoteProtocolError:
                    alive = False
        world.check()
    world.flush()


def seeds() -> Iterator[bytes]:
    """Offers taken, data both ways, acknowledgements, closes; frames before OK; refusals; floods."""
    offer = b"\x00\x02\x00\x00\x03\x01\x00\x00"
    accept = b"\x06\x01\x00\x00\x00"
    forward = b"\x00\x00\x01\x00\x02\x00\x05\x05hello"
    for kind in (b"\x00", b"\x01", b"\x02", b"\x03"):
        yield kind + offer + accept + forward + b"\x05" + b"\x06\x03\x00\xff" + b"\x05"
        yield (
            kind
            + offer
            + accept
            + b"\x06\x02\x00\xff"
            + b"\x05"
            + b"\x00\x01\x01\x00\x02\x00\x00\x00"
            + b"\x06\x04\x00"
        )
        yield kind + offer * 6 + b"\x00\x04\x01\x00\x02\x00\x01\x00"
        yield kind + b"\x06\x00\x00\x00" + b"\x00\x03\x01\x00\x00\x00" + b"\x06\x02\x00\x80\x05"
        yield kind + offer + accept + b"\x00\x00\x01\x00\x03\x3f" * 3 + b"\x06\x05\x00\x05"
        yield kind + b"\x04\x09\x00\x00\x00\x00\x04" + encode_tlvs({Tlv.REASON: b"x"})
        yield kind + b"\x07\xff\x07\xff"
        yield kind + b"\x03\x05" + offer[1:] * 5 + b"\x00\x30"
