"""WebSocket messages after the handshake (RFC 6455, sections 5 and 7), as a core for :class:`dmsg.glue.shell.Shell`.

The parser is our own because it is the hot path of an RMB relay: a small message costs 2 µs here and 8 µs with wsproto.
The tests compare the two frame by frame. Each limit takes effect at the first byte over it: a frame is refused by its
declared length before its payload is read, a fragmented message at the fragment that makes it too long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dmsg.errors import LocalProtocolError
from dmsg.sansio.core import Core
from dmsg.sansio.errors import KeepaliveLost, WebSocketViolation
from dmsg.sansio.websocket_frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    CONTROL_BYTES,
    FIN,
    LONG_BYTES,
    MASKED,
    OPCODES,
    PING,
    PONG,
    TEXT,
    CloseCode,
    Closed,
    apply_mask,
    close_payload,
    frame_head,
    mask_in_place,
    read_close,
    read_text,
)

#: Most bytes that :meth:`WebSocket.data_to_send` gives at once, except for a single frame that is longer.
WRITE_BYTES: Final = 64 * 1024
#: Queued bytes above which reading stops while the network takes nothing.
OVERLOAD_BYTES: Final = 256 * 1024
#: Most frames without data (pings, pongs, empty fragments) in one window. Peers ping every 20 s; a proxy may, too.
IDLE_FRAMES: Final = 100
IDLE_WINDOW_S: Final = 10.0
#: Masks that are drawn at a time: one system call for each message would cost more than its frame.
_MASKS: Final = 256


class Role(Enum):
    """Which side of the connection a core is: clients mask what they send, servers must not."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class WebSocketConfig:
    """The limits of one connection. Times are in seconds."""

    #: Longest message in bytes, however many frames it has.
    max_message_bytes: int = 1024 * 1024
    #: Whether text messages are accepted; otherwise a text message closes the connection with ``UNSUPPORTED_DATA``.
    text: bool = False
    #: Silence of the other side after which we ping it.
    ping_after_s: float = 20.0
    #: Silence after which the connection is given up, if the network has not taken any waiting bytes in that time either.
    dead_after_s: float = 40.0
    #: From the first byte of a message to its last. A message of 1 MiB comes through 10 KiB/s in this time.
    message_timeout_s: float = 120.0


class State(Enum):
    """Where the closing handshake is."""

    OPEN = "open"
    #: Our close frame was sent or queued, theirs has not come.
    CLOSING = "closing"
    #: Nothing more is read; queued bytes are still written.
    CLOSED = "closed"


# An attribute of an enumeration takes a call in Python.
_OPEN, _CLOSED = State.OPEN, State.CLOSED
_TRANSITIONS: Final = {
    State.OPEN: {State.CLOSING, State.CLOSED},
    State.CLOSING: {State.CLOSED},
    State.CLOSED: set[State](),
}


