"""Rate limits and bounded memories, compared with the simplest models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from dmsg.mux.core.window import AckGate, SendWindow
from dmsg.sansio.buffer import ByteQueue
from dmsg.sansio.rate import FairBucket, RateLimiterTable, RecentIds, RecentSet, TokenBucket
from dmsg.sansio.tally import Tally
from fuzz.choices import Choices
from fuzz.oracles import outcome

#: Seconds after which paid debts are forgotten; until then their sources count among those that pay.
_PRUNED_S = 0.25
#: Rounding error of sums of shares, once a share was not a half, a quarter and so on.
_ROUNDED = 1e-9


def one_input(data: bytes) -> None:
    """The first byte chooses one of them; the rest are its operations."""
    choices = Choices(data)
    (_buckets, _fair, _recent, _tally, _queue, _windows, _table)[choices.byte() % 7](choices)


class _Level:
    """The level of a bucket, by the simplest rule. Rates and steps of inputs are chosen so that no sum is rounded."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.tokens, self.at = rate, burst, float(burst), now

    def look(self, now: float) -> float:
        """The level at ``now``, where the clock may show anything."""
        self.tokens = self.then(now)
        self.at = now
        return self.tokens

    def then(self, now: float) -> float:
        """The future level at ``now``."""
        return min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate)

    def take(self, now: float, number: float, keep: float = 0.0) -> bool:
        """Take ``number`` if ``keep`` are left."""
        taken = self.look(now) >= number + keep
        self.tokens -= number if taken else 0
        return taken

    def give_back(self, number: float) -> None:
        """Put ``number`` in again."""
        self.tokens = min(self.burst, self.tokens + number)

    def wait_s(self, now: float, number: float) -> float:
        """The time until ``number`` tokens are there."""
        missing = number - self.look(now)
        if missing <= 0:
            return 0.0
        return missing / self.rate if number <= self.burst and self.rate else math.inf


def _buckets(choices: Choices) -> None:
    rate, burst = choices.byte() / 4, 1 + choices.byte()
    _check_refused(rate - 1, burst - 1)
    bucket, level = TokenBucket(rate, burst, 0.0), _Level(rate, burst, 0.0)
    # A bucket that gets tokens back, and one that has to keep some.
    other, other_level = TokenBucket(rate, burst, 0.0), _Level(rate, burst, 0.0)
    now = 0.0
    while choices.left:
        now += (choices.byte() - 32) / 8
        byte = choices.byte()
        number, keep = byte / 2, float(byte % 5)
        assert bucket.is_full(now) == (level.then(now) >= burst)
        could, wait_s = bucket.has(now, number), bucket.wait_s(now, number)
        assert could == (wait_s == 0) and wait_s == level.wait_s(now, number)
        assert bucket.has(now, number, keep=keep) == (number + keep <= level.tokens)
        assert bucket.take(now, number) is could is level.take(now, number)
        could = other.take(now, number, keep=keep)
        assert could is other_level.take(now, number, keep)
        if not byte % 3:
            other.give_back(number)
            other_level.give_back(number)
        assert other.wait_s(now, number) == other_level.wait_s(now, number)


def _check_refused(rate: float, burst: float) -> None:
    """A bucket, a table and a fair bucket refuse numbers with which nothing would pass."""
    wanted = "value" if rate >= 0 and burst > 0 else "error"
    assert outcome(lambda: TokenBucket(rate, burst, 0.0), ValueError)[0] == wanted
    assert outcome(lambda: FairBucket(rate, burst, 0.0), ValueError)[0] == wanted
    assert outcome(lambda: RateLimiterTable(rate, burst, 1), ValueError)[0] == wanted
    capacity = int(burst) % 3
    wanted = "value" if capacity else "error"
    assert outcome(lambda: RecentSet(capacity), ValueError)[0] == wanted
    assert outcome(lambda: RateLimiterTable(1.0, 1.0, capacity), ValueError)[0] == wanted


