"""A session at a relay of the Reliable Message Bus: stored and new envelopes, its network, its end."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.session import Session, Traffic
from dmsg.sansio.errors import KeepaliveLost, WebSocketViolation
from dmsg.sansio.websocket import WRITE_BYTES, Role, State, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.serving.admission import Origin
from fuzz.choices import Choices

_LIMITS = RelayLimits(queue_bytes=150_000, slow_consumer_timeout_s=10.0)
_CONFIG = WebSocketConfig(max_message_bytes=100_000, ping_after_s=20.0, dead_after_s=40.0, message_timeout_s=30.0)
_PAGE = 3
#: Frames of a session itself: pings, and one that closes.
_CONTROL_BYTES = 256
#: Envelopes: a few hundred bytes, and more than is written at once.
_SIZES = tuple(bytes(size) for size in (0, 10, 300, 20_000, 50_000, 80_000))


class _World:
    """A session and its program, and a store as a relay uses it for a new session."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0.0
        self.traffic = Traffic(_LIMITS)
        self.session = self._session(0)
        #: Of the same relay: the sums are those of both.
        self.other = self._session(1)
        self.other.caught_up()
        #: The program at its other end. Two objects, because one that has closed reads no more.
        self.writer = WebSocket(Role.CLIENT, _CONFIG, now=0.0, random=bytes)
        self.reader = WebSocket(Role.CLIENT, _CONFIG, now=0.0, random=bytes)
        self.upstream = b""
        self.wrote, self.written_bytes = False, 0
        self.stalled_at: float | None = None
        #: Envelopes in order of arrival, those that wait in the store, and those that the program got.
        self.came: list[bytes] = []
        self.store: dict[str, bytes] = {}
        self.got: list[bytes] = []
        #: Answers of the relay itself, and those that the program got.
        self.said: list[bytes] = []
        self.heard: list[bytes] = []
        #: Envelopes read from the store and not yet deleted there; whether the store has failed.
        self.read: list[str] = []
        self.failed = False
        for _ in range(choices.byte() % 9):
            self._keep(self._envelope())

    def _session(self, number: int) -> Session:
        origin = Origin.of(f"192.0.2.{number}")
        return Session(self.traffic, SessionAddress(7), _CONFIG, origin=origin, number=number, now=0.0)

    def _envelope(self) -> bytes:
        data = b"e%d " % len(self.came) + self.choices.pick(_SIZES)
        self.came.append(data)
        return data

    def _keep(self, data: bytes) -> None:
        name = data.partition(b" ")[0].decode()
        assert name not in self.store
        self.store[name] = data

    # --- what waits --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """An envelope arrives. Without room it goes to the store, after those that would otherwise be delivered later."""
        session, data = self.session, self._envelope()
        has_room = session.waiting_bytes + len(data) <= _LIMITS.queue_bytes
        assert session.put(data) is has_room
        if not has_room:
            behind = list(session.behind)
            assert session.take_behind() == behind and not session.behind
            session.stored = True
            for each in (*behind, data):
                self._keep(each)

    def fetch(self) -> None:
        """Read on in the store, once everything read before is written and deleted there."""
        session = self.session
        if not session.stored or session.queue:
            return
        done = session.written_ids()
        assert done == self.read
        if self.choices.byte() > 239:
            self.failed = True
            session.caught_up()  # the store failed: what comes now need not wait for it
            return
        for one in done:
            del self.store[one]
        session.deleted(done)
        assert session.written_ids() == []
        self.read = list(self.store)[:_PAGE]
        if self.read:
            session.put_page(list(self.read), [self.store[one] for one in self.read])
        else:
            session.caught_up()
            assert not session.behind

    def say(self) -> None:
        """The relay itself answers, ahead of everything that waits."""
        data = b"s%d" % len(self.said)
        self.session.say(data)
        if self.session.state is State.OPEN:
            self.said.append(data)

    def retry(self) -> None:
        """The store may have something again."""
        self.session.stored = True

    # --- the network ---------------------------------------------------------------------------------------------

    def write(self) -> None:
        """The network takes what is next: not too much at once."""
        self.traffic.dirty.clear()
        data = self.session.data_to_send()
        assert not self.session.dirty and len(data) <= max(WRITE_BYTES, 20 + len(_SIZES[-1]))
        self.wrote, self.written_bytes = bool(data), len(data)
        self._read(data)

    def _read(self, data: bytes) -> None:
        for message in self.reader.receive_data(data, self.now):
            if isinstance(message, bytes):
                (self.heard if message.startswith(b"s") else self.got).append(message)

    def receive(self) -> bool:
        """The program sends something, and part of it arrives; gives whether the session goes on."""
        choices = self.choices
        match choices.below(8):
            case 0:
                self.upstream += choices.chunk(32)
            case 1:
                self.writer.close()
            case 2:
                self.writer.ping(b"p")
            case _ if self.writer.state is State.OPEN:
                self.writer.send(bytes(choices.byte() * 16))
        self.upstream += self.writer.data_to_send()
        size = choices.byte() * 8
        piece, self.upstream = self.upstream[:size], self.upstream[size:]
        try:
            messages = self.session.receive_data(piece, self.now)
        except WebSocketViolation:
            return False
        assert all(isinstance(one, bytes | Closed) for one in messages)
        return True

    def pause(self) -> None:
        """The network takes nothing more."""
        if self.stalled_at is None:
            self.stalled_at = self.now
        self.session.pause()
        late_s = (self.written_bytes - WRITE_BYTES) / _CONFIG.max_message_bytes * _CONFIG.message_timeout_s
        assert self.session.grace_s == min(max(late_s, 0.0), _CONFIG.message_timeout_s)

    def resume(self) -> None:
        """The network takes again."""
        self.stalled_at = None
        self.session.resume()

    def wait(self) -> bool:
        """Time passes; gives whether the session goes on. It is woken once for each thing to do."""
        session = self.session
        self.now += self.choices.byte() / 8
        self.traffic.now = self.now
        session.listening = self.choices.flag()
        limit_s = _LIMITS.slow_consumer_timeout_s + session.grace_s  # longer for a long envelope that is on its way
        slow = self.stalled_at is not None and self.now >= self.stalled_at + limit_s
        due = session.next_timeout()
        assert not slow or due is None or due <= self.now
        try:
            session.handle_timeout(self.now)
        except (KeepaliveLost, WebSocketViolation):
            assert not slow
            return False
        except RemoteProtocolError:
            assert slow
            return False
        due = session.next_timeout()
        assert not slow and (due is None or due > self.now)
        return True

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The sums are right, everything arrives once and in order, and sessions with data to write are known."""
        session, traffic = self.session, self.traffic
        sessions = (session, self.other)
        page_bytes = sum(len(self.store[one]) for one in self.read)
        assert session.waiting_bytes == sum(map(len, (*session.queue, *session.behind)))
        assert session.waiting_bytes <= _LIMITS.queue_bytes + page_bytes
        assert traffic.waiting_bytes == sum(one.held_bytes for one in sessions)
        assert session.held_bytes == session.waiting_bytes + session.buffered_bytes + session.said_bytes
        assert 0 <= session.queued_bytes - session.said_bytes <= _CONTROL_BYTES
        assert traffic.incoming == {one: one.incoming_bytes for one in sessions if one.incoming_bytes}
        assert traffic.incoming_total_bytes == sum(traffic.incoming.values()) <= _CONFIG.max_message_bytes
        assert set(traffic.stalled) == ({session} if self.stalled_at is not None else set())
        assert session.buffered_bytes == 0 or self.stalled_at is not None
        assert session.dirty == (session in traffic.dirty)
        assert session.dirty or self.wrote or not session.queue or session.state is not State.OPEN
        assert traffic.written == session.envelopes_out and traffic.written_bytes == session.bytes_out
        assert self.heard == self.said[: len(self.heard)] and len(set(self.got)) == len(self.got)
        if not self.failed:
            assert self.got == self.came[: len(self.got)]

    def end(self) -> None:
        """The session ends: afterwards the store has exactly the envelopes that were not written."""
        session = self.session
        session.resume()
        session.count_incoming(0)
        session.count_said(0)
        done, unwritten = session.written_ids(), session.take_unwritten()
        for data in unwritten:
            self._keep(data)
        for one in done:
            del self.store[one]
        assert not session.waiting_bytes and not self.traffic.waiting_bytes
        assert not self.traffic.incoming and not self.traffic.incoming_total_bytes and not self.traffic.stalled
        assert session.take_unwritten() == session.take_behind() == []
        assert sorted([*self.got, *self.store.values()]) == sorted(self.came)


def one_input(data: bytes) -> None:
    """Operations: envelopes, reads of the store, answers, what the network takes and brings, time; and then its end."""
    world = _World(Choices(data))
    going_on = True
    for _ in range(120):
        if not world.choices.left or not going_on:
            break
        match world.choices.below(12):
            case 0:
                going_on = world.wait()
            case 1:
                world.pause()
            case 2:
                world.resume()
            case 3:
                world.say()
            case 4:
                going_on = world.receive()
            case 5 | 6:
                world.fetch()
            case 7:
                world.retry()
            case 8 | 9 if world.stalled_at is None:
                world.write()
            case _:
                world.arrive()
        if going_on:
            world.check()
    world.end()


def seeds() -> Iterator[bytes]:
    """A store that is read in pages, and fails; what comes meanwhile, without room; slow, silent and closing programs."""
    yield b"\x05" + b"\x01\x02\x03\x02\x01" + b"\x05\x00\x08\x0a\x01\x08" * 3 + b"\x05\x00\x08\x03\x08"
    yield b"\x05" + b"\x01\x02\x03\x02\x01" + b"\x05\x00\x08\x0a\x01"
    yield b"\x02" + b"\x02\x02" + b"\x0a\x01\x05\x00\x08\x05\xf0\x0a\x01\x08\x08\x07\x05\x00\x05\x00\x08"
    yield b"\x00" + b"\x05\x00" + b"\x0a\x05" * 3 + b"\x0a\x01\x08\x08\x08\x0a\x02\x05\x00\x08\x08\x05\x00"
    yield b"\x00" + b"\x0a\x05\x0a\x03\x0a\x04" + b"\x0a\x05\x05\x00\x08\x01\x00\x10\x01"
    yield b"\x00\x05\x00" + b"\x0a\x03\x08\x01\x01\x02\x02" + b"\x0a\x02\x01\x00\x40\x01\x00\x40\x01"
    yield b"\x00\x05\x00" + b"\x00\xa0\x01\x08\x00\xa0\x01\x08"
    yield b"\x00\x05\x00" + b"\x00\xa0\x01\x00\xa0\x00\x00\xff\x00" + b"\x04\x02\xff\x08"
    yield (
        b"\x00\x05\x00"
        + b"\x04\x03\xff\x01\x04\x03\x40\xff"
        + b"\x04\x03\x40\xff" * 4
        + b"\x04\x01\x01\x04\x01\xff\x08"
    )
    yield b"\x00\x05\x00" + b"\x04\x03\xff\x01" + b"\x00\xff\x01"
    yield b"\x00\x05\x00" + b"\x04\x00\x02\x7f\x00\xff"
    yield b"\x00\x05\x00" + b"\x0a\x02\x04\x01\xff\x03\x08\x08"
    yield bytes((number * 7919) % 251 for number in range(300))
