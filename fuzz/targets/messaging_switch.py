"""A messaging relay between hostile clients: frames, dialects, layouts, congestion, time, links that come and go."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    GO,
    KEY_BYTES,
    OPEN_CHANNEL,
    OPEN_CHANNEL_BYTES,
    SEED,
    SEND,
    FrameReader,
)
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.member import Leg, Member
from dmsg.messaging.relay.switch import Switch
from dmsg.serving.events import Ending, RequestRefused, SwitchEvent, TransportEnded
from dmsg.serving.member import LegState
from fuzz.choices import Choices
from fuzz.oracles import outcome
from fuzz.switches import CLIENTS, LEAST_REQUESTS, SMALL_LIMITS, World, run

_LIMITS = RelayLimits(close_timeout_s=5.0, strays_per_s=1e6, stray_burst=10**6, **SMALL_LIMITS)
_MESSAGE = CLIENTS[0].raw + bytes(16)


#: Frames of one channel that a client has yet to get: type and payload, in order.
_Flow = deque[tuple[int, bytes]]


class _Switch(Switch):
    """A switch that reports the queues it drops."""

    def __init__(self, limits: RelayLimits, *, go_quirks: bool) -> None:
        super().__init__(limits, go_quirks=go_quirks)
        self.world: _World

    def _cut(self, queue: Leg, events: list[SwitchEvent]) -> None:
        self.world.note_cut(queue)
        super()._cut(queue, events)


class _World(World):
    """The switch and its clients, with the frames that clients may send."""

    switch: _Switch
    members: list[Member]  # type: ignore[assignment]

    def __init__(self, choices: Choices) -> None:
        quirks = choices.flag()
        super().__init__(choices, _Switch(_LIMITS, go_quirks=quirks))
        self.switch.world = self
        self.quirks = quirks
        self.readers: dict[Member, FrameReader] = {}
        #: Bytes of an incomplete frame.
        self.begun: dict[Member, bytes] = {}
        # Frames that arrived for a leg's client and were not sent to it yet; the legs by the client's ids; and legs whose
        # client need not get everything, because a limit or the client itself ended the channel.
        self.flows: dict[Leg, _Flow] = defaultdict(deque)
        self.called: dict[tuple[Member, int], list[Leg]] = defaultdict(list)
        self.lossy: set[Leg] = set()
        self.told: set[Leg] = set()  # whose client is told of the end, behind all else
        # Clients' ids that were reused while frames of the old channel were queued.
        self.reused: set[tuple[Member, int]] = set()
        #: Frames that belong to no channel: the end of an unknown channel.
        self.alone: Counter[tuple[Member, int, int]] = Counter()
        self.given: dict[Member, int] = {}  # the id that the relay gave last, of the upper half
        #: Ids of requests that are over and that the client may still answer, the oldest first.
        self.late: dict[Member, dict[int, None]] = defaultdict(dict)
        self.requests: Counter[bytes] = Counter()  # by the key of the client they are for
        self.asked: Counter[Member] = Counter()
        self.passed: Counter[Member] = Counter()
        self.news: list[Any] = []  # what the switch told of the last frame
        self.carried: Counter[Leg] = Counter()  # bytes that came from the client of a leg
        self.closing_since: dict[Leg, float] = {}
        self.timing = False  # whether time passes now
        self.refused: Leg | None = None  # whose end is told in one with the refusal of an OpenChannel
        self.sender = ""  # the side whose frame closes a channel now

    def admit(self, key: PublicKey, flags: int, group: str) -> tuple[Member, list[SwitchEvent]]:
        member, events = self.switch.add_member(key, self.now, group=group)
        # A client announces its layout first: until then it would be sent frames in the other layout.
        layout = SEED if flags & 4 else GO
        self.readers[member] = FrameReader(layout)
        self.begun[member] = b""
        self.given[member] = 256
        member.receive_data(layout.encode(CHANNEL_CLOSED, 0), self.now)
        assert member.layout is layout
        return member, events

    # --- what comes ------------------------------------------------------------------------------------------------

    def feed(self, member: Any, data: bytes) -> None:
        """Sends of open channels together; every other frame by itself, because it changes which channels are open."""
        if member.overloaded:
            return
        at, buffer = len(self.begun[member]), self.begun[member] + data
        layout = self.readers[member].layout
        assert layout is not None
        used = 0
        try:
            found, used, _ = layout.split_frames(buffer)
        except RemoteProtocolError:
            found = []
        frames = deque(found)
        while frames and member in self.members and not member.overloaded:
            end = 0
            while frames and self._passes(member, buffer, *frames[0]):
                end = frames.popleft()[3]
            if end:
                count, size = member.frames_in, member.bytes_in
                super().feed(member, buffer[at:end])
                assert member.frames_in > count and member.bytes_in == size + end - at
            else:
                kind, channel_id, start, end = frames.popleft()
                self._feed_one(member, kind, channel_id, buffer[start:end], buffer[at:end])
            at = end
        if member in self.members:
            if member.overloaded:
                self.begun[member] = b""
            else:
                self.begun[member] = buffer[at if found else used :]
                super().feed(member, buffer[at:])

    def _passes(self, member: Member, buffer: bytes, kind: int, channel_id: int, start: int, end: int) -> bool:
        """Whether a frame goes to the other client unchanged; records it then."""
        leg = member.legs.get(channel_id)
        if kind != SEND or leg is None or not leg.open or leg.closing or not _fits(leg, end - start):
            return False
        self.flows[leg.other].append((SEND, buffer[start:end]))
        self.carried[leg] += end - start
        return True

    def _feed_one(self, member: Member, kind: int, channel_id: int, payload: bytes, data: bytes) -> None:
        """A frame is answered, passed on, ignored, or ends its channel."""
        leg = member.legs.get(channel_id)
        other = leg.other if leg is not None else None
        self.news = []
        if leg is None and kind in (CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED):
            self.late[member].pop(channel_id, None)
        if kind == OPEN_CHANNEL:
            self._feed_open_channel(member, channel_id, payload, data)
        elif kind == CHANNEL_OPENED:
            self._feed_channel_opened(member, leg, payload, data)
        elif kind in (CLOSE_CHANNEL, CHANNEL_CLOSED):
            if leg is None and not member.own_ids:
                leg = member.legs.get(256 + channel_id)
            self._feed_close(member, leg, kind, data)
        else:
            too_long = kind == SEND and leg is not None and leg.open and not leg.closing
            if too_long:
                assert leg is not None and other is not None
                assert len(data) > 65_517
            super().feed(member, data)
            assert self._told() == ([(Ending.MALFORMED, "server")] if too_long else [])

    def _told(self) -> list[tuple[int, str]]:
        return [(event.reason, event.by) for event in self.news if isinstance(event, TransportEnded)]

    def _feed_open_channel(self, member: Member, channel_id: int, payload: bytes, data: bytes) -> None:
        older = next(
            (
                leg
                for leg in member.legs.values()
                if leg.id == channel_id and (leg.open or leg.initiator or not member.own_ids)
            ),
            None,
        )
        target = self.switch.members.get(payload[:KEY_BYTES])
        fault = self._fault(member, payload, target) if older is None else "bad_id"
        self.requests[payload[:KEY_BYTES]] += 1
        self.asked[member] += 1
        self.refused = older
        full = self._full(member, target) if target is not None else ""
        theirs = self._next_id(target) if target is not None and not fault else None
        known = set(member.legs.values())
        super().feed(member, data)
        added = [leg for leg in member.legs.values() if leg not in known]
        ends = self._told()
        if isinstance(self.news[-1] if self.news else None, RequestRefused):
            assert not added and ends == ([(Ending.BAD_ID, "server")] if older is not None else [])
            self.alone[member, CHANNEL_CLOSED, channel_id] += 1
            self._check_refusal(member, payload, self.news[-1].reason, fault, full, theirs)
            return
        (leg,) = added
        assert target is not None and not fault and not full and not self.switch.draining
        assert leg.initiator and leg.key == 256 + channel_id and leg.id == channel_id and not leg.open
        assert leg.other.member is target and leg.other.key == theirs and not leg.closing and not leg.other.closing
        assert leg.other.id == (-1 if target.own_ids else theirs)
        assert set(ends) <= {(Ending.BUSY, "server")} and len(ends) <= 1
        self._give(target, theirs)
        self._call(member, channel_id, leg)
        self._call(target, theirs, leg.other)
        self.flows[leg.other].append((OPEN_CHANNEL, member.remote.raw + payload[KEY_BYTES:]))
        self.passed[member] += 1
        lasted_s = self.now - member.since
        assert self.passed[member] <= self.limits.request_burst + self.limits.requests_per_s * lasted_s + 1

    def _call(self, member: Member, channel_id: int, leg: Leg) -> None:
        """From now on, frames with this id may belong to ``leg``."""
        before = self.called[member, channel_id]
        if any(self.flows[one] or one.open for one in before if one is not leg):
            self.reused.add((member, channel_id))
            self.lossy.update(before)
            self.lossy.add(leg)
        if leg not in before:
            before.append(leg)

    def _fault(self, member: Member, payload: bytes, target: Member | None) -> str:
        """Why an OpenChannel is refused in any case."""
        if len(payload) != OPEN_CHANNEL_BYTES:
            return "malformed"
        if target is None:
            return "unknown_peer"
        if target is member:
            return "refused"
        return "" if _is_point(payload[KEY_BYTES:]) else "malformed"

    def _full(self, member: Member, target: Member) -> str:
        """Why the relay has no room, whoever asks."""
        if member.dials + member.incoming.count >= self.limits.transports_per_connection:
            return "busy"
        return "busy" if target.control_backlog_bytes > self.limits.control_backlog_bytes else ""

    def _next_id(self, member: Member) -> int | None:
        """The next free id below the last, from 255 down to 128; then the highest of the others. Late ids are used last, but
        before the lower ones where the client gives those.
        """
        last = self.given[member]
        taken = {leg.key for leg in member.legs.values()} | {leg.id for leg in member.waiting if not leg.open}
        if not member.own_ids:
            taken |= {leg.id for leg in member.legs.values() if leg.initiator and not leg.open}
        late = self.late[member]
        upper = [*range(last - 1, 127, -1), *range(255, last - 1, -1)]
        upper, lower = ([one for one in ids if one not in late] for ids in (upper, range(127, -1, -1)))
        order = [*upper, *lower, *late] if member.own_ids else [*upper, *late, *lower]
        return next((number for number in order if number not in taken), None)

    def _give(self, member: Member, number: int) -> None:
        """The relay has given ``number``, which :meth:`_next_id` told."""
        if number in self.late[member]:
            del self.late[member][number]
        elif number >= 128:
            self.given[member] = number

    def _check_refusal(
        self, member: Member, payload: bytes, reason: str, fault: str, full: str, theirs: int | None
    ) -> None:
        """A good OpenChannel is refused only by a limit that was reached."""
        limits = self.limits
        if fault == "bad_id" or len(payload) != OPEN_CHANNEL_BYTES:
            assert reason == fault
        elif self.switch.draining:
            assert reason == "server_draining"
        elif reason == "rate_limited":
            assert (
                member.pending_requests == limits.pending_requests
                or self.asked[member] > limits.request_burst
                or (not fault and self.requests[payload[:KEY_BYTES]] > limits.pair_request_burst)
            )
        elif reason == "requests_per_target":
            assert not fault
            assert self.requests[payload[:KEY_BYTES]] > LEAST_REQUESTS
        elif fault:
            assert reason == fault
        else:
            assert reason == "busy"
            target = self.switch.members[payload[:KEY_BYTES]]
            room = min(limits.transports_per_connection // 2, limits.transports_per_connection - target.dials)
            assert (
                full
                or theirs is None
                or target.control_backlog_bytes > limits.control_backlog_bytes // 2  # for a stranger
                or target.incoming.count >= room
                or target.unanswered.count >= limits.unanswered_per_target
            )

    def _feed_channel_opened(self, member: Member, leg: Leg | None, payload: bytes, data: bytes) -> None:
        own_ids = len(payload) == len(_MESSAGE) + 1
        message = payload[1:] if own_ids else payload
        in_use = own_ids and any((one.open or one.initiator) and one.id == payload[0] for one in member.legs.values())
        if leg is None or leg.initiator or leg.open:
            if leg is None and own_ids and not in_use:
                self.alone[member, self._ends_open(member), payload[0]] += 1
            super().feed(member, data)
            assert not self.news
            return
        other = leg.other
        asking = other.member
        others = member.own_ids, asking.own_ids
        full = member.incoming.count
        sound = len(message) == len(_MESSAGE) and not in_use and _is_point(message)
        if not sound or others[0] not in (None, own_ids):
            super().feed(member, data)
            assert self._told() == [(Ending.MALFORMED, "server")] and len(self.news) == 1
            assert member.own_ids == others[0]
            return
        key = self._next_id(asking) if own_ids else other.id
        if own_ids:
            self._call(member, payload[0], leg)
        super().feed(member, data)
        assert member.own_ids is own_ids
        if not own_ids:
            self.late[member].clear()
        assert not own_ids or leg.id == payload[0]
        if others[1] not in (None, own_ids):
            assert self._told() == [(Ending.UNSUPPORTED, "server")] and len(self.news) == 1
            return
        if leg.open:
            assert key is not None and other.open and self.news[-1].asking is other
            if own_ids:
                self._give(asking, key)
            assert (leg.key, other.key) == (leg.key, key) and asking.legs[key] is other
            ends = self._told()
            assert not ends or (ends == [(Ending.BUSY, "server")] and full)
            head = bytes((key,)) if own_ids else b""
            self.flows[other].append((CHANNEL_OPENED, head + message))
        else:
            assert self._told() == [(Ending.BUSY, "server")] and self.news[-1].asking is other
            assert full or (not own_ids and key in asking.legs) or key is None

    def _feed_close(self, member: Member, leg: Leg | None, kind: int, data: bytes) -> None:
        if leg is None:
            super().feed(member, data)
            assert not self.news
            return
        other, was_open, was_closing = leg.other, leg.open, (leg.closing, leg.other.closing)
        if was_open and kind == CLOSE_CHANNEL:
            if not leg.closing:
                self.flows[other].append((CLOSE_CHANNEL, b""))
                self.closing_since[leg] = self.now
            super().feed(member, data)
            ended = [(Ending.SLOW_CONSUMER, "server")] if not leg.open else []
            assert [end for end in self._told() if end[0] != Ending.SLOW_CONSUMER] == [] and (ended or leg.closing)
            return
        if not was_open and kind == CLOSE_CHANNEL and leg.id != -1:
            self.alone[member, CHANNEL_CLOSED, leg.id] += 1
        self.sender = leg.side
        super().feed(member, data)
        self.sender = ""
        if was_open:
            assert self._told() == [(Ending.NORMAL, (other if was_closing[1] else leg).side)]
        else:
            assert self._told() == [(Ending.NORMAL if leg.initiator else Ending.REFUSED, leg.side)]
        assert leg.state is LegState.CLOSED and len(self.news) == 1

    # --- what the switch tells -------------------------------------------------------------------------------------

    def noted(self, events: Any) -> None:
        """See :class:`World`; each end is told to the clients."""
        super().noted(events)
        self.news += events
        for event in events:
            if isinstance(event, TransportEnded):
                self._note_end(event.asking, event)

    def _note_end(self, asking: Any, event: TransportEnded) -> None:
        """The client that did not end a channel gets all earlier frames, then the end; both are told of a limit."""
        both = event.by == "server" or (self.timing and event.reason == Ending.NORMAL)
        if self.timing and event.reason == Ending.NORMAL:
            closer = asking if event.by == asking.side else asking.other
            assert self.now >= self.closing_since[closer] + _LIMITS.close_timeout_s
        if event.reason == Ending.HANDSHAKE_TIMEOUT:
            assert self.now >= asking.since + self.limits.request_timeout_s
        asked = asking.other.member
        if not event.was_open and event.by != "responder" and asked.own_ids is not False:
            self.late[asked][asking.other.key] = None
        # A channel that one side has closed is ended by that side, although the other side sends the last frame.
        last = self.sender or event.by
        for leg in (asking, asking.other):
            if both or last == leg.side:
                self.lossy.add(leg)
            if event.reason == Ending.SLOW_CONSUMER:
                self.lossy.add(leg)
            if (both or last != leg.side) and not leg.member.gone and leg.id != -1 and leg is not self.refused:
                # The id of a request that was not answered is the relay's, and may be that of a channel of the client.
                others = [one for one in self.called[leg.member, leg.id] if one.initiator]
                if not leg.initiator and not event.was_open and leg.member.own_ids is None and others:
                    if any(one.open for one in others):
                        continue
                    self.lossy.add(leg)  # one of them may have ended with it
                self.flows[leg].append((self._end_kind(leg, was_open=event.was_open), b""))
                self.told.add(leg)

    def _end_kind(self, leg: Leg, *, was_open: bool | None = None) -> int:
        waits = leg.initiator and not (leg.open if was_open is None else was_open)
        return CHANNEL_CLOSED if leg.closing or waits else self._ends_open(leg.member)

    def _ends_open(self, member: Any) -> int:
        """The frame that ends an open channel; clients of 2019 write only the layout GO."""
        return CLOSE_CHANNEL if self.quirks and member.layout is GO else CHANNEL_CLOSED

    def pass_time(self, seconds: float) -> None:
        """See :class:`World`; and a channel that one side has closed ends in time."""
        self.timing = True
        super().pass_time(seconds)
        self.timing = False
        for leg, since in list(self.closing_since.items()):
            if leg.state is LegState.CLOSED:
                del self.closing_since[leg]
            else:
                assert self.now < since + _LIMITS.close_timeout_s

    def note_cut(self, queue: Leg) -> None:
        """A queue is dropped only for an exceeded limit."""
        limits, member = self.limits, queue.member
        assert (
            queue.queued_bytes > limits.queue_hard_bytes
            or member.queued_to > limits.queued_per_connection_bytes
            or any(one.queued_from > limits.queued_per_connection_bytes for one in self.members)
            or self.switch.queued_bytes > limits.queued_total_bytes
            or self.timing
            or queue.state is LegState.CLOSED
        )
        flow = self.flows[queue]
        news = [flow[-1]] if queue.state is LegState.CLOSED else []  # of the end, which is told again
        data = b"".join(queue.queue or ())
        for kind, _, start, end in reversed(member.layout.split_frames(data)[0]):
            if flow[-1] != (kind, data[start:end]):
                break  # Sends that came with the one that was too much
            flow.pop()
        flow.extend(news)
        self.lossy.add(queue)

    def frame(self, member: Member) -> bytes:
        choices = self.choices
        kind = choices.pick((SEND, OPEN_CHANNEL, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, choices.byte()))
        known = [key for key in member.legs if key < 256]
        flags = choices.byte()
        channel_id = known[flags // 2 % len(known)] if known and flags & 1 else flags // 2
        payload = choices.chunk()
        if choices.flag() and kind == OPEN_CHANNEL:
            payload = choices.pick(CLIENTS).raw + _MESSAGE
        elif choices.flag() and kind == CHANNEL_OPENED:
            payload = payload[:1] + _MESSAGE
        elif kind == SEND:
            payload += bytes(16 * choices.byte())
        return member.layout.encode(kind, channel_id, payload)

    def sent(self, member: Member, data: bytes) -> None:
        """The client gets only expected frames, in the order of their channel."""
        data, frames = self.readers[member].read(data)
        for kind, channel_id, start, end in frames:
            payload = data[start:end]
            frame = kind, payload
            # An OpenChannel has the relay's id, everything else the client's.
            legs = [
                leg
                for leg in self.called[member, channel_id]
                if channel_id == (leg.key if kind == OPEN_CHANNEL else leg.id)
            ]
            flow = next((self.flows[leg] for leg in legs if self.flows[leg] and self.flows[leg][0] == frame), None)
            if flow is None and not payload and self.alone[member, kind, channel_id] > 0:
                self.alone[member, kind, channel_id] -= 1
                continue
            if flow is None:
                flow = next((self.flows[leg] for leg in legs if leg in self.lossy and frame in self.flows[leg]), None)
            if flow is None:
                assert not payload and (member, channel_id) in self.reused
                self.alone[member, kind, channel_id] -= 1
                continue
            while flow.popleft() != frame:
                pass
        assert not self.readers[member]._tail, "a part of a frame was sent"

    def check(self) -> None:
        """See :class:`World`; and no id is used twice."""
        super().check()
        for member in self.members:
            assert all(key < 256 or (key == 256 + leg.id and not leg.open) for key, leg in member.legs.items())
            assert isinstance(member, Member)
            assert all(leg.bytes == self.carried[leg] for leg in member.legs.values())
            if member.own_ids is not None:
                called = [leg.id for leg in member.legs.values() if leg.open]
                assert len(called) == len(set(called))

    def finish(self) -> None:
        """Once all networks take everything, every client has got all frames sent to it."""
        for member in self.members:
            member.resume()
            while member.wants_write:
                self.sent(member, member.data_to_send())
            assert not any(
                flow and (leg not in self.lossy or leg in self.told)
                for leg, flow in self.flows.items()
                if leg.member is member and (member, leg.id) not in self.reused
            ), "something was lost"
            assert not any(
                count
                for (one, _, number), count in self.alone.items()
                if one is member and (one, number) not in self.reused
            )
        super().finish()


def _fits(leg: Leg, size: int) -> bool:
    """Whether a payload fits the layout of the other client."""
    return size + 1 <= leg.target.layout.body_limit_bytes


@lru_cache(maxsize=4_096)
def _is_point(message: bytes) -> bool:
    return outcome(lambda: PublicKey(message[:KEY_BYTES]), InvalidKey)[0] == "value"


def one_input(data: bytes) -> None:
    """The first byte says whether clients are those of 2019; then operations of clients (:func:`fuzz.switches.run`)."""
    run(_World(Choices(data)))


def seeds() -> Iterator[bytes]:
    """A channel that is opened in each dialect, used, stopped by its receiver's network and closed; many; two with one key."""
    ask = b"\x02\x00\x00\x01\x00\x00\x01\x01\x01"
    answers = b"\x02\x01\x00\x02\x01\x00\x00\x01\x01", b"\x02\x01\x00\x02\x01\x01\x07\x00\x01\x01"
    send = b"\x02\x00\x00\x00\x01\x00\x00\x00\x40\x01"
    close, closed = b"\x02\x00\x00\x03\x01\x00\x00\x00\x01", b"\x02\x01\x00\x04\x01\x00\x00\x00\x01"
    stopped = b"\x06\x01\x00"
    # An id that a client uses for its own request, and then for a request of another client.
    asked = b"\x02\x00\x00\x01\x0a\x00\x01\x01\x01" + b"\x02\x01\x00\x01\x00\x00\x01\x00\x01"
    taken = b"\x02\x00\x00\x02\x01\x01\x05\x00\x01\x01" + b"\x02\x01\x00\x02\x01\x01\x01\x00\x01\x01"
    for more in (b"", send, close, ask, asked[:9], b"\x01\x00\x01", b"\x01\x01\x01"):
        yield b"\x00\x00\x00\x01\x05" + asked + taken + more
    for quirks in (b"\x00", b"\x01"):
        for layouts in (b"\x00\x00\x01\x05", b"\x00\x00\x01\x01", b"\x00\x04\x01\x04"):
            for answer in answers:
                begin = quirks + layouts + ask + answer
                yield begin + send * 2 + close + closed
                yield begin + stopped + send * 12 + b"\x08\x00\xff\x01" + b"\x07\x01\x01"
                yield begin + stopped + send * 3 + close + b"\x08\x00\x80\x01" * 2
                yield begin + (ask + answer) * 6 + b"\x01\x00\x01"
                yield begin + b"\x00\x00\x00\x01" + b"\x09\x00\xff\x01" + ask
