"""Waiting envelopes in Redis, in the public relay's layout, for one or several relay processes.

A session's queue is the stream ``stream:TWIN`` or ``stream:TWIN:CONNECTION``. An entry has one field ``_`` with the envelope,
and is deleted (XDEL) after the envelope was written to the socket. A stream expires an hour after the last push. The public
relay may share the database. Besides the streams there are these keys, all with an expiry:

======================================  ==============================================================================
``dmsg.rmb.at:SESSION``                 the process that the session is connected to
``dmsg.rmb.told:SESSION``               that process has been told of envelopes and has not read them yet
``dmsg.rmb.inbox:PROCESS``              list of what a process is told: ``p`` or ``r`` (put, replaced) and the session
``dmsg.rmb.queues:TWIN``                sorted set of a twin's queues, and of its sessions of late, by when they go
``dmsg.rmb.from:TWIN``                  bytes that a twin has sent to queues without a session, this hour
======================================  ==============================================================================

Each operation is one script. An answer with several parts is packed into one string, which is faster to read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import RedisAddress
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.redis import RedisConnection, Taker, Word
from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TTL_S
from dmsg.rmb.core.wire import parse_envelope
from dmsg.rmb.relay.errors import StoreError, StoreFull, StoreUnavailable
from dmsg.rmb.relay.stores.base import KEPT_S, ROW_BYTES, QueueLimits, Stored

#: Seconds until Redis forgets that a session is connected to a process which no longer confirms it, and seconds between two
#: confirmations. The streams of this process's sessions are checked as often, because a public relay does not announce pushes.
PRESENT_S: Final = 30
SWEPT_EVERY_S: Final = 2.0
#: Sessions that one script checks: some 200 µs of Redis.
SWEPT_AT_ONCE: Final = 500
#: Queues of one twin at a time. Above that, only the session without a name and sessions that were connected within the last
#: hour get new queues, because strangers may send to any number of names.
QUEUES_OF_TWIN: Final = 64
#: Queues and recently ended sessions of one twin that are remembered: as many as it may have sessions at a time.
SESSIONS_OF_LATE: Final = 256
#: Seconds for which an operation waits for a reconnection: senders wait for it.
WAIT_S: Final = 1.0
#: Seconds after a failure until the inbox is read again.
RETRY_S: Final = 1.0
#: Seconds for which the measured memory use of the Redis is cached.
_MEMORY_EVERY_S: Final = 1.0
#: Age in seconds above which entries of a stream have expired, whatever their own lifetime.
_OLDEST_S: Final = MAX_TTL_S + MAX_AHEAD_S

# KEYS: stream, at, told, queues, from. ARGV: data, most envelopes, most bytes, kept s, source, source bytes, size, our inbox,
# session, most queues, oldest s. Returns 0, or why there is no room.
_PUSH: Final = """
local now = redis.call('TIME')
local now_s = tonumber(now[1])
local length = redis.call('XLEN', KEYS[1])
if length > 0 then
    redis.call('XTRIM', KEYS[1], 'MINID', '~', (now_s - tonumber(ARGV[11])) * 1000)
    if length >= tonumber(ARGV[2]) then
        redis.call('XTRIM', KEYS[1], 'MINID', (now_s - tonumber(ARGV[11])) * 1000)
        length = redis.call('XLEN', KEYS[1])
    end
    if length >= tonumber(ARGV[2]) then return 'queue' end
    if length >= 16 and redis.call('MEMORY', 'USAGE', KEYS[1]) >= tonumber(ARGV[3]) then return 'queue' end
end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now_s)
local at = redis.call('GET', KEYS[2])
local known = at or not string.find(ARGV[9], ':', 1, true) or redis.call('ZSCORE', KEYS[4], ARGV[9])
if not known and redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[10]) then return 'twin' end
if not at and ARGV[5] ~= '0' then
    local sent = redis.call('INCRBY', KEYS[5], ARGV[7])
    if sent == tonumber(ARGV[7]) then redis.call('EXPIRE', KEYS[5], ARGV[4]) end
    if sent > tonumber(ARGV[6]) then
        redis.call('DECRBY', KEYS[5], ARGV[7])
        return 'source'
    end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', '_', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[4], now_s + tonumber(ARGV[4]), ARGV[9])
redis.call('EXPIRE', KEYS[4], ARGV[4])
if at and at ~= ARGV[8] and redis.call('SET', KEYS[3], '1', 'NX', 'EX', 5) then
    redis.call('LPUSH', at, 'p' .. ARGV[9])
    redis.call('EXPIRE', at, 60)
