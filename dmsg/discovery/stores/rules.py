"""The rules that every store of entries follows. Pure except for the Deferreds.

Iterations (:ref:`spec-entry-checks`, :ref:`spec-entry-expiry`): the first entry of a key has sequence 0, each later one
the previous sequence plus 1 and a later timestamp. Entries expire unless they are posted again in time. An expired entry
leaves a tombstone with its sequence and timestamp: the next entry of that key must continue from there, so that an old
entry cannot be posted again.

Room (:ref:`spec-full-store`): keys cost a stranger nothing, so a store will be full one day. Entries are of a *kind*,
relays' or clients', and each kind has its own limits on rows and bytes. Each row counts for the *network* from which it was
last posted (:func:`dmsg.address.network_group`). In a full kind, expired rows are evicted first; then a row of the network
with the most bytes, or of the newcomer's own network if that has as many. In that network, rows never read go first, the
oldest first; then the row not read for the longest time. A newcomer is not refused, and a network that holds little loses
nothing to one that floods. Evicted entries leave tombstones, and tombstones are bounded by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from twisted.internet.defer import Deferred

from dmsg.address import address_group, network_group
from dmsg.discovery.entry import Entry, next_sequence, promises_security
from dmsg.discovery.errors import (
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    NonZeroSequence,
    RateLimitedByDiscovery,
)
from dmsg.discovery.stores.parsed_entries import ParsedEntries
from dmsg.sansio.rate import RateLimiterTable, check_limits, check_more_than_zero, check_rates

T = TypeVar("T")

NS_PER_S: Final = 1_000_000_000
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
#: The longest time to live, a hundred years: SQLite holds no times in nanoseconds that are centuries away.
TTL_LIMIT_S: Final = 36_525 * DAY_S
_HOUR_NS: Final = 3600 * NS_PER_S
#: Kinds of rows. A tombstone's is its entry's plus 2.
CLIENT: Final = 0
RELAY: Final = 1
TOMBSTONE: Final = 2
#: Bytes that a row counts for besides its JSON: its key, columns and places in indexes.
ROW_BYTES: Final = 256
#: Most reads that wait to be stored; how many are stored with one write, and how long they wait for that.
READ_MARKS: Final = 16_384
READ_MARKS_WRITTEN: Final = 1000
READ_MARKS_INTERVAL_NS: Final = 10 * NS_PER_S
#: Most entries that one put evicts, and most tombstones that are forgotten for a new one. A put never needs more than the longest
#: entry (16 KiB) has room for of the shortest; only when limits were lowered there is more to do, which would hold up all others.
EVICTED_AT_ONCE: Final = 64
FORGOTTEN_AT_ONCE: Final = 8
#: Groups whose rate of new keys is remembered.
_RATE_GROUPS: Final = 50_000


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of a store on times and numbers. A time to live of ``None`` means for ever, a rate of ``None`` no limit.

    Raises ``ValueError`` for a time to live of 0 or of more than :data:`TTL_LIMIT_S`, for a rate of 0, and for a burst or room
    for entries of less than 1.
    """

    #: How long an entry with a server half lives after it was posted, in seconds. Our servers post every minute, the
    #: reference's post once.
    server_ttl_s: float | None = 300.0
    #: The same for a client that promises end-to-end security, which only our clients do: they post every hour, so five posts
    #: in a row may fail.
    client_ttl_s: float | None = 6 * HOUR_S
    #: The same for any other client: the reference's clients post only when they connect to a relay or lose one.
    base_client_ttl_s: float | None = 30 * DAY_S
    #: How long the sequence of an entry that has expired is remembered, in seconds.
    tombstone_ttl_s: float = 30 * DAY_S
    #: Entries without a server half, and their bytes (their JSON and 256 bytes each). When one of the two limits is reached, an
    #: entry of the network with the most is evicted: entries never read first, then the one not read for the longest time.
    clients: int = 1_000_000
    client_bytes: int = 1024 * 1024 * 1024
    #: The same for entries with a server half: a flood of one kind does not touch the other.
    relays: int = 20_000
    relay_bytes: int = 64 * 1024 * 1024
    #: Tombstones of clients, and as many of relays. Above the limit, the oldest of the network with the most is forgotten.
    tombstones: int = 1_000_000
    #: New keys that are accepted from one address (IPv6: /64): per second in the long run, and at once. Room for a thousand
    #: clients behind one address that all start at the same time.
    new_keys_per_s: float | None = 0.5
    new_keys_burst: float = 1000.0
    #: The same for one network (IPv4: /24, IPv6: /48).
    network_new_keys_per_s: float | None = 2.0
    network_new_keys_burst: float = 4000.0

    def __post_init__(self) -> None:
        check_limits(self, "clients", "client_bytes", "relays", "relay_bytes")
        for name in ("server_ttl_s", "client_ttl_s", "base_client_ttl_s", "tombstone_ttl_s"):
            if (getattr(self, name) or 0.0) > TTL_LIMIT_S:
                raise ValueError(f"{name} must be at most 100 years")
        check_more_than_zero(self, "server_ttl_s", "client_ttl_s", "base_client_ttl_s")
        check_rates(self, "new_keys_per_s", "network_new_keys_per_s", off="none")

    def expires_ns(self, entry: Entry, now_ns: int) -> int | None:
        """When ``entry``, posted at ``now_ns``, expires (Unix nanoseconds); ``None`` for never.

        A stranger gains nothing by the version it writes: eviction ignores when an entry would expire.
        """
        if entry.server is not None:
            ttl_s = self.server_ttl_s
        else:
            ttl_s = self.client_ttl_s if promises_security(entry.version) else self.base_client_ttl_s
        return None if ttl_s is None else now_ns + int(ttl_s * NS_PER_S)

    @property
    def tombstone_ttl_ns(self) -> int:
        """``tombstone_ttl_s`` in nanoseconds."""
        return int(self.tombstone_ttl_s * NS_PER_S)

    def room(self, kind: int) -> tuple[int, int]:
        """The limits of ``kind``: number of entries, and their bytes."""
        return (self.relays, self.relay_bytes) if kind == RELAY else (self.clients, self.client_bytes)


