"""The source of a client's operator list: a file or a URL that is read again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.signed_source import SignedSource
from dmsg.relays.operator_list import KIND, ListedRelay, RelayList

#: Seconds between two reads of the file or URL, and after a read that failed. Every client does this.
REFRESH_S: Final = 600.0
RETRY_S: Final = 30.0
#: How many seconds a URL has to answer, including the body: a command waits for the list before it connects.
TIMEOUT_S: Final = 10.0


class RelayListSource(SignedSource[RelayList]):
    """A :class:`~dmsg.discovery.signed_source.SignedSource` of relay lists, as a client's pool wants it.

    With ``only`` no other relays are used. Otherwise other relays are used when none of the list can be reached.
    """

    def __init__(
        self,
        location: str,
        trusted: Collection[PublicKey],
        reactor: Any,
        *,
        only: bool,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(
            location,
            KIND,
            RelayList.parse,
            trusted,
            reactor,
            now_s=now_s,
            refresh_s=REFRESH_S,
            retry_s=RETRY_S,
            timeout_s=TIMEOUT_S,
        )
        self.only = only
        #: Called whenever a new list is in force.
        self.changed: Callable[[], None] = lambda: None

    def relays(self) -> Sequence[ListedRelay]:
        """The relays of the list in force; none while there is no list, or once it has expired."""
        found = self.document
        return () if found is None or found.expired(self._now_s()) else found.relays

    def _taken(self, document: RelayList) -> None:
        self._log.info(
            "a list of {count} relays, issued by {issuer}, is in force",
            count=len(document.relays),
            issuer=document.issuer,
        )
        self.changed()
