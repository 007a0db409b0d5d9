"""The HTTP side of a discovery: the owner of Klein, which installs the reactor when imported (import this late).

It serves one store under three families of paths (:ref:`spec-discovery-http`): ``/discovery/…`` with the status codes
described in 2019, and the reference's ``/messaging-discovery/…`` (2019) and ``/dmsg-discovery/…`` (2023) with the reference's
codes. The texts of errors are the reference's in all families. All three serve both protocols of relays: a request for
servers names the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Literal

from klein import Klein
from twisted.internet.defer import CancelledError
from twisted.logger import Logger
from twisted.web.http import CACHED
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, PROTOCOLS, Entry
from dmsg.discovery.entry_cache import EntryCache
from dmsg.discovery.errors import (
    BadInput,
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    ListingForbidden,
    RateLimitedByDiscovery,
)
from dmsg.discovery.limits import DiscoveryLimits
from dmsg.discovery.listing import ServerListing
from dmsg.discovery.paths import DESCRIBED, OF_2019, OF_2023
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.ranks import Ranks
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.discovery.stores.rules import NS_PER_S, shielded, stored_entry
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import DiscoveryRequest
from dmsg.http.rates import FairRate, SharedRate
from dmsg.http.server import (
    JSON_TYPE,
    PIECE_BYTES,
    LimitedSite,
    LongAnswer,
    client_host,
    message,
)
from dmsg.interfaces import IEntryStore, IEventLog
from dmsg.sansio.jitter import RandomNumbers
from dmsg.sansio.rate import RecentSet

__all__ = ["AFTER_TIMESTAMP_HEADER", "NEXT_SEQUENCE_HEADER", "DiscoveryApi", "DiscoveryLimits", "make_site"]

#: Headers on the 404 of an expired key: the sequence of its next entry, and the timestamp that it must be later than.
NEXT_SEQUENCE_HEADER: Final = "Dmsg-Next-Sequence"
AFTER_TIMESTAMP_HEADER: Final = "Dmsg-After-Timestamp"

#: What the event log calls a path that is none of ours.
_NO_PATH: Final = "unknown"
#: The status in the event log of a request whose client did not wait for the answer.
_CLIENT_GONE: Final = 499
#: Stored entries whose signatures are known to be valid: some 2.5 MiB.
_VERIFIED_LIMIT: Final = 16_384
#: Least time between two log lines that say that the store fails.
_TOLD_EVERY_NS: Final = 60 * NS_PER_S
_FIRST: Final = message("wrote a new entry", 200)
_ITERATION: Final = message("wrote new entry iteration", 200)


@dataclass(slots=True)
class _Call:
    """One request under way: ``key`` as it stands in the path, and ``about``, the key that it turned out to be about."""

    request: Any
    key: str
    about: str = ""


# In quotes, because interfaces of zope.interface before 6.2 have no "|".
_Operation = Callable[[_Call], Awaitable["bytes | IResource"]]


class DiscoveryApi:
    """Answers requests from ``store`` (an :class:`~dmsg.interfaces.IEntryStore`).

    Lists of servers are for one protocol (:ref:`spec-server-list`): the one in the request, or ``list_protocol``.
    An IP address for which ``may_list`` is false gets a 403 instead of a list.
    ``clock_ns()`` is Unix time in nanoseconds. ``random`` draws the list of servers, by the weights of ``ranks()``: the
    document in force, or ``None``. ``addresses`` decides which servers' addresses are accepted (without it, all). With
    ``proofs`` only proved servers are listed; the caller starts and stops ``proofs``. ``limits`` of whole requests are
    enforced here, those of connections and bodies by :func:`make_site`. ``events`` gets one
    :class:`~dmsg.eventlog.schema.DiscoveryRequest` for each request.
    """

    _log = Logger()

    def __init__(
        self,
        store: IEntryStore,
        *,
        clock_ns: Callable[[], int],
        random: RandomNumbers,
        limits: DiscoveryLimits | None = None,
        events: IEventLog | None = None,
        ranks: Callable[[], Ranks | None] = lambda: None,
        addresses: RelayAddresses | None = None,
        proofs: RelayProofs | None = None,
        list_protocol: str = DMSG,
        may_list: Callable[[str], bool] = lambda host: True,
    ) -> None:
        self.limits = limits or DiscoveryLimits()
        self._store = store
        self._clock_ns = clock_ns
        self._listings = {name: ServerListing(store, random, ranks, proofs, name) for name in PROTOCOLS}
        self._list_protocol = list_protocol
        self._may_list = may_list
        self._addresses = addresses
        self._proofs = proofs
        self._ranks = ranks
        self._events: Any = events
        self._store_fails = False
        self._told_ns = -_TOLD_EVERY_NS
        self._pending_writes = 0
        self._cache = EntryCache(round(self.limits.cached_entry_lifetime_s * NS_PER_S))
        self._rates = _rates(self.limits)
        self._verified: RecentSet[bytes] = RecentSet(_VERIFIED_LIMIT)
        self._names: dict[tuple[bytes, ...], str] = {}
        self._app = Klein()
        self._add_routes()

    def resource(self) -> IResource:
        """The root resource. It answers all three families of paths, and all other paths with 404."""
        return _Guarded(self._app.resource(), self._before_routing, self._reject)

    # --- routes --------------------------------------------------------------------------------------------------

    def _add_routes(self) -> None:
        families: list[tuple[str, str, Literal["status", "reference_status"]]] = [(DESCRIBED, "entries", "status")]
        families += [(prefix, "entry", "reference_status") for prefix in (OF_2019, OF_2023)]
        for prefix, entries, status in families:
            path = f"/{prefix}/{entries}"
            self._route(f"{path}/<key>", "GET", f"{prefix}/{entries}", status, self._get_entry)
            for posted in (f"{path}/", path, f"{path}/<key>"):
                self._route(posted, "POST", f"{prefix}/{entries}", status, self._post_entry)
            servers = f"{prefix}/available_servers"
            empty = b"[]" if prefix == OF_2019 else b""  # like the reference of 2019; elsewhere an empty list is a 404
            self._route(f"/{servers}", "GET", servers, status, partial(self._available_servers, empty))
            self._route(f"/{prefix}/relay_ranks", "GET", f"{prefix}/relay_ranks", status, self._relay_ranks)
        handle_errors: Any = self._app.handle_errors(HTTPException)
        handle_errors(self._not_routed)

    def _route(self, path: str, method: str, name: str, status_of: str, operation: _Operation) -> None:
        async def handle(request: Request, key: str = "") -> bytes | IResource:
            return await self._answer(_Call(request, key), name, status_of, operation)

        self._names[tuple(name.encode().split(b"/"))] = name
        self._app.route(path, methods=[method], endpoint=f"{method} {path}")(handle)

    def _not_routed(self, request: Any, failure: Any) -> bytes:
        status = failure.value.code
        return self._reject(request, status if 400 <= status < 500 else 404, "no such path or method")

    def _reject(self, request: Any, status: int, text: str) -> bytes:
        """The answer to a request for which there is no operation."""
        name = self._names.get(tuple(request.postpath[:2]), _NO_PATH)
        self._emit(request, name, status, self._clock_ns(), text, "")
        return _respond(request, status, message(text, status))

    def _before_routing(self, request: Any) -> bytes | None:
        """The answer to a request that is over its rate, or whose entry is cached; ``None`` to others.

        Klein's routing costs twice as much as the rest of a request, so these requests are answered without it.
        """
        started_ns = self._clock_ns()
        name = self._names.get(tuple(request.postpath[:2]), "")
        if not self._rate_of(request, name).take(client_host(request), started_ns / NS_PER_S):
            status = RateLimitedByDiscovery.status
            request.setHeader(b"retry-after", b"1")
            self._emit(request, name or _NO_PATH, status, started_ns, RateLimitedByDiscovery.text, "")
            return _respond(request, status, message(RateLimitedByDiscovery.text, status))
        if request.method != b"GET" or len(request.postpath) != 3 or not name.endswith(("/entry", "/entries")):
            return None
        key = request.postpath[2].decode("latin-1")
        body = self._cache.get(key, started_ns)
        if body is not None:
            self._emit(request, name, 200, started_ns, "", key)
            return _respond(request, 200, body)
        return None

    async def _answer(self, call: _Call, path: str, status_of: str, operation: _Operation) -> bytes | IResource:
        request = call.request
        started_ns = self._clock_ns()
        status, reason = 200, ""
        try:
            answer = await operation(call)
            self._store_fails = False
            if isinstance(answer, bytes):
                body = _respond(request, status, answer)
                return body if len(body) <= PIECE_BYTES else LongAnswer(body, shared=False)
            status = request.code
            return answer
        except DiscoveryError as error:
            status, reason = getattr(error, status_of), error.text
            self._note_failure(error)
            if isinstance(error, EntryNotFound) and error.next_sequence is not None:
                request.setHeader(NEXT_SEQUENCE_HEADER, str(error.next_sequence))
                request.setHeader(AFTER_TIMESTAMP_HEADER, str(error.after_timestamp))
            return _respond(request, status, message(reason, status))
        except CancelledError:
            status, reason = _CLIENT_GONE, "client gone"
            raise
        except Exception:  # a bug or a broken store costs this one request, and the client hears of it
            status, reason = 500, DiscoveryError.text
            self._log.failure("a discovery request failed")
            return _respond(request, status, message(reason, status))
        finally:
            self._emit(request, path, status, started_ns, reason, call.about)

    def _emit(self, request: Any, path: str, status: int, started_ns: int, reason: str, about: str) -> None:
        if self._events is not None:
            elapsed_ms = (self._clock_ns() - started_ns) / 1e6
            method = "POST" if request.method == b"POST" else "GET"
            self._events.emit(DiscoveryRequest(method, path, status, elapsed_ms, Reason.of(reason), about))

    def _note_failure(self, error: DiscoveryError) -> None:
        """Log the beginning of a store's failure instead of each failed request, and at most once a minute: strangers who
        fill the queue of writes could cause a line each time it is full."""
        now_ns = self._clock_ns()
        if not isinstance(error, DiscoveryUnavailable):
            self._store_fails = False
        elif not self._store_fails and not 0 <= now_ns - self._told_ns < _TOLD_EVERY_NS:
            self._store_fails, self._told_ns = True, now_ns
            self._log.error("the entry store fails: {error}", error=error)

    # --- operations ----------------------------------------------------------------------------------------------

    async def _get_entry(self, call: _Call) -> bytes:
        try:
            public_key = PublicKey.parse(call.key)
        except InvalidKey as error:
            raise BadInput(str(error)) from None
        call.about = str(public_key)
        now_ns, writes = self._clock_ns(), self._cache.writes
        body: bytes = await self._store.get_json(public_key, now_ns)
        self._check_stored(body)
        self._cache.put(call.about, body, now_ns, writes)
        return body

    def _check_stored(self, body: bytes) -> None:
        """Verify an entry's signature, since other programs may write to the store. Texts verified lately are skipped."""
        digest = blake2b(body, digest_size=16).digest()
        if digest not in self._verified:
            stored_entry(body).verify()
        self._verified.add(digest)

    async def _post_entry(self, call: _Call) -> bytes:
        body = call.request.content.read(self.limits.body_bytes + 1)
        if len(body) > self.limits.body_bytes:
            raise BadInput("the body is too long")
        entry = Entry.parse(body)
        call.about = str(entry.static)
        entry.validate()
        entry.verify()
        if self._addresses is not None:
            self._addresses.check(entry)
        if self._pending_writes >= self.limits.pending_writes:
            raise DiscoveryUnavailable("too many writes are under way")
        # Klein cancels the Deferred of a handler when its client goes away. This must not cancel the write.
        poster = client_host(call.request)
        self._cache.forget(call.about)
        write = self._store.put(entry, self._clock_ns(), poster)
        self._pending_writes += 1  # after the call: a store that raises has no write under way
        write.addBoth(self._written, call.about)
        if self._proofs is not None:
            write.addCallback(self._registered, self._proofs, entry, poster)
        return _FIRST if await shielded(write) else _ITERATION

    @staticmethod
    def _registered(is_first: bool, proofs: RelayProofs, entry: Entry, source_host: str) -> bool:
        proofs.offer(entry, source_host)
        return is_first

    def _written(self, outcome: Any, key: str) -> Any:
        self._pending_writes -= 1
        self._cache.forget(key)
        return outcome

    async def _available_servers(self, empty: bytes, call: _Call) -> bytes:
        if not self._may_list(client_host(call.request)):
            raise ListingForbidden
        bodies: list[bytes] = []
        room = self.limits.available_servers_bytes
        named = call.request.args.get(b"protocol")
        listing = self._listings.get(named[-1].decode("latin-1") if named else self._list_protocol)
        limit, now_ns = self.limits.available_servers, self._clock_ns()
        for entry in await listing.servers(limit, now_ns) if listing is not None else ():
            body = entry.to_json()
            if len(body) + 2 <= room:
                bodies.append(body)
                room -= len(body) + 1
        if not bodies and not empty:
            raise EntryNotFound
        return b"[%s]" % b",".join(bodies)

    async def _relay_ranks(self, call: _Call) -> IResource:
        """The signed document itself, so that clients need not trust this discovery."""
        ranks, request = self._ranks(), call.request
        if ranks is None:
            raise EntryNotFound
        if request.setETag(ranks.tag) is CACHED:
            return LongAnswer(b"", shared=True)
        if not self._rates["ranks"].take(client_host(request), self._clock_ns() / NS_PER_S):
            raise RateLimitedByDiscovery
        request.setResponseCode(200)
        request.setHeader(b"content-type", JSON_TYPE)
        request.setHeader(b"content-length", b"%d" % len(ranks.document))
        return LongAnswer(ranks.document, shared=True)

    # --- rates ---------------------------------------------------------------------------------------------------

    def _rate_of(self, request: Any, name: str) -> FairRate:
        if request.method == b"POST":
            return self._rates["post"]
        return self._rates["servers" if name.endswith("/available_servers") else "get"]


