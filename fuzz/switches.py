"""The switch of a relay between hostile clients, in any protocol, and its invariants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.serving.events import MemberDropped, RequestRefused, SwitchEvent, TransportEnded, TransportStarted
from dmsg.serving.member import Leg, LegState, Member
from dmsg.serving.switch import Switch
from fuzz.choices import Choices
from fuzz.oracles import KEYS

CLIENTS = [key.public_key for key in KEYS[:5]]
_GROUPS = ("", "192.0.2.1", "192.0.2.2")
#: Limits small enough for a short input to reach every one of them.
SMALL_LIMITS: dict[str, Any] = {
    "connections": 4,
    "transports_per_connection": 8,
    "transports_per_source": 2,
    "transports_per_pair": 2,
    "unanswered_per_target": 3,
    "requests_per_s": 5.0,
    "request_burst": 20,
    "pending_requests": 4,
    "stranger_requests_per_s": 5.0,
    "stranger_request_burst": 12,
    "pair_request_burst": 6,
    "known_requests_per_s": 5.0,
    "known_request_burst": 12,
    "queue_soft_bytes": 2_000,
    "queue_hard_bytes": 3_000,
    "queued_per_connection_bytes": 6_000,
    "queued_total_bytes": 10_000,
    "control_backlog_bytes": 1_000,
}
#: Requests to one client of which none is refused for those of others: each group may owe as much as what is left.
LEAST_REQUESTS: int = min(SMALL_LIMITS["stranger_request_burst"], SMALL_LIMITS["known_request_burst"]) // 2
#: Room for the end of a transport, which is queued behind its data beyond all limits.
_CLOSE_SLACK_BYTES = 64 * (5 + 18)


class World(ABC):
    """A switch and its clients. A protocol makes the frames they send and checks those they get."""

    def __init__(self, choices: Choices, switch: Switch[Any, Any]) -> None:
        self.choices = choices
        self.now = 1_000.0
        self.switch = switch
        self.limits = switch.limits
        self.members: list[Member[Any]] = []
        # The legs that asked, of transports that were told to have started, and that have ended.
        self._started: set[Leg[Any]] = set()
        self._ended: set[Leg[Any]] = set()
        self._seen: set[Leg[Any]] = set()
        #: For each queue with a time limit: since when it has not got shorter, and its length.
        self._stuck: dict[Leg[Any], tuple[float, int]] = {}
        self._looked_at = [self.now]  # the times of all timeouts

    @abstractmethod
    def admit(self, key: PublicKey, flags: int, group: str) -> tuple[Member[Any], list[SwitchEvent]]:
        """Add a member to the switch."""

    @abstractmethod
    def frame(self, member: Any) -> bytes:
        """A frame of a client that knows its transports and lies."""

    @abstractmethod
    def sent(self, member: Any, data: bytes) -> None:
        """Check data that is sent to a client."""

    def connect(self) -> None:
        """A client connects, if the switch accepts it."""
        key = self.choices.pick(CLIENTS)
        flags = self.choices.byte()
        if self.switch.refusal(key) is None:
            member, events = self.admit(key, flags, _GROUPS[flags % 3])
            self.noted(events)
            self.members.append(member)

    def noted(self, events: Any) -> None:
        """Record the switch's events: each transport starts and ends once, and a client is dropped for a reason."""
        for event in events:
            match event:
                case MemberDropped():
                    self.members.remove(event.member)
                case TransportStarted():
                    assert event.asking not in self._started | self._ended
                    self._started.add(event.asking)
                case TransportEnded():
                    assert event.asking not in self._ended
                    assert event.was_open == (event.asking in self._started)
                    assert event.by in ("initiator", "responder", "server")
                    self._ended.add(event.asking)
                case RequestRefused():
                    assert event.member.wants_write or event.member.gone

    def disconnect(self, member: Member[Any]) -> None:
        """A client disconnects."""
        asking = {leg if leg.initiator else leg.other for leg in member.legs.values()}
        self.noted(self.switch.remove_member(member, self.now))
        assert asking <= self._ended
        self.members.remove(member)

    def feed(self, member: Member[Any], data: bytes) -> None:
        """Handle a read as the shell does."""
        if member.overloaded:
            return  # the shell does not read
        try:
            self.noted(member.receive_data(data, self.now))
        except RemoteProtocolError as error:
            self.noted(error.events)
            if member in self.members:
                self.disconnect(member)

    def flush_dirty(self) -> None:
        """Act as the service does after a read."""
        dirty, self.switch.dirty = list(self.switch.dirty), []
        self.switch.dirty = []
        for member in dirty:
            member.dirty = False
            if not member.gone and not member.congested:
                self.sent(member, member.data_to_send())

    def pass_time(self, seconds: float) -> None:
        """Nothing is due before the switch's next timeout; no request and no queue waits longer than its limit."""
        self.now = now = self.now + seconds
        due = self.switch.next_timeout()
        events = self.switch.handle_timeout(now)
        assert not events or (due is not None and due <= now)
        self.noted(events)
        for leg in self._legs():
            assert leg.open or now < leg.since + self.limits.request_timeout_s
        self._check_stuck()
        self._looked_at.append(now)
        next_due = self.switch.next_timeout()
        assert next_due is None or next_due > now

    def finish(self) -> None:
        """All clients disconnect, and nothing of them is left."""
        for member in list(self.members):
            self.disconnect(member)
        assert not self.switch.queued_bytes and not self.switch.open_transports
        self.pass_time(1_000.0)
        assert self.switch._requests.next() is None and self._started <= self._ended

    # --- what must hold --------------------------------------------------------------------------------------------

    def _legs(self) -> list[Leg[Any]]:
        return [leg for member in self.members for leg in member.legs.values()]

    def _note_stuck(self) -> None:
        """Note queues with a time limit, those that are too long or whose transport is over, and when they last got shorter."""
        soft_bytes = self.limits.queue_soft_bytes
        limited = {
            queue: queue.queued_bytes
            for member in self.members
            for queue in member.waiting
            if queue.queued_bytes > soft_bytes or queue.state is LegState.CLOSED
        }
        before = self._stuck
        self._stuck = {
            queue: before[queue] if queue in before and size >= before[queue][1] else (self.now, size)
            for queue, size in limited.items()
        }

    def _check_stuck(self) -> None:
        """The limit counts from the last check that found progress, so it takes at most two checks."""
        limit_s = self.limits.slow_consumer_timeout_s
        for queue, (since, _) in self._stuck.items():
            first = next((at for at in self._looked_at if at >= since + limit_s), None)
            assert first is None or self.now < first + limit_s or queue not in queue.member.waiting

    def check(self) -> None:
        """Tables, places, queues and transports are counted correctly, and no limit is exceeded."""
        switch = self.switch
        assert set(switch.members.values()) == set(self.members)
        assert len(self.members) <= self.limits.connections
        legs = self._legs()
        asking = {leg for leg in legs if leg.initiator}
        assert not asking & self._ended and self._seen - asking <= self._ended
        assert {leg for leg in asking if leg.open} == self._started - self._ended
        self._seen = asking
        self._note_stuck()
        for leg in legs:
            assert leg.member.legs[leg.key] is leg
            assert leg.other.other is leg and leg.other.member.legs[leg.other.key] is leg.other
            assert leg.target is leg.other.member and leg.open is leg.other.open
        assert switch.open_transports == sum(leg.open for leg in legs if leg.initiator)
        queued = 0
        for member in self.members:
            self._check_places(member)
            assert member.direct == (not member.congested and not member.waiting)
            assert member.dirty or member.congested or not member.out, "it waits, and no flush is due"
            assert member in switch.dirty or not member.dirty
            for queue in member.waiting:
                assert queue.queue and queue.member is member
                assert queue.queued_bytes == sum(map(len, queue.queue)) <= self.limits.queue_hard_bytes + _window(queue)
            assert member.queued_to == sum(queue.queued_bytes for queue in member.waiting)
            assert all(queue.target is member and queue.queue for queue in member.feeding)
            assert member.queued_from == sum(queue.queued_bytes for queue in member.feeding)
            assert member.queued_to <= self.limits.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert member.queued_from <= self.limits.queued_per_connection_bytes + _CLOSE_SLACK_BYTES
            assert member.control_backlog_bytes <= self.limits.control_backlog_bytes + 70_000
            queued += member.queued_to
        assert switch.queued_bytes == queued <= self.limits.queued_total_bytes + _CLOSE_SLACK_BYTES

    def _check_places(self, member: Member[Any]) -> None:
        asked: list[Leg[Any]] = [leg for leg in member.legs.values() if leg.initiator]
        incoming = [leg for leg in member.legs.values() if not leg.initiator]
        assert member.pending_requests == sum(not leg.open for leg in asked) <= self.limits.pending_requests
        assert member.dials == len(asked)
        assert member.incoming.count == sum(leg.open for leg in incoming)
        assert member.unanswered.count == sum(not leg.open for leg in incoming) <= self.limits.unanswered_per_target
        assert sum(leg.open for leg in member.legs.values()) <= self.limits.transports_per_connection
        assert len(member.tail) < 70_000


