"""The file in which a client keeps relays that worked, with any content."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.relays import state as relaystate
from fuzz import words
from fuzz.oracles import KEYS, check_memory, outcome

DICTIONARY = words.members("version", "relays", "public_key", "address", "connected")

_NOW_S = 1_700_000_000


def one_input(data: bytes) -> None:
    """The input is the file. Content that is read is written so that it reads the same; anything else is a ``ValueError``."""
    kind, found = outcome(lambda: relaystate._parse(data, _NOW_S), ValueError)
    if kind == "error":
        return
    assert len(data) <= relaystate.FILE_LIMIT_BYTES
    times = [at_s for _, _, at_s in found]
    assert times == sorted(times) and all(at_s > _NOW_S - relaystate.AGE_LIMIT_S for at_s in times)
    for key, address, _ in found:
        key.check_point()
        assert str(address).isprintable()
    check_memory(found, len(data), times=128)


def seeds() -> Iterator[bytes]:
    """A good file, a file from the future, an old one, one of another version, broken ones."""
    relay = '{"public_key": "%s", "address": "%s", "connected": %d}'
    relays = [
        relay % (KEYS[0].public_key, "192.0.2.1:80", _NOW_S),
        relay % (KEYS[1].public_key, "[2001:db8::1]:80", _NOW_S - 5),
        relay % (KEYS[2].public_key, "relay.example:80", 1),
    ]
    good = '{{"version": 1, "relays": [{}]}}'.format(", ".join(relays))
    yield good.encode()
    yield good.encode("utf-16")
    yield good.replace(str(_NOW_S), str(_NOW_S + 5)).encode()
    yield good.replace('"version": 1', '"version": 2').encode()
    yield good.replace("192.0.2.1", "192.0.2").encode()
    yield good.replace(str(_NOW_S), "9" * 5_000).encode()
    yield b"[" * 10_000
    yield good[:-9].encode()
