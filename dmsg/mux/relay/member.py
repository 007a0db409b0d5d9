"""A client's end at a relay of the dmsg protocol, and the legs of its transports.

Pure. The part for any protocol is in :mod:`dmsg.serving.member`; :mod:`dmsg.mux.relay.switch` decides what happens to them.
"""

from __future__ import annotations

from typing import Protocol

from dmsg.crypto.keys import PublicKey, Random
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACK, FWD, answers_request
from dmsg.mux.relay.limits import RelayLimits
from dmsg.sansio.rate import RecentIds
from dmsg.serving import member as any_protocol
from dmsg.serving.member import LegState


class Leg(any_protocol.Leg["Member"]):
    """One side of a transport. ``fwd_prefix`` and ``ack_prefix`` begin the frames that go to the *other* side."""

    __slots__ = ("ack_prefix", "fwd_prefix", "request")

    def __init__(self, member: Member, transport_id: int, *, initiator: bool, request: bytes = b"") -> None:
        super().__init__(member, transport_id, initiator=initiator)
        self.request = request
        self.fwd_prefix = self.ack_prefix = b""

    def join(self, asked: Leg, now: float) -> None:
        """Make a transport of this leg, which asked, and ``asked``. It opens when it is accepted."""
        super().join(asked, now)
        for here in (self, asked):
            there_id = here.other.id.to_bytes(2, "big")
            here.fwd_prefix = bytes((FWD,)) + there_id
            here.ack_prefix = bytes((ACK,)) + there_id
            if here.member.recent:
                here.member.recent.discard(here.id)

    def accepts(self, payload: bytes) -> bool:
        """Whether an ACCEPT from this side is valid: the first one, from the side that was asked, with the same keys.

        The answer to an extended REQUEST is an extended ACCEPT: the two keys, then bytes that the relay does not read.
        """
        return not self.initiator and self.state is LegState.REQUESTED and answers_request(payload, self.request)

    def open_both(self, now: float) -> None:
        """Let data pass in both directions."""
        super().open_both(now)
        self.request = self.other.request = b""

    def close(self) -> None:
        """Take this leg out of its member; late frames for its id are no offence from now on."""
        super().close()
        self.member.remember(self.id)


class Router(any_protocol.Router, Protocol):
    """What a member needs of the switch that it belongs to."""

    @property
    def limits(self) -> RelayLimits:
        """The limits of each client."""


class Member(any_protocol.Member[Leg]):
    """The core of one client's connection (a :class:`~dmsg.sansio.core.Core`)."""

    __slots__ = ("extended", "next_id", "recent", "records")

    takes_views = True

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
        super().__init__(switch, remote, now, group=group)
        self.records = records
        self.extended = extended  # whether its REQUEST and ACCEPT may carry more than two keys
        if extended:
            self.window_bytes = switch.limits.window_bytes
        self.next_id: int | None = None
        self.recent: RecentIds | tuple[()] = ()  # of transports that ended

    @property
    def unfinished_bytes(self) -> int:
        """Received bytes that do not form a whole record, or a whole frame, yet."""
        return len(self.tail) + self.records.held_bytes

    def sealed(self, frames: bytes) -> bytes:
        """``frames`` in a record."""
        return self.records.seal(frames)

    def free_id(self, random: Random) -> int | None:
        """An odd id that is not in use (:ref:`spec-transport-ids`), or ``None``. Ids are used in rotation."""
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
