"""Entries in Redis.

Each key has a hash ``dmsg:entry:HEX`` with ``s`` (sequence), ``t`` (timestamp, shifted to be positive and padded, so
that texts compare like numbers: numbers in Lua are doubles), ``b`` (body, missing in a tombstone), ``x`` (expiry in
milliseconds, or empty), ``r`` (hour of the last read), ``v`` (the set of servers it is in, or empty), and the account of the
row: ``k`` (kind), ``w`` (network) and ``n`` (bytes). Sorted sets: ``dmsg:servers`` (for other protocols than dmsg:
``dmsg:servers:PROTOCOL``), ``dmsg:expiring:KIND`` and ``dmsg:tombstones`` by expiry; ``dmsg:networks:KIND`` by bytes;
``dmsg:of:KIND:NETWORK`` by last read, then by time of posting. ``dmsg:totals`` counts kinds. Compare, evict and replace
are one script, so several processes may share a database. Durability depends on the configuration of Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred, TimeoutError
from zope.interface import implementer

from dmsg.address import RedisAddress
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry, is_available
from dmsg.discovery.errors import (
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    NonZeroSequence,
    StoreFull,
    WrongSequence,
    WrongTime,
)
from dmsg.discovery.stores.rules import (
    EVICTED_AT_ONCE,
    FORGOTTEN_AT_ONCE,
    NS_PER_S,
    ROW_BYTES,
    NewKeys,
    ReadMarks,
    StoreLimits,
    Watchers,
    expired,
    hour_of,
    kind_of,
    network_of,
    shielded,
    stored_entry,
)
from dmsg.foreign import quoted
from dmsg.glue.redis import RedisConnection, Word
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IWatchedStore

#: Timeout of one operation in seconds, including the wait for a lost connection to come back.
OPERATION_TIMEOUT_S: Final = 5.0

_ENTRY: Final = "dmsg:entry:"
_LAYOUT: Final = "dmsg:layout"
_LAYOUT_VERSION: Final = b"2"
#: Rows of the first layout that one script migrates.
_ADOPTED: Final = 500
_NS_PER_MS: Final = 1_000_000
_TIMESTAMP_SHIFT: Final = 1 << 63

# Only these functions change the accounts of rows. Scores in `dmsg:of` are exact in a double: 19 bits of hours and 32 of
# seconds. A stray is a key in a set whose hash was deleted by something else, for example by hand, and which may have been
# posted again since: it is removed from the set where it is found, and counts as much as the average of its network.
_LIBRARY: Final = f"""
local DATE, ROW, TOMBSTONE, EVICTED = 4294967296, {ROW_BYTES}, 2, {EVICTED_AT_ONCE}
local function total(field)
    return tonumber(redis.call('HGET', 'dmsg:totals', field) or '0')
end
local function count(kind, network, rows, bytes)
    redis.call('HINCRBY', 'dmsg:totals', 'e' .. kind, rows)
    redis.call('HINCRBY', 'dmsg:totals', 'b' .. kind, bytes)
    if tonumber(redis.call('ZINCRBY', 'dmsg:networks:' .. kind, bytes, network)) <= 0 then
        redis.call('ZREM', 'dmsg:networks:' .. kind, network)
    end
end
local function uncount(key, kind, network, bytes)
    local of = 'dmsg:of:' .. kind .. ':' .. network
    redis.call('ZREM', of, key)
    if redis.call('EXISTS', of) == 0 then
        bytes = tonumber(redis.call('ZSCORE', 'dmsg:networks:' .. kind, network) or '0')
    end
    count(kind, network, -1, -bytes)
end
local function leave(key)
    local row = redis.call('HMGET', key, 'k', 'w', 'n', 'v')
    if row[1] then
        uncount(key, row[1], row[2], tonumber(row[3]))
        redis.call('ZREM', 'dmsg:expiring:' .. row[1], key)
    end
    redis.call('ZREM', row[4] or 'dmsg:servers', key)
    redis.call('ZREM', 'dmsg:tombstones', key)
end
local function enter(key, kind, network, bytes, score)
    redis.call('HSET', key, 'k', kind, 'w', network, 'n', bytes)
    count(kind, network, 1, bytes)
    redis.call('ZADD', 'dmsg:of:' .. kind .. ':' .. network, score, key)
end
local function forget(key)
    leave(key)
    redis.call('DEL', key)
end
local function stray(key, kind, network)
    redis.call('ZREM', 'dmsg:expiring:' .. kind, key)
    local of = 'dmsg:of:' .. kind .. ':' .. (network or '')
    if network and redis.call('ZSCORE', of, key) then
        local bytes = tonumber(redis.call('ZSCORE', 'dmsg:networks:' .. kind, network) or '0')
        uncount(key, kind, network, math.floor(bytes / redis.call('ZCARD', of)))
    end
