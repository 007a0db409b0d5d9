"""Sessions of Go's clients over a relay, replayed byte for byte with our core in the place of each client."""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import DIALECTS
from dmsg.messaging.core.errors import ChannelEndReason
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened, DataReceived


class Player:
    """Our core as one of the two clients. The application echoes (B), or says the next message (A)."""

    def __init__(self, session: dict[str, Any], link: str, vectors: dict[str, Any]) -> None:
        pairs = {pair["seed_utf8"]: pair for pair in vectors["deterministic_keypairs"]}
        self.peer = PublicKey.parse(pairs["client B" if link == "A" else "client A"]["pk"])
        ephemeral = bytes.fromhex(session[f"ephemeral_{link}_sk"])
        self.connection = Connection(
            SecretKey(bytes.fromhex(pairs[f"client {link}"]["sk"])),
            now=0.0,
            dialect=DIALECTS[session["variant"]],
            random=lambda size: ephemeral,
        )
        self.link = link
        self.events: list[object] = []

    def hear(self, data: bytes) -> None:
        for event in self.connection.receive_data(data, 0.0):
            self.events.append(event)
            if isinstance(event, ChannelOffered):
                assert event.channel.remote == self.peer
                self.connection.accept(event.channel)
            if isinstance(event, DataReceived):
                if self.link == "B":
                    self.connection.send_data(event.channel, event.data)
                self.connection.consumed(event.channel, len(event.data))


@pytest.mark.parametrize("link", ["A", "B"])
@pytest.mark.parametrize("variant", ["v0", "v2"])
def test_a_recorded_session_in_each_role(variant: str, link: str, vectors: dict[str, Any]) -> None:
    session = vectors["sessions"][variant]
    frames = [one for one in session["decoded"] if one["link"] == link and "wire" in one]
    player = Player(session, link, vectors)
    channel = player.connection.open(player.peer) if link == "A" else None
    unsent = b""
    messages = [one["payload"]["data"].encode() for one in frames if "payload" in one]
    for frame in frames:
        data = bytes.fromhex(frame["wire"])
        if frame["dir"] == "server->client":
            player.hear(data)
            continue
        if channel is not None and "payload" in frame:
            player.connection.send_data(channel, frame["payload"]["data"].encode())
        if channel is not None and frame["type"] == "CloseChannel":
            assert not player.connection.close(channel)
        unsent = unsent or player.connection.data_to_send()
        assert unsent.startswith(data), frame["type"]
        unsent = unsent[len(data) :]
    assert not unsent and not player.connection.data_to_send()
    received = b"".join(event.data for event in player.events if isinstance(event, DataReceived))
    assert received == b"".join(messages) and len(messages) > 12
    last = player.events[-1]
    assert isinstance(last, ChannelEnded)
    if link == "A":
        assert isinstance(player.events[0], ChannelOpened) and last.reason is ChannelEndReason.NORMAL
    else:
        assert isinstance(player.events[0], ChannelOffered) and last.reason is ChannelEndReason.CLOSED_BY_PEER
    assert not player.connection.channels
