"""The switch of a relay of the Reliable Message Bus, with sessions that come, go, stall, replace each other and send anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import MalformedEnvelope, RelayProblem
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.wire import Address, Envelope, parse_envelope
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.switch import Counts, Parcel, Switch
from dmsg.sansio.websocket import WRITE_BYTES, Role, WebSocket, WebSocketConfig
from dmsg.serving.admission import Origin
from fuzz.choices import Choices

_NOW = 1_700_000_000
_CONFIG = WebSocketConfig()
_ADDRESSES = tuple(SessionAddress(twin, name) for twin in (1, 2) for name in (None, "", "a"))
_SOURCES = {one: Envelope(source=Address(twin=one.twin, connection=one.connection)).source for one in _ADDRESSES}
_LIMITS = RelayLimits(
    queue_bytes=400, queued_total_bytes=900, incoming_total_bytes=1_536, sessions_per_twin=2, limited_twins=1
)
_LIMIT = Limit(20, 2_000)
_ORIGINS = tuple(Origin.of(f"192.0.{number}.2") for number in range(3))
#: The seconds that the answer of a relay is good for.
_ANSWER_S = 300
_CODES = {
    RelayProblem.RATE_LIMITED: 120,
    RelayProblem.WRONG_SOURCE: 121,
    RelayProblem.NO_DESTINATION: 122,
    RelayProblem.EXPIRED: 126,
}
_MALFORMED = b"\xff"


@dataclass(slots=True)
class _End:
    """The model of a session: its program, and the messages that it has yet to get."""

    network: str
    program: WebSocket | None = None
    used_at: float = 0.0
    stored: bool = True
    #: Envelopes of others that wait, and messages that were given to its network, answers of the relay among them.
    waits: deque[bytes] = field(default_factory=deque)
    wire: list[Envelope] = field(default_factory=list)
    wire_bytes: int = 0
    dirty: bool = False
    #: Bytes written last; those of them that a blocked network may not have taken; bytes of an incomplete message.
    last: int = 0
    buffered: int = 0
    incoming: int = 0
    envelopes_in: int = 0
    bytes_in: int = 0
    envelopes_out: int = 0
    bytes_out: int = 0

    @property
    def waiting(self) -> int:
        """The bytes that wait."""
        return sum(map(len, self.waits))

    def say(self, answer: Envelope) -> None:
        """The relay itself answers."""
        self.wire.append(answer)
        self.wire_bytes += answer.ByteSize()
        self.dirty = True


class _Relay:
    """A switch, the programs at its sessions, and what each of them is to be given."""

    def __init__(self, choices: Choices) -> None:
        self.limit = _LIMIT if choices.flag() else None
        self.switch = Switch(_LIMITS, limit=self.limit)
        self.ends: dict[Session, _End] = {}
        self.stalled: dict[Session, None] = {}
        self.counts = Counts()
        self.problems: list[tuple[int, RelayProblem]] = []
        #: Envelopes and bytes of each twin; the one that came last stands last.
        self.used: dict[int, list[int]] = {}
        self.count = 0
        self.written = self.written_bytes = 0

    def at(self, address: SessionAddress) -> Session | None:
        """The session that has this address."""
        return next((one for one in self.ends if one.address == address), None)

    def join(self, choices: Choices) -> None:
        """A session comes; an older one of its name, or one too many, goes."""
        address = choices.pick(_ADDRESSES)
        same = self.at(address)
        others = [one for one in self.ends if one.address.twin == address.twin]
        surplus = self.switch.surplus(address)
        if same is not None or len(others) < _LIMITS.sessions_per_twin:
            assert surplus is None
        else:
            assert surplus is min(others, key=lambda one: self.ends[one].used_at)
            self.leave(surplus)
        self.count += 1
        origin = _ORIGINS[self.count % 3]
        session = Session(self.switch, address, _CONFIG, origin=origin, number=self.count, now=0.0)
        assert self.switch.join(session) is same
        if same is not None:
            self.leave(same, current=False)
        self.ends[session] = _End(origin.network)
        self.used[address.twin] = self.used.pop(address.twin, []) or [0, 0]
        if len(self.used) > _LIMITS.limited_twins:
            present = {one.address.twin for one in self.ends}
            for one in list(self.used)[:8]:
                used = self.used.pop(one)
                if one not in present:
                    break
                self.used[one] = used
        if choices.flag():
            session.caught_up()
            self.ends[session].stored = False
            self.ends[session].dirty = True

    def leave(self, session: Session, *, current: bool = True) -> None:
        """A session ends; the switch gives back what it has not written."""
        assert self.switch.leave(session) is current
        end = self.ends.pop(session)
        self.stalled.pop(session, None)
        if session.dirty:
            self.switch.dirty.remove(session)
        assert session.written_ids() == [] and session.take_unwritten() == list(end.waits)
        assert session.waiting_bytes == session.buffered_bytes == 0

    # --- envelopes ---------------------------------------------------------------------------------------------------

    def send(self, session: Session, choices: Choices) -> None:
        """An envelope, right or not, is sent once or twice in a read, and perhaps garbage behind it."""
        self.count += 1
        envelope = Envelope(uid=str(self.count), timestamp=_NOW - choices.byte(), expiration=choices.byte() * 4)
        choices.pick((*_ADDRESSES, *[session.address] * 6)).write_to(envelope.source)
        byte = choices.byte()
        if byte >= 248:
            SessionAddress(1, "x" * (128 + byte % 2)).write_to(envelope.destination)
        elif byte % 8:
            choices.pick(_ADDRESSES).write_to(envelope.destination)
        getattr(envelope, choices.pick(("request", "response", "error", "ping", "pong"))).SetInParent()
        envelope.plain = bytes(choices.byte())
        data = envelope.SerializeToString()
        byte = choices.byte()
        self.route(session, [data] * (1 + byte % 2) + [_MALFORMED, data] * (byte > 240))

    def route(self, session: Session, messages: list[bytes]) -> None:
        """Each message goes where the first matching rule says, or is given back."""
        now = float(self.count)
        end = self.ends[session]
        parcels: list[Parcel] = []
        full: set[SessionAddress] = set()
        malformed = False
        for data in messages:
            end.bytes_in += len(data)
            self.counts.bytes += len(data)
            try:
                envelope = parse_envelope(data)
            except MalformedEnvelope:
                malformed = True
                break
            parcels += self._expect(session, envelope, data, full)
        end.used_at = now
        end.envelopes_in += len(messages)
        self.counts.received += len(messages)
        try:
            got = self.switch.route(session, messages, now, _NOW)
            assert not malformed
        except MalformedEnvelope as error:
            assert malformed
            got = error.events  # type: ignore[assignment]
        assert got == parcels and all(one.session is session for one in got) and self.switch.now == now
        # They still have no session and no room, except those that would have overtaken another.
        late = [one for one in got if not self.has_room(one.to, one.data)]
        assert not any(self.switch.deliver(one.to, one.data) for one in late)
        if malformed:
            self.leave(session)

    def _expect(self, session: Session, envelope: Envelope, data: bytes, full: set[SessionAddress]) -> list[Parcel]:
        to = SessionAddress.of(envelope.destination)
        problem = None
        if not self._passes(session.address.twin, len(data)):
            problem = RelayProblem.RATE_LIMITED
        elif envelope.source != _SOURCES[session.address]:
            problem = RelayProblem.WRONG_SOURCE
        elif envelope.WhichOneof("message") == "ping":
            self.ends[session].say(_pong(envelope))
            return []
        elif to.twin == 0:
            problem = RelayProblem.NO_DESTINATION
        elif envelope.timestamp + min(envelope.expiration, 1_800) <= _NOW or envelope.timestamp > _NOW + 300:
            problem = RelayProblem.EXPIRED
        elif to not in full and self.waits(to, data):
            return []
        elif len(to.connection or "") > 128:
            problem = RelayProblem.NO_DESTINATION
        else:
            if self.at(to) is not None:
                full.add(to)
            return [Parcel(_outline(envelope), data, to, session)]
        self.problems.append((session.address.twin, problem))
        self.counts.refused += 1
        self.counts.expired += problem is RelayProblem.EXPIRED
        if envelope.WhichOneof("message") == "request":
            answer = Envelope(uid=envelope.uid, timestamp=_NOW, expiration=_ANSWER_S)
            session.address.write_to(answer.destination)
            answer.error.code, answer.error.message = _CODES[problem], problem.text
            self.ends[session].say(answer)
        return []

    def _passes(self, twin: int, size: int) -> bool:
        if self.limit is None:
            return True
        used = self.used[twin]
        if size > self.limit.bytes:
            return False
        used[0] += 1
        used[1] += size
        return used[0] <= self.limit.count and used[1] <= self.limit.bytes

    def waits(self, to: SessionAddress, data: bytes) -> bool:
        """Whether a session is there that has room; it gets ``data``."""
        target = self.at(to)
        if target is None or not self.has_room(to, data):
            return False
        self.ends[target].waits.append(data)
        self.ends[target].dirty = True
        self.counts.local += 1
        return True

    def has_room(self, to: SessionAddress, data: bytes) -> bool:
        """Whether a session is there that has room."""
        target = self.at(to)
        return target is not None and self.ends[target].waiting + len(data) <= _LIMITS.queue_bytes

    def deliver(self, session: Session) -> None:
        """Another relay brings an envelope."""
        self.count += 1
        uid = str(self.count)
        envelope = Envelope(uid=uid, plain=bytes(42 - len(uid)))  # eight of them have a queue's room to the byte
        session.address.write_to(envelope.destination)
        data = envelope.SerializeToString()
        assert self.switch.deliver(session.address, data) is self.waits(session.address, data)

    # --- the network -------------------------------------------------------------------------------------------------

    def write(self, session: Session) -> None:
        """The network takes data: answers first, then queued envelopes, all in order, unless the store comes first."""
        end = self.ends[session]
        if session.dirty:
            self.switch.dirty.remove(session)
        data = session.data_to_send()
        end.dirty, end.last = False, len(data)
        count = 0 if end.stored else len(end.waits) - len(session.queue)
        assert count or end.stored or not end.waits or end.wire_bytes > WRITE_BYTES // 2
        for _ in range(count):
            one = end.waits.popleft()
            end.wire.append(Envelope.FromString(one))
            end.wire_bytes += len(one)
            end.bytes_out += len(one)
            self.written_bytes += len(one)
        end.envelopes_out += count
        self.written += count
        if end.program is None:
            end.program = WebSocket(Role.CLIENT, _CONFIG, now=0.0, random=bytes)
        got = [Envelope.FromString(one) for one in end.program.receive_data(data, 0.0) if isinstance(one, bytes)]
        assert got == end.wire[: len(got)]
        assert len(got) == len(end.wire) or end.wire_bytes > WRITE_BYTES // 2
        del end.wire[: len(got)]
        end.wire_bytes = sum(one.ByteSize() for one in end.wire)

    def pause(self, session: Session) -> None:
        """The network takes nothing more."""
        session.pause()
        if session not in self.stalled:
            self.stalled[session] = None
            self.ends[session].buffered = self.ends[session].last

    def resume(self, session: Session) -> None:
        """The network takes again."""
        session.resume()
        self.stalled.pop(session, None)
        self.ends[session].buffered = 0

    def hold(self, session: Session, size: int) -> None:
        """``size`` bytes of an incomplete message have arrived."""
        session.count_incoming(size)
        self.ends[session].incoming = size

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All counters are correct, and above the limit the right session has to go."""
        switch, ends = self.switch, self.ends
        waiting = incoming = dirty = 0
        for one, end in ends.items():
            size = sum(map(len, end.waits))
            waiting += size + end.buffered + one.queued_bytes
            incoming += end.incoming
            dirty += end.dirty
            first, then = (one.queue, one.behind) if end.stored else (one.behind, one.queue)
            assert not first and then == end.waits and switch.sessions[one.address] is one
            assert one.waiting_bytes == size <= _LIMITS.queue_bytes and one.buffered_bytes == end.buffered
            assert one.dirty is end.dirty and one.used_at == end.used_at
            assert one.envelopes_in == end.envelopes_in and one.bytes_in == end.bytes_in
            assert one.envelopes_out == end.envelopes_out and one.bytes_out == end.bytes_out
            assert switch.incoming.get(one, 0) == end.incoming
        assert len(switch.sessions) == len(ends) and len(switch.dirty) == dirty
        assert switch.waiting_bytes == waiting and switch.incoming_total_bytes == incoming
        assert list(switch.stalled) == list(self.stalled) and all(switch.incoming.values())
        assert switch.counts == self.counts and switch.problems == self.problems
        assert switch.written == self.written and switch.written_bytes == self.written_bytes
        switch.problems, self.problems = [], []
        loads: dict[Session, int] = {}
        free = 0
        if waiting > (limit := _LIMITS.queued_total_bytes):
            loads = {one: end.waiting + end.buffered + one.queued_bytes for one, end in ends.items()}
            loads = {one: load for one, load in loads.items() if load}
            free = limit - waiting
        elif incoming > (limit := _LIMITS.incoming_total_bytes):
            loads = {one: end.incoming for one, end in ends.items() if end.incoming}
            free = limit - incoming
        for largest in switch.overfull():
            weights = {one: (self._network_load(one, loads), load) for one, load in loads.items()}
            assert free < limit // 64 and weights[largest] == max(weights.values())
            free += loads.pop(largest)
            self.leave(largest)
        assert not loads or free >= limit // 64

    def _network_load(self, session: Session, loads: dict[Session, int]) -> int:
        network = self.ends[session].network
        return sum(load for one, load in loads.items() if self.ends[one].network == network)


