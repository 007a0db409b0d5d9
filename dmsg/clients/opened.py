"""The open transports of a listener: how many there are, which are idle, and which are closed first. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from dmsg.clients.limits import ListenerLimits
from dmsg.clients.streams import CarriedStream
from dmsg.crypto.keys import PublicKey

#: Seconds between two checks of what transports have carried; an idle transport is noticed at most this much too late.
LOOK_S: Final = 1.0


class Carried(TypingProtocol):
    """A watched transport, whose stream changes when it is resumed."""

    @property
    def stream(self) -> CarriedStream:
        """The stream that carries it now."""

    @property
    def connected(self) -> bool:
        """Whether the application has not been told of its end yet."""


T = TypeVar("T", bound=Carried)


class _Use:
    """How many bytes a transport had moved at the last check, and since when it has not moved."""

    __slots__ = ("moved_bytes", "since_s")

    def __init__(self, now: float) -> None:
        self.moved_bytes = 0
        self.since_s = now


class OpenTransports(Generic[T]):
    """The open transports of one listener, within ``limits``.

    A transport moves when bytes of the peer arrive or the peer acknowledges some of ours. It is *unused* while its peer
    has not sent a byte. Data that this side sends first, such as a greeting, does not count as use. It is unused again once
    the application has closed it and was told of the end, and only the peer keeps its half open.
    """

    __slots__ = ("_limits", "_uses")

    def __init__(self, limits: ListenerLimits) -> None:
        self._limits = limits
        self._uses: dict[T, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, transport: T, now: float) -> None:
        """``transport`` has been opened."""
        self._uses[transport] = _Use(now)

    def remove(self, transport: T) -> None:
        """``transport`` has ended; ignored if it is not known."""
        self._uses.pop(transport, None)

    @property
    def is_full(self) -> bool:
        """Whether no more transports may be open."""
        return len(self._uses) >= self._limits.open_transports

    @property
    def needs_look(self) -> bool:
        """Whether to call :meth:`idle` every :data:`LOOK_S`.

        It is true from half of ``crowd`` on, so that idle times are known when the crowd is reached.
        """
        return bool(self._uses) and (self._limits.idle_timeout_s > 0 or len(self._uses) * 2 > self._limits.crowd)

    def idle(self, now: float) -> list[T]:
        """The transports to end now: idle for too long, or unused in a crowd."""
        limit_s = self._limits.idle_timeout_s
        expired = []
        for transport, use in self._uses.items():
            moved_bytes = transport.stream.received_bytes + transport.stream.acked_bytes
            if moved_bytes != use.moved_bytes:
                use.moved_bytes, use.since_s = moved_bytes, now
            elif limit_s and now - use.since_s >= limit_s:
                expired.append(transport)
        excess = len(self._uses) - len(expired) - self._limits.crowd
        if excess <= 0:
            return expired
        ended = set(expired)
        return expired + [one for one in self.unused(excess, now, self._limits.crowd_idle_s) if one not in ended]

    def unused(self, count: int, now: float, idle_s: float) -> list[T]:
        """At most ``count`` unused transports that have not moved for ``idle_s``.

        They are taken from the key that holds the most transports first, and of its transports, the one that has been idle
        longest.
        """
        held: dict[PublicKey, int] = defaultdict(int)
        unused: dict[PublicKey, list[tuple[float, int, T]]] = defaultdict(list)
        for number, (transport, use) in enumerate(self._uses.items()):
            stream = transport.stream
            held[stream.remote] += 1
            is_used = stream.received_bytes and transport.connected
            if not is_used and now - use.since_s >= idle_s:
                unused[stream.remote].append((use.since_s, number, transport))
        heap = []
        for key, found in unused.items():
            found.sort(reverse=True)
            heap.append((-held[key], *found[-1][:2], key))
        heapq.heapify(heap)
        chosen: list[T] = []
        while heap and len(chosen) < count:
            minus_held, _, _, key = heapq.heappop(heap)
            chosen.append(unused[key].pop()[2])
            if unused[key]:
                heapq.heappush(heap, (minus_held + 1, *unused[key][-1][:2], key))
        return chosen
