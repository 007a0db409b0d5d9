"""The source of a discovery's relay ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DocumentError
from dmsg.discovery.ranks import KIND, Ranks
from dmsg.discovery.signed_source import SignedSource, parse_document
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import RanksLoaded
from dmsg.interfaces import IEventLog

#: How often the file or URL is read again, in seconds.
REFRESH_S: Final = 60.0


async def parse_ranks(
    reactor: Any, data: bytes, trusted: Collection[PublicKey], now_s: float, previous: Ranks | None
) -> Ranks:
    """:meth:`Ranks.parse <dmsg.discovery.ranks.Ranks.parse>`, in a thread of ``reactor`` if it has any."""
    return await parse_document(reactor, Ranks.parse, data, trusted, now_s, previous)


class RanksSource(SignedSource[Ranks]):
    """A :class:`~dmsg.discovery.signed_source.SignedSource` of ranks; the document in force fades by itself.

    ``events`` gets a :class:`~dmsg.eventlog.schema.RanksLoaded` whenever a document is accepted, and whenever documents are
    refused for a new reason.
    """

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
        super().__init__(location, KIND, Ranks.parse, trusted, reactor, now_s=now_s, refresh_s=refresh_s, caller=caller)
        self._events: Any = events

    @property
    def ranks(self) -> Ranks | None:
        """The document in force."""
        return self.document

    def _taken(self, document: Ranks) -> None:
        self._log.info(
            "relay ranks of {count} relays, issued by {issuer} {age:.0f} s ago, are in force",
            count=len(document.scores),
            issuer=document.issuer,
            age=self._now_s() - document.issued,
        )
        self._emit(RanksLoaded(True, Reason.NONE, str(document.issuer), document.issued, len(document.scores)))

    def _refused(self, error: DocumentError) -> None:
        super()._refused(error)
        self._emit(RanksLoaded(False, Reason.of(error.reason), "", 0, 0))

    def _emit(self, event: RanksLoaded) -> None:
        if self._events is not None:
            self._events.emit(event)
