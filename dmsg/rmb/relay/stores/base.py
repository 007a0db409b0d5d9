"""What a store of waiting envelopes promises (:class:`QueueStore`), what it limits, how it fails: :ref:`spec-rmb-stores`.

Each session has a queue of its own; ``None`` and ``""`` as connection name two sessions. An envelope stays until it is
deleted or has expired, and no longer than :data:`KEPT_S`. The relay reads it, writes it to the session's socket, and
deletes it then: an envelope may be delivered twice after a crash, and none is lost between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from twisted.internet.defer import Deferred

from dmsg.rmb.core.address import SessionAddress

#: How long an envelope waits at the most, in seconds, whatever its own lifetime: what the public relay does.
KEPT_S: Final = 3600.0
#: What an envelope counts for beside its own bytes: the row, its indexes, the entry of a stream.
ROW_BYTES: Final = 256
#: What the first one of a sender in a queue counts for beside that, where queues are counted in memory.
QUEUE_BYTES: Final = 768


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. Bytes include :data:`ROW_BYTES` for each envelope; in memory or a file, twice the name of its session,
    too, and outside the limit of one queue :data:`QUEUE_BYTES` for each sender in a queue.

    When a queue, the queues of a twin or the store are full, the sender with the most bytes there loses: its oldest
    envelopes make room for those of others, its own new ones are refused.
    """

    #: Envelopes in one queue: the public relay's MAXLEN.
    queue_envelopes: int = 10_000
    #: Bytes in one queue: 64 envelopes of the largest size.
    queue_bytes: int = 64 << 20
    #: Bytes in all queues of one twin, which may name its sessions as it likes.
    twin_bytes: int = 128 << 20
    #: Bytes in all of a store in memory or in a file.
    store_bytes: int = 256 << 20
    #: Bytes that a Redis may use for everything it has, and those one sender may put into it for sessions that are not
    #: connected, in an hour.
    redis_bytes: int = 1 << 30
    source_bytes: int = 128 << 20


class Stored(NamedTuple):
    """One waiting envelope."""

    #: Names it within its queue, and is the ``after`` of the next :meth:`QueueStore.read`.
    id: str
    data: bytes
    #: When it must not be delivered any more, in Unix seconds.
    expires_at: float


class QueueStore(Protocol):
    """Queues of waiting envelopes. Times are Unix seconds. Deferreds fail with :class:`StoreUnavailable`."""

    #: Whether sessions of other processes may be behind it: what is pushed may have an immediate reader elsewhere.
    shared: bool

    def push(
        self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int = 0
    ) -> Deferred[bool]:
        """Append an envelope; ``source`` is the twin it counts for (0: the relay itself).

        Fires with ``False``, and stores nothing, if it has expired. Fails with :class:`StoreFull`.
        """

    def read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> Deferred[list[Stored]]:
        """At most ``limit`` envelopes behind ``after`` (``None``: from the start) that have not expired, oldest first.

        Together they have at most ``max_bytes``, but one is always given if there is one.
        """

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        """Forget envelopes; silent about those that are gone."""

    def attach(self, session: SessionAddress) -> None:
        """``session`` is connected to this process now, and to no other: another one that has it is told so."""

    def detach(self, session: SessionAddress) -> None:
        """``session`` is no longer connected to this process; silent if it was not attached."""

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        """Whether ``session`` is attached to any process that shares the store."""

    def listen(self, pushed: Callable[[SessionAddress], None], replaced: Callable[[SessionAddress], None]) -> None:
        """Set who is told about attached sessions.

        ``pushed`` says that another process may have put something into the session's queue (also when it did not),
        ``replaced`` that the session connected to another process, which is newer. What this process pushes itself is
        not told. Only a :attr:`shared` store ever calls.
        """

    def close(self) -> Deferred[None]:
        """Finish what is under way and close."""
