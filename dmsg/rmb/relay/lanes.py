"""What waits for another relay: one lane each, in which the senders take turns, and how much may wait. Pure.

:ref:`spec-rmb-federation`. A lane whose relay did not answer several times in a row is closed for a while: what waits in
it goes another way at once, instead of one time-out after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.weights import Weights

#: What an outgoing envelope counts for beside its bytes and the texts of its outline: 2.6 kB were measured, and 3.8 kB where
#: its sender has no other.
OUTGOING_BYTES: Final = 4096


def held_bytes(envelope: Envelope, data: bytes) -> int:
    """What ``data`` and its outline hold. The arena of a parsed one may have twice the size of what is in it."""
    return len(data) + 2 * envelope.ByteSize()


@dataclass(eq=False, slots=True)
class Outgoing:
    """An envelope on its way to another relay."""

    envelope: Envelope
    data: bytes
    #: The twin it is for, as the registry had it last.
    twin: Twin
    expires_at: float
    #: Only for a relay the session is connected to; called when there is none, with whether one may have taken it.
    otherwise: Callable[[bool], None] | None = None
    #: Called, with the same, when its twin has moved to this relay meanwhile.
    moved_here: Callable[[bool], None] | None = None
    #: Whether the relays are only asked for a session now: they do not keep it.
    connected_only: bool = False
    #: Relays left in this pass, the next one last.
    candidates: list[str] = field(default_factory=list)
    #: Relays that said they would never take it.
    rejected: set[str] = field(default_factory=set)
    #: Whether one may have taken it without saying so.
    in_doubt: bool = False
    #: The relay it counts for: the one that it waits for, or waited for last.
    charged: str = ""
    #: Where it waits to be posted.
    lane: Lane | None = None
    passes: int = 0
    done: bool = False
    #: The twin it is from, and what it counts for, in bytes.
    source: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.envelope.source.twin
        self.size = held_bytes(self.envelope, self.data) + OUTGOING_BYTES


class Room:
    """Bytes that may be outstanding, shared fairly: one key may have as much as it leaves free for others."""

    __slots__ = ("_limit", "_taken", "used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[object, int] = {}
        self.used = 0

    def has(self, key: object, size: int) -> bool:
        """Whether ``key`` may take ``size`` more."""
        return self._taken.get(key, 0) + size <= self._limit - self.used

    def take(self, key: object, size: int) -> None:
        """Take it."""
        self.used += size
        self._taken[key] = self._taken.get(key, 0) + size

    def give_back(self, key: object, size: int) -> None:
        """Give it back."""
        self.used -= size
        left = self._taken.get(key, 0) - size
        if left:
            self._taken[key] = left
        else:
            self._taken.pop(key, None)


class Held:
    """What is outstanding, by its senders, and how many bytes each has."""

    __slots__ = ("_bytes", "_of")

    def __init__(self) -> None:
        self._of: dict[int, OrderedDict[Outgoing, None]] = {}
        self._bytes: Weights[int] = Weights()

    @property
    def used(self) -> int:
        """The bytes of all senders."""
        return self._bytes.total

    def of(self, source: int) -> int:
        """The bytes of one sender."""
        return self._bytes[source]

    def add(self, outgoing: Outgoing) -> None:
        """Count one more."""
        source = outgoing.source
        self._bytes.add(source, outgoing.size)
        self._of.setdefault(source, OrderedDict())[outgoing] = None

    def remove(self, outgoing: Outgoing) -> None:
        """It is not outstanding any more."""
        source = outgoing.source
        self._bytes.add(source, -outgoing.size)
        del self._of[source][outgoing]
        if not self._of[source]:
            del self._of[source]

    def surplus(self, source: int, size: int) -> Outgoing | None:
        """What came last of the sender that has most, unless ``source`` would have as much with ``size`` more."""
        largest = self._bytes.largest()
        return next(reversed(self._of[largest])) if self._bytes[largest] > self.of(source) + size else None


class Lane:
    """What waits for one relay, and how the relay has done lately. Times are seconds on any one clock."""

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
        #: By whether the relay is only asked for a session, which is a post of its own, and by sender.
        self._queues: dict[bool, OrderedDict[int, OrderedDict[Outgoing, None]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        #: The one of these whose turn is next.
        self._next = False
        self._failures_to_close = failures_to_close
        self._backoff = backoff
        self._closed_until = 0.0
        #: Failures in a row.
        self.failures = 0
        #: Posts under way.
        self.posting = 0
        #: Whether posts are being started; and whether what waits is being sent another way.
        self.pumping = self.clearing = False
        #: The rate of failures that was told last, and when.
        self.told_rate = self.told_at = 0.0

    def __bool__(self) -> bool:
        return any(self._queues.values())

    @property
    def busy(self) -> bool:
        """Whether something waits or is being posted."""
        return bool(self or self.posting)

    def put(self, outgoing: Outgoing) -> None:
        """Let it wait behind its sender's others."""
        outgoing.lane = self
        self._queues[outgoing.connected_only].setdefault(outgoing.source, OrderedDict())[outgoing] = None

    def discard(self, outgoing: Outgoing) -> None:
        """It need not wait any more."""
        outgoing.lane = None
        queues = self._queues[outgoing.connected_only]
        queue = queues[outgoing.source]
        del queue[outgoing]
        if not queue:
            del queues[outgoing.source]

    def take(self, most: int, max_bytes: int) -> list[Outgoing]:
        """The next ones, at most ``most`` and ``max_bytes``, but one if there is one. Each sender has one in turn.

        All are for any session, or all for connected ones only; if both wait, they have turns, too.
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
        """Take ``most``, in the order they came in for each sender and kind."""
        queues = chain.from_iterable(of_kind.values() for of_kind in self._queues.values())
        cleared = list(islice(chain.from_iterable(queues), most))
        for outgoing in cleared:
            self.discard(outgoing)
        return cleared

    def closed(self, now: float) -> bool:
        """Whether nothing is to be tried yet."""
        return now < self._closed_until

    def answered(self) -> None:
        """The relay did answer."""
        self.failures = 0
        self._closed_until = 0.0

    def failed(self, now: float, uniform: Callable[[], float]) -> None:
        """The relay did not answer."""
        self.failures += 1
        over = self.failures - self._failures_to_close
        if over >= 0 and not self.closed(now):
            self._closed_until = now + self._backoff.pause_s(over + 1, uniform)
