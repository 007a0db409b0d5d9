"""A messaging relay between hostile clients: frames, dialects, layouts, congestion, time, links that come and go."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.crypto.keys import PublicKey
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    GO,
    KEY_BYTES,
    OPEN_CHANNEL,
    OPEN_CHANNEL_BYTES,
    SEED,
    SEND,
    FrameReader,
)
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.member import Member
from dmsg.messaging.relay.switch import Switch
from dmsg.serving.events import SwitchEvent
from fuzz.choices import Choices
from fuzz.switches import CLIENTS, SMALL_LIMITS, World, run

_LIMITS = RelayLimits(close_timeout_s=5.0, **SMALL_LIMITS)
_MESSAGE = CLIENTS[0].raw + bytes(16)


class _World(World):
    """The switch and its clients, as far as they know what they may send."""

    switch: Switch

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices, Switch(_LIMITS, go_quirks=choices.flag()))
        self.readers: dict[Member, FrameReader] = {}

    def admit(self, key: PublicKey, flags: int, group: str) -> tuple[Member, list[SwitchEvent]]:
        member, events = self.switch.add_member(key, self.now, group=group)
        # A client tells its layout first: what an unknown one is sent in between would be in the other.
        layout = SEED if flags & 4 else GO
        self.readers[member] = FrameReader(layout)
        member.receive_data(layout.encode(CHANNEL_CLOSED, 0), self.now)
        return member, events

    def frame(self, member: Member) -> bytes:
        choices = self.choices
        kind = choices.pick((SEND, OPEN_CHANNEL, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, choices.byte()))
        known = [key for key in member.legs if key < 256]
        flags = choices.byte()
        channel_id = known[flags // 2 % len(known)] if known and flags & 1 else flags // 2
        payload = choices.chunk()
        if choices.flag() and kind == OPEN_CHANNEL:
            payload = choices.pick(CLIENTS).raw + _MESSAGE
        elif choices.flag() and kind == CHANNEL_OPENED:
            payload = payload[:1] + _MESSAGE
        elif kind == SEND:
            payload += bytes(16 * choices.byte())
        return member.layout.encode(kind, channel_id, payload)

    def sent(self, member: Member, data: bytes) -> None:
        data, frames = self.readers[member].read(data)
        for kind, _, start, end in frames:
            size = end - start
            if kind == OPEN_CHANNEL:
                assert size == OPEN_CHANNEL_BYTES and PublicKey(data[start : start + KEY_BYTES]) in CLIENTS
            elif kind == CHANNEL_OPENED:
                assert size - len(_MESSAGE) in (0, 1)  # what is in it, only the clients can check
            else:
                assert kind == SEND or (kind in (CLOSE_CHANNEL, CHANNEL_CLOSED) and not size)

    def check(self) -> None:
        """See :class:`World`; and no id is used twice."""
        super().check()
        for member in self.members:
            assert all(key < 256 or (key == 256 + leg.id and not leg.open) for key, leg in member.legs.items())
            assert isinstance(member, Member)
            if member.own_ids is not None:
                called = [leg.id for leg in member.legs.values() if leg.open]
                assert len(called) == len(set(called))


def one_input(data: bytes) -> None:
    """The first byte says whether clients are those of 2019; then what clients of any kind do (:func:`fuzz.switches.run`)."""
    run(_World(Choices(data)))


def seeds() -> Iterator[bytes]:
    """A channel that is opened in each dialect, used, stopped by its receiver's network and closed; many; two with one key."""
    ask = b"\x02\x00\x00\x01\x00\x00\x01\x01\x01"
    answers = b"\x02\x01\x00\x02\x01\x00\x00\x01\x01", b"\x02\x01\x00\x02\x01\x01\x07\x00\x01\x01"
    send = b"\x02\x00\x00\x00\x01\x00\x00\x00\x40\x01"
    close, closed = b"\x02\x00\x00\x03\x01\x00\x00\x00\x01", b"\x02\x01\x00\x04\x01\x00\x00\x00\x01"
    stopped = b"\x06\x01\x00"
    for quirks in (b"\x00", b"\x01"):
        for layouts in (b"\x00\x00\x01\x05", b"\x00\x00\x01\x01", b"\x00\x04\x01\x04"):
            for answer in answers:
                begin = quirks + layouts + ask + answer
                yield begin + send * 2 + close + closed
                yield begin + stopped + send * 12 + b"\x08\x00\xff\x01" + b"\x07\x01\x01"
                yield begin + stopped + send * 3 + close + b"\x08\x00\x80\x01" * 2
                yield begin + (ask + answer) * 6 + b"\x01\x00\x01"
                yield begin + b"\x00\x00\x00\x01" + b"\x09\x00\xff\x01" + ask
