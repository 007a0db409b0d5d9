"""The list of servers is drawn from what is remembered: what is put shows at once, and what is remembered is bounded."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.discovery import relay_cache
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.discovery.listing import CACHED_FROM, NETWORK_LIMIT, ROSTER_LIFETIME_NS, ROSTER_RENEWED_NS, ServerListing
from dmsg.discovery.relay_cache import RELAY_LIMIT_BYTES, RELAYS_HELD, RelayCache
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import StoreLimits

NS = 10**9
sync = pytest_twisted.ensureDeferred


@pytest.fixture
def relay(make_entry: Any) -> Any:
    """``relay(number, sequence, …)``: the entry of a relay in a network of its own."""

    def make(number: int, sequence: int = 0, **options: Any) -> Any:
        options.setdefault("address", f"10.{number >> 8}.{number & 255}.1:80")
        return make_entry(f"relay {number}", sequence, **options)

    return make


async def addresses(listing: ServerListing, now_ns: int, limit: int = 64) -> list[str]:
    return [entry.server.address for entry in await listing.servers(limit, now_ns) if entry.server is not None]


# --- what is put -------------------------------------------------------------------------------------------------------


@sync
async def test_what_is_put_shows_in_the_next_list(store: Any, relay: Any, make_entry: Any, now_ns: int) -> None:
    """All at one moment, so that no time limit helps: a new relay, one full, one moved, one that is a client now."""
    listing = ServerListing(store, random.Random(1))
    assert await addresses(listing, now_ns) == []
    for number in range(4):
        await store.put(relay(number), now_ns)
        assert len(await addresses(listing, now_ns)) == number + 1
    await store.put(relay(0, 1, available=0), now_ns)
    assert sorted(await addresses(listing, now_ns)) == ["10.0.1.1:80", "10.0.2.1:80", "10.0.3.1:80"]
    await store.put(relay(1, 1, address="20.0.0.1:80"), now_ns)
    assert sorted(await addresses(listing, now_ns)) == ["10.0.2.1:80", "10.0.3.1:80", "20.0.0.1:80"]
    await store.put(make_entry("relay 2", 1), now_ns)
    assert sorted(await addresses(listing, now_ns)) == ["10.0.3.1:80", "20.0.0.1:80"]
    await store.put(relay(0, 2), now_ns)
    assert sorted(await addresses(listing, now_ns)) == ["10.0.0.1:80", "10.0.3.1:80", "20.0.0.1:80"]
    await store.put(relay(0, 3, version="0.0.1+messaging"), now_ns)
    assert sorted(await addresses(listing, now_ns)) == ["10.0.3.1:80", "20.0.0.1:80"], "it speaks something else now"
    newest = relay(3, 1, available=7)
    await store.put(newest, now_ns)
    assert newest in await listing.servers(64, now_ns), "the entry itself is the newest"


@sync
async def test_a_relay_that_moves_counts_for_its_new_network(store: Any, relay: Any, now_ns: int) -> None:
    listing = ServerListing(store, random.Random(1))
    for number in range(NETWORK_LIMIT + 4):
        await store.put(relay(number), now_ns)
    assert len(await addresses(listing, now_ns)) == NETWORK_LIMIT + 4
    for number in range(NETWORK_LIMIT + 4):
        await store.put(relay(number, 1, address=f"20.0.0.{number}:80"), now_ns)
    assert len(await addresses(listing, now_ns)) == NETWORK_LIMIT


@sync
async def test_in_a_long_list_one_that_is_full_is_gone_at_once_and_a_new_one_comes_soon(
    relay: Any, now_ns: int
) -> None:
    store = MemoryStore(random=random.Random(7))
    count = CACHED_FROM + 1
    for number in range(count):
        await store.put(relay(number), now_ns)
    listing = ServerListing(store, random.Random(1))
    assert len(await addresses(listing, now_ns, 1000)) == count
    await store.put(relay(5, 1, available=0), now_ns)
    assert "10.0.5.1:80" not in await addresses(listing, now_ns, 1000)
    await store.put(relay(count), now_ns)
    assert len(await addresses(listing, now_ns + ROSTER_LIFETIME_NS, 1000)) == count


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@sync
async def test_what_another_process_puts_shows_within_a_second(
    kind: str, request: pytest.FixtureRequest, tmp_path: Any, opened: Any, relay: Any, now_ns: int
) -> None:
    url = f"sqlite:{tmp_path / 'shared'}" if kind == "sqlite" else request.getfixturevalue("redis_url") + "/3"
    ours, theirs = opened(url), opened(url)
    await ours.put(relay(0), now_ns)
    await ours.put(relay(1), now_ns)
    listing = ServerListing(ours, random.Random(1))
    assert len(await addresses(listing, now_ns)) == 2
    await theirs.put(relay(0, 1, available=0), now_ns)
    await theirs.put(relay(2), now_ns)
    assert sorted(await addresses(listing, now_ns + ROSTER_LIFETIME_NS)) == ["10.0.1.1:80", "10.0.2.1:80"]
    assert ROSTER_LIFETIME_NS <= NS


@sync
async def test_an_entry_whose_time_is_over_is_gone_within_a_second(
    store_url: str, opened: Any, relay: Any, now_ns: int
) -> None:
    store = opened(store_url, limits=StoreLimits(server_ttl_s=10.0))
    await store.put(relay(0), now_ns)
    await store.put(relay(1), now_ns + 5 * NS)
    listing = ServerListing(store, random.Random(1))
    assert len(await addresses(listing, now_ns + 9 * NS + NS // 2)) == 2
    assert await addresses(listing, now_ns + 10 * NS + NS // 2) == ["10.0.1.1:80"]
    await store.put(relay(0, 1), now_ns + 10 * NS + NS // 2)
    assert len(await addresses(listing, now_ns + 10 * NS + NS // 2)) == 2


# --- the draw ----------------------------------------------------------------------------------------------------------


@sync
async def test_each_answer_is_drawn_anew_and_all_come(store: Any, relay: Any, now_ns: int) -> None:
    for number in range(100):
        await store.put(relay(number), now_ns)
    listing = ServerListing(store, random.Random(3))
    seen: Counter[str] = Counter()
    answers = [await addresses(listing, now_ns, 16) for _ in range(100)]
    for answer in answers:
        assert len(set(answer)) == 16
        seen.update(answer)
    assert len({tuple(answer) for answer in answers}) == 100
    assert len(seen) == 100 and max(seen.values()) <= 40, "16 each if all are equal"


@sync
async def test_networks_come_before_relays_in_every_answer(memory: Any, make_entry: Any, now_ns: int) -> None:
    for number in range(40):
        await memory.put(make_entry(f"many {number}", address=f"66.0.0.{number}:80"), now_ns)
    for number in range(20):
        await memory.put(make_entry(f"two {number}", address=f"20.0.{number // 2}.{number}:80"), now_ns)
    listing = ServerListing(memory, random.Random(4))
    firsts: Counter[bool] = Counter()
    for _ in range(300):
        listed = await addresses(listing, now_ns)
        networks = [address.rpartition(".")[0] for address in listed]
        assert len(listed) == NETWORK_LIMIT + 20
        assert len(set(networks[:11])) == 11 and len(set(networks[11:22])) == 11
        firsts[networks[0] == "66.0.0"] += 1
    assert 10 <= firsts[True] <= 50, "one of eleven networks, so 27 of 300"


@pytest.fixture
def memory() -> Any:
    return MemoryStore(random=random.Random(7))


# --- what is read while something is put ---------------------------------------------------------------------------------


class SlowStore(MemoryStore):
    """Answers to a list of servers wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(random=random.Random(7))
        self.held: list[tuple[Deferred[Any], Any]] = []
        self.slow = False

    def available_servers(self, limit: int, now_ns: int, protocol: str = "dmsg") -> Deferred[Any]:
        answer = super().available_servers(limit, now_ns)
        if not self.slow:
            return answer
        later: Deferred[Any] = Deferred()
        self.held.append((later, answer.result))
        return later

    def let_go(self) -> None:
        held, self.held = self.held, []
        for later, answer in held:
            later.callback(answer)


