"""Where a discovery has its relay ranks from: a file or a URL, read again and again, the last good document kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorThreads
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.ranks import DOCUMENT_LIMIT_BYTES, Ranks, RanksError
from dmsg.errors import DiscoveryError
from dmsg.interfaces import IEventLog
from dmsg.ops.events import RanksLoaded
from dmsg.ops.shipping import redact

#: How often the file or URL is read again, in seconds.
REFRESH_S: Final = 60.0
#: How long a URL has to answer, in seconds, its body included.
FETCH_TIMEOUT_S: Final = 30.0


async def parse_ranks(
    reactor: Any, data: bytes, trusted: Collection[PublicKey], now_s: float, previous: Ranks | None
) -> Ranks:
    """:meth:`Ranks.parse <dmsg.discovery.ranks.Ranks.parse>`, in a thread of ``reactor`` if it has any."""
    if not IReactorThreads.providedBy(reactor):
        return Ranks.parse(data, trusted, now_s, previous=previous)
    pool = reactor.getThreadPool()
    return await deferToThreadPool(reactor, pool, Ranks.parse, data, trusted, now_s, previous=previous)


class RanksSource:
    """Keeps the newest good document of ``location``: the path of a file, or an ``http`` or ``https`` URL.

    ``trusted`` are the keys whose documents are taken, ``now_s()`` is Unix time in seconds, ``refresh_s`` says how often
    it is looked at (seconds on ``reactor``). ``caller`` is who asks a URL (an ``HttpCaller``; its own by default).
    ``events`` gets a :class:`~dmsg.ops.events.RanksLoaded` whenever a document is taken, and whenever there is a new
    reason for which none is.

    Nothing that goes wrong here changes the document in force: it fades by itself.
    """

    _log = Logger()

    def __init__(
        self,
        location: str,
        trusted: Collection[PublicKey],
        reactor: Any,
        *,
        now_s: Callable[[], float],
        refresh_s: float = REFRESH_S,
        caller: Any = None,
        events: IEventLog | None = None,
    ) -> None:
        self.location = location
        self.ranks: Ranks | None = None
        #: Why the last look gave nothing new that is good: a ``RanksError``'s reason; empty if it did.
        self.problem = ""
        self._trusted = frozenset(trusted)
        self._reactor = reactor
        self._now_s = now_s
        self._refresh_s = refresh_s
        self._caller = caller
        self._events: Any = events
        self._timer: IDelayedCall | None = None
        self._running: Deferred[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Look now, and from now on."""
        self._timer = None
        self._running = Deferred.fromCoroutine(self.refresh())
        self._running.addErrback(self._unexpected).addCallback(self._again)

    async def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None:
            self._running.cancel()
        if self._caller is not None:
            await self._caller.close()

    async def refresh(self) -> None:
        """Look once; what goes wrong is logged, not raised."""
        try:
            data = await self._read()
            ranks = await parse_ranks(self._reactor, data, self._trusted, self._now_s(), self.ranks)
        except RanksError as error:
            self._refused(error)
            return
        self.problem = ""
        if ranks is not self.ranks:
            self.ranks = ranks
            self._log.info(
                "relay ranks of {count} relays, issued by {issuer} {age:.0f} s ago, are in force",
                count=len(ranks.scores),
                issuer=ranks.issuer,
                age=self._now_s() - ranks.issued,
            )
            self._emit(RanksLoaded(True, "", str(ranks.issuer), ranks.issued, len(ranks.scores)))

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _read(self) -> bytes:
        if not self.location.startswith(("http://", "https://")):
            if not IReactorThreads.providedBy(self._reactor):
                return _read_file(self.location)
            return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), _read_file, self.location)
        if self._caller is None:
            from dmsg.discovery.http_client import HttpCaller  # treq installs the reactor when it is imported

            self._caller = HttpCaller.connect(self._reactor, timeout_s=FETCH_TIMEOUT_S)
        try:
            status, _, body = await self._caller.call("GET", self.location, limit_bytes=DOCUMENT_LIMIT_BYTES)
        except DiscoveryError as error:
            raise RanksError("unreadable", str(error)) from error
        if status != 200:
            raise RanksError("unreadable", f"HTTP status {status}")
        answer: bytes = body
        return answer

    def _refused(self, error: RanksError) -> None:
        if error.reason != self.problem:  # said once, not every minute
            self.problem = error.reason
            self._log.warn(
                "relay ranks from {location} are not used: {error}", location=redact(self.location), error=error
            )
            self._emit(RanksLoaded(False, error.reason, "", 0, 0))

    def _unexpected(self, failure: Any) -> None:
        if not failure.check(CancelledError):
            self._log.failure("the relay ranks could not be looked at and will be again", failure)

    def _again(self, _: object) -> None:
        self._running = None
        if not self._stopped:
            self._timer = self._reactor.callLater(self._refresh_s, self.start)

    def _emit(self, event: RanksLoaded) -> None:
        if self._events is not None:
            self._events.emit(event)


def _read_file(path: str) -> bytes:
    """At most one byte more of the file than a document may have; ``RanksError`` when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RanksError("unreadable", "not a plain file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(DOCUMENT_LIMIT_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RanksError("unreadable", error.strerror or "cannot be read") from None
