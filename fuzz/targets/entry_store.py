"""The store of a discovery: entries of a few keys, in and out of order, with little room."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryError
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import NS_PER_S, StoreLimits
from fuzz.choices import Choices
from fuzz.oracles import KEYS

_LIMITS = StoreLimits(
    server_ttl_s=20.0,
    client_ttl_s=40.0,
    base_client_ttl_s=80.0,
    tombstone_ttl_s=200.0,
    clients=3,
    relays=2,
    tombstones=3,
    new_keys_per_s=None,
    network_new_keys_per_s=None,
)
_START_NS = 10**18


def one_input(data: bytes) -> None:
    """Operations: entries posted from a few networks, read, listed; time. Only ``DiscoveryError`` leaves.

    While it is known a key's sequence and timestamp only go up, what is read is what was posted last, nothing is given
    that has expired, and there are never more entries of a kind than there is room for.
    """
    choices = Choices(data)
    store = MemoryStore(limits=_LIMITS, random=random.Random(1))
    now_ns = _START_NS
    last: dict[int, tuple[Entry, int]] = {}  # what was taken last of each key, and when
    for _ in range(64):
        if not choices.left:
            break
        number = choices.byte() % 6
        key = KEYS[number]
        match choices.below(6):
            case 0 | 1 | 2:
                entry = _entry(choices, number, last.get(number))
                poster = f"192.0.{choices.byte() % 3}.1"
                if _result(store.put(entry, now_ns, poster)) is not None:
                    if number in last and now_ns - last[number][1] < 80 * NS_PER_S:
                        old = last[number][0]
                        assert (entry.sequence, entry.timestamp) > (old.sequence, old.timestamp) or _may_restart(entry)
                    last[number] = entry, now_ns
            case 3:
                found = _result(store.get(key.public_key, now_ns))
                if found is not None:
                    entry, at_ns = last[number]
                    assert found == entry
                    ttl_ns = (_LIMITS.expires_ns(entry, at_ns) or 0) - at_ns
                    assert now_ns - at_ns <= ttl_ns
            case 4:
                servers = _result(store.available_servers(choices.byte() % 4, now_ns))
                assert len(servers) <= min(3, _LIMITS.relays)
                for entry in servers:
                    assert entry.server is not None and entry.server.available_connections > 0
                    number = next(n for n, one in enumerate(KEYS) if one.public_key == entry.static)
                    assert last[number][0] == entry
            case _:
                now_ns += choices.byte() * NS_PER_S // 4
    # Only now: an entry that was read is kept longer than one that was not.
    found = [_result(store.get(one.public_key, now_ns)) for one in KEYS[:6]]
    kept = [one for one in found if one is not None]
    assert sum(one.server is None for one in kept) <= _LIMITS.clients
    assert sum(one.server is not None for one in kept) <= _LIMITS.relays


def _may_restart(entry: Entry) -> bool:
    """A key whose tombstone was evicted begins again; with so little room that may be at any time."""
    return entry.sequence == 0


def _result(deferred: Any) -> Any:
    results: list[Any] = []
    deferred.addBoth(results.append)
    (result,) = results
    if hasattr(result, "value"):
        if not isinstance(result.value, DiscoveryError):
            result.raiseException()
        return None
    return result


def _entry(choices: Choices, number: int, last: tuple[Entry, int] | None) -> Entry:
    sequence = 0 if last is None else last[0].sequence + 1
    timestamp = 1 if last is None else last[0].timestamp + 1
    how = choices.byte()
    if how & 1:
        sequence = choices.byte() % 8
    if how & 2:
        timestamp = choices.byte()
    return _signed(number, sequence, timestamp, how >> 2 & 7)


@lru_cache(maxsize=4_096)
def _signed(number: int, sequence: int, timestamp: int, kind: int) -> Entry:
    key = KEYS[number]
    entry = Entry("0.1.0" if kind & 1 else "0.0.1", sequence, timestamp, key.public_key)
    if kind & 2:
        entry = replace(entry, server=ServerPart(f"9.9.{number}.9:80", kind & 4))
    if not kind & 2 or kind & 4:
        entry = replace(entry, client=ClientPart((KEYS[7].public_key,)))
    return entry.sign(key)


def seeds() -> Iterator[bytes]:
    """Entries and their next ones, out of order, expired, more keys than there is room for, lists."""
    post = b"".join(bytes((number, 0, 0, number)) for number in range(6))
    relays = b"".join(bytes((number, 0, 24, number)) for number in range(4))
    yield post + b"\x00\x03" * 2 + post
    yield relays + b"\x00\x04\x03" + relays
    yield post + b"\x00\x05\xff" + post + b"\x00\x05\xff" * 4 + post
    yield b"\x00\x00\x00\x00" * 3 + b"\x00\x00\x01\x00\x00" + b"\x00\x00\x02\x00\x00" + b"\x00\x03"
    yield relays[:8] + b"\x00\x05\x60" + b"\x00\x04\x03" + relays[:4] + b"\x00\x05\x30" + b"\x00\x04\x03"
