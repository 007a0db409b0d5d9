"""Why a file of the event log was not shipped. Pure."""

from __future__ import annotations

from dmsg.errors import DmsgError


class ShippingError(DmsgError):
    """A file of the event log that could not be brought to its target; it is still where it was, or set aside.

    ``reason`` is a short fixed text for logs and metrics (:doc:`/howto/ship-events`), ``detail`` is for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
