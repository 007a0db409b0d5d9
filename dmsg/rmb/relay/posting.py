"""Posts envelopes to other relays over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from twisted.internet.defer import Deferred

from dmsg.address import parse_ip
from dmsg.eventlog.reasons import Reason
from dmsg.glue.names import NamesOfStrangers
from dmsg.http.client import HttpCaller
from dmsg.http.errors import NoAnswer
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.peering import HEADER, Body, Signer, join_envelopes, split_statuses

#: How long connecting, and a whole post, may take, in seconds: the public relay's numbers.
CONNECT_TIMEOUT_S: Final = 2.0
POST_TIMEOUT_S: Final = 3.0
#: Connections kept to one relay.
CONNECTIONS: Final = 4
ONE_TYPE: Final = b"application/octet-stream"
#: Several envelopes, each with its length before it.
SEVERAL_TYPE: Final = b"application/x-dmsg-envelopes"
#: A known relay that does not understand a post of several envelopes is sent them one by one for so long, in seconds.
SINGLE_S: Final = 60.0
TOO_EARLY: Final = 425
_UNKNOWN: Final = (400, 401, 413)
_ANSWER_BYTES: Final = 64 * 1024


def is_loopback(relay: str) -> bool:
    """Whether ``relay`` (a host, perhaps with a port) is this machine by name."""
    host = relay.rpartition(":")[0] if relay.count(":") == 1 else relay
    address = parse_ip(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


class RelayPoster:
    """Posts to relays: to those in ``known`` (names in lower case) signed by ``signer``, and several at once.

    ``scheme`` is ``https``, ``http``, or ``auto``: https, but http to this machine if one of ``domains``, this relay's own
    names, is on it, too. A registry is written by strangers: without that last condition, one of them could let us post to
    programs that only listen here.
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
        #: Relays that did not take several envelopes in a post, and when that was, in Unix seconds.
        self._single: dict[str, float] = {}

    @staticmethod
    def connect(reactor: object) -> HttpCaller:
        """What to give as ``caller``."""
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
        # Later than now if the clock has been set back since: it may be what the other relay did not believe.
        rests = refused_at is not None and 0 <= self._unix_time() - refused_at < SINGLE_S
        return name in self._known and not rests

    def post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> Deferred[list[int]]:
        """See :class:`~dmsg.rmb.relay.federation.Poster`."""
        return Deferred.fromCoroutine(self._post(relay, envelopes, connected_only))

    async def _post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> list[int]:
        headers = {"Accept": b"*/*", "Content-Type": ONE_TYPE}
        body = envelopes[0]
        if connected_only and not self.knows(relay):  # since they began to wait; it would keep them
            return [TOO_EARLY] * len(envelopes)
        # Also one by one: what was wrong with several may be over, and a relay that knows us takes nothing that is not signed.
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
    return Reason.TLS_FAILED if text.startswith("TLS failed") else Reason.OTHER