def kind_of(entry: Entry) -> int:
    """:data:`RELAY` for an entry with a server half, else :data:`CLIENT`."""
    return CLIENT if entry.server is None else RELAY


def network_of(poster: str) -> str:
    """The network for which an entry posted from the address ``poster`` counts; all unknown addresses are one network."""
    return network_group(poster) if poster else ""


def hour_of(now_ns: int) -> int:
    """The hour of ``now_ns``, by which reads are dated: a read is stored once an hour, however often the key is read."""
    return max(1, now_ns // _HOUR_NS)


def check_first(entry: Entry) -> None:
    """Raise ``NonZeroSequence`` unless ``entry`` may be the first of its key."""
    if entry.sequence != 0:
        raise NonZeroSequence


def expired(sequence: int, timestamp: int) -> EntryNotFound:
    """The error of ``get`` for a key of which only this sequence and timestamp are remembered."""
    return EntryNotFound(next_sequence=next_sequence(sequence), after_timestamp=timestamp)


_parsed_entries: Final = ParsedEntries()


def stored_entry(body: bytes) -> Entry:
    """An entry as a store wrote it; ``DiscoveryUnavailable`` if another program has changed it."""
    try:
        return _parsed_entries.parse(body)
    except DiscoveryError as error:
        raise DiscoveryUnavailable(f"a stored entry is damaged ({error})") from None


class NewKeys:
    """Rate-limits the new keys of each address and each network.

    An entry is of a new key if its sequence is 0: known keys, expired ones included, are never limited here.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._by_address = _table(limits.new_keys_per_s, limits.new_keys_burst)
        self._by_network = _table(limits.network_new_keys_per_s, limits.network_new_keys_burst)

    def check(self, entry: Entry, poster: str, now_ns: int) -> None:
        """Raise ``RateLimitedByDiscovery`` if ``entry``, posted from the address ``poster``, is a new key too many."""
        if entry.sequence or not poster:
            return
        now_s = now_ns / NS_PER_S
        for table, group in ((self._by_address, address_group(poster)), (self._by_network, network_group(poster))):
            if table is not None and not table.take(group, now_s):
                raise RateLimitedByDiscovery("too many new keys")


def _table(rate_per_s: float | None, burst: float) -> RateLimiterTable[str] | None:
    return None if rate_per_s is None else RateLimiterTable(rate_per_s, burst, _RATE_GROUPS)


class Watchers:
    """Callables that are told of each put into a store, see :meth:`dmsg.interfaces.IWatchedStore.watch`."""

    def __init__(self) -> None:
        self._watching: list[Callable[[Entry, int], None]] = []

    def add(self, changed: Callable[[Entry, int], None]) -> None:
        """Tell ``changed`` from now on."""
        self._watching.append(changed)

    def tell(self, is_first: bool, entry: Entry, now_ns: int) -> bool:
        """``entry`` was put at ``now_ns``. Returns ``is_first``, so that this method can be a callback."""
        for changed in self._watching:
            changed(entry, now_ns)
        return is_first


class ReadMarks:
    """Keys that were read and whose rows do not say so yet: a read writes nothing, a later write stores the reads, too.

    Reads not stored when the process dies are forgotten, which only makes some entries look less read.
    """

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._taken_ns = 0

    def note(self, key: bytes, read_hour: int, now_ns: int) -> None:
        """``key`` was read; its row has ``read_hour`` as the hour of the last read."""
        if read_hour < hour_of(now_ns) and len(self._keys) < READ_MARKS:
            self._keys.add(key)

    def take(self, now_ns: int) -> list[bytes]:
        """Keys whose reads to store now: none, unless there are many or the last time was long ago."""
        waited = not 0 <= now_ns - self._taken_ns < READ_MARKS_INTERVAL_NS
        if not self._keys or not (waited or len(self._keys) >= READ_MARKS_WRITTEN):
            return []
        self._taken_ns = now_ns
        return [self._keys.pop() for _ in range(min(len(self._keys), READ_MARKS_WRITTEN))]


def shielded(running: Deferred[T]) -> Deferred[T]:
    """A Deferred with the outcome of ``running`` that can be cancelled without stopping it.

    A client that asks for a write and goes away must not leave half of it behind.
    """
    outer: Deferred[T] = Deferred()

    def finish(outcome: Any) -> None:
        if not outer.called:
            outer.callback(outcome)

    running.addBoth(finish)
    return outer
