"""The switch of a relay of the Reliable Message Bus, with sessions that come, go, stall, replace each other and send anything."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.switch import Switch
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.serving.admission import Origin
from fuzz.choices import Choices

_NOW = 1_700_000_000
_CONFIG = WebSocketConfig()
_ADDRESSES = tuple(SessionAddress(twin, name) for twin in (1, 2) for name in (None, "", "a"))
_LIMITS = RelayLimits(queue_bytes=400, queued_total_bytes=900, sessions_per_twin=2)


class _Relay:
    """A switch, the programs at its sessions, and what each of them has been given."""

    def __init__(self, choices: Choices) -> None:
        self.switch = Switch(_LIMITS, limit=Limit(20, 2_000) if choices.flag() else None)
        self.programs: dict[Session, WebSocket] = {}
        self.sent: set[bytes] = set()
        self.count = 0

    def join(self, choices: Choices) -> None:
        """A session comes; an older one of its name, or one too many, goes."""
        address = choices.pick(_ADDRESSES)
        surplus = self.switch.surplus(address)
        if surplus is not None:
            self.leave(surplus)
        self.count += 1
        host = f"192.0.2.{self.count % 3}"
        session = Session(self.switch, address, _CONFIG, origin=Origin.of(host), number=self.count, now=0.0)
        older = self.switch.join(session)
        if older is not None:
            assert not self.switch.leave(older) and older.take_unwritten() is not None
            del self.programs[older]
        self.programs[session] = WebSocket(Role.CLIENT, _CONFIG, now=0.0, random=bytes)
        if choices.flag():
            session.caught_up()

    def leave(self, session: Session) -> None:
        """A session ends; the switch gives back what it has not written."""
        assert self.switch.leave(session)
        written = session.written_ids()
        assert len(written) <= 3 and set(session.take_unwritten()) <= self.sent
        assert session.waiting_bytes == session.buffered_bytes == 0
        del self.programs[session]

    def send(self, session: Session, choices: Choices) -> None:
        """An envelope, right or not, is sent once or twice in a read."""
        self.count += 1
        envelope = Envelope(uid=str(self.count), timestamp=_NOW - choices.byte(), expiration=choices.byte() * 4)
        choices.pick((*_ADDRESSES, *[session.address] * 6)).write_to(envelope.source)
        if choices.below(8):
            choices.pick(_ADDRESSES).write_to(envelope.destination)
        getattr(envelope, choices.pick(("request", "response", "error", "ping", "pong"))).SetInParent()
        envelope.plain = bytes(choices.byte())
        data = envelope.SerializeToString()
        self.route(session, [data] * (1 + choices.below(2)))

    def route(self, session: Session, messages: list[bytes]) -> None:
        """What comes back is for sessions that are not here, or have no room."""
        self.sent.update(messages)
        try:
            parcels, malformed = self.switch.route(session, messages, float(self.count), _NOW), False
        except MalformedEnvelope as error:
            parcels, malformed = error.events, True  # type: ignore[assignment]
        for parcel in parcels:
            target = self.switch.sessions.get(parcel.to)
            assert target is None or target.waiting_bytes + len(parcel.data) > _LIMITS.queue_bytes
            assert parcel.data in messages
        if malformed:
            self.leave(session)

    def write(self, session: Session) -> None:
        """The network takes something: each message is one that was sent, or an answer of the relay."""
        for data in self.programs[session].receive_data(session.data_to_send(), 0.0):
            assert isinstance(data, bytes)
            if data not in self.sent:
                answer = Envelope.FromString(data)
                assert SessionAddress.of(answer.destination) == session.address
                assert answer.WhichOneof("message") in ("error", "pong")
            else:
                assert SessionAddress.of(Envelope.FromString(data).destination) == session.address

    def check(self) -> None:
        """The sums are right, and when there is too much there is a session to close."""
        switch = self.switch
        held = {one: sum(map(len, (*one.queue, *one.behind))) for one in self.programs}
        assert set(switch.sessions.values()) == set(self.programs)
        assert all(one.waiting_bytes == size <= _LIMITS.queue_bytes for one, size in held.items())
        assert switch.waiting_bytes == sum(held.values()) + sum(one.buffered_bytes for one in self.programs)
        largest = switch.largest()
        if largest is not None:
            assert largest in switch.stalled and switch.waiting_bytes > _LIMITS.queued_total_bytes
            self.leave(largest)


def one_input(data: bytes) -> None:
    """Bytes say which session does what."""
    choices = Choices(data)
    relay = _Relay(choices)
    for _ in range(400):
        if not choices.left:
            break
        what = choices.below(8)
        if what == 0 or not relay.programs:
            relay.join(choices)
            continue
        session = choices.pick(tuple(relay.programs))
        match what:
            case 1:
                relay.leave(session)
            case 2:
                relay.write(session)
            case 3:
                session.pause()
            case 4:
                session.resume()
            case 5:
                relay.route(session, [choices.chunk()])
            case _:
                relay.send(session, choices)
        relay.check()


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
