"""Draws discovery's list of servers: at most so many, at random, by network first. Pure except for waiting.

:ref:`spec-server-list`. A host can have as many keys as it likes, so in a draw among keys the host with the most keys would
win. Addresses in different networks (/24, /48) cost something. So a list is drawn network by network, then relay by relay
within each, and no network gets more than :data:`NETWORK_LIMIT` places. With relay ranks, better ranked relays are more
likely, and relays without a rank share a fixed part of the list.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

from twisted.python.failure import Failure

from dmsg.address import network_group
from dmsg.discovery.entry import DMSG, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.ranks import RELAYS_LIMIT, Ranks, weight
from dmsg.discovery.relay_cache import RelayCache
from dmsg.discovery.stores.rules import NS_PER_S
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEntryStore, IRankedStore, IWatchedStore
from dmsg.sansio.jitter import RandomNumbers

T = TypeVar("T")

#: Most places of one network in an answer: an eighth of a full list, so that large operators appear, and it takes eight of
#: them to fill the list.
NETWORK_LIMIT: Final = 8
#: The part of a list for relays that the ranks in force do not name: enough for clients to find and measure a new relay,
#: too little for invented relays to be most of a client's list.
UNRANKED_PART: Final = 0.25
#: Without proofs, the number of servers read from the store for a draw.
SAMPLE_LIMIT: Final = 1024
#: The number of keys read from the store to find those that have a rank: as many as a document can name.
ROSTER_LIMIT: Final = RELAYS_LIMIT
#: A roster of more servers than this is reused for a while even when it has changed, because making one means reading all
#: servers.
CACHED_FROM: Final = 256
#: How long the store's answer is cached: changes by other processes show in lists that much later.
ROSTER_LIFETIME_NS: Final = NS_PER_S
#: Age of a roster from which one request makes it anew, while other requests use the old one.
ROSTER_RENEWED_NS: Final = 3 * ROSTER_LIFETIME_NS // 4
#: Addresses whose network is cached: computing it costs more than all other work on an entry here.
_KNOWN_ADDRESSES: Final = 4 * SAMPLE_LIMIT
#: A roster more than this many times as long as the draw is sampled by repeated draws, a shorter one is sorted.
_SPARSE: Final = 8


class Roster(Generic[T]):
    """Items (relays, networks) with weights, from which to draw again and again; without weights all are equal."""

    def __init__(self, things: Sequence[T], weights: Sequence[float] | None) -> None:
        self._things = things
        self._weights = weights
        self._sums = list(accumulate(weights or ()))

    def __len__(self) -> int:
        return len(self._things)

    def draw(self, count: int, random: RandomNumbers) -> list[T]:
        """At most ``count`` different items in the order in which they were drawn."""
        if self._weights is None:
            return random.sample(self._things, min(count, len(self._things)))
        if len(self._things) > _SPARSE * count:
            return self._one_by_one(count, random)
        # The k-th smallest of exponential waiting times is the k-th of a weighted draw without replacement
        # (Efraimidis and Spirakis).
        waits = [_wait(each, random) for each in self._weights]
        order = sorted(range(len(self._things)), key=waits.__getitem__)
        return [self._things[at] for at in order[:count]]

    def _one_by_one(self, count: int, random: RandomNumbers) -> list[T]:
        """The same distribution, item by item. Repeats are ignored; they are rare, as most of the weight stays undrawn."""
        drawn: dict[int, None] = {}
        total = self._sums[-1]
        while len(drawn) < count:
            drawn[min(bisect(self._sums, random.random() * total), len(self._sums) - 1)] = None
        return [self._things[at] for at in drawn]


def _wait(weight: float, random: RandomNumbers) -> float:
    """An exponential waiting time; ``random()`` may be 0, never 1."""
    return -math.log(1.0 - random.random()) / weight


class NetworkRoster:
    """Relays (raw public keys) by network. A network weighs as much as its best relay: more relays gain it nothing.

    ``weigh`` gives the weight of a relay; without ``weigh`` all are equal.
    """

    def __init__(self, networks: Mapping[str, Sequence[bytes]], weigh: Callable[[bytes], float] | None) -> None:
        self._weigh = weigh
        self._relays = networks
        #: Made on first use: most networks of a long list are never drawn before the list is made anew.
        self._rosters: dict[str, Roster[bytes]] = {}
        best = {} if weigh is None else {name: max(map(weigh, keys)) for name, keys in networks.items()}
        self._best: Mapping[str, float] = best
        self._networks = Roster(list(networks), None if weigh is None else list(best.values()))
        self._room = {name: min(NETWORK_LIMIT, len(keys)) for name, keys in networks.items()}
        #: How many relays can be drawn at once.
        self.places = sum(self._room.values())
        self.size = sum(map(len, networks.values()))

    def draw(self, count: int, random: RandomNumbers) -> list[bytes]:
        """At most ``count`` keys: one of each network, then a second of each network that has one, …"""
        turns = self._turns(count, random, Counter())
        drawn = self._of_turns(turns, random)
        return [drawn[name][turn] for turn, names in enumerate(turns) for name in names]

    def draw_part(self, count: int, random: RandomNumbers, taken: Counter[str]) -> list[tuple[int, float, bytes]]:
        """At most ``count`` relays: the place of each within its network (from 0), its order among equal places, and its key.

        ``taken`` counts the places that networks already have, and is updated.
        """
        turns = self._turns(count, random, taken)
        drawn = self._of_turns(turns, random)
        part = []
        for turn, names in enumerate(turns):
            # Networks stay in the order in which they were drawn, and relays in that of their network: put in order by a draw
            # of their own, a bad relay would come first a 4,096th as often as others, and not a 64th. So each network waits
            # as long as the first of those that are left does.
            weights = [self._best.get(name, 1.0) for name in names]
            wait = 0.0
            for name, left in zip(names, reversed(list(accumulate(reversed(weights)))), strict=True):
                wait += _wait(left, random)
                part.append((taken[name] + turn, wait, drawn[name][turn]))
        for name, keys in drawn.items():
            taken[name] += len(keys)
        return part

    def _turns(self, count: int, random: RandomNumbers, taken: Counter[str]) -> list[list[str]]:
        """The networks that get a first place, then those that get a second, …: at most ``count`` in all, at random."""
        full = {name for name, places in taken.items() if places >= NETWORK_LIMIT}
        names = [name for name in self._networks.draw(count + len(full), random) if name not in full]
        turns: list[list[str]] = []
        while count > 0 and names:
            turns.append(names[:count])
            count -= len(names)
            names = [name for name in names if len(turns) < min(self._room[name], NETWORK_LIMIT - taken.get(name, 0))]
        return turns

    def _of_turns(self, turns: list[list[str]], random: RandomNumbers) -> dict[str, Sequence[bytes]]:
        """As many keys of each network as it has turns."""
        wanted: dict[str, int] = {}
        for turn, names in enumerate(turns, 1):
            wanted.update(dict.fromkeys(names, turn))
        return {name: self._of(name, places, random) for name, places in wanted.items()}

    def _of(self, name: str, count: int, random: RandomNumbers) -> Sequence[bytes]:
        """``count`` random relays of a network."""
        relays = self._relays[name]
        if len(relays) == 1:
            return relays
        if self._weigh is None:
            return [relays[int(random.random() * len(relays))]] if count == 1 else random.sample(relays, count)
        roster = self._rosters.get(name)
        if roster is None:
            roster = self._rosters[name] = Roster(relays, list(map(self._weigh, relays)))
        return roster.draw(count, random)


class _Candidates:
    """All relays from which a list is drawn: those that the ranks name, and the others."""

    def __init__(self, networks: Mapping[str, Iterable[bytes]], ranks: Ranks | None, now_ns: int) -> None:
        scores: Mapping[bytes, int] = ranks.scores if ranks is not None else {}
        ranked: dict[str, list[bytes]] = {}
        others: dict[str, list[bytes]] = {}
        for name, keys in networks.items():
            for key in keys:
                (ranked if key in scores else others).setdefault(name, []).append(key)
        self._ranked = NetworkRoster(ranked, None if ranks is None else _weigher(ranks, now_ns))
        self._others = NetworkRoster(others, None)

    @property
    def size(self) -> int:
        return self._ranked.size + self._others.size

    def draw(self, limit: int, random: RandomNumbers) -> list[bytes]:
        """At most ``limit`` keys in the order for clients to try them: first one of each network, then a second, …"""
        if not self._ranked.size:  # ranks that name no listed relay change nothing
            return self._others.draw(limit, random)
        taken: Counter[str] = Counter()
        part = min(math.floor(limit * UNRANKED_PART + random.random()), self._others.places)
        drawn = self._ranked.draw_part(limit - part, random, taken)
        drawn += self._others.draw_part(part, random, taken)
        return [key for _, _, key in sorted(drawn)]


class ServerListing:
    """Draws servers that speak ``protocol`` from ``store``; ``ranks()`` gives the document in force, or ``None``.

    With ``proofs``, only proved relays are drawn, by the network in which they were reached. Without ``proofs``, all relays
    in the store are drawn, by the network of the address in their entry (all names count as one network), from a sample of
    :data:`SAMPLE_LIMIT`.

    Each answer is drawn anew, from a cached roster: an :class:`~dmsg.interfaces.IWatchedStore` is asked at most once in
    :data:`ROSTER_RENEWED_NS` as long as no put makes a difference. A relay that is put through ``store`` is listed at once
    among at most :data:`CACHED_FROM`, and within :data:`ROSTER_LIFETIME_NS` among more. A relay that is not available any
    more, or loses its proof, disappears at once. Puts of another process into a shared store, and the expiry of an entry,
    show within :data:`ROSTER_LIFETIME_NS`. From any other kind of store, entries are read for each answer.
    """

    def __init__(
        self,
        store: IEntryStore,
        random: RandomNumbers,
        ranks: Callable[[], Ranks | None] = lambda: None,
        proofs: RelayProofs | None = None,
        protocol: str = DMSG,
    ) -> None:
        self._store = store
        self._protocol = protocol
        self._random = random
        self._ranks = ranks
        self._proofs = proofs
        self._candidates: _Candidates | None = None
        self._made_for: tuple[Ranks | None, int | None, int] = (None, None, 0)
        self._renewing = False
        self._waiting: Waiters[None] = Waiters()
        watched: Any = store
        self._is_watched = IWatchedStore.providedBy(store)
        self._cache = RelayCache(ROSTER_LIFETIME_NS if self._is_watched else 0, protocol)
        if self._is_watched:
            watched.watch(self._cache.changed)

    async def servers(self, limit: int, now_ns: int) -> list[Entry]:
        """At most ``limit`` entries of available servers, in the order for clients to try them.

        Raises ``DiscoveryUnavailable`` when the store does not answer, and when there are none because it has not yet.
        """
        ranks = self._ranks()
        if ranks is not None and not ranks.freshness(now_ns / NS_PER_S):
            ranks = None
        if self._proofs is not None:
            await self._proofs.first_proofs(self._protocol)
            version = self._proofs.version
            candidates = self._current(ranks, version, now_ns)
            if candidates is None:
                candidates = self._remember(self._proofs.networks(self._protocol), ranks, version, now_ns)
            drawn = await self._entries(candidates.draw(limit, self._random), now_ns)
            listed = [entry for entry in drawn if self._proofs.holds_for(entry)]
            if not listed and self._proofs.is_blind:
                raise DiscoveryUnavailable("the store was not read yet")
            return listed
        wanted = self._version_of_store
        candidates = self._current(ranks, wanted, now_ns)
        while candidates is None and self._renewing and self._is_watched:
            await self._waiting.wait()
            candidates = self._current(ranks, wanted, now_ns)
        # A plain store is asked for all it draws from, every time.
        if candidates is not None and not self._is_due(now_ns) and IRankedStore.providedBy(self._store):
            return await self._entries(candidates.draw(limit, self._random), now_ns)
        self._renewing = True
        failure: Failure | None = None
        try:
            return await self._drawn_anew(limit, ranks, now_ns)
        except DiscoveryError as error:
            failure = Failure(error)
            raise
        finally:  # requests that wait share the failure; if this request was given up, one of them takes over
            self._renewing = False
            self._waiting.fire(failure)

    @property
    def _version_of_store(self) -> int | None:
        return self._cache.version if self._is_watched else None

    async def _drawn_anew(self, limit: int, ranks: Ranks | None, now_ns: int) -> list[Entry]:
        """The list, drawn from a new roster."""
        version = self._version_of_store
        with self._cache.reading():
            entries = {entry.static.raw: entry for entry in await self._sample(ranks, now_ns)}
        self._cache.fill((), entries.values(), now_ns)
        candidates = self._remember(_by_network(entries.values()), ranks, version, now_ns)
        return [entries[key] for key in candidates.draw(limit, self._random)]

    def _is_due(self, now_ns: int) -> bool:
        """Whether this request is the one that makes the roster anew before the old one expires."""
        return not self._renewing and now_ns - self._made_for[2] >= ROSTER_RENEWED_NS

    def _remember(
        self, networks: Mapping[str, Collection[bytes]], ranks: Ranks | None, version: int | None, now_ns: int
    ) -> _Candidates:
        self._candidates = _Candidates(networks, ranks, now_ns)
        self._made_for = (ranks, version, now_ns)
        return self._candidates

    def _current(self, ranks: Ranks | None, version: int | None, now_ns: int) -> _Candidates | None:
        """The cached candidates, unless they are out of date: a long list may be for a moment, a short one must not.

        ``version`` is the version at the time of the request, so candidates made since then are good enough.
        """
        made_ranks, made_version, made_ns = self._made_for
        if self._candidates is None or made_ranks is not ranks or not 0 <= now_ns - made_ns < ROSTER_LIFETIME_NS:
            return None
        unchanged = version is not None and made_version is not None and version <= made_version
        return self._candidates if unchanged or self._candidates.size > CACHED_FROM else None

    async def _entries(self, keys: list[bytes], now_ns: int) -> list[Entry]:
        """The entries of ``keys`` that are available now, in that order."""
        if not keys:
            return []
        if IRankedStore.providedBy(self._store):
            by_key, unknown = self._cache.look_up(keys, now_ns)
            if unknown:
                store: IRankedStore = self._store
                with self._cache.reading():
                    read = await store.servers_of(unknown, now_ns, self._protocol)
                self._cache.fill(unknown, read, now_ns)
                by_key.update((entry.static.raw, entry) for entry in read)
        else:
            everything = await self._store.available_servers(ROSTER_LIMIT, now_ns, self._protocol)
            by_key = {one.static.raw: one for one in everything}
        return [by_key[key] for key in keys if key in by_key]

    async def _sample(self, ranks: Ranks | None, now_ns: int) -> list[Entry]:
        """Entries of at most :data:`SAMPLE_LIMIT` available servers, each as likely as the others: the draw weighs them.

        With ranks, those that are named have three quarters of the sample.
        """
        if ranks is None or not IRankedStore.providedBy(self._store):
            return await self._store.available_servers(SAMPLE_LIMIT, now_ns, self._protocol)
        store: IRankedStore = self._store
        keys = await store.available_keys(ROSTER_LIMIT, now_ns, self._protocol)
        if len(keys) > SAMPLE_LIMIT:
            named, most = [key for key in keys if key in ranks.scores], math.floor(SAMPLE_LIMIT * (1 - UNRANKED_PART))
            some = self._random.sample(named, min(len(named), most))
            others = [key for key in keys if key not in ranks.scores]
            keys = some + self._random.sample(others, min(len(others), SAMPLE_LIMIT - len(some)))
        return await store.servers_of(keys, now_ns, self._protocol)


def _weigher(ranks: Ranks, now_ns: int) -> Callable[[bytes], float]:
    now_s = now_ns / NS_PER_S
    return lambda key: weight(ranks.effective(key, now_s))


def _by_network(entries: Iterable[Entry]) -> dict[str, list[bytes]]:
    networks: dict[str, list[bytes]] = {}
    for entry in entries:
        if entry.server is not None:
            network = _network_of(entry.server.address, entry.server.port or "")
            networks.setdefault(network, []).append(entry.static.raw)
    return networks


@lru_cache(maxsize=_KNOWN_ADDRESSES)
def _network_of(address: str, port: str) -> str:
    return network_group(ServerPart(address, 0, port).host_port.host)
