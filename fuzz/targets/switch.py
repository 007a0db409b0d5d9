"""A relay between hostile clients: frames, congestion, time, connections that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, REQUEST_BYTES, encode_frame, split_frames
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Leg, Member
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import MemberDropped
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
#: A CLOSE stands behind the data of its transport, with all limits.
_CLOSE_SLACK_BYTES = 64 * (5 + 18)


class _World:
    """The switch and its clients, as far as they know what they may send."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 1_000.0
        self.switch = Switch(_LIMITS, random=repeatable(b"ids"))
        self.members: list[Member] = []
        self.ids: dict[Member, list[tuple[int, bytes]]] = {}  # REQUESTs that a client got

    def connect(self) -> None:
        key = self.choices.pick(_CLIENTS)
        flags = self.choices.byte()
        if self.switch.refusal(key) is not None:
            return
        records: Any = PlainRecords()
        group = _GROUPS[flags % 3]
        member, events = self.switch.add_member(key, records, self.now, extended=bool(flags & 4), group=group)
        self.dropped(events)
        self.members.append(member)
        self.ids[member] = []

    def dropped(self, events: Any) -> None:
        for event in events:
            if isinstance(event, MemberDropped):
                self.members.remove(event.member)

    def disconnect(self, member: Member) -> None:
        self.switch.remove_member(member, self.now)
        self.members.remove(member)

    def feed(self, member: Member, data: bytes) -> None:
        if member.overloaded:
            return  # the shell does not read
        try:
            self.dropped(member.receive_data(data, self.now))
        except RemoteProtocolError as error:
            self.dropped(error.events)
            if member in self.members:
                self.disconnect(member)

    def frame(self, member: Member) -> bytes:
        """A frame of a client that knows its transports, and lies."""
        choices = self.choices
        kind = choices.pick((FWD, REQUEST, ACCEPT, CLOSE, ACK, OK, choices.below(256)))
        known = list(member.legs)
        payload: bytes | None = None
        if kind == ACCEPT and self.ids[member] and choices.flag():
            transport_id, payload = self.ids[member][choices.byte() % len(self.ids[member])]
        elif known and choices.flag():
            transport_id = known[choices.byte() % len(known)]
        else:
            transport_id = choices.below(0x10000)
        if payload is not None:
            return encode_frame(kind, transport_id, payload)
        match choices.below(4):
            case 0:
                payload = member.remote.raw + choices.pick(_CLIENTS).raw + choices.chunk(64)
            case 1:
                payload = bytes(2 + 16 * choices.byte())
            case _:
                payload = choices.chunk()
        return encode_frame(kind, transport_id, payload)

    def flush(self, member: Member) -> None:
        """What the shell writes when the network takes something."""
        data = member.data_to_send()
        frames, used = split_frames(data)
        assert used == len(data), "a part of a frame was sent"
        for kind, transport_id, start, end in frames:
            assert kind in (OK, REQUEST, ACCEPT, CLOSE, FWD, ACK)
            if kind == REQUEST:
                assert transport_id % 2 and data[start + 33 : start + REQUEST_BYTES] == member.remote.raw
                self.ids[member].append((transport_id, data[start:end]))

    def flush_dirty(self) -> None:
        dirty, self.switch.dirty = list(self.switch.dirty), []
        self.switch.dirty = []
        for member in dirty:
            member.dirty = False
            if not member.gone and not member.congested:
                self.flush(member)

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        switch = self.switch
        assert set(switch.members.values()) == set(self.members)
        assert len(self.members) <= _LIMITS.connections
        legs = [leg for member in self.members for leg in member.legs.values()]
        for leg in legs:
            assert leg.member.legs[leg.id] is leg
            assert leg.other.other is leg and leg.other.member.legs[leg.other.id] is leg.other
            assert leg.target is leg.other.member and leg.open is leg.other.open
        assert switch.open_transports == sum(leg.open for leg in legs if leg.initiator)
        queued = 0
        for member in self.members:
            self._check_places(member)
            for queue in member.waiting:
                assert queue.queue and queue.member is member
                assert queue.queued_bytes == sum(map(len, queue.queue)) <= _LIMITS.queue_hard_bytes
            assert member.queued_to == sum(queue.queued_bytes for queue in member.waiting)
            assert all(queue.target is member and queue.queue for queue in member.feeding)
            assert member.queued_from == sum(queue.queued_bytes for queue in member.feeding)
            assert member.queued_to <= _LIMITS.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert member.queued_from <= _LIMITS.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert member.control_backlog_bytes <= _LIMITS.control_backlog_bytes + 70_000
            queued += member.queued_to
        assert switch.queued_bytes == queued <= _LIMITS.queued_total_bytes + _CLOSE_SLACK_BYTES

    def _check_places(self, member: Member) -> None:
        asked: list[Leg] = [leg for leg in member.legs.values() if leg.initiator]
        incoming = [leg for leg in member.legs.values() if not leg.initiator]
        assert member.pending_requests == sum(not leg.open for leg in asked) <= _LIMITS.pending_requests
        assert member.dials == len(asked)
        assert member.incoming.count == sum(leg.open for leg in incoming)
        assert member.unanswered.count == sum(not leg.open for leg in incoming) <= _LIMITS.unanswered_per_target
        assert sum(leg.open for leg in member.legs.values()) <= _LIMITS.transports_per_connection
        assert len(member.tail) < 70_000


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
        if operation == 0 or not world.members:
            world.connect()
        else:
            member = world.members[choices.byte() % len(world.members)]
            match operation:
                case 1:
                    world.disconnect(member)
                case 2 | 3:
                    world.feed(member, world.frame(member))
                case 4:
                    data = b"".join(world.frame(member) for _ in range(choices.below(6)))
                    cut = choices.below(0x10000) % (len(data) + 1)
                    world.feed(member, data[:cut])
                    if member in world.members:
                        world.feed(member, data[cut:])
                case 5:
                    world.feed(member, choices.chunk())
                case 6:
                    member.pause()
                case 7:
                    member.resume()
                    world.flush(member)
                case 8:
                    world.now += choices.byte() / 8
                    world.dropped(world.switch.handle_timeout(world.now))
                case _:
                    world.switch.draining = choices.byte() == 255
                    world.switch.next_timeout()
        if choices.flag():
            world.flush_dirty()
        world.check()
    for member in list(world.members):
        world.disconnect(member)
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
