"""The errors of a client of any protocol."""

from __future__ import annotations

from dmsg.errors import DmsgError


class ClientStopped(DmsgError):
    """The client has stopped, or is stopping."""

    def __init__(self) -> None:
        super().__init__("the client has stopped")
