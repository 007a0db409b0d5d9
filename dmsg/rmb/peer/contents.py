"""What is in the list of a command, by the twins that have sent it. Pure."""

from __future__ import annotations

from collections import Counter, deque


class Contents:
    """The requests in a list that this process has pushed, and those it is pushing.

    Services take the oldest first: in a list of ``n`` requests are the last ``n`` that were pushed.
    """

    __slots__ = ("_bytes", "_numbers", "_requests")

    def __init__(self) -> None:
        #: The sender and the bytes of each request in the list, the oldest first.
        self._requests: deque[tuple[int, int]] = deque()
        self._numbers: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()

    def of(self, twin: int) -> tuple[int, int]:
        """How many requests of ``twin`` are in the list at most, or are being pushed, and their bytes."""
        return self._numbers[twin], self._bytes[twin]

    def push(self, twin: int, size: int) -> None:
        """A request of ``twin``, of ``size`` bytes, is being pushed."""
        self._numbers[twin] += 1
        self._bytes[twin] += size

    def pushed(self, twin: int, size: int, length: int) -> None:
        """It was pushed; the list has ``length`` requests now."""
        self._requests.append((twin, size))
        self.found(length)

    def not_pushed(self, twin: int, size: int) -> None:
        """It was not pushed, or it is not known whether it was."""
        self._numbers[twin] -= 1
        self._bytes[twin] -= size
        if not self._numbers[twin]:
            del self._numbers[twin], self._bytes[twin]

    def found(self, length: int) -> None:
        """The list has ``length`` requests now: services have taken all before these."""
        while len(self._requests) > length:
            self.not_pushed(*self._requests.popleft())
