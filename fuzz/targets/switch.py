"""A relay between hostile clients: frames, congestion, time, connections that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, REQUEST_BYTES, encode_frame, split_frames
from dmsg.mux.relay.events import PortDropped
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Half, Port
from dmsg.mux.relay.switch import Switch
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords

_CLIENTS = [key.public_key for key in KEYS[:5]]
_GROUPS = ("", "192.0.2.1", "192.0.2.2")
#: Small, so that a short input reaches every one of them.
_LIMITS = RelayLimits(
    connections=4,
    transports_per_connection=8,
    transports_per_source=2,
    transports_per_pair=2,
    unanswered_per_target=3,
    requests_per_s=5.0,
    request_burst=20,
    pending_requests=4,
    stranger_requests_per_s=5.0,
    stranger_request_burst=12,
    pair_request_burst=6,
    known_requests_per_s=5.0,
    known_request_burst=12,
    strays_per_s=1.0,
    stray_burst=10,
    queue_soft_bytes=2_000,
    queue_hard_bytes=3_000,
    queued_per_connection_bytes=6_000,
    queued_total_bytes=10_000,
    control_backlog_bytes=1_000,
)
#: A CLOSE stands behind the data of its transport, whatever the limits are.
_CLOSE_SLACK_BYTES = 64 * (5 + 18)


class _World:
    """The switch and its clients, as far as they know what they may send."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 1_000.0
        self.switch = Switch(_LIMITS, random=repeatable(b"ids"))
        self.ports: list[Port] = []
        self.ids: dict[Port, list[tuple[int, bytes]]] = {}  # REQUESTs that a client got

    def connect(self) -> None:
        key = self.choices.pick(_CLIENTS)
        flags = self.choices.byte()
        if self.switch.refusal(key) is not None:
            return
        records: Any = PlainRecords()
        group = _GROUPS[flags % 3]
        port, events = self.switch.add_port(key, records, self.now, extended=bool(flags & 4), group=group)
        self.dropped(events)
        self.ports.append(port)
        self.ids[port] = []

    def dropped(self, events: Any) -> None:
        for event in events:
            if isinstance(event, PortDropped):
                self.ports.remove(event.port)

    def disconnect(self, port: Port) -> None:
        self.switch.remove_port(port, self.now)
        self.ports.remove(port)

    def feed(self, port: Port, data: bytes) -> None:
        if port.overloaded:
            return  # the shell does not read
        try:
            self.dropped(port.receive_data(data, self.now))
        except RemoteProtocolError as error:
            self.dropped(error.events)
            if port in self.ports:
                self.disconnect(port)

    def frame(self, port: Port) -> bytes:
        """A frame of a client that knows its transports, and lies."""
        choices = self.choices
        kind = choices.pick((FWD, REQUEST, ACCEPT, CLOSE, ACK, OK, choices.below(256)))
        known = list(port.halves)
        payload: bytes | None = None
        if kind == ACCEPT and self.ids[port] and choices.flag():
            transport_id, payload = self.ids[port][choices.byte() % len(self.ids[port])]
        elif known and choices.flag():
            transport_id = known[choices.byte() % len(known)]
        else:
            transport_id = choices.below(0x10000)
        if payload is not None:
            return encode_frame(kind, transport_id, payload)
        match choices.below(4):
            case 0:
                payload = port.remote.raw + choices.pick(_CLIENTS).raw + choices.chunk(64)
            case 1:
                payload = bytes(2 + 16 * choices.byte())
            case _:
                payload = choices.chunk()
        return encode_frame(kind, transport_id, payload)

    def flush(self, port: Port) -> None:
        """What the shell writes when the network takes something."""
        data = port.data_to_send()
        frames, used = split_frames(data)
        assert used == len(data), "a part of a frame was sent"
        for kind, transport_id, start, end in frames:
            assert kind in (OK, REQUEST, ACCEPT, CLOSE, FWD, ACK)
            if kind == REQUEST:
                assert transport_id % 2 and data[start + 33 : start + REQUEST_BYTES] == port.remote.raw
                self.ids[port].append((transport_id, data[start:end]))

    def flush_dirty(self) -> None:
        dirty, self.switch.dirty = list(self.switch.dirty), []
        self.switch.dirty = []
        for port in dirty:
            port.dirty = False
            if not port.gone and not port.congested:
                self.flush(port)

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        switch = self.switch
        assert set(switch.ports.values()) == set(self.ports)
        assert len(self.ports) <= _LIMITS.connections
        halves = [half for port in self.ports for half in port.halves.values()]
        for half in halves:
            assert half.port.halves[half.id] is half
            assert half.other.other is half and half.other.port.halves[half.other.id] is half.other
            assert half.target is half.other.port and half.open is half.other.open
        assert switch.open_transports == sum(half.open for half in halves if half.initiator)
        queued = 0
        for port in self.ports:
            self._check_places(port)
            for queue in port.waiting:
                assert queue.queue and queue.port is port
                assert queue.queued_bytes == sum(map(len, queue.queue)) <= _LIMITS.queue_hard_bytes
            assert port.queued_to == sum(queue.queued_bytes for queue in port.waiting)
            assert all(queue.target is port and queue.queue for queue in port.feeding)
            assert port.queued_from == sum(queue.queued_bytes for queue in port.feeding)
            assert port.queued_to <= _LIMITS.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert port.queued_from <= _LIMITS.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert port.control_backlog_bytes <= _LIMITS.control_backlog_bytes + 70_000
            queued += port.queued_to
        assert switch.queued_bytes == queued <= _LIMITS.queued_total_bytes + _CLOSE_SLACK_BYTES

    def _check_places(self, port: Port) -> None:
        asked: list[Half] = [half for half in port.halves.values() if half.initiator]
        incoming = [half for half in port.halves.values() if not half.initiator]
        assert port.pending_requests == sum(not half.open for half in asked) <= _LIMITS.pending_requests
        assert port.dials == len(asked)
        assert port.incoming.count == sum(half.open for half in incoming)
        assert port.unanswered.count == sum(not half.open for half in incoming) <= _LIMITS.unanswered_per_target
        assert sum(half.open for half in port.halves.values()) <= _LIMITS.transports_per_connection
        assert len(port.tail) < 70_000


