"""Places for offers that wait for a decision or a proof. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar
from typing import Protocol as TypingProtocol


class Offer(Hashable, TypingProtocol):
    """A transport that a peer offers, and that holds a place."""

    def crowded_out(self) -> None:
        """This offer has waited longest, and a newer one has taken its place."""


T = TypeVar("T", bound=Hashable)


class Offers(Generic[T]):
    """At most ``limit`` offers, at most ``limit_per_key`` of them of one key, in the order in which they came.

    When all places are taken, a new offer gets the place of the oldest. An honest offer needs its place for one round trip,
    so with 256 places strangers would have to make 256 offers within that time to take it away.
    """

    __slots__ = ("_held", "_offers", "limit", "limit_per_key")

    def __init__(self, limit: int, limit_per_key: int) -> None:
        """No offers yet; ``ValueError`` unless both limits are at least 1."""
        if limit < 1 or limit_per_key < 1:
            raise ValueError("a listener needs at least one place")
        self.limit = limit
        self.limit_per_key = limit_per_key
        self._offers: OrderedDict[T, Hashable] = OrderedDict()
        self._held: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def has_room(self, key: Hashable) -> bool:
        """Whether ``key`` may have another place."""
        return self._held.get(key, 0) < self.limit_per_key

    def add(self, offer: T, key: Hashable) -> T | None:
        """Give ``offer`` of ``key`` a place; returns the oldest offer if it has lost its place to this one."""
        oldest = next(iter(self._offers)) if len(self._offers) >= self.limit else None
        if oldest is not None:
            self.remove(oldest)
        self._offers[offer] = key
        self._held[key] = self._held.get(key, 0) + 1
        return oldest

    def remove(self, offer: T) -> None:
        """Free the place of ``offer``; does nothing if it has none."""
        key = self._offers.pop(offer, None)
        if key is None:
            return
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
