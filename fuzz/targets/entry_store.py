"""The store of a discovery: entries of a few keys, in and out of order, with little room."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import (
    DiscoveryError,
    EntryNotFound,
    NonZeroSequence,
    RateLimitedByDiscovery,
    WrongSequence,
    WrongTime,
)
from dmsg.discovery.stores import table
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import NS_PER_S, NewKeys, StoreLimits
from fuzz.choices import Choices
from fuzz.oracles import KEYS, outcome

#: Bytes for four of the smallest clients, and for three of the smallest relays that are also clients.
_LIMITS = StoreLimits(
    server_ttl_s=20.0,
    client_ttl_s=40.0,
    base_client_ttl_s=80.0,
    tombstone_ttl_s=200.0,
    clients=3,
    client_bytes=2_508,
    relays=3,
    relay_bytes=2_091,
    tombstones=3,
    new_keys_per_s=None,
    network_new_keys_per_s=None,
)
_RATES = StoreLimits(
    new_keys_per_s=1 / 16, new_keys_burst=2.0, network_new_keys_per_s=1 / 8, network_new_keys_burst=3.0
)
#: A few seconds before a full hour, because reads are dated to the hour.
_START_NS = 10**18 + 780 * NS_PER_S
_HOUR_NS = 3_600 * NS_PER_S
_PURGED_NS = 5 * NS_PER_S
_MARKED_NS = 10 * NS_PER_S
_ROW_BYTES = 256
_CLIENT, _RELAY, _TOMBSTONE = 0, 1, 2


class _Random(random.Random):
    """Records the random place that an entry was given."""

    slot = 0

    def randrange(self, *arguments: Any) -> int:
        """See :class:`random.Random`."""
        self.slot = super().randrange(*arguments)
        return self.slot


@dataclass(slots=True)
class _Row:
    """The row of a key: its entry, or the fact that it had one."""

    kind: int
    network: str
    entry: Entry
    expires_ns: int
    posted_ns: int
    slot: int
    read_hour: int = 0

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return _ROW_BYTES + (0 if self.kind >= _TOMBSTONE else len(self.entry.to_json()))

    def lives(self, now_ns: int) -> bool:
        """Whether it is given out."""
        return self.kind < _TOMBSTONE and self.expires_ns > now_ns


class _Model:
    """The simplest model of a store. ``rows`` are in the order in which their keys arrived."""

    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}
        self.purged_ns = self.marked_ns = 0
        self.read: set[int] = set()

    def put(self, number: int, entry: Entry, network: str, slot: int, now_ns: int) -> type[DiscoveryError] | bool:
        """Take ``entry`` and tell whether it is the first of its key; or give the error if it is out of order."""
        self._mark(now_ns)
        if now_ns - self.purged_ns >= _PURGED_NS:
            self._purge(now_ns)
        old = self.rows.get(number)
        if old is None and entry.sequence:
            return NonZeroSequence
        if old is not None and entry.sequence != old.entry.sequence + 1:
            return WrongSequence
        if old is not None and entry.timestamp <= old.entry.timestamp:
            return WrongTime
        kind = _CLIENT if entry.server is None else _RELAY
        ttl_s = 20 if entry.server is not None else 40 if entry.version.startswith("0.1.0") else 80
        row = _Row(kind, network, entry, now_ns + ttl_s * NS_PER_S, now_ns, slot)
        self._make_room(number, row, now_ns)
        if number in self.rows:
            row.read_hour = self.rows[number].read_hour
        self.rows[number] = row
        return old is None

    def note(self, number: int, now_ns: int) -> None:
        """Note a read, which is written to the store later, once an hour."""
        if self.rows[number].read_hour < now_ns // _HOUR_NS:
            self.read.add(number)

    def _mark(self, now_ns: int) -> None:
        if self.read and now_ns - self.marked_ns >= _MARKED_NS:
            for number in self.read:
                if number in self.rows and self.rows[number].kind < _TOMBSTONE:
                    self.rows[number].read_hour = now_ns // _HOUR_NS
            self.read, self.marked_ns = set(), now_ns

    def _purge(self, now_ns: int) -> None:
        self.purged_ns = now_ns
        for kind in (_RELAY, _CLIENT):
            for number in self._expired(kind, now_ns):
                self._bury(number, now_ns)
            forgotten_ns = now_ns - 200 * NS_PER_S
            for number in self._expired(kind + _TOMBSTONE, forgotten_ns):
                del self.rows[number]

    def of(self, kind: int) -> dict[int, _Row]:
        """The rows of a kind."""
        return {number: row for number, row in self.rows.items() if row.kind == kind}

    def _expired(self, kind: int, now_ns: int) -> list[int]:
        rows = self.of(kind)
        return sorted((one for one in rows if rows[one].expires_ns <= now_ns), key=lambda one: rows[one].expires_ns)

    def networks(self, kind: int) -> dict[str, int]:
        """Bytes of each network, in descending order; among equals, the alphabetically last network first."""
        sizes: dict[str, int] = {}
        for row in self.of(kind).values():
            sizes[row.network] = sizes.get(row.network, 0) + row.size
        return dict(sorted(sizes.items(), key=lambda one: (one[1], one[0]), reverse=True))

    def _make_room(self, number: int, row: _Row, now_ns: int) -> None:
        rows, size = (3, 2_508) if row.kind == _CLIENT else (3, 2_091)
        while True:
            others = self.of(row.kind)
            own = others.pop(number, None)
            if len(others) < rows and sum(one.size for one in others.values()) + row.size <= size:
                return
            late = [one for one in self._expired(row.kind, now_ns)[:2] if one != number]
            if late:
                self._bury(late[0], now_ns)
                continue
            networks = self.networks(row.kind)
            names = list(networks)[:2]
            would = networks.get(row.network, 0) + row.size - (own.size if own is not None else 0)
            if row.network in networks and would >= networks[names[0]]:
                names.insert(0, row.network)
            found = [self._unread(others, name) for name in names]
            self._bury(next(one for one in found if one is not None), now_ns)

    @staticmethod
    def _unread(rows: dict[int, _Row], network: str) -> int | None:
        of_it = [one for one in rows if rows[one].network == network]
        return min(of_it, key=lambda one: (rows[one].read_hour, rows[one].posted_ns), default=None)

    def _bury(self, number: int, now_ns: int) -> None:
        row = self.rows[number]
        row.kind += _TOMBSTONE
        row.expires_ns = row.posted_ns = now_ns
        row.read_hour = 0
        while len(graves := self.of(row.kind)) > _LIMITS.tombstones:
            oldest = self._unread(graves, next(iter(self.networks(row.kind))))
            assert oldest is not None
            del self.rows[oldest]


class _Rates:
    """Rates of new keys; a rate is in sixteenths of a key a second, a time in quarters of a second."""

    def __init__(self) -> None:
        self.rules = NewKeys(_RATES)
        self.levels: dict[str, tuple[int, int]] = {}

    def check(self, entry: Entry, poster: str, now_ns: int) -> None:
        """A new key above the rate of its address or network is refused; a known key is not."""
        kind, error = outcome(lambda: self.rules.check(entry, poster, now_ns), DiscoveryError)
        free = entry.sequence > 0 or not poster
        at = now_ns * 4 // NS_PER_S
        passes = free or (self._take(poster, 1, 2 * 64, at) and self._take(poster.rpartition(".")[0], 2, 3 * 64, at))
        assert (kind == "value") == passes and (passes or error is RateLimitedByDiscovery)

    def _take(self, group: str, rate: int, burst: int, at: int) -> bool:
        level, since = self.levels.get(group, (burst, at))
        level = min(burst, level + rate * (at - since))
        taken = level >= 64
        self.levels[group] = (level - 64 if taken else level), at
        return taken


class _Discovery:
    """A store, its model, and the subscribers of entries."""

    def __init__(self) -> None:
        self.random = _Random(1)
        self.store = MemoryStore(limits=_LIMITS, random=self.random)
        self.model = _Model()
        self.rates = _Rates()
        self.now_ns = _START_NS
        self.told: list[tuple[Entry, int]] = []
        self.store.watch(lambda entry, now_ns: self.told.append((entry, now_ns)))

    def put(self, choices: Choices, number: int) -> None:
        """Post an entry: it is taken if it is in order, however full the store is."""
        old = self.model.rows.get(number)
        entry = _entry(choices, number, old)
        byte = choices.byte()
        poster = "" if byte >= 252 else f"192.0.{byte % 3}.{1 + byte // 3 % 3}"
        self.rates.check(entry, poster, self.now_ns)
        result = _result(self.store.put(entry, self.now_ns, poster))
        expected = self.model.put(number, entry, poster.rpartition(".")[0], self.random.slot, self.now_ns)
        if isinstance(expected, bool):
            assert result is expected and self.told == [(entry, self.now_ns)]
        else:
            assert type(result) is expected and not self.told
        self.told.clear()
        self.check()

    def get(self, number: int, *, as_json: bool) -> None:
        """A read gives the last posted entry, if it has not expired; otherwise the sequence to continue with."""
        row, key = self.model.rows.get(number), KEYS[number].public_key
        result = _result((self.store.get_json if as_json else self.store.get)(key, self.now_ns))
        if row is not None and row.lives(self.now_ns):
            assert result == (row.entry.to_json() if as_json else row.entry)
            self.model.note(number, self.now_ns)
            return
        assert isinstance(result, EntryNotFound)
        expected = (None, None) if row is None else (row.entry.sequence + 1, row.entry.timestamp)
        assert (result.next_sequence, result.after_timestamp) == expected

    def list(self, limit: int, protocol: str) -> None:
        """Lists have servers that are available now, as many as requested, and each once."""
        store, now_ns = self.store, self.now_ns
        rows = [
            row
            for row in self.model.rows.values()
            if row.kind == _RELAY and row.lives(now_ns) and _is_available(row.entry, protocol)
        ]
        expected = {row.entry.static.raw: row for row in rows}
        keys = _result(store.available_keys(limit, now_ns, protocol))
        assert len(keys) == len(set(keys)) == min(limit, len(rows)) and expected.keys() >= set(keys)
        servers = _result(store.available_servers(limit, now_ns, protocol))
        assert len(servers) == min(limit, len(rows)) == len({one.static for one in servers})
        assert all(expected[one.static.raw].entry == one for one in servers)
        known = [one.public_key.raw for one in KEYS[: 3 + limit]]
        assert _result(store.servers_of(known, now_ns, protocol)) == [
            expected[one].entry for one in known if one in expected
        ]
        # Of more than a thousand servers, the list has those after a random place, and then the first ones.
        place = rows[limit % len(rows)].slot if rows else 0
        rows.sort(key=lambda row: (row.slot < place, row.slot))
        walked = table._walk(store._connection, "key", place, limit, now_ns, protocol)
        assert walked == [row.entry.static.raw for row in rows[:limit]]

    def check(self) -> None:
        """The rows are those of the model, and all counters are correct."""
        execute, model = self.store._connection.execute, self.model
        columns = "key, kind, network, bytes, read_hour, posted_ns, expires_ns, body"
        assert execute(f"SELECT {columns} FROM entries ORDER BY rowid").fetchall() == [
            (
                row.entry.static.raw,
                row.kind,
                f"{row.network}.0/24" if row.network else "",
                row.size,
                row.read_hour,
                row.posted_ns,
                row.expires_ns,
                None if row.kind >= _TOMBSTONE else row.entry.to_json(),
            )
            for row in model.rows.values()
        ]

    def end(self) -> None:
        """Read everything, and check the accounts."""
        for number in range(6):
            self.get(number, as_json=False)
        execute, model = self.store._connection.execute, self.model
        for kind in range(4):
            rows = model.of(kind).values()
            ((entries, size),) = execute("SELECT entries, bytes FROM totals WHERE kind = ?", (kind,)).fetchall()
            assert (entries, size) == (len(rows), sum(row.size for row in rows))
            networks = execute("SELECT network, bytes, entries FROM networks WHERE kind = ?", (kind,)).fetchall()
            assert {name.removesuffix(".0/24"): size for name, size, _ in networks} == model.networks(kind)
            assert sum(one[2] for one in networks) == entries


def one_input(data: bytes) -> None:
    """Operations: entries posted from a few networks, read, listed; time. Raises only ``DiscoveryError``.

    A model without SQL tells which entries are taken and given, and which are evicted when there is no room.
    """
    choices, discovery = Choices(data), _Discovery()
    for _ in range(64):
        if not choices.left:
            break
        number = choices.byte() % 6
        more, what = divmod(choices.byte(), 6)
        match what:
            case 0 | 1 | 2:
                discovery.put(choices, number)
            case 3:
                discovery.get(number, as_json=more & 1 == 1)
            case 4:
                discovery.list(choices.byte() % 4, "messaging" if more & 1 else "dmsg")
            case _:
                discovery.now_ns += choices.byte() * NS_PER_S // 4
    discovery.end()


def _is_available(entry: Entry, protocol: str) -> bool:
    server = entry.server
    assert server is not None
    return server.available_connections > 0 and not server.later and entry.protocol == protocol


def _result(deferred: Any) -> Any:
    """Its result, or the documented error."""
    results: list[Any] = []
    deferred.addBoth(results.append)
    (result,) = results
    if hasattr(result, "value"):
        if not isinstance(result.value, DiscoveryError):
            result.raiseException()
        return result.value
    return result


def _entry(choices: Choices, number: int, last: _Row | None) -> Entry:
    sequence = 0 if last is None else last.entry.sequence + 1
    timestamp = 1 if last is None else last.entry.timestamp + 1
    how = choices.byte()
    if how & 1:
        sequence = choices.byte() % 8
    if how & 2:
        timestamp = choices.byte()
    return _signed(number, sequence, timestamp, how >> 2)


@lru_cache(maxsize=4_096)
def _signed(number: int, sequence: int, timestamp: int, kind: int) -> Entry:
    """The three upper bits of ``kind`` choose a server's protocol."""
    key = KEYS[number]
    version = "0.1.0" if kind & 1 else "0.0.1"
    entry = Entry(f"{version}+messaging" if kind >> 3 == 5 else version, sequence, timestamp, key.public_key)
    if kind & 2:
        server = ServerPart(f"9.9.{number}.9:80", kind & 4, later=kind >> 3 == 6)
        entry = replace(entry, server=server)
    if not kind & 2 or kind & 4:
        entry = replace(entry, client=ClientPart((KEYS[7].public_key,)))
    return entry.sign(key)


