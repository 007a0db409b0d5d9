"""Attempts to move a transport to another path: several at a time, replayed, lost, proved late and in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamFault, StreamState
from dmsg.mux.core.wire import ACK, FWD, HEADER, HEADER_BYTES, CloseReason
from dmsg.sansio.rate import TokenBucket
from fuzz.choices import Choices
from fuzz.oracles import KEYS
from fuzz.sealed import ACK_LIMIT_BYTES, TEXT, WINDOW_BYTES, Party, make_end

_SERVERS = tuple(key.public_key for key in KEYS[:3])
_RATE, _BURST = 2.0, 4.0
#: Paths of one input. Each costs two pairs of keys.
_PATHS = 24


class _Attempt:
    """A path that the dialler has requested, and the byte counts told then."""

    def __init__(self, path: int, number: int, stream: SealedStream, told: tuple[int, int]) -> None:
        self.path = path
        self.number = number
        self.stream = stream  # the listener's
        self.told = told  # what each side said that it has, the dialler first
        self.to_listener: deque[bytes] = deque()
        self.to_dialler: deque[bytes] = deque()


class _World:
    """A dialler, a listener, the attempts between them, and the simplest model of their allowed number."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.dialler, self.listener = Party(0), Party(1)
        first = _Attempt(0, 0, self.listener.stream, (0, 0))
        self.dialler.sent, self.listener.sent = first.to_listener, first.to_dialler
        self.all = [first]
        self.here = {self.dialler: first, self.listener: first}  # the path that each side is on
        self.attempts = ResumeAttempts(self.listener.stream, TokenBucket(_RATE, _BURST, self.now))
        self.asked: _Attempt | None = None  # the dialler waits for the answer to this one
        self.detached = False  # the dialler has lost its path
        self.waiting: dict[int, _Attempt] = {}  # attempts that wait for their proof, by relay
        self.began = self.taken = self.told = 0
        self.tokens, self.filled_at = _BURST, self.now

    def _fill(self) -> float:
        self.tokens = min(_BURST, self.tokens + (self.now - self.filled_at) * _RATE)
        self.filled_at = self.now
        return self.tokens

    def ask(self, server: int, claimed: int | None = None) -> None:
        """The dialler, which has lost its path, requests another; with ``claimed``, a relay replays a request."""
        if len(self.all) == _PATHS:
            return
        if claimed is None:
            self.detached = True
            self.asked = None
        may = self._fill() >= 1 + len(self.waiting) - (server in self.waiting)
        assert self.attempts.may_begin(_SERVERS[server], self.now) == may
        if not may:
            return
        told_bytes = self.attempts.tell_bytes()
        assert max(self.told, self.listener.stream.resume_bytes) == told_bytes
        self.told = told_bytes
        path = len(self.all)
        stream = make_end(1, path, state=StreamState.CONFIRMING)
        displaced = stream.await_turn(self.attempts, _SERVERS[server], told_bytes)
        before = self.waiting.get(server)
        assert displaced is (None if before is None else before.stream)
        if before is not None:
            self._refuse(before)
        self.began += 1
        claims = self.dialler.stream.resume_bytes if claimed is None else claimed
        attempt = _Attempt(path, self.began, stream, (claims, told_bytes))
        self.all.append(attempt)
        self.waiting[server] = attempt
        if claimed is None:
            self.asked = attempt

    def _refuse(self, attempt: _Attempt) -> None:
        """The listener ends an unproved attempt with a bare CLOSE, so that nothing else ends."""
        frame = attempt.stream.close_frame(CloseReason.BUSY)
        assert frame[HEADER_BYTES:] == bytes((CloseReason.BUSY,))
        attempt.stream.state = StreamState.CLOSED
        attempt.stream.discard()
        self.attempts.failed(attempt.stream)
        self.waiting = {server: one for server, one in self.waiting.items() if one is not attempt}

    def give_up(self, server: int) -> None:
        """No proof came in time."""
        if server in self.waiting:
            self._refuse(self.waiting[server])

    def cheat(self, server: int) -> None:
        """The proof comes in a malformed frame, which only a peer that breaks the rules sends: as if there had been none."""
        attempt = self.waiting.pop(server, None)
        if attempt is None:
            return
        frame = make_end(0, attempt.path).frames.seal(FWD, b"")[1]
        try:
            attempt.stream.receive_fwd(frame, 0, len(frame))
        except StreamFault as fault:
            assert fault.code is CloseReason.MALFORMED
        else:
            raise AssertionError("a FWD without a sequence was taken")
        attempt.stream.state = StreamState.CLOSED
        attempt.stream.discard()
        self.attempts.failed(attempt.stream)

    def answer(self) -> None:
        """The answer to the dialler's last attempt arrives: the dialler moves and proves itself."""
        attempt, self.asked = self.asked, None
        if attempt is None:
            return
        stream = make_end(0, attempt.path)
        stream.go_on_from(self.dialler.stream, attempt.told[1], attempt.told[0])
        self.dialler.stream = stream
        self.dialler.sent = attempt.to_listener
        self.here[self.dialler] = attempt
        self.detached = False
        if stream.sendable and attempt.path % 2:
            self.dialler.send(200)
        else:
            self.dialler.sent.append(stream.take_ack())

    def deliver(self, attempt: _Attempt, behind: int) -> None:
        """The dialler's next frame on a path arrives; with a proof, the same read has ``behind`` more frames of either path."""
        if not attempt.to_listener:
            return
        stream, frame = attempt.stream, attempt.to_listener.popleft()
        if attempt is self.here[self.listener]:
            self.listener.take(frame)
        elif stream.state is StreamState.CONFIRMING:
            data = _take(stream, frame)
            state: StreamState = stream.state
            self.waiting = {server: one for server, one in self.waiting.items() if one is not attempt}
            late = attempt.number < self.taken
            assert stream.is_late == late and state is StreamState.OPEN
            if late:
                stream.state = StreamState.CLOSED
                stream.discard()
                return
            self._move(attempt, data, behind)

    def _move(self, attempt: _Attempt, data: bytes, behind: int) -> None:
        """The listener moves. Frames of the old path in the same read are dropped, and sent again."""
        old = self.here[self.listener]
        for _ in range(behind & 3):
            if old.to_listener:
                _take(old.stream, old.to_listener.popleft())
            if attempt.to_listener:
                data += _take(attempt.stream, attempt.to_listener.popleft())
        self.taken = attempt.number
        assert self._fill() >= 1, "an attempt was let begin that there was no token for"
        self.tokens -= 1
        self.attempts.moved(self.now)
        attempt.stream.go_on_from(old.stream, *attempt.told)
        assert not old.stream.pending and not old.stream._outstanding, "a path that was left keeps its counts only"
        self.listener.stream, self.listener.sent = attempt.stream, attempt.to_dialler
        self.here[self.listener] = attempt
        self.listener.received += data

    def check(self) -> None:
        """The data that arrives is a prefix of the data written, and everything is counted once."""
        for party, other in ((self.dialler, self.listener), (self.listener, self.dialler)):
            stream = party.stream
            assert TEXT.startswith(party.received) and len(party.received) <= other.written
            assert stream.acked_bytes <= stream.sent_bytes and stream.acked_bytes <= len(other.received)
            assert stream.unread_bytes == len(party.received) - party.read <= WINDOW_BYTES + ACK_LIMIT_BYTES
            assert stream.pending.size + stream.sent_bytes == party.written


