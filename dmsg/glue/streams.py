"""What a transport needs of the stream under it, and of the connection that the stream belongs to."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeVar

from dmsg.glue.deadlines import Progress


class AbortReason(Enum):
    """Why this side ends a stream at once."""

    APPLICATION = "the application aborts, or has raised"
    OVERFLOW = "more was written than may wait"
    DEADLINE = "a deadline has passed"


class TransportStream(Progress, Protocol):
    """The part of a stream that its transport looks at; :class:`StreamConnection` moves the bytes."""

    @property
    def initiator(self) -> bool:
        """Whether this side has asked for it."""

    @property
    def blocked(self) -> bool:
        """Whether the writer was told to pause."""

    def drop(self) -> None:
        """Received data is dropped, because the application has closed the transport."""


S = TypeVar("S", bound=TransportStream)
S_contra = TypeVar("S_contra", bound=TransportStream, contravariant=True)


class StreamConnection(Protocol[S_contra]):
    """The connection that a stream belongs to: a pure core. The transport has it flushed after a call."""

    def send_data(self, stream: S_contra, data: bytes) -> bool:
        """Queue ``data``; ``True`` asks the writer to pause until the transport is told that it is writable again.

        Raises ``LocalProtocolError`` when the stream takes no data, and another ``DmsgError`` when too much waits to be sent.
        """

    def consumed(self, stream: S_contra, size: int) -> bool:
        """The application took ``size`` bytes; ``True`` if that queued something to send."""

    def close(self, stream: S_contra) -> bool:
        """End ``stream`` once everything written is acknowledged; ``True`` if it is over right now."""
