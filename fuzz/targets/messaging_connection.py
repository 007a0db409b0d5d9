"""Two messaging clients with arbitrary applications, and a hostile relay between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.channel import Channel, ChannelState
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import DIALECTS, Dialect
from dmsg.messaging.core.errors import ChannelEndReason, HandshakeFailed, WriteOverflow
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened, DataReceived
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    GO,
    OPEN_CHANNEL,
    SEND,
    FrameReader,
)
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, outcome

_DIALECTS = tuple(DIALECTS.values())
#: Small limits, so that a short input reaches every one of them.
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


#: Faults that a client may find in the other client or the relay.
_FAULTS = {
    ChannelEndReason.HANDSHAKE,
    ChannelEndReason.DIALECT,
    ChannelEndReason.INTEGRITY,
    ChannelEndReason.MALFORMED,
    ChannelEndReason.SLOW_CONSUMER,
}
_WAITS_S = {ChannelState.HALF_CLOSED: _CONFIG.close_timeout_s, ChannelState.ABANDONED: _CONFIG.abandoned_id_s}


class _Client:
    """A core and its application's view of it.

    Beside it a model of the specification: the control frames that are sent for each frame that arrives.
    """

    def __init__(self, number: int, dialect: Dialect) -> None:
        self.core = Connection(
            KEYS[number], now=0.0, dialect=dialect, config=_CONFIG, random=repeatable(bytes((number,)))
        )
        self.dialect = dialect
        self.peer = KEYS[1 - number].public_key
        self.channels: list[Channel] = []
        self.ended: set[Channel] = set()
        self.unread: dict[Channel, int] = {}
        self.written: dict[Channel, bytes] = {}
        self.received: dict[Channel, bytes] = {}
        self.reader = FrameReader(GO)
        #: Frames that it has sent and that the relay still holds: type, id, payload.
        self.held: list[tuple[int, int, bytes]] = []
        self.dead = False
        self.now = 0.0
        #: Frames to send before any data: type, id, length of the payload.
        self.control: list[tuple[int, int | None, int]] = []
        self.late_ids: list[int] = []
        #: When a channel that waits for the last frame times out; ``None`` until time has passed.
        self.due: dict[Channel, float | None] = {}
        #: Channels that its application has given up, or that have ended for it.
        self.silent: set[Channel] = set()
        self.paused: set[Channel] = set()
        self.faults = 0

    # --- what comes ------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> list[Any]:
        """Handle a read as a shell does."""
        if self.dead:
            return []
        events: list[Any] = []
        self.now = now
        try:
            events = self.core.receive_data(data, now)
        except RemoteProtocolError:
            self.dead = True
        self.take(events)
        return events

    def feed_frame(self, kind: int, channel_id: int, payload: bytes, now: float) -> None:
        """One frame with a known meaning. Behind a part of another frame it may mean anything."""
        data = GO.encode(kind, channel_id, payload)
        if self.dead or self.core._reader._tail:
            self.feed_garbage([data], now)
            return
        channel = self.core.channels.get(channel_id)
        expected: list[tuple[type, Any]] = []
        yielding = None
        if kind == OPEN_CHANNEL:
            if self._takes(channel_id, payload):
                yielding = self._oldest_offer()
                if yielding is not None:
                    expected.append((ChannelEnded, ChannelEndReason.REFUSED))
                expected.append((ChannelOffered, None))
            else:
                self.control.append((CHANNEL_CLOSED, channel_id, 0))
        elif channel is not None and kind in (CLOSE_CHANNEL, CHANNEL_CLOSED):
            expected = self._expect_closing(channel, kind)
        elif channel is not None and kind == CHANNEL_OPENED:
            self._feed_opened(channel, data, payload, now)
            return
        elif channel is not None and kind == SEND:
            self._feed_send(channel, data, now)
            return
        elif channel is None and kind == CHANNEL_OPENED and self.dialect.own_ids and len(payload) == 50:
            self.control.append((CHANNEL_CLOSED, payload[0], 0))  # of a dial that was forgotten
        new_id = self._next_id() if self.dialect.own_ids else channel_id
        found = self.feed(data, now)
        assert [(type(event), getattr(event, "reason", None)) for event in found] == expected
        if yielding is not None:
            assert found[0].channel is yielding
            self._dropped(yielding)
        if kind == OPEN_CHANNEL and found:
            offered = found[-1].channel
            assert offered.id == new_id and offered.send_id == channel_id
            assert offered.offer == payload[33:] and offered.remote.raw == payload[:33]
            self._use(new_id)
        if channel is not None and kind in (CLOSE_CHANNEL, CHANNEL_CLOSED):
            self._over(channel)

    def feed_garbage(self, pieces: list[bytes], now: float) -> None:
        """Bytes that may be any frames, without a model of the frames sent for them."""
        for piece in pieces:
            self.feed(piece, now)
        self.resume_model()

    def resume_model(self) -> None:
        """Continue the model from the core's present state."""
        core = self.core
        frames = b"".join(core._control)
        self.control = [(kind, at, end - start) for kind, at, start, end in GO.split_frames(frames)[0]]
        self.late_ids = list(core._late_ids)
        self.due = dict(core._deadlines)
        self.silent = {one for one in self.channels if one.discarding}

    def _takes(self, channel_id: int, payload: bytes) -> bool:
        """Whether an offer is valid and has room."""
        others = [one for one in self.core.channels.values() if not one.initiator]
        waiting = [one for one in others if one.state is ChannelState.OFFERED]
        in_use = channel_id in self.core.channels and not self.dialect.own_ids
        yields = self._oldest_offer() is not None
        room = (yields or len(waiting) < _CONFIG.offered_limit) and len(others) - yields < _CONFIG.incoming_limit
        return len(payload) == 82 and room and not in_use and _is_point(payload[:33])

    def _oldest_offer(self) -> Channel | None:
        """The offer that ends for a new one: where each side has ids of its own, when too many wait."""
        waiting = [one for one in self.core.channels.values() if one.state is ChannelState.OFFERED]
        is_full = self.dialect.own_ids and len(waiting) == _CONFIG.offered_limit
        return min(waiting, key=self.channels.index) if is_full else None

    def _expect_closing(self, channel: Channel, kind: int) -> list[tuple[type, Any]]:
        if kind == CLOSE_CHANNEL and channel.send_id is not None:
            self.control.append((CHANNEL_CLOSED, channel.send_id, 0))
        if kind == CLOSE_CHANNEL and channel.state is not ChannelState.OPENING:
            self.late_ids.append(channel.id)
        if channel in self.silent:
            return []
        by_peer = ChannelEndReason.CLOSED_BY_PEER if kind == CLOSE_CHANNEL else ChannelEndReason.PEER_GONE
        usual = {
            ChannelState.OPENING: ChannelEndReason.REFUSED,
            ChannelState.HALF_CLOSED: ChannelEndReason.NORMAL,
        }
        return [(ChannelEnded, usual.get(channel.state, by_peer))]

    def _feed_opened(self, channel: Channel, data: bytes, payload: bytes, now: float) -> None:
        state, excess = channel.state, len(payload) - 49
        waits = state is ChannelState.OPENING
        if state is ChannelState.ABANDONED:
            waits = self.dialect.own_ids or excess == 1
        events = self.feed(data, now)
        found = [(type(event), getattr(event, "reason", None)) for event in events]
        if not waits:
            assert not found and channel.state is state
            return
        if excess in (0, 1):
            assert channel.send_id == (payload[0] if excess else channel.id)
        if excess == self.dialect.own_ids and found == [(ChannelOpened, None)]:
            assert state is ChannelState.OPENING and channel.state is ChannelState.OPEN and channel.remote == self.peer
            return
        if excess not in (0, 1):
            reason = ChannelEndReason.MALFORMED
        elif excess != self.dialect.own_ids:
            reason = ChannelEndReason.DIALECT
        else:
            reason = ChannelEndReason.HANDSHAKE
        assert found == ([] if state is ChannelState.ABANDONED else [(ChannelEnded, reason)])
        self._dropped(channel)

    def _feed_send(self, channel: Channel, data: bytes, now: float) -> None:
        state = channel.state
        takes = state in (ChannelState.OPEN, ChannelState.CLOSING, ChannelState.HALF_CLOSED)
        unread = channel.unread_bytes
        silent = channel in self.silent
        found = self.feed(data, now)
        if not takes or silent:
            assert not found and channel.state is state and channel.unread_bytes == unread
            return
        for event in found:
            assert event.channel is channel
            assert isinstance(event, DataReceived) or (event.reason in _FAULTS and event.local)
        assert len(found) <= 1
        if found and isinstance(found[0], ChannelEnded):
            assert found[0].reason is not ChannelEndReason.SLOW_CONSUMER or (
                channel.unread_bytes > _CONFIG.receive_limit_bytes
            )
            if state is not ChannelState.HALF_CLOSED:
                self._dropped(channel)
            assert not channel._tail
            return
        if channel.state is not state:
            self._half_closed(channel, state)

    def _half_closed(self, channel: Channel, state: ChannelState) -> None:
        """Our CloseChannel is sent: all data was sent before, and acknowledged if the dialect has that."""
        assert state in (ChannelState.OPEN, ChannelState.CLOSING) and channel.state is ChannelState.HALF_CLOSED
        assert channel.acked_bytes == len(self.written.get(channel, b""))
        assert not self.dialect.acks or not channel.unread_bytes
        self.control.append((CLOSE_CHANNEL, channel.send_id, 0))

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
                made_room = event.reason is ChannelEndReason.REFUSED and not event.channel.initiator
                assert event.local == (event.reason is ChannelEndReason.NORMAL or event.reason in _FAULTS or made_room)
                self.ended.add(event.channel)
                self.faults += event.reason in _FAULTS - {ChannelEndReason.SLOW_CONSUMER}
                self.silent.add(event.channel)

    def _dropped(self, channel: Channel) -> None:
        """A channel ended without a last frame of the other side."""
        if channel.send_id is not None:
            self.control.append((CHANNEL_CLOSED, channel.send_id, 0))
        self.late_ids.append(channel.id)
        self._over(channel)

    def _over(self, channel: Channel) -> None:
        assert channel.state is ChannelState.CLOSED and self.core.channels.get(channel.id) is not channel
        assert not channel.pending.size and not channel._tail and channel.handshake is None
        if channel in self.written:
            assert channel.acked_bytes + channel.cut_bytes == len(self.written[channel])
        self.due.pop(channel, None)
        self.silent.add(channel)

    def _next_id(self) -> int:
        free = [number for number in range(255) if number not in self.core.channels]
        return next((number for number in free if number not in self.late_ids), free[0])

    def _use(self, channel_id: int) -> None:
        if channel_id in self.late_ids and (self.dialect.own_ids or self.core.channels[channel_id].initiator):
            self.late_ids.remove(channel_id)

    # --- what goes out ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """First answers to the relay, then a Send of each channel in turn."""
        core = self.core
        ready = {channel for channel in core.channels.values() if channel.sendable}
        closing = [channel for channel in core._sending if channel.state is ChannelState.CLOSING]
        wanted = core.wants_write
        data = core.data_to_send()
        assert wanted or not data
        buffer, frames = self.reader.read(data)
        found = [(kind, channel_id, end - start) for kind, channel_id, start, end in frames]
        count = len(self.control)
        assert found[:count] == self.control
        sends = found[count:]
        assert all(kind == SEND for kind, _, _ in sends) and len(sends) <= len(ready)
        if len(data) < _CONFIG.flush_bytes:
            assert len(sends) == len(ready)
        # Only the last ciphertext may exceed the limit.
        assert not sends or len(data) - sends[-1][2] < _CONFIG.flush_bytes + 4 * len(found)
        self.control = []
        for channel in closing:
            if channel.state is ChannelState.HALF_CLOSED:
                self._half_closed(channel, ChannelState.CLOSING)
        through = {channel for channel in self.paused if channel.pending.size <= _CONFIG.resume_bytes}
        through &= {channel for channel in self.paused if channel.state is not ChannelState.CLOSED}
        assert set(core.take_writable()) == through and not core.take_writable()
        self.paused -= through
        self.held += [(kind, channel_id, buffer[start:end]) for kind, channel_id, start, end in frames]

    # --- the application -------------------------------------------------------------------------------------------

    def act(self, choices: Choices) -> None:
        """Something an application may do now."""
        core, what = self.core, choices.below(8)
        if what == 0 and len(core.channels) < 20:
            channel_id = self._next_id()
            channel = core.open(self.peer)
            assert channel.id == channel_id and channel.state is ChannelState.OPENING
            assert channel.send_id == (None if self.dialect.own_ids else channel_id)
            self._use(channel_id)
            self.control.append((OPEN_CHANNEL, channel_id, 82))
            self.channels.append(channel)
            return
        if not self.channels:
            return
        channel = self.channels[choices.byte() % len(self.channels)]
        state = channel.state
        if what == 1 and state is ChannelState.OFFERED:
            self._accept(channel)
        elif what in (2, 3) and state is ChannelState.OPEN:
            data = bytes((len(self.written.get(channel, b"")) & 0xFF,)) * (
                1 + choices.byte() * (300 if what == 3 else 1)
            )
            self._write(channel, data)
        elif what == 4 and self.unread.get(channel):
            size = min(self.unread[channel], 1 + choices.byte() * 256)
            self.unread[channel] -= size
            wanted = core.wants_write
            assert core.consumed(channel, size) or core.wants_write == wanted
            if channel.state is not state:
                self._half_closed(channel, state)
        elif what == 5:
            over = core.close(channel)
            assert over == (channel.state is ChannelState.CLOSED)
            if state is ChannelState.OPEN:
                assert channel.state is (ChannelState.HALF_CLOSED if channel.may_close else ChannelState.CLOSING)
                if channel.may_close:
                    self._half_closed(channel, state)
            elif state in (ChannelState.CLOSING, ChannelState.HALF_CLOSED):
                assert channel.state is state
            else:
                self._aborted(channel, state)
        elif what == 6:
            core.abort(channel)
            self._aborted(channel, state)
        elif what == 7 and state is ChannelState.OFFERED:
            core.refuse(channel)
            self._aborted(channel, state)

    def _accept(self, channel: Channel) -> None:
        try:
            self.core.accept(channel)
        except HandshakeFailed:
            self.control.append((CHANNEL_CLOSED, channel.send_id, 0))
            self._over(channel)
            return
        assert channel.remote == self.peer, "a relay cannot offer a channel in the name of another key"
        assert channel.state is ChannelState.OPEN
        self.control.append((CHANNEL_OPENED, channel.send_id, 49 + self.dialect.own_ids))

    def _write(self, channel: Channel, data: bytes) -> None:
        core, over = self.core, channel.pending.size + len(data)
        try:
            paused = core.send_data(channel, data)
        except WriteOverflow:
            assert over > _CONFIG.pending_limit_bytes
            self.written[channel] = self.written.get(channel, b"") + data
            core.abort(channel)
            self._aborted(channel, ChannelState.OPEN)
            return
        assert paused == (over > _CONFIG.pause_bytes) and over <= _CONFIG.pending_limit_bytes
        if paused:
            self.paused.add(channel)
        self.written[channel] = self.written.get(channel, b"") + data

    def _aborted(self, channel: Channel, state: ChannelState) -> None:
        """An application gives a channel up: it gets no more events, and the other side is told once."""
        self.silent.add(channel)
        if state in (ChannelState.OPEN, ChannelState.CLOSING):
            self._dropped(channel)
        elif state is ChannelState.OPENING:
            assert channel.state is ChannelState.ABANDONED
            if channel.send_id is not None:
                self.control.append((CLOSE_CHANNEL, channel.send_id, 0))
        elif state is ChannelState.OFFERED:
            self.control.append((CHANNEL_CLOSED, channel.send_id, 0))
            self._over(channel)
        else:
            assert channel.state is state and not channel.pending.size

    def pass_time(self, now: float) -> None:
        """A wait begins when the core learns the time; the channel ends exactly when the wait does."""
        core = self.core
        times = [self.now if at is None else at for at in self.due.values()]
        assert core.next_timeout() == (min(times) if times else None)
        self.now = now
        expected, over = [], []
        for channel, at in list(core._deadlines.items()):
            due = self.due[channel]
            assert due == at
            if due is None:
                self.due[channel] = now + _WAITS_S[channel.state]
            elif now >= due:
                over.append((channel, channel.state))
                if channel not in self.silent:
                    expected.append((channel, ChannelEndReason.NORMAL))
        events: Any = core.handle_timeout(now)
        assert [(event.channel, event.reason) for event in events] == expected
        self.take(events)
        for channel, state in over:
            if state is ChannelState.HALF_CLOSED:
                self.control.append((CHANNEL_CLOSED, channel.send_id, 0))
            self.late_ids.append(channel.id)
            self._over(channel)

    def check(self) -> None:
        """The core's counters are correct."""
        core = self.core
        assert {channel.id for channel in core.channels.values()} == set(core.channels)
        states = [channel.state for channel in core.channels.values()]
        assert ChannelState.CLOSED not in states
        assert core._offered == states.count(ChannelState.OFFERED) <= _CONFIG.offered_limit
        assert core._incoming == sum(not one.initiator for one in core.channels.values()) <= _CONFIG.incoming_limit
        assert core._control_bytes == sum(map(len, core._control))
        assert len(core._control) == len(self.control)
        waiting = {ChannelState.HALF_CLOSED, ChannelState.ABANDONED}
        assert set(core._deadlines) == {one for one in core.channels.values() if one.state in waiting}
        for channel in core._deadlines:
            self.due.setdefault(channel, None)
        assert set(self.due) == set(core._deadlines)
        for channel in core.channels.values():
            assert channel.discarding or channel.unread_bytes == self.unread.get(channel, 0)
            assert channel.discarding or channel.unread_bytes <= _CONFIG.receive_limit_bytes
            assert channel.pending.size <= _CONFIG.pending_limit_bytes + 80_000
            assert not channel.sendable or channel.queued
            assert channel.state is not ChannelState.CLOSING or not channel.may_close, "it would never be closed"
            assert channel.discarding == (channel in self.silent)
            assert not channel.discarding or not channel.pending.size
            assert channel.discarding or channel.received_bytes == len(self.received.get(channel, b""))


