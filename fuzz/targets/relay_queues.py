"""Queues of a relay for receivers whose network takes nothing: counts, limits, victims, and time."""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dmsg.serving.limits import ServingLimits
from dmsg.serving.loads import stale
from dmsg.serving.member import Leg, LegState, Member
from dmsg.serving.queues import Queues
from fuzz.choices import Choices
from fuzz.oracles import KEYS

_LIMITS = ServingLimits(
    queue_soft_bytes=36_000,
    queue_hard_bytes=60_000,
    queued_per_connection_bytes=120_000,
    queued_total_bytes=200_000,
    slow_consumer_timeout_s=10.0,
    queue_stall_timeout_s=30.0,
)
_GROUPS = ("192.0.2.1", "192.0.2.1", "192.0.2.2", "", "192.0.2.2")
_STALE_BYTES = 20_000
_STALLED_S = 1.0
_STALLED_WEIGHT = 4
#: Bytes that a receiver gets at a time, and each transport per turn; plus one frame.
_DRAIN_BYTES, _QUANTUM_BYTES = 64 * 1024, 16 * 1024
_FRAME_BYTES = 4_096
#: The numbers of the queue and of the frame, and the length of the rest, to recognise each frame.
_HEAD = struct.Struct("!BIH")


class _Relay:
    """The part of a switch that members need."""

    limits = _LIMITS

    def __init__(self) -> None:
        self.dirty: list[Any] = []

    def route(self, member: Any, data: bytes, now: float) -> Sequence[object]:
        """Nothing is received."""
        return ()

    def drain(self, member: Any) -> None:
        """The target drains."""


