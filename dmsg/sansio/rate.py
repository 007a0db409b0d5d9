"""Rate limits and bounded memories, which keep a stranger from using more than a fair share.

Pure: the time is always an argument, in seconds on any clock. A clock that jumps backwards does no harm: the jump
counts as no time at all. The package that enforces a limit declares its numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import fields
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def check_limits(limits: Any, *others: str) -> None:
    """Raise ``ValueError`` if a burst in ``limits`` (a dataclass), or one of the fields ``others``, is less than 1.

    A burst is a field with that word in its name.
    """
    for each in fields(limits):
        if ("burst" in each.name.split("_") or each.name in others) and not getattr(limits, each.name) >= 1:
            raise ValueError(f"{each.name} must be at least 1")


def check_more_than_zero(limits: Any, *names: str) -> None:
    """Raise ``ValueError`` if one of the fields ``names`` of ``limits`` is 0 or less; ``None`` is accepted."""
    for name in names:
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be more than 0")


def check_rates(limits: Any, *names: str, off: str = "") -> None:
    """Raise ``ValueError`` if one of the rates ``names`` of ``limits`` is 0 or less: once a burst was used up, nothing more would
    ever pass. ``None`` is accepted; ``off`` is how people write it."""
    for name in names:
        rate = getattr(limits, name)
        if rate is not None and not rate > 0:
            instead = f", or {off} for no limit" if off else ""
            raise ValueError(f"{name} must be more than 0{instead}: with 0 nothing would pass after the first burst")


class TokenBucket:
    """Lets ``rate_per_s`` events a second pass in the long run, and at most ``burst`` at once.

    A new bucket is full. Over any span of ``t`` seconds at most ``burst + rate_per_s * t`` are let through.
    """

    __slots__ = ("_tokens", "_updated", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        """Make a full bucket at the time ``now``; ``ValueError`` unless rate >= 0 and burst > 0."""
        if not (rate_per_s >= 0 and burst > 0):
            raise ValueError("a token bucket needs a rate of at least 0 and a positive burst")
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._tokens = float(burst)
        self._updated = now

    def _refill(self, now: float) -> float:
        elapsed = now - self._updated
        # After a jump backwards the count goes on from the new time. Waiting for the old time could stop a connection for
        # as long as the clock was set back.
        self._updated = now
        if elapsed > 0:
            self._tokens = min(self.burst, self._tokens + elapsed * self.rate_per_s)
        return self._tokens

    def take(self, now: float, n: float = 1, *, keep: float = 0) -> bool:
        """Take ``n`` tokens if they are there: ``True`` lets the event pass, ``False`` takes nothing.

        More than ``burst`` at once never passes. ``keep`` tokens must be left over, so that callers with a smaller ``keep``
        come first when tokens are short.
        """
        if n + keep > self._refill(now):
            return False
        self._tokens -= n
        return True

    def has(self, now: float, n: float = 1, *, keep: float = 0) -> bool:
        """Whether :meth:`take` would succeed."""
        return n + keep <= self._refill(now)

    def give_back(self, n: float = 1) -> None:
        """Give back ``n`` tokens that were taken for an event that turned out to cost nothing."""
        self._tokens = min(self.burst, self._tokens + n)

    def is_full(self, now: float) -> bool:
        """Whether this bucket is as full as a new one."""
        return self._tokens + max(0.0, now - self._updated) * self.rate_per_s >= self.burst

    def wait_s(self, now: float, n: float = 1) -> float:
        """Seconds until ``take(n)`` can succeed: 0.0 when it would now, infinity when it never will."""
        missing = n - self._refill(now)
        if missing <= 0:
            return 0.0
        if n > self.burst or self.rate_per_s == 0:
            return float("inf")
        return missing / self.rate_per_s


class RecentSet(Generic[T]):
    """The last ``capacity`` different items added; the oldest is evicted when a new item needs its place.

    Adding an item that is there already makes it the newest. An item takes some 110 bytes besides its own.
    """

    __slots__ = ("_items", "capacity")

    def __init__(self, capacity: int) -> None:
        """Make an empty set; ``ValueError`` unless ``capacity`` is at least 1."""
        if capacity < 1:
            raise ValueError("a recent set holds at least one thing")
        self.capacity = capacity
        # Not a dict: finding its first key takes time for each place already freed in front of it.
        self._items: OrderedDict[T, None] = OrderedDict()

    def add(self, item: T) -> None:
        """Remember ``item`` as the newest."""
        self._items[item] = None
        self._items.move_to_end(item)
        if len(self._items) > self.capacity:
            self._items.popitem(last=False)

    def discard(self, item: T) -> None:
        """Forget ``item``; silent when it is not there."""
        self._items.pop(item, None)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)


class RecentIds:
    """At least the last :attr:`CAPACITY` different ids of 16 bits that were added, and at most twice as many.

    Used for ids of transports that ended a moment ago: frames that were on their way then are no offence. The ids are kept
    as bits, in two generations; when the newer generation holds ``CAPACITY`` ids, the older one is forgotten. Consecutive ids
    take a few hundred bytes, any other ids at most 20 KB; a set of numbers would take 450 KB.
    """

    #: Ids in a generation. One connection may end some 700 transports a second, and late frames come within seconds.
    CAPACITY: Final = 4_096
    #: A page has the bits of this many neighbouring ids: 512 bytes.
    _PAGE_IDS: Final = 4_096

    __slots__ = ("_count", "_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[int, bytearray] = {}
        self._older: dict[int, bytearray] = {}
        self._count = 0  # ids in the newer generation

    def add(self, item: int) -> None:
        """Remember ``item``, 0 to 65,535."""
        number, at = divmod(item, self._PAGE_IDS)
        bit = 1 << (at & 7)
        page = self._newer.get(number)
        if page is not None and page[at >> 3] & bit:
            return
        if self._count == self.CAPACITY:
            self._older, self._newer = self._newer, {}
            self._count = 0
            page = None
        if page is None:
            page = self._newer[number] = bytearray(self._PAGE_IDS // 8)
        page[at >> 3] |= bit
        self._count += 1

    def discard(self, item: int) -> None:
        """Forget ``item``; silent when it is not there."""
        number, at = divmod(item, self._PAGE_IDS)
        bit = 1 << (at & 7)
        page = self._newer.get(number)
        if page is not None and page[at >> 3] & bit:
            page[at >> 3] ^= bit
            self._count -= 1
        page = self._older.get(number)
        if page is not None and page[at >> 3] & bit:
            page[at >> 3] ^= bit

    def __contains__(self, item: int) -> bool:
        number, at = divmod(item, self._PAGE_IDS)
        for pages in (self._newer, self._older):
            page = pages.get(number)
            if page is not None and page[at >> 3] & 1 << (at & 7):
                return True
        return False


class RateLimiterTable(Generic[T]):
    """One token bucket for each key (an address, a public key), in bounded memory.

    At most ``capacity`` buckets are kept; the least recently used one is evicted, and its key starts again with a full
    burst. So a program with more than ``capacity`` keys gets ``burst`` for each: where keys cost nothing, a second limit must
    cover all of them together. A full bucket is as good as none, so each new key makes the table forget up to two full ones:
    its size follows the number of keys of the last ``burst / rate_per_s`` seconds.
    """

    __slots__ = ("_buckets", "burst", "capacity", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, capacity: int) -> None:
        """Make an empty table; ``ValueError`` for numbers :class:`TokenBucket` refuses or a capacity below 1."""
        TokenBucket(rate_per_s, burst, 0.0)
        if capacity < 1:
            raise ValueError("a rate limiter table holds at least one bucket")
        self.rate_per_s = rate_per_s
        self.burst = burst
        self.capacity = capacity
        self._buckets: OrderedDict[T, TokenBucket] = OrderedDict()

    def take(self, key: T, now: float, n: float = 1) -> bool:
        """Take ``n`` tokens from the bucket of ``key``: ``True`` lets the event pass, ``False`` takes nothing."""
        return self.bucket(key, now).take(now, n)

    def bucket(self, key: T, now: float) -> TokenBucket:
        """The bucket of ``key``, a new full one if there is none; this counts as a use."""
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[key] = TokenBucket(self.rate_per_s, self.burst, now)
            if len(self._buckets) > self.capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket

    def _forget_full(self, now: float) -> None:
        """Forget the two least recently used buckets if they are full: two, because one bucket is added at a time."""
        for _ in range(2):
            oldest = next(iter(self._buckets), None)
            if oldest is None or not self._buckets[oldest].is_full(now):
                return
            del self._buckets[oldest]

    def give_back(self, key: T, n: float = 1) -> None:
        """Give ``n`` tokens back to the bucket of ``key``; silent when there is none."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.give_back(n)

    def wait_s(self, key: T, now: float, n: float = 1) -> float:
        """Seconds until ``take(key, now, n)`` can succeed: 0.0 when it would now, infinity when it never will."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(now, n)

    def forget(self, key: T) -> None:
        """Drop the bucket of ``key``; silent when there is none."""
        self._buckets.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._buckets

    def __len__(self) -> int:
        return len(self._buckets)


class FairBucket(Generic[T]):
    """A token bucket that many sources share: the fewer tokens are left, the fewer a source may have taken lately.

    The tokens that a source took are its debt; all debts are paid back at the rate of the bucket, in equal parts. A source
    passes while its debt is less than the tokens left. So a single source gets half the burst at once and the whole rate;
    ``n`` sources that ask without end get equal parts of the rate, and always leave ``burst / (n + 1)`` tokens to a source
    that comes later. Sources must cost something, or a stranger has as many as it likes.

    Memory is bounded without forgetting a debt: only debts are remembered, until they are paid back.
    """

    __slots__ = ("_debts", "_paid", "_pruned", "_tokens", "_updated", "burst", "rate_per_s")

    #: Seconds between two sweeps that forget paid debts.
    _PRUNE_S = 0.25

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        """Make a full bucket at the time ``now``; ``ValueError`` for numbers :class:`TokenBucket` refuses."""
        TokenBucket(rate_per_s, burst, now)
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._tokens = float(burst)
        self._updated = self._pruned = now
        #: Source -> the value of ``_paid`` at which its debt is paid; ``_paid`` is what each source has paid so far.
        self._debts: dict[T, float] = {}
        self._paid = 0.0

    def take(self, source: T, now: float, *, keep: float = 0) -> bool:
        """Take a token for ``source``: ``True`` lets the event pass, ``False`` takes nothing.

        ``keep`` tokens do not count as left, so that callers with a smaller ``keep`` come first when tokens are short.
        """
        self._refill(now)
        paid, mark, left = self._paid, self._debts.get(source, 0.0), self._tokens - keep
        debt = mark - paid if mark > paid else 0.0
        if left < 1 or debt >= left:
            return False
        self._tokens -= 1
        self._debts[source] = paid + debt + 1
        return True

    def idle(self, now: float) -> bool:
        """Whether this bucket is full like a new one, so that it can be forgotten."""
        self._refill(now)
        return self._tokens >= self.burst

    def _refill(self, now: float) -> None:
        elapsed = now - self._updated
        if elapsed:
            self._updated = now
        if elapsed > 0:  # a clock that jumps backwards earns nothing
            earned = elapsed * self.rate_per_s
            self._tokens = min(self.burst, self._tokens + earned)
            self._paid += earned / (len(self._debts) or 1)
        if not 0 <= now - self._pruned < self._PRUNE_S:
            self._pruned = now
            self._debts = {source: mark for source, mark in self._debts.items() if mark > self._paid}

    def __len__(self) -> int:
        return len(self._debts)