def one_input(data: bytes) -> None:
    """The first byte picks a dialect; then operations of the two applications and of the relay between them.

    The relay passes frames on under any id, alters, repeats, drops and forges them. Whatever it does, the data that arrives
    on a channel is a prefix of the data written to one, each core counts correctly and answers each frame as specified,
    and if the relay is honest no end is found at fault.
    """
    choices = Choices(data)
    dialect = _DIALECTS[choices.byte() % len(_DIALECTS)]
    clients = [_Client(number, dialect) for number in (0, 1)]
    now, touched = 0.0, False
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
                touched |= _pass_on(client, other, choices, now, dialect, touched)
            case 5:
                payload = bytes((choices.byte(),)) * choices.pick((0, 1, 3, 49, 50, 82, 100))
                other.feed_frame(choices.below(6), choices.byte(), payload, now)
                touched = True
            case 6:
                other.feed_garbage(choices.pieces(choices.chunk()), now)
                touched = True
            case _:
                now += choices.byte() / 16
                client.pass_time(now)
        for one in clients:
            one.check()
            if not touched:
                assert not one.faults, "an honest client over an honest relay was found at fault"
    for client, other in (clients, clients[::-1]):
        client.flush()
        for received in client.received.values():
            assert any(written.startswith(received) for written in other.written.values())


