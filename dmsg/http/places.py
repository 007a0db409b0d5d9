"""Which open HTTP connection gives its place to a new one when all places are taken. Pure.

Connections without a request go first, then those whose request is not complete, then those being answered. Among
these one of the network that holds the most loses, and of that network the one that has been so longest. So strangers
in a few networks push out each other, and a client that asks at once gets its answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from enum import IntEnum
from typing import Final, Generic, TypeVar

from dmsg.sansio.tally import Tally

T = TypeVar("T", bound=Hashable)


class Standing(IntEnum):
    """What a connection is doing; the lowest goes first."""

    #: No byte of a request is there: a new connection, or a kept one between two requests.
    WAITING = 0
    #: A request is coming in.
    RECEIVING = 1
    #: A request is being answered, or the last answer is on its way out.
    ANSWERING = 2


class _Queue(Generic[T]):
    """Items of one standing, by network; finds the oldest item of the largest network without looking at the others."""

    __slots__ = ("_items", "_sizes")

    def __init__(self) -> None:
        self._items: dict[str, OrderedDict[T, None]] = {}
        self._sizes: Tally[str] = Tally()

    @property
    def largest(self) -> int:
        """Items of the network that has the most; 0 when there is no item."""
        return self._sizes.most

    def add(self, item: T, network: str) -> None:
        self._items.setdefault(network, OrderedDict())[item] = None
        self._sizes.add(network)

    def discard(self, item: T, network: str) -> None:
        items = self._items[network]
        del items[item]
        if not items:
            del self._items[network]
        self._sizes.remove(network)

    def oldest_of_largest(self) -> T | None:
        return next(iter(self._items[self._sizes.largest()])) if self._items else None


class Places(Generic[T]):
    """Who holds a place, in which network (:func:`dmsg.address.network_group`) and with which :class:`Standing`."""

    def __init__(self) -> None:
        self._queues: Final[dict[Standing, _Queue[T]]] = {standing: _Queue() for standing in Standing}
        self._held: dict[T, tuple[str, Standing]] = {}
        self._networks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, item: T, network: str) -> None:
        """A new holder, :attr:`Standing.WAITING`."""
        self._held[item] = (network, Standing.WAITING)
        self._networks[network] += 1
        self._queues[Standing.WAITING].add(item, network)

    def move(self, item: T, standing: Standing) -> None:
        """``item`` does something else now; silent when it holds no place any more."""
        held = self._held.get(item)
        if held is None or held[1] is standing:
            return
        network, before = held
        self._queues[before].discard(item, network)
        self._queues[standing].add(item, network)
        self._held[item] = (network, standing)

    def discard(self, item: T) -> None:
        """``item`` holds no place any more; silent when it held none."""
        held = self._held.pop(item, None)
        if held is None:
            return
        network, standing = held
        self._queues[standing].discard(item, network)
        self._networks[network] -= 1
        if not self._networks[network]:
            del self._networks[network]

    def standing(self, item: T) -> Standing:
        """What ``item``, which holds a place, is doing."""
        return self._held[item][1]

    def victim(self, network: str) -> T | None:
        """Which holder makes room for a newcomer of ``network``; ``None`` to refuse the newcomer.

        One that is being answered only goes if its network has more of those than the newcomer's has places at all.
        """
        for standing in (Standing.WAITING, Standing.RECEIVING):
            item = self._queues[standing].oldest_of_largest()
            if item is not None:
                return item
        answering = self._queues[Standing.ANSWERING]
        return answering.oldest_of_largest() if answering.largest > self._networks[network] else None
