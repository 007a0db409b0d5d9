"""The wanted contents of an entry, and the parts that stay as another program published them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dmsg.discovery.entry import (
    BASE_VERSION,
    DMSG,
    ClientPart,
    Entry,
    ServerPart,
    promises_security,
    version_with,
)


class Unmanaged(Enum):
    """Stands for a half that this process does not manage: it stays as it is found."""

    HALF = 0


@dataclass(frozen=True, slots=True)
class WantedEntry:
    """The entry to publish: its halves, the ``promise`` of the client and the ``protocol`` of the server.

    ``None`` stands for a half that the entry must not have.
    """

    client: ClientPart | Unmanaged | None = Unmanaged.HALF
    server: ServerPart | Unmanaged | None = Unmanaged.HALF
    promise: str = BASE_VERSION
    protocol: str = DMSG

    def withdrawn(self) -> WantedEntry:
        """The same entry, withdrawn: no relays, no connections left."""
        client, server = self.client, self.server
        return replace(
            self,
            client=ClientPart(()) if isinstance(client, ClientPart) else client,
            server=replace(server, available_connections=0) if isinstance(server, ServerPart) else server,
        )

    def halves(self, found: Entry | None) -> tuple[ClientPart | None, ServerPart | None]:
        """The halves to publish, with an unmanaged half as it was ``found``."""
        client, server = self.client, self.server
        if isinstance(client, Unmanaged):
            client = found.client if found is not None else None
        if isinstance(server, Unmanaged):
            server = found.server if found is not None else None
        if client is None and server is None:
            client = ClientPart(())  # an entry needs a half; this one offers nothing
        return client, server

    def version(self, found: Entry | None) -> str:
        """The version to publish: a half that stays as it was ``found`` keeps its part of the version, too."""
        promise, protocol = self.promise, self.protocol
        if found is not None and found.client is not None and isinstance(self.client, Unmanaged):
            promise = max(promise, found.promise, key=promises_security)
        if isinstance(self.server, Unmanaged):
            kept = found is not None and found.server is not None
            protocol = (found.version.partition("+")[2] or DMSG) if found is not None and kept else DMSG
        return version_with(promise, protocol)

    def is_met_by(self, found: Entry) -> bool:
        """Whether ``found`` has the wanted contents."""
        client, server = self.halves(found)
        return (found.version, found.client) == (self.version(found), client) and is_same_server(found.server, server)


def is_same_server(one: ServerPart | None, other: ServerPart | None) -> bool:
    """Whether two server halves say the same."""
    if one is None or other is None:
        return one is other
    return (one.address, one.port or "", one.available_connections, one.later) == (
        other.address,
        other.port or "",
        other.available_connections,
        other.later,
    )
