"""One conformance test for every store: the seed's five cases, expiry and tombstones, bounds; and SIGKILL."""

from __future__ import annotations

import gc
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer
from zope.interface.verify import verifyObject

from dmsg.address import RedisAddress
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.discovery.errors import (
    DiscoveryUnavailable,
    EntryNotFound,
    NonZeroSequence,
    RateLimitedByDiscovery,
    StoreFull,
    WrongSequence,
    WrongTime,
)
from dmsg.discovery.stores import table as store_table
from dmsg.discovery.stores.open import open_store
from dmsg.discovery.stores.redis import OPERATION_TIMEOUT_S, RedisStore
from dmsg.discovery.stores.rules import (
    READ_MARKS,
    READ_MARKS_INTERVAL_NS,
    READ_MARKS_WRITTEN,
    ReadMarks,
    StoreLimits,
    hour_of,
    shielded,
    stored_entry,
)
from dmsg.discovery.stores.sqlite import SqliteStore
from dmsg.errors import ConfigError
from dmsg.glue.redis import RedisConnection
from dmsg.interfaces import IEntryStore
from dmsg.testing.memory import MemoryNetwork

S = 10**9


async def refused(kind: type[BaseException], awaitable: Any) -> Any:
    with pytest.raises(kind) as caught:
        await awaitable
    return caught.value


# --- the seed's five cases ---------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_what_was_stored_is_got_back(store: Any, make_entry: Any, now_ns: int) -> None:
    verifyObject(IEntryStore, store)
    entry = make_entry("alice", servers=("relay", "relay2"))
    assert await store.put(entry, now_ns) is True
    assert await store.get(entry.static, now_ns) == entry
    assert await store.get_json(entry.static, now_ns) == entry.to_json()


@pytest_twisted.ensureDeferred
async def test_an_unknown_key_is_not_found(store: Any, make_entry: Any, key_of: Any, now_ns: int) -> None:
    await store.put(make_entry("alice"), now_ns)
    error = await refused(EntryNotFound, store.get(key_of("bob").public_key, now_ns))
    assert error.next_sequence is None
    await refused(EntryNotFound, store.get_json(key_of("bob").public_key, now_ns))


@pytest_twisted.ensureDeferred
async def test_a_miss_in_sqlite_leaves_nothing_to_the_garbage_collector(
    opened: Any, tmp_path: Path, key_of: Any, now_ns: int
) -> None:
    """Strangers ask for keys that are not there as often as they like."""
    store = opened(f"sqlite:{tmp_path / 'entries.sqlite'}")
    key = key_of("bob").public_key
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            assert await store.get(key, now_ns).addErrback(lambda failure: failure.trap(EntryNotFound))
        left = sum(isinstance(one, EntryNotFound) for one in gc.get_objects())
    finally:
        gc.enable()
    assert left < 10, "each thread of the pool may still hold its last"


@pytest_twisted.ensureDeferred
async def test_an_iteration_replaces_the_entry(store: Any, make_entry: Any, now_ns: int) -> None:
    await store.put(make_entry("alice"), now_ns)
    for sequence in (1, 2, 3):
        newer = make_entry("alice", sequence, servers=("relay",))
        assert await store.put(newer, now_ns) is False
        assert await store.get(newer.static, now_ns) == newer


@pytest.mark.parametrize("drawn_from", [store_table.DRAWN_FROM, 13, 8])
@pytest_twisted.ensureDeferred
async def test_available_servers_are_drawn_up_to_a_limit(
    store: Any, make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch, drawn_from: int
) -> None:
    monkeypatch.setattr(store_table, "DRAWN_FROM", drawn_from)
    assert await store.available_servers(5, now_ns) == []
    for n in range(12):
        await store.put(make_entry(f"relay {n}", address=f"10.0.0.{n}:80"), now_ns)
    await store.put(make_entry("full", address="10.0.1.1:80", available=0), now_ns)
    await store.put(make_entry("overfull", address="10.0.1.1:80", available=-1), now_ns)
    await store.put(make_entry("client"), now_ns)
    both = make_entry("both", address="10.0.2.1:80", client=True)
    await store.put(both, now_ns)

    everything = await store.available_servers(100, now_ns)
    assert len(everything) == len({entry.static for entry in everything}) == 13
    assert both in everything
    asked = [make_entry(name).static.raw for name in ("full", "client", "both")]
    assert await store.servers_of(asked, now_ns) == [both]
    assert all(entry.server.available_connections > 0 for entry in everything)
    drawn: Counter[Any] = Counter()
    for _ in range(40):
        some = await store.available_servers(5, now_ns)
        assert len(some) == len({entry.static for entry in some}) == 5
        drawn.update(entry.static for entry in some)
    assert len(drawn) == 13  # none is left out for ever


@pytest_twisted.ensureDeferred
async def test_available_servers_are_those_of_one_protocol(store: Any, make_entry: Any, now_ns: int) -> None:
    """Two relays of the messaging system beside many others: they are found, and leave when they speak dmsg."""
    for n in range(30):
        await store.put(make_entry(f"relay {n}", address=f"10.0.0.{n}:80"), now_ns)
    tagged = [make_entry(f"m {n}", address=f"10.0.1.{n}:80", version="0.0.1+messaging") for n in range(2)]
    for entry in tagged:
        await store.put(entry, now_ns)
    keys = [entry.static.raw for entry in tagged]

    assert {one.static for one in await store.available_servers(2, now_ns, "messaging")} == {e.static for e in tagged}
    assert sorted(await store.available_keys(5, now_ns, "messaging")) == sorted(keys)
    assert await store.servers_of(keys, now_ns, "messaging") == tagged
    assert await store.servers_of(keys, now_ns) == [] and await store.available_servers(5, now_ns, "other") == []
    assert len(await store.available_keys(50, now_ns)) == len(await store.available_servers(50, now_ns)) == 30

    await store.put(make_entry("m 0", 1, address="10.0.1.0:80"), now_ns)
    await store.put(make_entry("m 1", 1, address="10.0.1.1:80", version="0.0.1+messaging", available=0), now_ns)
    assert await store.available_servers(5, now_ns, "messaging") == []
    assert keys[0] in await store.available_keys(50, now_ns) and keys[1] not in await store.available_keys(50, now_ns)
    assert await store.available_keys(5, now_ns + 301 * S) == [], "they expire"
    assert await store.available_servers(5, now_ns + 301 * S) == []


@pytest_twisted.ensureDeferred
async def test_a_wrong_sequence_or_an_old_time_is_refused(store: Any, make_entry: Any, now_ns: int) -> None:
    await refused(NonZeroSequence, store.put(make_entry("alice", 1), now_ns))
    first = make_entry("alice", 0, timestamp=1000)
    await store.put(first, now_ns)
    for sequence in (0, 2, 3, 2**64 - 1):
        await refused(WrongSequence, store.put(make_entry("alice", sequence, timestamp=2000), now_ns))
    for timestamp in (1000, 999, 0, -5, -(2**63)):
        await refused(WrongTime, store.put(make_entry("alice", 1, timestamp=timestamp), now_ns))
    await refused(WrongSequence, store.put(make_entry("alice", 5, timestamp=999), now_ns))  # the sequence comes first
    assert await store.get(first.static, now_ns) == first
    await store.put(make_entry("alice", 1, timestamp=1001), now_ns)


