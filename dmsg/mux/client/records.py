"""The open transports of a client, with what it knows about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.crypto.keys import PublicKey
from dmsg.glue.waiters import Waiters
from dmsg.mux.client.listener import DmsgPort
from dmsg.mux.client.transport import DmsgTransport


@dataclass(slots=True, eq=False)
class TransportRecord:
    """What a client knows about an open transport."""

    transport: DmsgTransport
    #: When it was opened, on the client's clock.
    since_s: float
    #: The id and the relay it began with: after it was resumed they are the only trace of that.
    first_id: int
    first_server: str
    #: Where it came in; ``None`` for one that was dialled.
    port: DmsgPort | None
    #: The search for another path, while there is one.
    search: Deferred[None] | None = None

    def stop_search(self) -> None:
        """Look for no other path any more."""
        search, self.search = self.search, None
        if search is not None:
            search.cancel()


class TransportRecords:
    """The records of a client's open transports."""

    def __init__(self) -> None:
        self._records: dict[DmsgTransport, TransportRecord] = {}
        #: Those that a peer opened and may resume, by its key and their token.
        self._resumable: dict[PublicKey, dict[bytes, DmsgTransport]] = {}
        self._empty: Waiters[None] = Waiters()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TransportRecord]:
        """The records there are now: transports may end meanwhile."""
        return iter(list(self._records.values()))

    def get(self, transport: DmsgTransport) -> TransportRecord | None:
        """The record of ``transport``; ``None`` when it is not open."""
        return self._records.get(transport)

    def add(self, record: TransportRecord) -> None:
        """A transport has been opened."""
        transport = record.transport
        self._records[transport] = record
        stream = transport.stream
        if stream.resumable and not stream.initiator:
            self._resumable.setdefault(stream.remote, {})[transport.token] = transport

    def remove(self, transport: DmsgTransport) -> TransportRecord | None:
        """``transport`` is over; gives its record, ``None`` when it was not open."""
        record = self._records.pop(transport, None)
        of_peer = self._resumable.get(transport.stream.remote, {})
        if of_peer.pop(transport.token, None) is not None and not of_peer:
            del self._resumable[transport.stream.remote]
        if record is not None and not self._records:
            self._empty.fire(None)
        return record

    def resumable(self, token: bytes, peer: PublicKey) -> DmsgTransport | None:
        """The transport that ``peer`` opened and may go on with under ``token``."""
        return self._resumable.get(peer, {}).get(token)

    def may_resume(self, peer: PublicKey) -> bool:
        """Whether ``peer`` opened any transport that it may go on with."""
        return peer in self._resumable

    @property
    def any_resumable(self) -> bool:
        """Whether any peer opened a transport that it may go on with."""
        return bool(self._resumable)

    @property
    def any_detached(self) -> bool:
        """Whether any transport waits for another path."""
        return any(transport.detached for transport in self._records)

    def when_empty(self, limit_s: float, clock: IReactorTime) -> Deferred[None]:
        """Fires when the last transport is over, or after ``limit_s``; call it while there is one."""
        return self._empty.wait_at_most(limit_s, clock)
