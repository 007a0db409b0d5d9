"""Posts envelopes to other relays over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from twisted.internet.defer import Deferred

from dmsg.address import parse_ip
from dmsg.eventlog.reasons import Reason
from dmsg.glue.connecting import NO_DESCRIPTOR
from dmsg.glue.names import NamesOfStrangers
from dmsg.http.client import HttpCaller
from dmsg.http.errors import NoAnswer
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.peering import HEADER, Body, Signer, join_envelopes, split_statuses

#: Timeouts of connecting, and of a whole post, in seconds: the public relay's values.
CONNECT_TIMEOUT_S: Final = 2.0
POST_TIMEOUT_S: Final = 3.0
#: Pooled connections to one relay.
CONNECTIONS: Final = 4
ONE_TYPE: Final = b"application/octet-stream"
#: Several envelopes, each with its length before it.
SEVERAL_TYPE: Final = b"application/x-dmsg-envelopes"
#: Seconds for which a known relay that does not understand a post of several envelopes gets them one by one.
SINGLE_S: Final = 60.0
TOO_EARLY: Final = 425
_UNKNOWN: Final = (400, 401, 413)
_ANSWER_BYTES: Final = 64 * 1024


def is_loopback(relay: str) -> bool:
    """Whether ``relay`` (a host, perhaps with a port) is localhost or a loopback address."""
    host = relay.rpartition(":")[0] if relay.count(":") == 1 else relay
    address = parse_ip(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


class RelayPoster:
    """Posts to relays. Those to relays in ``known`` (names in lower case) are signed and may have several envelopes.

    ``scheme`` is ``https``, ``http``, or ``auto``: https, but http to this machine if one of ``domains``, this relay's own
    names, is on this machine too. Strangers write the registry: without that last condition, one of them could make us post
    to programs that only listen here.
    """

    def __init__(
        self,
        caller: HttpCaller,
        unix_time: Callable[[], float],
        *,
        domains: Collection[str],
        scheme: str = "auto",
        signer: Signer | None = None,
        known: Collection[str] = (),
    ) -> None:
        self._caller = caller
        self._unix_time = unix_time
        self._plain = scheme == "http"
        self._plain_loopback = scheme == "auto" and any(map(is_loopback, domains))
        self._signer = signer
        self._known = frozenset(known) if signer is not None else frozenset()
        #: Relays that refused a post of several envelopes, and when that was, in Unix seconds.
        self._single: dict[str, float] = {}

    @staticmethod
    def connect(reactor: object) -> HttpCaller:
        """The HTTP client to pass as ``caller``."""
        return HttpCaller.connect(
            NamesOfStrangers(reactor),
            timeout_s=POST_TIMEOUT_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            connections=CONNECTIONS,
        )

    def knows(self, relay: str) -> bool:
        """See :class:`~dmsg.rmb.relay.federation.Poster`."""
        name = relay.lower()
        refused_at = self._single.get(name)
        # ``refused_at`` is in the future if our clock was set back since, perhaps because it was why the relay refused.
        rests = refused_at is not None and 0 <= self._unix_time() - refused_at < SINGLE_S
        return name in self._known and not rests

    def post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> Deferred[list[int]]:
        """See :class:`~dmsg.rmb.relay.federation.Poster`."""
        return Deferred.fromCoroutine(self._post(relay, envelopes, connected_only))

    async def _post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> list[int]:
        headers = {"Accept": b"*/*", "Content-Type": ONE_TYPE}
        body = envelopes[0]
        if connected_only and not self.knows(relay):  # no longer known since they were queued; it would store them
            return [TOO_EARLY] * len(envelopes)
        # Sign single envelopes too: a relay that knows us accepts only signed posts, and may accept several again by now.
        if self._signer is not None and relay.lower() in self._known:
            kind = Body.CONNECTED if connected_only else Body.SEVERAL if len(envelopes) > 1 else Body.ONE
            if kind is not Body.ONE:
                body = join_envelopes(envelopes)
                headers["Content-Type"] = SEVERAL_TYPE
            headers[HEADER] = self._signer.header(relay, kind, body, self._unix_time())
        plain = self._plain or (self._plain_loopback and is_loopback(relay))
        url = f"{'http' if plain else 'https'}://{relay}/"
        try:
            status, _, answer = await self._caller.call(
                "POST", url, limit_bytes=_ANSWER_BYTES, body=body, headers=headers
            )
        except NoAnswer as error:
            raise NotPosted(_reason(str(error))) from error
        if status == 200 and headers["Content-Type"] is SEVERAL_TYPE:
            statuses = split_statuses(answer, len(envelopes))
            if statuses is None:
                raise NotPosted(Reason.ANSWERED_OTHERWISE)
            return statuses
        if status in _UNKNOWN and headers["Content-Type"] is SEVERAL_TYPE:
            self._single[relay.lower()] = self._unix_time()
            status = TOO_EARLY  # one by one, in the next pass
        return [status] * len(envelopes)

    async def close(self) -> None:
        """Close the connections kept open."""
        await self._caller.close()


def _reason(text: str) -> Reason:
    """The reason of an attempt, from the text of the ``NoAnswer``."""
    if text.startswith("no answer within") or "Timeout" in text:
        return Reason.TIMEOUT
    if "ConnectionRefused" in text or text.startswith("ConnectError"):
        return Reason.CONNECTION_REFUSED
    if text.startswith("DNSLookupError"):
        return Reason.HOST_NOT_FOUND
    if text == NO_DESCRIPTOR:
        return Reason.NO_DESCRIPTOR
    return Reason.TLS_FAILED if text.startswith("TLS failed") else Reason.OTHER