# --- more about iterations ---------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_timestamps_over_their_whole_range(store: Any, make_entry: Any, now_ns: int) -> None:
    times = (-(2**63), -1, 0, 1_563_500_000_123_456_789, 1_563_500_000_123_456_790, 2**63 - 2, 2**63 - 1)
    for sequence, timestamp in enumerate(times):
        await store.put(make_entry("alice", sequence, timestamp=timestamp), now_ns)
        await refused(WrongTime, store.put(make_entry("alice", sequence + 1, timestamp=timestamp), now_ns))
    error = await refused(WrongTime, store.put(make_entry("alice", len(times), timestamp=2**63 - 1), now_ns))
    assert isinstance(error, WrongTime)


@pytest_twisted.ensureDeferred
async def test_of_racing_iterations_exactly_one_wins(store: Any, make_entry: Any, now_ns: int) -> None:
    await store.put(make_entry("alice"), now_ns)
    rivals = [make_entry("alice", 1, servers=(f"relay {n}",)) for n in range(10)]
    outcomes = await defer.DeferredList([store.put(rival, now_ns) for rival in rivals], consumeErrors=True)
    winners = [rival for rival, (ok, _) in zip(rivals, outcomes, strict=True) if ok]
    assert len(winners) == 1
    assert all(failure.check(WrongSequence) for ok, failure in outcomes if not ok)
    assert await store.get(rivals[0].static, now_ns) == winners[0]


def test_a_draw_begins_at_a_random_place_which_is_another_one_after_each_write(
    make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_table, "DRAWN_FROM", 2)
    store_table.prepare(connection := store_table.connect(":memory:"), StoreLimits(), now_ns)
    table = store_table.EntryTable(StoreLimits())
    for name, sequence, slot in (("one", 0, 10), ("other", 0, 20), ("third", 0, 30), ("one", 1, 25)):
        entry = make_entry(name, sequence, address="10.0.0.1:80")
        table.put(connection, entry, "", slot, now_ns)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    numbers = SimpleNamespace(randrange=lambda stop: 21)
    drawn = store_table.draw(connection, "key", 100, now_ns, numbers, "dmsg")  # type: ignore[arg-type]
    connection.close()
    assert drawn == [make_entry(name).static.raw for name in ("one", "third", "other")]
    assert statements[0].endswith("LIMIT 2\n"), "that is enough to see that there are more"


@pytest_twisted.ensureDeferred
async def test_a_server_that_becomes_full_is_no_longer_available(store: Any, make_entry: Any, now_ns: int) -> None:
    await store.put(make_entry("relay", 0, address="10.0.0.1:80"), now_ns)
    await store.put(make_entry("relay", 1, address="10.0.0.1:80", available=0), now_ns)
    assert await store.available_servers(5, now_ns) == []
    await store.put(make_entry("relay", 2, address="10.0.0.1:80", available=1), now_ns)
    assert len(await store.available_servers(5, now_ns)) == 1
    await store.put(make_entry("relay", 3), now_ns)  # now only a client
    assert await store.available_servers(5, now_ns) == []


def test_small_entries_are_kept_as_they_were_read_and_large_ones_are_not(make_entry: Any) -> None:
    """What is kept has a bound in bytes."""
    for many, kept in ((1, True), (64, False)):
        body = make_entry("alice", servers=tuple(f"relay {n}" for n in range(many))).to_json()
        assert (stored_entry(body) is stored_entry(body)) is kept
        assert stored_entry(body).to_json() == body


def test_of_reads_that_were_not_written_down_a_bounded_number_is_remembered(now_ns: int) -> None:
    marks = ReadMarks()
    for number in range(READ_MARKS + 100):
        marks.note(number.to_bytes(4, "big"), 0, now_ns)
    taken = []
    while some := marks.take(now_ns):
        taken += some
        now_ns += READ_MARKS_INTERVAL_NS
    assert len(taken) == READ_MARKS


def test_reads_are_written_down_some_at_a_time_and_not_with_each_write(now_ns: int) -> None:
    marks = ReadMarks()
    for number in range(READ_MARKS_WRITTEN + 100):
        marks.note(number.to_bytes(4, "big"), 0, now_ns)
    assert len(marks.take(now_ns)) == READ_MARKS_WRITTEN
    assert marks.take(now_ns + READ_MARKS_INTERVAL_NS - 1) == []
    assert len(marks.take(now_ns + READ_MARKS_INTERVAL_NS)) == 100
    marks.note(b"again", 0, now_ns)
    assert marks.take(now_ns) == [b"again"], "the clock was set back"


def test_a_read_is_written_down_once_an_hour(now_ns: int) -> None:
    marks, hour = ReadMarks(), hour_of(now_ns)
    marks.note(b"read in this hour", hour, now_ns)
    marks.note(b"read before", hour - 1, now_ns)
    assert marks.take(now_ns) == [b"read before"]


# --- expiry ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_server_expires_unless_it_is_posted_again(store: Any, make_entry: Any, now_ns: int) -> None:
    for sequence in range(3):
        now = now_ns + sequence * 200 * S
        relay = make_entry("relay", sequence, address="10.0.0.1:80")
        await store.put(relay, now)
        assert await store.get(relay.static, now + 299 * S) == relay
    expires = now + 300 * S
    error = await refused(EntryNotFound, store.get(relay.static, expires))
    assert (error.next_sequence, error.after_timestamp) == (3, relay.timestamp)
    await refused(EntryNotFound, store.get_json(relay.static, expires))
    assert await store.available_servers(5, expires) == []


@pytest_twisted.ensureDeferred
async def test_a_client_expires_by_what_its_entry_promises(store: Any, make_entry: Any, now_ns: int) -> None:
    ours, base = make_entry("ours", version="0.1.0"), make_entry("base")
    await store.put(ours, now_ns)
    await store.put(base, now_ns)
    hours = 3600 * S
    assert await store.get(ours.static, now_ns + 6 * hours - S) == ours
    error = await refused(EntryNotFound, store.get(ours.static, now_ns + 6 * hours))
    assert (error.next_sequence, error.after_timestamp) == (1, ours.timestamp)
    assert await store.get(base.static, now_ns + 720 * hours - S) == base
    await refused(EntryNotFound, store.get(base.static, now_ns + 720 * hours))


@pytest_twisted.ensureDeferred
async def test_a_client_that_posts_again_lives_on(store: Any, make_entry: Any, now_ns: int) -> None:
    for sequence in range(4):
        now = now_ns + sequence * 5 * 3600 * S
        ours = make_entry("ours", sequence, version="0.1.0")
        await store.put(ours, now)
    assert await store.get(ours.static, now + 5 * 3600 * S) == ours


