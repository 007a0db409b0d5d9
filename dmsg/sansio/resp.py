"""The client's side of what Redis speaks (RESP 2): commands out, replies in, in the same order.

A reply is ``bytes`` (a text or a bulk), ``int``, ``None``, a list of replies, or a :class:`ReplyError`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from dmsg.sansio.core import Core
from dmsg.sansio.errors import RedisViolation

#: Longest line: a text, an error, or the length of the bytes or elements that follow.
LINE_LIMIT_BYTES: Final = 64 * 1024
#: Longest bulk, Redis's own default; the programs that push to lists bound what they push.
BULK_LIMIT_BYTES: Final = 512 * 1024 * 1024
#: Most elements of an array, and most levels of nested arrays: our commands get a few thousand elements, and two levels.
ARRAY_LIMIT: Final = 1_000_000
DEPTH_LIMIT: Final = 8
_NUMBER_DIGITS: Final = 20
_END: Final = b"\r\n"


class ReplyError(Exception):
    """An error reply, as a value: ``text`` begins with a word for its kind, as in ``WRONGTYPE …``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class RespClient(Core):
    """One connection. A command without a reply for the time of its ``patience_s`` ends the connection."""

    __slots__ = ("_bulk", "_data", "_out", "_patience", "_since", "_stack")

    def __init__(self) -> None:
        self._data = bytearray()
        self._out: list[bytes] = []
        #: For each command without a reply, how long its reply may take in seconds; and since when the first has waited.
        self._patience: deque[float] = deque()
        self._since = 0.0
        #: Bytes of the bulk that comes next, or -1; and the incomplete arrays, each with its length.
        self._bulk = -1
        self._stack: list[tuple[int, list[Any]]] = []

    @property
    def waiting(self) -> int:
        """Commands without a reply."""
        return len(self._patience)

    def send(self, words: tuple[bytes | str | int, ...], patience_s: float, now: float) -> None:
        """Queue a command."""
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        self._out.append(b"".join(parts))
        if not self._patience:
            self._since = now
        self._patience.append(patience_s)

    def data_to_send(self) -> bytes:
        """All commands that are queued."""
        if not self._out:
            return b""
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        return data

    def next_timeout(self) -> float | None:
        """When the patience of the oldest waiting command ends."""
        return self._since + self._patience[0] if self._patience else None

    def handle_timeout(self, now: float) -> list[object]:
        """Raises :class:`RedisViolation` when there is no reply in time."""
        due = self.next_timeout()
        if due is not None and now >= due:
            raise RedisViolation("no reply in time")
        return []

    def receive_data(self, data: bytes, now: float) -> list[Any]:
        """The replies that are complete."""
        buffer = self._data
        buffer += data
        at, size = 0, len(buffer)
        replies: list[Any] = []
        while True:
            if self._bulk >= 0:
                end = at + self._bulk
                if size < end + 2:
                    break
                if buffer[end : end + 2] != _END:
                    raise self._broken(replies)
                value: Any = bytes(buffer[at:end])
                at, self._bulk = end + 2, -1
            else:
                end = buffer.find(_END, at, at + LINE_LIMIT_BYTES)
                if end < 0:
                    if size - at >= LINE_LIMIT_BYTES:
                        raise self._broken(replies)
                    break
                kind, line = buffer[at : at + 1], bytes(buffer[at + 1 : end])
                at = end + 2
                value = self._element(kind, line, replies)
                if self._bulk >= 0 or value is _OPENED:
                    continue
            self._complete(value, replies, now)
        del buffer[:at]
        return replies

    def _element(self, kind: bytearray, line: bytes, replies: list[Any]) -> Any:
        """The value of a line; the beginning of a bulk or an array is only noted."""
        if kind == b"+":
            return line
        if kind == b"-":
            return ReplyError(line.decode("utf-8", "replace"))
        number = self._number(line, replies)
        if kind == b":":
            return number
        if kind == b"$" and -1 <= number <= BULK_LIMIT_BYTES:
            self._bulk = number
            return None
        if kind == b"*" and -1 <= number <= ARRAY_LIMIT and len(self._stack) < DEPTH_LIMIT:
            if number > 0:
                self._stack.append((number, []))
                return _OPENED
            return None if number else []
        raise self._broken(replies)

    def _number(self, line: bytes, replies: list[Any]) -> int:
        digits = line.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > _NUMBER_DIGITS:
            raise self._broken(replies)
        return int(line)

    def _complete(self, value: Any, replies: list[Any], now: float) -> None:
        """Take a complete element, which may also complete the arrays that it ends."""
        while self._stack:
            length, items = self._stack[-1]
            items.append(value)
            if len(items) < length:
                return
            self._stack.pop()
            value = items
        if not self._patience:
            raise self._broken(replies)
        self._patience.popleft()
        self._since = now
        replies.append(value)

    def _broken(self, replies: list[Any]) -> RedisViolation:
        error = RedisViolation("not a reply")
        error.events = replies
        return error


_OPENED: Final = object()