end
local function is_stray(key, kind, network)
    local row = redis.call('HMGET', key, 'k', 'w')
    return row[1] ~= tostring(kind) or (network and row[2] ~= network)
end
local function bury(key, from, network, now_ms, limit, ttl_ms)
    if is_stray(key, from, network) then return stray(key, from, network) end
    local row = redis.call('HMGET', key, 'k', 'w')
    local kind = tonumber(row[1]) + TOMBSTONE
    leave(key)
    redis.call('HDEL', key, 'b')
    redis.call('HSET', key, 'r', 0)
    enter(key, kind, row[2], ROW, math.floor(now_ms / 1000))
    redis.call('ZADD', 'dmsg:tombstones', now_ms + ttl_ms, key)
    for _ = 1, {FORGOTTEN_AT_ONCE} do
        if total('e' .. kind) <= limit then return end
        local largest = redis.call('ZREVRANGE', 'dmsg:networks:' .. kind, 0, 0)[1]
        local oldest = redis.call('ZRANGE', 'dmsg:of:' .. kind .. ':' .. largest, 0, 0)[1]
        if is_stray(oldest, kind, largest) then stray(oldest, kind, largest) else forget(oldest) end
    end
end
local function victim(kind, network, key, size, now)
    for _, found in ipairs(redis.call('ZRANGEBYSCORE', 'dmsg:expiring:' .. kind, '-inf', now, 'LIMIT', 0, 2)) do
        if found ~= key then return found end
    end
    local names = redis.call('ZREVRANGE', 'dmsg:networks:' .. kind, 0, 1)
    local own = redis.call('ZSCORE', 'dmsg:networks:' .. kind, network)
    if own and own + size >= tonumber(redis.call('ZSCORE', 'dmsg:networks:' .. kind, names[1])) then
        table.insert(names, 1, network)
    end
    for _, name in ipairs(names) do
        for _, found in ipairs(redis.call('ZRANGE', 'dmsg:of:' .. kind .. ':' .. name, 0, 1)) do
            if found ~= key then return found, name end
        end
    end
end
"""
_PUT: Final = (
    _LIBRARY
    + """
local key, now, kind, network, size = KEYS[1], ARGV[6], ARGV[8], ARGV[9], tonumber(ARGV[10])
local now_ms, tombstones, ttl_ms = tonumber(now), tonumber(ARGV[13]), tonumber(ARGV[14])
for one = 0, 1 do
    for _, found in ipairs(redis.call('ZRANGEBYSCORE', 'dmsg:expiring:' .. one, '-inf', now, 'LIMIT', 0, 10)) do
        bury(found, one, nil, now_ms, tombstones, ttl_ms)
    end
end
for _, found in ipairs(redis.call('ZRANGEBYSCORE', 'dmsg:tombstones', '-inf', now, 'LIMIT', 0, 20)) do
    forget(found)
end
local old = redis.call('HMGET', key, 's', 't', 'k', 'n', 'r')
if old[1] then
    if old[1] ~= ARGV[1] then return 'sequence' end
    if old[2] >= ARGV[3] then return 'time' end
else
    if ARGV[2] ~= '0' then return 'nonzero' end
    stray(key, kind, network)
end
local known = old[3] == kind
local rows, bytes = known and 0 or 1, known and size - tonumber(old[4]) or size
for _ = 1, EVICTED do
    if total('e' .. kind) + rows <= tonumber(ARGV[11]) and total('b' .. kind) + bytes <= tonumber(ARGV[12]) then break end
    local found, of = victim(kind, network, key, bytes, now)
    if not found then return 'full' end
    bury(found, kind, of, now_ms, tombstones, ttl_ms)
end
leave(key)
local read = tonumber(old[5] or '0')
redis.call('HSET', key, 's', ARGV[2], 't', ARGV[3], 'b', ARGV[4], 'x', ARGV[5], 'r', read, 'v', ARGV[7])
enter(key, kind, network, size, read * DATE + math.floor(now_ms / 1000))
if ARGV[5] ~= '' then
    redis.call('ZADD', 'dmsg:expiring:' .. kind, ARGV[5], key)
end
if ARGV[7] ~= '' then
    redis.call('ZADD', ARGV[7], ARGV[5] == '' and '+inf' or ARGV[5], key)
end
return old[1] and 'iteration' or 'first'
"""
)
_MARK: Final = """
for at = 2, #ARGV do
    local row = redis.call('HMGET', ARGV[at], 'k', 'w')
    if row[1] and tonumber(row[1]) < 2 then
        local of = 'dmsg:of:' .. row[1] .. ':' .. row[2]
        local posted = math.fmod(tonumber(redis.call('ZSCORE', of, ARGV[at])), 4294967296)
        redis.call('HSET', ARGV[at], 'r', ARGV[1])
        redis.call('ZADD', of, ARGV[1] * 4294967296 + posted, ARGV[at])
    end
