"""Reads inputs as a list of operations: each byte of the input makes a decision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
#: Pieces at most: byte by byte, a body over its limit takes the search a second.
_PIECES = 1_024


class Choices:
    """Makes decisions from the bytes of an input, from left to right. A used-up input gives zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that were not used yet."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """0 to 255."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def flag(self) -> bool:
        """One byte decides: odd is true."""
        return bool(self.byte() & 1)

    def below(self, limit: int) -> int:
        """0 to ``limit - 1``, from as many bytes as needed."""
        value = 0
        for _ in range(((limit - 1).bit_length() + 7) // 8):
            value = value << 8 | self.byte()
        return value % limit

    def pick(self, among: Sequence[T]) -> T:
        """One of a few values."""
        return among[self.below(len(among))]

    def chunk(self, limit: int = 255) -> bytes:
        """Up to ``limit`` bytes of the input, preceded by their number."""
        size = min(self.below(limit + 1), self.left)
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """Everything that is left."""
        at, self._at = self._at, len(self._data)
        return self._data[at:]

    def pieces(self, data: bytes) -> list[bytes]:
        """``data`` cut into pieces, as a network might: whole, byte by byte, or where the input says; into 1,024 at most."""
        return _cut(data, self.byte())

    def rest_in_pieces(self) -> list[bytes]:
        """Everything that is left after its first byte, cut as that byte says."""
        how = self.byte()
        return _cut(self.rest(), how)


def _cut(data: bytes, how: int) -> list[bytes]:
    if how == 0:
        return [data]
    size = max(how if how < 64 else how * 16, -(-len(data) // _PIECES))
    return [data[at : at + size] for at in range(0, len(data), size)] or [b""]


def repeatable(seed: bytes) -> Callable[[int], bytes]:
    """A source of random bytes that is the same in every run."""
    count = 0

    def random(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_128(seed + count.to_bytes(8, "big")).digest(size)

    return random