@sync
async def test_an_answer_of_the_store_does_not_undo_what_was_put_meanwhile(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    for number in range(3):
        await store.put(relay(number), now_ns)
    listing = ServerListing(store, random.Random(1))
    store.slow = True
    first = Deferred.fromCoroutine(addresses(listing, now_ns))
    await store.put(relay(0, 1, available=0), now_ns)
    await store.put(relay(3), now_ns)
    store.slow = False
    store.let_go()
    await first
    assert sorted(await addresses(listing, now_ns)) == ["10.0.1.1:80", "10.0.2.1:80", "10.0.3.1:80"]


@sync
async def test_one_request_renews_the_list_and_the_others_do_not_wait_for_it(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    await store.put(relay(0), now_ns)
    listing = ServerListing(store, random.Random(1))
    assert await addresses(listing, now_ns) == ["10.0.0.1:80"]
    store.slow = True
    renewing = Deferred.fromCoroutine(addresses(listing, now_ns + ROSTER_RENEWED_NS))
    assert not renewing.called and len(store.held) == 1
    others = [Deferred.fromCoroutine(addresses(listing, now_ns + ROSTER_RENEWED_NS)) for _ in range(5)]
    assert [other.result for other in others] == [["10.0.0.1:80"]] * 5
    store.slow = False
    store.let_go()
    assert await renewing == ["10.0.0.1:80"]


@sync
async def test_a_request_that_gives_up_does_not_keep_the_list_from_being_renewed(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    await store.put(relay(0), now_ns)
    listing = ServerListing(store, random.Random(1))
    await addresses(listing, now_ns)
    store.slow = True
    gone = Deferred.fromCoroutine(addresses(listing, now_ns + ROSTER_RENEWED_NS))
    gone.addErrback(lambda _: None)
    gone.cancel()
    Deferred.fromCoroutine(addresses(listing, now_ns + ROSTER_RENEWED_NS)).addErrback(lambda _: None)
    assert len(store.held) == 2, "the next one asks again"


@sync
async def test_requests_that_find_nothing_wait_for_one_answer_of_the_store(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    for number in range(3):
        await store.put(relay(number), now_ns)
    listing = ServerListing(store, random.Random(1))
    store.slow = True
    asked = [Deferred.fromCoroutine(addresses(listing, now_ns)) for _ in range(20)]
    assert len(store.held) == 1
    store.let_go()
    answers = [await one for one in asked]
    assert {tuple(sorted(answer)) for answer in answers} == {("10.0.0.1:80", "10.0.1.1:80", "10.0.2.1:80")}
    assert len({tuple(answer) for answer in answers}) > 1, "and each is drawn anew"


@sync
async def test_a_request_after_a_put_does_not_take_an_answer_from_before_it(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    await store.put(relay(0), now_ns)
    listing = ServerListing(store, random.Random(1))
    store.slow = True
    before = Deferred.fromCoroutine(addresses(listing, now_ns))
    await store.put(relay(1), now_ns)
    after = [Deferred.fromCoroutine(addresses(listing, now_ns)) for _ in range(5)]
    store.let_go()
    assert await before == ["10.0.0.1:80"]
    assert len(store.held) == 1, "one asks again, for all of them"
    store.let_go()
    for one in after:
        assert sorted(await one) == ["10.0.0.1:80", "10.0.1.1:80"]


@sync
async def test_a_failure_of_the_store_is_that_of_all_who_wait(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    await store.put(relay(0), now_ns)
    listing = ServerListing(store, random.Random(1))
    store.slow = True
    asked = [Deferred.fromCoroutine(addresses(listing, now_ns)) for _ in range(5)]
    ((waited_for, _),) = store.held
    waited_for.errback(DiscoveryUnavailable("gone"))
    for one in asked:
        with pytest.raises(DiscoveryUnavailable):
            await one
    store.slow = False
    assert await addresses(listing, now_ns) == ["10.0.0.1:80"]


@sync
async def test_when_the_one_that_asks_gives_up_another_one_asks(relay: Any, now_ns: int) -> None:
    store = SlowStore()
    await store.put(relay(0), now_ns)
    listing = ServerListing(store, random.Random(1))
    store.slow = True
    asked = [Deferred.fromCoroutine(addresses(listing, now_ns)) for _ in range(5)]
    for gone in (asked[0], asked[3]):
        gone.addErrback(lambda _: None)
        gone.cancel()
    ((_, _), (waited_for, answer)) = store.held
    waited_for.callback(answer)
    for at in (1, 2, 4):
        assert await asked[at] == ["10.0.0.1:80"]


# --- bounds ------------------------------------------------------------------------------------------------------------


@sync
async def test_what_is_remembered_is_bounded_in_number_and_bytes(
    monkeypatch: pytest.MonkeyPatch, memory: Any, relay: Any, now_ns: int
) -> None:
    monkeypatch.setattr(relay_cache, "RELAYS_HELD", 20)
    listing = ServerListing(memory, random.Random(1))
    cache = RelayCache(NS)
    memory.watch(cache.changed)
    for number in range(60):
        await memory.put(relay(number), now_ns)
        assert len(cache) <= 20
    assert len(await addresses(listing, now_ns)) == 60, "what is not remembered is asked for"
    assert RELAYS_HELD * RELAY_LIMIT_BYTES * 2 <= 8 * 1024 * 1024


@sync
async def test_a_long_entry_is_listed_but_not_remembered(memory: Any, relay: Any, now_ns: int) -> None:
    listing, cache = ServerListing(memory, random.Random(1)), RelayCache(NS)
    memory.watch(cache.changed)
    await memory.put(relay(0), now_ns)
    assert len(await addresses(listing, now_ns)) == 1
    long = relay(0, 1, client=True, servers=tuple(f"server {at}" for at in range(40)))
    assert len(long.to_json()) > RELAY_LIMIT_BYTES
    await memory.put(long, now_ns)
    assert cache.look_up([long.static.raw], now_ns) == ({}, [long.static.raw])
    assert await listing.servers(64, now_ns) == [long]
    assert await listing.servers(64, now_ns) == [long]


# --- the cache alone -----------------------------------------------------------------------------------------------------


def test_an_entry_is_given_for_its_lifetime(relay: Any, now_ns: int) -> None:
    cache, entry = RelayCache(NS), relay(0)
    key, absent = entry.static.raw, relay(1).static.raw
    cache.fill([key, absent], [entry], now_ns)
    assert cache.look_up([key, absent], now_ns + NS - 1) == ({key: entry}, [])
    assert cache.look_up([key, absent], now_ns + NS) == ({}, [key, absent])
    assert cache.look_up([key], now_ns - 1) == ({}, [key]), "the clock was set back"
    nothing = RelayCache(0)
    nothing.fill([key], [entry], now_ns)
    nothing.changed(entry, now_ns)
    assert len(nothing) == 0


def test_an_old_answer_does_not_bring_back_what_was_replaced(relay: Any, make_entry: Any, now_ns: int) -> None:
    cache, old, client = RelayCache(NS), relay(0), make_entry("relay 0", 1)
    with cache.reading():
        cache.changed(client, now_ns)
        cache.fill([old.static.raw], [old], now_ns)
    assert cache.look_up([old.static.raw], now_ns) == ({}, [])
    new = relay(1)
    with cache.reading():
        cache.changed(new, now_ns)
        cache.fill([new.static.raw], [], now_ns)
    assert cache.look_up([new.static.raw], now_ns) == ({new.static.raw: new}, [])


def test_clients_are_not_remembered(make_entry: Any, now_ns: int) -> None:
    cache = RelayCache(NS)
    for number in range(50):
        cache.changed(make_entry(f"client {number}"), now_ns)
    assert len(cache) == 0 and cache.version == 0


def test_the_version_counts_what_makes_another_roster(relay: Any, now_ns: int) -> None:
    cache = RelayCache(NS)
    steps = [
        (relay(0), 1),
        (relay(0, 1, available=3), 1),
        (relay(0, 2, available=0), 2),
        (relay(0, 3, available=0), 2),
        (relay(0, 4), 3),
        (relay(0, 5, address="20.0.0.1:80"), 4),
        (relay(0, 2), 4),  # an acknowledgement that comes late
    ]
    for entry, version in steps:
        cache.changed(entry, now_ns)
        assert cache.version == version
    cache.changed(relay(0, 6, address="20.0.0.1:80"), now_ns + NS)
    assert cache.version == 5, "it may have expired in the meantime"