end
"""
# Rows of the first layout had no account, their clients had no expiry, and Redis itself forgot their tombstones.
_ADOPT: Final = (
    _LIBRARY
    + """
local now_ms = tonumber(ARGV[1])
for at = 5, #ARGV do
    local key = ARGV[at]
    local row = redis.call('HMGET', key, 's', 'b', 'k', 'x')
    if row[1] and not row[3] then
        redis.call('PERSIST', key)
        redis.call('HSET', key, 'r', 0)
        local read, entry = pcall(cjson.decode, row[2] or '')
        if not read then
            enter(key, 3, '', ROW, math.floor(now_ms / 1000))
            redis.call('ZADD', 'dmsg:tombstones', now_ms + tonumber(ARGV[4]), key)
        else
            local kind = (entry.server and entry.server ~= cjson.null) and 1 or 0
            local expires = row[4]
            if kind == 0 then
                expires = entry.version == '0.1.0' and ARGV[2] or ARGV[3]
                redis.call('HSET', key, 'x', expires)
            end
            enter(key, kind, '', #row[2] + ROW, math.floor(now_ms / 1000))
            if expires ~= '' then
                redis.call('ZADD', 'dmsg:expiring:' .. kind, expires, key)
            end
        end
    end
end
"""
)
# A Redis that takes no writes for now (its disk is full, or it is a replica) still lists: what has expired may stay there.
_DRAW: Final = """
redis.pcall('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local drawn = {}
for _, key in ipairs(redis.call('ZRANDMEMBER', KEYS[1], ARGV[2])) do
    if tonumber(redis.call('ZSCORE', KEYS[1], key)) > tonumber(ARGV[1]) then drawn[#drawn + 1] = key end
end
"""
_AVAILABLE: Final = (
    _DRAW
    + """
local bodies = {}
for _, key in ipairs(drawn) do
    local body = redis.call('HGET', key, 'b')
    if body then bodies[#bodies + 1] = body end
end
return bodies
"""
)
_KEYS: Final = _DRAW + "return drawn"
_SERVERS_OF: Final = """
local now = tonumber(ARGV[1])
local bodies = {}
for at = 2, #ARGV do
    local expires = redis.call('ZSCORE', KEYS[1], ARGV[at])
    if expires and tonumber(expires) > now then
        local body = redis.call('HGET', ARGV[at], 'b')
        if body then bodies[#bodies + 1] = body end
    end
end
return bodies
"""


def _servers(protocol: str) -> str:
    """The set of available servers that speak ``protocol``."""
    return "dmsg:servers" if protocol == DMSG else f"dmsg:servers:{protocol}"


_REFUSALS: Final[dict[bytes, type[DiscoveryError]]] = {
    b"sequence": WrongSequence,
    b"time": WrongTime,
    b"nonzero": NonZeroSequence,
    b"full": StoreFull,
}


@implementer(IWatchedStore)
class RedisStore:
    """Entries in the database at ``address``; Redis need not be reachable yet."""

    durable = False

    def __init__(self, address: RedisAddress, reactor: Any, *, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._new_keys = NewKeys(self._limits)
        self._marks = ReadMarks()
        self._watchers = Watchers()
        self._reactor = reactor
        self._preparing: Waiters[None] = Waiters()
        self._prepared = False
        self._redis = RedisConnection(address, reactor, scripts=(_PUT, _MARK, _ADOPT, _AVAILABLE, _KEYS, _SERVERS_OF))

    async def _call(self, *words: Word) -> Any:
        return await self._answer(self._redis.call(*words))

    async def _eval(self, script: str, keys: Sequence[str], *arguments: Word) -> Any:
        return await self._answer(self._redis.eval(script, keys, *arguments))

    async def _answer(self, asked: Deferred[Any]) -> Any:
        """Every failure between here and Redis becomes ``DiscoveryUnavailable``."""
        try:
            return await asked.addTimeout(OPERATION_TIMEOUT_S, self._reactor)
        except TimeoutError:
            raise DiscoveryUnavailable(
                f"{self._redis.address} has not answered within {OPERATION_TIMEOUT_S:g} s"
            ) from None
        except Exception as error:
            reason = quoted(getattr(error, "reason", type(error).__name__))
            raise DiscoveryUnavailable(f"{self._redis.address} failed: {reason}") from error

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self.get_json(public_key, now_ns).addCallback(stored_entry)

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return Deferred.fromCoroutine(self._get(public_key, now_ns))

    async def _get(self, public_key: PublicKey, now_ns: int) -> bytes:
        sequence, timestamp, body, expires_ms, read_hour = await self._call(
            "HMGET", f"{_ENTRY}{public_key}", "s", "t", "b", "x", "r"
        )
        if sequence is None:
            raise EntryNotFound
        if body is None or (expires_ms and int(expires_ms) <= now_ns // _NS_PER_MS):
            raise expired(int(sequence), int(timestamp) - _TIMESTAMP_SHIFT)
        self._marks.note(public_key.raw, int(read_hour or 0), now_ns)
        return bytes(body)

    def put(self, entry: Entry, now_ns: int, poster: str = "") -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return shielded(Deferred.fromCoroutine(self._put(entry, now_ns, poster)))

    def _prepare(self, now_ns: int) -> Deferred[None]:
        """Migrate a database of the first layout before the first write: once for all writes that wait for this."""
        prepared = self._preparing.wait()
        if len(self._preparing) == 1:
            Deferred.fromCoroutine(self._adopt(now_ns)).addBoth(self._preparing.fire)
        return prepared

    async def _adopt(self, now_ns: int) -> None:
        """Migrate a database of the first layout. Doing it twice does no harm."""
        if await self._call("GET", _LAYOUT) != _LAYOUT_VERSION:
            ttls_s = (self._limits.client_ttl_s, self._limits.base_client_ttl_s)
            times = [str(now_ns // _NS_PER_MS)]
            times += ["" if ttl_s is None else str((now_ns + int(ttl_s * NS_PER_S)) // _NS_PER_MS) for ttl_s in ttls_s]
            times.append(str(self._limits.tombstone_ttl_ns // _NS_PER_MS))
            cursor: Any = 0
            while True:
                cursor, names = await self._call("SCAN", cursor, "MATCH", f"{_ENTRY}*", "COUNT", _ADOPTED)
                await self._eval(_ADOPT, (), *times, *names)
                if not int(cursor):
                    break
            await self._call("DEL", "dmsg:expiring")
            await self._call("SET", _LAYOUT, _LAYOUT_VERSION)
        self._prepared = True

    async def _put(self, entry: Entry, now_ns: int, poster: str) -> bool:
        self._new_keys.check(entry, poster, now_ns)
        if not self._prepared:
            await self._prepare(now_ns)
        marks = self._marks.take(now_ns)
        if marks:
            await self._eval(_MARK, (), hour_of(now_ns), *(f"{_ENTRY}{key.hex()}" for key in marks))
        expires_ns = self._limits.expires_ns(entry, now_ns)
        body, kind = entry.to_json(), kind_of(entry)
        answer = await self._eval(
            _PUT,
            [f"{_ENTRY}{entry.static}"],
            (entry.sequence - 1) % (1 << 64),
            entry.sequence,
            f"{entry.timestamp + _TIMESTAMP_SHIFT:020}",
            body,
            "" if expires_ns is None else -(-expires_ns // _NS_PER_MS),
            now_ns // _NS_PER_MS,
            _servers(entry.protocol) if is_available(entry) else "",
            kind,
            network_of(poster),
            len(body) + ROW_BYTES,
            *self._limits.room(kind),
            self._limits.tombstones,
            self._limits.tombstone_ttl_ns // _NS_PER_MS,
        )
        if answer in _REFUSALS:
            raise _REFUSALS[answer]
        return self._watchers.tell(bool(answer == b"first"), entry, now_ns)

    def watch(self, changed: Callable[[Entry, int], None]) -> None:
        """See :class:`~dmsg.interfaces.IWatchedStore`."""
        self._watchers.add(changed)

    def available_servers(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return Deferred.fromCoroutine(self._available_servers(limit, now_ns, protocol))

    async def _available_servers(self, limit: int, now_ns: int, protocol: str) -> list[Entry]:
        bodies = await self._eval(_AVAILABLE, [_servers(protocol)], now_ns // _NS_PER_MS, limit)
        return [stored_entry(bytes(body)) for body in bodies]

    def available_keys(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return Deferred.fromCoroutine(self._available_keys(limit, now_ns, protocol))

    async def _available_keys(self, limit: int, now_ns: int, protocol: str) -> list[bytes]:
        names = await self._eval(_KEYS, [_servers(protocol)], now_ns // _NS_PER_MS, limit)
        try:
            return [bytes.fromhex(bytes(name).decode("ascii").removeprefix(_ENTRY)) for name in names]
        except ValueError:
            raise DiscoveryUnavailable("a stored key is damaged") from None

    def servers_of(self, keys: list[bytes], now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return Deferred.fromCoroutine(self._servers_of(keys, now_ns, protocol))

    async def _servers_of(self, keys: list[bytes], now_ns: int, protocol: str) -> list[Entry]:
        names = [f"{_ENTRY}{key.hex()}" for key in keys]
        bodies = await self._eval(_SERVERS_OF, [_servers(protocol)], now_ns // _NS_PER_MS, *names)
        return [stored_entry(bytes(body)) for body in bodies]

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return Deferred.fromCoroutine(self._redis.close())
