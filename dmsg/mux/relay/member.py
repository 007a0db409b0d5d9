"""A client's end at a relay, and the legs of the transports that run through it.

Pure. This module holds the state of one client; :mod:`dmsg.mux.relay.switch` decides what happens to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

from dmsg.crypto.keys import PublicKey, Random
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACK, FWD, answers_request
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.places import Places
from dmsg.sansio.core import Core
from dmsg.sansio.rate import FairBucket, RecentIds, RecentSet, TokenBucket

#: The rates of REQUESTs towards one client: of strangers, and of those it knows.
Rates: TypeAlias = tuple[FairBucket[str], FairBucket[str]]
#: Small frames that wait are joined to pieces of this size: each piece costs some 50 bytes of memory beside its content.
_PIECE_BYTES: Final = 1_024


class LegState(IntEnum):
    """Where a transport is in its life. Its two legs are always in the same state.

    A number, because the hash of a plain ``Enum`` member takes a call in Python, and each transport makes four moves.
    """

    REQUESTED = 1  # the REQUEST was passed on
    OPEN = 2  # it was accepted: data passes
    CLOSED = 3  # its ids are free again


#: From each state, where it may go; the state diagram in the documentation is drawn from this.
TRANSITIONS: Final[dict[LegState, frozenset[LegState]]] = {
    LegState.REQUESTED: frozenset({LegState.OPEN, LegState.CLOSED}),
    LegState.OPEN: frozenset({LegState.CLOSED}),
    LegState.CLOSED: frozenset(),
}
# Each is an attribute of an enumeration, which takes a call in Python.
_REQUESTED: Final = LegState.REQUESTED
_OPEN: Final = LegState.OPEN
_CLOSED: Final = LegState.CLOSED


class Leg:
    """One side of a transport: its id at its own member, and where the frames of that client go.

    ``target``, ``fwd_prefix`` and ``ack_prefix`` describe the *other* side, so that the hot path needs one look-up.
    The queue holds what waits to be sent *to* this side.
    """

    __slots__ = (
        "ack_prefix",
        "active_at",
        "bytes",
        "fwd_prefix",
        "id",
        "initiator",
        "member",
        "opened_at",
        "other",
        "progressed",
        "queue",
        "queue_peak_bytes",
        "queued_bytes",
        "request",
        "sampled_bytes",
        "since",
        "state",
        "target",
    )

    #: The other side. Once the transport is closed, only the leg that asked has it.
    other: Leg
    target: Member

    def __init__(self, member: Member, transport_id: int, *, initiator: bool) -> None:
        self.member = member
        self.id = transport_id
        self.initiator = initiator
        self.state = _REQUESTED
        self.request = b""
        self.since = self.opened_at = 0.0
        self.bytes = 0  # received from this side
        self.active_at = 0.0  # of the side that was asked: when bytes were last found to have passed, and how many
        self.sampled_bytes = 0
        self.queue: deque[bytes] | None = None
        self.queued_bytes = self.queue_peak_bytes = 0
        self.progressed = False
        self.fwd_prefix = self.ack_prefix = b""

    @property
    def open(self) -> bool:
        """Whether data passes."""
        return self.state is _OPEN

    @property
    def side(self) -> str:
        """Which end of the transport this is, as the event log names it."""
        return "initiator" if self.initiator else "responder"

    def join(self, asked: Leg, request: bytes, now: float) -> None:
        """Make a transport of this leg, which asked, and ``asked``. It opens when it is accepted."""
        for here, there in ((self, asked), (asked, self)):
            here.other = there
            here.target = there.member
            here.request = request
            here.since = now
            there_id = there.id.to_bytes(2, "big")
            here.fwd_prefix = bytes((FWD,)) + there_id
            here.ack_prefix = bytes((ACK,)) + there_id
            here.member.legs[here.id] = here
            if here.member.recent:
                here.member.recent.discard(here.id)
        self.member.dials += 1
        asked.member.unanswered.add(self.member)

    def accepts(self, payload: bytes) -> bool:
        """Whether an ACCEPT from this side is valid: the first one, from the side that was asked, with the same keys.

        The answer to an extended REQUEST is an extended ACCEPT: the two keys, then bytes that the relay does not read.
        """
        return not self.initiator and self.state is _REQUESTED and answers_request(payload, self.request)

    def move(self, state: LegState) -> None:
        """Go to ``state``; going where ``TRANSITIONS`` does not lead is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    def open_both(self, now: float) -> None:
        """Let data pass in both directions."""
        for side in (self, self.other):
            side.move(_OPEN)
            side.opened_at = side.active_at = now
            side.request = b""
            if not side.initiator:
                side.member.unanswered.remove(side.target)
                side.member.incoming.add(side.target)

    def close(self) -> None:
        """Take this leg out of its member; late frames for its id are no offence from now on."""
        was_open = self.state is _OPEN
        self.move(_CLOSED)
        member = self.member
        del member.legs[self.id]
        member.transports += 1
        member.remember(self.id)
        if self.initiator:
            member.dials -= 1
        else:
            (member.incoming if was_open else member.unanswered).remove(self.target)

    def enqueue(self, frame: bytes) -> None:
        """Put ``frame`` into the queue. Called by :class:`~dmsg.mux.relay.queues.Queues`, which counts the bytes."""
        if self.queue is None:
            self.queue = deque()
        if not self.queue or not _joined(self.queue, frame):
            self.queue.append(frame)
        else:
            self.member.frames_out += 1
        self.queued_bytes += len(frame)
        self.queue_peak_bytes = max(self.queue_peak_bytes, self.queued_bytes)


