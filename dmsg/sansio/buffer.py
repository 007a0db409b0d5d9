"""A queue of bytes that is filled in one size and emptied in another."""

from __future__ import annotations

from collections import deque


class ByteQueue:
    """A queue of bytes that does not copy chunks which are taken as they came.

    ``size`` is the number of bytes, an attribute because the hot paths read it several times a frame.
    """

    __slots__ = ("_chunks", "_offset", "size")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._offset = 0  # of the first chunk, so that taking from a large chunk copies nothing but what is taken
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def append(self, data: bytes) -> None:
        """Add ``data`` at the end; empty data is ignored."""
        if data:
            self._chunks.append(data)
            self.size += len(data)

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._offset = self.size = 0

    def take(self, limit: int) -> bytes:
        """Remove and return up to ``limit`` bytes, joined; ``b""`` when there are none."""
        chunks = self._chunks
        if not chunks:
            return b""
        head = chunks[0]
        available = len(head) - self._offset
        if available > limit:
            start = self._offset
            self._offset = start + limit
            self.size -= limit
            return head[start : start + limit]
        chunks.popleft()
        offset, self._offset = self._offset, 0
        if not chunks or available == limit:
            self.size -= available
            return head[offset:] if offset else head
        parts: list[bytes | memoryview] = [memoryview(head)[offset:] if offset else head]  # copied once, when joined
        room = limit - available
        while chunks and room:
            head = chunks[0]
            if len(head) > room:
                parts.append(memoryview(head)[:room])
                self._offset = room
                room = 0
            else:
                parts.append(head)
                room -= len(head)
                chunks.popleft()
        data = b"".join(parts)
        self.size -= len(data)
        return data
