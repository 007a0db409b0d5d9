"""A relay that holds frames back and sends them with later ones, so that one read has frames of two paths of a transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACK, CLOSE, FWD, RECORD_PLAINTEXT_LIMIT_BYTES, encode_frame, split_frames
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.service import DmsgRelay
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import SwitchEvent


@dataclass
class Hold:
    """The frames that a client does not get yet: those of some transports, or all.

    Once one of some transports has ended, their frames go out with the first data of another transport, ``before`` or after
    it.
    """

    ids: frozenset[int] | None
    before: bool = True
    kept: list[bytes] = field(default_factory=list)
    ended: bool = False


class Tap(RecordLayer):
    """Stands between the switch and the records of one client."""

    __slots__ = ("hold", "inner")

    def __init__(self, inner: RecordLayer) -> None:
        self.inner = inner
        self.hold: Hold | None = None

    @property
    def held_bytes(self) -> int:
        """See :class:`RecordLayer`."""
        return self.inner.held_bytes

    @property
    def near_exhaustion(self) -> bool:
        """See :class:`RecordLayer`."""
        return self.inner.near_exhaustion

    def open(self, data: bytes | memoryview) -> list[bytes]:
        """The client's data passes unchanged."""
        return self.inner.open(data)

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        """Data for the client, except frames that are held back."""
        hold = self.hold
        if hold is None:
            return self.inner.seal(plaintext, limit)
        out: list[bytes] = []
        for kind, transport_id, start, end in split_frames(plaintext)[0]:
            frame = encode_frame(kind, transport_id, plaintext[start:end])
            if hold.ids is None or transport_id in hold.ids:
                hold.kept.append(frame)
                hold.ended |= kind == CLOSE
                continue
            if kind in (FWD, ACK) and hold.ended and self.hold is not None:
                self.hold = None
                if hold.before:
                    out += hold.kept
                    hold.kept.clear()
            out.append(frame)
        if self.hold is None:
            out += hold.kept
        return self.inner.seal(b"".join(out), RECORD_PLAINTEXT_LIMIT_BYTES) if out else b""


class HoldingSwitch(Switch):
    """A switch that can hold frames back."""

    def add_member(
        self, remote: PublicKey, records: RecordLayer, now: float, *, extended: bool = False, group: str = ""
    ) -> tuple[Member, list[SwitchEvent]]:
        """Admit a connection, whose frames may be held back."""
        return super().add_member(remote, Tap(records), now, extended=extended, group=group)


class HoldingRelay(DmsgRelay):
    """A relay that can hold frames back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.switch = HoldingSwitch(self.limits, random=self._random)

    def hold(self, client: PublicKey, *, everything: bool, before: bool) -> Hold | None:
        """Hold back data for ``client`` on its open transports, or everything; ``None`` if the client is not here."""
        member = self.switch.members.get(client.raw)
        if member is None or not isinstance(member.records, Tap) or member.records.hold is not None:
            return None
        hold = member.records.hold = Hold(None if everything else frozenset(member.legs), before)
        return hold

    def release(self, client: PublicKey, hold: Hold) -> None:
        """Send the frames that ``hold`` still keeps."""
        member = self.switch.members.get(client.raw)
        if member is None or not isinstance(member.records, Tap) or member.records.hold is not hold:
            return
        member.records.hold = None
        shell: Any = member.owner
        if hold.kept and not shell.lost and shell.error is None:
            shell.transport.write(member.records.inner.seal(b"".join(hold.kept)))
