"""Which open HTTP connection gives its place to a new one when all places are taken. Pure.

The network that holds the most gives a place up. A connection that is idle between two requests counts as four others, so a
client that asks at once gets its answer. Of the network's connections, the one goes that has been in its standing for longest.
So strangers displace each other, whatever they do on their connections, and not a client whose request is on its way. New
connections count no more than those being answered, because a stranger can choose the standing of its connections.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Final, Generic, TypeVar

from dmsg.sansio.tally import Tally

T = TypeVar("T", bound=Hashable)


class Standing(IntEnum):
    """What a connection is doing. Among networks that hold equally many, one with the lowest standing gives a place up."""

    #: Between two requests.
    IDLE = 0
    #: No byte of its first request has come.
    NEW = 1
    #: A request is coming in.
    RECEIVING = 2
    #: A request is being answered, or the last answer is on its way out.
    ANSWERING = 3


#: How much a connection counts.
_WEIGHTS: Final = {Standing.IDLE: 4, Standing.NEW: 1, Standing.RECEIVING: 1, Standing.ANSWERING: 1}


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

    def __iter__(self) -> Iterator[T]:
        return iter(self._held)

    def add(self, item: T, network: str) -> None:
        """A new holder, :attr:`Standing.NEW`."""
        self._held[item] = (network, Standing.NEW)
        self._networks[network] += 1
        self._queues[Standing.NEW].add(item, network)

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

    def asks_nothing(self, item: T) -> bool:
        """Whether no byte of a request of ``item``, which holds a place, has come."""
        return self.standing(item) <= Standing.NEW

    def oldest_new(self) -> T | None:
        """The oldest holder that is :attr:`Standing.NEW`, of the network that has the most of them."""
        return self._queues[Standing.NEW].oldest_of_largest()

    def victim(self, network: str) -> T | None:
        """The holder that makes room for a newcomer of ``network``; ``None`` to refuse the newcomer.

        A holder that is being answered goes only if its network has more of those than the newcomer's has places at all.
        """
        standing = max(Standing, key=lambda one: self._queues[one].largest * _WEIGHTS[one])
        queue = self._queues[standing]
        if standing is Standing.ANSWERING and queue.largest <= self._networks[network]:
            return None
        return queue.oldest_of_largest()
