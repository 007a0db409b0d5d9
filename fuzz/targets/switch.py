"""A dmsg relay between hostile clients: frames, congestion, time, connections that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, REQUEST_BYTES, encode_frame, split_frames
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import SwitchEvent
from fuzz.choices import Choices, repeatable
from fuzz.oracles import PlainRecords
from fuzz.switches import CLIENTS, SMALL_LIMITS, World, run

_LIMITS = RelayLimits(strays_per_s=1.0, stray_burst=10, **SMALL_LIMITS)


class _World(World):
    """The switch and its clients, as far as they know what they may send."""

    switch: Switch

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices, Switch(_LIMITS, random=repeatable(b"ids")))
        self.ids: dict[Member, list[tuple[int, bytes]]] = {}  # REQUESTs that a client got

    def admit(self, key: PublicKey, flags: int, group: str) -> tuple[Member, list[SwitchEvent]]:
        records: Any = PlainRecords()
        member, events = self.switch.add_member(key, records, self.now, extended=bool(flags & 4), group=group)
        self.ids[member] = []
        return member, events

    def frame(self, member: Member) -> bytes:
        choices = self.choices
        kind = choices.pick((FWD, REQUEST, ACCEPT, CLOSE, ACK, OK, choices.below(256)))
        known = list(member.legs)
        payload: bytes | None = None
        if kind == ACCEPT and self.ids[member] and choices.flag():
            transport_id, payload = self.ids[member][choices.byte() % len(self.ids[member])]
        elif known and choices.flag():
            transport_id = known[choices.byte() % len(known)]
        else:
            transport_id = choices.below(0x10000)
        if payload is not None:
            return encode_frame(kind, transport_id, payload)
        match choices.below(4):
            case 0:
                payload = member.remote.raw + choices.pick(CLIENTS).raw + choices.chunk(64)
            case 1:
                payload = bytes(2 + 16 * choices.byte())
            case _:
                payload = choices.chunk()
        return encode_frame(kind, transport_id, payload)

    def sent(self, member: Member, data: bytes) -> None:
        frames, used = split_frames(data)
        assert used == len(data), "a part of a frame was sent"
        for kind, transport_id, start, end in frames:
            assert kind in (OK, REQUEST, ACCEPT, CLOSE, FWD, ACK)
            if kind == REQUEST:
                assert transport_id % 2 and data[start + 33 : start + REQUEST_BYTES] == member.remote.raw
                self.ids[member].append((transport_id, data[start:end]))


def one_input(data: bytes) -> None:
    """What clients of any kind do (:func:`fuzz.switches.run`) in the frames of the dmsg protocol."""
    run(_World(Choices(data)))


def seeds() -> Iterator[bytes]:
    """A transport that is opened, used, stopped by its receiver's network and closed; many; strays; two with one key."""
    begin = b"\x00\x00" + b"\x01\x05"
    ask = b"\x02\x00\x01\x00\x00\x00\x02\x00\x01\x00\x01"
    take = b"\x02\x01\x02\x01\x00\x01"
    send = b"\x02\x00\x00\x01\x00\x01\x40\x01"
    yield begin + ask + take + send + b"\x02\x00\x03\x01\x00\x02\x01\x00\x01"
    yield begin + ask + take + b"\x06\x01\x00" + send * 12 + b"\x08\x00\xff\x01" + b"\x07\x01\x01"
    yield (
        begin
        + ask
        + take
        + b"\x06\x01\x00"
        + send * 3
        + b"\x02\x00\x03\x01\x00\x02\x01\x00\x01"
        + b"\x08\x00\x80\x01" * 2
    )
    yield begin + b"".join(ask.replace(b"\x02\x00\x01\x00\x01", bytes((n * 2, 0, 1, 0, 1))) + take for n in range(8))
    yield begin + b"\x02\x00\x00\x00\x00\x09\x02\x00\x01" * 12
    yield begin + ask + take + b"\x00\x00\x00\x01" + b"\x01\x00\x01" + b"\x08\x00\xff\x01"
    yield begin + b"\x00\x02\x02\x01\x00\x03\x06\x01" + ask + take + send * 3 + b"\x09\x00\xff\x01" + ask