def _pass_on(client: _Client, other: _Client, choices: Choices, now: float, dialect: Dialect, touched: bool) -> bool:
    """The relay passes a frame on; gives whether it does so wrongly."""
    how, given = choices.below(8), choices.byte()
    at = choices.byte() % len(client.held) if how == 7 else 0
    kind, channel_id, payload = client.held[at]
    client_id = channel_id
    if how != 6:  # otherwise it is repeated later
        del client.held[at]
    if how == 5:
        return True
    if kind == OPEN_CHANNEL:
        payload = client.core.identity.raw + payload[33:]
    if how == 4 and payload:
        place = choices.byte() % len(payload)
        payload = payload[:place] + bytes((payload[place] ^ (1 + choices.byte() % 255),)) + payload[place + 1 :]
    # If both sides choose ids, only the first channel of each is passed on correctly.
    wrong = how >= 4 or (dialect.own_ids and ((given != 0 and kind != OPEN_CHANNEL) or len(client.channels) > 1))
    # The ids of an honest relay if the input likes: 255 less the caller's on the callee's link, and the same back.
    channel_id = (255 - channel_id) & 0xFF if not dialect.own_ids and how < 4 else given
    channel = other.core.channels.get(channel_id)
    before = channel.received_bytes if channel is not None else 0
    parts = [payload]
    if kind != SEND or how not in (2, 3):
        other.feed_frame(kind, channel_id, payload, now)
    elif how == 3:  # a ciphertext in several Sends
        for part in (payload[:1], payload[1:3], payload[3:]):
            other.feed_frame(kind, channel_id, part, now)
    else:
        # Several in one, and a part of the last one by itself.
        while client.held and client.held[0][0] == SEND and client.held[0][1] == client_id:
            parts.append(client.held.pop(0)[2])
        whole = b"".join(parts)[:65_000]
        other.feed_frame(kind, channel_id, whole[:-1], now)
        other.feed_frame(kind, channel_id, whole[-1:], now)
        wrong |= len(whole) < sum(map(len, parts))
    honest = not wrong and not touched and not dialect.acks and kind == SEND
    if honest and channel is not None and channel not in other.silent:
        overhead = 2 + channel.opener.overhead_bytes
        assert channel.received_bytes - before == sum(len(part) - overhead for part in parts), "data was lost"
    return wrong


