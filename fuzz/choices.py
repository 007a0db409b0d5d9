"""Inputs read as a list of operations: each byte of the input decides something."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Takes decisions from the bytes of an input, from the left. An input that is used up gives zeros."""

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
        """0 to ``limit`` less 1, of as many bytes as that needs."""
        value = 0
        for _ in range(((limit - 1).bit_length() + 7) // 8):
            value = value << 8 | self.byte()
        return value % limit

    def pick(self, among: Sequence[T]) -> T:
        """One of a few things."""
        return among[self.below(len(among))]

    def chunk(self, limit: int = 255) -> bytes:
        """Up to ``limit`` bytes of the input, whose number stands before them."""
        size = min(self.below(limit + 1), self.left)
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """Everything that is left."""
        at, self._at = self._at, len(self._data)
        return self._data[at:]

    def pieces(self, data: bytes) -> list[bytes]:
        """``data`` cut into pieces, as a network might: whole, byte by byte, or where the input says."""
        return _cut(data, self.byte())

    def rest_in_pieces(self) -> list[bytes]:
        """Everything that is left, cut as its first byte says, which is not of it."""
        how = self.byte()
        return _cut(self.rest(), how)


def _cut(data: bytes, how: int) -> list[bytes]:
    if how == 0:
        return [data]
    size = how if how < 64 else how * 16
    return [data[at : at + size] for at in range(0, len(data), size)] or [b""]


def repeatable(seed: bytes) -> Callable[[int], bytes]:
    """A source of random bytes that is the same in every run."""
    count = 0

    def random(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_128(seed + count.to_bytes(8, "big")).digest(size)

    return random
