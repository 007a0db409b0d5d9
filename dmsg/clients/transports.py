"""The interface of a protocol's transports for a client, and the client's records of open transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IReactorTime

from dmsg.clients.streams import CarriedStream
from dmsg.crypto.keys import PublicKey
from dmsg.glue.waiters import Waiters


class ClientTransport(TypingProtocol):
    """A transport that a client has opened or accepted."""

    #: Time from the request to the peer's answer, at the initiator; 0 at the other side.
    accept_ms: float
    #: Called once when it has ended and its protocol was told.
    on_over: Callable[[], object] | None

    @property
    def stream(self) -> CarriedStream:
        """The stream that carries it; it changes when the transport moves to another path."""

    @property
    def connected(self) -> bool:
        """Whether the application has not been told of its end yet."""

    @property
    def security(self) -> str:
        """What the relay can read: ``"e2e"``, nothing; ``"hop"``, everything."""

    def getPeer(self) -> Any:
        """The peer's address."""

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol`` to it."""

    def loseConnection(self) -> None:
        """End it once what was written has arrived."""

    def abortConnection(self) -> None:
        """End it at once."""

    def deadline_exceeded(self, what: str) -> None:
        """End it at once because ``what`` took too long."""


T = TypeVar("T", bound=ClientTransport)


@dataclass(slots=True, eq=False)
class TransportRecord(Generic[T]):
    """What a client knows about an open transport."""

    transport: T
    #: When it was opened, on the client's clock.
    since_s: float
    #: The stream id and the relay with which it began, for transports that were resumed on another path.
    first_id: int
    first_server: PublicKey
    #: Called once it has ended, with the transport: set by the listening port of an accepted transport.
    closed: Callable[[T], object] | None


class TransportRecords(Generic[T]):
    """The records of a client's open transports."""

    def __init__(self) -> None:
        self._records: dict[T, TransportRecord[T]] = {}
        self._empty: Waiters[None] = Waiters()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[T]:
        """Iterate over a copy, because transports may end meanwhile."""
        return iter(list(self._records))

    def __contains__(self, transport: T) -> bool:
        return transport in self._records

    def add(self, record: TransportRecord[T]) -> None:
        """A transport has been opened."""
        self._records[record.transport] = record

    def remove(self, transport: T) -> TransportRecord[T] | None:
        """``transport`` has ended; returns its record, or ``None`` if it was not open."""
        record = self._records.pop(transport, None)
        if record is not None and not self._records:
            self._empty.fire(None)
        return record

    def when_empty(self, limit_s: float, clock: IReactorTime) -> Deferred[None]:
        """Fires when the last transport has ended, or after ``limit_s``; call it while there is one."""
        return self._empty.wait_at_most(limit_s, clock)
