"""What the messaging protocol can refuse or end for; all data is in attributes."""

from __future__ import annotations

from dmsg.errors import RemoteProtocolError


class LinkRefused(RemoteProtocolError):
    """The relay says ``accepted: false`` in the link handshake: it does not want this client."""

    def __init__(self) -> None:
        super().__init__("handshake", "refused by server")
