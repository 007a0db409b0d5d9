"""Two honest messaging clients and an honest relay with slow networks: everything arrives, and everything ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from dmsg.messaging.core.channel import Channel, ChannelState
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import DIALECTS, Dialect
from dmsg.messaging.core.errors import ChannelEndReason
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened, DataReceived, Event
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import GO, SEED, SEND, FrameReader, Layout
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.switch import Switch
from dmsg.serving.events import TransportEnded, TransportStarted
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS

_DIALECTS = tuple(DIALECTS.values())
_CONFIG = ConnectionConfig(pause_bytes=2_000, resume_bytes=1_000, flush_bytes=70_000)
_LIMITS = RelayLimits()
#: The text that is written differs at each place, so that lost, doubled and reordered bytes are found.
_TEXT = hashlib.shake_128(b"text").digest(600_000)
_CHANNELS = 24
_NORMAL, _BY_PEER = ChannelEndReason.NORMAL, ChannelEndReason.CLOSED_BY_PEER
_GONE, _REFUSED = ChannelEndReason.PEER_GONE, ChannelEndReason.REFUSED


class _Half:
    """One end of a channel, as its application knows it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pair: _Half | None = None
        self.written = self.received = b""
        self.unread = 0
        self.open = self.paused = self.closed = self.aborted = False
        self.closed_at = 0.0
        self.end: ChannelEndReason | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended for its application."""
        return self.aborted or self.end is not None


class _End:
    """A client with its application, and the bytes in flight between it and the relay."""

    def __init__(self, world: _World, number: int, dialect: Dialect, layout: Layout) -> None:
        random = repeatable(bytes((number,)))
        self.world = world
        self.core = Connection(KEYS[number], now=0.0, dialect=dialect, layout=layout, config=_CONFIG, random=random)
        self.peer = KEYS[1 - number].public_key
        self.other: _End
        self.halves: dict[Channel, _Half] = {}
        self.up = b""
        self.down = b""
        self.reader = FrameReader(layout)
        self.member, _ = world.switch.add_member(KEYS[number].public_key, world.now)
        self.flush()
        self.rise(len(self.up))

    # --- the application -------------------------------------------------------------------------------------------

    def dial(self) -> None:
        half = self._add(self.core.open(self.peer))
        self.world.dials[self.core._control[-1][-49:]] = half

    def _add(self, channel: Channel) -> _Half:
        half = self.halves[channel] = _Half(channel)
        return half

    def accept(self, half: _Half, *, takes: bool) -> None:
        if takes:
            self.core.accept(half.channel)  # the key is the caller's, so nothing is raised
            assert half.channel.remote == self.peer
            half.open = True
        else:
            self.core.refuse(half.channel)
            half.aborted = True

    def write(self, half: _Half, size: int) -> None:
        """Write as an application that respects back-pressure."""
        if half.paused:
            return
        data = _TEXT[len(half.written) : len(half.written) + size]
        half.written += data
        half.paused = self.core.send_data(half.channel, data)
        assert half.paused == (half.channel.pending.size > _CONFIG.pause_bytes)

    def consume(self, half: _Half, size: int) -> None:
        half.unread -= size
        before = self.core.wants_write
        assert self.core.consumed(half.channel, size) or self.core.wants_write == before, (
            "it waits, and no flush is due"
        )

    def close(self, half: _Half) -> None:
        half.closed, half.closed_at = True, self.world.now
        waits = half.channel.state in (ChannelState.OPEN, ChannelState.CLOSING, ChannelState.HALF_CLOSED)
        through = self.core.close(half.channel)
        half.aborted |= not waits
        assert through == (half.channel.state is ChannelState.CLOSED) and not (through and waits)

    def abort(self, half: _Half) -> None:
        self.core.abort(half.channel)
        half.aborted = True

    def act(self, choices: Choices, what: int) -> None:
        """Something an application may do now."""
        if what == 0:
            if len(self.halves) < _CHANNELS:
                self.dial()
            return
        live = [half for half in self.halves.values() if not half.over or half.unread]
        if not live:
            return
        half = live[choices.byte() % len(live)]
        state = half.channel.state
        if what == 4:
            self.consume(half, min(half.unread, 1 + choices.byte() * 128))
        elif half.over:
            return
        elif what == 1 and state is ChannelState.OFFERED:
            self.accept(half, takes=choices.byte() % 4 != 3)
        elif what in (2, 3) and state is ChannelState.OPEN:
            self.write(half, 1 + choices.byte() * (512 if what == 3 else 1))
        elif what == 5 and not half.closed:
            self.close(half)
        elif what == 6:
            self.abort(half)

    def note(self, events: list[Event]) -> None:
        """Record events: none for an ended channel, and each end once."""
        for event in events:
            if isinstance(event, ChannelOffered):
                half = self._add(event.channel)
                half.pair = self.world.dials[event.channel.offer]
                half.pair.pair = half
                assert event.channel.remote == self.peer
                assert event.channel.state in (
                    ChannelState.OFFERED,
                    ChannelState.CLOSED,
                )  # it may be taken back at once
                continue
            assert isinstance(event, (ChannelOpened, ChannelEnded, DataReceived))
            half = self.halves[event.channel]
            assert not half.over and event.channel.remote == self.peer
            if isinstance(event, ChannelOpened):
                assert half.pair is not None and not half.open
                half.open = True
            elif isinstance(event, DataReceived):
                assert half.open and event.data and half.pair is not None
                half.received += event.data
                half.unread += len(event.data)
                assert half.pair.written.startswith(half.received), "other bytes than were written"
            else:
                half.end = event.reason
                assert event.local == (event.reason is _NORMAL)

    # --- the network -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """The network takes the client's data: never two Sends of one channel in one write."""
        wanted = self.core.wants_write
        data = self.core.data_to_send()
        assert wanted or not data
        self.up += data
        _, frames = self.reader.read(data)
        sends = [channel_id for kind, channel_id, _, _ in frames if kind == SEND]
        assert len(sends) == len(set(sends))
        kinds = [kind == SEND for kind, _, _, _ in frames]
        assert kinds == sorted(kinds) and (len(data) < 140_000 or not frames)
        for channel in self.core.take_writable():
            half = self.halves[channel]
            assert half.paused and channel.pending.size <= _CONFIG.resume_bytes
            half.paused = False

    def rise(self, size: int) -> None:
        """Bytes arrive at the relay."""
        data, self.up = self.up[:size], self.up[size:]
        if data:
            self.world.relayed(self.member.receive_data(data, self.world.now), in_time=True)

    def fall(self, size: int) -> None:
        """Bytes arrive at the client."""
        data, self.down = self.down[:size], self.down[size:]
        if data:
            self.note(self.core.receive_data(data, self.world.now))