@lru_cache(maxsize=4_096)
def _is_point(raw: bytes) -> bool:
    return outcome(lambda: PublicKey(raw), InvalidKey)[0] == "value"


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
        for how in (b"\x02", b"\x03"):
            several = there[:2] + how + there[-1:]
            yield head + opened + say + flush + say + flush + several + read + say + flush + several * 2 + read
        yield head + opened + (b"\x00\x00\x03\x00\xff" + flush + there) * 2 + read + back + home + close + flush
        yield head + opened + b"\x01\x00\x05\x00" + close + flush + back + there + home + there + home
        yield head + ask + b"\x00\x00\x06\x00" + b"\x00\x07\xff" * 40 + ask + flush
        yield head + opened + say + flush + b"\x00\x00\x06\x00"
        yield head + opened + say + flush + close + say + there + read + back + home
        yield head + opened + say + close + flush + there + read + back + home + flush + there
        yield head + ask + flush + offer + b"\x01\x00\x07\x00" + back + home
        yield head + ask + flush + b"\x00\x03\x04\xff\x40\x00" + answer
        yield head + opened + close + b"\x01\x05\x52\x02\x04\x00" + b"\x00\x07\xff" * 2 + ask + ask
        yield head + opened + say + flush + b"\x00\x03\x04" + there[-1:] + b"\x09\x01"
        yield head + opened + b"\x01\x05\x00\x52\x00\x00" + back
        yield head + ask + b"\x00\x00\x06\x00" + flush + offer + answer + back + home
