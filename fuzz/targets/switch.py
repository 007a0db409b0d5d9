"""A dmsg relay between hostile clients: frames, congestion, time, connections that come and go."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    EXTENDED_REQUEST_LIMIT_BYTES,
    FWD,
    OK,
    REQUEST,
    REQUEST_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
    close_reason,
    encode_frame,
    split_frames,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Leg, Member
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import RequestRefused, SwitchEvent, TransportEnded, TransportStarted
from dmsg.serving.member import LegState
from fuzz.choices import Choices, repeatable
from fuzz.oracles import PlainRecords
from fuzz.switches import CLIENTS, LEAST_REQUESTS, SMALL_LIMITS, World, run

_LIMITS = RelayLimits(strays_per_s=1.0, stray_burst=10, **SMALL_LIMITS)


class _World(World):
    """The switch and its clients, with the frames that clients may send."""

    switch: Switch
    members: list[Member]  # type: ignore[assignment]

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices, Switch(_LIMITS, random=repeatable(b"ids")))
        self.ids: dict[Member, list[tuple[int, bytes]]] = {}  # REQUESTs that a client got
        # Frames that arrived for a leg's client and were not sent to it yet; the legs by the client's ids; and legs whose
        # client need not get everything, because a limit or the client itself ended the transport.
        self.flows: dict[Leg, deque[tuple[int, bytes]]] = defaultdict(deque)
        self.called: dict[tuple[Member, int], list[Leg]] = defaultdict(list)
        self.lossy: set[Leg] = set()
        # Clients' ids that were reused while frames of the old transport were queued.
        self.reused: set[tuple[Any, int]] = set()
        # Frames a client is yet to get: OK, REQUEST and ACCEPT in their order, and for which ids CLOSE.
        self.control: dict[Member, deque[tuple[int, int, bytes]]] = defaultdict(deque)
        self.closes: Counter[tuple[Any, int]] = Counter()
        # How many of these were queued when the client used the id again.
        self.earlier: Counter[tuple[Any, int]] = Counter()
        self.used: set[tuple[Any, int]] = set()  # ids whose late frames are no offence
        self.offences: Counter[Member] = Counter()  # those that count in any case
        self.suspicions: Counter[Member] = Counter()  # those and late frames, which are forgiven for a while
        self.requests: Counter[bytes] = Counter()  # by the key of the client they are for
        self.news: list[Any] = []  # what the switch told of the last frame
        self.asked = 0  # the id of the last REQUEST
        self.passed: Counter[Member] = Counter()  # REQUESTs of a client that were passed on

    def admit(self, key: PublicKey, flags: int, group: str) -> tuple[Member, list[SwitchEvent]]:
        records: Any = PlainRecords()
        member, events = self.switch.add_member(key, records, self.now, extended=bool(flags & 4), group=group)
        self.ids[member] = []
        self.control[member].append((OK, 0, b""))
        return member, events

    def frame(self, member: Member) -> bytes:
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
                payload = member.remote.raw + choices.pick(CLIENTS).raw + choices.chunk(64)
            case 1:
                payload = bytes(2 + 16 * choices.byte())
            case _:
                payload = choices.chunk()
        return encode_frame(kind, transport_id, payload)

    def feed(self, member: Any, data: bytes) -> None:
        """Data of open transports together; every other frame by itself, because it changes which transports are open."""
        at, buffer = len(member.tail), member.tail + data
        try:
            frames = deque(split_frames(buffer)[0])
        except RemoteProtocolError:
            frames = deque()
        while frames and member in self.members and not member.overloaded:
            end = 0
            while frames and self._passes(member, buffer, *frames[0]):
                end = frames.popleft()[3]
            if end:
                super().feed(member, buffer[at:end])
            else:
                kind, transport_id, start, end = frames.popleft()
                self._feed_one(member, kind, transport_id, buffer[start:end], buffer[at:end])
            at = end
        if member in self.members:
            super().feed(member, buffer[at:])

    def _passes(self, member: Member, buffer: bytes, kind: int, transport_id: int, start: int, end: int) -> bool:
        """Whether a frame goes to the other client unchanged; records it then."""
        leg = member.legs.get(transport_id)
        if leg is None or not leg.open or kind not in (FWD, ACK) or end - start < SEQUENCE_BYTES:
            return False
        other = leg.other
        if other not in self.flows:
            self.called[other.member, other.id].append(other)
        self.flows[other].append((kind, buffer[start:end]))
        return True

    def _feed_one(self, member: Member, kind: int, transport_id: int, payload: bytes, data: bytes) -> None:
        """A frame is answered, passed on, or counted against the client, depending on its transport."""
        leg = member.legs.get(transport_id)
        other = leg.other if leg is not None else None
        self.asked = transport_id
        self.requests[payload[33:REQUEST_BYTES]] += kind == REQUEST
        if kind == REQUEST:
            if self.called[member, transport_id]:
                self.reused.add((member, transport_id))
                self.lossy.update(self.called[member, transport_id])
            if leg is not None:
                self.closes[member, transport_id] -= 1  # the end and the refusal are told in one
            else:
                self.earlier[member, transport_id] = self.closes[member, transport_id]
        accepts = kind == ACCEPT and leg is not None and leg.accepts(payload)
        if leg is None and kind in (ACCEPT, FWD, ACK):
            self.closes[member, transport_id] += (member, transport_id) not in self.used
        target = self.switch.members.get(payload[33:REQUEST_BYTES])
        fault = self._fault(member, transport_id, payload, target) if kind == REQUEST else ""
        self._count(member, leg, kind, transport_id, accepts, fault)
        self.news = []
        super().feed(member, data)
        if member not in self.members:
            assert kind not in (REQUEST, ACCEPT, CLOSE, FWD, ACK) or self.suspicions[member] > _LIMITS.stray_burst
            return
        told = [type(one) for one in self.news]
        if kind == REQUEST:
            assert (told[-1:] == [RequestRefused]) != (transport_id in member.legs)
            if transport_id in member.legs:
                assert not fault
                self._check_request(member, transport_id, payload, target)
            else:
                self._check_refusal(member, payload, self.news[-1].reason, fault)
        elif accepts:
            assert leg is not None and other is not None
            assert leg.open == (told[-1:] == [TransportStarted]) and (leg.open or TransportEnded in told)
            if leg.open:
                self.control[other.member].append((ACCEPT, other.id, payload))
        elif leg is not None:
            assert told == [TransportEnded] and not leg.open
            assert kind != CLOSE or (self.news[0].reason, self.news[0].by) == (close_reason(payload), leg.side)
        else:
            assert kind in (ACCEPT, FWD, ACK, CLOSE) and not told

    def _fault(self, member: Member, transport_id: int, payload: bytes, target: Member | None) -> str:
        """Why a REQUEST is refused in any case."""
        if transport_id in member.legs or transport_id % 2:
            return "bad_id"
        longest = EXTENDED_REQUEST_LIMIT_BYTES if member.extended else REQUEST_BYTES
        if payload[:33] != member.remote.raw or not REQUEST_BYTES <= len(payload) <= longest:
            return "malformed"
        if target is None:
            return "unknown_peer"
        return "" if target.extended or len(payload) == REQUEST_BYTES else "unsupported"

    def _count(self, member: Member, leg: Leg | None, kind: int, transport_id: int, accepts: bool, fault: str) -> None:
        """Count offences of a client."""
        if kind == REQUEST:
            offence = fault in ("bad_id", "malformed")
        elif leg is None:
            offence = (member, transport_id) not in self.used
            self.suspicions[member] += not offence
        else:
            offence = kind != CLOSE and not accepts
        self.offences[member] += offence
        self.suspicions[member] += offence

    def _check_refusal(self, member: Member, payload: bytes, reason: str, fault: str) -> None:
        """A good REQUEST is refused only by a limit that was reached."""
        if reason == "server_draining":
            assert self.switch.draining
        elif reason == "rate_limited":
            assert fault not in ("bad_id", "malformed")
            assert (
                member.pending_requests == self.limits.pending_requests
                or sum(self.requests.values()) > self.limits.request_burst
                or self.requests[payload[33:REQUEST_BYTES]] > self.limits.pair_request_burst
            )
        elif reason == "requests_per_target":
            assert not fault
            assert self.requests[payload[33:REQUEST_BYTES]] > LEAST_REQUESTS
        else:
            assert reason == (fault or "busy")

    def _check_request(self, member: Member, transport_id: int, payload: bytes, target: Member | None) -> None:
        """A REQUEST that was passed on was valid, and its client below its rate."""
        assert target is not None
        other = member.legs[transport_id].other
        assert other.member is target and target.legs[other.id] is other
        self.control[target].append((REQUEST, other.id, payload))
        self.passed[member] += 1
        self.used |= {(member, transport_id), (target, other.id)}
        lasted_s = self.now - member.since
        assert self.passed[member] <= self.limits.request_burst + self.limits.requests_per_s * lasted_s + 1
        assert not self.switch.draining

    def noted(self, events: Any) -> None:
        """See :class:`World`; each refusal is told to the client."""
        super().noted(events)
        self.news += events
        event: Any
        for event in events:
            if isinstance(event, TransportEnded):
                self._note_end(event.asking, event.reason, event.by)
            elif isinstance(event, RequestRefused):
                self.closes[event.member, self.asked] += 1
                self.used.add((event.member, self.asked))

    def _note_end(self, asking: Any, reason: int, by: str) -> None:
        """The client that did not end a transport gets all earlier frames, then the end; both are told of a limit."""
        if reason == CloseReason.HANDSHAKE_TIMEOUT and by == "server":
            assert self.now >= asking.since + self.limits.request_timeout_s
        for leg in (asking, asking.other):
            if by in ("server", leg.side):
                self.lossy.add(leg)
            if by != leg.side:
                self.closes[leg.member, leg.id] += 1

    def check(self) -> None:
        """See :class:`World`; and a client that sends stray frames is dropped in time."""
        super().check()
        for member in self.members:
            lasted_s = self.now - member.since
            assert self.offences[member] <= _LIMITS.stray_burst + _LIMITS.strays_per_s * lasted_s + 1

    def sent(self, member: Member, data: bytes) -> None:
        frames, used = split_frames(data)
        assert used == len(data), "a part of a frame was sent"
        for kind, transport_id, start, end in frames:
            payload = data[start:end]
            if kind in (OK, REQUEST, ACCEPT):
                assert self.control[member].popleft() == (kind, transport_id, payload)
                if kind == REQUEST:
                    assert transport_id % 2 and payload[33:REQUEST_BYTES] == member.remote.raw
                    self.ids[member].append((transport_id, payload))
            elif kind in (FWD, ACK):
                if (member, transport_id) not in self.reused:
                    flows = [self.flows[leg] for leg in self.called[member, transport_id]]
                    next(flow for flow in flows if flow and flow[0] == (kind, payload)).popleft()
            else:
                assert kind == CLOSE and self.closes[member, transport_id] > 0
                self.closes[member, transport_id] -= 1
                if self.earlier[member, transport_id] > 0:
                    self.earlier[member, transport_id] -= 1
                elif (member, transport_id) not in self.reused:
                    self._closed(self.called[member, transport_id], close_reason(payload))

    def _closed(self, legs: list[Leg], reason: int) -> None:
        leg = next((one for one in legs if one.state is LegState.CLOSED), None)
        if leg is not None:
            legs.remove(leg)
            flow = self.flows.pop(leg)
            assert not flow or leg in self.lossy or reason == CloseReason.SLOW_CONSUMER, "closed before its data"

    def finish(self) -> None:
        """Once all networks take everything, every client has got all frames sent to it."""
        for member in self.members:
            member.resume()
            while member.wants_write:
                self.sent(member, member.data_to_send())
            assert not any(
                flow
                for leg, flow in self.flows.items()
                if leg.member is member and leg not in self.lossy and (member, leg.id) not in self.reused
            ), "lost data"
            assert not self.control[member], "lost news"
            assert not any(count for (one, _), count in self.closes.items() if one is member), "lost ends"
        super().finish()


def one_input(data: bytes) -> None:
    """Operations of clients (:func:`fuzz.switches.run`) with frames of the dmsg protocol."""
    run(_World(Choices(data)))


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
