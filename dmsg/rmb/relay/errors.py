"""The errors and refusals of a relay of the Reliable Message Bus; all data is in attributes."""

from __future__ import annotations

from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.eventlog.reasons import Reason
from dmsg.http.errors import NoAnswer


class StoreError(DmsgError):
    """A store could not carry out an operation."""


class Refused(DmsgError):
    """A post, or an envelope in a post, is refused: the HTTP ``status`` and text of the answer."""

    def __init__(self, status: int, text: str, why: Reason) -> None:
        super().__init__(text)
        self.status = status
        self.why = why


class NotPosted(NoAnswer):
    """Another relay did not accept a post, or did not answer; ``reason`` is for the event log."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class NotTrusted(RemoteProtocolError):
    """A POST that does not come from a relay this one knows; ``why`` is for the event log and the answer."""

    def __init__(self, why: Reason) -> None:
        super().__init__("post", why.value)
        self.why = why


class StoreFull(StoreError):
    """There is no room for the envelope: ``scope`` is ``queue``, ``twin``, ``source``, ``store``, or ``disk``."""

    def __init__(self, scope: str) -> None:
        super().__init__("the disk is full" if scope == "disk" else f"no room in the {scope}")
        self.scope = scope


class StoreUnavailable(StoreError):
    """The database behind the store failed or was too slow, or the store is closed; a retry may succeed."""
