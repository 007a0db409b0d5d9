"""A discovery reached over HTTP.

The client of :ref:`spec-discovery-http`. It does not trust discovery: an entry must be well formed, signed by the key that
was asked for, and not older than one seen before; relay ranks must be signed by a trusted key. Calls and their limits are
those of :mod:`dmsg.http.client`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent
from zope.interface import implementer

from dmsg.address import check_http_url
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, ENTRY_LIMIT_BYTES, Entry
from dmsg.discovery.errors import (
    DISCOVERY_ERRORS,
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    RanksError,
    Unauthorized,
)
from dmsg.discovery.paths import DESCRIBED, OF_2019
from dmsg.discovery.ranks import DOCUMENT_LIMIT_BYTES, Ranks
from dmsg.discovery.ranks_source import parse_ranks
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.foreign import quoted
from dmsg.http import json_text
from dmsg.http.client import CALL_TIMEOUT_S, HttpCaller
from dmsg.http.errors import MalformedJson, NoAnswer
from dmsg.interfaces import IRankedDiscovery

#: Longest list of servers in bytes, and most entries of it that are read and verified: the limits of discovery itself. Each
#: entry costs a signature check, 70 µs.
LIST_LIMIT_BYTES: Final = 1024 * 1024
LIST_LIMIT: Final = 64
#: Seconds of work on a list in one go, so that other work has its turn in between. One more entry may be begun, and the
#: longest one that a stranger can make takes 5 ms.
LIST_SLICE_S: Final = 0.002
#: Keys whose newest entry is remembered: of those that were asked for, and of relays that were only listed. A discovery chooses
#: what it lists, and lists of ever new relays must not make a client forget the entries of its peers.
PINNED_KEYS: Final = 100_000
LISTED_KEYS: Final = 4_096
#: Seconds for which relay ranks are used before the client asks again, since they are made about once an hour; and seconds
#: until it asks again when there were none.
RANKS_REFRESH_S: Final = 300.0
RANKS_RETRY_S: Final = 30.0

_HINT_LIMIT_DIGITS: Final = 20
_TAG_LIMIT_BYTES: Final = 200
_log = Logger()


class _Pins:
    """The newest (timestamp, sequence) seen of each key; the least recently used key is evicted first.

    The timestamp decides which entry is newer: the key's owner raises it with every entry. The sequence alone would
    not do, because a discovery that lost its data starts every key at 0 again.

    Requests are numbered in the order in which they begin. An answer may be overtaken by that to a later request: only an entry
    older than one that was seen before its request began was rolled back.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        #: With each, minus the number of the last request that had begun when it was first seen. The larger pair is kept.
        self._newest: OrderedDict[PublicKey, tuple[tuple[int, int], int]] = OrderedDict()

    def check(self, entry: Entry, others: _Pins, request: int, last_request: int) -> None:
        """Remember ``entry``, the answer to ``request``, unless a newer one is remembered here or in ``others``.

        Raises ``EntryRolledBack`` if that was seen before ``request`` began. ``last_request`` is the last one that has begun.
        """
        key, version = entry.static, (entry.timestamp, entry.sequence)
        newest = version, -last_request
        for known in filter(None, (self._newest.get(key), others._newest.get(key))):
            if version < known[0] and -known[1] < request:
                raise EntryRolledBack(f"sequence {entry.sequence} after {known[0][1]}", entry=entry)
            newest = max(newest, known)
        self._newest[key] = newest
        self._newest.move_to_end(key)
        if len(self._newest) > self._capacity:
            self._newest.popitem(last=False)