def _rates(limits: DiscoveryLimits) -> dict[str, FairRate]:
    each = limits.rate_addresses
    gets = SharedRate(
        (limits.total_get_rate_per_s, limits.total_get_burst),
        (limits.reserved_get_rate_per_s, limits.reserved_get_burst),
        each,
    )
    posts = SharedRate(
        (limits.total_post_rate_per_s, limits.total_post_burst),
        (limits.reserved_post_rate_per_s, limits.reserved_post_burst),
        each,
    )
    return {
        "get": FairRate((limits.get_rate_per_s, limits.get_burst), gets, each),
        "servers": FairRate((limits.servers_rate_per_s, limits.servers_burst), gets, each),
        "post": FairRate((limits.post_rate_per_s, limits.post_burst), posts, each),
        "ranks": FairRate((limits.ranks_rate_per_s, limits.ranks_burst), None, each),
    }


def _respond(request: Any, status: int, body: bytes) -> bytes:
    request.setResponseCode(status)
    request.setHeader(b"content-type", JSON_TYPE)
    request.setHeader(b"content-length", b"%d" % len(body))
    return body


class _Guarded(Resource):
    """Keeps requests from Klein that ``first`` answers, or on which Klein's routing would fail with a traceback in the
    log, and which ``reject(request, status, text)`` answers."""

    isLeaf = True

    def __init__(
        self, routed: Any, first: Callable[[Any], bytes | None], reject: Callable[[Any, int, str], bytes]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._routed = routed
        self._first = first
        self._reject = reject

    def render(self, request: Any) -> Any:
        """Answer ``request``."""
        answer = self._first(request)
        if answer is None:
            try:
                b"/".join([*request.prepath, *request.postpath, request.getRequestHostname()]).decode("utf-8")
                return self._routed.render(request)
            except (ValueError, HTTPException):  # not UTF-8, or an invalid host name; nothing is written yet
                answer = self._reject(request, 400, "error bad input")
        return b"" if request.method == b"HEAD" else answer  # Twisted logs a line where it has to drop the body


def make_site(resource: IResource, *, reactor: Any, limits: DiscoveryLimits | None = None) -> Site:
    """A Site that serves ``resource`` (a :meth:`DiscoveryApi.resource`, or one that contains it) within ``limits``.

    Times are in seconds on ``reactor``.
    """
    limits = limits or DiscoveryLimits()
    connects = FairRate((limits.connect_rate_per_s, limits.connect_burst), None, limits.rate_addresses)
    return LimitedSite(
        resource, reactor=reactor, limits=limits, admit=lambda host: connects.take(host, reactor.seconds())
    )
