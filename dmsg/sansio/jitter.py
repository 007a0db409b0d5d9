"""Random numbers for pauses and choices, from an injected source of random bytes."""

from __future__ import annotations

from collections.abc import Callable


class Jitter:
    """Uniform floats made of random bytes: what :class:`random.Random` is to those who want reproducible ones."""

    __slots__ = ("_bytes",)

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._bytes = random

    def random(self) -> float:
        """A float in [0, 1)."""
        return int.from_bytes(self._bytes(4), "big") / 2**32
