"""A client and a server of one WebSocket over an honest network: messages, pings, closes, silence and time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dmsg.errors import LocalProtocolError
from dmsg.sansio.errors import KeepaliveLost, WebSocketViolation
from dmsg.sansio.websocket import (
    IDLE_FRAMES,
    OVERLOAD_BYTES,
    WRITE_BYTES,
    Role,
    State,
    WebSocket,
    WebSocketConfig,
)
from dmsg.sansio.websocket_frames import CONTROL_BYTES, REASON_BYTES, CloseCode, Closed
from fuzz.choices import Choices, repeatable

_LIMIT_BYTES = 100_000
_CONFIG = WebSocketConfig(
    max_message_bytes=_LIMIT_BYTES, text=True, ping_after_s=20.0, dead_after_s=40.0, message_timeout_s=60.0
)
_GREETING = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
_CODES = (1000, 1001, CloseCode.NO_STATUS, 3000, 4999)
_REASONS = ("", "bye", "ä" * 80, "x" * 200, "\U0001f512" * 40)
_HEAD_BYTES = 14
_START_S = 100.0


class _End:
    """One side: what it said, what it was told, and its bytes on their way."""

    def __init__(self, role: Role) -> None:
        head = _GREETING if role is Role.SERVER else b""
        self.core = WebSocket(role, _CONFIG, now=_START_S, random=repeatable(b"masks"), head=head)
        self.sent: list[bytes | str] = []
        self.closed: tuple[int, str] | None = None
        self.got: list[bytes | str | Closed] = []
        self.pings = 0  # that it sent
        self.way = b"" if not head else self._greet()
        self.heard = _START_S  # or when it was last due and did not listen
        self.violation = ""

    def _greet(self) -> bytes:
        assert self.core.data_to_send() == _GREETING
        return b""

    def send(self, choices: Choices) -> None:
        size = choices.byte() * (1 if choices.flag() else 390)
        message: bytes | str = bytes((size & 255,)) * size
        if choices.flag():
            message = "ä" * (size // 2)
        try:
            self.core.send(message)
        except LocalProtocolError:
            assert self.core.state is not State.OPEN
            return
        assert self.core.state is State.OPEN
        self.sent.append(message)

    def close(self, choices: Choices) -> None:
        code, reason = choices.pick(_CODES), choices.pick(_REASONS)
        if self.core.state is State.OPEN:
            self.closed = (code, "" if code == CloseCode.NO_STATUS else reason)
        self.core.close(code, reason)
        assert self.core.state is not State.OPEN

    def write(self) -> None:
        """Send as much as the network takes at once."""
        core, before = self.core, self.core.queued_bytes
        assert core.overloaded == (before > OVERLOAD_BYTES)
        data = core.data_to_send()
        assert len(data) <= max(WRITE_BYTES, _LIMIT_BYTES + _HEAD_BYTES)
        assert before - core.queued_bytes == len(data) or len(data) <= CONTROL_BYTES + _HEAD_BYTES
        assert bool(data) or not core.queued_bytes
        self.way += data

    def take(self, data: bytes, now: float, other: _End) -> None:
        """Read some bytes, as the shell does; a violation of an honest peer is too many pings."""
        if self.core.state is State.CLOSED:
            return
        self.heard = now
        try:
            self.got += self.core.receive_data(data, now)
        except WebSocketViolation as violation:
            assert violation.code == CloseCode.POLICY and other.pings + self.pings > IDLE_FRAMES
            self._give_up(violation)
        assert self.core.incoming_bytes <= _LIMIT_BYTES

    def look(self, now: float) -> None:
        """Do what is due."""
        core = self.core
        due = core.next_timeout()
        assert (due is None) == (core.state is State.CLOSED)
        if due is None or now < due:
            return
        pinged, queued = core._pinged, core.queued_bytes
        try:
            core.handle_timeout(now)
        except KeepaliveLost as lost:
            assert core.listening and lost.silent_s >= _CONFIG.dead_after_s and now - self.heard >= _CONFIG.dead_after_s
            core.give_up(CloseCode.GOING_AWAY, "")
            self.violation = "keepalive"
            return
        except WebSocketViolation as violation:
            assert core.listening and violation.reason == "message too slow"
            self._give_up(violation)
            return
        if not core.listening:
            self.heard = now
        assert now - self.heard < _CONFIG.dead_after_s
        if core._pinged and not pinged and core.state is State.OPEN:
            assert core.queued_bytes > queued
            self.pings += 1
        due = core.next_timeout()
        assert due is not None and due > now, "it is due again at once for ever"

    def _give_up(self, violation: WebSocketViolation) -> None:
        self.got += violation.events  # type: ignore[arg-type]
        self.core.give_up(violation.code, violation.reason)
        self.core.give_up(violation.code, violation.reason)  # twice does nothing
        self.violation = violation.reason

    def check(self, other: _End) -> None:
        """The events are a prefix of what the other side sent; the end is reported once, and as sent."""
        got, core = list(self.got), self.core
        if got and isinstance(got[-1], Closed):
            closed = got.pop()
            assert isinstance(closed, Closed) and got == other.sent
            assert core.state is State.CLOSED
            if other.closed is not None and not other.violation:
                code, reason = other.closed
                assert closed.code == code and reason.startswith(closed.reason)
                rest = reason[len(closed.reason) :]
                size = len(closed.reason.encode())
                assert size <= REASON_BYTES and (not rest or size + len(rest[0].encode()) > REASON_BYTES)
        assert got == other.sent[: len(got)]
        assert core.incoming_bytes == 0 or core.state is not State.CLOSED
        assert core.queued_bytes == sum(map(len, core._out))


def one_input(data: bytes) -> None:
    """Both sides send, ping, close, read in pieces of any size, stop reading, and act on timeouts.

    Each side gets a prefix of the other's messages, and its end once. Otherwise only the keepalive, a message that takes too
    long and too many pings end the connection. Queued data is counted, and written in bounded pieces.
    """
    choices = Choices(data)
    ends = _End(Role.CLIENT), _End(Role.SERVER)
    now = _START_S
    for _ in range(200):
        if not choices.left:
            break
        operation = choices.byte()
        end, other = (ends, ends[::-1])[operation >> 7]
        match operation & 15:
            case 0 | 1:
                end.send(choices)
            case 2:
                payload = choices.chunk(200)
                end.pings += end.core.state is State.OPEN
                end.core.ping(payload)
            case 3:
                end.close(choices)
            case 4 | 5:
                end.write()
            case 6 | 7 | 8:
                size = 1 + choices.below(1 << 16) if operation & 15 == 6 else len(end.way)
                piece, end.way = end.way[:size], end.way[size:]
                if piece:
                    other.take(piece, now, end)
            case 9:
                for _ in range(1 + choices.byte() % 64):
                    end.pings += end.core.state is State.OPEN
                    end.core.ping()
            case 10:
                if not operation & 16:
                    end.core.listening = False
                elif not end.core.listening:
                    end.core.listen(now)
                    end.heard = now
            case 11:
                end.look(now)
            case 12:
                now += choices.byte() / 4
            case 13:
                due = end.core.next_timeout()
                now = max(now, due or now)
                end.look(now)
            case 14:
                with suppress(LocalProtocolError):
                    end.core.move(State.OPEN)
                    raise AssertionError("a WebSocket opens once")
            case _:
                now += choices.byte() / 64
        for one, peer in (ends, ends[::-1]):
            one.check(peer)
    if not any(end.violation for end in ends):
        _finish(ends, now)


def _finish(ends: tuple[_End, _End], now: float) -> None:
    """Everything sent arrives, both sides close, and nothing is left."""
    for last in (False, True):
        if last:
            ends[0].core.close()
        for _ in range(400):
            moved = False
            for end, other in (ends, ends[::-1]):
                end.write()
                if end.way:
                    moved = True
                    piece, end.way = end.way, b""
                    other.take(piece, now, end)
            if not moved:
                break
        if any(end.violation for end in ends):
            return
        for end, other in (ends, ends[::-1]):
            end.check(other)
            assert (
                end.closed is not None or last or [one for one in end.got if not isinstance(one, Closed)] == other.sent
            )
    assert all(end.core.state is State.CLOSED and not end.core.queued_bytes for end in ends)


def seeds() -> Iterator[bytes]:
    """Messages and texts of all lengths both ways, pings, closes of each kind, silence, slow messages, a flood."""
    say, text, much = b"\x00\x20\x01\x00", b"\x00\x50\x01\x01", b"\x00\xff\x00\x00"
    over, back = b"\x04\x07", b"\x84\x87"
    piece = b"\x06\x00\x05"
    answer = b"\x80\x20\x01\x00\x80\xff\x00\x01"
    yield (say + text + much + over + answer + back) * 2
    yield say + much + b"\x04" + piece * 3 + b"\x07" + answer + b"\x84" + b"\x86\x00\x00" * 3 + b"\x86\x80\x00\x87"
    yield much * 4 + b"\x04\x06\xff\xff" + b"\x04\x04\x04\x07" + b"\x02\x03abc" + over + back
    for code in range(len(_CODES)):
        for reason in range(len(_REASONS)):
            yield say + bytes((3, code, reason)) + say + over + b"\x02\x00" + answer + back
    yield b"\x03\x00\x01\x83\x01\x01" + over + back
    yield answer + b"\x84\x86\x00\x40" + b"\x03\x00\x00" + b"\x87" + over + back
    yield answer + b"\x84\x86\x80\x40" + b"\x03\x00\x00" + b"\x86\x00\x40\x87" + over + back
    yield b"\x0d\x8d\x04\x07\x84\x87" * 3 + b"\x0d\x0d"
    yield b"\x0d\x0d\x0d" + say + over
    yield b"\x0a\x0d\x0d\x0d\x0d\x1a\x0d\x0d"
    yield much + b"\x04" + (piece + b"\x0c\x40\x8b") * 5
    yield much + b"\x04" + (piece + b"\x0c\x40\x8a\x8b") * 5 + b"\x9a" + b"\x07"
    yield much + b"\x04" + piece + b"\x8a" + b"\x8d" * 4 + b"\x0c\xff\x0c\xff\x8b" + b"\x07"
    yield b"\x09\x3f\x09\x3f" + over + back
    yield b"\x09\x20" + over + b"\x0c\x30" + b"\x09\x3f\x09\x01" + over + b"\x0c\x30\x0e" + over
