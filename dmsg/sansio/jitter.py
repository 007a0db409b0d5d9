"""Random numbers for pauses and choices, made of random bytes that are injected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class RandomNumbers(Protocol):
    """The part of :class:`random.Random` that the project uses. :class:`Jitter` provides it."""

    def random(self) -> float:
        """A float in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """An integer in [0, stop)."""

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        """``k`` different elements in random order. Raises ``ValueError`` when there are fewer."""


class Jitter:
    """:class:`RandomNumbers` made of the bytes that ``random(count)`` gives, as ``os.urandom`` does."""

    __slots__ = ("_bytes",)

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._bytes = random

    def random(self) -> float:
        """A float in [0, 1), one of 2**32 equally likely ones."""
        return int.from_bytes(self._bytes(4), "big") / 2**32

    def randrange(self, stop: int, /) -> int:
        """An integer in [0, stop); the chances of two differ by ``stop`` / 2**64 at most."""
        return int.from_bytes(self._bytes(8), "big") * stop >> 64

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        """``k`` different elements in random order. Raises ``ValueError`` when there are fewer."""
        left = len(population)
        if not 0 <= k <= left:
            raise ValueError(f"{k} of {left} elements")
        # A shuffle that stops after k elements; only the swapped places are stored.
        swapped: dict[int, int] = {}
        drawn = []
        for _ in range(k):
            place = self.randrange(left)
            left -= 1
            drawn.append(population[swapped.get(place, place)])
            swapped[place] = swapped.get(left, left)
        return drawn