class _World:
    """The relay, the two clients, the time."""

    def __init__(self, choices: Choices) -> None:
        kind, layouts = choices.byte(), choices.byte()
        self.now = 0.0
        self.quirks = bool(layouts & 4)
        self.switch = Switch(_LIMITS, go_quirks=self.quirks)
        self.dials: dict[bytes, _Half] = {}
        #: Whether something timed out, and so may have been cut off.
        self.late = False
        dialect = _DIALECTS[kind % len(_DIALECTS)]
        one = _End(self, 0, dialect, SEED if layouts & 1 else GO)
        two = _End(self, 1, dialect, SEED if layouts & 2 else GO)
        one.other, two.other = two, one
        self.ends = one, two

    def relayed(self, events: object, *, in_time: bool) -> None:
        """The relay refuses no valid request, and ends only channels that one side ends or that time out."""
        assert isinstance(events, list)
        for event in events:
            assert isinstance(event, (TransportStarted, TransportEnded))
            if isinstance(event, TransportEnded):
                assert not in_time or event.by != "server"
                self.late |= not in_time

    def relay(self) -> None:
        """Act as the service does after a read."""
        dirty, self.switch.dirty = self.switch.dirty, []
        for end in self.ends:
            end.member.dirty = False
            if end.member in dirty and not end.member.congested:
                end.down += end.member.data_to_send()

    def resume(self, end: _End) -> None:
        end.member.resume()
        while end.member.wants_write:
            end.down += end.member.data_to_send()

    def pass_time(self, seconds: float) -> None:
        """Nothing is given up before its time."""
        self.now = now = self.now + seconds
        due = self.switch.next_timeout()
        events = self.switch.handle_timeout(now)
        assert not events or (due is not None and due <= now)
        self.relayed(events, in_time=False)
        for end in self.ends:
            due = end.core.next_timeout()
            waiting = len(end.core.channels)
            told = end.core.handle_timeout(now)
            given_up = len(end.core.channels) < waiting
            assert not (told or given_up) or (due is not None and due <= now)
            self.late |= bool(told) or given_up
            end.note(told)
            for event in told:
                assert isinstance(event, ChannelEnded) and event.reason is _NORMAL
                assert now >= end.halves[event.channel].closed_at + _CONFIG.close_timeout_s

    def settle(self) -> None:
        """Take and deliver everything until nothing moves any more, which is soon."""
        for _ in range(1_000):
            for end in self.ends:
                for half in list(end.halves.values()):
                    if half.channel.state is ChannelState.OFFERED:
                        end.accept(half, takes=True)
                    if half.unread:
                        end.consume(half, half.unread)
                end.flush()
                end.rise(len(end.up))
                self.resume(end)
            self.relay()
            for end in self.ends:
                end.fall(len(end.down))
            if not self.switch.dirty and not any(map(self._has_more, self.ends)):
                break
        else:
            raise AssertionError("it never becomes quiet")
        for end in self.ends:
            for half in end.halves.values():
                self._check(half)

    @staticmethod
    def _has_more(end: _End) -> bool:
        return bool(
            end.core.wants_write
            or end.up
            or end.down
            or any(half.unread or half.channel.state is ChannelState.OFFERED for half in end.halves.values())
        )

    def _check(self, half: _Half) -> None:
        """Check a half once nothing moves any more."""
        channel, pair = half.channel, half.pair
        assert channel.received_bytes == len(half.received) or half.aborted or channel.dropped
        if half.end is not None or (half.aborted and channel.state is ChannelState.CLOSED):
            assert channel.acked_bytes + channel.cut_bytes == len(half.written)
        if self.late:
            return
        if not half.over:
            assert pair is not None and not pair.over and half.open and pair.open
            assert channel.state is pair.channel.state is ChannelState.OPEN
            assert half.received == pair.written and not half.paused and channel.unread_bytes == 0
            assert channel.acked_bytes == channel.sent_bytes == len(half.written)
            return
        assert channel.state is ChannelState.CLOSED
        if half.end is None or pair is None:
            assert half.aborted or half.end is None
            return
        match half.end:
            case ChannelEndReason.NORMAL:
                assert half.closed and (pair.end in (_BY_PEER, _NORMAL) or pair.aborted)
                assert pair.aborted or pair.received == half.written, "an orderly end cuts nothing off"
                assert pair.aborted or channel.cut_bytes == 0
                # Data that the other end had sent before it learned of the end arrives as well.
                assert pair.aborted or half.received == pair.written[: pair.channel.sent_bytes]
            case ChannelEndReason.CLOSED_BY_PEER:
                assert pair.closed or (pair.aborted and (not pair.open or self.quirks))  # a dial that was given up
                assert pair.aborted or half.received == pair.written
            case ChannelEndReason.PEER_GONE:
                assert pair.aborted and (half.open or not channel.initiator)
            case ChannelEndReason.REFUSED:
                assert pair.aborted and not half.open and half.channel.initiator
            case _:
                raise AssertionError(half.end)

    def finish(self, who: int) -> None:
        """Nothing hangs: everything arrives, and once everything is closed nothing is left anywhere."""
        self.settle()
        for at, half in enumerate(list(self.ends[0].halves.values())):
            pair = half.pair
            if half.over or half.closed or pair is None:
                continue
            if who == 2 + at % 2 or not who:
                self.ends[0].close(half)
            if who != 2 + at % 2 and not pair.over and not pair.closed:
                self.ends[1].close(pair)
        self.settle()
        if self.late:
            for _ in range(4):
                self.pass_time(31.0)
                for end in self.ends:
                    for half in end.halves.values():
                        # Its dial was given up more than 30 s ago, so the answer found no channel.
                        if not half.over and half.pair is not None and half.pair.over:
                            end.abort(half)
                self.settle()
        for end in self.ends:
            assert not end.core.channels and not end.member.legs and not end.core.wants_write
            assert end.core._offered == end.core._incoming == 0 and not end.core._deadlines
            assert all(half.over for half in end.halves.values()) or self.late
        assert not self.switch.open_transports and not self.switch.queued_bytes


