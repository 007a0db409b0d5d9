"""The HTTP side of a relay: WebSockets, posts of other relays, and the pages for its operator.

:ref:`spec-rmb-relay`. It only distinguishes four paths and a header, which takes no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.logger import Logger
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.glue.websocket import accept_websocket, asks_for_websocket
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite, ask_later, client_host
from dmsg.rmb.core.errors import TokenRefused
from dmsg.rmb.relay.ingest import body_limit
from dmsg.rmb.relay.limits import arrival_rate, get_rate
from dmsg.rmb.relay.service import RmbRelay
from dmsg.sansio.errors import WebSocketRefused

_log = Logger()
#: Posts that are received at a time: 64 MiB of envelopes. A relay that knows this one has at most four.
_CONCURRENT_BODIES: Final = 64
_TEXT: Final = b"text/plain; charset=utf-8"
_TOO_MANY: Final = 429


class RelayApi(Resource):
    """Answers all requests to ``relay``. ``pages`` are resources by path, for GET; ``ingest`` takes ``POST /``.

    ``refused(host)`` is called for each request for a page that is one too many of its host.
    """

    isLeaf = True

    def __init__(
        self,
        relay: RmbRelay,
        pages: Mapping[bytes, IResource],
        ingest: IResource | None = None,
        refused: Callable[[str], object] = lambda host: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._relay = relay
        self._pages = pages
        self._ingest = ingest
        self._refused = refused
        self._rate = get_rate(relay.limits)

    def render(self, request: Any) -> Any:
        """Answer ``request``."""
        if asks_for_websocket(request):
            return _later(request, self._upgrade(request))
        if request.method == b"POST" and request.path == b"/" and self._ingest is not None:
            return self._ingest.render(request)
        host = client_host(request)
        if not self._rate.take(host, self._relay.reactor.seconds()):
            self._refused(host)
            return _respond(request, _TOO_MANY, "too many requests")
        page = self._pages.get(request.path)
        if page is not None and request.method in (b"GET", b"HEAD"):
            return page.render(request)
        return _respond(request, 404, "page not found")

    async def _upgrade(self, request: Any) -> tuple[int, str] | None:
        relay = self._relay
        host, began = client_host(request), relay.reactor.seconds()
        _, mark, query = request.uri.partition(b"?")
        try:
            address = await relay.login(query.decode("latin-1") if mark else None, host)
            shell = accept_websocket(request, relay, relay.reactor, relay.websocket_config)
        except (TokenRefused, WebSocketRefused) as refused:
            return refused.status, refused.text
        except ConnectionError:
            return None
        relay.open(shell, address, host, began)
        return None


def _later(request: Any, answering: Coroutine[Deferred[Any], Any, tuple[int, str] | None]) -> int:
    """Answer ``request`` when ``answering`` gives a status and a text; ``None`` means that someone else has taken it over."""
    gone: list[object] = []
    running = ensureDeferred(answering)

    def lost(reason: object) -> None:
        gone.append(reason)
        running.cancel()

    def answer(given: tuple[int, str] | None) -> None:
        if given is not None and not gone:
            request.write(_respond(request, *given))
            request.finish()

    def failed(failure: Any) -> None:
        if failure.check(CancelledError) is None:
            _log.failure("a request cannot be answered", failure)
            answer((500, "something unexpected happened"))

    request.notifyFinish().addErrback(lost)
    running.addCallbacks(answer, failed)
    return NOT_DONE_YET


def _respond(request: Any, status: int, text: str) -> bytes:
    body = text.encode()
    if status == _TOO_MANY:
        ask_later(request)
    request.setResponseCode(status)
    request.setHeader(b"content-type", _TEXT)
    request.setHeader(b"content-length", b"%d" % len(body))
    return b"" if request.method == b"HEAD" else body


def make_site(
    relay: RmbRelay,
    reactor: Any,
    pages: Mapping[bytes, IResource],
    ingest: IResource | None = None,
    refused: Callable[[str], object] = lambda host: None,
) -> LimitedSite:
    """The site of ``relay``, with a :class:`RelayApi`. Connections count as strangers until they are sessions."""
    limits, arrivals = relay.limits, arrival_rate(relay.limits)
    site = LimitedSite(
        RelayApi(relay, pages, ingest, refused),
        reactor=reactor,
        limits=HttpLimits(
            body_bytes=body_limit(relay.max_message_bytes),
            concurrent_bodies=_CONCURRENT_BODIES,
            first_byte_timeout_s=limits.first_byte_timeout_s,
            connections=limits.half_open,
            connections_per_address=limits.half_open_per_address,
        ),
        admit=lambda host: arrivals.take(host, relay.reactor.seconds()),
    )
    site.noisy = False
    return site