def _take(stream: SealedStream, frame: bytes) -> bytes:
    """The data that a frame brings to a stream, whoever gets it."""
    kind = HEADER.unpack_from(frame)[0]
    if kind == FWD:
        return stream.receive_fwd(frame, HEADER_BYTES, len(frame))[0]
    assert kind == ACK
    return stream.receive_ack(frame[HEADER_BYTES:])


def one_input(data: bytes) -> None:
    """Both sides write and read while the dialler loses one path after the other and relays replay its requests.

    Tokens limit the attempts, one attempt of each relay waits, a late proof moves nothing, and a peer is never told a
    smaller count than before. Over an honest network there is no fault, no byte is lost, and none arrives twice.
    """
    choices = Choices(data)
    world = _World()
    parties = world.dialler, world.listener
    for _ in range(200):
        if not choices.left:
            break
        operation = choices.byte()
        party = parties[operation >> 7]
        match operation & 15:
            case 0 | 1:
                party.write(1 + 8 * choices.byte())
            case 2 | 3:
                if party is world.listener or not world.detached:
                    party.send(40 + 3 * choices.byte())
            case 4:
                party.consume(1 + 8 * choices.byte())
            case 5:
                party.stream.end()
            case 6 | 7:
                world.ask((operation >> 4) % 3)
            case 8:
                world.answer()
            case 9 | 10:
                world.deliver(world.here[world.dialler], operation >> 4)
            case 11:
                world.deliver(world.all[choices.byte() % len(world.all)], operation >> 4)
            case 12:
                here = world.here[world.dialler]
                if not world.detached and here.to_dialler:
                    world.dialler.take(here.to_dialler.popleft())
            case 13:
                world.ask((operation >> 4) % 3, choices.pick(world.all).told[0])
            case 14 if operation >> 7:
                world.cheat((operation >> 4) % 3)
            case 14:
                world.give_up((operation >> 4) % 3)
            case _:
                world.now += choices.byte() / 8
        world.check()
    _finish(world)


