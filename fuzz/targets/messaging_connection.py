"""Two clients of messaging whose frames pass through a hostile relay, while their applications do what they like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.channel import Channel, ChannelState
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import DIALECTS, Dialect
from dmsg.messaging.core.errors import HandshakeFailed, WriteOverflow
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, DataReceived
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import GO, OPEN_CHANNEL, FrameReader
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS

_DIALECTS = tuple(DIALECTS.values())
#: Small, so that a short input reaches every one of them.
_CONFIG = ConnectionConfig(
    offered_limit=3,
    incoming_limit=5,
    receive_limit_bytes=70_000,
    pause_bytes=300,
    resume_bytes=100,
    pending_limit_bytes=90_000,
    flush_bytes=70_000,
    control_limit_bytes=2_000,
)


class _Client:
    """A core and what its application knows of it."""

    def __init__(self, number: int, dialect: Dialect) -> None:
        self.core = Connection(
            KEYS[number], now=0.0, dialect=dialect, config=_CONFIG, random=repeatable(bytes((number,)))
        )
        self.peer = KEYS[1 - number].public_key
        self.channels: list[Channel] = []
        self.ended: set[Channel] = set()
        self.unread: dict[Channel, int] = {}
        self.written: dict[Channel, bytes] = {}
        self.received: dict[Channel, bytes] = {}
        self.reader = FrameReader(GO)
        #: Frames that it has sent and the relay still holds: type, id, payload.
        self.held: list[tuple[int, int, bytes]] = []
        self.dead = False

    def feed(self, data: bytes, now: float) -> None:
        """What a shell does with a read."""
        if self.dead:
            return
        try:
            self.take(self.core.receive_data(data, now))
        except RemoteProtocolError:
            self.dead = True

    def take(self, events: Any) -> None:
        for event in events:
            assert event.channel not in self.ended, "an event of a channel that has ended"
            if isinstance(event, ChannelOffered):
                self.channels.append(event.channel)
            elif isinstance(event, DataReceived):
                assert event.data
                self.unread[event.channel] = self.unread.get(event.channel, 0) + len(event.data)
                self.received[event.channel] = self.received.get(event.channel, b"") + event.data
            elif isinstance(event, ChannelEnded):
                self.ended.add(event.channel)

    def flush(self) -> None:
        data = self.core.data_to_send()
        buffer, frames = self.reader.read(data)
        self.held += [(kind, channel_id, buffer[start:end]) for kind, channel_id, start, end in frames]

    def act(self, choices: Choices) -> None:
        """Something an application may do now."""
        core, what = self.core, choices.below(8)
        if what == 0 and len(core.channels) < 20:
            self.channels.append(core.open(self.peer))
            return
        if not self.channels:
            return
        channel = self.channels[choices.byte() % len(self.channels)]
        if what == 1 and channel.state is ChannelState.OFFERED:
            with suppress(HandshakeFailed):
                core.accept(channel)
                assert channel.remote == self.peer, "a relay cannot offer a channel in the name of another key"
        elif what in (2, 3) and channel.state is ChannelState.OPEN:
            data = bytes((len(self.written.get(channel, b"")) & 0xFF,)) * (
                1 + choices.byte() * (300 if what == 3 else 1)
            )
            try:
                core.send_data(channel, data)
                self.written[channel] = self.written.get(channel, b"") + data
            except WriteOverflow:
                core.abort(channel)
        elif what == 4 and self.unread.get(channel):
            size = min(self.unread[channel], 1 + choices.byte() * 256)
            self.unread[channel] -= size
            core.consumed(channel, size)
        elif what == 5:
            core.close(channel)
        elif what == 6:
            core.abort(channel)

    def check(self) -> None:
        """What the core counts is what there is."""
        core = self.core
        assert {channel.id for channel in core.channels.values()} == set(core.channels)
        states = [channel.state for channel in core.channels.values()]
        assert ChannelState.CLOSED not in states
        assert core._offered == states.count(ChannelState.OFFERED) <= _CONFIG.offered_limit
        assert core._incoming == sum(not one.initiator for one in core.channels.values()) <= _CONFIG.incoming_limit
        assert core._control_bytes == sum(map(len, core._control))
        waiting = {ChannelState.HALF_CLOSED, ChannelState.ABANDONED}
        assert set(core._deadlines) == {one for one in core.channels.values() if one.state in waiting}
        for channel in core.channels.values():
            assert channel.discarding or channel.unread_bytes == self.unread.get(channel, 0)
            assert channel.discarding or channel.unread_bytes <= _CONFIG.receive_limit_bytes
            assert channel.pending.size <= _CONFIG.pending_limit_bytes + 80_000
            assert not channel.sendable or channel.queued


def one_input(data: bytes) -> None:
    """The first byte picks a dialect; then operations of the two applications and of the relay between them.

    The relay passes frames on under any id, alters, repeats, drops and makes them up. Whatever it does, what arrives on a
    channel is the beginning of what was written to one, and each core keeps its counts.
    """
    choices = Choices(data)
    dialect = _DIALECTS[choices.byte() % len(_DIALECTS)]
    clients = [_Client(number, dialect) for number in (0, 1)]
    now = 0.0
    for _ in range(120):
        if not choices.left:
            break
        which = choices.byte() & 1
        client, other = clients[which], clients[1 - which]
        match choices.below(8):
            case 0 | 1:
                client.act(choices)
            case 2:
                client.flush()
            case 3 | 4 if client.held:
                _pass_on(client, other, choices, now, dialect)
            case 5:
                payload = bytes((choices.byte(),)) * choices.pick((0, 1, 3, 49, 50, 82, 100))
                other.feed(GO.encode(choices.below(6), choices.byte(), payload), now)
            case 6:
                for part in choices.pieces(choices.chunk()):
                    other.feed(part, now)
            case _:
                now += choices.byte() / 16
                client.take(client.core.handle_timeout(now))
        for one in clients:
            one.check()
    for client, other in (clients, clients[::-1]):
        for received in client.received.values():
            assert any(written.startswith(received) for written in other.written.values())


def _pass_on(client: _Client, other: _Client, choices: Choices, now: float, dialect: Dialect) -> None:
    how, given = choices.below(8), choices.byte()
    at = choices.byte() % len(client.held) if how == 7 else 0
    kind, channel_id, payload = client.held[at]
    if how != 6:  # otherwise it is repeated later
        del client.held[at]
    if how == 5:
        return
    if kind == OPEN_CHANNEL:
        payload = client.core.identity.raw + payload[33:]
    if how == 4 and payload:
        place = choices.byte() % len(payload)
        payload = payload[:place] + bytes((payload[place] ^ (1 + choices.byte() % 255),)) + payload[place + 1 :]
    # The ids of an honest relay if the input likes: 255 less the caller's on the callee's link, and the same back.
    channel_id = (255 - channel_id) & 0xFF if not dialect.own_ids and how < 4 else given
    other.feed(GO.encode(kind, channel_id, payload), now)


def seeds() -> Iterator[bytes]:
    """A channel that is opened, used in both directions and closed, in each dialect; then the same with accidents."""
    ask, flush, offer = b"\x00\x00\x00", b"\x00\x02", b"\x00\x03\x00\xff"
    answer, back, home = b"\x01\x00\x01\x00", b"\x01\x02", b"\x01\x03\x00\x00"
    say, reply = b"\x00\x00\x02\x00\x20", b"\x01\x00\x03\x00\x01"
    read = b"\x01\x00\x04\x00\xff"
    close, late = b"\x00\x00\x05\x00", b"\x00\x07\xff" * 2
    opened = ask + flush + offer + answer + back + home
    for number, dialect in enumerate(_DIALECTS):
        head = bytes((number,))
        # With ids of its own the callee has given 0 to the channel.
        there = b"\x00\x03\x00\x00" if dialect.own_ids else offer
        yield head + opened + say + flush + there + read + reply + back + home
        yield head + opened + (say + flush + there + read + back + home) * 3 + close + flush + there + back + home
        yield head + opened + close + late
        yield head + opened + say + flush + b"\x00\x03\x04" + there[-1:] + b"\x09\x01"
        yield head + opened + b"\x01\x05\x00\x52\x00\x00" + back
        yield head + ask + b"\x00\x00\x06\x00" + flush + offer + answer + back + home
