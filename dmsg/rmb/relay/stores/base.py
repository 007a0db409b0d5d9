"""The interface of a store of waiting envelopes (:class:`QueueStore`), its limits and errors: :ref:`spec-rmb-stores`.

Each session has a queue of its own; ``None`` and ``""`` as connection name two sessions. An envelope stays until it is
deleted or has expired, and no longer than :data:`KEPT_S`. The relay reads an envelope, writes it to the session's socket,
and only then deletes it: after a crash an envelope may be delivered twice, but none is lost between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from twisted.internet.defer import Deferred

from dmsg.rmb.core.address import SessionAddress

#: Seconds for which an envelope waits at most, whatever its own lifetime; the public relay has the same limit.
KEPT_S: Final = 3600.0
#: Bytes that an envelope counts besides its own: for the row, its indexes, the entry of a stream.
ROW_BYTES: Final = 256
#: Bytes that the first envelope of a sender in a queue counts in addition, where queues are counted in memory.
QUEUE_BYTES: Final = 768


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. Bytes include :data:`ROW_BYTES` for each envelope. In memory or a file they also include twice the
    name of its session, and, except for the limit of one queue, :data:`QUEUE_BYTES` for each sender in a queue.

    When a queue, the queues of a twin, or the store is full, the sender with the most bytes there loses, or that with the most
    envelopes in a queue with too many: its oldest envelopes are evicted for those of others, and its own new ones are refused.
    """

    #: Envelopes in one queue: the public relay's MAXLEN.
    queue_envelopes: int = 10_000
    #: Bytes in one queue: 64 envelopes of the largest size.
    queue_bytes: int = 64 << 20
    #: Bytes in all queues of one twin, which may name its sessions as it likes.
    twin_bytes: int = 128 << 20
    #: Bytes in all of a store in memory or in a file.
    store_bytes: int = 256 << 20
    #: Bytes that a Redis may use for all its data, and bytes that one sender may store in it per hour for sessions that are not
    #: connected; fewer, if they would be more than an eighth of what is free.
    redis_bytes: int = 1 << 30
    source_bytes: int = 128 << 20


class Stored(NamedTuple):
    """One waiting envelope."""

    #: Its id within its queue, and the ``after`` of the next :meth:`QueueStore.read`.
    id: str
    data: bytes
    #: The Unix time after which it must not be delivered.
    expires_at: float


class QueueStore(Protocol):
    """Queues of waiting envelopes. Times are Unix seconds. Deferreds fail with :class:`StoreUnavailable`."""

    #: Whether other processes may share the store: an envelope may have an immediate reader in another process.
    shared: bool
    #: Pushes of new envelopes, and of answers of the relay, that may be under way. A store that takes only so many operations at
    #: a time has room for others besides these: for reads, deletions, and what ended sessions were not given, which is lost if it
    #: is not taken.
    new_pushes: float

    def push(
        self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int = 0
    ) -> Deferred[bool]:
        """Append an envelope; ``source`` is the twin for which it counts (0: the relay itself).

        Fires with ``False`` and stores nothing if the envelope has expired. Fails with :class:`StoreFull`.
        """

    def read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> Deferred[list[Stored]]:
        """At most ``limit`` unexpired envelopes behind ``after`` (``None``: from the start), oldest first.

        Together they have at most ``max_bytes``, but at least one is returned if there is one.
        """

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        """Delete envelopes; ids that are gone are ignored."""

    def attach(self, session: SessionAddress) -> None:
        """``session`` is connected to this process now, and to no other: a process that had it before is told."""

    def detach(self, session: SessionAddress) -> None:
        """``session`` is no longer connected to this process; ignored if it was not attached."""

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        """Whether ``session`` is attached to any process that shares the store."""

    def listen(self, pushed: Callable[[SessionAddress], None], replaced: Callable[[SessionAddress], None]) -> None:
        """Set the callbacks for attached sessions.

        ``pushed`` is called when another process may have put something into the session's queue (also when it did not),
        ``replaced`` when the session has since connected to another process. Pushes of this process cause no call. Only a
        :attr:`shared` store ever calls.
        """

    def close(self) -> Deferred[None]:
        """Finish what is under way and close."""
