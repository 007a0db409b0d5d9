"""A twin's session at a relay: its WebSocket, and its queue. Pure.

:ref:`spec-rmb-queues`. Queued envelopes become frames only when the network takes them, so that all others can go to the
store when the session ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

from dmsg.errors import RemoteProtocolError
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.limiter import FixedWindow
from dmsg.rmb.core.wire import Address
from dmsg.rmb.relay.lanes import Room
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.sansio.websocket import WRITE_BYTES, Role, State, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.serving.admission import Origin

# Reading a member of an enumeration is a function call in Python, so it is done once.
_OPEN: Final = State.OPEN
#: The longest head of a server's frame.
_HEAD_BYTES: Final = 10


class Traffic:
    """The queued bytes of all sessions of a relay, and which of them have to write."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        #: Sessions with something to write. The service flushes them and empties the list.
        self.dirty: list[Session] = []
        #: Sessions whose network takes nothing.
        self.stalled: dict[Session, None] = {}
        #: Bytes of envelopes and answers that are not written yet, or that a network has not taken.
        self.waiting_bytes = 0
        #: Unwritten bytes on their way from sessions back to the store, by the networks of the sessions.
        self.returning: Room = Room(limits.queued_total_bytes)
        #: Bytes of incomplete messages by session, and their sum.
        self.incoming: dict[Session, int] = {}
        self.incoming_total_bytes = 0
        #: Envelopes and bytes written so far.
        self.written = self.written_bytes = 0
        #: The time of the last activity, on the clock of the shells.
        self.now = 0.0


