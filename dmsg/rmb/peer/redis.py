"""Lists in a Redis, and the connections to it: the owner of txredisapi here, imported late because it installs the reactor.

Whoever pushes does it at the head of a list, whoever takes does it at the tail: the oldest message comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as NotInTime

from dmsg.address import RedisAddress
from dmsg.errors import ConfigError
from dmsg.glue.connecting import client_endpoint
from dmsg.glue.sockets import tune_socket, write_at_once
from dmsg.rmb.peer.errors import RedisAway, RedisRefused

#: A command that is not answered in so long ends its connection, in seconds: Redis answers in microseconds.
REPLY_TIMEOUT_S: Final = 5.0
#: Attempts to connect are this far apart at first and at last, in seconds: a Redis that is back is used soon.
RETRY_FIRST_S: Final = 0.1
RETRY_LIMIT_S: Final = 2.0
#: Redis itself ends a wait for a message after so long, in whole seconds. So that no program stops in the middle of one,
#: a wait is never broken off, and stopping takes this long at most.
TAKE_S: Final = 1
#: Replies that mean "not now", and that the command was not carried out.
_NOT_NOW: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "NOREPLICAS", "OOM")

# KEYS: list. ARGV: message, most messages, most bytes, seconds the list is kept. The bytes are looked at in longer lists only:
# they are an estimate from five messages, and a short list has room for its messages' own limit.
_PUSH_IF_ROOM: Final = """
local length = redis.call('LLEN', KEYS[1])
if length >= tonumber(ARGV[2]) then return 0 end
if length >= 16 and redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 5) >= tonumber(ARGV[3]) then return 0 end
length = redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return length
"""
# KEYS: note, list. ARGV: message, most messages, seconds the list is kept, and what tells that it has been pushed already: "" for
# nothing, "note" for a missing note, "list" for the message among the newest ones.
_PUSH_ONCE: Final = """
local there = redis.call('DEL', KEYS[1])
if ARGV[4] == 'note' and there == 0 then return 0 end
if ARGV[4] == 'list' then
    for _, found in ipairs(redis.call('LRANGE', KEYS[2], 0, 99)) do
        if found == ARGV[1] then return 0 end
    end
end
redis.call('LPUSH', KEYS[2], ARGV[1])
redis.call('LTRIM', KEYS[2], 0, ARGV[2] - 1)
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""


class Doubt(Enum):
    """What tells whether a message was pushed before, by an attempt whose outcome is not known."""

    #: There was no such attempt.
    NONE = ""
    #: It was if its note, which is known to have been written, is gone.
    NOTE = "note"
    #: It was if it is in the list. It may be gone from there, too, but nothing better is known.
    LIST = "list"


