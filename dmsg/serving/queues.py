"""The queues of a relay for receivers whose network takes nothing, and which queues are dropped over a limit.

Pure. :ref:`spec-queues`. Bytes are counted for each transport, for each connection in both directions, and in all.
When a count exceeds its limit, the queues of the address group with the most bytes are dropped, so that a stranger with
many keys or transports cannot make the queue of an honest client the largest. No transport is refused because of what
others have queued.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, Generic

from dmsg.serving.limits import ServingLimits
from dmsg.serving.loads import enough, largest_first, to_free
from dmsg.serving.member import L, Leg, LegState, Member

#: Taken from the queues in one go, before the network is asked again.
_DRAIN_BYTES: Final = 64 * 1024
#: What one transport may send before the next has its turn.
_QUANTUM_BYTES: Final = 16 * 1024

#: A window may be so many times as large as what the transport has carried (:ref:`spec-windows`).
_WINDOW_GROWTH: Final = 8
#: A receiver that took nothing for this many seconds is stalled, and each byte that waits for it counts as 4.
_STALLED_S: Final = 1.0
_STALLED_WEIGHT: Final = 4

_sender: Callable[[Leg[Any]], Member[Any]] = attrgetter("target")
_receiver: Callable[[Leg[Any]], Member[Any]] = attrgetter("member")
_size: Callable[[Leg[Any]], int] = attrgetter("queued_bytes")


class Queues(Generic[L]):
    """The queues of a switch. A :class:`~dmsg.serving.member.Leg` stands for the queue *towards* it."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self.queued_bytes = 0
        # Deadlines, the earliest first: an entry moves to the end when its deadline is set to now plus a fixed time.
        self._stuck: OrderedDict[L, float] = OrderedDict()
        self._waiting: OrderedDict[Member[Any], float] = OrderedDict()

    # --- in and out ------------------------------------------------------------------------------------------------

    def put(self, queue: L, frame: bytes, now: float) -> None:
        """Add ``frame`` to ``queue``."""
        receiver, sender = queue.member, queue.target
        if not queue.queue:
            if not receiver.waiting:
                receiver.progressed = False
                receiver.took_at = now
                self._waiting[receiver] = now + self._limits.queue_stall_timeout_s
            receiver.waiting[queue] = None
            sender.feeding.add(queue)
        queue.enqueue(frame)
        size = len(frame)
        receiver.queued_to += size
        sender.queued_from += size
        self.queued_bytes += size
        if queue.queued_bytes > self._limits.queue_soft_bytes and queue not in self._stuck:
            self.limit_time(queue, now)

    def drain(self, receiver: Member[Any], now: float) -> None:
        """Move data that waits for ``receiver`` into its output: up to 64 KiB, up to 16 KiB of each transport in turn."""
        waiting, out = receiver.waiting, receiver.out
        budget = _DRAIN_BYTES
        receiver.progressed = True
        receiver.drains += 1
        receiver.took_at = now
        while waiting and budget > 0:
            leg = next(iter(waiting))
            queue = leg.queue
            assert queue
            share = 0
            while queue and share < _QUANTUM_BYTES:
                frame = queue.popleft()
                share += len(frame)
                out.append(frame)
                receiver.single += 1
            budget -= share
            waiting.move_to_end(leg)
            self.took(leg, share)
        if not waiting and not receiver.congested:
            receiver.direct = True

    def took(self, queue: L, size: int) -> None:
        """Subtract ``size`` bytes of ``queue`` that are sent or dropped."""
        receiver, sender = queue.member, queue.target
        queue.queued_bytes -= size
        receiver.queued_to -= size
        sender.queued_from -= size
        self.queued_bytes -= size
        if not queue.queue:
            receiver.waiting.pop(queue, None)
            sender.feeding.discard(queue)
            self._stuck.pop(queue, None)
            if not receiver.waiting:
                self._waiting.pop(receiver, None)

    def drop(self, queue: L) -> None:
        """Drop what waits in ``queue``."""
        if queue.queue:
            queue.queue.clear()
            self.took(queue, queue.queued_bytes)

    def drop_all(self, receiver: Member[Any]) -> None:
        """Drop what waits for ``receiver``."""
        for queue in list(receiver.waiting):
            self.drop(queue)

    # --- too much --------------------------------------------------------------------------------------------------

    def excess(self, queue: L, now: float) -> Sequence[L]:
        """The queues to drop because of what was put into ``queue``; mostly none."""
        limits = self._limits
        receiver, sender = queue.member, queue.target
        if queue.queued_bytes > limits.queue_hard_bytes and queue.queued_bytes > self._bearable(queue):
            return (queue,)
        limit = limits.queued_per_connection_bytes
        if receiver.queued_to > limit:
            return enough(_ranked(receiver.waiting, _sender, now), _size, to_free(receiver.queued_to, limit))
        if sender.queued_from > limit:
            return enough(_ranked(sender.feeding, _receiver, now), _size, to_free(sender.queued_from, limit))
        limit = limits.queued_total_bytes
        if self.queued_bytes > limit and self._waiting:
            return enough(self._largest_first(now), _size, to_free(self.queued_bytes, limit))
        return ()

    def _bearable(self, queue: L) -> int:
        """How much ``queue`` may hold: the hard limit and, if its sender was told a window, what that has grown to."""
        carried: int = queue.other.bytes - queue.queued_bytes
        more: int = min(queue.target.window_bytes, _WINDOW_GROWTH * carried)
        return self._limits.queue_hard_bytes + max(0, more)

    def _largest_first(self, now: float) -> Iterator[L]:
        """All queues, by receiver: first the largest receiver of the group with the most waiting bytes, then the next."""
        for receiver in largest_first({each: each.queued_to * _weight(each, now) for each in self._waiting}):
            yield from _ranked(receiver.waiting, _sender, now)

    # --- too long --------------------------------------------------------------------------------------------------

    def limit_time(self, queue: L, now: float) -> None:
        """Start the timeout of a slow consumer for ``queue``, which is too long or whose transport is closed."""
        # Drains of any queue of the receiver count: on a slow network each queue waits long for its turn.
        queue.limited_at = queue.member.drains
        self._stuck[queue] = now + self._limits.slow_consumer_timeout_s
        self._stuck.move_to_end(queue)

    def next_timeout(self) -> float | None:
        """The earliest time at which :meth:`expired` may give a queue, or ``None``."""
        if not self._waiting:  # then no queue is stuck either
            return None
        times = [next(iter(each.values())) for each in (self._stuck, self._waiting) if each]
        return min(times) if times else None

    def expired(self, now: float) -> list[L]:
        """The queues whose receiver took nothing for too long."""
        limits = self._limits
        found: dict[L, None] = {}
        while self._stuck:
            queue, deadline = next(iter(self._stuck.items()))
            if deadline > now:
                break
            del self._stuck[queue]
            is_over = queue.state is LegState.CLOSED
            if queue.queued_bytes <= (0 if is_over else limits.queue_soft_bytes):
                continue
            if queue.limited_at != queue.member.drains:
                self.limit_time(queue, now)
            else:
                found[queue] = None
        for _ in range(len(self._waiting)):  # each once, however short the timeout is
            member, deadline = next(iter(self._waiting.items()))
            if deadline > now:
                break
            if member.progressed:
                member.progressed = False
            else:
                found.update(dict.fromkeys(member.waiting))
            self._waiting[member] = now + limits.queue_stall_timeout_s
            self._waiting.move_to_end(member)
        return list(found)


def _weight(receiver: Member[Any], now: float) -> int:
    return _STALLED_WEIGHT if now - receiver.took_at >= _STALLED_S else 1


def _ranked(queues: Collection[L], end: Callable[[Leg[Any]], Member[Any]], now: float) -> list[L]:
    """``queues``: the largest group first, within it the largest connection, within that the longest queue.

    ``end`` gives the connection that a queue counts for: its sender or its receiver.
    """
    loads = {queue: queue.queued_bytes * _weight(queue.member, now) for queue in queues}
    groups: Counter[str] = Counter()
    members: Counter[Member[Any]] = Counter()
    for queue, load in loads.items():
        member = end(queue)
        groups[member.group] += load
        members[member] += load

    def rank(queue: L) -> tuple[int, int, int]:
        member = end(queue)
        return groups[member.group], members[member], loads[queue]

    return sorted(queues, key=rank, reverse=True)