def _fair(choices: Choices) -> None:
    rate, burst = 1.0 + choices.byte() / 8, 4 + choices.byte() % 64
    bucket: FairBucket[int] = FairBucket(rate, burst, 0.0)
    level = _Level(rate, burst, 0.0)
    debts: dict[int, float] = {}  # what each has to pay; below 0 when it has paid more, until that is looked at
    now = forwards = pruned = rounded = 0.0
    taken = unsure = 0
    while choices.left:
        step = (choices.byte() - 8) / 64
        now += step
        forwards += max(0.0, step)
        source = choices.byte()
        if step > 0:
            payers = len(bucket) or 1
            if payers & (payers - 1):
                rounded = _ROUNDED
            share = step * rate / payers
            debts = {one: debt - share for one, debt in debts.items()}
        if not 0 <= now - pruned < _PRUNED_S:
            pruned = now
            debts = {one: debt for one, debt in debts.items() if debt > -rounded}
            unsure = sum(debt <= rounded for debt in debts.values())
        idle = level.look(now) >= burst
        assert bucket.idle(now) is idle
        debt = max(0.0, debts.get(source, 0.0))
        passed = bucket.take(source, now)
        assert passed or level.tokens < 1 or debt >= level.tokens - rounded
        assert not passed or (level.tokens >= 1 and debt < level.tokens + rounded)
        if passed:
            level.take(now, 1)
            debts[source] = debt + 1
            taken += 1
        assert taken <= burst + rate * forwards + 1e-6
        assert len(debts) - unsure <= len(bucket) <= len(debts) and len(bucket) <= 3 * burst + 1
    assert bucket.take(-1, now + 1_000)  # a newcomer has its turn once all is paid
    assert len(bucket) == 1 and not bucket.idle(now + 1_000)


def _recent(choices: Choices) -> None:
    capacity = 1 + choices.byte() % 8
    recent: RecentSet[int] = RecentSet(capacity)
    model: list[int] = []
    ids = _IDS[capacity]()
    generations: tuple[set[int], set[int]] = set(), set()  # the newer, the older
    last: list[int] = []
    while choices.left:
        item = choices.byte() % 16
        number = item * 4_369  # 0 to 65,535, on different pages
        if choices.flag():
            recent.discard(item)
            model = [one for one in model if one != item]
            ids.discard(number)
            for generation in generations:
                generation.discard(item)
            last = [one for one in last if one != item]
        else:
            recent.add(item)
            model = [*(one for one in model if one != item), item][-capacity:]
            ids.add(number)
            if item not in generations[0] and len(generations[0]) == capacity:
                generations = set(), generations[0]
            generations[0].add(item)
            last = [*(one for one in last if one != item), item][-capacity:]
        assert len(recent) == len(model) and all((one in recent) == (one in model) for one in range(16))
        assert number in ids or item not in last
        assert not last or last[0] * 4_369 in ids
    known = {one for one in range(16) if one * 4_369 in ids}
    assert known == generations[0] | generations[1] and known.issuperset(last) and len(known) <= 2 * capacity
    assert not any(one * 4_369 + beside in ids for one in range(16) for beside in (-1, 1))


def _ids_of(capacity: int) -> type[RecentIds]:
    return type("Ids", (RecentIds,), {"CAPACITY": capacity, "__slots__": ()})


_IDS = {capacity: _ids_of(capacity) for capacity in range(1, 9)}


def _tally(choices: Choices) -> None:
    tally: Tally[int] = Tally()
    model: Counter[int] = Counter()
    while choices.left:
        key = choices.byte() % 8
        if choices.flag() and model[key]:
            tally.remove(key)
            model[key] -= 1
        else:
            tally.add(key)
            model[key] += 1
        assert tally.most == max(model.values()) and len(tally) == sum(one > 0 for one in model.values())
        assert all(tally[one] == model[one] for one in range(8))
        assert not tally.most or model[tally.largest()] == tally.most