@pytest_twisted.ensureDeferred
async def test_without_a_time_to_live_clients_stay(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened(store_url, limits=StoreLimits(client_ttl_s=None, base_client_ttl_s=None))
    for version in ("0.0.1", "0.1.0"):
        alice = make_entry(f"alice {version}", version=version)
        await store.put(alice, now_ns)
        assert await store.get(alice.static, now_ns + 10**8 * S) == alice


@pytest_twisted.ensureDeferred
async def test_an_expired_key_goes_on_where_it_was(store: Any, make_entry: Any, now_ns: int) -> None:
    old = [make_entry("relay", n, address="10.0.0.1:80", timestamp=100 + n) for n in range(3)]
    for entry in old:
        await store.put(entry, now_ns)
    later = now_ns + 301 * S
    # Things happen in between that make stores tidy up.
    for n in range(30):
        await store.put(make_entry(f"other {n}"), later)
    await store.available_servers(5, later)
    for entry in old:
        await refused(WrongSequence, store.put(entry, later))
    await refused(WrongTime, store.put(make_entry("relay", 3, address="10.0.0.1:80", timestamp=102), later))
    error = await refused(EntryNotFound, store.get(old[0].static, later))
    assert (error.next_sequence, error.after_timestamp) == (3, 102)
    back = make_entry("relay", 3, address="10.0.0.1:80", timestamp=103)
    assert await store.put(back, later) is False
    assert await store.get(back.static, later) == back
    assert await store.available_servers(5, later) == [back]


@pytest_twisted.ensureDeferred
async def test_without_a_time_to_live_servers_stay(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened(store_url, limits=StoreLimits(server_ttl_s=None))
    relay = make_entry("relay", address="10.0.0.1:80")
    await store.put(relay, now_ns)
    assert await store.get(relay.static, now_ns + 10**6 * S) == relay
    assert await store.available_servers(5, now_ns + 10**6 * S) == [relay]


# --- bounds and failures -----------------------------------------------------------------------------------------------


async def there(store: Any, names: list[str], key_of: Any, now_ns: int) -> list[str]:
    """Which of ``names`` have a live entry. (Looking counts as reading.)"""
    found = []
    for name in names:
        try:
            await store.get(key_of(name).public_key, now_ns)
        except EntryNotFound:
            continue
        found.append(name)
    return found


def poster(number: int) -> str:
    """An address in a network of its own."""
    return f"198.{18 + number // 256}.{number % 256}.7"


@pytest_twisted.ensureDeferred
async def test_a_flood_of_one_network_evicts_itself(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    """An address with many keys fills the store: the few entries of other networks stay, and newcomers are taken."""
    store = opened(store_url, limits=StoreLimits(clients=20))
    honest = [f"honest {n}" for n in range(5)]
    for n, name in enumerate(honest):
        assert await store.put(make_entry(name), now_ns, poster(n)) is True
    flood = [f"flood {n}" for n in range(100)]
    for n, name in enumerate(flood):
        await store.put(make_entry(name), now_ns + n * S, f"203.0.113.{n}")
    for n in range(5, 10):
        assert await store.put(make_entry(f"honest {n}"), now_ns + 200 * S, poster(n)) is True
        honest.append(f"honest {n}")
    later = now_ns + 300 * S
    assert await there(store, honest, key_of, later) == honest
    # No more than there may be, and no fewer: what was posted last is there.
    assert await there(store, flood, key_of, later) == flood[-10:]
    assert await store.put(make_entry("flood 99", 1), later, "203.0.113.9") is False


@pytest_twisted.ensureDeferred
async def test_a_key_counts_for_the_network_from_which_it_was_posted_last(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=4))
    for n, name in enumerate(("moving", "staying", "other")):
        await store.put(make_entry(name), now_ns + n * S, "192.0.2.1")
    await store.put(make_entry("moving", 1), now_ns + 3 * S, poster(1))
    for n in range(4):
        await store.put(make_entry(f"new {n}"), now_ns + (4 + n) * S, "192.0.2.1")
    assert await there(store, ["moving", "staying"], key_of, now_ns + 9 * S) == ["moving"]


@pytest_twisted.ensureDeferred
async def test_what_is_read_outlives_what_never_was(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=6))
    for n in range(6):
        await store.put(make_entry(f"client {n}"), now_ns + n * S, "192.0.2.1")
    hour = 3600 * S
    for at, name in enumerate(("client 2", "client 0")):  # in this order, hours apart
        now = now_ns + (1 + 2 * at) * hour
        assert await there(store, [name], key_of, now) == [name]
        # Reads are written down with a later write.
        await store.put(make_entry("client 5", 1 + at), now + 20 * S, "192.0.2.1")
    later = now_ns + 5 * hour
    for n in range(5):
        await store.put(make_entry(f"newcomer {n}"), later + n * S, "192.0.2.2")
    # Five of the network had to go: those never read, and of them the oldest, which in the end is a newcomer.
    names = [f"newcomer {n}" for n in range(5)]
    assert await there(store, names, key_of, later + hour) == names[1:]
    await store.put(make_entry("another"), later + hour + 20 * S, "192.0.2.3")
    # By now all were read: the one went that was read longest ago.
    assert await there(store, [f"client {n}" for n in range(6)], key_of, later + hour + 30 * S) == ["client 0"]


@pytest_twisted.ensureDeferred
async def test_an_entry_that_comes_back_after_it_expired_has_not_been_read_yet(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=3, base_client_ttl_s=100.0))
    await store.put(make_entry("back"), now_ns)
    await store.get(make_entry("back").static, now_ns)
    await store.put(make_entry("writer"), now_ns + 20 * S)  # and the read is written down
    await store.put(make_entry("tidy"), now_ns + 150 * S)
    for n, (name, sequence) in enumerate((("back", 1), ("later", 0), ("last", 0))):
        await store.put(make_entry(name, sequence), now_ns + (200 + n) * S)
    await store.put(make_entry("new"), now_ns + 210 * S)
    names = ["back", "later", "last", "new"]
    assert await there(store, names, key_of, now_ns + 210 * S) == ["later", "last", "new"]


@pytest.mark.parametrize("flooding", ["clients", "relays"])
@pytest_twisted.ensureDeferred
async def test_a_flood_of_one_kind_leaves_the_other_alone(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int, flooding: str
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=10, relays=10))
    clients, relays = [f"client {n}" for n in range(4)], [f"relay {n}" for n in range(4)]

    def entry(name: str, relay: bool) -> Any:
        return make_entry(name, address="10.0.0.1:80" if relay else "")

    # All from one network: of one kind, they would be the first to go.
    for client, relay in zip(clients, relays, strict=True):
        await store.put(entry(client, False), now_ns, "192.0.2.1")
        await store.put(entry(relay, True), now_ns, "192.0.2.1")
    for n in range(60):
        await store.put(entry(f"flood {n}", flooding == "relays"), now_ns + n * S, f"192.0.2.{n + 2}")
    untouched = clients if flooding == "relays" else relays
    assert await there(store, untouched, key_of, now_ns + 61 * S) == untouched
    fresh = entry("fresh", flooding != "relays")
    assert await store.put(fresh, now_ns + 61 * S, "192.0.2.1") is True
    assert await there(store, untouched, key_of, now_ns + 61 * S) == untouched


