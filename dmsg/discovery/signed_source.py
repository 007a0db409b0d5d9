"""The source of a signed document: a file or a URL, which is read again and again; the last valid document is kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from typing import Any, Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorThreads
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DocumentError
from dmsg.discovery.signed import DocumentKind
from dmsg.http.errors import NoAnswer
from dmsg.shipping.plan import redact

#: Timeout of a URL in seconds, its body included.
FETCH_TIMEOUT_S: Final = 30.0

D = TypeVar("D")


class Parse(TypingProtocol[D]):
    """Reads and verifies a document; returns ``previous`` when it says the same, raises a ``DocumentError``."""

    def __call__(self, data: bytes, trusted: Collection[PublicKey], now_s: float, *, previous: D | None) -> D: ...


async def parse_document(
    reactor: Any, parse: Parse[D], data: bytes, trusted: Collection[PublicKey], now_s: float, previous: D | None
) -> D:
    """``parse(data, trusted, now_s, previous=previous)``, in a thread of ``reactor`` if it has any."""
    if not IReactorThreads.providedBy(reactor):
        return parse(data, trusted, now_s, previous=previous)
    pool = reactor.getThreadPool()
    found: D = await deferToThreadPool(reactor, pool, parse, data, trusted, now_s, previous=previous)
    return found


class SignedSource(Generic[D]):
    """Keeps the newest valid document of ``location``: the path of a file, or an ``http`` or ``https`` URL.

    ``trusted`` are the keys whose documents are accepted, ``now_s()`` is Unix time in seconds. The location is read every
    ``refresh_s`` seconds on ``reactor``, and again after ``retry_s`` when that failed. ``caller`` fetches a URL (an
    ``HttpCaller``; an own one by default).

    No failure changes the document in force.
    """

    _log = Logger()

    def __init__(
        self,
        location: str,
        kind: DocumentKind,
        parse: Parse[D],
        trusted: Collection[PublicKey],
        reactor: Any,
        *,
        now_s: Callable[[], float],
        refresh_s: float,
        retry_s: float | None = None,
        timeout_s: float = FETCH_TIMEOUT_S,
        caller: Any = None,
    ) -> None:
        self.location = location
        self.document: D | None = None
        #: Why the last reading gave no valid document; ``None`` if it did.
        self.error: DocumentError | None = None
        self._kind = kind
        self._parse = parse
        self._trusted = frozenset(trusted)
        self._reactor = reactor
        self._now_s = now_s
        self._refresh_s = refresh_s
        self._retry_s = refresh_s if retry_s is None else retry_s
        self._timeout_s = timeout_s
        self._caller = caller
        self._timer: IDelayedCall | None = None
        self._running: Deferred[None] | None = None
        self._stopped = False

    @property
    def problem(self) -> str:
        """Why the last reading gave no valid document: a ``DocumentError``'s reason; empty if it did."""
        return "" if self.error is None else self.error.reason

    def start(self) -> None:
        """Read the location now, and regularly from now on, until :meth:`stop`. Nothing happens if it does so already."""
        if self._running is None and self._timer is None:
            self._stopped = False
            self._read_again()

    def _read_again(self) -> None:
        self._timer = None
        self._running = Deferred.fromCoroutine(self.refresh())
        self._running.addErrback(self._unexpected).addCallback(self._again)

    async def stop(self) -> None:
        """Stop reading."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None:
            self._running.cancel()
        if self._caller is not None:
            await self._caller.close()

    async def refresh(self) -> None:
        """Read the location once; failures are logged, not raised."""
        try:
            data = await self._read()
            found = await parse_document(self._reactor, self._parse, data, self._trusted, self._now_s(), self.document)
        except DocumentError as error:
            before, self.error = self.problem, error
            if error.reason != before:  # logged once, not every minute
                self._refused(error)
            return
        self.error = None
        if found is not self.document:
            self.document = found
            self._taken(found)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _taken(self, document: D) -> None:
        """A new document is in force."""

    def _refused(self, error: DocumentError) -> None:
        """Documents are refused for a new reason."""
        self._log.warn(
            "{what} from {location} not used: {error}",
            what=self._kind.noun,
            location=redact(self.location),
            error=error,
        )

    async def _read(self) -> bytes:
        limit_bytes = self._kind.limit_bytes
        if not self.location.startswith(("http://", "https://")):
            if not IReactorThreads.providedBy(self._reactor):
                return self._read_file()
            return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._read_file)
        if self._caller is None:
            from dmsg.http.client import HttpCaller  # treq installs the reactor when it is imported

            self._caller = HttpCaller.connect(self._reactor, timeout_s=self._timeout_s)
        try:
            status, _, body = await self._caller.call("GET", self.location, limit_bytes=limit_bytes)
        except NoAnswer as error:
            raise self._kind.error("unreadable", str(error)) from error
        if status != 200:
            raise self._kind.error("unreadable", f"HTTP status {status}")
        answer: bytes = body
        return answer

    def _unexpected(self, failure: Any) -> None:
        if not failure.check(CancelledError):
            self._log.failure(f"{self._kind.noun} could not be looked at and will be again", failure)

    def _again(self, _: object) -> None:
        self._running = None
        if not self._stopped:
            pause_s = self._refresh_s if self.error is None else self._retry_s
            self._timer = self._reactor.callLater(pause_s, self._read_again)

    def _read_file(self) -> bytes:
        """The file, cut one byte after the most that a document may have. Raises ``DocumentError`` if it cannot be read."""
        try:
            descriptor = os.open(self.location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._kind.error("unreadable", "not a plain file")
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    return file.read(self._kind.limit_bytes + 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._kind.error("unreadable", error.strerror or "cannot be read") from None