class _World:
    """The queues with their legs, and a model of the content of each."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queues: Queues[Any] = Queues(_LIMITS)
        relay = _Relay()
        self.members: list[Any] = [
            Member(relay, KEYS[number].public_key, self.now, group=group) for number, group in enumerate(_GROUPS)
        ]
        self.legs: list[Any] = []
        self.put: dict[Any, deque[bytes]] = {}
        self.sizes: dict[Any, int] = {}
        self.frames = 0
        self.unfinished: set[Any] = set()  # members that had a part of a frame at the last look
        self.took: dict[Any, float] = {}  # of receivers: when they last took something, or began to have something
        for number in range(10):
            self._join(number, (number + 1 + number // 5) % 5)

    def _join(self, asking: int, asked: int) -> None:
        one: Any = Leg(self.members[asking % 5], len(self.legs), initiator=True)
        other: Any = Leg(self.members[asked], len(self.legs), initiator=False)
        one.join(other, self.now)
        one.open_both(self.now)
        self.legs += one, other
        for leg in (one, other):
            self.put[leg] = deque()
            self.sizes[leg] = 0

    def add(self, number: int, size: int) -> None:
        """Queue a frame for a receiver that takes nothing, as :meth:`dmsg.serving.switch.Switch._enqueue` does."""
        queue = self.legs[number]
        self.frames += 1
        frame = _HEAD.pack(number, self.frames, size) + bytes(size)
        queue.other.bytes += len(frame)
        if not self._waiting(queue.member):
            self.took[queue.member] = self.now
        self.queues.put(queue, frame, self.now)
        self.put[queue].append(frame)
        self.sizes[queue] += len(frame)
        while excess := self.queues.excess(queue, self.now):
            self._check_excess(queue, excess)
            for one in excess:
                self.drop(one)
        self._check_limits(queue)

    def drop(self, queue: Any) -> None:
        """Forget the content of a queue."""
        self.queues.drop(queue)
        self.dropped(queue)

    def dropped(self, queue: Any) -> None:
        """A queue is empty now."""
        self.put[queue].clear()
        self.sizes[queue] = 0

    def drain(self, member: Any) -> None:
        """The receiver's network takes something: whole frames of each transport, in the order in which they came."""
        before = {queue: self.sizes[queue] for queue in self._waiting(member)}
        self.queues.drain(member, self.now)
        self.took[member] = self.now
        out, at = b"".join(member.out), 0
        member.out.clear()
        while at < len(out):
            number, _, size = _HEAD.unpack_from(out, at)
            queue = self.legs[number]
            frame = self.put[queue].popleft()
            assert out.startswith(frame, at)
            at += len(frame)
            self.sizes[queue] -= len(frame)
        assert len(out) < _DRAIN_BYTES + _QUANTUM_BYTES + _FRAME_BYTES
        taken = {queue: size - self.sizes[queue] for queue, size in before.items()}
        assert all(taken.values()), "a transport had no turn"
        for queue, size in taken.items():
            if self.put[queue]:
                assert len(out) >= _DRAIN_BYTES and max(taken.values()) <= size + _QUANTUM_BYTES + 4 * _FRAME_BYTES

    def _waiting(self, member: Any) -> list[Any]:
        return [leg for leg in self.legs if leg.member is member and self.put[leg]]

    def _size(self, legs: Iterable[Any]) -> int:
        return sum([self.sizes[leg] for leg in legs])

    def _bearable(self, queue: Any) -> int:
        carried: int = queue.other.bytes - self._size([queue])
        window: int = queue.target.window_bytes
        return _LIMITS.queue_hard_bytes + max(0, min(window, 8 * carried))

    def _load(self, queue: Any) -> int:
        stalled = self.now - self.took[queue.member] >= _STALLED_S
        return self._size([queue]) * (_STALLED_WEIGHT if stalled else 1)

    def _check_excess(self, queue: Any, found: Sequence[Any]) -> None:
        """Above a limit, queues of the largest group are dropped first, and no more than needed."""
        if self._size([queue]) > self._bearable(queue):
            assert list(found) == [queue]
            return
        to, of, total = self._sizes(queue)
        limit = _LIMITS.queued_per_connection_bytes
        if to > limit:
            self._check_first(found, self._waiting(queue.member), "target", to - limit + limit // 64)
        elif of > limit:
            among = [leg for leg in self.legs if leg.target is queue.target and self.put[leg]]
            self._check_first(found, among, "member", of - limit + limit // 64)
        else:
            limit = _LIMITS.queued_total_bytes
            assert total > limit
            freed, left, members = total - limit + limit // 64, list(found), set(self.members)
            while left:  # one receiver after the other, as long as needed
                receiver = left[0].member
                assert freed > 0 and receiver in self._heaviest(members)
                members.remove(receiver)
                among = self._waiting(receiver)
                self._check_first(left[: len(among)] if freed > self._size(among) else left, among, "target", freed)
                left = left[len(among) :]
                freed -= self._size(among)
            assert freed <= 0

    def _check_first(self, found: Sequence[Any], among: Sequence[Any], end: str, freed: int) -> None:
        groups: Counter[str] = Counter()
        for leg in among:
            groups[getattr(leg, end).group] += self._load(leg)
        assert groups[getattr(found[0], end).group] == max(groups.values())
        assert len(set(found)) == len(found) and set(found) <= set(among)
        assert self._size(found[:-1]) < freed <= self._size(found) or set(found) == set(among)

    def _heaviest(self, members: Iterable[Any]) -> list[Any]:
        loads = {member: sum(map(self._load, self._waiting(member))) for member in members}
        groups: Counter[str] = Counter()
        for member, load in loads.items():
            groups[member.group] += load
        most = max(groups.values())
        heavy = {member: load for member, load in loads.items() if groups[member.group] == most}
        return [member for member, load in heavy.items() if load == max(heavy.values())]

    def _sizes(self, queue: Any) -> tuple[int, int, int]:
        of = [leg for leg in self.legs if leg.target is queue.target]
        return self._size(self._waiting(queue.member)), self._size(of), self._size(self.legs)

    def _check_limits(self, queue: Any) -> None:
        to, of, total = self._sizes(queue)
        assert self._size([queue]) <= self._bearable(queue)
        assert to <= _LIMITS.queued_per_connection_bytes and of <= _LIMITS.queued_per_connection_bytes
        assert total <= _LIMITS.queued_total_bytes

    def expire(self) -> None:
        """Drop queues whose receiver took nothing for too long, and no others."""
        for queue in self.queues.expired(self.now):
            silent_s = self.now - self.took[queue.member]
            over = queue.state is LegState.CLOSED
            assert self.put[queue] and silent_s >= _LIMITS.slow_consumer_timeout_s
            stalled = silent_s >= _LIMITS.queue_stall_timeout_s
            assert stalled or over or self._size([queue]) > _LIMITS.queue_soft_bytes
            self.drop(queue)
        due = self.queues.next_timeout()
        assert due is None or due > self.now, "it is due again at once for ever"

    def look(self) -> None:
        """Partial frames that were there at the last check are limited; above the limit the largest group loses them."""
        loads = {member: len(member.tail) for member in self.members if member.tail and member in self.unfinished}
        self.unfinished = {member for member in self.members if member.tail}
        excess = sum(loads.values()) - _STALE_BYTES
        found = stale(self.members, _STALE_BYTES)
        assert bool(found) == (excess > 0)
        excess += _STALE_BYTES // 64
        for member in found:
            assert excess > 0
            groups: Counter[str] = Counter()
            for one, load in loads.items():
                groups[one.group] += load
            assert groups[member.group] == max(groups.values())
            assert loads[member] == max(load for one, load in loads.items() if one.group == member.group)
            excess -= loads.pop(member)
            member.tail = b""
        assert not found or excess <= 0

    def check(self, members: Iterable[Any]) -> None:
        """All counters are correct; as long as something waits, a check of it is scheduled."""
        assert self.queues.queued_bytes == self._size(self.legs)
        for leg in self.legs:
            assert leg.queued_bytes == self._size([leg]) and bool(leg.queue) == bool(self.put[leg])
        for member in members:
            waiting = self._waiting(member)
            feeding = {leg for leg in self.legs if leg.target is member and self.put[leg]}
            assert set(member.waiting) == set(waiting) and member.feeding == feeding
            assert member.queued_to == self._size(waiting) and member.queued_from == self._size(feeding)
        due = self.queues.next_timeout()
        assert (due is None) == (not self._size(self.legs))


def one_input(data: bytes) -> None:
    """Frames come and are taken, receivers drop out, transports close, time passes.

    No count exceeds its limit, the largest group pays for an excess, a receiver gets the queued frames in the order of each
    transport, and a receiver that takes nothing loses its queue exactly when its time is over.
    """
    choices = Choices(data)
    world = _World()
    for member in world.members:
        member.window_bytes = 20_000 * (choices.byte() % 4)
    for _ in range(120):
        if not choices.left:
            break
        operation = choices.byte()
        number = choices.byte() % len(world.legs)
        leg = world.legs[number]
        match operation % 8:
            case 0 | 1 | 2:
                if leg.state is LegState.OPEN:
                    world.add(number, (operation >> 3) * 128)
            case 3 if leg.state is LegState.OPEN:
                for size in range(1 + choices.byte() % 32):
                    world.add(number, 4_000 - size)
            case 4:
                world.drain(leg.member)
            case 5:
                world.now += choices.byte() / 4
                world.expire()
                world.look()
                leg.member.tail = bytes(number * 1_000)
            case 6 if operation & 8 and leg.state is LegState.OPEN:
                leg.state = leg.other.state = LegState.CLOSED  # its data waits for the receiver, and then for its time
                for one in (leg, leg.other):
                    if world.put[one]:
                        world.queues.limit_time(one, world.now)
            case 6:
                world.drop(leg)
            case _ if operation & 8:
                world.queues.drop_all(leg.member)
                for one in world._waiting(leg.member):
                    world.dropped(one)
            case _:
                world.now = max(world.now, world.queues.next_timeout() or 0.0)
                world.expire()
        world.check((leg.member, leg.target))
    world.check(world.members)
    for _ in range(4):
        world.now += _LIMITS.queue_stall_timeout_s
        world.expire()
    assert not world.queues.queued_bytes and world.queues.next_timeout() is None


def seeds() -> Iterator[bytes]:
    """One long queue; many of one sender and of one receiver; many of all; slow and silent receivers; transports that end."""
    plain, wide = b"\x00\x00\x00\x00\x00", b"\x03\x03\x03\x03\x03"
    for head in (plain, wide):
        yield head + b"\xf8\x00" * 20 + b"\x04\x00" + b"\xf8\x00" * 40
        yield head + b"\x03\x00\x0b" + b"\x05\x00\x28" * 2 + b"\x07\x00"
        yield head + b"\x03\x00\x0d" + b"\x05\x00\x18" + b"\x04\x00" + b"\x03\x00\x08" + b"\x07\x00" * 4
        yield head + b"\x03\x00\x0d" + b"\x03\x09\x0d" + b"\x04\x00" + b"\x05\x00\x28" + b"\x07\x00" * 4
        yield head + b"\x03\x00\x0d\x04\x00" + b"\x03\x00\x0e" * 2 + b"\x04\x00" + b"\x07\x00" * 4
        slow = b"\x03\x00\x0d\x04\x00" + b"\x03\x00\x0e" * 2
        yield head + slow + b"\x05\x00\x14\x04\x00" + b"\x07\x00" * 4
        yield head + b"\x00\x00\x10\x01" + b"\x05\x00\x78" + b"\x04\x00\x00\x00" + b"\x07\x00" * 6
        for frames in (b"\x02", b"\x05", b"\x0d"):
            yield head + b"".join(b"\x03" + bytes((leg,)) + frames for leg in range(20)) * 2
            yield head + b"".join(b"\x03" + bytes((leg,)) + frames + b"\x05\x00\x03" for leg in range(20)) * 2
            yield head + b"".join(b"\x03" + bytes((leg,)) + frames for leg in (0, 3, 9, 10, 17, 0, 3, 9, 10, 17, 1, 2))
            for first in range(5):
                one = [leg for leg in range(20) if (leg // 2 + leg % 2 * (1 + leg // 10)) % 5 == first]
                yield (
                    head
                    + b"".join(b"\x03" + bytes((leg,)) + frames for leg in one)
                    + b"\x04"
                    + bytes(one[:1])
                    + b"\x07\x00" * 5
                )
        yield head + b"\x03\x00\x06\x0e\x00\x05\x00\x28" + b"\x03\x02\x06\x0e\x02\x04\x02\x07\x00" * 2
        yield head + b"\x03\x02\x06\x03\x04\x06\x06\x02\x0f\x04" + b"\x00\x05\x0e\x05\x07\x00"
