"""The recorded conversations of the reference implementation, taken apart for replay.

A recording holds the plaintext of every Noise packet as the frames that were complete with it; ephemeral keys and
ciphertext are not part of it. Each replay shakes hands anew, so frames and record counters are what is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey


def pattern(size: int) -> bytes:
    return bytes((i * 7 + 3) % 251 for i in range(size))


@dataclass(frozen=True)
class Packet:
    """One recorded packet. ``plaintext`` is what it carried, ``frames`` those that were complete with it."""

    source: str
    destination: str
    sequence: int
    plaintext: bytes
    frames: tuple[bytes, ...]


@dataclass
class Recording:
    """Packets and notes in the order recorded."""

    name: str
    events: list[Packet | str] = field(default_factory=list)

    def packets(self, source: str = "", destination: str = "") -> Iterator[Packet]:
        for event in self.events:
            if isinstance(event, Packet) and source in ("", event.source) and destination in ("", event.destination):
                yield event

    @property
    def clients(self) -> list[str]:
        """All identities but the server's, in the order the server admitted them."""
        return list(dict.fromkeys(packet.destination for packet in self.packets("server")))


def frame_bytes(frame: dict[str, Any]) -> bytes:
    """A recorded frame in full: long ones are given by their beginning and a digest, and carry the pattern."""
    if "sha256" not in frame:
        return bytes.fromhex(frame["hex"])
    head = bytes.fromhex(frame["hex"].removesuffix("..."))
    whole = head[:7] + pattern(frame["size"] - 2)
    assert hashlib.sha256(whole).hexdigest() == frame["sha256"]
    return whole


def read_recording(raw: dict[str, Any]) -> Recording:
    recording = Recording(raw["name"])
    streams: dict[str, bytes] = {}
    for event in raw["events"]:
        if "note" not in event:
            frames = b"".join(map(frame_bytes, event["frames_completed"] or ()))
            streams[event["dir"]] = streams.get(event["dir"], b"") + frames
    positions = dict.fromkeys(streams, 0)
    for event in raw["events"]:
        if "note" in event:
            recording.events.append(event["note"])
            continue
        direction = event["dir"]
        source, _, destination = direction.partition(" -> ")
        end = positions[direction] + event["plaintext_len"]
        plaintext = streams[direction][positions[direction] : end]
        positions[direction] = end
        frames = tuple(map(frame_bytes, event["frames_completed"] or ()))
        recording.events.append(Packet(source, destination, event["noise_seq"], plaintext, frames))
    assert all(positions[direction] == len(streams[direction]) for direction in streams)
    return recording


@pytest.fixture(scope="session")
def recordings(vectors: Any) -> dict[str, Recording]:
    """All recordings by name."""
    found = {raw["name"]: read_recording(raw) for raw in vectors["transcripts"]}
    assert len(found) == len(vectors["transcripts"]) == 6
    return found


@pytest.fixture(scope="session")
def identities(vectors: Any) -> dict[str, SecretKey]:
    """The key pairs of the vectors by name."""
    return {pair["name"]: SecretKey(bytes.fromhex(pair["sk"])) for pair in vectors["keypairs"]}
