"""Where discovery keeps entries: the rules all stores share, the store in memory, and :func:`open_store`.

Rules (protocol notes, section 8.4, D27, D31, D32): the first entry of a key has sequence 0, each later one the
sequence plus 1 and a later timestamp. An entry with a server half expires unless it is posted again in time, because a
relay that is gone cannot say so. What an expired entry leaves behind is a tombstone, its sequence and timestamp: the
next entry of that key must continue from there, so that nobody can bring an old one back.
"""

from __future__ import annotations

import random as stdlib_random
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry, check_iteration, next_sequence
from dmsg.errors import ConfigError, DiscoveryError, DiscoveryUnavailable, EntryNotFound, NonZeroSequence, StoreFull
from dmsg.interfaces import IEntryStore, IRankedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

NS_PER_S: Final = 1_000_000_000
DAY_S: Final = 24 * 3600.0
#: Entries kept as they were read, and the largest of them in bytes: at most about 25 MiB.
CACHED_ENTRIES: Final = 4096
CACHED_BODY_BYTES: Final = 2048


class Random(Protocol):
    """The part of :class:`random.Random` that discovery uses."""

    def random(self) -> float:
        """A float in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """An integer in [0, stop)."""

    def sample(self, population: Sequence[Any], k: int) -> list[Any]:
        """``k`` different elements."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How long things are kept, in seconds, and how many.

    ``server_ttl_s``: an entry with a server half lives this long after it was posted; ``None`` means for ever (then
    relays that never post twice, as the reference's, stay listed). ``tombstone_ttl_s``: how long an expired key's
    sequence is remembered. ``entries`` and ``tombstones`` bound the store: keys cost a stranger nothing. When all
    places are taken, new keys are refused; the oldest tombstones go first.
    """

    server_ttl_s: float | None = 300.0
    tombstone_ttl_s: float = 30 * DAY_S
    entries: int = 1_000_000
    tombstones: int = 1_000_000

    def expires_ns(self, entry: Entry, now_ns: int) -> int | None:
        """When ``entry``, posted at ``now_ns``, expires (Unix nanoseconds); ``None`` for never."""
        if entry.server is None or self.server_ttl_s is None:
            return None
        return now_ns + int(self.server_ttl_s * NS_PER_S)

    @property
    def tombstone_ttl_ns(self) -> int:
        """``tombstone_ttl_s`` in nanoseconds."""
        return int(self.tombstone_ttl_s * NS_PER_S)


def check_first(entry: Entry) -> None:
    """Raise ``NonZeroSequence`` unless ``entry`` may be the first of its key."""
    if entry.sequence != 0:
        raise NonZeroSequence


def is_available(entry: Entry) -> bool:
    """Whether ``entry`` belongs among the available servers: relays with room that speak our protocol."""
    server = entry.server
    return server is not None and server.available_connections > 0 and not server.later


def expired(sequence: int, timestamp: int) -> EntryNotFound:
    """What ``get`` fails with for a key of which only this sequence and timestamp are remembered."""
    return EntryNotFound(next_sequence=next_sequence(sequence), after_timestamp=timestamp)


#: Lists of servers are asked for much more often than servers change. The key of the cache is the content itself, so it
#: cannot be out of date.
_known_entry: Final = lru_cache(maxsize=CACHED_ENTRIES)(Entry.parse)


def stored_entry(body: bytes) -> Entry:
    """An entry as a store wrote it; ``DiscoveryUnavailable`` if somebody else has been at it."""
    try:
        return _known_entry(body) if len(body) <= CACHED_BODY_BYTES else Entry.parse(body)
    except DiscoveryError as error:
        raise DiscoveryUnavailable(f"a stored entry is damaged ({error})") from None


def shielded(running: Deferred[T]) -> Deferred[T]:
    """A Deferred with the outcome of ``running`` that can be cancelled without stopping it.

    Somebody who asked for a write and went away must not leave half of it behind.
    """
    outer: Deferred[T] = Deferred()

    def finish(outcome: Any) -> None:
        if not outer.called:
            outer.callback(outcome)

    running.addBoth(finish)
    return outer


class _RandomSet:
    """A set of keys from which some can be drawn at random without walking through all of them."""

    __slots__ = ("_items", "_places")

    def __init__(self) -> None:
        self._items: list[PublicKey] = []
        self._places: dict[PublicKey, int] = {}

    def add(self, key: PublicKey) -> None:
        if key not in self._places:
            self._places[key] = len(self._items)
            self._items.append(key)

    def discard(self, key: PublicKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            last = self._items.pop()
            if last != key:
                self._items[place] = last
                self._places[last] = place

    def draw(self, count: int, random: Random) -> list[PublicKey]:
        return random.sample(self._items, min(count, len(self._items)))


@implementer(IRankedStore)
class MemoryStore:
    """Entries in this process only."""

    durable = False

    def __init__(self, *, limits: StoreLimits | None = None, random: Random | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._random: Random = random or stdlib_random.SystemRandom()
        self._entries: dict[PublicKey, Entry] = {}
        # Both in the order of their times, because every entry lives equally long.
        self._expiries: OrderedDict[PublicKey, int] = OrderedDict()
        self._tombstones: OrderedDict[PublicKey, tuple[int, int, int]] = OrderedDict()
        self._available = _RandomSet()

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        self._expire(now_ns)
        entry = self._entries.get(public_key)
        if entry is not None:
            return succeed(entry)
        tombstone = self._tombstones.get(public_key)
        return fail(EntryNotFound() if tombstone is None else expired(*tombstone[:2]))

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self.get(public_key, now_ns).addCallback(Entry.to_json)

    def put(self, entry: Entry, now_ns: int) -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        self._expire(now_ns)
        try:
            return succeed(self._put(entry, now_ns))
        except DiscoveryError as error:
            return fail(error)

    def _put(self, entry: Entry, now_ns: int) -> bool:
        key = entry.static
        old, tombstone = self._entries.get(key), self._tombstones.get(key)
        if old is not None:
            entry.check_iteration(old)
        elif tombstone is not None:
            check_iteration(entry.sequence, entry.timestamp, tombstone[0], tombstone[1])
        else:
            check_first(entry)
        if old is None and len(self._entries) >= self._limits.entries:
            raise StoreFull
        self._tombstones.pop(key, None)
        self._entries[key] = entry
        self._expiries.pop(key, None)
        expires_ns = self._limits.expires_ns(entry, now_ns)
        if expires_ns is not None:
            self._expiries[key] = expires_ns
        if is_available(entry):
            self._available.add(key)
        else:
            self._available.discard(key)
        return old is None and tombstone is None

    def _expire(self, now_ns: int) -> None:
        while self._expiries:
            key, expires_ns = next(iter(self._expiries.items()))
            if expires_ns > now_ns:
                break
            del self._expiries[key]
            entry = self._entries.pop(key)
            self._available.discard(key)
            self._tombstones[key] = (entry.sequence, entry.timestamp, now_ns + self._limits.tombstone_ttl_ns)
        while self._tombstones:
            key, (_, _, forget_ns) = next(iter(self._tombstones.items()))
            if forget_ns > now_ns and len(self._tombstones) <= self._limits.tombstones:
                break
            del self._tombstones[key]

    def available_servers(self, limit: int, now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        self._expire(now_ns)
        return succeed([self._entries[key] for key in self._available.draw(limit, self._random)])

    def available_keys(self, limit: int, now_ns: int) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        self._expire(now_ns)
        return succeed([key.raw for key in self._available.draw(limit, self._random)])

    def servers_of(self, keys: list[bytes], now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        self._expire(now_ns)
        found = (self._entries.get(PublicKey(key)) for key in keys)
        return succeed([entry for entry in found if entry is not None and is_available(entry)])

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return succeed(None)


def open_store(
    url: str, reactor: Any, *, limits: StoreLimits | None = None, random: Random | None = None
) -> IEntryStore:
    """The store ``url`` names: ``memory:``, ``sqlite:PATH`` or ``redis://[user:password@]host[:port][/db]``.

    A SQLite file is made if it is not there. Raises :class:`~dmsg.errors.ConfigError` for a URL that is none of these,
    a file that cannot be used, or a missing Redis client library. Redis itself need not be there yet.
    """
    scheme, _, rest = url.partition(":")
    if url == "memory:":
        return MemoryStore(limits=limits, random=random)
    if scheme == "sqlite" and rest:
        from dmsg.discovery.store_sqlite import SqliteStore

        return SqliteStore(rest, reactor, limits=limits, random=random)
    if scheme == "redis":
        try:
            parts = urlsplit(url)
            host, port, database = parts.hostname, parts.port or 6379, int(parts.path.strip("/") or 0)
        except ValueError as error:
            raise ConfigError("store", f"not a Redis URL ({error})") from None
        if not host or parts.query or parts.fragment or not 0 <= database < 1 << 16:
            raise ConfigError("store", "a Redis URL is redis://host:port/db")
        from dmsg.discovery.store_redis import RedisStore

        return RedisStore(
            host,
            port,
            database,
            reactor,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            limits=limits,
        )
    raise ConfigError("store", "a store is memory:, sqlite:PATH or redis://host:port/db")