def one_input(data: bytes) -> None:
    """Operations: connect, disconnect, frames and garbage of a client, a network that stops and goes on, time.

    Only ``RemoteProtocolError`` leaves, and it ends its own connection only. Places, queues and transports are counted as
    they are, and no limit is passed.
    """
    choices = Choices(data)
    world = _World(choices)
    world.connect()
    world.connect()
    for _ in range(256):
        if not choices.left:
            break
        operation = choices.below(10)
        if operation == 0 or not world.ports:
            world.connect()
        else:
            port = world.ports[choices.byte() % len(world.ports)]
            match operation:
                case 1:
                    world.disconnect(port)
                case 2 | 3:
                    world.feed(port, world.frame(port))
                case 4:
                    data = b"".join(world.frame(port) for _ in range(choices.below(6)))
                    cut = choices.below(0x10000) % (len(data) + 1)
                    world.feed(port, data[:cut])
                    if port in world.ports:
                        world.feed(port, data[cut:])
                case 5:
                    world.feed(port, choices.chunk())
                case 6:
                    port.pause()
                case 7:
                    port.resume()
                    world.flush(port)
                case 8:
                    world.now += choices.byte() / 8
                    world.dropped(world.switch.handle_timeout(world.now))
                case _:
                    world.switch.draining = choices.byte() == 255
                    world.switch.next_timeout()
        if choices.flag():
            world.flush_dirty()
        world.check()
    for port in list(world.ports):
        world.disconnect(port)
    assert not world.switch.queued_bytes and not world.switch.open_transports
    world.now += 1_000
    world.switch.handle_timeout(world.now)
    assert not world.switch._pending


def seeds() -> Iterator[bytes]:
    """A transport that is opened, used, stopped by its receiver's network and closed; many; strays; two with one key."""
    begin = b"\x00\x00" + b"\x01\x05"
    ask = b"\x02\x00\x01\x00\x00\x00\x02\x00\x01\x00\x01"
    take = b"\x02\x01\x02\x01\x00\x01"
    send = b"\x02\x00\x00\x01\x00\x01\x40\x01"
    yield begin + ask + take + send + b"\x02\x00\x03\x01\x00\x02\x01\x00\x01"
    yield begin + ask + take + b"\x06\x01\x00" + send * 12 + b"\x08\x00\xff\x01" + b"\x07\x01\x01"
    yield (
        begin
        + ask
        + take
        + b"\x06\x01\x00"
        + send * 3
        + b"\x02\x00\x03\x01\x00\x02\x01\x00\x01"
        + b"\x08\x00\x80\x01" * 2
    )
    yield begin + b"".join(ask.replace(b"\x02\x00\x01\x00\x01", bytes((n * 2, 0, 1, 0, 1))) + take for n in range(8))
    yield begin + b"\x02\x00\x00\x00\x00\x09\x02\x00\x01" * 12
    yield begin + ask + take + b"\x00\x00\x00\x01" + b"\x01\x00\x01" + b"\x08\x00\xff\x01"
    yield begin + b"\x00\x02\x02\x01\x00\x03\x06\x01" + ask + take + send * 3 + b"\x09\x00\xff\x01" + ask