def seeds() -> Iterator[bytes]:
    """Entries and their successors, out of order, expired, more keys than there is room for, lists."""
    post = b"".join(bytes((number, 0, 0, number)) for number in range(6))
    relays = b"".join(bytes((number, 0, 24, number)) for number in range(4))
    yield post + b"\x00\x03" * 2 + post
    yield relays + b"\x00\x04\x03" + relays
    yield post + b"\x00\x05\xff" + post + b"\x00\x05\xff" * 4 + post
    yield b"\x00\x00\x00\x00" * 3 + b"\x00\x00\x01\x00\x00" + b"\x00\x00\x02\x00\x00" + b"\x00\x03"
    yield relays[:8] + b"\x00\x05\x60" + b"\x00\x04\x03" + relays[:4] + b"\x00\x05\x30" + b"\x00\x04\x03"
    yield from _more_seeds(relays)


def _put(number: int, how: int = 0, network: int = 0) -> bytes:
    """The next entry of a key; ``how`` says of what kind it is."""
    return bytes((number, 0, how, network))


def _wait(quarters: int) -> bytes:
    return bytes((0, 5, quarters))


def _more_seeds(relays: bytes) -> Iterator[bytes]:
    """Times just before and after expiry, purge and write-back; all protocols; evictions when there is no room."""
    small, large, messaging, later = 8, 24, 160, 216
    yield _put(0, small) + b"".join(_wait(quarters) + b"\x00\x03\x00\x04\x02" for quarters in (79, 1, 1))
    yield _put(0) + _wait(240) + b"".join(_wait(quarters) + b"\x00\x03" for quarters in (79, 1, 1)) + _put(0)
    yield _put(0, 4) + b"".join(_wait(quarters) + b"\x00\x09" for quarters in (159, 1, 1)) + _put(0)
    for quarters in (12, 19, 20, 21):  # what has expired is purged each five seconds
        yield _put(0, small) + _wait(72) + _put(1) + _wait(quarters) + _put(2) + b"\x00\x03"
        yield _put(0, small) + _wait(60) + _put(1) + _wait(quarters) + _put(2) + b"\x00\x03"
    yield _put(0, small) + _wait(68) + _put(1, large) + _put(2, large) + _wait(16) + _put(0, large | messaging)
    yield _put(0, messaging, 1) + _put(1, messaging, 1) + _put(2) + _put(3) + _put(4, 0, 2) + _put(5, 0, 2)
    yield _put(0, 0, 1) + _put(1, 0, 1) + _put(2) + _put(3) + _put(4, 0, 255) + _put(5, 0, 2)
    yield b"".join(_put(number, small, number % 3) for number in range(6)) + b"\x00\x04\x03"
    yield b"".join(_put(number, large, number % 3) for number in range(6)) + b"\x00\x04\x03"
    kinds = _put(0, large | messaging) + _put(1, later) + _put(2, large)
    for limit in range(4):
        walk = bytes((0, 4, limit, 0, 10, limit))
        yield kinds + walk
        yield (_put(0, large) + _put(1) + _put(2, 4) + walk) * 2
        yield b"".join(_put(number, large) + walk for number in range(3)) * 4
        yield b"".join(_put(number, large | messaging) + walk for number in range(3)) * 4
    reads = b"\x00\x03" + _wait(40) + _put(3, small) + b"\x00\x03"
    yield _put(0) + _put(1) + _put(2) + reads + _wait(40) + _put(3, small) + b"\x01\x03" + _put(3, small) + _put(4)
    yield _put(0) + _put(1) + _put(2) + reads + _wait(41) + b"\x01\x03" + _put(3, small) + _put(4) + _put(5)
    yield (
        _put(0, 4)
        + _put(1, 4)
        + b"\x00\x03"
        + _wait(79)
        + _put(3, 4)
        + b"\x01\x03"
        + _wait(40)
        + _put(4, 4)
        + _put(5, 4)
    )
    for quarters in (39, 40, 41):
        yield _put(0) + _put(1) + b"\x00\x03" + _put(2) + b"\x01\x03" + _wait(quarters) + _put(3) + _put(4) + _put(5)
    again = b"".join(_put(number, 0, number % 3) for number in range(6))
    yield (again + _wait(255) + _wait(80)) * 3
    yield (again + _wait(255) * 3 + _wait(36)) * 2
    yield b"\x00\x00\x03\x00\x05\x00" + b"\x00\x00\x03\x01\x05\x00" + b"\x00\x00\x03\x01\x06\x00\x00\x00\x01\x07\x00"
    yield b"".join(_put(number) + _wait(8) for number in range(6)) + relays
