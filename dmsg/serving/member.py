"""A client's end at a relay, and the legs of the transports that run through it, in any protocol.

Pure. This module holds the state of one client; :mod:`dmsg.serving.switch` decides what happens to it. A protocol
derives its own member and leg from these, each with the other as type argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from dmsg.crypto.keys import PublicKey
from dmsg.sansio.core import Core
from dmsg.sansio.rate import FairBucket, RecentSet, TokenBucket
from dmsg.serving.limits import ServingLimits
from dmsg.serving.places import Places

if TYPE_CHECKING:
    from typing import Self

#: The rates of requests towards one client: from strangers, and from clients it knows.
Rates: TypeAlias = tuple[FairBucket[str], FairBucket[str]]
#: Small frames that wait are joined to pieces of this size: each piece costs some 50 bytes of memory beside its content.
_PIECE_BYTES: Final = 1_024

M = TypeVar("M", bound="Member[Any]")
L = TypeVar("L", bound="Leg[Any]")


class LegState(IntEnum):
    """Where a transport is in its life. Its two legs are always in the same state.

    A number, because the hash of a plain ``Enum`` member takes a call in Python, and each transport makes four moves.
    """

    REQUESTED = 1  # the request was passed on
    OPEN = 2  # it was accepted: data passes
    CLOSED = 3  # its ids are free again


#: The states that may follow each state; the state diagram in the documentation is drawn from this.
TRANSITIONS: Final[dict[LegState, frozenset[LegState]]] = {
    LegState.REQUESTED: frozenset({LegState.OPEN, LegState.CLOSED}),
    LegState.OPEN: frozenset({LegState.CLOSED}),
    LegState.CLOSED: frozenset(),
}
# Looked up once: an attribute of an Enum class takes a call in Python.
_REQUESTED: Final = LegState.REQUESTED
_OPEN: Final = LegState.OPEN
_CLOSED: Final = LegState.CLOSED


class Leg(Generic[M]):
    """One side of a transport: its id at its own member, and where the frames of that client go.

    ``id`` is in the frames to the client, and in the event log. ``key`` finds the leg in ``member.legs`` for a frame from the
    client; where a transport has one id in both directions, ``key`` equals ``id``.

    ``target`` is the member of the *other* side, so that the hot path needs one look-up. The queue holds the data that waits
    to be sent *to* this side.
    """

    __slots__ = (
        "active_at",
        "bytes",
        "id",
        "initiator",
        "key",
        "limited_at",
        "member",
        "opened_at",
        "other",
        "queue",
        "queue_peak_bytes",
        "queued_bytes",
        "sampled_bytes",
        "since",
        "state",
        "target",
    )

    #: The other side. Once the transport is closed, only the leg that asked has it.
    other: Self
    target: M

    def __init__(self, member: M, transport_id: int, *, initiator: bool) -> None:
        self.member = member
        self.id = self.key = transport_id
        self.initiator = initiator
        self.state = _REQUESTED
        self.since = self.opened_at = 0.0
        self.bytes = 0  # received from this side
        self.active_at = 0.0  # of the responding side: when new bytes were last found to have passed, and their total
        self.sampled_bytes = 0
        self.queue: deque[bytes] | None = None
        self.queued_bytes = self.queue_peak_bytes = 0
        self.limited_at = 0  # how often its client's queues had been drained when the time limit of this queue began

    @property
    def open(self) -> bool:
        """Whether data passes."""
        return self.state is _OPEN

    @property
    def side(self) -> str:
        """Which end of the transport this is, as the event log names it."""
        return "initiator" if self.initiator else "responder"

    def join(self, asked: Self, now: float) -> None:
        """Make a transport of this leg, which asked, and ``asked``. It opens when it is accepted."""
        for here, there in ((self, asked), (asked, self)):
            here.other = there
            here.target = there.member
            here.since = now
            here.member.legs[here.key] = here
        self.member.dials += 1
        self.member.pending_requests += 1
        asked.member.unanswered.add(self.member)

    def move(self, state: LegState) -> None:
        """Change to ``state``; a change that ``TRANSITIONS`` does not list is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    def open_both(self, now: float) -> None:
        """Let data pass in both directions. Called for the side that asked."""
        self.member.pending_requests -= 1
        for side in (self, self.other):
            side.move(_OPEN)
            side.opened_at = side.active_at = now
            if not side.initiator:
                side.member.unanswered.remove(side.target)
                side.member.incoming.add(side.target)

    def close(self) -> None:
        """Take this leg out of its member."""
        was_open = self.state is _OPEN
        self.move(_CLOSED)
        member = self.member
        del member.legs[self.key]
        member.transports += 1
        if self.initiator:
            member.dials -= 1
        else:
            (member.incoming if was_open else member.unanswered).remove(self.target)

    def enqueue(self, frame: bytes) -> None:
        """Put ``frame`` into the queue. Called by :class:`~dmsg.serving.queues.Queues`, which counts the bytes."""
        if self.queue is None:
            self.queue = deque()
        if not self.queue or not _joined(self.queue, frame):
            self.queue.append(frame)
        else:
            self.member.frames_out += 1
        self.queued_bytes += len(frame)
        self.queue_peak_bytes = max(self.queue_peak_bytes, self.queued_bytes)


