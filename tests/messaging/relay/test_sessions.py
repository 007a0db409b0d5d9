"""Sessions of Go's clients, replayed with our switch in the place of the relay between them."""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.crypto.keys import PublicKey
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, GO, OPEN_CHANNEL
from dmsg.messaging.relay.switch import Switch


def take(member: Any) -> list[tuple[int, int, bytes]]:
    """What the relay has for the client of ``member``: type, id and payload of each frame."""
    data = member.data_to_send()
    frames, used, _ = GO.split_frames(data)
    assert used == len(data)
    return [(kind, channel_id, data[start:end]) for kind, channel_id, start, end in frames]


@pytest.mark.parametrize("variant", ["v0", "v2"])
def test_both_clients_get_what_they_got_from_the_relay_of_the_recording(variant: str, vectors: dict[str, Any]) -> None:
    session = vectors["sessions"][variant]
    pairs = {pair["seed_utf8"]: pair for pair in vectors["deterministic_keypairs"]}
    switch = Switch()
    members = {link: switch.add_member(PublicKey.parse(pairs[f"client {link}"]["pk"]), 0.0)[0] for link in ("A", "B")}
    # The relay of the recording gave other ids to clients that have their own; in v0 ours are the same.
    ours: dict[tuple[str, int], int] = {}
    waiting: dict[str, list[tuple[int, int, bytes]]] = {"A": [], "B": []}
    passed_on = 0
    for frame in session["decoded"]:
        if "wire" not in frame:
            continue
        link, wire = frame["link"], bytes.fromhex(frame["wire"])
        [(kind, channel_id, start, end)], _, _ = GO.split_frames(wire)
        payload = wire[start:end]
        if frame["dir"] == "client->server":
            ours_id = ours.get((link, channel_id), channel_id)
            switch.route(members[link], GO.encode(kind, ours_id, payload), 0.0)
            for name, member in members.items():
                waiting[name] += take(member)
            continue
        if kind == CHANNEL_CLOSED and not waiting[link]:
            assert not members[link].legs  # the relay of the recording says it again when the other client leaves
            continue
        got_kind, got_id, got = waiting[link].pop(0)
        if variant == "v0":
            assert (got_kind, got_id, got) == (kind, channel_id, payload)
        elif kind == CHANNEL_OPENED:
            assert (got_kind, got_id, got[1:]) == (kind, channel_id, payload[1:])
            ours[link, payload[0]] = got[0]
        else:
            assert (got_kind, got) == (kind, payload)
            if kind == OPEN_CHANNEL:
                ours[link, channel_id] = got_id
        passed_on += 1
    assert passed_on > 30
    assert not any(waiting.values())
    assert not any(member.legs for member in members.values())
