"""How many requests are answered: base clients ask once for each dial, and what one address takes, others do not lose."""

from __future__ import annotations

import random
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.task import Clock

from dmsg.discovery.entry_cache import ENTRIES_LIMIT, ENTRY_LIMIT_BYTES, EntryCache
from dmsg.http.rates import FairRate, SharedRate

from .front import CountingStore, Front

BASE = "/messaging-discovery/entry"


def test_fifteen_hundred_dials_in_a_row_are_all_answered(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    entry = make_entry("alice")
    assert place.ask(BASE, body=entry.to_json())[0] == 200
    assert place.statuses(f"{BASE}/{entry.static}", "192.0.2.1", 1_500) == {200: 1_500}


def test_addresses_that_use_up_the_total_do_not_keep_others_out(clock: Clock, make_entry: Any) -> None:
    # Numbers of the shipped limits, divided by 50.
    place = Front(
        clock, get_rate_per_s=40.0, get_burst=200.0, total_get_rate_per_s=80.0, total_get_burst=400.0,
        reserved_get_rate_per_s=4.0, reserved_get_burst=8.0,
    )  # fmt: skip
    path = f"{BASE}/{make_entry('alice').static}"
    strangers = [f"10.{n}.0.1" for n in range(4)]
    for second in range(3):
        for stranger in strangers:
            place.statuses(path, stranger, 300 if second == 0 else 50)
        for honest in range(10):
            assert place.statuses(path, f"192.0.{honest}.{second}", 4) == {404: 4}
        clock.advance(1)
    answered = [place.statuses(path, stranger, 50).get(404, 0) for stranger in strangers]
    assert sum(answered) <= 80 + 4 * 4 + 4


def test_one_address_over_its_rate_is_told_when_to_come_again(clock: Clock) -> None:
    place = Front(clock, get_rate_per_s=1.0, get_burst=1.0)
    assert place.ask("/no/such/path")[0] == 404
    transport = place.begin("/no/such/path")
    transport.hang_up()
    assert transport.value().startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 1\r\n" in transport.value()
    assert place.ask("/no/such/path", "192.0.2.2")[0] == 404
    clock.advance(1)
    assert place.ask("/no/such/path")[0] == 404


def test_connections_over_the_rate_of_an_address_are_closed_before_anything_is_read(clock: Clock) -> None:
    place = Front(clock)

    def connects(host: str, times: int) -> int:
        wires = [place.connect(host) for _ in range(times)]
        for wire in wires:
            if wire is not None:
                wire.hang_up()
        return sum(wire is not None for wire in wires)

    assert sum(connects(f"2001:db8::{at}", 100) for at in range(21)) == 2_000  # a host has all of its /64
    assert not place.answers("2001:db8::ffff") and place.site.refused == 101
    assert place.answers("2001:db8:0:1::1") and place.answers("192.0.2.1")
    clock.advance(1)
    assert connects("2001:db8::1", 300) == 200


def test_the_list_of_servers_has_a_rate_of_its_own(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    servers = place.statuses("/discovery/available_servers", "192.0.2.1", 500)
    assert servers == {404: 400, 429: 100}
    assert place.ask(f"{BASE}/{make_entry('alice').static}")[0] == 404


def test_shared_rate_without_limits_lets_all_pass() -> None:
    rate = FairRate((None, 1), SharedRate((None, 1), (None, 1), 1), 1)
    assert all(rate.take("192.0.2.1", 0.0) for _ in range(10_000))
    rate = FairRate((None, 1), SharedRate((0.0, 1), (0.0, 2), 10), 10)
    assert [rate.take("192.0.2.1", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [rate.take("192.0.2.2", 0.0), rate.take("192.0.3.1", 0.0)] == [False, True]


# --- entries asked for a moment ago ------------------------------------------------------------------------------------


def test_an_entry_asked_for_again_is_not_read_again(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    entry = make_entry("alice")
    place.ask(BASE, body=entry.to_json())
    for family in (BASE, "/discovery/entries", "/dmsg-discovery/entry"):
        assert place.ask(f"{family}/{entry.static}") == (200, entry.to_json())
    assert place.store.reads == 1
    clock.advance(1)
    assert place.ask(f"{BASE}/{entry.static}") == (200, entry.to_json())
    assert place.store.reads == 2


def test_what_is_written_is_read_at_once(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    for sequence in range(3):
        entry = make_entry("alice", sequence)
        assert place.ask(BASE, body=entry.to_json())[0] == 200
        assert place.ask(f"{BASE}/{entry.static}") == (200, entry.to_json())


def test_what_another_process_wrote_is_read_within_a_second(clock: Clock, make_entry: Any) -> None:
    store = CountingStore(random=random.Random(1))
    place, other = Front(clock, store=store), Front(clock, store=store)
    first, second = make_entry("alice", 0), make_entry("alice", 1)
    place.ask(BASE, body=first.to_json())
    assert place.ask(f"{BASE}/{first.static}")[1] == first.to_json()
    other.ask(BASE, body=second.to_json())
    clock.advance(1)
    assert place.ask(f"{BASE}/{first.static}")[1] == second.to_json()


def test_what_was_read_before_a_write_is_not_kept(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    first, second = make_entry("alice", 0), make_entry("alice", 1)
    place.ask(BASE, body=first.to_json())
    gate = place.store.gate = defer.Deferred()
    slow = place.begin(f"{BASE}/{first.static}")
    place.store.gate = None
    assert place.ask(BASE, body=second.to_json())[0] == 200
    gate.callback(None)
    assert slow.value().endswith(first.to_json())
    slow.hang_up()
    assert place.ask(f"{BASE}/{first.static}")[1] == second.to_json()


def test_an_absent_entry_is_looked_for_each_time(clock: Clock, make_entry: Any) -> None:
    place = Front(clock)
    path = f"{BASE}/{make_entry('alice').static}"
    assert place.statuses(path, "192.0.2.1", 3) == {404: 3}
    assert place.store.reads == 3


@pytest.mark.parametrize("now_ns", [-1, 1_000_000_000, 5_000_000_000])
def test_the_cache_gives_nothing_of_another_time(now_ns: int) -> None:
    cache = EntryCache(1_000_000_000)
    cache.put("key", b"body", 0, 0)
    assert cache.get("key", 999_999_999) == b"body"
    assert cache.get("key", now_ns) is None
    assert len(cache) == 0


def test_the_cache_is_bounded_in_number_and_size() -> None:
    cache = EntryCache(1_000_000_000)
    for number in range(ENTRIES_LIMIT + 10):
        cache.put(str(number), b"x" * ENTRY_LIMIT_BYTES, 0, 0)
    assert len(cache) == ENTRIES_LIMIT
    assert cache.get("9", 0) is None and cache.get("10", 0) is not None
    cache.put("long", b"x" * (ENTRY_LIMIT_BYTES + 1), 0, 0)
    assert cache.get("long", 0) is None


def test_a_cache_without_a_lifetime_keeps_nothing() -> None:
    cache = EntryCache(0)
    cache.put("key", b"body", 0, 0)
    assert len(cache) == 0
