"""Queues of envelopes for other relays: a lane for each relay, in which the senders take turns, and their limits. Pure.

:ref:`spec-rmb-federation`. A lane whose relay did not answer several times in a row is closed for a while: its envelopes
go another way at once, instead of waiting for one timeout after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.weights import Weights

#: Bytes that an outgoing envelope counts besides its own bytes and its outline: 2.6 kB were measured, and 3.8 kB for the only
#: envelope of a sender.
OUTGOING_BYTES: Final = 4096


def held_bytes(envelope: Envelope, data: bytes) -> int:
    """Bytes held by ``data`` and its outline. The arena of a parsed envelope may be twice as large as its contents."""
    return len(data) + 2 * envelope.ByteSize()


@dataclass(eq=False, slots=True)
class Outgoing:
    """An envelope on its way to another relay."""

    envelope: Envelope
    data: bytes
    #: The twin it is for, as last read from the registry.
    twin: Twin
    expires_at: float
    #: If set, only a relay with the connected session may take it. Called if there is none, with whether one may have taken it.
    otherwise: Callable[[bool], None] | None = None
    #: Called, with the same argument, when its twin has moved to this relay meanwhile.
    moved_here: Callable[[bool], None] | None = None
    #: Whether relays may now take it only for a connected session, and not store it.
    connected_only: bool = False
    #: Relays left in this pass, the next one last.
    candidates: list[str] = field(default_factory=list)
    #: Relays that refused it for good, and the HTTP status of each refusal.
    rejected: dict[str, int] = field(default_factory=dict)
    #: Whether a relay may have taken it without confirming it.
    in_doubt: bool = False
    #: The relay to whose share it counts: the one that it waits for, or waited for last.
    charged: str = ""
    #: The lane in which it waits to be posted.
    lane: Lane | None = None
    #: The closed lanes for which it rests, because none of its relays may be tried.
    rests_at: Sequence[Lane] = ()
    passes: int = 0
    #: Whether it is in a longer pause or rests: then its twin is looked up again.
    resting: bool = False
    done: bool = False
    #: The twin that sent it, and the bytes that it counts for.
    source: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.envelope.source.twin
        self.size = held_bytes(self.envelope, self.data) + OUTGOING_BYTES


class Room:
    """A fairly shared limit of bytes, or of other things: a key may have as many as it leaves free for others."""

    __slots__ = ("_limit", "_taken", "used")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._taken: dict[object, int] = {}
        self.used = 0

    def has(self, key: object, size: int) -> bool:
        """Whether ``key`` may take ``size`` bytes more."""
        return self._taken.get(key, 0) + size <= self._limit - self.used

    def take(self, key: object, size: int) -> None:
        """Count ``size`` bytes for ``key``."""
        self.used += size
        self._taken[key] = self._taken.get(key, 0) + size

    def give_back(self, key: object, size: int) -> None:
        """Release ``size`` bytes of ``key``."""
        self.used -= size
        left = self._taken.get(key, 0) - size
        if left:
            self._taken[key] = left
        else:
            self._taken.pop(key, None)


class PairedRoom:
    """A limit of bytes that receivers share fairly, and in the share of each receiver the senders, as in :class:`Room`."""

    __slots__ = ("_all", "_of", "_share")

    def __init__(self, limit: int) -> None:
        self._all = Room(limit)
        self._share = limit // 2
        self._of: dict[object, Room] = {}

    @property
    def used(self) -> int:
        """The bytes of all."""
        return self._all.used

    def take(self, receiver: object, sender: object, size: int) -> bool:
        """Count ``size`` bytes, if there is room for them; returns whether there is."""
        of_receiver = self._of.get(receiver) or Room(self._share)
        if not (self._all.has(receiver, size) and of_receiver.has(sender, size)):
            return False
        self._all.take(receiver, size)
        of_receiver.take(sender, size)
        self._of[receiver] = of_receiver
        return True

    def give_back(self, receiver: object, sender: object, size: int) -> None:
        """Release ``size`` bytes."""
        self._all.give_back(receiver, size)
        of_receiver = self._of[receiver]
        of_receiver.give_back(sender, size)
        if not of_receiver.used:
            del self._of[receiver]


class Held:
    """The outstanding envelopes by sender, and the bytes of each sender."""

    __slots__ = ("_bytes", "_of")

    def __init__(self) -> None:
        self._of: dict[int | str, OrderedDict[Outgoing, None]] = {}
        self._bytes: Weights[int | str] = Weights()

    @staticmethod
    def key(outgoing: Outgoing) -> int | str:
        """For whom an envelope counts."""
        return outgoing.source

    @property
    def used(self) -> int:
        """The bytes of all senders."""
        return self._bytes.total

    def of(self, key: int | str) -> int:
        """The bytes of one sender."""
        return self._bytes[key]

    def all_of(self, key: int | str) -> Iterable[Outgoing]:
        """The envelopes of one sender, in the order in which they came."""
        return self._of.get(key, ())

    def add(self, outgoing: Outgoing) -> None:
        """Add an outstanding envelope."""
        key = self.key(outgoing)
        self._bytes.add(key, outgoing.size)
        self._of.setdefault(key, OrderedDict())[outgoing] = None

    def remove(self, outgoing: Outgoing) -> None:
        """Remove an envelope that is no longer outstanding."""
        key = self.key(outgoing)
        self._bytes.add(key, -outgoing.size)
        del self._of[key][outgoing]
        if not self._of[key]:
            del self._of[key]

    def surplus(self, key: int | str, size: int) -> Outgoing | None:
        """The latest envelope of the sender with the most bytes, unless ``key`` would have as many with ``size`` more."""
        largest = self._bytes.largest()
        return next(reversed(self._of[largest])) if self._bytes[largest] > self.of(key) + size else None


class HeldOfSender(Held):
    """The outstanding envelopes of one sender by the relay to whose share each counts, in the place of senders."""

    __slots__ = ()

    @staticmethod
    def key(outgoing: Outgoing) -> int | str:
        """For which relay an envelope counts."""
        return outgoing.charged


class Lane:
    """The queue for one relay, and the relay's recent failures. Times are seconds on any one clock."""

    __slots__ = (
        "_backoff",
        "_closed_until",
        "_failures_to_close",
        "_next",
        "_queues",
        "clearing",
        "failures",
        "posting",
        "pumping",
        "told_at",
        "told_rate",
    )

    def __init__(self, failures_to_close: int, backoff: Backoff) -> None:
        #: Queues by ``connected_only``, which takes a post of its own, and by sender.
        self._queues: dict[bool, OrderedDict[int, OrderedDict[Outgoing, None]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        #: The key of the two kinds of queues whose turn is next.
        self._next = False
        self._failures_to_close = failures_to_close
        self._backoff = backoff
        self._closed_until = 0.0
        #: Failures in a row.
        self.failures = 0
        #: Posts under way.
        self.posting = 0
        #: Whether posts are being started; and whether queued envelopes are being sent another way.
        self.pumping = self.clearing = False
        #: The failure rate in the last event, and when that was emitted.
        self.told_rate = self.told_at = 0.0

    def __bool__(self) -> bool:
        return any(self._queues.values())

    @property
    def busy(self) -> bool:
        """Whether something waits or is being posted."""
        return bool(self or self.posting)

    def put(self, outgoing: Outgoing) -> None:
        """Queue an envelope behind the others of its sender."""
        outgoing.lane = self
        self._queues[outgoing.connected_only].setdefault(outgoing.source, OrderedDict())[outgoing] = None

    def discard(self, outgoing: Outgoing) -> None:
        """Remove an envelope from the queue."""
        outgoing.lane = None
        queues = self._queues[outgoing.connected_only]
        queue = queues[outgoing.source]
        del queue[outgoing]
        if not queue:
            del queues[outgoing.source]

    def take(self, most: int, max_bytes: int) -> list[Outgoing]:
        """Take the next envelopes, at most ``most`` and ``max_bytes``, but at least one if any waits. Senders take turns.

        The envelopes taken are either all ``connected_only`` or all not; if both kinds wait, they take turns too.
        """
        queues = self._queues[self._next] or self._queues[not self._next]
        self._next = queues is self._queues[False]
        taken: list[Outgoing] = []
        while queues and len(taken) < most:
            source, queue = next(iter(queues.items()))
            first = next(iter(queue))
            max_bytes -= len(first.data)
            if taken and max_bytes < 0:
                break
            taken.append(first)
            self.discard(first)
            if queue:
                queues.move_to_end(source)
        return taken

    def clear(self, most: int) -> list[Outgoing]:
        """Take up to ``most`` envelopes, in the order in which they came for each sender and kind."""
        queues = chain.from_iterable(of_kind.values() for of_kind in self._queues.values())
        cleared = list(islice(chain.from_iterable(queues), most))
        for outgoing in cleared:
            self.discard(outgoing)
        return cleared

    def closed(self, now: float) -> bool:
        """Whether the lane is closed, so that nothing is tried yet."""
        return now < self._closed_until

    def closed_s(self, now: float) -> float:
        """For how many seconds from ``now`` the lane is closed; 0 if it is open."""
        return max(0.0, self._closed_until - now)

    def answered(self) -> None:
        """The relay answered."""
        self.failures = 0
        self._closed_until = 0.0

    def failed(self, now: float, uniform: Callable[[], float]) -> None:
        """The relay did not answer. Posts that were under way when the lane closed fail for the same reason, and do not count."""
        if self.closed(now):
            return
        self.failures += 1
        over = self.failures - self._failures_to_close
        if over >= 0:
            self._closed_until = now + self._backoff.pause_s(over + 1, uniform)


def all_closed(lanes: Iterable[Lane | None], now: float) -> list[Lane]:
    """``lanes`` if all of them are closed, else none. ``None`` among ``lanes`` is one that was never closed."""
    closed: list[Lane] = []
    for lane in lanes:
        if lane is None or not lane.closed(now):
            return []
        closed.append(lane)
    return closed
