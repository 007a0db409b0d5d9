"""The address of a session: a twin, and which of its connections. Pure."""

from __future__ import annotations

from typing import NamedTuple, Self

from dmsg.rmb.core.wire import Address


class SessionAddress(NamedTuple):
    """A twin's number, and the text its connection calls itself: ``None`` (no text) and ``""`` are two connections."""

    twin: int
    connection: str | None = None

    @classmethod
    def of(cls, address: Address) -> Self:
        """What stands in an envelope; a missing address is twin 0."""
        return cls(address.twin, address.connection if address.HasField("connection") else None)

    def write_to(self, address: Address) -> None:
        """Put this address into an envelope's field."""
        address.Clear()
        address.twin = self.twin
        if self.connection is not None:
            address.connection = self.connection

    def __str__(self) -> str:
        return str(self.twin) if self.connection is None else f"{self.twin}:{self.connection}"
