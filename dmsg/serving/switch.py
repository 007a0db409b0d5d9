"""The switch of a relay of any protocol: its members, who may ask whom, how transports open, wait and end.

Pure. :ref:`spec-request-checks`, :ref:`spec-other-frames`, :ref:`spec-closing`. A :class:`Switch` holds a
:class:`~dmsg.serving.member.Member` for each client; each transport is two :class:`~dmsg.serving.member.Leg` objects that
point at each other. A protocol adds the frames: which of them it takes (``route``), and how it says that a transport has
ended (``closing``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic

from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.serving.events import (
    REFUSALS,
    Ending,
    MemberDropped,
    Refusal,
    SwitchEvent,
    TransportEnded,
    TransportStarted,
)
from dmsg.serving.limits import ServingLimits
from dmsg.serving.loads import stale
from dmsg.serving.member import L, LegState, M
from dmsg.serving.place_rules import PlaceRules
from dmsg.serving.queues import Queues
from dmsg.serving.request_rates import RequestRates
from dmsg.serving.waits import Waits

# Looked up once: an attribute of an Enum class takes a call in Python.
_REQUESTED: Final = LegState.REQUESTED
_OPEN: Final = LegState.OPEN
_CLOSED: Final = LegState.CLOSED
_SLOW_CONSUMER: Final = Ending.SLOW_CONSUMER
_SERVER_DRAINING: Final = Ending.SERVER_DRAINING


class Switch(ABC, Generic[M, L]):
    """The members of a relay and the transports between them."""

    def __init__(self, limits: ServingLimits) -> None:
        self.limits = limits
        self.members: dict[bytes, M] = {}
        #: Members that have something to send. The service flushes them and empties the list.
        self.dirty: list[M] = []
        self.queues: Queues[L] = Queues(limits)
        self._places = PlaceRules(limits)
        self._rates = RequestRates(limits)
        self.open_transports = 0
        self.draining = False
        #: The time of the last read or timeout.
        self.now = 0.0
        #: The asking legs of requests, and until when each may be answered.
        self._requests: Waits[L] = Waits(_REQUESTED)

    @abstractmethod
    def route(self, member: M, data: bytes, now: float) -> Sequence[SwitchEvent]:
        """Take bytes that ``member`` received. Members with something to send because of them are in :attr:`dirty`.

        Raises ``RemoteProtocolError`` when the connection must be dropped.
        """

    @abstractmethod
    def closing(self, leg: L, reason: int) -> bytes:
        """The frame that tells the client of ``leg`` that its transport has ended for ``reason``."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for receivers, in all."""
        return self.queues.queued_bytes

    # --- connections -----------------------------------------------------------------------------------------------

    def refusal(self, remote: PublicKey) -> str | None:
        """Why a connection of ``remote`` would not be admitted now, or ``None``."""
        if self.draining:
            return "server_draining"
        if len(self.members) >= self.limits.connections and remote.raw not in self.members:
            return "too many connections"
        return None

    def admit(self, member: M, now: float) -> list[SwitchEvent]:
        """Let others reach ``member``. A connection that had its key is dropped (:ref:`spec-newest-wins`)."""
        older = self.members.get(member.remote.raw)
        self.members[member.remote.raw] = member
        return [] if older is None else [*self.remove_member(older, now), MemberDropped(older, "replaced")]

    def remove_member(self, member: M, now: float) -> list[SwitchEvent]:
        """Forget a connection that is gone and tell its peers (:ref:`spec-connection-ends`). A second call does nothing."""
        self.now = now
        events: list[SwitchEvent] = []
        if self.members.get(member.remote.raw) is member:
            del self.members[member.remote.raw]
        member.gone = True
        while member.legs:
            leg = next(iter(member.legs.values()))
            self._end(leg, Ending.PEER_GONE, events, by=leg.side, tell=leg.other)
        self.queues.drop_all(member)
        member.discard_output()
        self._rates.forget(member)
        return events

    def drop_transports(self, reason: int, member: M | None = None) -> list[SwitchEvent]:
        """End every transport, or every one of ``member``, for ``reason`` on both sides (:ref:`spec-draining`)."""
        events: list[SwitchEvent] = []
        for each in list(self.members.values()) if member is None else (member,):
            for leg in list(each.legs.values()):
                self._end_both(leg, reason, events)
        return events

    def stale_members(self) -> list[M]:
        """The members to drop because of bytes held for them that have not moved since the last call (:ref:`spec-queues`)."""
        return stale(self.members.values(), self.limits.queued_total_bytes)

    # --- data that waits -------------------------------------------------------------------------------------------

    def drain(self, member: M) -> None:
        """Move a share of the data that waits for ``member`` into its output."""
        self.queues.drain(member, self.now)

    def _enqueue(self, leg: L, frame: bytes, events: list[SwitchEvent]) -> None:
        """Queue a frame for a receiver that takes nothing now (:ref:`spec-queues`); ``leg`` is the sending side."""
        queue = leg.other
        self.queues.put(queue, frame, self.now)
        while excess := self.queues.excess(queue, self.now):
            for each in excess:
                self._cut(each, events)

    def _cut(self, queue: L, events: list[SwitchEvent]) -> None:
        """Drop a queue that is too long or has waited too long, and end its transport."""
        if queue.state is not _CLOSED:
            self._end_both(queue.other, _SLOW_CONSUMER, events)
        elif queue.queue:  # the peer had closed, and the receiver never took the data queued before the CLOSE
            self.queues.drop(queue)
            queue.member.send_control(self.closing(queue, _SLOW_CONSUMER))

    # --- requests --------------------------------------------------------------------------------------------------

    def _refusal_from(self, member: M) -> Refusal | None:
        """Why a request of ``member`` is not passed on, or ``None``. Takes a token of its rate."""
        if self.draining:
            return REFUSALS[Ending.SERVER_DRAINING]
        if not member.requests.take(self.now) or member.pending_requests >= self.limits.pending_requests:
            return REFUSALS[Ending.RATE_LIMITED]
        return None

    def _refusal_towards(self, member: M, target: M) -> Refusal | None:
        """Why a request of ``member`` is not passed on to ``target``, or ``None``. Takes a token of the target's rate."""
        if why := self._rates.take(member, target, self.now):
            return Refusal(Ending.RATE_LIMITED, why)
        waiting, most = target.control_backlog_bytes, self.limits.control_backlog_bytes
        # Requests of strangers may take half of it, so that those of clients that the target knows get through.
        if waiting > most // 2 and (waiting > most or not self._rates.known(member, target)):
            return REFUSALS[Ending.BUSY]
        return None if self._places.may_ask(member, target, self.now) else REFUSALS[Ending.BUSY]

    def _ask(self, asking: L, asked: L, events: list[SwitchEvent]) -> None:
        """Make a transport of two legs, which opens once it is accepted. Another request may have to end for it."""
        yielding = self._places.request_for(asking.member, asked.member)
        if yielding is not None:
            self._end_both(yielding, Ending.BUSY, events)
        asking.join(asked, self.now)
        self._requests.add(asking, self.now + self.limits.request_timeout_s)

    def _accept(self, leg: L, events: list[SwitchEvent]) -> bool:
        """Open the transport that the side of ``leg`` accepts; ``False`` if it was closed as busy instead."""
        asking = leg.other
        if self._places.is_full(leg.member):
            # Another source gives up a place now, not at the request: a request that is refused costs other sources nothing.
            yielding = self._places.transport_for(asking.member, leg.member, self.now)
            self._end_both(leg if yielding is None else yielding, Ending.BUSY, events)
            if yielding is None:
                return False
        self._rates.accepted(asking.member, leg.member)
        asking.open_both(self.now)
        self.open_transports += 1
        events.append(TransportStarted(asking))
        return True

    def _count_stray(self, member: M) -> None:
        """Note an offence of ``member``. Raises ``RemoteProtocolError`` when there are too many."""
        if not member.strays.take(self.now):
            raise RemoteProtocolError("frame", "abuse")

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end_both(self, leg: L, reason: int, events: list[SwitchEvent]) -> None:
        if leg.state is _CLOSED:
            return  # ended with the other leg: a client's transport to itself has both legs on one member
        self._end(leg, reason, events, by="server", tell=leg.other)
        self._say_last(leg, self.closing(leg, reason))

    def _say_last(self, leg: L, frame: bytes) -> None:
        """Tell the client of ``leg`` that its transport is over, after the data that came before the end."""
        if leg.queue:
            self.queues.put(leg, frame, self.now)
            self.queues.limit_time(leg, self.now)
        else:
            leg.member.send_control(frame)

    def _end(
        self, leg: L, reason: int, events: list[SwitchEvent], *, by: str, tell: L, notice: bytes | None = None
    ) -> None:
        """Close a transport that the side of ``leg`` ended, and tell ``tell`` unless its client is gone.

        ``notice`` is the frame that tells it, if not the one that :meth:`closing` makes.
        """
        if leg.state is _CLOSED:
            return  # ended with the other leg, which was on the same member
        asking = leg if leg.initiator else leg.other
        was_open = leg.state is _OPEN
        if was_open:
            self.open_transports -= 1
        elif not asking.member.gone:
            asking.member.pending_requests -= 1
        events.append(TransportEnded(asking, reason, by, was_open))
        leg.close()
        leg.other.close()
        # The event needs the reference from the leg that asked to the other. Without the reference back there is no cycle,
        # so the memory of a closed transport is free before the garbage collector runs.
        del asking.other.other
        if leg.queue and not (by == "server" and reason == _SERVER_DRAINING):
            self.queues.drop(leg)
        if tell.queue and (tell.member.gone or reason == _SLOW_CONSUMER):
            self.queues.drop(tell)
        if tell.member.gone:
            return
        self._say_last(tell, self.closing(tell, reason) if notice is None else notice)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` may have something to do, or ``None``."""
        due, request = self.queues.next_timeout(), self._requests.next()
        if request is None:
            return due
        return request if due is None else min(request, due)

    def handle_timeout(self, now: float) -> list[SwitchEvent]:
        """Close transports whose request was not answered in time, and those whose receiver takes nothing."""
        self.now = now
        events: list[SwitchEvent] = []
        for asking in self._requests.over(now):
            self._end_both(asking, Ending.HANDSHAKE_TIMEOUT, events)
        for queue in self.queues.expired(now):
            self._cut(queue, events)
        return events
