"""Transports through a relay between honest clients, and the events of each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from dmsg.mux.core.wire import (
    ACCEPT,
    CLOSE,
    FWD,
    OK,
    REQUEST,
    REQUEST_BYTES,
    CloseReason,
    close_reason,
    encode_close,
    encode_frame,
    split_frames,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import MemberDropped, TransportEnded, TransportStarted
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords
from fuzz.sealed import TEXT
from fuzz.switches import SMALL_LIMITS

_STRAYS = 10
_LIMITS = RelayLimits(strays_per_s=0.0, stray_burst=_STRAYS, **SMALL_LIMITS)
_GROUPS = ("192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.3")
#: Reason of a client's CLOSE, which no relay uses.
_BYE = 77


class _State(Enum):
    ASKED = 1
    OFFERED = 2
    OPEN = 3
    OVER = 4


class _Side:
    """One side of a transport, as its client sees it."""

    def __init__(self, tag: bytes, state: _State, request: bytes) -> None:
        self.tag = tag
        self.state = state
        self.request = request
        self.sent = self.received = 0
        self.said = False  # the client itself ended it


class _Client:
    """An honest client, the bytes that it has not read, and its transports by id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = KEYS[number].public_key
        self.member: Any = None
        self.sides: dict[int, _Side] = {}
        self.next_id = 0


