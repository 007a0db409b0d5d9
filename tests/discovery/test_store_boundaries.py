"""The boundaries of every store: the moment of expiry, ties between networks, entries that grow, reads noted late."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer

from dmsg.address import RedisAddress
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound, WrongSequence, WrongTime
from dmsg.discovery.stores.rules import TTL_LIMIT_S, StoreLimits
from dmsg.glue.redis import RedisConnection

S = 10**9
MS = 10**6
HOUR = 3600 * S
#: An entry with so many relays is some 4 KiB longer than one without.
MANY = tuple(f"relay {n}" for n in range(64))


async def outcome(asked: Any) -> Any:
    """What came of ``asked``: its result, or the kind of refusal with its hints."""
    try:
        return await asked
    except EntryNotFound as error:
        return EntryNotFound, error.next_sequence, error.after_timestamp
    except DiscoveryError as error:
        return type(error)


def at(number: int) -> str:
    """An address in network ``number``."""
    return f"198.51.{number}.7"


@pytest.fixture
def there(key_of: Any) -> Any:
    """``there(store, names, now_ns)``: which of ``names`` have a live entry. (Looking counts as reading.)"""

    async def look(store: Any, names: list[str], now_ns: int) -> list[str]:
        found = [(name, await outcome(store.get(key_of(name).public_key, now_ns))) for name in names]
        return [name for name, got in found if not isinstance(got, tuple)]

    return look


# --- time --------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_relay_is_there_to_the_last_millisecond_and_no_longer(store: Any, make_entry: Any, now_ns: int) -> None:
    relay = make_entry("relay", address="10.0.0.1:80", version="0.0.1+messaging")
    await store.put(relay, now_ns)
    key = relay.static
    last = now_ns + 300 * S - MS
    assert await store.get(key, last) == relay
    assert await store.servers_of([key.raw], last, "messaging") == [relay]
    assert await store.available_servers(5, last, "messaging") == [relay]
    assert await store.available_keys(5, last, "messaging") == [key.raw]
    over = now_ns + 300 * S
    assert await outcome(store.get(key, over)) == (EntryNotFound, 1, relay.timestamp)
    assert await store.servers_of([key.raw], over, "messaging") == []
    assert await store.available_keys(5, over, "messaging") == []
    assert await store.available_servers(5, over, "messaging") == []


@pytest_twisted.ensureDeferred
async def test_a_relay_that_lives_for_ever_is_found_by_its_key(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(server_ttl_s=None))
    relay = make_entry("relay", address="10.0.0.1:80")
    await store.put(relay, now_ns)
    later = now_ns + 10**6 * S
    assert await store.servers_of([relay.static.raw], later) == [relay]
    assert await store.available_keys(5, later) == [relay.static.raw]


@pytest_twisted.ensureDeferred
async def test_the_longest_times_to_live_work_in_every_store(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    times = dict.fromkeys(("server_ttl_s", "client_ttl_s", "base_client_ttl_s", "tombstone_ttl_s"), TTL_LIMIT_S)
    store = opened(store_url, limits=StoreLimits(clients=1, **times))
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    await store.put(make_entry("gone"), now_ns)
    century = int(TTL_LIMIT_S) * S
    await store.put(make_entry("client"), now_ns + century - 6 * S)
    assert await there(store, ["relay", "client"], now_ns + century - S) == ["relay", "client"]
    assert (await outcome(store.get(make_entry("gone").static, now_ns + century - S)))[1] == 1
    assert await there(store, ["relay"], now_ns + century) == []


@pytest_twisted.ensureDeferred
async def test_an_entry_that_expires_at_this_moment_makes_room(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(relays=3))
    await store.put(make_entry("first", address="10.0.0.1:80"), now_ns, at(0))
    for name in ("second", "third"):
        await store.put(make_entry(name, address="10.0.0.1:80"), now_ns + S, at(1))
    moment = now_ns + 300 * S
    await store.put(make_entry("new", address="10.0.0.1:80"), moment, at(1))
    assert await there(store, ["first", "second", "third", "new"], moment) == ["second", "third", "new"]


@pytest.mark.parametrize(("early_ns", "answer"), [(MS, WrongSequence), (0, True)])
@pytest_twisted.ensureDeferred
async def test_a_tombstone_is_kept_for_exactly_its_time(
    store_url: str, opened: Any, make_entry: Any, now_ns: int, early_ns: int, answer: Any
) -> None:
    store = opened(store_url, limits=StoreLimits(tombstone_ttl_s=1000.0))
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    buried = now_ns + 300 * S
    await store.put(make_entry("other"), buried)
    again = make_entry("relay", address="10.0.0.1:80", timestamp=buried + 1000 * S)
    assert await outcome(store.put(again, buried + 1000 * S - early_ns)) == answer


@pytest_twisted.ensureDeferred
async def test_after_the_clock_was_set_back_an_entry_lives_by_the_new_time(
    store: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    back = now_ns - 24 * HOUR
    assert await store.put(make_entry("relay", 1, address="10.0.0.1:80"), back) is False
    assert await there(store, ["relay"], back + 299 * S) == ["relay"]
    assert len(await store.available_servers(5, back + 299 * S)) == 1
    assert await there(store, ["relay"], back + 300 * S) == []
    await store.put(make_entry("client"), back + 310 * S)
    hint = await outcome(store.get(make_entry("relay").static, back + 310 * S))
    assert hint == (EntryNotFound, 2, make_entry("relay", 1).timestamp)


# --- who goes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("crowd", "goes"), [(2, "own"), (3, "crowd 0")])
@pytest_twisted.ensureDeferred
async def test_a_newcomer_that_brings_its_network_to_as_many_as_the_largest_displaces_its_own(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int, crowd: int, goes: str
) -> None:
    names = [f"crowd {n}" for n in range(crowd)]
    store = opened(store_url, limits=StoreLimits(clients=crowd + 1))
    for n, name in enumerate(names):
        await store.put(make_entry(name), now_ns + n * S, at(1))
    await store.put(make_entry("own"), now_ns + 9 * S, at(2))
    await store.put(make_entry("new"), now_ns + 10 * S, at(2))
    everything = [*names, "own", "new"]
    assert await there(store, everything, now_ns + 11 * S) == [name for name in everything if name != goes]


@pytest_twisted.ensureDeferred
async def test_an_entry_that_grows_alone_in_the_largest_network_displaces_one_of_the_next(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    small, large = len(make_entry("a").to_json()) + 256, len(make_entry("a", servers=MANY).to_json()) + 256
    store = opened(store_url, limits=StoreLimits(client_bytes=large + 2 * small))
    half = make_entry("growing", servers=MANY[:32])
    await store.put(half, now_ns, at(1))
    for n, name in enumerate(("older", "newer", "last")):
        await store.put(make_entry(name), now_ns + n * S, at(2 + n))
    assert await store.put(make_entry("growing", 1, servers=MANY), now_ns + 5 * S, at(1)) is False
    left = await there(store, ["growing", "older", "newer", "last"], now_ns + 6 * S)
    assert left[0] == "growing" and len(left) == 3


@pytest_twisted.ensureDeferred
async def test_an_entry_that_grows_does_not_displace_itself_though_it_is_the_oldest(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    small, large = len(make_entry("a").to_json()) + 256, len(make_entry("a", servers=MANY).to_json()) + 256
    store = opened(store_url, limits=StoreLimits(client_bytes=large + small))
    for n, name in enumerate(("growing", "second", "third")):
        await store.put(make_entry(name), now_ns + n * S, at(1))
    assert await store.put(make_entry("growing", 1, servers=MANY), now_ns + 5 * S, at(1)) is False
    assert await there(store, ["growing", "second", "third"], now_ns + 6 * S) == ["growing", "third"]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest_twisted.ensureDeferred
async def test_after_limits_were_lowered_each_write_evicts_some_until_what_is_there_fits(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    """All at once would hold up every other operation: of a million entries, for minutes."""
    url = f"sqlite:{tmp_path / 'entries'}" if kind == "sqlite" else request.getfixturevalue("redis_url") + "/3"
    store = opened(url)
    names = [f"key {n}" for n in range(180)]
    await defer.gatherResults([store.put(make_entry(name), now_ns, at(1)) for name in names])
    await store.close()
    store = opened(url, limits=StoreLimits(clients=20, tombstones=20))
    counts, tombs = [], []
    for n in range(4):
        new = make_entry(f"new {n}")
        assert await store.put(new, now_ns + n * S, at(2)) is True
        assert await store.get(new.static, now_ns + n * S) == new
        live = await there(store, [*names, *(f"new {one}" for one in range(n + 1))], now_ns + n * S)
        counts.append(len(live))
        hints = [await outcome(store.get(make_entry(name).static, now_ns + n * S)) for name in names]
        tombs.append(sum(isinstance(hint, tuple) and hint[1] == 1 for hint in hints))
    assert counts == [180 + 1 - 64, 180 + 2 - 128, 20, 20]
    assert tombs == [20] * 4
    await store.close()
    store = opened(url, limits=StoreLimits(clients=20, tombstones=5))
    for n, left in enumerate((20 + 1 - 8, 20 + 2 - 16, 5)):
        await store.put(make_entry(f"more {n}"), now_ns + (5 + n) * S, at(3))
        known = [*names, *(f"new {one}" for one in range(4)), *(f"more {one}" for one in range(3))]
        hints = [await outcome(store.get(make_entry(name).static, now_ns + (5 + n) * S)) for name in known]
        assert sum(isinstance(hint, tuple) and hint[1] == 1 for hint in hints) == left


@pytest_twisted.ensureDeferred
async def test_an_evicted_relay_leaves_every_list_at_once(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(relays=1))
    gone = make_entry("gone", address="10.0.0.1:80", version="0.0.1+messaging")
    await store.put(gone, now_ns, at(1))
    await store.put(make_entry("new", address="10.0.0.1:80"), now_ns + S, at(1))
    assert await store.available_keys(5, now_ns + S, "messaging") == []
    assert await store.available_servers(5, now_ns + S, "messaging") == []
    assert await store.servers_of([gone.static.raw], now_ns + S, "messaging") == []


# --- reads -------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_of_entries_read_in_one_hour_the_one_posted_first_goes(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=4))
    names = [f"key {n}" for n in (3, 1, 2, 0)]
    for n, name in enumerate(names):
        await store.put(make_entry(name), now_ns + n * S, at(1))
    assert await there(store, names[::-1], now_ns + 5 * S) == names[::-1]
    for n in range(2):  # the first one writes the reads down; both are of the network, which has the most
        await store.put(make_entry(f"new {n}"), now_ns + (20 + n) * S, at(1))
        assert await there(store, names, now_ns + (20 + n) * S) == names[1:]
    await store.put(make_entry("another"), now_ns + 40 * S, at(1))
    assert await there(store, [*names, "new 0", "new 1", "another"], now_ns + 41 * S) == [*names[1:], "another"]


@pytest_twisted.ensureDeferred
async def test_an_entry_that_was_read_and_is_posted_again_still_counts_as_read(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=2))
    await store.put(make_entry("read"), now_ns, at(1))
    assert await there(store, ["read"], now_ns) == ["read"]
    await store.put(make_entry("read", 1), now_ns + 20 * S, at(1))  # writes the read down
    await store.put(make_entry("read", 2), now_ns + 21 * S, at(1))
    await store.put(make_entry("never"), now_ns + 22 * S, at(1))
    await store.put(make_entry("new"), now_ns + 23 * S, at(1))
    assert await there(store, ["read", "never", "new"], now_ns + 24 * S) == ["read", "new"]


@pytest_twisted.ensureDeferred
async def test_a_read_that_is_written_down_after_its_entry_has_gone_counts_for_nothing(
    store_url: str, opened: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=2, tombstones=2))
    await store.put(make_entry("opener"), now_ns, at(1))
    await store.put(make_entry("read"), now_ns, at(1))
    assert await there(store, ["opener"], now_ns + S) == ["opener"]
    await store.put(make_entry("opener", 1), now_ns + 2 * S, at(1))  # takes what was read up to here
    assert await there(store, ["read"], now_ns + 3 * S) == ["read"]
    await store.put(make_entry("next"), now_ns + 4 * S, at(1))  # and "read" has gone before its read is noted
    await store.put(make_entry("opener", 2), now_ns + 20 * S, at(1))
    await store.put(make_entry("other"), now_ns + 21 * S, at(1))
    assert await there(store, ["read", "next"], now_ns + 22 * S) == []
    # Tombstones are forgotten in the order in which they were made, whatever was read; here there is room for two.
    await store.put(make_entry("last"), now_ns + 23 * S, at(1))
    hints = [await outcome(store.get(make_entry(name).static, now_ns + 24 * S)) for name in ("read", "next")]
    assert hints == [(EntryNotFound, None, None), (EntryNotFound, 1, make_entry("next").timestamp)]


# --- tombstones --------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_tombstones_of_relays_and_of_clients_have_a_limit_each(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(clients=1, relays=1, tombstones=1))
    for n in range(2):
        await store.put(make_entry(f"client {n}"), now_ns + n * S, at(1))
        await store.put(make_entry(f"relay {n}", address="10.0.0.1:80"), now_ns + n * S, at(1))
    for name in ("client 0", "relay 0"):
        assert (await outcome(store.get(make_entry(name).static, now_ns + 2 * S)))[1] == 1


@pytest_twisted.ensureDeferred
async def test_a_tombstone_counts_the_same_whatever_its_entry_was_like(
    store_url: str, opened: Any, make_entry: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(tombstones=4, client_ttl_s=100.0))
    for n in range(2):
        await store.put(make_entry(f"large {n}", version="0.1.0", servers=MANY), now_ns + n * S, at(1))
    for n in range(3):
        await store.put(make_entry(f"small {n}", version="0.1.0"), now_ns + (10 + 10 * n) * S, at(2))
    for n in range(4):  # stores tidy up when something is written; each of the small ones has a moment of its own
        await store.put(make_entry(f"tidy {n}"), now_ns + (101 + 10 * n) * S, at(3))
    hints = []
    for name in ("large 0", "large 1", "small 0", "small 1", "small 2"):
        hints.append((await outcome(store.get(make_entry(name).static, now_ns + 150 * S)))[1])
    assert hints == [1, 1, None, 1, 1]


# --- numbers -----------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_in_redis_the_highest_sequence_is_followed_by_0(
    redis_url: str, opened: Any, reactor: Any, make_entry: Any, now_ns: int
) -> None:
    store, first = opened(f"{redis_url}/3"), make_entry("alice")
    await store.put(first, now_ns)
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/3"), reactor)
    await by_hand.call("HSET", f"dmsg:entry:{first.static}", "s", str(2**64 - 1))
    await by_hand.close()
    assert await outcome(store.put(make_entry("alice", 1), now_ns)) is WrongSequence
    assert await outcome(store.put(make_entry("alice", 0), now_ns)) is WrongTime
    assert await store.put(make_entry("alice", 0, timestamp=first.timestamp + 1), now_ns) is False


@pytest_twisted.ensureDeferred
async def test_a_redis_that_has_reached_its_maxmemory_still_renews_and_evicts(
    redis_url: str, opened: Any, reactor: Any, make_entry: Any, there: Any, now_ns: int
) -> None:
    store = opened(f"{redis_url}/3", limits=StoreLimits(clients=3))
    names = [f"key {n}" for n in range(3)]
    for n, name in enumerate(names):
        await store.put(make_entry(name), now_ns + n * S, at(1))
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/3"), reactor)
    try:
        await by_hand.call("CONFIG", "SET", "maxmemory", 1000)
        assert await store.put(make_entry("key 0", 1), now_ns + 5 * S, at(1)) is False
        assert await store.put(make_entry("new"), now_ns + 6 * S, at(1)) is True
    finally:
        await by_hand.call("CONFIG", "SET", "maxmemory", 0)
        await by_hand.close()
    assert await there(store, [*names, "new"], now_ns + 7 * S) == ["key 0", "key 2", "new"]


@pytest_twisted.ensureDeferred
async def test_a_redis_that_takes_no_writes_still_lists_what_is_there(
    redis_url: str, opened: Any, reactor: Any, make_entry: Any, now_ns: int
) -> None:
    """As one does whose disk is full (MISCONF), one without replicas that it must have, and a replica."""
    store = opened(f"{redis_url}/3")
    early, late = (make_entry(name, address="10.0.0.1:80") for name in ("early", "late"))
    await store.put(early, now_ns)
    await store.put(late, now_ns + 100 * S)
    by_hand = RedisConnection(RedisAddress.parse(f"{redis_url}/3"), reactor)
    try:
        await by_hand.call("CONFIG", "SET", "min-replicas-to-write", 1)
        assert await outcome(store.put(make_entry("late", 1, address="10.0.0.1:80"), now_ns)) is DiscoveryUnavailable
        for after_s, left in ((299, [early, late]), (300, [late]), (400, [])):
            at_ns = now_ns + after_s * S
            found = await store.available_servers(5, at_ns)
            assert {str(entry) for entry in found} == {str(entry) for entry in left}
            keys = await store.available_keys(5, at_ns)
            assert sorted(keys) == sorted(entry.static.raw for entry in left)
            assert await store.servers_of([early.static.raw, late.static.raw], at_ns) == left
    finally:
        await by_hand.call("CONFIG", "SET", "min-replicas-to-write", 0)
        await by_hand.close()


@pytest_twisted.ensureDeferred
async def test_a_redis_that_hangs_has_not_answered_in_time(
    redis_url: str, opened: Any, reactor: Any, make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, by_hand = opened(f"{redis_url}/3"), RedisConnection(RedisAddress.parse(f"{redis_url}/3"), reactor)
    await store.put(make_entry("alice"), now_ns)
    monkeypatch.setattr("dmsg.discovery.stores.redis.OPERATION_TIMEOUT_S", 0.1)
    await by_hand.call("CLIENT", "PAUSE", 400)
    with pytest.raises(DiscoveryUnavailable, match=r"^redis://[^@]*/3 has not answered within 0\.1 s"):
        await store.get(make_entry("alice").static, now_ns)
    monkeypatch.undo()
    assert await store.get(make_entry("alice").static, now_ns) == make_entry("alice")
    await by_hand.close()


# --- side by side ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest_twisted.ensureDeferred
async def test_the_same_operations_have_the_same_outcome_in_every_store(
    kind: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path, opened: Any, make_entry: Any, now_ns: int
) -> None:
    """Each is compared with the store in memory, at whole seconds and with five of them between two writes: Redis tells
    apart no two posts of one second, and SQLite tidies up no more often. No tombstone is displaced, because several are
    made in the same moment."""
    url = f"sqlite:{tmp_path / 'entries'}" if kind == "sqlite" else request.getfixturevalue("redis_url") + "/3"
    limits = StoreLimits(
        clients=6, relays=4, client_bytes=6000, client_ttl_s=300.0, base_client_ttl_s=900.0,
        server_ttl_s=200.0, tombstone_ttl_s=700.0,
    )  # fmt: skip
    stores = [opened("memory:", limits=limits), opened(url, limits=limits)]
    rng = random.Random(seed)
    names = [f"key {n}" for n in range(18)]
    last = dict.fromkeys(names, -1)
    kinds: set[Any] = set()

    async def same(ask: Any) -> Any:
        one, other = [await outcome(ask(store)) for store in stores]
        assert one == other
        kinds.add(one[0] if isinstance(one, tuple) else type(one) if not isinstance(one, type) else one)
        return one

    now = now_ns
    for _ in range(150):
        now += rng.randrange(5, 60) * S
        name = rng.choice(names)
        entry = make_entry(
            name,
            rng.choice([last[name] + 1] * 6 + [0, last[name] + 2]) if rng.random() < 0.9 else 0,
            timestamp=now + rng.choice([0] * 8 + [-(10**6) * S]),
            address=rng.choice(["", "", "10.0.0.1:80"]),
            available=rng.choice([0, 5, 5]),
            version=rng.choice(["0.0.1", "0.1.0", "0.0.1+messaging"]),
            servers=MANY[: rng.choice([0, 1, 8, 20])],
        )
        host = rng.choice(["", at(1), at(1), at(2), at(3)])
        for _ in range(2):
            if isinstance(await same(lambda store: store.put(entry, now, host)), bool):  # noqa: B023 - called at once
                last[name] = entry.sequence
                break
            entry = make_entry(name, 0, timestamp=now)  # perhaps the key was forgotten
        read = rng.choice(names)
        await same(lambda store: store.get(make_entry(read).static, now))  # noqa: B023
        for protocol in ("dmsg", "messaging"):
            keys = [sorted(await store.available_keys(50, now, protocol)) for store in stores]
            assert keys[0] == keys[1]
            every = [make_entry(one).static.raw for one in names]
            assert len({str(await store.servers_of(every, now, protocol)) for store in stores}) == 1
    for name in names:
        await same(lambda store: store.get(make_entry(name).static, now))  # noqa: B023
    assert {bool, EntryNotFound, WrongSequence, WrongTime} <= kinds