@pytest_twisted.ensureDeferred
async def test_bytes_are_bounded_like_entries(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    small, large = make_entry("small 0"), make_entry("large 0", servers=tuple(f"relay {n}" for n in range(64)))
    limits = StoreLimits(client_bytes=10 * (len(small.to_json()) + 256) + 3 * (len(large.to_json()) + 256))
    store = opened(store_url, limits=limits)
    names = [f"small {n}" for n in range(10)]
    for n, name in enumerate(names):
        await store.put(make_entry(name), now_ns, poster(n))
    flood = [f"large {n}" for n in range(20)]
    for n, name in enumerate(flood):
        await store.put(make_entry(name, servers=tuple(f"relay {m}" for m in range(64))), now_ns + n * S, poster(99))
    assert await there(store, names + flood, key_of, now_ns + 30 * S) == names + flood[-3:]
    # An entry that grows makes room as a new one does; of its own network, if that has the most then.
    grown = make_entry("small 0", 1, servers=tuple(f"relay {n}" for n in range(64)))
    await store.put(grown, now_ns + 31 * S, poster(0))
    assert await there(store, names + flood, key_of, now_ns + 32 * S) == names + flood[-2:]


@pytest_twisted.ensureDeferred
async def test_expired_entries_go_before_others(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=3))
    await store.put(make_entry("short", version="0.1.0"), now_ns, poster(0))
    for n in range(2):
        await store.put(make_entry(f"long {n}"), now_ns, "192.0.2.1")
    later = now_ns + 7 * 3600 * S
    assert await store.put(make_entry("new"), later, "192.0.2.1") is True
    names = ["long 0", "long 1", "new"]
    assert await there(store, names, key_of, later) == names