class _World:
    """The relay, its clients, and both sides of each transport by the tag that its request carries."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.switch = Switch(_LIMITS, random=repeatable(b"ids"))
        self.clients = [_Client(number) for number in range(5)]
        self.asked: dict[bytes, _Side] = {}
        self.offered: dict[bytes, _Side] = {}
        self.open = 0

    # --- the relay -------------------------------------------------------------------------------------------------

    def connect(self, client: _Client) -> None:
        """A client connects; its earlier connection is dropped."""
        if self.switch.refusal(client.key) is not None:
            others = sum(one.member is not None for one in self.clients if one is not client)
            assert self.switch.draining or others >= _LIMITS.connections
            return
        records: Any = PlainRecords()
        group = _GROUPS[client.number]
        member, events = self.switch.add_member(client.key, records, self.now, extended=True, group=group)
        self.count(events)
        assert [event.member for event in events if isinstance(event, MemberDropped)] == (
            [client.member] if client.member is not None else []
        )
        client.member, client.sides = member, {}

    def disconnect(self, client: _Client) -> None:
        """A client disconnects."""
        self.count(self.switch.remove_member(client.member, self.now))
        assert not self.switch.remove_member(client.member, self.now)
        client.member, client.sides = None, {}

    def count(self, events: Iterable[Any]) -> None:
        """The sums of the event log are correct."""
        for event in events:
            self.open += isinstance(event, TransportStarted)
            self.open -= isinstance(event, TransportEnded) and event.was_open
        assert self.open == self.switch.open_transports

    def feed(self, client: _Client, frame: bytes) -> None:
        """The relay reads a frame of a client. An honest one is never at fault."""
        if not client.member.overloaded:
            self.count(client.member.receive_data(frame, self.now))
        assert client.member.strays._tokens == _STRAYS

    def timeout(self) -> None:
        """The relay does what is due."""
        self.count(self.switch.handle_timeout(self.now))
        due = self.switch.next_timeout()
        assert due is None or due > self.now, "it is due again at once for ever"

    # --- a client --------------------------------------------------------------------------------------------------

    def ask(self, client: _Client, other: _Client) -> None:
        """Ask for a transport."""
        if client.member.overloaded:
            return
        tag = len(self.asked).to_bytes(2, "big")
        request = client.key.raw + other.key.raw + tag
        while client.next_id in client.sides:
            client.next_id = (client.next_id + 2) & 0xFFFF
        self.asked[tag] = client.sides[client.next_id] = _Side(tag, _State.ASKED, request)
        transport_id, client.next_id = client.next_id, (client.next_id + 2) & 0xFFFF
        self.feed(client, encode_frame(REQUEST, transport_id, request))

    def act(self, client: _Client, what: int, which: int, size: int) -> None:
        """Do something with a transport: accept it, send data, or end it."""
        known = [(key, side) for key, side in client.sides.items() if side.state is not _State.OVER]
        if not known or client.member.overloaded:
            return
        transport_id, side = known[which % len(known)]
        if what == 0 and side.state is _State.OFFERED:
            side.state = _State.OPEN
            self.feed(client, encode_frame(ACCEPT, transport_id, side.request))
        elif what == 1 and side.state is _State.OPEN:
            data = TEXT[side.sent : side.sent + size]
            side.sent += len(data)
            self.feed(client, encode_frame(FWD, transport_id, bytes(2) + data))
        elif what == 2:
            side.state, side.said = _State.OVER, True
            self.feed(client, encode_close(transport_id, _BYE))

    def read(self, client: _Client) -> None:
        """The client's network takes what there is, and the client reads it."""
        member = client.member
        data = b"".join(iter(member.data_to_send, b""))
        frames, used = split_frames(data)
        assert used == len(data)
        for kind, transport_id, start, end in frames:
            payload = data[start:end]
            side = client.sides.get(transport_id)
            if kind == REQUEST:
                self._offered(client, transport_id, payload)
            elif kind != OK:
                assert side is not None, "a frame of a transport that is not known"
                self._told(client, transport_id, side, kind, payload)

    def _offered(self, client: _Client, transport_id: int, payload: bytes) -> None:
        side = client.sides.get(transport_id)
        assert transport_id % 2 and (side is None or side.state is _State.OVER)
        tag = payload[REQUEST_BYTES:]
        assert tag not in self.offered and payload == self.asked[tag].request
        assert payload[33:REQUEST_BYTES] == client.key.raw
        self.offered[tag] = client.sides[transport_id] = _Side(tag, _State.OFFERED, payload)

    def _told(self, client: _Client, transport_id: int, side: _Side, kind: int, payload: bytes) -> None:
        peer = (self.offered if side is self.asked.get(side.tag) else self.asked).get(side.tag)
        if kind == CLOSE:
            assert side.said or side.state is not _State.OVER, "it ended twice"
            reason = close_reason(payload)
            if reason == _BYE:
                assert peer is not None and peer.said
                assert side.said or side.received == peer.sent, "the end came before the data"
            side.state = _State.OVER
        elif side.state is _State.OVER:
            assert side.said, "a frame of a transport that has ended"
        elif kind == ACCEPT:
            assert side.state is _State.ASKED and payload == side.request
            side.state = _State.OPEN
        else:
            assert kind == FWD and side.state is _State.OPEN and peer is not None
            assert TEXT.startswith(payload[2:], side.received), "a transport got data of another, or not all"
            side.received += len(payload) - 2
            assert side.received <= peer.sent

    # --- what must hold --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Once every network takes everything, relay and clients know the same transports."""
        for _ in range(3):
            for client in self.clients:
                if client.member is not None:
                    client.member.resume()
                    self.read(client)
        for client in self.clients:
            if client.member is None:
                continue
            live = {key: side for key, side in client.sides.items() if side.state is not _State.OVER}
            assert set(live) == set(client.member.legs)
            assert client.member.pending_requests == sum(side.state is _State.ASKED for side in live.values())
            for key, side in live.items():
                assert client.member.legs[key].open == (side.state is _State.OPEN)
        open_sides = sum(
            side.state is _State.OPEN for client in self.clients for side in client.sides.values() if client.member
        )
        assert open_sides == 2 * self.switch.open_transports and not self.switch.queued_bytes