end
return 0
"""
# KEYS: stream, told. ARGV: where to begin, most envelopes, most bytes.
_READ: Final = """
redis.call('DEL', KEYS[2])
local start, left, room, pieces = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}
while left > 0 do
    local some = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', math.min(left, 8))
    for _, entry in ipairs(some) do
        local id, fields = entry[1], entry[2]
        start = '(' .. id
        if #fields ~= 2 or fields[1] ~= '_' then
            redis.call('XDEL', KEYS[1], id)
        else
            room = room - #fields[2]
            if room < 0 and #pieces > 0 then return table.concat(pieces) end
            pieces[#pieces + 1] = struct.pack('>BI4', #id, #fields[2])
            pieces[#pieces + 1] = id
            pieces[#pieces + 1] = fields[2]
            left = left - 1
        end
    end
    if #some == 0 then break end
end
return table.concat(pieces)
"""
# KEYS: at. ARGV: our inbox, session, present s. Also who had the session is told.
_ATTACH: Final = """
local old = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
if old and old ~= ARGV[1] then
    redis.call('LPUSH', old, 'r' .. ARGV[2])
    redis.call('EXPIRE', old, 60)
end
return 0
"""
# KEYS: at, queues. ARGV: our inbox, session, kept s, most sessions of late.
_DETACH: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
local now_s = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_s)
if redis.call('ZCARD', KEYS[2]) < tonumber(ARGV[4]) then
    redis.call('ZADD', KEYS[2], now_s + tonumber(ARGV[3]), ARGV[2])
    redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return 0
"""
# KEYS: at, stream, at, stream … ARGV: our inbox, present s. Returns a letter for each session: - (nothing), p or r.
_SWEEP: Final = """
local found = {}
for one = 1, #KEYS, 2 do
    local at = redis.call('GET', KEYS[one])
    if at and at ~= ARGV[1] then
        found[#found + 1] = 'r'
    else
        redis.call('SET', KEYS[one], ARGV[1], 'EX', ARGV[2])
        found[#found + 1] = redis.call('XLEN', KEYS[one + 1]) > 0 and 'p' or '-'
    end
end
return table.concat(found)
"""
# KEYS: inbox. What is there, each with its length before it; it is taken out.
_NOTICES: Final = """
local pieces = {}
for _, text in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    pieces[#pieces + 1] = struct.pack('>I4', #text)
    pieces[#pieces + 1] = text
end
redis.call('DEL', KEYS[1])
return table.concat(pieces)
"""
#: Each connection loads these scripts first. A script that had to be sent again, with its text, would run after later ones: a
#: session would be present again after it left, and envelopes would change their order.
_SCRIPTS: Final = (_PUSH, _READ, _ATTACH, _DETACH, _SWEEP, _NOTICES)
_ENTRY: Final = struct.Struct(">BI")
_LENGTH: Final = struct.Struct(">I")
_log = Logger()


def _stream(session: SessionAddress) -> str:
    return f"stream:{session}"


def _at(session: SessionAddress) -> str:
    return f"dmsg.rmb.at:{session}"


def _told(session: SessionAddress) -> str:
    return f"dmsg.rmb.told:{session}"


def _queues(session: SessionAddress) -> str:
    return f"dmsg.rmb.queues:{session.twin}"


def _session(text: str) -> SessionAddress:
    twin, colon, connection = text.partition(":")
    return SessionAddress(int(twin), connection if colon else None)


class RedisQueues:
    """A :class:`~dmsg.rmb.relay.stores.base.QueueStore` in the Redis at ``address``, which need not be reachable yet.

    Limits of bytes use the estimates of Redis. The limit of one sender counts the bytes that it has sent to sessions that
    are not connected, in an hour.
    """

    shared = True

    def __init__(self, address: RedisAddress, reactor: Any, *, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._reactor = reactor
        self._inbox = f"dmsg.rmb.inbox:{os.urandom(8).hex()}"
        self._redis = RedisConnection(address, reactor, scripts=_SCRIPTS)
        self._taker = Taker(address, self._inbox, reactor)
        #: Sessions of this process; ``False`` for those that Redis does not know yet.
        self._attached: dict[SessionAddress, bool] = {}
        self._pushed: Callable[[SessionAddress], None] = lambda _: None
        self._replaced: Callable[[SessionAddress], None] = lambda _: None
        self._closed = False
        self._measured_at: float | None = None
        self._measuring = False
        #: Pushes that wait for the measurement of the memory use of the Redis.
        self._measured: Waiters[None] = Waiters()
        self._full = False
        self._calls: dict[str, IDelayedCall] = {}
        self._running: dict[str, Deferred[None]] = {}

    # --- envelopes ---------------------------------------------------------------------------------------------------

    def push(
        self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int = 0
    ) -> Deferred[bool]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._push(session, data, now, expires_at, source))

    async def _push(self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int) -> bool:
        if expires_at <= now:
            return False
        if len(data) + ROW_BYTES > self._limits.queue_bytes:
            raise StoreFull("queue")
        if self._measuring:
            await self._measured.wait()
            pushing = self._start_push(session, data, source)
        else:
            try:
                await self._measure()
                pushing = self._start_push(session, data, source)
            finally:
                self._measured.fire(None)  # after our own push has started, to keep the order of the pushes
        why = await pushing
        if why:
            raise StoreFull(why.decode("ascii"))
        return True

    def _start_push(self, session: SessionAddress, data: bytes, source: int) -> Deferred[bytes]:
        if self._full:
            raise StoreFull("store")
        limits = self._limits
        keys = [
            _stream(session),
            _at(session),
            _told(session),
            _queues(session),
            f"dmsg.rmb.from:{source}",
        ]
        return Deferred.fromCoroutine(
            self._eval(
                _PUSH,
                keys,
                data,
                limits.queue_envelopes,
                limits.queue_bytes,
                int(KEPT_S),
                source,
                limits.source_bytes,
                len(data) + ROW_BYTES,
                self._inbox,
                str(session),
                QUEUES_OF_TWIN,
                _OLDEST_S,
            )
        )

    async def _measure(self) -> None:
        """Measure how much memory the Redis uses, at most once a second."""
        now = self._reactor.seconds()
        if self._measured_at is not None and now - self._measured_at < _MEMORY_EVERY_S:
            return
        self._measured_at = now
        self._measuring = True
        try:
            lines: list[bytes] = (await self._call("INFO", "memory")).splitlines()
        finally:
            self._measuring = False
        info = dict(line.split(b":", 1) for line in lines if b":" in line)
        most = min(self._limits.redis_bytes, int(info[b"maxmemory"]) or self._limits.redis_bytes)
        self._full = int(info[b"used_memory"]) >= most

    def read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> Deferred[list[Stored]]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._read(session, after, limit, max_bytes, now))

    async def _read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> list[Stored]:
        while True:
            start = "-" if after is None else f"({after}"
            packed = await self._eval(_READ, [_stream(session), _told(session)], start, limit, max_bytes)
            found, over = [], []
            position = 0
            while position < len(packed):
                id_bytes, size = _ENTRY.unpack_from(packed, position)
                middle = position + _ENTRY.size + id_bytes
                after = packed[position + _ENTRY.size : middle].decode("ascii")
                position = middle + size
                data = packed[middle:position]
                left_s = _left_s(data, now)
                if left_s is None:
                    over.append(after)
                else:
                    found.append(Stored(after, data, now + left_s))
            if over:
                await self.delete(session, over)
            if found or not over:
                return found

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._delete(session, list(ids)))

    async def _delete(self, session: SessionAddress, ids: list[str]) -> None:
        if ids:
            await self._call("XDEL", _stream(session), *ids)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def attach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        self._attached[session] = False
        self._start("sweep", SWEPT_EVERY_S, self._sweep)
        self._start("listen", 0.0, self._listen)
        Deferred.fromCoroutine(self._attach(session)).addErrback(lambda failure: failure.trap(StoreError))

    async def _attach(self, session: SessionAddress) -> None:
        await self._eval(_ATTACH, [_at(session)], self._inbox, str(session), PRESENT_S)
        if session in self._attached:
            self._attached[session] = True

    def detach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        if self._attached.pop(session, None) is not None:
            keys = [_at(session), _queues(session)]
            gone = Deferred.fromCoroutine(
                self._eval(_DETACH, keys, self._inbox, str(session), int(KEPT_S), SESSIONS_OF_LATE)
            )
            gone.addErrback(lambda failure: failure.trap(StoreError))  # away, or closed: its key expires by itself

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._connected(session))

    async def _connected(self, session: SessionAddress) -> bool:
        return session in self._attached or bool(await self._call("EXISTS", _at(session)))

    def listen(self, pushed: Callable[[SessionAddress], None], replaced: Callable[[SessionAddress], None]) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        self._pushed, self._replaced = pushed, replaced

    def _tell(self, letter: str, session: SessionAddress) -> None:
        if session not in self._attached:
            return
        if letter == "r":
            if self._attached[session]:  # otherwise it has come back, and Redis did not know yet
                del self._attached[session]
                self._replaced(session)
        elif letter == "p":
            self._pushed(session)

    # --- what goes on by itself --------------------------------------------------------------------------------------

    def _start(self, name: str, delay_s: float, work: Callable[[], Any]) -> None:
        """Run ``work`` after ``delay_s``, and again after the pause that it returns, unless it is running already."""
        if self._closed or name in self._calls or name in self._running:
            return

        def go() -> None:
            del self._calls[name]
            self._running[name] = Deferred.fromCoroutine(work())
            self._running[name].addBoth(done)

        def done(pause_s: Any) -> None:
            del self._running[name]
            if isinstance(pause_s, Failure):
                if not pause_s.check(CancelledError):
                    _log.failure("the store's {name} failed", pause_s, name=name)
                pause_s = None
            if self._attached:
                self._start(name, RETRY_S if pause_s is None else pause_s, work)

        self._calls[name] = self._reactor.callLater(delay_s, go)

    async def _sweep(self) -> float | None:
        """Confirm that the sessions are still here, and check whether something waits for them."""
        try:
            for session in [one for one, known in self._attached.items() if not known]:
                if session in self._attached:  # it may have left while the sessions before it were attached
                    await self._attach(session)
            sessions = list(self._attached)
            for start in range(0, len(sessions), SWEPT_AT_ONCE):
                await self._look_at(sessions[start : start + SWEPT_AT_ONCE])
        except StoreError:  # away, or full: the key that says that a session is here takes memory too
            return None
        return SWEPT_EVERY_S

    async def _look_at(self, sessions: list[SessionAddress]) -> None:
        some = [one for one in sessions if self._attached.get(one)]
        keys = [key for session in some for key in (_at(session), _stream(session))]
        letters = await self._eval(_SWEEP, keys, self._inbox, PRESENT_S) if some else b""
        for letter, session in zip(letters.decode("ascii"), some, strict=True):
            self._tell(letter, session)

    async def _listen(self) -> float | None:
        """Wait for what other processes tell this one."""
        try:
            notice = await self._taker.take()
            if notice is not None:
                packed = await self._eval(_NOTICES, [self._inbox])
                notices, position = [notice], 0
                while position < len(packed):
                    (size,) = _LENGTH.unpack_from(packed, position)
                    position += _LENGTH.size + size
                    notices.append(packed[position - size : position])
                for text in dict.fromkeys(one.decode("utf-8", "surrogateescape") for one in notices):
                    session = _session(text[1:])
                    if text.startswith("r"):  # it may have come back since
                        await self._look_at([session])
                    else:
                        self._tell(text[:1], session)
        except (RedisAway, RedisRefused, StoreError):
            return None
        return 0.0

    async def _eval(self, script: str, keys: list[str], *arguments: Word) -> Any:
        return await self._ask(self._redis.eval, script, keys, *arguments)

    async def _call(self, *words: Word) -> Any:
        return await self._ask(self._redis.call, *words)

    async def _ask(self, how: Callable[..., Deferred[Any]], *words: Any) -> Any:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        try:
            return await how(*words, wait_s=WAIT_S)
        except RedisAway as error:
            if error.reason.startswith("OOM"):
                raise StoreFull("store") from None
            raise StoreUnavailable(str(error)) from None
        except RedisRefused as error:
            raise StoreUnavailable(str(error)) from None

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self._closed:
            return
        for session in list(self._attached):
            self.detach(session)
        self._attached.clear()
        with contextlib.suppress(StoreUnavailable):
            await self._call("PING")  # when it is answered, everything before it has arrived
        self._closed = True
        while self._calls:  # two closes at the same time may both come here
            self._calls.popitem()[1].cancel()
        for running in list(self._running.values()):
            running.cancel()
        await self._taker.close()
        await self._redis.close()


def _left_s(data: bytes, now: float) -> int | None:
    try:
        envelope = parse_envelope(data)
    except MalformedEnvelope:
        return None
    return remaining(now, envelope.timestamp, envelope.expiration)