def _finish(world: _World) -> None:
    """A last attempt succeeds, and everything arrives."""
    world.now += _BURST / _RATE
    for server in range(3):
        world.give_up(server)
    if len(world.all) == _PATHS:
        return
    world.ask(0)
    assert world.asked is not None
    world.answer()
    world.deliver(world.here[world.dialler], 0)
    here = world.here[world.dialler]
    assert here is world.here[world.listener]
    for party in (world.dialler, world.listener):
        party.stream.end()
    ways = ((world.dialler, world.listener, here.to_listener), (world.listener, world.dialler, here.to_dialler))
    for _ in range(20_000):
        moved = False
        for party, other, way in ways:
            party.consume(1 << 20)
            party.send(1_000)
            while way:
                moved = True
                other.take(way.popleft())
        if not moved:
            break
    world.check()
    for party, other, _ in ways:
        assert len(party.received) == other.written
        assert party.stream.end_received and party.stream.drained and party.stream.complete
    try:
        here.stream.receive_ack(bytes(32))
    except StreamFault:
        return
    raise AssertionError("a frame of nobody has opened")


def seeds() -> Iterator[bytes]:
    """Moves with data both ways, unread and unacknowledged; proofs late, displaced, malformed or never; no tokens left."""
    write, send, take = b"\x00\x40\x80\x40", b"\x02\x40\x82\x40", b"\x09\x0c"
    talk = (write + send + take) * 2
    move = b"\x06\x08\x09"
    yield talk + move + talk + b"\x16\x08\x09" + talk
    yield talk + write + send * 3 + b"\x06\x08" + talk + b"\x09" + talk
    yield write * 3 + send * 4 + b"\x06\x08" + b"\x02\x40" * 3 + b"\x39" + talk
    yield write * 3 + send * 4 + b"\x09\x09" + b"\x06\x08" + b"\x02\x40" * 3 + b"\x29" + b"\x84\xff" + talk + move
    yield talk + b"\x06\x08\x16\x08\x26\x08" + b"\x0b\x03\x0b\x01\x0b\x02" + talk + move
    yield talk + b"\x06\x08\x06\x08\x06\x08\x09" + talk
    yield talk + b"\x0d\x00\x1d\x00\x2d\x00\x06\x16" + b"\x0f\x08" + b"\x0e\x1e\x2e" + b"\x06\x08\x09" + talk
    yield talk + move * 5 + b"\x0f\x04" + move + b"\x0f\x10" + move * 3 + talk
    yield (
        write * 8
        + b"\x02\xff" * 12
        + b"\x09" * 12
        + b"\x0c" * 4
        + b"\x06\x08"
        + b"\x09"
        + b"\x84\xff" * 3
        + talk
        + move
    )
    yield (
        b"\x00\xff" * 8
        + b"\x02\xff" * 8
        + b"\x09" * 8
        + b"\x82\x00\x0c"
        + b"\x02\xff" * 8
        + b"\x09" * 2
        + move * 2
        + b"\x84\xff" * 4
    )
    yield talk + b"\x05\x85" + send * 3 + take + b"\x06\x08\x09" + send * 3 + take * 3 + move
    yield b"\x00\x30\x02\xff" * 2 + b"\x09\x06\x08" + b"\x0b\x00" + b"\x16\x08\x09" + talk
    yield talk + move * 2 + b"\x0d\x00\x1d\x00\x2d\x00" + b"\x0f\x04" + move + talk
    yield talk + b"\x06\x08" + b"\x16" + b"\x09" + b"\x08" + b"\x0b\x01\x0b\x02" + talk
    yield talk + send + b"\x06\x9e" + b"\x09" * 3 + b"\x84\xff" + move + talk