@pytest_twisted.ensureDeferred
async def test_an_evicted_key_goes_on_where_it_was(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened(store_url, limits=StoreLimits(clients=2))
    for sequence in range(3):
        await store.put(make_entry("alice", sequence), now_ns)
    for n in range(2):
        await store.put(make_entry(f"other {n}"), now_ns + S)
    error = await refused(EntryNotFound, store.get(make_entry("alice").static, now_ns + 2 * S))
    assert error.next_sequence == 3
    await refused(WrongSequence, store.put(make_entry("alice"), now_ns + 2 * S))  # an old one cannot be brought back
    assert await store.put(make_entry("alice", 3), now_ns + 2 * S) is False


@pytest_twisted.ensureDeferred
async def test_where_no_entry_fits_a_new_one_is_refused(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(client_bytes=1, relay_bytes=100))
    await refused(StoreFull, store.put(make_entry("alice"), now_ns))
    await refused(StoreFull, store.put(make_entry("relay", address="10.0.0.1:80"), now_ns))


@pytest.mark.parametrize("limits", [StoreLimits(clients=1, relays=1), StoreLimits(clients=1, relay_bytes=1000)])
@pytest_twisted.ensureDeferred
async def test_a_key_that_becomes_a_relay_needs_a_relays_place(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int, limits: StoreLimits
) -> None:
    """Two relays of the same size would take more than the bytes that there are for relays."""
    store = opened(store_url, limits=limits)
    await store.put(make_entry("one", address="10.0.0.1:80"), now_ns)
    await store.put(make_entry("two"), now_ns + S)
    await store.put(make_entry("two", 1, address="10.0.0.2:80"), now_ns + 2 * S)
    await store.put(make_entry("three"), now_ns + 3 * S)
    assert await there(store, ["one", "two", "three"], key_of, now_ns + 4 * S) == ["two", "three"]


@pytest_twisted.ensureDeferred
async def test_new_keys_have_a_rate_for_each_address_and_network(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    limits = StoreLimits(new_keys_per_s=0.1, new_keys_burst=3, network_new_keys_per_s=0.2, network_new_keys_burst=5)
    store = opened(store_url, limits=limits)
    taken = 0
    for host in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
        for n in range(10):
            try:
                taken += await store.put(make_entry(f"{host} {n}"), now_ns, host)
            except RateLimitedByDiscovery:
                continue
    assert taken == 5  # three of one address, two more of its network
    assert await store.put(make_entry("192.0.2.1 0", 1), now_ns, "192.0.2.1") is False  # known keys go on
    assert await store.put(make_entry("elsewhere"), now_ns, "192.0.3.1") is True
    assert await store.put(make_entry("of our own"), now_ns) is True  # an address that is not known has no limit
    await refused(RateLimitedByDiscovery, store.put(make_entry("sooner"), now_ns + 9 * S, "192.0.2.1"))
    assert await store.put(make_entry("later"), now_ns + 10 * S, "192.0.2.1") is True
    await refused(RateLimitedByDiscovery, store.put(make_entry("another"), now_ns + 10 * S, "192.0.2.1"))
    for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:0:ffff::3"):
        assert await store.put(make_entry(host), now_ns, host) is True
    await refused(RateLimitedByDiscovery, store.put(make_entry("fourth"), now_ns, "2001:db8::4"))
    unlimited = opened(store_url, limits=StoreLimits(new_keys_per_s=None, network_new_keys_per_s=None))
    for n in range(10):
        assert await unlimited.put(make_entry(f"unlimited {n}"), now_ns, "192.0.2.1") is True


@pytest_twisted.ensureDeferred
async def test_tombstones_are_bounded_and_fair(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    """A flood of keys that expire forgets its own tombstones, not those of a network with a few."""
    store = opened(store_url, limits=StoreLimits(tombstones=4, new_keys_per_s=None))
    await store.put(make_entry("honest", address="10.0.0.1:80"), now_ns, "192.0.2.1")
    for n in range(9):
        await store.put(make_entry(f"flood {n}", address="10.0.0.1:80"), now_ns + (1 + 6 * n) * S, "203.0.113.1")
    # That the oldest was read counts no more once it has expired.
    await store.get(make_entry("flood 0").static, now_ns + 60 * S)
    await store.put(make_entry("client"), now_ns + 60 * S, "192.0.2.9")
    for n in range(10):  # stores tidy up when something is written
        await store.put(make_entry(f"tidy {n}"), now_ns + (301 + 6 * n) * S, "192.0.2.9")
    later = now_ns + 360 * S
    hints = []
    for name in ["honest", *(f"flood {n}" for n in range(9))]:
        error = await refused(EntryNotFound, store.get(make_entry(name).static, later + 30 * S))
        hints.append(error.next_sequence)
    assert hints == [1, *[None] * 6, 1, 1, 1]


@pytest_twisted.ensureDeferred
async def test_tombstones_are_forgotten_in_the_end(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened(store_url, limits=StoreLimits(tombstone_ttl_s=1000.0))
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    for seconds in (400, 800, 1250):
        await store.put(make_entry(f"other {seconds}"), now_ns + seconds * S)
        error = await refused(EntryNotFound, store.get(make_entry("relay").static, now_ns + seconds * S))
        assert error.next_sequence == 1
    await store.put(make_entry("other"), now_ns + 1500 * S)
    error = await refused(EntryNotFound, store.get(make_entry("relay").static, now_ns + 1500 * S))
    assert error.next_sequence is None


@pytest_twisted.ensureDeferred
async def test_a_key_that_was_forgotten_begins_anew_though_nothing_else_was_written(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(tombstone_ttl_s=1000.0))
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    await store.put(make_entry("other"), now_ns + 400 * S)
    again = make_entry("relay", timestamp=now_ns + 1500 * S, address="10.0.0.1:80")
    assert await store.put(again, now_ns + 1500 * S) is True


def check_file(path: str) -> None:
    """What is counted in a file is what is there, and nothing is counted of networks that have nothing there."""
    with sqlite3.connect(path) as file:
        there = file.execute(
            "SELECT kind, network, count(*), sum(bytes) FROM entries GROUP BY kind, network"
        ).fetchall()
        assert sorted(there) == sorted(file.execute("SELECT kind, network, entries, bytes FROM networks"))
        for kind, entries, size in file.execute("SELECT kind, entries, bytes FROM totals"):
            own = [row[2:] for row in there if row[0] == kind]
            assert (entries, size) == (sum(one for one, _ in own), sum(one for _, one in own))
    file.close()


async def check_redis(url: str, reactor: Any) -> None:
    """The same of a Redis, and each key is in the sets it belongs to and in no others."""
    redis = RedisConnection(RedisAddress.parse(url), reactor)
    rows = {
        key: await redis.call("HMGET", key, "k", "w", "n", "x", "v") for key in await redis.call("KEYS", "dmsg:entry:*")
    }
    totals = await redis.call("HGETALL", "dmsg:totals")
    counted = {name: int(value) for name, value in zip(totals[::2], totals[1::2], strict=True)}
    for kind in range(4):
        own = {key: row for key, row in rows.items() if row[0] == b"%d" % kind}
        assert (counted.get(b"e%d" % kind, 0), counted.get(b"b%d" % kind, 0)) == (
            len(own),
            sum(int(row[2]) for row in own.values()),
        )
        networks = Counter[bytes]()
        for row in own.values():
            networks[row[1]] += int(row[2])
        scores = await redis.call("ZRANGE", f"dmsg:networks:{kind}", 0, -1, "WITHSCORES")
        assert {name: int(score) for name, score in zip(scores[::2], scores[1::2], strict=True)} == networks
        for name in networks:
            members = await redis.call("ZRANGE", f"dmsg:of:{kind}:{name.decode()}", 0, -1)
            assert set(members) == {key for key, row in own.items() if row[1] == name}
        expiring = await redis.call("ZRANGE", f"dmsg:expiring:{kind}", 0, -1)
        assert set(expiring) == {key for key, row in own.items() if kind < 2 and row[3]}
    dead = {key for key, row in rows.items() if row[0] in (b"2", b"3")}
    assert set(await redis.call("ZRANGE", "dmsg:tombstones", 0, -1)) == dead
    assert set(await redis.call("ZRANGE", "dmsg:servers", 0, -1)) <= {
        key for key, row in rows.items() if row[0] == b"1" and row[4] == b"dmsg:servers"
    }
    await redis.close()


@pytest_twisted.ensureDeferred
async def test_entries_of_different_sizes_kinds_and_networks_come_and_go(
    store_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int, reactor: Any
) -> None:
    """Any mixture of operations leaves the limits kept: never a place lost, never one too many."""

    async def check() -> None:
        if store_url.startswith("sqlite:"):
            check_file(store_url.removeprefix("sqlite:"))
        elif store_url.startswith("redis:"):
            await check_redis(store_url, reactor)

    rng = random.Random(5)
    limits = StoreLimits(clients=8, relays=4, tombstones=5, client_ttl_s=500.0, base_client_ttl_s=2000.0)
    store = opened(store_url, limits=limits)
    names = [f"key {n}" for n in range(25)]
    now = now_ns
    for number in range(120):
        if number % 15 == 0:
            await check()
        now += rng.randrange(60) * S
        name = rng.choice(names)
        try:
            old = await store.get(key_of(name).public_key, now)
            sequence, after = old.sequence + 1, old.timestamp + 1
        except EntryNotFound as error:
            sequence, after = error.next_sequence or 0, (error.after_timestamp or now) + 1
        options: dict[str, Any] = {
            "timestamp": after,
            "address": rng.choice(["", "", "10.0.0.1:80"]),
            "version": rng.choice(["0.0.1", "0.1.0"]),
            "servers": tuple(names[: rng.randrange(9)]),
        }
        entry = make_entry(name, sequence, **options)
        host = rng.choice(["", poster(1), poster(2), poster(3)])
        try:
            assert await store.put(entry, now, host) is (sequence == 0)
        except NonZeroSequence:  # tidying up has forgotten the tombstone in between
            entry = make_entry(name, 0, **options)
            assert await store.put(entry, now, host) is True
        assert await store.get(entry.static, now) == entry
        live = [await store.get(key_of(one).public_key, now) for one in await there(store, names, key_of, now)]
        assert sum(one.server is None for one in live) <= 8
        assert sum(one.server is not None for one in live) <= 4
    # Everything has expired: the whole room is there again.
    now += 10**7 * S
    fresh = [f"fresh {n}" for n in range(12)]
    for n, name in enumerate(fresh):
        await store.put(make_entry(name, address="10.0.0.1:80" if n < 4 else ""), now, poster(n))
    assert await there(store, fresh, key_of, now) == fresh
    await check()


@pytest_twisted.ensureDeferred
async def test_a_cancelled_put_is_written_and_told_of_all_the_same(store: Any, make_entry: Any, now_ns: int) -> None:
    entry, told = make_entry("alice"), []
    store.watch(lambda *what: told.append(what))
    asked = store.put(entry, now_ns)
    asked.addErrback(lambda failure: failure.trap(defer.CancelledError))
    asked.cancel()
    while True:
        try:
            assert await store.get(entry.static, now_ns) == entry
            break
        except EntryNotFound:
            continue
    await store.put(make_entry("bob"), now_ns)
    assert told[0] == (entry, now_ns)


@pytest_twisted.ensureDeferred
async def test_a_shield_passes_outcomes_on() -> None:
    assert await shielded(defer.succeed(3)) == 3
    await refused(EntryNotFound, shielded(defer.fail(EntryNotFound())))
    inner: defer.Deferred[int] = defer.Deferred()
    outer = shielded(inner)
    outer.cancel()
    await refused(defer.CancelledError, outer)
    inner.errback(EntryNotFound())  # has no reader any more, and is no unhandled error either


@pytest.mark.parametrize(
    "url",
    [
        "", "memory", "memory:x", "sqlite:", "postgres://h", "redis:", "redis://", "redis://h:x", "redis://h/x",
        "redis://h/-1", "redis://h/1?a=b", "sqlite:/nowhere/at/all",
    ],
)  # fmt: skip
def test_urls_that_name_no_store(url: str, reactor: Any) -> None:
    with pytest.raises(ConfigError):
        open_store(url, reactor)


# --- SQLite ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_file_is_opened_again(opened: Any, tmp_path: Path, make_entry: Any, now_ns: int) -> None:
    url = f"sqlite:{tmp_path / 'entries'}"
    first = opened(url)
    await first.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    await first.close()
    await refused(DiscoveryUnavailable, first.get(make_entry("relay").static, now_ns))
    again = opened(url)
    assert await again.available_servers(1, now_ns) == [make_entry("relay", address="10.0.0.1:80")]
    await refused(WrongSequence, again.put(make_entry("relay", 0, timestamp=now_ns + 5), now_ns))
    assert await again.put(make_entry("relay", 1), now_ns) is False


VERSION_1 = """
CREATE TABLE entries (key BLOB PRIMARY KEY NOT NULL, sequence BLOB NOT NULL, timestamp INTEGER NOT NULL, body BLOB,
    available INTEGER NOT NULL, slot INTEGER NOT NULL, expires_ns INTEGER);
CREATE INDEX entries_available ON entries (slot) WHERE available = 1;
CREATE INDEX entries_expiring ON entries (expires_ns) WHERE expires_ns IS NOT NULL AND body IS NOT NULL;
CREATE INDEX entries_tombstones ON entries (expires_ns) WHERE body IS NULL;
PRAGMA application_id = 1684894567;
PRAGMA user_version = 1;
"""


@pytest_twisted.ensureDeferred
async def test_a_file_of_version_1_is_brought_up_to_date(
    reactor: Any, tmp_path: Path, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    key = key_of("wide")
    wide = Entry("0.0.1", 0, 1, key.public_key, ClientPart(tuple(key_of(f"r {n}").public_key for n in range(70)))).sign(
        key
    )
    full = make_entry("full", address="10.0.0.2:80", available=0)
    relay, ours, base = (
        make_entry("relay", address="10.0.0.1:80"),
        make_entry("ours", version="0.1.0"),
        make_entry("base"),
    )
    gone = make_entry("gone", 4, address="10.0.0.3:80")
    with sqlite3.connect(tmp_path / "entries") as old:
        old.executescript(VERSION_1)
        for entry in (relay, full, ours, base, wide, gone):
            expires_ns = None if entry.server is None else now_ns + 300 * S
            body = None if entry is gone else entry.to_json()
            available = int(entry is relay)
            row = (entry.static.raw, entry.sequence.to_bytes(8, "big"), entry.timestamp, body, available, 7, expires_ns)
            old.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    old.close()
    for _ in range(2):  # the second time it is up to date
        store = SqliteStore(
            str(tmp_path / "entries"), reactor, limits=StoreLimits(clients=2, relays=2), now_ns=lambda: now_ns
        )
        assert await store.available_servers(5, now_ns) == [relay]
        for entry in (relay, full, ours, base):
            assert await store.get(entry.static, now_ns) == entry
        for entry, following in ((gone, 5), (wide, 1)):  # more relays than an entry may name: it has to post again
            error = await refused(EntryNotFound, store.get(entry.static, now_ns))
            assert error.next_sequence == following
        await refused(EntryNotFound, store.get(ours.static, now_ns + 6 * 3600 * S))  # as if it was posted just now
        await store.close()
    store = SqliteStore(str(tmp_path / "entries"), reactor, limits=StoreLimits(clients=2, relays=2))
    assert await store.put(make_entry("ours", 1, version="0.1.0"), now_ns + S) is False
    assert await store.put(make_entry("new"), now_ns + S, poster(2)) is True  # what was there is counted
    assert await there(store, ["ours", "base", "new", "relay", "full"], key_of, now_ns + S) == [
        "ours",
        "new",
        "relay",
        "full",
    ]
    await store.close()


FULL = """
import resource, sys
from dmsg.discovery.stores import table
from dmsg.discovery.stores.rules import StoreLimits
allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
for most_bytes in (100_000, allowed[0]):
    connection = table.connect(sys.argv[1])
    connection.execute("PRAGMA cache_size = 10")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, allowed[1]))
    try:
        table.prepare(connection, StoreLimits(), 0)
        print(connection.execute("SELECT count(kind) FROM entries").fetchall())
    except table.SqlError as error:
        print(error)
"""


def test_a_file_of_version_1_that_cannot_be_written_says_why_and_stays_as_it_was(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "entries") as old:
        old.executescript(VERSION_1)
        rows = [(number.to_bytes(33, "big"), bytes(8), b'{"client":{}}' + b" " * 600) for number in range(500)]
        old.executemany("INSERT INTO entries VALUES (?, ?, 0, ?, 0, 7, NULL)", rows)
    old.close()
    words = [sys.executable, "-c", FULL, str(tmp_path / "entries")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "disk I/O error\n[(500,)]\n"


@pytest_twisted.ensureDeferred
async def test_a_file_of_version_2_is_brought_up_to_date(
    opened: Any, tmp_path: Path, make_entry: Any, now_ns: int
) -> None:
    url = f"sqlite:{tmp_path / 'entries'}"
    store, relay = opened(url), make_entry("relay", address="10.0.0.1:80")
    await store.put(relay, now_ns)
    await store.close()
    with sqlite3.connect(tmp_path / "entries") as old:
        old.executescript(
            "DROP INDEX entries_available; ALTER TABLE entries DROP COLUMN protocol; PRAGMA user_version = 2;"
            "CREATE INDEX entries_available ON entries (slot) WHERE available = 1;"
        )
    old.close()
    store = opened(url)
    assert await store.available_servers(5, now_ns) == [relay]
    other = make_entry("other", address="10.0.0.2:80", version="0.0.1+messaging")
    await store.put(other, now_ns)
    assert await store.available_servers(5, now_ns, "messaging") == [other]


def test_a_file_is_synced_at_each_transaction(tmp_path: Path) -> None:
    """SIGKILL shows nothing of it: what was written is in the kernel then. A power cut would."""
    connection = store_table.connect(str(tmp_path / "entries"))
    assert connection.execute("PRAGMA synchronous").fetchall() == [(2,)], "FULL"
    connection.close()


def test_a_file_whose_schema_is_damaged_is_refused(tmp_path: Path, reactor: Any) -> None:
    """SQLite quotes the schema in its error, and Python cannot decode that."""
    path = tmp_path / "entries"
    store_table.prepare(connection := store_table.connect(str(path), "DELETE"), StoreLimits(), 0)
    connection.close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE\xffTABLE"))
    with pytest.raises(ConfigError, match=r"entries cannot be used \(its schema is damaged\)"):
        open_store(f"sqlite:{path}", reactor)


@pytest.mark.parametrize(
    ("blocks", "free", "flags", "more"),
    [
        (1 << 30, 2, 0, ": the disk is full"),
        (1 << 30, 1 << 20, 0, ""),
        (1 << 30, 0, os.ST_RDONLY, ": the file system is read-only"),
        (0, 0, 0, ""),
    ],
    ids=["full", "room", "read-only", "no disk, as /proc"],
)
def test_a_full_disk_is_named_as_the_reason(
    tmp_path: Path, reactor: Any, monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, flags: int, more: str
) -> None:
    """SQLite's index of the log, which is removed when discovery stops, is the first file for which there is no room."""
    (tmp_path / "entries-shm").mkdir()
    problem, asked = "attempt to write a readonly database", []

    def statvfs(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=4096, f_flag=flags)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(ConfigError) as caught:
        open_store(f"sqlite:{tmp_path / 'entries'}", reactor)
    assert str(caught.value) == f"store: {tmp_path / 'entries'} cannot be used ({problem}{more})"
    assert asked == [str(tmp_path)]


@pytest_twisted.ensureDeferred
async def test_a_file_of_a_later_version_is_refused(opened: Any, tmp_path: Path, reactor: Any) -> None:
    await opened(f"sqlite:{tmp_path / 'entries'}").close()
    with sqlite3.connect(tmp_path / "entries") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(ConfigError, match="not an entry store of this version"):
        open_store(f"sqlite:{tmp_path / 'entries'}", reactor)


@pytest_twisted.ensureDeferred
async def test_two_stores_share_a_file(opened: Any, tmp_path: Path, make_entry: Any, now_ns: int) -> None:
    one, two = (opened(f"sqlite:{tmp_path / 'entries'}") for _ in range(2))
    await one.put(make_entry("alice"), now_ns)
    await two.put(make_entry("alice", 1), now_ns)
    await refused(WrongSequence, one.put(make_entry("alice", 1, timestamp=now_ns + 9), now_ns))
    assert (await one.get(make_entry("alice").static, now_ns)).sequence == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path, reactor: Any) -> None:
    (tmp_path / "text").write_text("a text, as long as a small database" * 20)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE things (name TEXT)")
    other.close()
    for name in ("text", "other"):
        with pytest.raises(ConfigError):
            open_store(f"sqlite:{tmp_path / name}", reactor)


@pytest_twisted.ensureDeferred
async def test_one_refused_write_does_not_touch_its_neighbours(
    opened: Any, tmp_path: Path, make_entry: Any, now_ns: int
) -> None:
    store = opened(f"sqlite:{tmp_path / 'entries'}")
    # The first keeps the lane busy; the others come together in one transaction.
    names = [f"client {n}" for n in range(20)]
    writes = [store.put(make_entry(name, sequence=n % 2), now_ns) for n, name in enumerate(names)]
    outcomes = await defer.DeferredList(writes, consumeErrors=True)
    assert [ok for ok, _ in outcomes] == [n % 2 == 0 for n in range(20)]
    for n, name in enumerate(names):
        if n % 2 == 0:
            await store.get(make_entry(name).static, now_ns)
        else:
            await refused(EntryNotFound, store.get(make_entry(name).static, now_ns))


@pytest_twisted.ensureDeferred
async def test_a_failing_file_is_a_typed_error_and_recovers(
    opened: Any, tmp_path: Path, make_entry: Any, now_ns: int
) -> None:
    store = opened(f"sqlite:{tmp_path / 'entries'}")
    await store.put(make_entry("alice"), now_ns)
    other = sqlite3.connect(tmp_path / "entries", isolation_level=None)
    other.execute("ALTER TABLE entries RENAME TO hidden")
    await refused(DiscoveryUnavailable, store.put(make_entry("bob"), now_ns))
    await refused(DiscoveryUnavailable, store.get(make_entry("alice").static, now_ns))
    other.execute("ALTER TABLE hidden RENAME TO entries")
    other.execute("UPDATE entries SET body = '{}'")
    other.close()
    await refused(DiscoveryUnavailable, store.get(make_entry("alice").static, now_ns))
    await store.put(make_entry("bob"), now_ns)


@pytest_twisted.ensureDeferred
async def test_more_waiting_than_may_wait_fails_at_once(
    opened: Any, tmp_path: Path, make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmsg.glue.lane.QUEUE_LIMIT", 3)
    store = opened(f"sqlite:{tmp_path / 'entries'}")
    writes = [store.put(make_entry(f"client {n}"), now_ns) for n in range(10)]
    outcomes = await defer.DeferredList(writes, consumeErrors=True)
    assert [ok for ok, _ in outcomes] == [True] * 4 + [False] * 6
    assert outcomes[-1][1].check(DiscoveryUnavailable)


WRITER = """
import sys
from twisted.internet import reactor, defer
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.discovery.stores import table as store_table
from dmsg.discovery.stores.open import open_store

store = open_store("sqlite:" + sys.argv[1], reactor)

async def write(number):
    key = SecretKey(bytes([number + 1]) * 32)
    sequence = 0
    while True:
        await store.put(Entry("0.0.1", sequence, sequence, key.public_key, ClientPart(())).sign(key), 0)
        sys.stdout.write(f"{key.public_key} {sequence}\\n")
        sys.stdout.flush()
        sequence += 1

for number in range(8):
    defer.ensureDeferred(write(number)).addErrback(lambda failure: (failure.printTraceback(), reactor.stop()))
reactor.run()
"""


@pytest.mark.system
@pytest_twisted.ensureDeferred
async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path, opened: Any) -> None:
    path = tmp_path / "entries"
    acknowledged: dict[str, int] = {}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            key, sequence = line.split()
            acknowledged[key] = int(sequence)
            if sum(acknowledged.values()) > 300:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()  # acknowledged as well, whether whole or cut off
        process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n"):
            key, sequence = line.split()
            acknowledged[key] = int(sequence)
    assert len(acknowledged) == 8
    store = opened(f"sqlite:{path}")
    for key, sequence in acknowledged.items():
        entry: Entry = await store.get(PublicKey.parse(key), 0)
        entry.verify()
        assert entry.sequence >= sequence


# --- Redis -------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_redis_that_is_not_there_is_unavailable(
    reactor: Any, make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmsg.discovery.stores.redis.OPERATION_TIMEOUT_S", 0.2)
    store = RedisStore(RedisAddress.parse("redis://127.0.0.1:1"), reactor)
    await refused(DiscoveryUnavailable, store.get(make_entry("alice").static, now_ns))
    await refused(DiscoveryUnavailable, store.put(make_entry("alice"), now_ns))
    await store.close()


@pytest_twisted.ensureDeferred
async def test_writes_to_a_redis_that_is_not_there_do_not_wait_for_each_other(make_entry: Any, now_ns: int) -> None:
    network = MemoryNetwork(random=random.Random(1))  # nothing listens on it
    store = RedisStore(RedisAddress.parse("redis://127.0.0.1:6379"), network)
    writes = [store.put(make_entry(f"key {n}"), now_ns) for n in range(20)]
    network.advance(OPERATION_TIMEOUT_S + 0.1)
    assert all(write.called for write in writes)
    for write in writes:
        assert (
            str(await refused(DiscoveryUnavailable, write)) == "redis://127.0.0.1:6379/0 failed: 'connection refused'"
        )
    await store.close()


@pytest_twisted.ensureDeferred
async def test_two_stores_share_a_redis(redis_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    one, two = opened(redis_url + "/1"), opened(redis_url + "/1")
    await one.put(make_entry("alice"), now_ns)
    await two.put(make_entry("alice", 1), now_ns)
    await refused(WrongSequence, one.put(make_entry("alice", 1, timestamp=now_ns + 9), now_ns))
    elsewhere = opened(redis_url + "/2")
    await refused(EntryNotFound, elsewhere.get(make_entry("alice").static, now_ns))


async def write_first_layout(url: str, reactor: Any, entries: list[Entry], now_ns: int) -> None:
    """The rows of a Redis as the first layout had them: of a relay that lives for 300 s, clients, and tombstones."""
    old = RedisConnection(RedisAddress.parse(url), reactor)
    (relay,) = (entry for entry in entries if entry.server)
    for entry in entries:
        expires = str(now_ns // 10**6 + 300_000) if entry is relay else ""
        fields = ["s", entry.sequence, "t", f"{entry.timestamp + 2**63:020}", "x", expires]
        if not entry.sequence:
            fields += ["b", entry.to_json()]
        await old.call("HSET", f"dmsg:entry:{entry.static}", *fields)
        if entry.sequence:
            await old.call("EXPIRE", f"dmsg:entry:{entry.static}", 10_000)
    await old.call("ZADD", "dmsg:expiring", 1, f"dmsg:entry:{relay.static}")
    await old.call("ZADD", "dmsg:servers", now_ns // 10**6 + 300_000, f"dmsg:entry:{relay.static}")
    await old.close()


@pytest_twisted.ensureDeferred
async def test_a_redis_of_the_first_layout_is_brought_up_to_date(
    reactor: Any, redis_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    relay, ours, base = (
        make_entry("relay", address="10.0.0.1:80"),
        make_entry("ours", version="0.1.0"),
        make_entry("base"),
    )
    await write_first_layout(f"{redis_url}/4", reactor, [relay, ours, base, make_entry("gone", 4)], now_ns)
    store = opened(f"{redis_url}/4", limits=StoreLimits(clients=3))
    for entry in (relay, ours, base):
        assert await store.get(entry.static, now_ns) == entry
    assert await store.put(make_entry("gone", 5), now_ns, poster(3)) is False
    assert await store.put(make_entry("ours", 1, version="0.1.0"), now_ns + S) is False
    assert await store.put(make_entry("new"), now_ns + 2 * S, poster(2)) is True
    names = ["ours", "base", "new", "relay", "gone"]
    assert await there(store, names, key_of, now_ns + 2 * S) == ["ours", "new", "relay", "gone"]
    await refused(EntryNotFound, store.get(make_entry("new").static, now_ns + 31 * 24 * 3600 * S))


@pytest_twisted.ensureDeferred
async def test_what_a_redis_of_the_first_layout_held_expires_as_if_it_was_posted_just_now(
    reactor: Any, redis_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    limits = StoreLimits(client_ttl_s=1000.0, base_client_ttl_s=5000.0, tombstone_ttl_s=9000.0)
    relay = make_entry("relay", address="10.0.0.1:80")
    clients = [make_entry("ours", version="0.1.0"), make_entry("base")]
    await write_first_layout(f"{redis_url}/4", reactor, [relay, *clients, make_entry("gone", 4)], now_ns)
    store = opened(f"{redis_url}/4", limits=limits)
    names = ["relay", "ours", "base"]
    for after_s, left in ((0, names), (299, names), (301, names[1:]), (999, names[1:]), (1001, ["base"]), (5001, [])):
        at_ns = now_ns + after_s * S
        await store.put(make_entry(f"writer {after_s}", timestamp=at_ns), at_ns)  # the first one brings it up to date
        assert await there(store, names, key_of, at_ns) == left
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/4"), reactor)
    assert await by_hand.call("EXISTS", "dmsg:expiring") == 0, "nothing stays of the first layout"
    assert await by_hand.call("TTL", f"dmsg:entry:{key_of('gone').public_key}") == -1, "Redis itself forgets none"
    await by_hand.close()
    for after_s, following in ((8990, 5), (9001, None)):
        at_ns = now_ns + after_s * S
        await store.put(make_entry(f"writer {after_s}", timestamp=at_ns), at_ns)
        error = await refused(EntryNotFound, store.get(key_of("gone").public_key, at_ns))
        assert error.next_sequence == following


@pytest_twisted.ensureDeferred
async def test_entries_deleted_by_hand_in_redis_stop_no_write(
    reactor: Any, redis_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/4"), reactor)
    store = opened(f"{redis_url}/4")
    relays = [make_entry(name, address="203.0.113.7:80") for name in ("one", "two")]
    for relay in relays:
        await store.put(relay, now_ns, poster(1))
        await by_hand.call("DEL", f"dmsg:entry:{relay.static}")
    await by_hand.close()
    await refused(EntryNotFound, store.get(relays[0].static, now_ns))
    moved = make_entry("one", address="203.0.113.8:80", timestamp=now_ns + 1)
    assert await store.put(moved, now_ns + S, poster(2)) is True
    later_ns = now_ns + 400 * S  # what is left of the two has expired
    assert await store.put(make_entry("new", timestamp=later_ns), later_ns, poster(3)) is True
    assert await store.put(make_entry("one", 1, address="203.0.113.9:80", timestamp=later_ns), later_ns) is False


@pytest_twisted.ensureDeferred
async def test_entries_deleted_by_hand_in_redis_take_no_room(
    reactor: Any, redis_url: str, opened: Any, make_entry: Any, key_of: Any, now_ns: int
) -> None:
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/4"), reactor)
    store = opened(f"{redis_url}/4", limits=StoreLimits(clients=4, tombstones=2))
    names = [f"key {number}" for number in range(4)]
    for name in names:
        await store.put(make_entry(name), now_ns, poster(1))
    for name in names[:3]:
        await by_hand.call("DEL", f"dmsg:entry:{key_of(name).public_key}")
    # one comes again from elsewhere, and one from where it was
    for number, name in ((2, "key 0"), (1, "key 1"), (4, "a"), (3, "b")):
        await store.put(make_entry(name, timestamp=now_ns + 1), now_ns + S, poster(number))
    assert await there(store, [*names, "a", "b"], key_of, now_ns + S) == ["key 0", "key 1", "a", "b"]
    await by_hand.call("DEL", f"dmsg:entry:{key_of('key 3').public_key}")  # a tombstone
    more = [f"more {number}" for number in range(6)]
    for name in more:
        await store.put(make_entry(name), now_ns + 2 * S, poster(4))
    assert len(await there(store, ["key 0", "key 1", "a", "b", *more], key_of, now_ns + 2 * S)) == 4
    totals = await by_hand.call("HGETALL", "dmsg:totals")
    counted = dict(zip(totals[::2], map(int, totals[1::2]), strict=True))
    assert (counted[b"e0"], counted[b"e2"]) == (4, 2)
    await by_hand.close()
