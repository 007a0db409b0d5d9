"""A relay's switch in virtual time, and members of it that do what a test says. No cryptography: records are plain."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, REQUEST, CloseReason, encode_frame, split_frames
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.switch import Switch

FRAME_DATA_BYTES = 16_000


class PlainRecords:
    """In the place of a record layer: what is sealed stays readable."""

    def seal(self, plaintext: bytes) -> bytes:
        return plaintext

    def open(self, data: bytes) -> list[bytes]:
        return [data]


class Client:
    """A client of the relay. It answers nothing by itself; ``taken`` keeps the data it received."""

    def __init__(self, relay: Relay, name: str, address: str) -> None:
        self.relay = relay
        self.key = SecretKey(hashlib.sha256(name.encode()).digest()).public_key
        group = {"group": address} if address else {}
        self.member, _ = relay.switch.add_member(self.key, PlainRecords(), relay.now, **group)  # type: ignore[arg-type]
        self.next_id = 0
        #: Transport id -> the reason it was closed with.
        self.closed: dict[int, int] = {}
        self.requests: list[tuple[int, bytes]] = []
        self.accepted: set[int] = set()
        self.taken: dict[int, int] = {}

    def say(self, kind: int, transport_id: int, payload: bytes = b"") -> None:
        self.member.receive_data(encode_frame(kind, transport_id, payload), self.relay.now)

    def read(self, most_bytes: int = 1 << 60) -> None:
        """Take what waits: everything, or pieces until ``most_bytes`` are taken; a paused network stays paused."""
        paused = self.member.congested
        if paused:
            self.member.resume()
        tail = b""
        while self.member.wants_write and most_bytes > 0:
            data = tail + self.member.data_to_send()
            most_bytes -= len(data) - len(tail)
            frames, used = split_frames(data)
            tail = data[used:]
            for kind, transport_id, start, end in frames:
                self._take(kind, transport_id, data[start:end])
        if paused:
            self.member.pause()

    def _take(self, kind: int, transport_id: int, payload: bytes) -> None:
        if kind == REQUEST:
            self.requests.append((transport_id, payload))
        elif kind == ACCEPT:
            self.accepted.add(transport_id)
        elif kind == CLOSE:
            self.closed[transport_id] = payload[0]
        elif kind == FWD:
            self.taken[transport_id] = self.taken.get(transport_id, 0) + len(payload) - 2

    def pause(self) -> None:
        self.member.pause()

    def ask(self, other: Client, message: bytes = b"") -> int:
        """Send a REQUEST, with ``message`` behind the keys; gives its id."""
        transport_id, self.next_id = self.next_id, self.next_id + 2 & 0xFFFF
        self.say(REQUEST, transport_id, self.key.raw + other.key.raw + message)
        return transport_id

    def accept_all(self) -> None:
        self.read()
        for transport_id, payload in self.requests:
            self.say(ACCEPT, transport_id, payload)
        self.requests.clear()

    def dial(self, other: Client) -> int | CloseReason:
        """The id of a transport that ``other`` accepts, or the reason of its refusal."""
        transport_id = self.ask(other)
        other.accept_all()
        self.read()
        if transport_id in self.accepted:
            return transport_id
        return CloseReason(self.closed[transport_id])

    def dial_many(self, other: Client, count: int) -> list[int]:
        """``count`` transports, at the rate a relay allows."""
        ids = []
        for _ in range(count):
            got = self.dial(other)
            assert not isinstance(got, CloseReason), got
            ids.append(got)
            self.relay.advance(0.01)
        return ids

    def send(self, transport_id: int, size: int, frame_bytes: int = FRAME_DATA_BYTES) -> None:
        """Send ``size`` bytes of data in frames, heeding no window."""
        for sequence, at in enumerate(range(0, size, frame_bytes)):
            data = bytes(min(frame_bytes, size - at))
            self.say(FWD, transport_id, (sequence & 0xFFFF).to_bytes(2, "big") + data)

    def is_open(self, transport_id: int) -> bool:
        self.read()
        return transport_id in self.member.legs


class Relay:
    """A switch and the time."""

    def __init__(self, **limits: Any) -> None:
        self.now = 1_000.0
        ids = iter(range(0x100, 1 << 40, 0x100))
        self.random: Callable[[int], bytes] = lambda size: (next(ids) & 0xFFFF).to_bytes(size, "big")
        self.limits = RelayLimits(**limits)
        self.switch = Switch(self.limits, random=self.random)

    def join(self, name: str, address: str = "") -> Client:
        """A new client with the key and address group of these names."""
        client = Client(self, name, address)
        client.read()
        return client

    def advance(self, seconds: float) -> list[Any]:
        """Let time pass, and every timeout in it; gives the events."""
        events: list[Any] = []
        end = self.now + seconds
        while (due := self.switch.next_timeout()) is not None and due <= end:
            self.now = max(self.now, due)
            events += self.switch.handle_timeout(self.now)
        self.now = end
        return events


@pytest.fixture
def relay() -> Callable[..., Relay]:
    """``relay(**limits)``: see :class:`Relay`."""
    return Relay