def _joined(pieces: list[bytes] | deque[bytes], frame: bytes) -> bool:
    """Join ``frame`` to the last of ``pieces`` if that stays small; ``True`` if so."""
    if len(pieces[-1]) + len(frame) > _PIECE_BYTES:
        return False
    pieces[-1] += frame
    return True


class Outlet(Protocol):
    """What a member needs of the shell that drives it."""

    def flush(self) -> None:
        """Write what the member has to send."""


class Router(Protocol):
    """What a member needs of the switch that it belongs to."""

    #: Members that have something to send.
    dirty: list[Any]

    @property
    def limits(self) -> ServingLimits:
        """The limits of each client."""

    def route(self, member: Any, data: bytes, now: float) -> Sequence[object]:
        """Take bytes that ``member`` received."""

    def drain(self, member: Any) -> None:
        """Move a share of the data that waits for ``member`` into its output."""


class Member(Core, Generic[L]):
    """The core of one client's connection (a :class:`~dmsg.sansio.core.Core`).

    ``direct`` means that data may go straight to ``out``: the network takes it, and no data waits before it.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "congested",
        "control_bytes",
        "dials",
        "direct",
        "dirty",
        "drains",
        "feeding",
        "frames_in",
        "frames_out",
        "gone",
        "group",
        "handed_bytes",
        "incoming",
        "known",
        "legs",
        "looked",
        "out",
        "owner",
        "pairs",
        "pending_requests",
        "progressed",
        "queued_from",
        "queued_to",
        "rates",
        "remote",
        "requests",
        "sampled_at",
        "since",
        "single",
        "strays",
        "switch",
        "tail",
        "took_at",
        "transports",
        "unanswered",
        "waiting",
        "window_bytes",
    )

    def __init__(self, switch: Router, remote: PublicKey, now: float, *, group: str = "") -> None:
        limits = switch.limits
        self.switch = switch
        self.remote = remote
        self.since = now
        self.group = group or remote.raw.hex()  # its address group; the key stands for an unknown one
        self.owner: Outlet | None = None  # the shell
        self.legs: dict[int, L] = {}
        self.dials = 0  # transports it opened, and requests of its own
        self.incoming: Places[Any] = Places()  # open transports that others opened to it
        self.unanswered: Places[Any] = Places()  # requests of others that it has not answered
        self.rates: Rates | None = None  # of requests towards it
        self.known: RecentSet[bytes] | tuple[()] = ()  # the keys it accepted last
        self.pairs: OrderedDict[bytes, TokenBucket] = OrderedDict()  # its rates towards clients that do not know it
        self.sampled_at = now
        self.waiting: OrderedDict[L, None] = OrderedDict()  # queues towards this client that are not empty
        self.feeding: set[L] = set()  # queues towards others that it has filled and that are not empty
        self.out: list[bytes] = []
        self.tail = b""
        self.direct = True
        self.congested = self.dirty = self.gone = False
        self.pending_requests = self.queued_from = self.queued_to = self.control_bytes = 0
        self.drains = 0  # how often it took something from its queues
        self.progressed = False  # took something from its queues since this was last set to False
        self.took_at = now  # when it did so last, or began to have queues; as exact as the last read of the relay
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = self.transports = 0
        self.single = 0  # pieces of ``out`` that are a whole frame; the others are halves of one
        self.handed_bytes = 0  # bytes given to the network last: while it takes nothing, some of them are still here
        self.looked = -1, -1  # what stale_bytes() saw last: frames in, if one was unfinished; bytes out, if congested
        self.window_bytes = 0  # the largest window it was told for the transports that it sends on; 0 if none
        self.requests = TokenBucket(limits.requests_per_s, limits.request_burst, now)
        self.strays = TokenBucket(limits.strays_per_s, limits.stray_burst, now)

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        """See :meth:`Router.route`."""
        return self.switch.route(self, data, now)

    # --- towards the network ---------------------------------------------------------------------------------------

    def send_control(self, frame: bytes) -> None:
        """Send a frame that is not data. It goes ahead of data that waits."""
        self.control_bytes += len(frame)
        if self.congested and self.out and _joined(self.out, frame):
            self.frames_out += 1
        else:
            self.out.append(frame)
            self.single += 1
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Have the service flush this member."""
        if not self.dirty:
            self.dirty = True
            self.switch.dirty.append(self)

    @property
    def control_backlog_bytes(self) -> int:
        """Bytes of control frames that wait while the network takes nothing."""
        return self.control_bytes if self.congested else 0

    @property
    def unfinished_bytes(self) -> int:
        """Received bytes that do not form a whole frame yet."""
        return len(self.tail)

    def stale_bytes(self) -> int:
        """Bytes in memory that have not moved since the last call, without the queues.

        These are the received bytes of an incomplete frame and, while the network takes nothing, the control frames and the
        bytes given to it last.
        """
        came, went = self.looked
        unfinished = self.unfinished_bytes
        size = unfinished if came == self.frames_in else 0
        if self.congested and went == self.bytes_out:
            size += self.control_bytes + self.handed_bytes
        self.looked = self.frames_in if unfinished else -1, self.bytes_out if self.congested else -1
        return size

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`data_to_send` would give anything."""
        return bool(self.out) or bool(self.waiting)

    @property
    def overloaded(self) -> bool:
        """Whether to stop reading for now: the client does not take the answers to what it sends."""
        return self.control_backlog_bytes > self.switch.limits.control_backlog_bytes

    def pause(self) -> None:
        """The network takes nothing more: data waits in queues from now on."""
        self.congested = True
        self.direct = False

    def resume(self) -> None:
        """The network takes again."""
        self.congested = False
        self.direct = not self.waiting

    def data_to_send(self) -> bytes:
        """What can go now: the frames in ``out``, then a share of each queue in turn."""
        self.dirty = False
        if self.waiting:
            self.switch.drain(self)
        if not self.out:
            return b""
        self.frames_out += (len(self.out) + self.single) // 2
        self.single = self.control_bytes = 0
        frames = b"".join(self.out)
        self.out.clear()
        data = self.sealed(frames)
        self.handed_bytes = len(data)
        self.bytes_out += self.handed_bytes
        return data

    def sealed(self, frames: bytes) -> bytes:
        """``frames`` as they go over the network."""
        return frames

    def discard_output(self) -> None:
        """Drop what was to be sent: the connection is gone."""
        self.out.clear()
        self.control_bytes = 0
        self.direct = True
