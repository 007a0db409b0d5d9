"""The draw of servers: by weight, each with a chance, and evenly without ranks."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import pytest_twisted
from zope.interface import implementer

from dmsg.discovery import listing as module
from dmsg.discovery.entry import Entry
from dmsg.discovery.listing import Roster, ServerListing
from dmsg.discovery.ranks import Ranks, weight
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.interfaces import IEntryStore

NS = 10**9


def ranks_of(scores: dict[bytes, int], now_ns: int, lifetime_s: int = 1000) -> Ranks:
    issuer: Any = None
    return Ranks(now_ns // NS, lifetime_s, 500, issuer, scores, b"", b"")


def assert_share(count: int, draws: int, share: float) -> None:
    """Within five standard deviations of what it should be: with a fixed seed, this either always holds or never."""
    deviation = math.sqrt(draws * share * (1 - share))
    assert abs(count - draws * share) <= 5 * deviation, (count, draws * share, deviation)


# --- the draw itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 1], ids=["sorted", "one by one"])
def test_each_comes_first_as_often_as_its_weight_says(count: int) -> None:
    weights = [8.0, 1.0, 1.0, 0.125, 2.0, 1.0, 1.0, 0.5, 4.0]
    keys = [b"%d" % at for at in range(len(weights))]
    roster, dice = Roster(keys, weights), random.Random(1)
    draws = 20_000
    firsts = Counter(roster.draw(count, dice)[0] for _ in range(draws))
    for key, each in zip(keys, weights, strict=True):
        assert_share(firsts[key], draws, each / sum(weights))


@pytest.mark.parametrize("wanted", [2, 3], ids=["one by one", "sorted"])
def test_each_comes_second_as_a_draw_without_replacement_has_it(wanted: int) -> None:
    weights = [8.0, *[0.5] * 16]
    keys = [b"%d" % at for at in range(17)]
    roster, dice = Roster(keys, weights), random.Random(2)
    draws = 20_000
    seconds = Counter(roster.draw(wanted, dice)[1] for _ in range(draws))
    # the heavy one is second when one of the sixteen was first
    assert_share(seconds[keys[0]], draws, 0.5 * 8.0 / 15.5)


def test_a_draw_has_each_key_once() -> None:
    keys = [b"%d" % at for at in range(300)]
    roster, dice = Roster(keys, [weight(at * 3) for at in range(300)]), random.Random(3)
    assert sorted(roster.draw(500, dice)) == sorted(keys)
    some = roster.draw(20, dice)
    assert len(set(some)) == len(some) == 20
    assert Roster([], []).draw(5, dice) == []


def test_the_worst_of_all_still_gets_a_64th_of_an_equal_share() -> None:
    relays, draws = 10, 200_000
    weights = [weight(0), *[weight(1000)] * (relays - 1)]
    roster, dice = Roster([b"%d" % at for at in range(relays)], weights), random.Random(4)
    firsts = sum(roster.draw(1, dice) == [b"0"] for _ in range(draws))
    assert_share(firsts, draws, weights[0] / sum(weights))
    assert weights[0] / sum(weights) >= 1 / 64 / relays
    assert firsts >= draws / 64 / relays * 0.8


# --- with the stores -------------------------------------------------------------------------------------------------


@pytest.fixture
def put(store: Any, make_entry: Any, now_ns: int) -> Any:
    async def put(count: int, **options: Any) -> list[Entry]:
        entries = [make_entry(f"relay {at}", address=f"10.0.{at}.1:80", **options) for at in range(count)]
        for entry in entries:
            await store.put(entry, now_ns)
        return entries

    return put


@pytest_twisted.ensureDeferred
async def test_better_ones_come_first_and_worse_ones_come_too(store: Any, put: Any, now_ns: int) -> None:
    entries = await put(10)
    best, worst = entries[0].static.raw, entries[1].static.raw
    ranks = ranks_of({best: 1000, worst: 0}, now_ns)
    listing = ServerListing(store, random.Random(5), lambda: ranks)
    draws = 400
    firsts: Counter[bytes] = Counter()
    for _ in range(draws):
        listed = await listing.servers(64, now_ns)
        assert {entry.static for entry in listed} == {entry.static for entry in entries}
        firsts[listed[0].static.raw] += 1
    total = 8 + 0.125 + 8
    assert_share(firsts[best], draws, 8 / total)
    assert_share(firsts[worst], draws, 0.125 / total)


@pytest_twisted.ensureDeferred
async def test_a_short_list_is_drawn_from_all_of_them(store: Any, put: Any, now_ns: int) -> None:
    entries = await put(30)
    best = entries[17].static.raw
    ranks = ranks_of({entry.static.raw: 500 for entry in entries} | {best: 1000}, now_ns)
    listing = ServerListing(store, random.Random(6), lambda: ranks)
    draws = 300
    seen: Counter[bytes] = Counter()
    for _ in range(draws):
        listed = await listing.servers(1, now_ns)
        assert len(listed) == 1
        seen[listed[0].static.raw] += 1
    assert_share(seen[best], draws, 8 / 37)
    assert len(seen) > 20


@pytest.mark.parametrize("case", ["not all are listed", "two in each network", "a sample of a long store"])
@pytest_twisted.ensureDeferred
async def test_a_rank_is_weighed_once(case: str, make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryStore(random=random.Random(1))
    if case == "a sample of a long store":
        monkeypatch.setattr(module, "SAMPLE_LIMIT", 16)
    scores = {}
    for at in range(60):
        address = f"10.0.{at // 2}.{at % 2 + 1}:80" if case == "two in each network" else f"10.0.{at}.1:80"
        entry = make_entry(f"relay {at}", address=address)
        await memory.put(entry, now_ns)
        scores[entry.static.raw] = 500 if at % 2 else 0
    ranks = ranks_of(scores, now_ns)
    listing = ServerListing(memory, random.Random(11), lambda: ranks)
    draws = bad = 0
    while draws < 600:
        listed = await listing.servers(8, now_ns + draws % 2 * 2 * NS)  # each time from a new roster
        draws, bad = draws + 1, bad + (scores[listed[0].static.raw] == 0)
    # as many bad ones as good ones, so they come first as often as one of each would
    assert_share(bad, draws, weight(0) / (weight(0) + weight(500)))


@pytest_twisted.ensureDeferred
async def test_a_rank_is_weighed_behind_the_first_place_too(make_entry: Any, now_ns: int) -> None:
    memory, scores = MemoryStore(random=random.Random(1)), {}
    for at in range(12):
        entry = make_entry(f"relay {at}", address=f"10.0.{at}.1:80")
        await memory.put(entry, now_ns)
        if at < 8:
            scores[entry.static.raw] = 0 if at else 1000
    ranks = ranks_of(scores, now_ns)
    listing = ServerListing(memory, random.Random(12), lambda: ranks)
    draws = best = 0
    while draws < 4000:
        keys = [entry.static.raw for entry in await listing.servers(64, now_ns)]
        ahead = keys[: keys.index(entry.static.raw)]  # of the last one, which has no rank
        draws, best = draws + 1, best + any(scores.get(key) for key in ahead)
    assert_share(best, draws, weight(1000) / (weight(1000) + weight(500)))


@pytest_twisted.ensureDeferred
async def test_without_ranks_or_with_old_ones_all_are_equal(store: Any, put: Any, now_ns: int) -> None:
    entries = await put(5)
    stale = ranks_of({entries[0].static.raw: 1000}, now_ns - 1000 * NS)
    for ranks in (None, stale):
        listing = ServerListing(store, random.Random(70), lambda ranks=ranks: ranks)
        firsts = Counter([(await listing.servers(5, now_ns))[0].static for _ in range(1000)])
        for entry in entries:
            assert_share(firsts[entry.static], 1000, 1 / 5)


@pytest_twisted.ensureDeferred
async def test_ranks_list_no_relay_that_is_gone_or_unknown(store: Any, put: Any, make_entry: Any, now_ns: int) -> None:
    entries = await put(3)
    gone = make_entry("relay 0", 1, address="10.0.0.1:80", available=0)
    await store.put(gone, now_ns)
    client = make_entry("client")
    await store.put(client, now_ns)
    named = {entry.static.raw: 1000 for entry in [*entries, client]} | {b"\x02" + bytes(32): 1000}
    listing = ServerListing(store, random.Random(8), lambda: ranks_of(named, now_ns))
    listed = await listing.servers(64, now_ns)
    assert {entry.static for entry in listed} == {entry.static for entry in entries[1:]}
    later = now_ns + 301 * NS
    assert await ServerListing(store, random.Random(8), lambda: ranks_of(named, later)).servers(64, later) == []


@pytest_twisted.ensureDeferred
async def test_servers_for_ever_are_drawn_too(store_url: str, opened: Any, make_entry: Any, now_ns: int) -> None:
    from dmsg.discovery.stores.rules import StoreLimits

    store = opened(store_url, limits=StoreLimits(server_ttl_s=None))
    relay = make_entry("relay", address="10.0.0.1:80")
    await store.put(relay, now_ns)
    listing = ServerListing(store, random.Random(9), lambda: ranks_of({relay.static.raw: 900}, now_ns))
    assert await listing.servers(5, now_ns) == [relay]


@pytest_twisted.ensureDeferred
async def test_keys_and_entries_are_as_asked(store: Any, put: Any, make_entry: Any, now_ns: int) -> None:
    entries = await put(6)
    await store.put(make_entry("relay 5", 1, address="10.0.0.5:80", available=0), now_ns)
    keys = await store.available_keys(100, now_ns)
    assert sorted(keys) == sorted(entry.static.raw for entry in entries[:5])
    some = await store.available_keys(2, now_ns)
    assert len(some) == 2 and set(some) <= set(keys)
    asked = [entries[4].static.raw, entries[5].static.raw, b"\x03" + bytes(32), entries[1].static.raw]
    if isinstance(store, MemoryStore):
        asked.pop(2)  # the other stores see texts, this one keys
    assert await store.servers_of(asked, now_ns) == [entries[4], entries[1]]
    assert await store.servers_of([], now_ns) == []


# --- bounds ----------------------------------------------------------------------------------------------------------


class CountingStore(MemoryStore):
    asked = 0

    def available_keys(self, limit: int, now_ns: int, protocol: str = "dmsg") -> Any:
        self.asked += 1
        self.limit = limit
        return super().available_keys(limit, now_ns)


@pytest_twisted.ensureDeferred
async def test_a_long_roster_is_used_again_for_a_while(
    make_entry: Any, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_FROM", 4)
    store = CountingStore(random=random.Random(1))
    names = [f"relay {at}" for at in range(6)]
    entries = [make_entry(name, address=f"10.0.{at}.1:80") for at, name in enumerate(names)]
    for entry in entries[:3]:
        await store.put(entry, now_ns)
    ranks = ranks_of({}, now_ns)
    listing = ServerListing(store, random.Random(1), lambda: ranks)
    for _ in range(3):
        assert len(await listing.servers(9, now_ns)) == 3
    assert store.asked == 1, "none of it has changed"
    for entry in entries[3:]:
        await store.put(entry, now_ns)
    for _ in range(5):
        assert len(await listing.servers(9, now_ns + NS)) == 6
    assert store.asked == 2
    # one that is full is left out at once, one that is new comes when the roster is made again
    await store.put(make_entry("relay 0", 1, address="10.0.0.1:80", available=0), now_ns)
    assert len(await listing.servers(9, now_ns + NS)) == 5
    assert len(await listing.servers(9, now_ns + 4 * NS)) == 5
    assert store.asked == 3
    ranks = ranks_of({}, now_ns)  # another document: made again at once
    await listing.servers(9, now_ns + 4 * NS)
    assert store.asked == 4
    assert store.limit == module.ROSTER_LIMIT == 20_000


@implementer(IEntryStore)
class PlainStore:
    """An embedder's, which knows of no ranks."""

    def __init__(self, inner: MemoryStore) -> None:
        self.available_servers = inner.available_servers


@pytest_twisted.ensureDeferred
async def test_what_a_plain_store_draws_is_put_in_order(make_entry: Any, now_ns: int) -> None:
    inner = MemoryStore(random=random.Random(1))
    entries = [make_entry(f"relay {at}", address=f"10.0.{at}.1:80") for at in range(4)]
    for entry in entries:
        await inner.put(entry, now_ns)
    best = entries[2].static.raw
    store: Any = PlainStore(inner)
    ranks = ranks_of({entry.static.raw: 500 for entry in entries} | {best: 1000}, now_ns)
    listing = ServerListing(store, random.Random(1), lambda: ranks)
    firsts = Counter([(await listing.servers(9, now_ns))[0].static.raw for _ in range(500)])
    assert_share(firsts[best], 500, 8 / 11)
    assert len(await listing.servers(2, now_ns)) == 2
