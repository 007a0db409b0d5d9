"""HTTP requests to servers that are not trusted: the owner of treq, which installs the reactor when imported.

Every call has one timeout, which includes the body. A body is cut off at its limit while it comes in; so is a head, on the
connections of :meth:`HttpCaller.connect` (:mod:`dmsg.http.heads`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Hashable, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, TypeVar

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.python.url import URL
from twisted.web.client import Agent, HTTPConnectionPool, ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IResponse
from zope.interface import implementer

from dmsg.foreign import quoted
from dmsg.glue.connecting import NO_DESCRIPTOR, lacks_descriptor, tls_problem
from dmsg.glue.line import Line
from dmsg.http.errors import NoAnswer
from dmsg.http.heads import HeadLimitedEndpoints

T = TypeVar("T")

#: How long one call may take in all, in seconds.
CALL_TIMEOUT_S: Final = 10.0
#: Calls of one host with one method at a time, each over a connection; more wait for their turn. A discovery allows an address
#: 250 connections, and refuses all above that. A POST does not wait for GETs: a client that stops has 5 s to withdraw.
CALLS_AT_ONCE: Final = 64
#: Connections kept open to one host, and how long without use, in seconds: less than a server's idle timeout.
POOL_CONNECTIONS: Final = 4
POOL_IDLE_S: Final = 30.0
#: Connections kept open to all hosts together, because strangers may name the hosts, and each connection has a descriptor.
POOL_CONNECTIONS_IN_ALL: Final = 256
#: Longest body of an answer that is not 200, which is read for its text only.
REFUSAL_LIMIT_BYTES: Final = 64 * 1024


class _Url(URL):
    """A URL whose host is sent as it is written.

    treq takes each host for a name of IDNA, which neither an IPv6 address is nor a name with a ``_``.
    """

    __slots__ = ()

    def to_uri(self) -> URL:
        """The URL with all but an ASCII host encoded."""
        if not self.host.isascii():
            return super().to_uri()
        return URL.to_uri(self.replace(host="")).replace(host=self.host.lower())


class _Body(Protocol):
    """Collects a body up to a limit; ``done`` fires with it. Cancelling ``done`` closes the connection."""

    transport: Any

    def __init__(self, limit_bytes: int) -> None:
        self.done: Deferred[bytes] = Deferred(lambda _: self._abort())
        self._room = limit_bytes
        # Not a list of pieces: a server may send very small ones, and each would be an object of its own.
        self._received = bytearray()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room >= 0:
            self._received += data
        elif not self.done.called:
            self._received.clear()
            self.done.errback(NoAnswer("the answer is too long"))
            self._abort()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        if reason.check(ResponseDone):
            self.done.callback(bytes(self._received))
        else:
            self.done.errback(NoAnswer("the answer was cut off"))


class _Pool(HTTPConnectionPool):
    """Limits the connections kept in all: beyond the limit, the least recently used one is closed. Forgets hosts, too."""

    def __init__(self, reactor: Any, per_host: int) -> None:
        super().__init__(reactor, persistent=True)  # type: ignore[no-untyped-call]
        self.maxPersistentPerHost = per_host
        self.cachedConnectionTimeout = POOL_IDLE_S  # type: ignore[assignment]

    def getConnection(self, key: Any, endpoint: Any) -> Any:
        found = super().getConnection(key, endpoint)
        self._tidy(key)
        return found

    def _putConnection(self, key: Any, connection: Any) -> None:
        super()._putConnection(key, connection)  # type: ignore[no-untyped-call]
        if len(self._timeouts) > POOL_CONNECTIONS_IN_ALL:
            oldest, timeout = next(iter(self._timeouts.items()))
            host = next(host for host, kept in self._connections.items() if oldest in kept)
            timeout.cancel()
            self._removeConnection(host, oldest)

    def _removeConnection(self, key: Any, connection: Any) -> None:
        super()._removeConnection(key, connection)  # type: ignore[no-untyped-call]
        self._tidy(key)

    def _tidy(self, key: Any) -> None:
        if not self._connections.get(key, True):
            del self._connections[key]


class _Turns:
    """At most :data:`CALLS_AT_ONCE` calls of one kind at a time; the others get their turn in the order in which they came."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, Line] = {}

    @asynccontextmanager
    async def turn(self, kind: Hashable) -> AsyncIterator[None]:
        """Within this context, it is the caller's turn for a call of this ``kind``: a host and a method."""
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = Line(CALLS_AT_ONCE)
        await line.turn()
        try:
            yield
        finally:
            if line.over():
                del self._lines[kind]  # strangers may name the hosts


@implementer(IAgent)
class _PlainAgent:
    """Neither asks for compressed answers nor accepts them, because a few bytes could become very many."""

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self, method: bytes, uri: bytes, headers: Headers | None = None, bodyProducer: Any = None
    ) -> Deferred[IResponse]:
        headers = headers.copy() if headers is not None else Headers()
        headers.removeHeader(b"accept-encoding")
        answer: Deferred[IResponse] = self._agent.request(method, uri, headers, bodyProducer)
        return answer.addCallback(self._check)

    def _check(self, response: IResponse) -> IResponse | Deferred[IResponse]:
        if not response.headers.hasHeader(b"content-encoding"):
            return response
        unread = _Body(REFUSAL_LIMIT_BYTES)
        response.deliverBody(unread)
        refused: Deferred[Any] = unread.done.addCallback(self._refuse)
        return refused

    @staticmethod
    def _refuse(_: bytes) -> IResponse:
        raise NoAnswer("the answer is encoded")