def one_input(data: bytes) -> None:
    """Clients come, ask, accept, send, end and go; networks stop; time passes; the relay is told to end transports.

    An honest client is never at fault. It is told of the end of each transport once, after all earlier data;
    data arrives in order on its own transport; and in the end relay and clients know the same transports.
    """
    choices = Choices(data)
    world = _World()
    for client in world.clients[:3]:
        world.connect(client)
    for _ in range(200):
        if not choices.left:
            break
        operation = choices.byte()
        client = world.clients[(operation >> 4) % 5]
        if client.member is None:
            world.connect(client)
            continue
        match operation & 15:
            case 0 | 1:
                world.ask(client, world.clients[choices.byte() % 5])
            case 2 | 3:
                world.act(client, 0, choices.byte(), 0)
            case 4 | 5 | 6:
                world.act(client, 1, choices.byte(), 1 + choices.byte() * 8)
            case 7:
                world.act(client, 2, choices.byte(), 0)
            case 8:
                client.member.pause()
            case 9 | 10:
                client.member.resume()
                world.read(client)
            case 11:
                world.now += choices.byte() / 8
                world.timeout()
            case 12:
                world.now = max(world.now, world.switch.next_timeout() or 0.0)
                world.timeout()
            case 13:
                if operation >> 4 & 1:
                    world.connect(client)
                else:
                    world.disconnect(client)
            case 14:
                how = choices.byte()
                world.switch.draining = bool(how & 1)
                if how & 2:
                    world.count(world.switch.drop_transports(CloseReason.SERVER_DRAINING))
                    assert not world.switch.open_transports
            case _:
                world.settle()
    world.settle()
    for client in world.clients:
        if client.member is not None:
            world.disconnect(client)
    world.now += _LIMITS.request_timeout_s
    world.timeout()
    assert not world.open and not world.switch.members and world.switch.next_timeout() is None


def seeds() -> Iterator[bytes]:
    """Transports that are used and ended by either side, refused for each reason, cut, stopped, and to oneself."""
    ask, take, read = b"\x00\x01", b"\x19\x12\x00", b"\x09\x19"
    send, back, end = b"\x04\x00\x20", b"\x14\x00\x20", b"\x07\x00"
    opened = ask + take + read
    yield opened + send + back + read + end + read
    yield opened + send * 3 + b"\x17\x00" + send + read + b"\x0f"
    yield opened + b"\x18" + send * 3 + end + b"\x0f" + opened + b"\x18" + send + b"\x1d"
    yield opened + b"\x18" + b"\x04\x00\x40" * 4 + b"\x0c" * 3 + b"\x0f"
    yield opened + b"\x18" + b"\x04\x00\xff" * 2 + b"\x0f" + opened + b"\x18" + send + end + b"\x0b\x58" + b"\x0f"
    yield opened + b"\x18" + send + end + b"\x0c\x0c\x0c\x0f"
    yield ask + b"\x0b\x58\x0c" + take + b"\x0f"
    yield ask * 6 + b"\x0f" + (b"\x12\x00" * 4) + b"\x0f"
    yield (b"\x00\x00\x09\x02\x01\x0f") * 2 + b"\x04\x00\x20\x04\x01\x20\x08\x04\x00\x20\x0f" + b"\x0e\x02" + b"\x0f"
    yield b"\x00\x00\x09\x02\x01\x0f" + b"\x0d" + b"\x0f" + opened
    yield opened * 2 + b"\x0e\x03" + ask + b"\x30\x40" + b"\x0e\x00" + b"\x0f" + opened
    for client in (b"\x20", b"\x30", b"\x40"):
        other = bytes((client[0] | 9,))
        fill = (b"\x30\x40" + client + b"\x01" + b"\x19" + b"\x12\x00\x12\x01\x12\x02\x12\x03" + other) * 4
        yield fill + b"\x00\x01" * 3 + b"\x19" + b"\x12\x04\x12\x05\x12\x06" + b"\x0f" + fill + b"\x0f"
        yield (opened * 2 + b"\x0f") * 2 + fill + b"\x1d" + b"\x0f"
    many = b"".join(b"\x20\x01\x30\x01\x00\x01\x19\x12" + bytes((n,)) + b"\x12" + bytes((n + 1,)) for n in range(8))
    yield b"\x30\x40" + many + b"\x0f" + b"\x19" + b"\x12\x04" * 4 + b"\x0f"
    yield b"\x30" + (b"\x00\x01\x00\x01\x00\x02\x00\x02\x00\x03" + b"\x0f") * 2 + b"\x40\x0f\x40"
    yield b"\x00\x01" * 3 + b"\x00\x02" + b"\x0b\x28" + b"\x19\x12\x00\x12\x01" + b"\x0f\x0b\x28\x0c\x0c"
    flood = (b"%c\x01%c\x00" % (client, client | 7) for client in (0x00, 0x20, 0x30))
    yield b"\x30\x18" + b"".join(one * 6 + b"\x0b\x10" for one in flood) + b"\x0f"
    yield opened + b"\x2d" + b"\x00\x02" + b"\x00\x04" + b"\x0f" + b"\x1d" + b"\x3d" + b"\x0f"
