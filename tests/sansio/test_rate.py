"""Token buckets, recent sets and rate limiter tables against simple models and the promises they make."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.sansio.rate import FairBucket, RateLimiterTable, RecentIds, RecentSet, TokenBucket

rates = st.floats(min_value=0.0, max_value=10_000.0)
bursts = st.floats(min_value=0.5, max_value=10_000.0)
steps = st.lists(st.tuples(st.floats(min_value=0.0, max_value=100.0), st.integers(0, 20)), max_size=60)


@given(rates, bursts, steps, st.floats(-1e6, 1e6))
def test_bucket_never_lets_more_through_than_promised(rate, burst, schedule, start):
    bucket = TokenBucket(rate, burst, start)
    now, passed = start, 0
    for wait, n in schedule:
        now += wait
        if bucket.take(now, n):
            passed += n
        assert passed <= (burst + rate * (now - start)) * (1 + 1e-9) + 1e-3


@given(rates, bursts, steps)
def test_any_later_span_is_bounded_as_well(rate, burst, schedule):
    """The promise holds from any moment on, not only from the first: an idle bucket never saves up above its burst."""
    bucket = TokenBucket(rate, burst, 0.0)
    now = 1000.0
    bucket.take(now, 0)
    begin, passed = now, 0
    for wait, n in schedule:
        now += wait
        passed += n if bucket.take(now, n) else 0
    assert passed <= (burst + rate * (now - begin)) * (1 + 1e-9) + 1e-3


def test_bucket_bursts_then_refills_at_its_rate():
    bucket = TokenBucket(2.0, 3, 100.0)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(100.25)
    assert bucket.take(100.5)
    assert not bucket.take(100.5)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_refused_take_costs_nothing():
    bucket = TokenBucket(0.0, 5, 0.0)
    assert not bucket.take(0.0, 6)
    assert bucket.take(0.0, 5)


def test_clock_that_jumps_backwards_neither_gives_nor_stalls():
    bucket = TokenBucket(1.0, 2, 1_000_000.0)
    assert bucket.take(1_000_000.0, 2)
    assert not bucket.take(5.0), "going back is no time passed"
    assert bucket.take(6.0), "and from there the count goes on"
    assert not bucket.take(6.0)


@given(rates, bursts, st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 5)), max_size=40))
def test_any_clock_leaves_the_bucket_between_empty_and_burst(rate, burst, schedule):
    bucket = TokenBucket(rate, burst, 0.0)
    for now, n in schedule:
        bucket.take(now, n)
        assert bucket.take(now, 0)
        assert not bucket.take(now, math.nextafter(burst, math.inf))


@given(rates, bursts, st.integers(0, 50), st.integers(0, 50))
def test_wait_s_tells_when_take_succeeds(rate, burst, first, n):
    bucket = TokenBucket(rate, burst, 0.0)
    bucket.take(0.0, first)
    wait = bucket.wait_s(0.0, n)
    assert wait >= 0.0
    if wait == 0.0:
        assert bucket.take(0.0, n)
    elif math.isinf(wait):
        assert n > burst or rate == 0 or rate < 1e-300
        assert not bucket.take(1e12 if n > burst else 1.0, n)
    else:
        assert not bucket.take(wait * 0.5, n)
        assert bucket.wait_s(wait * (1 + 1e-6), n) <= wait * 1e-3


@pytest.mark.parametrize(("rate", "burst"), [(-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_senseless_numbers_are_refused(rate, burst):
    with pytest.raises(ValueError, match="token bucket"):
        TokenBucket(rate, burst, 0.0)
    with pytest.raises(ValueError, match="token bucket"):
        RateLimiterTable(rate, burst, 10)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity):
    with pytest.raises(ValueError, match="at least one"):
        RecentSet(capacity)
    with pytest.raises(ValueError, match="at least one"):
        RateLimiterTable(1.0, 1.0, capacity)


set_actions = st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 12)), max_size=80)


@given(st.integers(1, 8), set_actions)
def test_recent_set_is_the_newest_of_a_list(capacity, actions):
    recent: RecentSet[int] = RecentSet(capacity)
    model: list[int] = []
    for action, item in actions:
        if item in model:
            model.remove(item)
        if action == "add":
            recent.add(item)
            model = [*model, item][-capacity:]
        else:
            recent.discard(item)
        assert [i for i in range(13) if i in recent] == sorted(model)
        assert len(recent) == len(model) <= capacity


@given(
    st.lists(st.sampled_from([(0, 2), (1, 2), (5, 16), (0, 31), (65_535, -7)]), min_size=1, max_size=4),
    st.lists(st.integers(0, 20_000), max_size=20),
)
@settings(max_examples=30)
def test_recent_ids_are_the_newest_of_a_list(runs, discarded):
    recent = RecentIds()
    order: dict[int, None] = {}
    for start, step in runs:
        for n in range(3_000):
            item = (start + n * step) & 0xFFFF
            recent.add(item)
            order.pop(item, None)
            order[item] = None
    newest = list(order)[-RecentIds.CAPACITY :]
    oldest = list(order)[: -2 * RecentIds.CAPACITY]
    for at in discarded:
        item = newest[at % len(newest)]
        recent.discard(item)
        recent.discard(item)
        assert item not in recent
    assert all(item in recent for item in newest if item not in {newest[at % len(newest)] for at in discarded})
    assert not any(item in recent for item in oldest)
    assert sum(item in recent for item in range(1 << 16)) <= 2 * RecentIds.CAPACITY


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 8), st.floats(0, 5)), max_size=60))
def test_table_is_independent_buckets_in_lru_memory(capacity, schedule):
    table: RateLimiterTable[int] = RateLimiterTable(0.5, 2, capacity)
    model: dict[int, TokenBucket] = {}
    now = 0.0
    for key, wait in schedule:
        now += wait
        bucket = model.pop(key, None)
        if bucket is None:
            bucket = TokenBucket(0.5, 2, now)
            for oldest in list(model)[:2]:
                if not model[oldest].is_full(now):
                    break
                del model[oldest]
        model[key] = bucket
        while len(model) > capacity:
            del model[next(iter(model))]
        assert table.take(key, now) == bucket.take(now)
        assert len(table) == len(model)
        assert [k for k in range(9) if k in table] == sorted(model)


def test_a_table_follows_the_keys_of_the_time_a_bucket_takes_to_fill():
    table: RateLimiterTable[int] = RateLimiterTable(0.1, 2, 65_536)
    for number in range(20_000):
        assert table.take(number, number / 10)
    assert len(table) <= 110, "ten keys a second, each full again after 10 s"
    for number in range(10_000):
        table.take(number, 2000.0)
    for number in range(10_000, 20_100):
        table.take(number, 5000.0 + number)
    assert len(table) <= 110, "two are forgotten for each that comes"


@given(st.floats(0, 10), st.floats(0.5, 10), st.floats(0, 10), st.lists(st.floats(-5, 20), max_size=8))
def test_a_full_bucket_is_as_good_as_a_new_one(rate, burst, n, waits):
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    for wait in waits:
        bucket.take(now, n)
        now += wait
        assert bucket.is_full(now) == (bucket.wait_s(now, burst) == 0.0)


def test_forgotten_key_starts_afresh():
    table: RateLimiterTable[str] = RateLimiterTable(0.0, 1, 4)
    assert table.take("a", 0.0)
    assert not table.take("a", 0.0)
    assert table.take("b", 0.0), "one key's limit is not another's"
    table.forget("a")
    table.forget("never seen")
    assert table.take("a", 0.0)


def test_wait_s_is_infinite_for_what_never_passes():
    assert TokenBucket(1.0, 5, 0.0).wait_s(0.0, 6) == math.inf
    empty = TokenBucket(0.0, 5, 0.0)
    assert empty.take(0.0, 5)
    assert empty.wait_s(0.0) == math.inf


def test_what_is_kept_is_there_for_those_who_keep_less():
    bucket = TokenBucket(1.0, 10, 0.0)
    assert [bucket.take(0.0, keep=5) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.has(0.0)
    assert not bucket.has(0.0, keep=5)
    assert [bucket.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert not bucket.take(5.0, keep=5)
    assert bucket.take(6.0, keep=5)


# --- fair buckets ------------------------------------------------------------------------------------------------------


@given(rates, st.floats(1.0, 2_000.0), st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 5)), max_size=100))
def test_a_fair_bucket_lets_no_more_through_than_promised(rate, burst, schedule):
    bucket: FairBucket[int] = FairBucket(rate, burst, 0.0)
    now, passed = 0.0, 0
    for wait, source in schedule:
        now += wait
        passed += bucket.take(source, now)
        assert passed <= (burst + rate * now) * (1 + 1e-9) + 1e-3


def flood(bucket, sources, start, seconds, each_per_s=50):
    """Each source asks ``each_per_s`` times a second; how often each passed."""
    passed = dict.fromkeys(sources, 0)
    for tick in range(int(seconds * each_per_s)):
        for source in sources:
            passed[source] += bucket.take(source, start + tick / each_per_s)
    return passed


def test_one_source_alone_gets_half_the_burst_and_the_whole_rate():
    bucket: FairBucket[int] = FairBucket(100.0, 512, 0.0)
    assert sum(bucket.take(1, 0.0) for _ in range(600)) == 256
    assert flood(bucket, [1], 0.0, 20.0, 200)[1] == pytest.approx(2_000, rel=0.02)


@pytest.mark.parametrize("crowd", [1, 16, 100])
def test_a_flood_leaves_something_for_who_comes_later(crowd):
    bucket: FairBucket[int] = FairBucket(100.0, 512, 0.0)
    flood(bucket, range(crowd), 0.0, 20.0)
    least = int(512 / (crowd + 1)) // 2
    assert all(bucket.take(-1, 20.0) for _ in range(least))


def test_a_fair_bucket_keeps_tokens_for_callers_that_come_first():
    bucket: FairBucket[int] = FairBucket(1.0, 8, 0.0)
    assert [bucket.take(1, 0.0, keep=4) for _ in range(3)] == [True, True, False]
    assert [bucket.take(2, 0.0, keep=4) for _ in range(2)] == [True, False]
    assert [bucket.take(3, 0.0, keep=4) for _ in range(2)] == [True, False]
    assert not bucket.take(4, 0.0, keep=4)
    assert [bucket.take(4, 0.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(4, 5.0, keep=4) for _ in range(3)] == [True, True, False]


def test_sources_that_ask_without_end_get_equal_parts():
    bucket: FairBucket[int] = FairBucket(100.0, 512, 0.0)
    flood(bucket, range(10), 0.0, 10.0)
    passed = flood(bucket, range(20), 10.0, 20.0)
    later = flood(bucket, range(20), 30.0, 20.0)
    assert sum(later.values()) == pytest.approx(2_000, rel=0.05)
    assert max(later.values()) <= 1.2 * min(later.values())
    assert min(passed.values()) >= 50


def test_a_fair_bucket_remembers_no_more_than_it_let_through():
    """A crowd of sources that were refused, or have paid, leaves nothing behind."""
    bucket: FairBucket[int] = FairBucket(100.0, 512, 0.0)
    for tick in range(100):
        for source in range(1_000):
            bucket.take(1_000 * tick + source, tick / 10)
        assert len(bucket) <= 3 * 512
    assert not bucket.idle(10.0)
    assert bucket.idle(20.0)
    assert len(bucket) == 0


def test_a_fair_bucket_and_a_clock_that_jumps_backwards():
    bucket: FairBucket[int] = FairBucket(1.0, 4, 1_000.0)
    assert [bucket.take(1, 1_000.0) for _ in range(3)] == [True, True, False]
    assert not bucket.take(1, 5.0)
    assert bucket.take(2, 5.0)
    assert bucket.take(1, 7.0)


def test_fair_buckets_refuse_what_buckets_refuse():
    with pytest.raises(ValueError):
        FairBucket(-1.0, 1, 0.0)


def test_what_is_given_back_can_be_taken_again_and_never_more_than_the_burst():
    table = RateLimiterTable(0.5, 2, 10)
    assert [table.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert (table.wait_s("a", 0.0), table.wait_s("b", 0.0)) == (2.0, 0.0)
    table.give_back("a")
    assert table.wait_s("a", 0.0) == 0.0 and table.take("a", 0.0) and not table.take("a", 0.0)
    for _ in range(5):
        table.give_back("a")
    table.give_back("never seen")
    assert [table.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert "never seen" not in table
