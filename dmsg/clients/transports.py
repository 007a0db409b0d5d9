"""What a client needs of the transports of its protocol, and what it knows about each that is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IReactorTime

from dmsg.clients.streams import CarriedStream
from dmsg.glue.waiters import Waiters


class ClientTransport(TypingProtocol):
    """A transport that a client has opened or accepted."""

    #: From the request to the peer's answer, at the side that asked; 0 at the other.
    accept_ms: float
    #: Called once when it is over and its protocol knows.
    on_over: Callable[[], object] | None

    @property
    def stream(self) -> CarriedStream:
        """What carries it; another one once it has moved to another path."""

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
    #: The id and the relay it began with: after it was resumed they are the only trace of that.
    first_id: int
    first_server: str
    #: Told once it is over: where it came in, if it was not dialled.
    closed: Callable[[T], object] | None


class TransportRecords(Generic[T]):
    """The records of a client's open transports."""

    def __init__(self) -> None:
        self._records: dict[T, TransportRecord[T]] = {}
        self._empty: Waiters[None] = Waiters()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[T]:
        """The transports there are now: some may end meanwhile."""
        return iter(list(self._records))

    def __contains__(self, transport: T) -> bool:
        return transport in self._records

    def add(self, record: TransportRecord[T]) -> None:
        """A transport has been opened."""
        self._records[record.transport] = record

    def remove(self, transport: T) -> TransportRecord[T] | None:
        """``transport`` is over; gives its record, ``None`` when it was not open."""
        record = self._records.pop(transport, None)
        if record is not None and not self._records:
            self._empty.fire(None)
        return record

    def when_empty(self, limit_s: float, clock: IReactorTime) -> Deferred[None]:
        """Fires when the last transport is over, or after ``limit_s``; call it while there is one."""
        return self._empty.wait_at_most(limit_s, clock)
