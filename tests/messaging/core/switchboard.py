"""Two clients and the least that a relay does between them: it gives channels their second ids and passes frames on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import V0, Dialect
from dmsg.messaging.core.events import ChannelOffered, DataReceived, Event
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, GO, OPEN_CHANNEL, FrameReader, Layout
from dmsg.testing.strategies import secret_key

KEYS = (secret_key(21), secret_key(22))


class Side:
    """A client; its application takes what comes at once unless ``reads`` is false."""

    def __init__(self, key: Any, dialect: Dialect, layout: Layout, **options: Any) -> None:
        self.connection = Connection(key, now=0.0, dialect=dialect, layout=layout, **options)
        self.layout = layout
        self.events: list[Event] = []
        self.received: dict[Any, bytes] = {}
        self.reads = True
        self.reader = FrameReader(layout)
        #: Frames from the relay that have not arrived.
        self.inbound: deque[bytes] = deque()
        #: Relay's id on this link -> (the other link, id that it wants to see there).
        self.routes: dict[int, tuple[Side, int]] = {}
        self.next_id = 255

    def hear(self, data: bytes, now: float = 0.0) -> list[Event]:
        """Take bytes, and take data out of the core as an application does."""
        events = self.connection.receive_data(data, now)
        for event in events:
            if isinstance(event, DataReceived):
                self.received[event.channel] = self.received.get(event.channel, b"") + event.data
                if self.reads:
                    self.connection.consumed(event.channel, len(event.data))
        self.events += events
        return events

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Switchboard:
    """``pump`` delivers until nothing is under way; ``take``, ``relay`` and ``deliver`` do it in steps."""

    def __init__(
        self, dialect: Dialect = V0, layouts: tuple[Layout, Layout] = (GO, GO), keys: Any = KEYS, **options: Any
    ) -> None:
        self.dialect = dialect
        self.sides = tuple(Side(key, dialect, layout, **options) for key, layout in zip(keys, layouts, strict=True))
        self.alter: Callable[[int, bytes], bytes | None] = lambda kind, payload: payload

    def relay(self, side: Side) -> bool:
        """Take one write of ``side`` and pass its frames on; ``False`` if it has nothing to say."""
        written = side.connection.data_to_send()
        buffer, frames = side.reader.read(written)
        for kind, channel_id, start, end in frames:
            payload = self.alter(kind, buffer[start:end])
            if payload is not None:
                self.route(side, kind, channel_id, payload)
        return bool(written)

    def route(self, side: Side, kind: int, channel_id: int, payload: bytes) -> None:
        other = self.sides[1 - self.sides.index(side)]
        if kind == OPEN_CHANNEL:
            given, other.next_id = other.next_id, other.next_id - 1
            other.routes[given] = (side, channel_id)
            if not self.dialect.own_ids:
                side.routes[channel_id] = (other, given)
            payload = side.connection.identity.raw + payload[33:]
            other.inbound.append(other.layout.encode(OPEN_CHANNEL, given, payload))
            return
        if channel_id not in side.routes:
            return
        target, their_id = side.routes[channel_id]
        if kind == CHANNEL_OPENED and self.dialect.own_ids:
            ours, side_id = 100 + their_id, payload[0]
            target.routes[ours] = (side, side_id)
            payload = bytes((ours,)) + payload[1:]
        target.inbound.append(target.layout.encode(kind, their_id, payload))
        if kind == CHANNEL_CLOSED and not self.dialect.own_ids:
            del side.routes[channel_id]
            target.routes.pop(their_id, None)

    def deliver(self, side: Side, frames: int = 1000, now: float = 0.0) -> list[Event]:
        count = min(frames, len(side.inbound))
        return side.hear(b"".join(side.inbound.popleft() for _ in range(count)), now)

    def pump(self, now: float = 0.0) -> None:
        for _ in range(10_000):
            moved = [self.relay(side) for side in self.sides]
            moved += [bool(side.inbound and (self.deliver(side, now=now), True)) for side in self.sides]
            if not any(moved):
                return
        raise AssertionError("the two talk without end")

    def channel(self) -> tuple[Any, Any]:
        """An open channel: its ends at the caller and the callee."""
        caller, callee = self.sides
        ours = caller.connection.open(callee.connection.identity)
        self.pump()
        [offer] = [event for event in callee.events if isinstance(event, ChannelOffered)]
        callee.connection.accept(offer.channel)
        self.pump()
        for side in self.sides:
            side.events.clear()
        return ours, offer.channel