def one_input(data: bytes) -> None:
    """Two bytes choose the dialects of clients and relay; then operations of applications, networks and time.

    However slow the networks are, no byte is lost, doubled or reordered, each channel ends once at each side and for the
    same reason at both, and nothing hangs.
    """
    choices = Choices(data)
    world = _World(choices)
    for _ in range(150):
        if not choices.left:
            break
        step = choices.byte()
        end = world.ends[step & 1]
        match (step >> 1) % 16:
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 as what:
                end.act(choices, what)
            case 7:
                end.flush()
            case 8:
                end.rise(1 + choices.byte() * 32)
            case 9:
                world.relay()
            case 10:
                end.fall(1 + choices.byte() * 32)
            case 11:
                end.member.pause()
            case 12:
                world.resume(end)
            case 13:
                world.pass_time(choices.byte() / 64)
            case 14:  # the quick way to the other client
                end.flush()
                end.rise(len(end.up))
                world.relay()
                end.other.fall(len(end.other.down))
            case _:
                world.settle()
    world.finish(len(data) % 4)


def seeds() -> Iterator[bytes]:
    """Channels that are opened, used, closed by one side or both and given up, in each dialect, in pieces and late."""

    def step(what: int, who: int, *more: int) -> bytes:
        return bytes((what << 1 | who, *more))

    there, back = step(14, 0), step(14, 1)
    opened = step(0, 0) + there + step(1, 1, 0, 0) + back
    say, answer = step(2, 0, 0, 40), step(2, 1, 0, 90)
    much, read = step(3, 0, 0, 200), step(4, 1, 0, 255)
    for kind in range(len(_DIALECTS)):
        for layouts in (0, 1, 6):
            head = bytes((kind, layouts))
            yield head + opened
            yield head + opened + say + there + answer + back + read + step(4, 0, 0, 9) + there + back
            yield head + opened + (much + there + read) * 3 + step(5, 0, 0) + answer + there + back + step(5, 1, 0)
            yield head + opened + say + step(5, 0, 0) + answer + step(5, 1, 0) + step(7, 1) + there + back
            yield head + opened + step(11, 1) + much + there * 2 + step(5, 0, 0) + there + step(12, 1) + step(10, 1, 3)
            yield head + opened + say + answer + there + step(6, 1, 0) + back + step(0, 1) + back
            yield head + step(0, 0) + step(6, 0, 0) + there + back + step(0, 0) + there + step(1, 1, 0, 3) + back
            yield head + step(0, 0) + there + step(1, 1, 0, 0) + step(6, 0, 0) + step(7, 0) + back + there
            yield head + opened + step(5, 0, 0) + step(13, 0, 1) + step(13, 0, 255) + there + say
            yield head + opened + much + step(7, 0) + step(8, 0, 2) * 3 + step(9, 0) + step(10, 1, 1) * 4
            yield head + (step(0, 0) + step(0, 1)) * 3 + there + back + step(15, 0) + much * 2 + say + step(5, 1, 1)
            yield head + step(0, 0) + step(6, 0, 0) + step(13, 0, 255) * 8 + there
            yield head + opened + answer + step(14, 1) + step(5, 0, 0) + step(4, 0, 0, 255) + step(7, 0)
