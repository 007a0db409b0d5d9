"""A discovery reached over HTTP: the owner of treq.

Nothing is believed (protocol notes, sections 8.3 and 8.4): an entry must be well formed, signed by the key that was
asked for, and not older than one seen before. Every call has one time limit, the body included, and bodies are cut off
at their limit while they come in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import Agent, HTTPConnectionPool, ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IResponse
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery import json_text
from dmsg.discovery.entry import ENTRY_LIMIT_BYTES, Entry
from dmsg.errors import (
    DISCOVERY_ERRORS,
    BadInput,
    ConfigError,
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    Unauthorized,
)
from dmsg.interfaces import IDiscovery

T = TypeVar("T")

#: The 2019 reference's paths, which every base discovery answers; the seed's; the later reference's.
DEFAULT_PREFIX: Final = "messaging-discovery"
SEED_PREFIX: Final = "discovery"
#: How long one call may take in all, in seconds.
CALL_TIMEOUT_S: Final = 10.0
#: Longest list of servers in bytes, and how many of its entries are looked at: each costs a signature check.
LIST_LIMIT_BYTES: Final = 4 * 1024 * 1024
LIST_LIMIT: Final = 256
#: Keys whose newest entry is remembered.
PINNED_KEYS: Final = 100_000
#: Connections kept open to one discovery, and for how long without use, in seconds: less than a server's idle time.
POOL_CONNECTIONS: Final = 4
POOL_IDLE_S: Final = 30.0

_HINT_LIMIT_DIGITS: Final = 20


class _Body(Protocol):
    """Collects a body up to a limit; ``done`` fires with it. Cancelling ``done`` closes the connection."""

    transport: Any

    def __init__(self, limit_bytes: int) -> None:
        self.done: Deferred[bytes] = Deferred(lambda _: self._abort())
        self._room = limit_bytes
        self._pieces: list[bytes] = []

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        """A piece of the body."""
        self._room -= len(data)
        if self._room >= 0:
            self._pieces.append(data)
        elif not self.done.called:
            self._pieces.clear()
            self.done.errback(DiscoveryUnavailable("the answer is too long"))
            self._abort()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The end of the body, or of the connection before it."""
        if self.done.called:
            return
        if reason.check(ResponseDone):
            self.done.callback(b"".join(self._pieces))
        else:
            self.done.errback(DiscoveryUnavailable("the answer was cut off"))


@implementer(IAgent)
class _PlainAgent:
    """Neither asks for compressed answers nor takes them: a few bytes could become very many."""

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self, method: bytes, uri: bytes, headers: Headers | None = None, bodyProducer: Any = None
    ) -> Deferred[IResponse]:
        """Send a request."""
        headers = headers.copy() if headers is not None else Headers()
        headers.removeHeader(b"accept-encoding")
        answer: Deferred[IResponse] = self._agent.request(method, uri, headers, bodyProducer)
        return answer.addCallback(self._check)

    def _check(self, response: IResponse) -> IResponse | Deferred[IResponse]:
        if not response.headers.hasHeader(b"content-encoding"):
            return response
        unread = _Body(ENTRY_LIMIT_BYTES)
        response.deliverBody(unread)
        refused: Deferred[Any] = unread.done.addCallback(self._refuse)
        return refused

    @staticmethod
    def _refuse(_: bytes) -> IResponse:
        raise DiscoveryUnavailable("the answer is encoded")