@implementer(IRankedDiscovery)
class HttpDiscovery:
    """The discovery at ``base_url`` (``http://host:port``), reached through ``agent``.

    ``prefix`` chooses the paths (:ref:`spec-discovery-http`): ``messaging-discovery`` (default) and
    ``dmsg-discovery`` are the reference's, ``discovery`` those described in 2019. ``timeout_s`` limits each call, in
    seconds on ``clock``. Relay ranks are accepted from ``ranks_keys``; without keys, the client does not ask for ranks.
    ``now_s()`` is Unix time in seconds. Raises ``ConfigError`` for an invalid URL.

    Every failure of a call is a ``DiscoveryError``: discovery's answer, known by its text, or ``DiscoveryUnavailable``.
    """

    def __init__(
        self,
        base_url: str,
        agent: IAgent,
        clock: IReactorTime,
        *,
        prefix: str = OF_2019,
        timeout_s: float = CALL_TIMEOUT_S,
        pinned_keys: int = PINNED_KEYS,
        ranks_keys: Collection[PublicKey] = (),
        now_s: Callable[[], float] = time.time,
    ) -> None:
        base = _check_base_url(base_url)
        self._base_url = base
        if not prefix or not prefix.replace("-", "").replace("_", "").isalnum() or not prefix.isascii():
            raise ConfigError("discovery prefix", "is one word of letters, digits and dashes")
        described = prefix == DESCRIBED
        self._entry_url = f"{base}/{prefix}/{'entries' if described else 'entry'}/"
        self._post_url = self._entry_url.rstrip("/") if described else self._entry_url
        self._servers_url = f"{base}/{prefix}/available_servers"
        self._ranks_url = f"{base}/{prefix}/relay_ranks"
        self._clock = clock
        self._pins, self._listed_pins = _Pins(pinned_keys), _Pins(LISTED_KEYS)
        self._requests = 0
        self._ranks_keys = frozenset(ranks_keys)
        self._now_s = now_s
        self._ranks: Ranks | None = None
        self._ranks_tag = b""
        self._ranks_due: float | None = None
        self._ranks_problem = ""
        self._http = HttpCaller(agent, clock, timeout_s=timeout_s)

    @classmethod
    def connect(
        cls,
        base_url: str,
        reactor: Any,
        *,
        prefix: str = OF_2019,
        timeout_s: float = CALL_TIMEOUT_S,
        pinned_keys: int = PINNED_KEYS,
        ranks_keys: Collection[PublicKey] = (),
    ) -> HttpDiscovery:
        """A discovery with an agent and a connection pool of its own, which :meth:`close` closes."""
        caller = HttpCaller.connect(reactor, timeout_s=timeout_s)
        discovery = cls(base_url, caller.agent, reactor, prefix=prefix, pinned_keys=pinned_keys, ranks_keys=ranks_keys)
        discovery._http = caller
        return discovery

    async def close(self) -> None:
        """Close the connections kept open."""
        await self._http.close()

    # --- IDiscovery ----------------------------------------------------------------------------------------------

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """The verified entry of ``public_key``.

        Raises ``EntryNotFound`` (with hints, if discovery gave any), ``Unauthorized`` for an entry with a bad signature
        or of another key, ``EntryRolledBack`` for one older than one seen before, ``TypeError`` for what is no ``PublicKey``.
        """
        if not isinstance(public_key, PublicKey):
            raise TypeError(f"a key is a PublicKey, as PublicKey.parse gives it, not {public_key!r}")
        request = self._requests = self._requests + 1
        status, headers, body = await self._call("GET", f"{self._entry_url}{public_key}", limit_bytes=ENTRY_LIMIT_BYTES)
        if status != 200:
            raise _refusal(status, headers, body)
        try:
            entry = Entry.parse(body)
            entry.validate()
        except DiscoveryError as error:
            raise DiscoveryUnavailable(f"the entry handed out is not valid ({quoted(str(error))})") from error
        if entry.static != public_key:
            raise Unauthorized("discovery handed out the entry of another key")
        entry.verify()
        self._pins.check(entry, self._listed_pins, request, self._requests)
        return entry

    async def post_entry(self, entry: Entry) -> None:
        """Register ``entry``; returns when discovery has acknowledged it."""
        status, headers, body = await self._call(
            "POST", self._post_url, body=entry.to_json(), limit_bytes=ENTRY_LIMIT_BYTES
        )
        if status != 200:
            raise _refusal(status, headers, body)

    async def available_servers(self, protocol: str = DMSG) -> list[Entry]:
        """Verified entries of servers with connections left that speak ``protocol``; empty when there are none.

        Reads at most :data:`LIST_LIMIT` entries; leaves out those that are malformed, badly signed, rolled back or not of
        such servers. A base discovery ignores ``protocol``.
        """
        url = f"{self._servers_url}?protocol={protocol}"
        status, headers, body = await self._call("GET", url, limit_bytes=LIST_LIMIT_BYTES)
        if status != 200:
            refusal = _refusal(status, headers, body)
            if isinstance(refusal, EntryNotFound):
                return []
            raise refusal
        servers: list[Entry] = []
        began_s = self._clock.seconds()
        try:
            for value in islice(json_text.elements(body, LIST_LIMIT_BYTES, ENTRY_LIMIT_BYTES), LIST_LIMIT):
                entry = self._listed(value)
                if entry is not None and entry.protocol == protocol:
                    servers.append(entry)
                if self._clock.seconds() - began_s >= LIST_SLICE_S:
                    await deferLater(self._clock, 0.0)
                    began_s = self._clock.seconds()
        except MalformedJson as error:
            raise DiscoveryUnavailable(f"the list of servers is {quoted(str(error))}") from None
        return servers

    def _listed(self, value: Any) -> Entry | None:
        try:
            entry = Entry.from_object(value)
            entry.validate()
            entry.verify()
            if entry.server is None:
                return None
            self._listed_pins.check(entry, self._pins, self._requests + 1, self._requests)
        except DiscoveryError:
            return None
        return entry

    async def relay_ranks(self) -> Ranks | None:
        """The relay ranks, verified with the trusted keys; asked for every :data:`RANKS_REFRESH_S`.

        When discovery gives no valid document, the one before stays in force and fades by itself.
        """
        now = self._clock.seconds()
        if not self._ranks_keys or (self._ranks_due is not None and now < self._ranks_due):
            return self._ranks
        self._ranks_due = now + RANKS_RETRY_S
        try:
            await self._fetch_ranks()
            self._ranks_due = now + RANKS_REFRESH_S
            self._ranks_problem = ""
        except (DiscoveryError, RanksError) as error:
            # logged once, and only for invalid ranks: a discovery without ranks is nothing unusual
            if isinstance(error, RanksError) and str(error) != self._ranks_problem:
                _log.warn("Discovery hands out relay ranks that are not used: {error}", error=error)
                self._ranks_problem = str(error)
        return self._ranks

    async def _fetch_ranks(self) -> None:
        tag = self._ranks_tag
        status, headers, body = await self._call(
            "GET", self._ranks_url, limit_bytes=DOCUMENT_LIMIT_BYTES, headers={"If-None-Match": tag} if tag else {}
        )
        if status == 304:
            return
        if status != 200:
            raise _refusal(status, headers, body)
        self._ranks = await parse_ranks(self._clock, body, self._ranks_keys, self._now_s(), self._ranks)
        tag = (headers.getRawHeaders(b"etag") or [b""])[0]
        self._ranks_tag = tag if len(tag) <= _TAG_LIMIT_BYTES else b""

    async def _call(self, method: str, url: str, **options: Any) -> tuple[int, Headers, bytes]:
        try:
            return await self._http.call(method, url, **options)
        except NoAnswer as error:
            raise DiscoveryUnavailable(f"{self._base_url}: {error}") from error


def _refusal(status: int, headers: Headers, body: bytes) -> DiscoveryError:
    """The error of an answer other than 200. The text decides, not the status (:ref:`spec-discovery-http`)."""
    try:
        answer = json_text.decode(body, ENTRY_LIMIT_BYTES)
    except MalformedJson:
        answer = None
    text = answer.get("message") if isinstance(answer, dict) else None
    error = DISCOVERY_ERRORS.get(text) if isinstance(text, str) else None
    if error is None:
        return DiscoveryUnavailable(f"HTTP status {status}")
    if error is EntryNotFound:
        return EntryNotFound(
            next_sequence=_hint(headers, b"Dmsg-Next-Sequence"), after_timestamp=_hint(headers, b"Dmsg-After-Timestamp")
        )
    return error()


def _hint(headers: Headers, name: bytes) -> int | None:
    text = (headers.getRawHeaders(name) or [b""])[0]
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _HINT_LIMIT_DIGITS:
        return None
    return int(text)


def _check_base_url(text: str) -> str:
    try:
        return check_http_url(text)
    except InvalidAddress:
        raise ConfigError("discovery", f"{text!r} is not http://host:port") from None
