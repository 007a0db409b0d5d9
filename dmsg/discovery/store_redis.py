"""Entries in Redis: the owner of txredisapi, which is imported late because it installs the reactor.

Each key has a hash ``dmsg:entry:HEX`` with ``s`` (sequence), ``t`` (timestamp, shifted to be positive and padded, so
that texts compare as numbers do: numbers in Lua are doubles), ``b`` (body, missing in a tombstone) and ``x`` (expiry in
milliseconds, or empty). ``dmsg:servers`` and ``dmsg:expiring`` are sorted sets by expiry. Compare and replace are one
script, so several processes may share a database; the database should have no other use, because its size is the limit.
How durable it is depends on how Redis is configured.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.defer import Deferred
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry
from dmsg.discovery.store import StoreLimits, expired, is_available, shielded, stored_entry
from dmsg.errors import (
    ConfigError,
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    NonZeroSequence,
    StoreFull,
    WrongSequence,
    WrongTime,
)
from dmsg.interfaces import IRankedStore

#: How long one operation may take, in seconds, the wait for a lost connection to come back included.
OPERATION_TIMEOUT_S: Final = 5.0
#: Connections kept open.
POOL_SIZE: Final = 2

_ENTRY: Final = "dmsg:entry:"
_SERVERS: Final = "dmsg:servers"
_EXPIRING: Final = "dmsg:expiring"
_NS_PER_MS: Final = 1_000_000
_TIMESTAMP_SHIFT: Final = 1 << 63

_PUT: Final = """
local old = redis.call('HMGET', KEYS[1], 's', 't')
if old[1] then
    if old[1] ~= ARGV[1] then return 'sequence' end
    if old[2] >= ARGV[3] then return 'time' end
else
    if ARGV[2] ~= '0' then return 'nonzero' end
    if redis.call('DBSIZE') >= tonumber(ARGV[8]) then return 'full' end
end
redis.call('HSET', KEYS[1], 's', ARGV[2], 't', ARGV[3], 'b', ARGV[4], 'x', ARGV[5])
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('ZREM', KEYS[3], KEYS[1])
if ARGV[5] == '' then
    redis.call('PERSIST', KEYS[1])
else
    redis.call('PEXPIRE', KEYS[1], ARGV[6])
    redis.call('ZADD', KEYS[3], ARGV[5], KEYS[1])
end
if ARGV[7] == '1' then
    redis.call('ZADD', KEYS[2], ARGV[5] == '' and '+inf' or ARGV[5], KEYS[1])
end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[9], 'LIMIT', 0, 10)) do
    redis.call('HDEL', key, 'b')
    redis.call('ZREM', KEYS[3], key)