def _joined(pieces: list[bytes] | deque[bytes], frame: bytes) -> bool:
    """Join ``frame`` to the last of ``pieces`` if that stays small; gives whether it did."""
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

    limits: RelayLimits
    #: Members that have something to send.
    dirty: list[Member]

    def route(self, member: Member, data: bytes, now: float) -> Sequence[object]:
        """Take bytes that ``member`` received."""

    def drain(self, member: Member) -> None:
        """Put a share of what waits for ``member`` into its output."""


class Member(Core):
    """The core of one client's connection (a :class:`~dmsg.sansio.core.Core`).

    ``direct`` tells that data may go straight to ``out``: the network takes it, and no data waits before it.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "congested",
        "control_bytes",
        "dials",
        "direct",
        "dirty",
        "extended",
        "feeding",
        "frames_in",
        "frames_out",
        "gone",
        "group",
        "incoming",
        "known",
        "legs",
        "next_id",
        "out",
        "owner",
        "pairs",
        "pending_requests",
        "progressed",
        "queued_from",
        "queued_to",
        "rates",
        "recent",
        "records",
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
    )

    def __init__(
        self,
        switch: Router,
        remote: PublicKey,
        records: RecordLayer,
        now: float,
        *,
        extended: bool = False,
        group: str = "",
    ) -> None:
        limits = switch.limits
        self.switch = switch
        self.remote = remote
        self.records = records
        self.since = now
        self.extended = extended  # whether its REQUEST and ACCEPT may carry more than two keys
        self.group = group or remote.raw.hex()  # what counts as its address; unknown, the key stands for it
        self.owner: Outlet | None = None  # the shell
        self.legs: dict[int, Leg] = {}
        self.dials = 0  # transports it opened, and requests of its own
        self.incoming: Places[Member] = Places()  # open transports that others opened to it
        self.unanswered: Places[Member] = Places()  # requests of others that it has not answered
        self.rates: Rates | None = None  # of REQUESTs towards it
        self.known: RecentSet[bytes] | tuple[()] = ()  # the keys it accepted last
        self.pairs: OrderedDict[bytes, TokenBucket] = OrderedDict()  # its rates towards clients that do not know it
        self.sampled_at = now
        self.waiting: OrderedDict[Leg, None] = OrderedDict()  # queues towards this client that are not empty
        self.feeding: set[Leg] = set()  # queues towards others that it has filled and that are not empty
        self.out: list[bytes] = []
        self.tail = b""
        self.direct = True
        self.congested = self.dirty = self.gone = False
        self.next_id: int | None = None
        self.pending_requests = self.queued_from = self.queued_to = self.control_bytes = 0
        self.progressed = False  # took something from its queues since this was last set to False
        self.took_at = now  # when it did so last, or began to have queues; as exact as the last read of the relay
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = self.transports = 0
        self.single = 0  # pieces of ``out`` that are a whole frame; the others are halves of one
        self.requests = TokenBucket(limits.requests_per_s, limits.request_burst, now)
        self.strays = TokenBucket(limits.strays_per_s, limits.stray_burst, now)
        self.recent: RecentIds | tuple[()] = ()  # of transports that ended

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        """See :meth:`dmsg.mux.relay.switch.Switch.route`."""
        return self.switch.route(self, data, now)

    def next_timeout(self) -> float | None:
        """``None``: the switch keeps the timeouts of all members."""
        return None

    def handle_timeout(self, now: float) -> Sequence[object]:
        """Nothing to do."""
        return ()

    # --- towards the network ---------------------------------------------------------------------------------------

    def send_control(self, frame: bytes) -> None:
        """Send a frame that is not data, ahead of data that waits."""
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
        """Bytes of frames that are not data and wait for a network that takes nothing."""
        return self.control_bytes if self.congested else 0

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
        """What can go now, sealed: the frames in ``out``, then a share of each queue in turn."""
        self.dirty = False
        if self.waiting:
            self.switch.drain(self)
        if not self.out:
            return b""
        self.frames_out += (len(self.out) + self.single) // 2
        self.single = self.control_bytes = 0
        plaintext = b"".join(self.out)
        self.out.clear()
        sealed = self.records.seal(plaintext)
        self.bytes_out += len(sealed)
        return sealed

    def discard_output(self) -> None:
        """Forget what was to be sent: the connection is gone."""
        self.out.clear()
        self.control_bytes = 0
        self.direct = True

    # --- ids -------------------------------------------------------------------------------------------------------

    def free_id(self, random: Random) -> int | None:
        """An odd id that is not in use (:ref:`spec-transport-ids`), or ``None``. An id is used again after all others."""
        if self.next_id is None:
            self.next_id = int.from_bytes(random(2), "big") | 1
        for _ in range(1 << 15):
            transport_id = self.next_id
            self.next_id = (transport_id + 2) & 0xFFFF
            if transport_id not in self.legs:
                return transport_id
        return None

    def remember(self, transport_id: int) -> None:
        """Note that a transport ended or was refused: late frames for its id are no offence."""
        if not isinstance(self.recent, RecentIds):
            self.recent = RecentIds()
        self.recent.add(transport_id)