class _Pins:
    """The newest (timestamp, sequence) seen of each key, the least recently asked for forgotten first.

    What is newer is decided by the timestamp, which the key's owner raises with every entry. The sequence alone would
    not do: a discovery that lost its data starts every key at 0 again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._newest: OrderedDict[PublicKey, tuple[int, int]] = OrderedDict()

    def check(self, entry: Entry) -> None:
        """Remember ``entry``, or raise ``EntryRolledBack``."""
        key, version = entry.static, (entry.timestamp, entry.sequence)
        newest = self._newest.get(key)
        if newest is not None and version < newest:
            raise EntryRolledBack(f"sequence {entry.sequence} after {newest[1]}", entry=entry)
        self._newest[key] = version
        self._newest.move_to_end(key)
        if len(self._newest) > self._capacity:
            self._newest.popitem(last=False)


@implementer(IDiscovery)
class HttpDiscovery:
    """The discovery at ``base_url`` (``http://host:port``), reached through ``agent``.

    ``prefix`` chooses the paths (protocol notes, section 8.1): ``messaging-discovery`` (default) and
    ``dmsg-discovery`` are the reference's, ``discovery`` the seed's. ``timeout_s`` limits each call, in seconds on
    ``clock``. Raises ``ConfigError`` for a URL that is not one.

    Whatever a call fails with is a ``DiscoveryError``: what discovery answered, told by its text, or
    ``DiscoveryUnavailable``.
    """

    def __init__(
        self,
        base_url: str,
        agent: IAgent,
        clock: IReactorTime,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = CALL_TIMEOUT_S,
        pinned_keys: int = PINNED_KEYS,
    ) -> None:
        base = _check_base_url(base_url)
        if not prefix or not prefix.replace("-", "").replace("_", "").isalnum() or not prefix.isascii():
            raise ConfigError("discovery prefix", "is one word of letters, digits and dashes")
        seed = prefix == SEED_PREFIX
        self._entry_url = f"{base}/{prefix}/{'entries' if seed else 'entry'}/"
        self._post_url = self._entry_url.rstrip("/") if seed else self._entry_url
        self._servers_url = f"{base}/{prefix}/available_servers"
        self._clock = clock
        self._timeout_s = timeout_s
        self._pins = _Pins(pinned_keys)
        self._pool: Any = None
        # A discovery has no business setting cookies, and a jar is a place to fill.
        jar: Any = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = HTTPClient(_PlainAgent(agent), jar)

    @classmethod
    def connect(
        cls,
        base_url: str,
        reactor: Any,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = CALL_TIMEOUT_S,
        pinned_keys: int = PINNED_KEYS,
    ) -> HttpDiscovery:
        """One with an agent and a pool of connections of its own, which :meth:`close` ends."""
        pool: Any = HTTPConnectionPool(reactor, persistent=True)
        pool.maxPersistentPerHost = POOL_CONNECTIONS
        pool.cachedConnectionTimeout = POOL_IDLE_S
        agent = Agent(reactor, connectTimeout=timeout_s, pool=pool)
        discovery = cls(base_url, agent, reactor, prefix=prefix, timeout_s=timeout_s, pinned_keys=pinned_keys)
        discovery._pool = pool
        return discovery

    async def close(self) -> None:
        """Close the connections kept open."""
        if self._pool is not None:
            await self._pool.closeCachedConnections()

    # --- IDiscovery ----------------------------------------------------------------------------------------------

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """The verified entry of ``public_key``.

        Raises ``EntryNotFound`` (with hints, if discovery gave any), ``Unauthorized`` for an entry with a bad signature
        or of another key, ``EntryRolledBack`` for one older than one seen before.
        """
        status, headers, body = await self._call("GET", f"{self._entry_url}{public_key}", limit_bytes=ENTRY_LIMIT_BYTES)
        if status != 200:
            raise _refusal(status, headers, body)
        try:
            entry = Entry.parse(body)
            entry.validate()
        except DiscoveryError as error:
            raise DiscoveryUnavailable(f"the entry handed out is not valid ({error})") from error
        if entry.static != public_key:
            raise Unauthorized("discovery handed out the entry of another key")
        entry.verify()
        self._pins.check(entry)
        return entry

    async def post_entry(self, entry: Entry) -> None:
        """Register ``entry``; returns when discovery has acknowledged it."""
        status, headers, body = await self._call(
            "POST", self._post_url, body=entry.to_json(), limit_bytes=ENTRY_LIMIT_BYTES
        )
        if status != 200:
            raise _refusal(status, headers, body)

    async def available_servers(self) -> list[Entry]:
        """Verified entries of servers with connections left; empty when there are none.

        Of at most :data:`LIST_LIMIT`; those that are malformed, badly signed, rolled back or no servers are left out.
        """
        status, headers, body = await self._call("GET", self._servers_url, limit_bytes=LIST_LIMIT_BYTES)
        if status != 200:
            refusal = _refusal(status, headers, body)
            if isinstance(refusal, EntryNotFound):
                return []
            raise refusal
        try:
            listed = json_text.decode(body, LIST_LIMIT_BYTES)
        except BadInput as error:
            raise DiscoveryUnavailable(f"the list of servers is {error.detail}") from None
        if listed is not None and type(listed) is not list:
            raise DiscoveryUnavailable("the list of servers is not a list")
        return [entry for entry in map(self._listed, (listed or [])[:LIST_LIMIT]) if entry is not None]

    def _listed(self, value: Any) -> Entry | None:
        try:
            entry = Entry.from_object(value)
            entry.validate()
            entry.verify()
            if entry.server is None:
                return None
            self._pins.check(entry)
        except DiscoveryError:
            return None
        return entry

    # --- HTTP ----------------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, url: str, *, limit_bytes: int, body: bytes | None = None
    ) -> tuple[int, Headers, bytes]:
        headers = Headers({b"Accept": [b"application/json"]})
        if body is not None:
            headers.setRawHeaders(b"Content-Type", [b"application/json"])
        clock: Any = self._clock  # treq would use the global reactor otherwise

        async def exchange() -> tuple[int, Headers, bytes]:
            response = await self._http.request(
                method, url, headers=headers, data=body, allow_redirects=False, unbuffered=True, reactor=clock
            )
            collector = _Body(limit_bytes if response.code == 200 else ENTRY_LIMIT_BYTES)
            response.deliverBody(collector)
            return response.code, response.headers, await collector.done

        return await self._within(exchange())

    def _within(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        """``work`` within the time limit. (Twisted's HTTP client gives its own names to being cancelled.)"""
        running: Deferred[Any] = Deferred.fromCoroutine(work)

        def stop(error: Exception) -> None:
            done.errback(error)
            running.cancel()

        def too_late() -> None:
            stop(DiscoveryUnavailable(f"no answer within {self._timeout_s:g} s"))

        def finish(outcome: Any) -> None:
            if timer.active():
                timer.cancel()
            if done.called:
                return  # stopped: what became of it is nobody's concern
            if isinstance(outcome, Failure) and not outcome.check(DiscoveryError):
                # Connecting, TLS, HTTP: whatever the libraries call it, there is no answer.
                done.errback(DiscoveryUnavailable(_describe(outcome.value)))
            else:
                done.callback(outcome)

        done: Deferred[T] = Deferred(lambda _: stop(CancelledError()))
        timer = self._clock.callLater(self._timeout_s, too_late)
        running.addBoth(finish)
        return done


def _describe(error: BaseException | None) -> str:
    """``error`` with what it is a wrapper of, as Twisted's HTTP client has it."""
    reasons = getattr(error, "reasons", None) or []
    inner = ", ".join(type(reason.value).__name__ for reason in reasons if isinstance(reason, Failure))
    return f"{type(error).__name__} ({inner or error})"


def _refusal(status: int, headers: Headers, body: bytes) -> DiscoveryError:
    """The error an answer other than 200 stands for: its text decides, not the status (section 8.4)."""
    try:
        answer = json_text.decode(body, ENTRY_LIMIT_BYTES)
    except BadInput:
        answer = None
    text = answer.get("message") if isinstance(answer, dict) else None
    error = DISCOVERY_ERRORS.get(text) if isinstance(text, str) else None
    if error is None:
        return DiscoveryUnavailable(f"HTTP status {status}")
    if error is EntryNotFound:
        return EntryNotFound(
            next_sequence=_hint(headers, "Dmsg-Next-Sequence"), after_timestamp=_hint(headers, "Dmsg-After-Timestamp")
        )
    return error()


def _hint(headers: Headers, name: str) -> int | None:
    text = (headers.getRawHeaders(name) or [""])[0]
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > _HINT_LIMIT_DIGITS:
        return None
    return int(text)


def _check_base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = None
    if not usable or not text.isascii() or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("discovery", f"{text!r} is not http://host:port")
    return text.rstrip("/")