end
return old[1] and 'iteration' or 'first'
"""
_AVAILABLE: Final = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local bodies = {}
for _, key in ipairs(redis.call('ZRANDMEMBER', KEYS[1], ARGV[2])) do
    local body = redis.call('HGET', key, 'b')
    if body then bodies[#bodies + 1] = body end
end
return bodies
"""
_KEYS: Final = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
return redis.call('ZRANDMEMBER', KEYS[1], ARGV[2])
"""
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
_REFUSALS: Final[dict[bytes, type[DiscoveryError]]] = {
    b"sequence": WrongSequence,
    b"time": WrongTime,
    b"nonzero": NonZeroSequence,
    b"full": StoreFull,
}


@implementer(IRankedStore)
class RedisStore:
    """Entries in database number ``database`` of the Redis at ``host`` and ``port``; it need not be there yet."""

    durable = False

    def __init__(
        self,
        host: str,
        port: int,
        database: int,
        reactor: Any,
        *,
        username: str | None = None,
        password: str | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        try:
            import txredisapi
        except ImportError:
            raise ConfigError("store", "Redis needs the package's extra: pip install dmsg[redis]") from None
        self._limits = limits or StoreLimits()
        self._reactor = reactor
        self._redis = txredisapi.lazyConnectionPool(
            host,
            port,
            dbid=database,
            poolsize=POOL_SIZE,
            charset=None,
            username=username,
            password=password,
            connectTimeout=OPERATION_TIMEOUT_S,
            replyTimeout=OPERATION_TIMEOUT_S,
            convertNumbers=False,
        )

    async def _call(self, method: str, *arguments: Any) -> Any:
        """One command. Whatever goes wrong between here and Redis is ``DiscoveryUnavailable``."""
        try:
            return await getattr(self._redis, method)(*arguments).addTimeout(OPERATION_TIMEOUT_S, self._reactor)
        except Exception as error:
            raise DiscoveryUnavailable(f"Redis failed ({type(error).__name__})") from error

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self.get_json(public_key, now_ns).addCallback(stored_entry)

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return Deferred.fromCoroutine(self._get(public_key, now_ns))

    async def _get(self, public_key: PublicKey, now_ns: int) -> bytes:
        sequence, timestamp, body, expires_ms = await self._call("hmget", f"{_ENTRY}{public_key}", ["s", "t", "b", "x"])
        if sequence is None:
            raise EntryNotFound
        if body is None or (expires_ms and int(expires_ms) <= now_ns // _NS_PER_MS):
            raise expired(int(sequence), int(timestamp) - _TIMESTAMP_SHIFT)
        return bytes(body)

    def put(self, entry: Entry, now_ns: int) -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return shielded(Deferred.fromCoroutine(self._put(entry, now_ns)))

    async def _put(self, entry: Entry, now_ns: int) -> bool:
        expires_ns = self._limits.expires_ns(entry, now_ns)
        life_ns = 0 if expires_ns is None else expires_ns - now_ns + self._limits.tombstone_ttl_ns
        answer = await self._call(
            "eval",
            _PUT,
            [f"{_ENTRY}{entry.static}", _SERVERS, _EXPIRING],
            [
                str((entry.sequence - 1) % (1 << 64)),
                str(entry.sequence),
                f"{entry.timestamp + _TIMESTAMP_SHIFT:020}",
                entry.to_json(),
                "" if expires_ns is None else str(-(-expires_ns // _NS_PER_MS)),
                str(life_ns // _NS_PER_MS),
                str(int(is_available(entry))),
                str(self._limits.entries + self._limits.tombstones),
                str(now_ns // _NS_PER_MS),
            ],
        )
        if answer in _REFUSALS:
            raise _REFUSALS[answer]
        return bool(answer == b"first")

    def available_servers(self, limit: int, now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return Deferred.fromCoroutine(self._available_servers(limit, now_ns))

    async def _available_servers(self, limit: int, now_ns: int) -> list[Entry]:
        bodies = await self._call("eval", _AVAILABLE, [_SERVERS], [str(now_ns // _NS_PER_MS), str(limit)])
        return [stored_entry(bytes(body)) for body in bodies]

    def available_keys(self, limit: int, now_ns: int) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return Deferred.fromCoroutine(self._available_keys(limit, now_ns))

    async def _available_keys(self, limit: int, now_ns: int) -> list[bytes]:
        names = await self._call("eval", _KEYS, [_SERVERS], [str(now_ns // _NS_PER_MS), str(limit)])
        try:
            return [bytes.fromhex(bytes(name).decode("ascii").removeprefix(_ENTRY)) for name in names]
        except ValueError:
            raise DiscoveryUnavailable("a stored key is damaged") from None

    def servers_of(self, keys: list[bytes], now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return Deferred.fromCoroutine(self._servers_of(keys, now_ns))

    async def _servers_of(self, keys: list[bytes], now_ns: int) -> list[Entry]:
        names = [f"{_ENTRY}{key.hex()}" for key in keys]
        bodies = await self._call("eval", _SERVERS_OF, [_SERVERS], [str(now_ns // _NS_PER_MS), *names])
        return [stored_entry(bytes(body)) for body in bodies]

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        done: Deferred[None] = self._redis.disconnect()
        return done.addCallback(lambda _: None)