def _outline(envelope: Envelope) -> Envelope:
    """The parts of an envelope that a relay needs later."""
    kept = Envelope.FromString(envelope.SerializeToString())
    kept.DiscardUnknownFields()
    for name in ("plain", "cipher", "signature", "federation", "relays"):
        kept.ClearField(name)
    return kept


def _pong(ping: Envelope) -> Envelope:
    """The addresses change places, and a text stands behind the payload."""
    pong = Envelope.FromString(ping.SerializeToString())
    pong.ClearField("source")
    pong.ClearField("destination")
    if ping.HasField("destination"):
        pong.source.CopyFrom(ping.destination)
    pong.destination.CopyFrom(ping.source)
    pong.pong.SetInParent()
    pong.plain = ping.plain + b"hello world"
    return pong


def one_input(data: bytes) -> None:
    """Bytes choose sessions and their operations."""
    choices = Choices(data)
    relay = _Relay(choices)
    for _ in range(400):
        if not choices.left:
            break
        # The upper bits of a few operations say something else.
        more, what = divmod(choices.byte(), 8)
        if what == 0 or not relay.ends:
            relay.join(choices)
            continue
        session = choices.pick(tuple(relay.ends))
        match what:
            case 1:
                relay.leave(session)
            case 2:
                relay.write(session)
            case 3 if more >= 16:
                relay.hold(session, (more - 16) * 64)
            case 3:
                relay.pause(session)
            case 4 if more >= 16:
                relay.deliver(session)
            case 4:
                relay.resume(session)
            case 5:
                relay.route(session, [choices.chunk()])
            case _:
                relay.send(session, choices)
        relay.check()