def _queue(choices: Choices) -> None:
    queue, model = ByteQueue(), b""
    while choices.left:
        if choices.flag():
            data = choices.chunk(20)
            queue.append(data)
            model += data
        else:
            size = choices.byte() % 32
            assert queue.take(size) == model[:size]
            model = model[size:]
        assert queue.size == len(queue) == len(model) and bool(queue) == bool(model)


def _windows(choices: Choices) -> None:
    window, gate = SendWindow(1_000, choices.below(0x10000)), AckGate()
    sent: dict[int, int] = {}
    held: list[int] = []
    unread = 0
    while choices.left:
        match choices.below(4):
            case 0 if window.room_bytes:
                size = choices.byte() % (window.room_bytes + 1)
                sequence = window.send(size)
                assert sequence not in sent
                sent[sequence] = size
            case 1:
                sequence = choices.below(0x10000)
                known = list(sent)
                if known and sequence & 1:
                    sequence = known[sequence % len(known)]
                assert window.acknowledge(sequence) == sent.pop(sequence, 0)
            case 2:
                size = choices.below(0x8000)
                unread += size
                now = gate.arrived(len(held), size)
                assert now == (unread <= AckGate.THRESHOLD_BYTES)
                held += [] if now else [len(held)]
            case _:
                size = choices.below(0x10000) % (unread + 1)
                unread -= size
                released = gate.consumed(size)
                assert released == (held if unread < AckGate.THRESHOLD_BYTES else [])
                held = [] if released else held
        assert window.outstanding_bytes == sum(sent.values()) and window.idle == (not sent)
        assert gate.unread_bytes == unread and gate.held == held


def _table(choices: Choices) -> None:
    """The upper bits of the byte that names a key choose the operation."""
    table: RateLimiterTable[int] = RateLimiterTable(1.0, 4.0, 3)
    levels: dict[int, _Level] = {}  # the one asked for last stands last
    now = 0.0
    while choices.left:
        now += choices.byte() / 64
        what, key = divmod(choices.byte(), 8)
        number = 1.0 + what % 4
        match what // 4:
            case 1 | 2:
                table.give_back(key, number)
                if key in levels:
                    levels[key].give_back(number)
            case 3:
                table.forget(key)
                levels.pop(key, None)
            case _:
                level = levels.pop(key, None)
                if level is None:
                    _forget_full(levels, now)
                    level = _Level(1.0, 4.0, now)
                levels[key] = level
                if len(levels) > 3:
                    del levels[next(iter(levels))]
                assert table.take(key, now, number) is level.take(now, number)
                assert key in table and len(table) >= 1
        one = (key + what) % 8
        assert len(table) == len(levels) <= 3 and (one in table) == (one in levels)
        assert table.wait_s(one, now, number) == (levels[one].wait_s(now, number) if one in levels else 0.0)


def _forget_full(levels: dict[int, _Level], now: float) -> None:
    """For each newcomer, the two least recently used buckets are forgotten if they are full again."""
    for one in list(levels)[:2]:
        if levels[one].then(now) < levels[one].burst:
            return
        del levels[one]


def seeds() -> Iterator[bytes]:
    """A few operations of each; buckets of a table that are given back to and forgotten."""
    for which in range(7):
        yield bytes((which, 8, 16)) + bytes(range(64))
        yield bytes((which, 255, 1)) + b"\x20\x01\x40\x03" * 16
        yield bytes((which,)) + b"\x00\xff\xff\x01\x80" * 20
    yield b"\x06" + b"\x00\x01" * 5 + b"\x00\x61" + b"\x00\x01" * 5 + b"\x00\x21" * 2 + b"\x00\x01\x10\x13" * 3
    yield b"\x06" + b"".join(b"\x00" + bytes((key,)) for key in (1, 2, 3, 1, 4, 1, 2)) + b"\x80\x05\xff\x06"
