"""Waiting envelopes in Redis, in the public relay's layout, for one or several relay processes.

An entry is deleted (XDEL) after the envelope was written to the socket. The public relay may share the database.
:mod:`~dmsg.rmb.relay.stores.redis_layout` has the keys and the layout.
"""

from __future__ import annotations

import contextlib
import os
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
from dmsg.rmb.relay.stores import redis_layout as layout
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
#: A sender may store an eighth of what is free, 128 MiB of 1 GiB, so that a few twins do not fill the Redis.
SHARES: Final = 8
#: Seconds for which the measured memory use of the Redis is cached.
_MEMORY_EVERY_S: Final = 1.0
#: Age in seconds above which entries of a stream have expired, whatever their own lifetime.
_OLDEST_S: Final = MAX_TTL_S + MAX_AHEAD_S
_log = Logger()


class RedisQueues:
    """A :class:`~dmsg.rmb.relay.stores.base.QueueStore` in the Redis at ``address``, which need not be reachable yet.

    Limits of bytes use the estimates of Redis. The limit of one sender counts the bytes that it has sent to sessions that
    are not connected, in an hour. It is lower while little is free (:data:`SHARES`).
    """

    shared = True
    new_pushes = float("inf")

    def __init__(self, address: RedisAddress, reactor: Any, *, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._reactor = reactor
        self._inbox = layout.inbox(os.urandom(8).hex())
        self._redis = RedisConnection(address, reactor, scripts=layout.SCRIPTS)
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
        #: Bytes that the Redis may still take, as measured last.
        self._free_bytes = self._limits.redis_bytes
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
        if self._free_bytes <= 0:
            raise StoreFull("store")
        limits = self._limits
        keys = [
            layout.stream(session),
            layout.at(session),
            layout.told(session),
            layout.queues(session),
            layout.sent_by(source),
        ]
        return Deferred.fromCoroutine(
            self._eval(
                layout.PUSH,
                keys,
                data,
                limits.queue_envelopes,
                limits.queue_bytes,
                int(KEPT_S),
                source,
                min(limits.source_bytes, self._free_bytes // SHARES),
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
        if self._measured_at is not None and 0 <= now - self._measured_at < _MEMORY_EVERY_S:
            return
        self._measured_at = now
        self._measuring = True
        try:
            lines: list[bytes] = (await self._call("INFO", "memory")).splitlines()
        finally:
            self._measuring = False
        info = dict(line.split(b":", 1) for line in lines if b":" in line)
        most = min(self._limits.redis_bytes, int(info[b"maxmemory"]) or self._limits.redis_bytes)
        self._free_bytes = most - int(info[b"used_memory"])

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
            packed = await self._eval(
                layout.READ, [layout.stream(session), layout.told(session)], start, limit, max_bytes
            )
            found, over = [], []
            for entry_id, data in layout.entries(packed):
                left_s = _left_s(data, now)
                if left_s is None:
                    over.append(entry_id)
                else:
                    found.append(Stored(entry_id, data, now + left_s))
            if over:
                await self.delete(session, over)
            if found or not over:
                return found
            after = over[-1]

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._delete(session, list(ids)))

    async def _delete(self, session: SessionAddress, ids: list[str]) -> None:
        if ids:
            await self._call("XDEL", layout.stream(session), *ids)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def attach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        self._attached[session] = False
        self._start("sweep", SWEPT_EVERY_S, self._sweep)
        self._start("listen", 0.0, self._listen)
        Deferred.fromCoroutine(self._attach(session)).addErrback(lambda failure: failure.trap(StoreError))

    async def _attach(self, session: SessionAddress) -> None:
        await self._eval(layout.ATTACH, [layout.at(session)], self._inbox, str(session), PRESENT_S)
        if session in self._attached:
            self._attached[session] = True

    def detach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        if self._attached.pop(session, None) is not None:
            keys = [layout.at(session), layout.queues(session)]
            gone = Deferred.fromCoroutine(
                self._eval(layout.DETACH, keys, self._inbox, str(session), int(KEPT_S), SESSIONS_OF_LATE)
            )
            gone.addErrback(lambda failure: failure.trap(StoreError))  # away, or closed: its key expires by itself

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return Deferred.fromCoroutine(self._connected(session))

    async def _connected(self, session: SessionAddress) -> bool:
        return session in self._attached or bool(await self._call("EXISTS", layout.at(session)))

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
        keys = [key for session in some for key in (layout.at(session), layout.stream(session))]
        letters = await self._eval(layout.SWEEP, keys, self._inbox, PRESENT_S) if some else b""
        for letter, session in zip(letters.decode("ascii"), some, strict=True):
            self._tell(letter, session)

    async def _listen(self) -> float | None:
        """Wait for what other processes tell this one."""
        try:
            notice = await self._taker.take()
            if notice is not None:
                packed = await self._eval(layout.NOTICES, [self._inbox])
                notices = [notice, *layout.notices(packed)]
                for text in dict.fromkeys(one.decode("utf-8", "surrogateescape") for one in notices):
                    letter, session = layout.notice(text)
                    if letter == "r":  # it may have come back since
                        await self._look_at([session])
                    else:
                        self._tell(letter, session)
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