def _window(queue: Leg[Any]) -> int:
    """Bytes that a sender with large windows may have queued in addition: eight times what the transport has carried."""
    window: int = queue.target.window_bytes
    if queue.state is LegState.CLOSED:  # what it carried is not kept
        return window
    return max(0, min(window, 8 * (queue.other.bytes - queue.queued_bytes)))


def run(world: World) -> None:
    """Operations: connect, disconnect, frames and garbage of a client, a network that stops and resumes, time.

    Only ``RemoteProtocolError`` is raised, and it ends only its own connection.
    """
    choices = world.choices
    world.connect()
    world.connect()
    for _ in range(256):
        if not choices.left:
            break
        operation = choices.below(10)
        if operation == 0 or not world.members:
            world.connect()
        else:
            member = world.members[choices.byte() % len(world.members)]
            match operation:
                case 1:
                    world.disconnect(member)
                case 2 | 3:
                    world.feed(member, world.frame(member))
                case 4:
                    data = b"".join(world.frame(member) for _ in range(choices.below(6)))
                    cut = choices.below(0x10000) % (len(data) + 1)
                    world.feed(member, data[:cut])
                    if member in world.members:
                        world.feed(member, data[cut:])
                case 5:
                    world.feed(member, choices.chunk())
                case 6:
                    member.pause()
                case 7:
                    member.resume()
                    world.sent(member, member.data_to_send())
                case 8:
                    world.pass_time(choices.byte() / 8)
                case _:
                    world.switch.draining = choices.byte() == 255
                    world.switch.next_timeout()
        if choices.flag():
            world.flush_dirty()
        world.check()
    world.finish()
