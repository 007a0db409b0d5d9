"""Why a relay ends a connection. Pure."""

from __future__ import annotations

from dmsg.errors import DmsgError


class RelayDraining(DmsgError):
    """The relay is stopping, so it ends the connection."""