class Session(WebSocket):
    """One connection of a twin. ``number`` grows with each session; ``origin`` is where it comes from."""

    __slots__ = (
        "address",
        "behind",
        "buffered_bytes",
        "bytes_in",
        "bytes_out",
        "dirty",
        "done",
        "envelopes_in",
        "envelopes_out",
        "fetching",
        "full_for",
        "full_until",
        "later",
        "limiter",
        "news",
        "number",
        "opened_at",
        "origin",
        "owner",
        "page",
        "pending",
        "pending_bytes",
        "proved",
        "queue",
        "said_bytes",
        "source",
        "stalled_at",
        "stored",
        "traffic",
        "used_at",
        "waiting_bytes",
    )

    def __init__(
        self,
        traffic: Traffic,
        address: SessionAddress,
        config: WebSocketConfig,
        *,
        origin: Origin,
        number: int,
        now: float,
    ) -> None:
        super().__init__(Role.SERVER, config, now=now)
        self.traffic = traffic
        self.address = address
        self.origin = origin
        self.number = number
        #: The rate limit of its twin, if there is one.
        self.limiter: FixedWindow | None = None
        #: The source that its envelopes must have.
        self.source = Address()
        address.write_to(self.source)
        #: The shell that drives it.
        self.owner: Any = None
        #: Whether it is going to be flushed.
        self.dirty = False
        #: Envelopes to write next; and envelopes to write after those that are in the store.
        self.queue: deque[bytes] = deque()
        self.behind: deque[bytes] = deque()
        self.waiting_bytes = 0
        #: Bytes of the last write before the network stalled.
        self.buffered_bytes = 0
        #: Unwritten bytes of the relay's own answers.
        self.said_bytes = 0
        #: Whether the store may have something for it.
        self.stored = True
        #: How often something may have come to the store for it; tells whether that happened during a read.
        self.news = 0
        self.fetching = False
        #: Time on the clock until which the store counts as full for it, and the twins whose envelopes the store has refused.
        self.full_until = 0.0
        self.full_for: Collection[int] = ()
        #: The ids in the store of the envelopes in the queue, and of those that were written.
        self.page: list[str] = []
        self.done: list[str] = []
        #: Envelopes it has sent that wait for the registry, the store or federation, and their bytes.
        self.pending = self.pending_bytes = 0
        #: While envelopes of its last read wait for their turns: those that came after them.
        self.later: list[Any] | None = None
        #: Whether it has sent anything.
        self.proved = False
        self.stalled_at: float | None = None
        self.opened_at = self.used_at = now
        self.envelopes_in = self.envelopes_out = self.bytes_in = self.bytes_out = 0

    # --- as a core -------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> Sequence[bytes | str | Closed]:
        """The messages in ``data``; bytes of an incomplete message are counted."""
        try:
            return super().receive_data(data, now)
        finally:
            if self.incoming_bytes or self in self.traffic.incoming:
                self.count_incoming(self.incoming_bytes)

    def count_incoming(self, size: int) -> None:
        """Note that ``size`` bytes of a message are held."""
        traffic = self.traffic
        traffic.incoming_total_bytes += size - traffic.incoming.pop(self, 0)
        if size:
            traffic.incoming[self] = size

    def data_to_send(self) -> bytes:
        """The next bytes to write, some 64 KiB at a time."""
        self.dirty = False
        queue = self.queue
        if queue and self.state is _OPEN and not self.pong_waits:
            send, count, free = self.send, len(queue), WRITE_BYTES - self.queued_bytes
            room, alone = free, free == WRITE_BYTES  # an envelope longer than a write goes alone
            # Make no frame that is not written now: an envelope in a frame counts as written, and never goes to the store.
            while queue:
                data = queue.popleft()
                needed = len(data) + _HEAD_BYTES
                if needed > room and not alone:
                    queue.appendleft(data)
                    break
                room -= needed
                alone = False
                send(data)
            count -= len(queue)
            size = free - room - _HEAD_BYTES * count
            self.waiting_bytes -= size
            self.traffic.waiting_bytes -= size
            self.bytes_out += size
            self.envelopes_out += count
            self.traffic.written += count
            self.traffic.written_bytes += size
        written = super().data_to_send()
        if self.said_bytes:
            self.count_said(self.queued_bytes)
        return written

    def next_timeout(self) -> float | None:
        """The WebSocket's timeout, or the time at which a stalled session is closed, whichever is earlier."""
        due = super().next_timeout()
        if self.stalled_at is None or due is None:
            return due
        return min(due, self.stalled_at + self.traffic.limits.slow_consumer_timeout_s + self.grace_s)

    def handle_timeout(self, now: float) -> Sequence[object]:
        """Ping, or end the session with ``RemoteProtocolError`` when the other side is silent or reads nothing."""
        timeout_s = self.traffic.limits.slow_consumer_timeout_s
        if self.stalled_at is not None and now >= self.stalled_at + timeout_s + self.grace_s:
            raise RemoteProtocolError("session", "slow_consumer")
        return super().handle_timeout(now)

    def pause(self) -> None:
        """The network takes nothing more for now."""
        super().pause()
        if self.stalled_at is None:
            self.stalled_at = self.traffic.now
            self.traffic.stalled[self] = None
            self.buffered_bytes = self._last_bytes
            self.traffic.waiting_bytes += self.buffered_bytes

    def resume(self) -> None:
        """The network takes again."""
        super().resume()
        self.stalled_at = None
        self.traffic.stalled.pop(self, None)
        self.traffic.waiting_bytes -= self.buffered_bytes
        self.buffered_bytes = 0

    # --- what waits ------------------------------------------------------------------------------------------------

    def say(self, data: bytes) -> None:
        """Write an answer of the relay itself, ahead of all queued envelopes. It never goes to the store."""
        if self.state is _OPEN:
            self.send(data)
            self.count_said(self.queued_bytes)
            self._mark_dirty()

    def count_said(self, size: int) -> None:
        """Note that ``size`` bytes of frames are unwritten."""
        self.traffic.waiting_bytes += size - self.said_bytes
        self.said_bytes = size

    @property
    def group(self) -> str:
        """The network that it counts for where memory is short."""
        return self.origin.network

    @property
    def held_bytes(self) -> int:
        """All bytes that are queued for it, or that its network has not taken."""
        return self.waiting_bytes + self.said_bytes + self.buffered_bytes

    def has_room(self, size: int) -> bool:
        """Whether ``size`` bytes more may be queued for it.

        Less may be queued while many bytes of its network are on their way back to the store, because the queues join them
        when sessions end.
        """
        traffic, waiting = self.traffic, self.waiting_bytes + size
        if waiting > traffic.limits.queue_bytes:
            return False
        return not traffic.returning.used or traffic.returning.has(self.origin.network, waiting)

    def put(self, data: bytes, *, is_new: bool = True) -> bool:
        """Queue ``data``; ``False`` when too much is queued already.

        An envelope that is not new is on its way back to the store, where it is already counted.
        """
        size = len(data)
        if not (self.has_room(size) if is_new else self.waiting_bytes + size <= self.traffic.limits.queue_bytes):
            return False
        (self.behind if self.stored else self.queue).append(data)
        self.waiting_bytes += size
        self.traffic.waiting_bytes += size
        self._mark_dirty()
        return True

    def put_page(self, ids: list[Any], envelopes: list[bytes]) -> None:
        """Queue what was read from the store. Before the call the queue has to be empty."""
        self.page = ids
        self.queue.extend(envelopes)
        size = sum(map(len, envelopes))
        self.waiting_bytes += size
        self.traffic.waiting_bytes += size
        self._mark_dirty()

    def caught_up(self) -> None:
        """Nothing is left in the store: write next what came meanwhile."""
        self.stored = False
        self.queue, self.behind = self.behind, self.queue
        self._mark_dirty()

    def take_behind(self) -> list[bytes]:
        """Take the envelopes that came after those in the store, to put them there as well."""
        taken = list(self.behind)
        self.behind.clear()
        self._uncount(taken)
        return taken

    def put_back(self, envelopes: list[bytes]) -> list[bytes]:
        """Queue again what the store has no room for, ahead of later envelopes; returns the oldest ones that do not fit."""
        size, lost = sum(map(len, envelopes)), 0
        free = max(0, self.traffic.limits.queue_bytes - self.waiting_bytes)
        while size > free:
            size -= len(envelopes[lost])
            lost += 1
        self.stored = True  # so that new envelopes go behind it
        self.behind.extendleft(reversed(envelopes[lost:]))
        self.waiting_bytes += size
        self.traffic.waiting_bytes += size
        return envelopes[:lost]

    def written_ids(self) -> list[Any]:
        """The ids in the store of written envelopes that :meth:`deleted` has not named yet."""
        count = len(self.page) - len(self.queue) if self.page else 0
        self.done += self.page[:count]
        self.page = self.page[count:]
        return list(self.done)

    def deleted(self, ids: list[str]) -> None:
        """Forget ids that the store has deleted."""
        del self.done[: len(ids)]

    def take_unwritten(self) -> list[bytes]:
        """Take all queued envelopes that are not in the store. If :meth:`written_ids` is needed, call it first."""
        queue = [] if self.page else list(self.queue)
        taken = queue + list(self.behind)
        self._uncount([*self.queue, *self.behind])
        self.queue.clear()
        self.behind.clear()
        self.page = []
        return taken

    def _mark_dirty(self) -> None:
        if not self.dirty:
            self.dirty = True
            self.traffic.dirty.append(self)

    def _uncount(self, taken: list[bytes]) -> None:
        size = sum(map(len, taken))
        self.waiting_bytes -= size
        self.traffic.waiting_bytes -= size
