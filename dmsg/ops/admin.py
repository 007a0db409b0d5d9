"""The admin site: ``/metrics``, ``/livez`` and ``/readyz``, on an endpoint of its own and never on a public one."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from dmsg.ops.metrics import CONTENT_TYPE_LATEST, CollectorRegistry, exposition

#: Gives the reason why the program is not ready (a short text), or "" if it is. May be asynchronous.
Readiness = Callable[[], "str | Awaitable[str]"]
#: A readiness check that takes longer than this, in seconds, counts as not ready.
READY_TIMEOUT_S: Final = 2.0
#: A scraper's connection may be idle this long.
_IDLE_TIMEOUT_S: Final = 120.0
#: The text of the metrics is cached for this many seconds: making it takes up to 5 ms, and strangers who may ask for it on many
#: connections would leave no time for anything else.
KEPT_S: Final = 0.1

_log = Logger()


class _Leaf(Resource):
    isLeaf = True

    def _answer(self, request: Request, status: int, body: bytes, content_type: bytes = b"application/json") -> bytes:
        request.setResponseCode(status)
        request.setHeader(b"content-type", content_type)
        request.setHeader(b"cache-control", b"no-store")
        request.setHeader(b"content-length", b"%d" % len(body))
        return b"" if request.method == b"HEAD" else body  # Twisted logs a line where it has to drop the body


class _Metrics(_Leaf):
    def __init__(self, registry: CollectorRegistry, clock: IReactorTime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._clock = clock
        self._text, self._made_at = b"", -math.inf

    def render_GET(self, request: Request) -> bytes:
        now = self._clock.seconds()
        if not 0 <= now - self._made_at < KEPT_S:
            self._text, self._made_at = exposition(self._registry), now
        return self._answer(request, 200, self._text, CONTENT_TYPE_LATEST.encode("ascii"))


class _Live(_Leaf):
    def render_GET(self, request: Request) -> bytes:
        return self._answer(request, 200, b'{"status":"alive"}\n')


class _Ready(_Leaf):
    def __init__(self, ready: Readiness, clock: IReactorTime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._readiness = ready
        self._clock = clock

    def render_GET(self, request: Request) -> int:
        asking = ensureDeferred(self._ask())
        asking.addTimeout(READY_TIMEOUT_S, self._clock, onTimeoutCancel=lambda result, timeout_s: "timeout")
        gone = request.notifyFinish()
        gone.addErrback(lambda _: asking.cancel())
        asking.addCallbacks(lambda reason: self._finish(request, reason), self._failed)
        return NOT_DONE_YET

    async def _ask(self) -> str:
        try:
            reason = self._readiness()
            return str(await reason if isawaitable(reason) else reason)
        except CancelledError:  # it took too long, or the client has gone
            raise
        except Exception as error:
            _log.failure("readiness cannot be told")
            return type(error).__name__

    def _finish(self, request: Request, reason: str) -> None:
        body = {"status": "not ready", "reason": reason} if reason else {"status": "ready"}
        request.write(self._answer(request, 503 if reason else 200, json.dumps(body).encode() + b"\n"))
        request.finish()

    def _failed(self, failure: Any) -> None:
        failure.trap(CancelledError)  # the client has gone


class _NotFound(_Leaf):
    def render(self, request: Request) -> bytes:
        return self._answer(request, 404, b'{"status":"no such page"}\n')


class _Root(Resource):
    def getChild(self, path: bytes, request: Request) -> Resource:
        return _NotFound()  # type: ignore[no-untyped-call]


class _AdminSite(Site):
    noisy = False
    displayTracebacks = False

    def log(self, request: object) -> None:
        """Log nothing: a line for each scrape would be of no use."""


def admin_pages(registry: CollectorRegistry, ready: Readiness, reactor: Any) -> dict[bytes, Resource]:
    """The pages by name; ``ready()`` gives the reason why the program is not ready, "" if it is."""
    return {
        b"metrics": _Metrics(registry, reactor),
        b"livez": _Live(),  # type: ignore[no-untyped-call]
        b"readyz": _Ready(ready, reactor),
    }


def make_admin_site(registry: CollectorRegistry, ready: Readiness, reactor: Any) -> Site:
    """The site with :func:`admin_pages`."""
    root = _Root()  # type: ignore[no-untyped-call]
    for name, page in admin_pages(registry, ready, reactor).items():
        root.putChild(name, page)
    return _AdminSite(root, timeout=_IDLE_TIMEOUT_S, reactor=reactor)  # type: ignore[no-untyped-call]
