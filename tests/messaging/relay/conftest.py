"""A messaging switch in virtual time, and clients of it that do what a test says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.messaging.core.wire import (
    CHANNEL_OPENED,
    GO,
    OPEN_CHANNEL,
    FrameReader,
    Layout,
)
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.switch import Switch
from dmsg.serving.events import SwitchEvent
from tests.links import MESSAGE, Said


class Client:
    """A client of the relay; nothing is answered by itself. ``own_ids`` as in dialects from v2 on."""

    def __init__(self, relay: Relay, name: str, address: str, layout: Layout, own_ids: bool) -> None:
        self.relay = relay
        self.key = SecretKey(hashlib.sha256(name.encode()).digest()).public_key
        self.layout = layout
        self.own_ids = own_ids
        self._reader = FrameReader()
        self.member, self.joined = relay.switch.add_member(self.key, relay.now, group=address)

    def say(self, kind: int, channel_id: int, payload: bytes = b"") -> list[SwitchEvent]:
        """Send a frame; gives the events."""
        return self.send(self.layout.encode(kind, channel_id, payload))

    def send(self, data: bytes) -> list[SwitchEvent]:
        return list(self.member.receive_data(data, self.relay.now))

    def take(self) -> list[Said]:
        """The frames that came for this client."""
        taken = []
        while self.member.wants_write:
            data, frames = self._reader.read(self.member.data_to_send())
            taken += [Said(kind, channel_id, data[start:end]) for kind, channel_id, start, end in frames]
        return taken

    def ask(self, other: Client, channel_id: int = 0) -> list[SwitchEvent]:
        return self.say(OPEN_CHANNEL, channel_id, other.key.raw + MESSAGE)

    def answer(self, channel_id: int, our_id: int = 0) -> list[SwitchEvent]:
        """Accept the channel that was offered as ``channel_id``."""
        return self.say(CHANNEL_OPENED, channel_id, (bytes([our_id]) if self.own_ids else b"") + MESSAGE)

    def open(self, other: Client, channel_id: int = 0, their_id: int = 0) -> tuple[int, int]:
        """Open a channel; gives the ids that this client and ``other`` send it with."""
        self.ask(other, channel_id)
        [offer] = other.take()
        assert (offer.kind, offer.payload) == (OPEN_CHANNEL, self.key.raw + MESSAGE)
        other.answer(offer.channel_id, their_id)
        [opened] = self.take()
        assert (opened.kind, opened.channel_id) == (CHANNEL_OPENED, channel_id)
        assert opened.payload[self.own_ids :] == MESSAGE
        return opened.payload[0] if self.own_ids else channel_id, offer.channel_id


class Relay:
    """A switch and the time."""

    def __init__(self, *, layout: Layout = GO, go_quirks: bool = False, **limits: Any) -> None:
        self.now = 1_000.0
        self.switch = Switch(RelayLimits(**limits), layout=layout, go_quirks=go_quirks)

    def join(self, name: str, address: str = "", *, layout: Layout = GO, own_ids: bool = False) -> Client:
        """A new client with the key and address group of these names."""
        return Client(self, name, address, layout, own_ids)

    def leave(self, client: Client) -> list[SwitchEvent]:
        return self.switch.remove_member(client.member, self.now)

    def advance(self, seconds: float) -> list[SwitchEvent]:
        """Let time pass, and every timeout in it; gives the events."""
        events: list[SwitchEvent] = []
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
