"""The address of a session: a twin, and the name of one of its connections. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dmsg.errors import InvalidAddress
from dmsg.rmb.core.limits import MAX_CONNECTION_BYTES, MAX_TWIN
from dmsg.rmb.core.wire import Address

if TYPE_CHECKING:
    from typing import Self


class SessionAddress(NamedTuple):
    """A twin's number, and the name of its connection: ``None`` (no name) and ``""`` are two different connections."""

    twin: int
    connection: str | None = None

    @classmethod
    def of(cls, address: Address) -> Self:
        """The address in a field of an envelope; a missing address is twin 0."""
        return cls(address.twin, address.connection if address.HasField("connection") else None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``TWIN`` or ``TWIN:CONNECTION``; raises :class:`~dmsg.errors.InvalidAddress`."""
        twin, colon, connection = text.partition(":")
        if not (twin.isascii() and twin.isdigit() and len(twin) <= 10 and int(twin) <= MAX_TWIN):
            raise InvalidAddress("invalid address twin id is not number")
        try:
            too_long = len(connection.encode()) > MAX_CONNECTION_BYTES
        except UnicodeEncodeError:
            raise InvalidAddress("invalid address connection is not Unicode") from None
        if too_long:
            raise InvalidAddress("invalid address connection is too long")
        return cls(int(twin), connection if colon else None)

    def write_to(self, address: Address) -> None:
        """Put this address into an envelope's field."""
        address.Clear()
        address.twin = self.twin
        if self.connection is not None:
            address.connection = self.connection

    def __str__(self) -> str:
        return str(self.twin) if self.connection is None else f"{self.twin}:{self.connection}"