class HttpCaller:
    """Sends requests through ``agent``, each within ``timeout_s`` seconds on ``clock``; raises ``NoAnswer``.

    Of the calls of one host with one method, :data:`CALLS_AT_ONCE` are under way at a time. The time that others wait for their
    turn counts.
    """

    def __init__(self, agent: IAgent, clock: IReactorTime, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.agent = agent
        self._clock = clock
        self._timeout_s = timeout_s
        self._pool: Any = None
        self._turns = _Turns()
        # No server we ask needs to set cookies, and a hostile one could fill the jar.
        jar: Any = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = HTTPClient(_PlainAgent(agent), jar)

    @classmethod
    def connect(
        cls,
        reactor: Any,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        connect_timeout_s: float | None = None,
        connections: int = POOL_CONNECTIONS,
    ) -> HttpCaller:
        """A caller with an agent and a connection pool of its own, which :meth:`close` closes.

        Connecting may take ``connect_timeout_s`` of the time of a call; ``connections`` to one host are kept open, and
        :data:`POOL_CONNECTIONS_IN_ALL` to all.
        """
        pool: Any = _Pool(reactor, connections)
        endpoints = HeadLimitedEndpoints(
            reactor, timeout_s=timeout_s if connect_timeout_s is None else connect_timeout_s
        )
        caller = cls(Agent.usingEndpointFactory(reactor, endpoints, pool), reactor, timeout_s=timeout_s)
        caller._pool = pool
        return caller

    async def close(self) -> None:
        """Close the connections kept open."""
        if self._pool is not None:
            await self._pool.closeCachedConnections()

    async def call(
        self,
        method: str,
        url: str,
        *,
        limit_bytes: int,
        body: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> tuple[int, Headers, bytes]:
        """Status, headers and body of the answer to one request; only a 200 may be ``limit_bytes`` long."""
        sent = Headers({b"Accept": [b"application/json"]})
        if body is not None:
            sent.setRawHeaders(b"Content-Type", [b"application/json"])
        for name, value in (headers or {}).items():
            sent.setRawHeaders(name.encode("ascii"), [value])
        clock: Any = self._clock  # treq would use the global reactor otherwise

        async def exchange() -> tuple[int, Headers, bytes]:
            where = _Url.from_text(url)
            async with self._turns.turn((where.scheme, where.host.lower(), where.port, method)):
                response = await self._http.request(
                    method, where, headers=sent, data=body, allow_redirects=False, unbuffered=True, reactor=clock
                )
                collector = _Body(limit_bytes if response.code == 200 else REFUSAL_LIMIT_BYTES)
                response.deliverBody(collector)
                return response.code, response.headers, await collector.done

        return await self._within(exchange())

    def _within(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        """``work`` within the timeout. (Twisted's HTTP client has errors of its own for a cancelled request.)"""
        running: Deferred[Any] = Deferred.fromCoroutine(work)

        def stop(error: Exception) -> None:
            done.errback(error)
            running.cancel()

        def too_late() -> None:
            stop(NoAnswer(f"no answer within {self._timeout_s:g} s"))

        def finish(outcome: Any) -> None:
            if timer.active():
                timer.cancel()
            if done.called:
                return  # stopped: the outcome no longer matters
            if isinstance(outcome, Failure) and not outcome.check(NoAnswer):
                done.errback(_translate(outcome.value))
            else:
                done.callback(outcome)

        done: Deferred[T] = Deferred(lambda _: stop(CancelledError()))
        timer = self._clock.callLater(self._timeout_s, too_late)
        running.addBoth(finish)
        return done


def _translate(error: BaseException | None) -> NoAnswer:
    """The error of a failed call: our own reason for losing the connection, if Twisted's ``error`` wraps one.

    Any other error, of connecting, TLS or HTTP, also means that there is no answer.
    """
    if lacks_descriptor(error):
        return NoAnswer(NO_DESCRIPTOR)
    reasons = [reason.value for reason in getattr(error, "reasons", None) or [] if isinstance(reason, Failure)]
    for reason in reasons:
        if isinstance(reason, NoAnswer):
            return reason
        problem = tls_problem(reason)
        if problem:
            return NoAnswer(f"TLS failed: {problem}")
    if any(type(reason).__name__ == "ParseError" for reason in reasons):  # Twisted's own, of a private module
        return NoAnswer("the answer is not HTTP")
    if reasons and all(isinstance(reason, ConnectionClosed) for reason in reasons):
        return NoAnswer("the connection ended before an answer")
    inner = ", ".join(type(reason).__name__ for reason in reasons)
    return NoAnswer(f"{type(error).__name__} ({inner or quoted(str(error))})")