class _Tuned:
    """An endpoint whose connections send small commands at once, and find out when the host is gone."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    def connect(self, factory: Any) -> Deferred[Any]:
        def tune(protocol: Any) -> Any:
            tune_socket(protocol.transport)
            write_at_once(protocol.transport)
            return protocol

        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addCallback(tune)


class RedisLink:
    """One connection, made again as often as it is lost, and at the first use after it was refused."""

    def __init__(self, address: RedisAddress, reactor: Any) -> None:
        """Raises ``ConfigError`` without the library; Redis need not be there yet."""
        try:
            import txredisapi
        except ImportError:
            raise ConfigError("redis", "needs the package's extra: pip install dmsg[rmb]") from None
        self._library: Any = txredisapi
        self._address = address
        self._reactor = reactor
        self._closed = False
        self._factory = self._open()

    def _open(self) -> Any:
        address = self._address
        factory = self._library.RedisFactory(
            "",
            address.database or None,
            1,
            isLazy=True,
            charset=None,
            password=address.password,
            replyTimeout=REPLY_TIMEOUT_S,
            convertNumbers=False,
            username=address.username,
        )
        factory.initialDelay, factory.maxDelay = RETRY_FIRST_S, RETRY_LIMIT_S
        factory.deferred.addErrback(lambda _: None)  # a connection that is refused shows at its use
        factory.startConnecting(_Tuned(client_endpoint(self._reactor, address.server, REPLY_TIMEOUT_S)))
        return factory

    async def connection(self, wait_s: float) -> Any:
        """The connection, once there is one; ``RedisAway`` after ``wait_s``, or if Redis wants other credentials."""
        if self._factory.stopped and not self._closed:
            self._factory = self._open()
        for connection in self._factory.pool:  # the library would take a Deferred, a timer and a draw for it
            if connection.connected:
                return connection
        try:
            return await self._factory.getConnection(peek=True).addTimeout(wait_s, self._reactor)
        except (NotInTime, self._library.RedisError):
            raise RedisAway("not connected", maybe_done=False) from None

    async def call(self, method: str, *arguments: Any, wait_s: float = REPLY_TIMEOUT_S) -> Any:
        """The reply to one command of the connection, for which ``wait_s`` is waited first.

        Raises ``RedisAway``, which tells whether the command may have been carried out, or ``RedisRefused``.
        """
        connection = await self.connection(wait_s)
        try:
            return await getattr(connection, method)(*arguments)
        except self._library.ResponseError as error:
            raise _refusal(error) from None
        except self._library.RedisError as error:
            raise RedisAway(str(error) or type(error).__name__, maybe_done=True) from None

    async def close(self) -> None:
        """Let go of the connection at once. What is under way fails."""
        self._closed = True
        for connection in self._factory.pool:
            connection.transport.abortConnection()
        await self._factory.disconnect()


def _refusal(error: BaseException) -> RedisAway | RedisRefused:
    text = str(error)
    return RedisAway(text, maybe_done=False) if text.startswith(_NOT_NOW) else RedisRefused(text)


class Taker:
    """Takes the messages of one list, over a connection of its own: waiting for one blocks it."""

    def __init__(self, address: RedisAddress, key: str, reactor: Any) -> None:
        self.key = key
        self._reactor = reactor
        self._link = RedisLink(address, reactor)

    async def take(self, wait_s: int = TAKE_S) -> bytes | None:
        """The oldest message; ``None`` if none has come in ``wait_s``, whole seconds. Raises as :meth:`RedisLink.call`.

        Not to be cancelled: Redis may have given a message away by then.
        """
        connection = await self._link.connection(REPLY_TIMEOUT_S)
        waiting: Deferred[Any] = connection.brpop([self.key], wait_s)
        try:
            found = await waiting.addTimeout(wait_s + REPLY_TIMEOUT_S, self._reactor)
        except NotInTime:
            connection.transport.abortConnection()
            raise RedisAway("no reply", maybe_done=True) from None
        except self._link._library.ResponseError as error:
            raise _refusal(error) from None
        except self._link._library.RedisError as error:
            raise RedisAway(str(error), maybe_done=True) from None
        return None if not found else bytes(found[1])

    async def close(self) -> None:
        """Let go of the connection. To be called while nothing is being taken."""
        await self._link.close()


class RedisLists:
    """Pushes messages, and keeps notes (keys that expire), over one connection for all.

    Every method waits up to ``wait_s`` for a connection and raises as :meth:`RedisLink.call` does.
    """

    def __init__(self, address: RedisAddress, reactor: Any) -> None:
        self._link = RedisLink(address, reactor)

    async def push(self, key: str, data: bytes, wait_s: float = REPLY_TIMEOUT_S) -> None:
        """Append to a list that is not ours to bound."""
        await self._link.call("lpush", key, data, wait_s=wait_s)

    async def put_back(self, key: str, data: bytes, wait_s: float = REPLY_TIMEOUT_S) -> None:
        """Make ``data`` the next message that is taken from a list."""
        await self._link.call("rpush", key, data, wait_s=wait_s)

    async def push_if_room(
        self, key: str, data: bytes, *, most: int, most_bytes: int, keep_s: int, wait_s: float
    ) -> int:
        """Append, and keep the list for ``keep_s`` from now; gives its length, or 0 if there is no room: if it has ``most``
        messages or, from the 16th on, takes ``most_bytes``."""
        arguments = [data, str(most), str(most_bytes), str(keep_s)]
        return int(await self._link.call("eval", _PUSH_IF_ROOM, [key], arguments, wait_s=wait_s))

    async def push_once(
        self, note: str, key: str, data: bytes, *, most: int, keep_s: int, doubt: Doubt, wait_s: float
    ) -> bool:
        """Append, drop all but the newest ``most``, keep the list for ``keep_s`` and remove a note, all in one.

        If the message has been pushed before, as far as ``doubt`` tells, nothing happens (``False``).
        """
        arguments = [data, str(most), str(keep_s), doubt.value]
        return bool(await self._link.call("eval", _PUSH_ONCE, [note, key], arguments, wait_s=wait_s))

    async def keep(self, note: str, data: bytes, keep_s: int) -> None:
        """Write a note that expires."""
        await self._link.call("setex", note, keep_s, data)

    async def forget(self, notes: Sequence[str]) -> None:
        """Remove notes."""
        if notes:
            await self._link.call("delete", list(notes))

    async def notes(self, prefix: str, most: int) -> list[tuple[str, bytes]]:
        """Up to ``most`` notes whose names begin with ``prefix``, in no order."""
        found: list[tuple[str, bytes]] = []
        cursor: Any = 0
        while len(found) < most:
            cursor, names = await self._link.call("scan", cursor, f"{prefix}*", 1000)
            if names:
                values = await self._link.call("mget", list(names))
                pairs = zip(names, values, strict=True)
                found += [(bytes(name).decode("utf-8", "replace"), bytes(value)) for name, value in pairs if value]
            if not int(cursor):
                break
        return found[:most]

    async def ping(self) -> None:
        """Ask for a sign of life."""
        await self._link.call("ping")

    async def close(self) -> None:
        """Let go of the connection at once. What is under way fails."""
        await self._link.close()