def _send(to: int, size: int, *, times: int = 0, kind: int = 1, destination: int = 1, sender: int = 0) -> bytes:
    """The bytes with which a session sends an envelope of its own; ``to`` counts in the list of addresses."""
    return bytes((6, sender, 0, 255, 6, destination, *(() if destination >= 248 else (to,)), kind, size, times))


def seeds() -> Iterator[bytes]:
    """Two sessions and an envelope between them; a queue that fills up; random operations."""
    yield b"\x00" + b"\x00\x00\x01" * 2 + b"\x06\x00\x00\xff\x07\x01\x03\x00\x10\x00" + b"\x02\x01"
    yield (
        b"\x01"
        + b"\x00\x00\x01\x00\x03\x01\x03\x01"
        + b"\x06\x00\x00\xff\x07\x01\x03\x00\xf0\x01" * 6
        + b"\x04\x01\x02\x01"
    )
    yield b"\x00\x00\x00\x01\x05\x00\x04\xff\xff\xff\xff"
    yield bytes(range(256)) * 2
    yield bytes((number * 7919) % 251 for number in range(900))
    yield from _more_seeds()


def _more_seeds() -> Iterator[bytes]:
    """Values just within and just beyond each limit; sessions that have to go; all answers; counts that are lost and kept."""
    four = b"\x00" + b"".join(bytes((0, number, 1)) for number in (0, 1, 3, 4))
    yield four + b"".join(_send(1, size, times=1) for size in (173, 0)) + b"\x02\x01"  # 400 bytes wait
    yield four + b"".join(_send(1, size, times=1) for size in (174, 0)) + b"\x02\x01"
    for size in (118, 119):  # 900 bytes wait
        yield four + _send(1, 163, times=1) + _send(3, 163, times=1) + b"\x03\x01" + _send(4, size) + b"\x01\x00"
    slow = b"\x02\x02\x03\x02\x03\x01"
    yield four + _send(1, 160, times=1) + _send(3, 255) + slow + _send(3, 60) + _send(4, 200) + b"\x01\x00"
    yield four + _send(1, 160, times=1) + _send(3, 255) + slow + _send(3, 180) + _send(4, 200) + b"\x01\x00"
    parts = b"".join(bytes((3 + 8 * (16 + size), at)) for at, size in ((0, 12), (1, 12), (2, 0)))
    yield four + parts + bytes((3 + 8 * 17, 3)) + b"\x01\x00"
    yield four + parts + b"\x01\x01\x01\x00"
    for destination in (248, 249, 0):
        yield four + b"".join(_send(0, 9, kind=kind, destination=destination) for kind in range(5)) + b"\x02\x00"
    yield four + _send(1, 9, times=255) + b"\x02\x01"
    yield four + b"\x84\x00" * 9 + b"\x02\x00\x01\x01" + b"\x04\x00"
    yield b"\x00" + b"\x00\x01\x00" + b"\x84\x00" * 3 + b"\x02\x00" + b"\x00\x01\x01" + b"\x02\x00"
    one = b"\x01\x00\x00\x01"
    yield one + _send(0, 1, kind=0) * 22 + b"\x02\x00"
    yield one + _send(0, 255, kind=0) * 9 + b"\x02\x00"
    yield one + _send(0, 1) * 21 + b"\x01\x00" + b"\x00\x00\x01" + _send(0, 1, kind=0)
    yield one + _send(0, 1) * 21 + b"\x01\x00" + b"\x00\x03\x01" + b"\x00\x00\x01" + _send(0, 1, kind=0, sender=1)
    yield one + _send(0, 1) * 21 + b"\x00\x03\x01" + b"\x00\x00\x01" + _send(0, 1, kind=0, sender=1) * 2
    yield one + b"\x00\x01\x01" + _send(0, 1, sender=1) + b"\x00\x02\x01\x00\x02\x01\x00\x01\x01"
