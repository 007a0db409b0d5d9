"""A connection to Redis that is made again whenever it is lost, and one that takes the messages of a list."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.endpoints import UNIXClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from dmsg.address import RedisAddress
from dmsg.errors import DmsgError
from dmsg.glue.connecting import client_endpoint, connect_reason, quiet_factory, tls_options, tls_problem
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.shell import Shell
from dmsg.glue.waiters import Waiters
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.resp import ReplyError, RespClient

#: A command without an answer for this many seconds ends its connection: Redis answers in microseconds.
REPLY_TIMEOUT_S: Final = 5.0
#: Redis itself ends a wait for a message after this many whole seconds. A wait is never broken off, so stopping takes this
#: long at most.
TAKE_S: Final = 1
#: The pauses between attempts to connect, in seconds: a Redis that is back is used soon.
_PAUSES: Final = Backoff(0.0375, 1.5)
#: Replies that mean "not now", and that the command was not carried out.
_NOT_NOW: Final = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "NOREPLICAS",
    "OOM",
    "MISCONF",  # it cannot write to its disk, and takes nothing until it can
    "UNBLOCKED",  # it became a replica while a command waited for a message
)
#: What Redis 6 puts before the error of a command that a script called. Redis 7 gives the error as it is.
_IN_SCRIPT: Final = re.compile(r"ERR Error running script \(call to \w+\): (?:@user_script: ?\d+: )+-?")
#: In the reply to a write, or to a wait for a message: this server has become a replica, and another server may have its
#: address now.
_DEMOTED: Final = ("READONLY ", "UNBLOCKED ")
#: At most one connection in this many seconds is given up for that: there may be no other server at the address.
DEMOTED_S: Final = 5.0

Word = bytes | str | int


@cache
def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _error_of(reply: ReplyError) -> str:
    """The error itself, of a script as of a command."""
    found = _IN_SCRIPT.match(reply.text)
    return reply.text if found is None else reply.text[found.end() :]


def _refusal(redis: RedisAddress, reply: ReplyError) -> RedisAway | RedisRefused:
    text = _error_of(reply)
    return RedisAway(redis, text, maybe_done=False) if text.startswith(_NOT_NOW) else RedisRefused(redis, text)


class RedisConnection:
    """One connection to the database at ``address``, from the first command to :meth:`close`.

    Commands are sent at once, without waiting for the replies to earlier ones. Each connection first loads ``scripts``; it does
    not matter whether Redis allows that. ``trust`` is an ``IOpenSSLTrustRoot`` in place of the platform's, for ``rediss``.
    """

    def __init__(
        self,
        address: RedisAddress,
        reactor: Any,
        *,
        scripts: Sequence[str] = (),
        trust: Any = None,
    ) -> None:
        self.address = address
        #: Why there is no connection; "" while there is one.
        self.problem = "not connected"
        self._reactor = reactor
        self._scripts = scripts
        self._trust = trust
        self._shell: Shell | None = None
        self._core: RespClient | None = None
        self._replies: deque[Deferred[Any]] = deque()
        self._connected: Waiters[None] = Waiters()
        self._lost: Waiters[None] = Waiters()
        self._failures = 0
        self._demoted_at = -DEMOTED_S
        self._attempt: Deferred[Any] | None = None
        self._pause: IDelayedCall | None = None
        self._closed = False

    # --- commands ----------------------------------------------------------------------------------------------------

    def call(self, *words: Word, wait_s: float = REPLY_TIMEOUT_S, patience_s: float = REPLY_TIMEOUT_S) -> Deferred[Any]:
        """Fires with the reply to a command, which is sent when there is a connection, in ``wait_s`` at the latest.

        Fails with :class:`RedisAway`, also when there is no reply in ``patience_s``, or :class:`RedisRefused`.
        """
        if not self.problem:
            return self._send(words, patience_s)
        return ensureDeferred(self._call_later(words, wait_s, patience_s))

    def eval(
        self, script: str, keys: Sequence[str], *arguments: Word, wait_s: float = REPLY_TIMEOUT_S
    ) -> Deferred[Any]:
        """As :meth:`call`, for the result of ``script``, one of ``scripts``, with ``KEYS`` and ``ARGV``.

        The text of the script is sent only if Redis was told to forget it, or does not let us load it.
        """
        return ensureDeferred(self._eval(script, (len(keys), *keys, *arguments), wait_s))

    async def _eval(self, script: str, words: tuple[Word, ...], wait_s: float) -> Any:
        try:
            return await self.call("EVALSHA", _digest(script), *words, wait_s=wait_s)
        except RedisRefused as refused:
            if not refused.reason.startswith("NOSCRIPT"):
                raise
            return await self.call("EVAL", script, *words, wait_s=wait_s)

    async def _call_later(self, words: tuple[Word, ...], wait_s: float, patience_s: float) -> Any:
        self._begin()
        if not self._closed:
            await self._connected.wait_at_most(wait_s, self._reactor)
        if self.problem:
            raise RedisAway(self.address, self.problem, maybe_done=False)
        return await self._send(words, patience_s)

    def _send(self, words: tuple[Word, ...], patience_s: float) -> Deferred[Any]:
        assert self._core is not None and self._shell is not None
        reply: Deferred[Any] = Deferred()
        self._replies.append(reply)
        self._core.send(words, patience_s, self._reactor.seconds())
        self._shell.flush()
        return reply

    # --- life --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._attempt is None and self._pause is None and self._shell is None and not self._closed:
            self._connect()

    def _connect(self) -> None:
        self._pause = None
        core = RespClient()
        try:
            endpoint = self._endpoint()
        except UnicodeError:  # "xn--" with an invalid encoding behind it
            self._retry("host not found")
            return
        self._attempt = endpoint.connect(quiet_factory(lambda: Shell(core, self, self._reactor)))
        self._attempt.addCallbacks(self._opened, self._failed, callbackArgs=(core,))

    def _endpoint(self) -> Any:
        address, server = self.address, self.address.server
        if isinstance(server, str):
            return UNIXClientEndpoint(self._reactor, server, REPLY_TIMEOUT_S)
        endpoint: Any = client_endpoint(self._reactor, server, REPLY_TIMEOUT_S)
        return wrapClientTLS(tls_options(server.host, self._trust), endpoint) if address.secure else endpoint

    def _opened(self, shell: Any, core: RespClient) -> None:
        self._attempt = None
        if shell.lost:
            self._retry("connection lost")
            return
        self._shell, self._core = shell, core
        address, first = self.address, []
        if address.password is not None:
            user = () if address.username is None else (address.username,)
            first.append(self._send(("AUTH", *user, address.password), REPLY_TIMEOUT_S))
        if address.database:
            first.append(self._send(("SELECT", address.database), REPLY_TIMEOUT_S))
        for script in self._scripts:
            self._send(("SCRIPT", "LOAD", script), REPLY_TIMEOUT_S).addErrback(lambda _: None)
        first.append(self._send(("PING",), REPLY_TIMEOUT_S))
        for reply in first[:-1]:
            reply.addErrback(self._unwelcome)
        first[-1].addCallbacks(self._welcome, self._unwelcome)

    def _welcome(self, _: Any) -> None:
        if self._shell is not None and self._shell.error is None:
            self.problem, self._failures = "", 0
            self._connected.fire(None)

    def _unwelcome(self, failure: Failure) -> None:
        error = failure.value
        if isinstance(error, RedisAway | RedisRefused) and self._shell is not None and self._shell.error is None:
            self.problem = error.reason
            self._shell.fail(error)

    def _failed(self, failure: Failure) -> None:
        self._attempt = None
        if failure.check(CancelledError) is None:
            self._retry(connect_reason(failure.value))

    def _retry(self, problem: str) -> None:
        self.problem = problem
        if not self._closed and self._pause is None:
            self._failures += 1
            self._pause = self._reactor.callLater(_PAUSES.longest_s(self._failures), self._connect)

    async def close(self) -> None:
        """Let go of the connection at once. Commands without a reply fail."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._attempt is not None:
            self._attempt.cancel()
        self.problem = self.problem or "closed"
        self._connected.fire(None)
        if self._shell is not None:
            lost = self._lost.wait()
            self._shell.cut()
            await lost

    # --- from the shell ----------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[Any]) -> None:
        """Hand out the replies."""
        if not self.problem and any(
            isinstance(one, ReplyError) and _error_of(one).startswith(_DEMOTED) for one in events
        ):
            self._leave_replica(shell)
        for reply in events:
            waiting = self._replies.popleft()
            if waiting.called:
                continue  # cancelled
            if isinstance(reply, ReplyError):
                waiting.errback(_refusal(self.address, reply))
            else:
                waiting.callback(reply)

    def _leave_replica(self, shell: Shell) -> None:
        """Connect again, to the server at the address by now: a replica keeps the connections it had before."""
        now = self._reactor.seconds()
        if not 0 <= now - self._demoted_at < DEMOTED_S:
            self._demoted_at = now
            self.problem = "a replica"
            shell.fail(RedisAway(self.address, self.problem, maybe_done=True))

    def after_read(self, shell: Shell) -> None:
        """Send the commands that the replies led to."""
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """A command is over when its reply is there, not when it is written."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Fail the commands that have no reply, and connect again."""
        self._shell = self._core = None
        problem = tls_problem(reason.value)
        why = getattr(error, "reason", None) or (f"TLS: {problem}" if problem else "connection lost")
        self._retry(why)
        waiting, self._replies = self._replies, deque()
        for one in waiting:
            if not one.called:
                one.errback(RedisAway(self.address, why, maybe_done=True))
        self._lost.fire(None)


class Taker:
    """Takes the messages of one list, over a connection of its own: waiting for one blocks it.

    With ``taken``, another list, Redis moves each message there, and it stays until it is removed: so it is not lost when this
    process or its connection ends in the meantime.
    """

    def __init__(self, address: RedisAddress, key: str, reactor: Any, *, taken: str = "") -> None:
        self.key = key
        self.taken = taken
        self._redis = RedisConnection(address, reactor)

    async def take(self, wait_s: int = TAKE_S) -> bytes | None:
        """The oldest message; ``None`` if none has come in ``wait_s``, whole seconds.

        Raises as :meth:`RedisConnection.call`. Not to be cancelled: Redis may have given a message away by then.
        """
        patience_s = wait_s + REPLY_TIMEOUT_S
        if self.taken:
            kept: bytes | None = await self._redis.call(
                "BRPOPLPUSH", self.key, self.taken, wait_s, patience_s=patience_s
            )
            return kept
        found = await self._redis.call("BRPOP", self.key, wait_s, patience_s=patience_s)
        return None if found is None else found[1]

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, so that nothing is being taken."""
        return bool(self._redis.problem)

    async def close(self) -> None:
        """Let go of the connection. To be called while nothing is being taken."""
        await self._redis.close()