class WebSocket(Core):
    """One open WebSocket. Events of ``receive_data`` are ``bytes`` for a binary message, ``str`` for a text message,
    and :class:`Closed`, once, when the other side closes.

    ``now`` is the time of the handshake, ``random(n)`` gives n bytes for masks (a server needs none), ``head`` is sent
    before the first frame. ``queued_bytes`` counts the bytes that :meth:`data_to_send` has not given yet.
    """

    __slots__ = (
        "_config",
        "_due",
        "_fragments",
        "_frame",
        "_frame_head",
        "_greeting",
        "_head",
        "_heard",
        "_idle_frames",
        "_idle_since",
        "_last_bytes",
        "_mask_bit",
        "_masks",
        "_message_opcode",
        "_message_since",
        "_out",
        "_pinged",
        "_pong",
        "_random",
        "_room",
        "grace_s",
        "listening",
        "queued_bytes",
        "role",
        "state",
    )

    def __init__(
        self,
        role: Role,
        config: WebSocketConfig,
        *,
        now: float,
        random: Callable[[int], bytes] | None = None,
        head: bytes = b"",
    ) -> None:
        if role is Role.CLIENT and random is None:
            raise LocalProtocolError("a client masks with random bytes")
        self.role = role
        self.state = State.OPEN
        #: ``False`` while the owner does not read: then silence does not count against the other side.
        self.listening = True
        self._config = config
        self._random = random
        self._masks: list[bytes] = []
        self._mask_bit = 0 if role is Role.CLIENT else MASKED  # of the frames we read
        self._head = b""  # of the next frame, incomplete
        # A frame whose head is complete and whose payload is not: (first byte, mask, missing bytes), and its payload so far.
        self._frame_head: tuple[int, bytes, int] = (0, b"", 0)
        self._frame: bytearray | None = None
        # A message of several frames: the opcode of the first, and the payloads. 0 if there is none.
        self._message_opcode = 0
        self._fragments = bytearray()
        self._room = config.max_message_bytes
        self._message_since: float | None = None
        self._greeting = head
        self._out: list[bytes] = []
        self.queued_bytes = len(head)
        self._pong: bytes | None = None
        #: Bytes last given to be written, and how much longer than usual the network may take for them, in seconds.
        self._last_bytes = 0
        self.grace_s = 0.0
        self._heard = now
        self._pinged = False
        self._idle_frames = 0
        self._idle_since = now
        self._due = now + config.ping_after_s

    def move(self, state: State) -> None:
        """Go to ``state``, which must follow the present one."""
        if state not in _TRANSITIONS[self.state]:
            raise LocalProtocolError(f"a WebSocket that is {self.state.value} cannot become {state.value}")
        self.state = state

    # --- out -------------------------------------------------------------------------------------------------------

    def send(self, message: bytes | str) -> None:
        """Queue a message: binary for ``bytes``, text for ``str``; ``LocalProtocolError`` once either side has closed."""
        if self.state is not _OPEN:
            raise LocalProtocolError(f"the WebSocket is {self.state.value}")
        if isinstance(message, str):
            self._queue(FIN | TEXT, message.encode("utf-8"))
        else:
            self._queue(FIN | BINARY, message)

    def ping(self, payload: bytes = b"") -> None:
        """Queue a ping with up to ``CONTROL_BYTES``; the pong makes no event, it only counts as bytes received."""
        if self.state is _OPEN:
            self._queue(FIN | PING, payload[:CONTROL_BYTES])

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Queue a close frame, with as much of ``reason`` as fits. Messages that come before the other side's are dropped.

        Silent when either side has closed already.
        """
        if self.state is _OPEN:
            self._queue(FIN | CLOSE, close_payload(code, reason))
            self.move(State.CLOSING)
            # The other side's close frame is still awaited, but messages are not wanted any more.
            self._fragments = bytearray()
            if self._frame is not None and self._frame_head[0] & 0x0F < CLOSE:
                self._frame = bytearray()

    def give_up(self, code: int, reason: str) -> None:
        """Queue a close frame after a violation; read no more, and do not wait for the other side's close frame."""
        self.close(code, reason)
        if self.state is not _CLOSED:
            self.move(State.CLOSED)
        self._forget()

    def data_to_send(self) -> bytes:
        """Whole frames, up to ``WRITE_BYTES`` of them."""
        self._last_bytes = 0
        if self._greeting:
            greeting, self._greeting = self._greeting, b""
            self.queued_bytes -= len(greeting)
            return greeting
        if self._pong is not None:
            pong, self._pong = self._pong, None
            if self.state is _OPEN:
                frame = self._frame_of(FIN | PONG, pong)
                self._last_bytes = len(frame)
                return frame
        out = self._out
        if self.queued_bytes <= WRITE_BYTES:
            data = b"".join(out)
            out.clear()
            self._last_bytes = self.queued_bytes
            self.queued_bytes = 0
            return data
        count = size = 0
        for frame in out:
            if size and size + len(frame) > WRITE_BYTES:
                break
            size += len(frame)
            count += 1
        data = b"".join(out[:count])
        del out[:count]
        self._last_bytes = size
        self.queued_bytes -= size
        return data

    def pause(self) -> None:
        """The network takes nothing more for now. A long frame that is being written has the time of a slow message."""
        config = self._config
        late_s = (self._last_bytes - WRITE_BYTES) / config.max_message_bytes * config.message_timeout_s
        self.grace_s = min(max(late_s, 0.0), config.message_timeout_s)

    def resume(self) -> None:
        """The network takes again."""
        self.grace_s = 0.0

    def progressed(self, now: float, *, read: bool = True) -> None:
        """The network has taken written bytes, so the other side is there. ``read`` says whether we read what it sent."""
        self._heard = now
        if not read and self._message_since is not None:
            self._message_since = now

    @property
    def pong_waits(self) -> bool:
        """Whether :meth:`data_to_send` gives a pong next, and nothing else."""
        return self._pong is not None

    @property
    def overloaded(self) -> bool:
        """Whether more than ``OVERLOAD_BYTES`` wait for the network."""
        return self.queued_bytes > OVERLOAD_BYTES

    def _queue(self, first: int, payload: bytes) -> None:
        frame = self._frame_of(first, payload)
        self._out.append(frame)
        self.queued_bytes += len(frame)

    def _frame_of(self, first: int, payload: bytes) -> bytes:
        if self._mask_bit:
            return frame_head(first, len(payload), 0) + payload
        mask = self._next_mask()
        return b"".join((frame_head(first, len(payload), MASKED), mask, apply_mask(payload, mask)))

    def _next_mask(self) -> bytes:
        if not self._masks:
            assert self._random is not None
            drawn = self._random(4 * _MASKS)
            self._masks = [drawn[at : at + 4] for at in range(0, len(drawn), 4)]
        return self._masks.pop()

    # --- in --------------------------------------------------------------------------------------------------------

    @property
    def incoming_bytes(self) -> int:
        """Bytes held of an incomplete message."""
        return len(self._fragments) + (0 if self._frame is None else len(self._frame))

    def listen(self, now: float) -> None:
        """Read again from ``now`` on, after :attr:`listening` was ``False``; the time without reading does not count."""
        self.listening = True
        self.progressed(now, read=False)

    def receive_data(self, data: bytes, now: float) -> Sequence[bytes | str | Closed]:
        """Take bytes; give the messages they complete. Raises ``WebSocketViolation``."""
        self._heard = now
        self._pinged = False
        events: list[bytes | str | Closed] = []
        try:
            self._parse(data, now, events)
        except WebSocketViolation as violation:
            self._forget()
            violation.events = events
            raise
        if self._head or self._frame is not None or self._message_opcode:
            if events or self._message_since is None:
                self._message_since = now
                self._due = min(self._due, now + self._config.message_timeout_s)
        else:
            self._message_since = None
        return events

    def _parse(self, data: bytes, now: float, events: list[bytes | str | Closed]) -> None:
        at = 0
        if self._frame is not None:
            first, mask, missing = self._frame_head
            if self.state is _OPEN or first & 0x0F >= CLOSE:
                self._frame += data[:missing] if missing < len(data) else data
            if len(data) < missing:
                self._frame_head = (first, mask, missing - len(data))
                return
            at = missing
            payload, self._frame = self._frame, None
            if mask:
                mask_in_place(payload, mask)
            self._frame_done(first, bytes(payload), now, events)
        elif self._head:
            data = self._head + data
            self._head = b""
        mask_bit, end = self._mask_bit, len(data)
        while self.state is not _CLOSED:
            start = at + 2
            if start > end:
                break
            first = data[at]
            size = data[at + 1] ^ mask_bit
            if first != 0x82 or self._message_opcode:
                self._check_first(first, size)
            if size > 125:
                if size > 127:
                    raise WebSocketViolation("masked" if self.role is Role.CLIENT else "not masked")
                wide = 2 if size == 126 else 8
                start += wide
                if start > end:
                    break
                size = int.from_bytes(data[at + 2 : start], "big")
                if size <= (125 if wide == 2 else 0xFFFF):
                    raise WebSocketViolation("length in too many bytes")
            if size > self._room and first & 0x0F < CLOSE:
                raise WebSocketViolation("message too long", CloseCode.TOO_BIG)
            if mask_bit:
                payload_at = start + 4
                if payload_at > end:
                    break
                mask = data[start:payload_at]
                stop = payload_at + size
                if stop <= end:
                    at = stop
                    # As in apply_mask, written out: this is where most bytes of a relay come through.
                    if size < LONG_BYTES:
                        key = int.from_bytes((mask * ((size >> 2) + 1))[:size], "little")
                        content = (int.from_bytes(data[payload_at:stop], "little") ^ key).to_bytes(size, "little")
                    else:
                        content = apply_mask(data[payload_at:stop], mask)
                    if first == 0x82:
                        if self.state is _OPEN:
                            events.append(content)
                    else:
                        self._frame_done(first, content, now, events)
                    continue
            else:
                payload_at, mask = start, b""
                stop = start + size
                if stop <= end:
                    at = stop
                    if first == 0x82:
                        if self.state is _OPEN:
                            events.append(data[start:stop])
                    else:
                        self._frame_done(first, data[start:stop], now, events)
                    continue
            self._frame = bytearray(data[payload_at:] if self.state is _OPEN or first & 0x0F >= CLOSE else b"")
            self._frame_head = (first, mask, stop - end)
            return
        if at < end and self.state is not _CLOSED:
            self._head = data[at:]

    def _check_first(self, first: int, size: int) -> None:
        """Refuse a frame that must not begin here; ``size`` is its short length, above 127 if its mask bit is wrong."""
        opcode = first & 0x0F
        if first & 0x70:
            raise WebSocketViolation("reserved bit")
        if opcode not in OPCODES:
            raise WebSocketViolation("unknown opcode")
        if opcode >= CLOSE:
            if not first & FIN:
                raise WebSocketViolation("fragmented control frame")
            if 125 < size < 128:
                raise WebSocketViolation("long control frame")
        elif opcode == CONTINUATION:
            if not self._message_opcode:
                raise WebSocketViolation("continuation of nothing")
        elif self._message_opcode:
            raise WebSocketViolation("message within a message")
        elif opcode == TEXT and not self._config.text:
            raise WebSocketViolation("text message", CloseCode.UNSUPPORTED_DATA)

    def _frame_done(self, first: int, payload: bytes, now: float, events: list[bytes | str | Closed]) -> None:
        """A frame is complete."""
        opcode = first & 0x0F
        if opcode >= CLOSE:
            if opcode == CLOSE:
                self._closed(payload, events)
                return
            self._count_idle(now)
            if opcode == PING:
                self._pong = payload  # of several only the last is answered, as RFC 6455 allows
            return
        if self.state is not _OPEN:
            self._message_opcode = 0 if first & FIN else self._message_opcode or opcode
            return
        if not first & FIN:
            if not payload:
                self._count_idle(now)
            self._message_opcode = self._message_opcode or opcode
            self._fragments += payload
            self._room -= len(payload)
            return
        if self._message_opcode:
            opcode = self._message_opcode
            self._fragments += payload
            payload = bytes(self._fragments)
            self._message_opcode = 0
            self._fragments = bytearray()
            self._room = self._config.max_message_bytes
        events.append(payload if opcode == BINARY else read_text(payload))

    def _count_idle(self, now: float) -> None:
        if now - self._idle_since >= IDLE_WINDOW_S:
            self._idle_since = now
            self._idle_frames = 0
        self._idle_frames += 1
        if self._idle_frames > IDLE_FRAMES:
            raise WebSocketViolation("too many frames without data", CloseCode.POLICY)

    def _closed(self, payload: bytes, events: list[bytes | str | Closed]) -> None:
        closed = read_close(payload)
        if self.state is _OPEN:
            events.append(closed)
            self._queue(FIN | CLOSE, payload[:2])
        self.move(State.CLOSED)
        self._forget()

    def _forget(self) -> None:
        """Drop everything that was read and is not needed, since nothing more is read."""
        self._head = b""
        self._frame = None
        self._fragments = bytearray()
        self._message_opcode = 0
        self._message_since = None
        self._pong = None

    # --- times -----------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When to look for silence and for slow messages."""
        return None if self.state is _CLOSED else self._due

    def handle_timeout(self, now: float) -> Sequence[object]:
        """Ping after a silence; raises ``KeepaliveLost`` or, for a message that takes too long, ``WebSocketViolation``."""
        config = self._config
        if not self.listening:
            self.progressed(now, read=False)
        # Our ping, and so the pong, waits behind bytes that the network has not taken yet.
        dead_after_s = config.dead_after_s + self.grace_s
        # The same sum as in _due: a difference may be rounded down, and the timeout would then be due again at once for ever.
        if now >= self._heard + dead_after_s:
            raise KeepaliveLost(now - self._heard)
        if now >= self._heard + config.ping_after_s and not self._pinged:
            self._pinged = True
            self.ping()
        self._due = self._heard + (dead_after_s if self._pinged else config.ping_after_s)
        if self._message_since is not None:
            late = self._message_since + config.message_timeout_s
            if now >= late:
                raise WebSocketViolation("message too slow", CloseCode.POLICY)
            self._due = min(self._due, late)
        return ()
