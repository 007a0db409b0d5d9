"""One conformance test for every store: the seed's five cases, expiry and tombstones, bounds; and SIGKILL."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer
from zope.interface.verify import verifyObject

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry
from dmsg.discovery.store import StoreLimits, open_store, shielded
from dmsg.discovery.store_redis import RedisStore
from dmsg.errors import (
    ConfigError,
    DiscoveryUnavailable,
    EntryNotFound,
    NonZeroSequence,
    StoreFull,
    WrongSequence,
    WrongTime,
)
from dmsg.interfaces import IEntryStore

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
async def test_an_iteration_replaces_the_entry(store: Any, make_entry: Any, now_ns: int) -> None:
    await store.put(make_entry("alice"), now_ns)
    for sequence in (1, 2, 3):
        newer = make_entry("alice", sequence, servers=("relay",))
        assert await store.put(newer, now_ns) is False
        assert await store.get(newer.static, now_ns) == newer


@pytest_twisted.ensureDeferred
async def test_available_servers_are_drawn_up_to_a_limit(store: Any, make_entry: Any, now_ns: int) -> None:
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
    assert all(entry.server.available_connections > 0 for entry in everything)
    drawn: Counter[Any] = Counter()
    for _ in range(40):
        some = await store.available_servers(5, now_ns)
        assert len(some) == len({entry.static for entry in some}) == 5
        drawn.update(entry.static for entry in some)
    assert len(drawn) == 13  # nobody is left out for ever


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


@pytest_twisted.ensureDeferred
async def test_a_server_that_becomes_full_is_no_longer_available(store: Any, make_entry: Any, now_ns: int) -> None:
    await store.put(make_entry("relay", 0, address="10.0.0.1:80"), now_ns)
    await store.put(make_entry("relay", 1, address="10.0.0.1:80", available=0), now_ns)
    assert await store.available_servers(5, now_ns) == []
    await store.put(make_entry("relay", 2, address="10.0.0.1:80", available=1), now_ns)
    assert len(await store.available_servers(5, now_ns)) == 1
    await store.put(make_entry("relay", 3), now_ns)  # now only a client
    assert await store.available_servers(5, now_ns) == []


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
async def test_clients_do_not_expire(store: Any, make_entry: Any, now_ns: int) -> None:
    alice = make_entry("alice")
    await store.put(alice, now_ns)
    assert await store.get(alice.static, now_ns + 10**6 * S) == alice


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


@pytest_twisted.ensureDeferred
async def test_a_full_store_refuses_new_keys_only(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened(store_url, limits=StoreLimits(entries=3, tombstones=0))
    refusals = 0
    for n in range(8):
        try:
            await store.put(make_entry(f"client {n}"), now_ns)
        except StoreFull:
            refusals += 1
    assert refusals >= 4  # one more or less: Redis counts its own keys, too
    assert await store.put(make_entry("client 0", 1), now_ns) is False


@pytest_twisted.ensureDeferred
async def test_tombstones_in_memory_are_bounded(opened: Any, make_entry: Any, now_ns: int) -> None:
    store = opened("memory:", limits=StoreLimits(tombstones=2))
    for n in range(5):
        await store.put(make_entry(f"relay {n}", address="10.0.0.1:80"), now_ns + n)
    later = now_ns + 400 * S
    hints = []
    for n in range(5):
        error = await refused(EntryNotFound, store.get(make_entry(f"relay {n}").static, later))
        hints.append(error.next_sequence)
    assert hints == [None, None, None, 1, 1]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest_twisted.ensureDeferred
async def test_tombstones_are_forgotten_in_the_end(
    kind: str, opened: Any, make_entry: Any, now_ns: int, tmp_path: Path
) -> None:
    url = "memory:" if kind == "memory" else f"sqlite:{tmp_path / 'x'}"
    store = opened(url, limits=StoreLimits(tombstone_ttl_s=1000.0))
    await store.put(make_entry("relay", address="10.0.0.1:80"), now_ns)
    for seconds in (400, 800, 1250):
        await store.put(make_entry(f"other {seconds}"), now_ns + seconds * S)
        error = await refused(EntryNotFound, store.get(make_entry("relay").static, now_ns + seconds * S))
        assert error.next_sequence == 1
    await store.put(make_entry("other"), now_ns + 1500 * S)
    error = await refused(EntryNotFound, store.get(make_entry("relay").static, now_ns + 1500 * S))
    assert error.next_sequence is None


@pytest_twisted.ensureDeferred
async def test_a_cancelled_put_is_written_all_the_same(store: Any, make_entry: Any, now_ns: int) -> None:
    entry = make_entry("alice")
    asked = store.put(entry, now_ns)
    asked.addErrback(lambda failure: failure.trap(defer.CancelledError))
    asked.cancel()
    while True:
        try:
            assert await store.get(entry.static, now_ns) == entry
            break
        except EntryNotFound:
            continue


@pytest_twisted.ensureDeferred
async def test_a_shield_passes_outcomes_on() -> None:
    assert await shielded(defer.succeed(3)) == 3
    await refused(EntryNotFound, shielded(defer.fail(EntryNotFound())))
    inner: defer.Deferred[int] = defer.Deferred()
    outer = shielded(inner)
    outer.cancel()
    await refused(defer.CancelledError, outer)
    inner.errback(EntryNotFound())  # is nobody's any more, and no unhandled error either


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


@pytest_twisted.ensureDeferred
async def test_two_stores_share_a_file(opened: Any, tmp_path: Path, make_entry: Any, now_ns: int) -> None:
    one, two = (opened(f"sqlite:{tmp_path / 'entries'}") for _ in range(2))
    await one.put(make_entry("alice"), now_ns)
    await two.put(make_entry("alice", 1), now_ns)
    await refused(WrongSequence, one.put(make_entry("alice", 1, timestamp=now_ns + 9), now_ns))
    assert (await one.get(make_entry("alice").static, now_ns)).sequence == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path, reactor: Any) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one by nobody" * 20)
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
    monkeypatch.setattr("dmsg.discovery.store_sqlite.QUEUE_LIMIT", 3)
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
from dmsg.discovery.store import open_store

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
    monkeypatch.setattr("dmsg.discovery.store_redis.OPERATION_TIMEOUT_S", 0.2)
    store = RedisStore("127.0.0.1", 1, 0, reactor)
    await refused(DiscoveryUnavailable, store.get(make_entry("alice").static, now_ns))
    await refused(DiscoveryUnavailable, store.put(make_entry("alice"), now_ns))
    await store.close()


@pytest_twisted.ensureDeferred
async def test_two_stores_share_a_redis(redis_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    one, two = opened(redis_url + "/1"), opened(redis_url + "/1")
    await one.put(make_entry("alice"), now_ns)
    await two.put(make_entry("alice", 1), now_ns)
    await refused(WrongSequence, one.put(make_entry("alice", 1, timestamp=now_ns + 9), now_ns))
    elsewhere = opened(redis_url + "/2")
    await refused(EntryNotFound, elsewhere.get(make_entry("alice").static, now_ns))
