"""How a client scores relays: measurements against hints, forgetting, and a chance for each relay."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery import ranks as discovery_ranks
from dmsg.discovery.ranks import weight
from dmsg.relays.candidates import Candidate, spread
from dmsg.relays.scores import CLOSE, RelayScores, ScoreConfig

RELAYS = [SecretKey.generate().public_key for _ in range(8)]
GOOD, BAD, OTHER = RELAYS[:3]
HALF_LIFE_S = ScoreConfig().half_life_s


def assert_share(count, draws, share):
    deviation = math.sqrt(draws * share * (1 - share))
    assert abs(count - draws * share) <= 5 * deviation, (count, draws * share)


@pytest.fixture
def scores():
    return RelayScores()


# --- measuring -------------------------------------------------------------------------------------------------------


def test_an_unknown_relay_is_neutral(scores):
    assert scores.score(GOOD, 0) == 500


def test_what_is_fast_is_good_and_what_fails_is_bad(scores):
    scores.connected(GOOD, 50, 0)
    scores.connected(OTHER, 5000, 0)
    scores.failed(BAD, 0)
    good, slow, bad = (scores.score(relay, 0) for relay in (GOOD, OTHER, BAD))
    assert good > 600 and 200 < slow < 400 and bad < 150


def test_answers_and_refusals_count_too(scores):
    for _ in range(10):
        scores.answered(GOOD, 40, 0)
        scores.answered(OTHER, 10_000, 0)
        scores.refused(BAD, 0)
    assert scores.score(GOOD, 0) > 700
    assert scores.score(OTHER, 0) < 150
    assert scores.score(BAD, 0) < 50


def test_a_time_that_is_neutral_leaves_the_score_neutral(scores):
    scores.connected(GOOD, scores.config.connect_neutral_ms, 0)
    scores.answered(GOOD, scores.config.accept_neutral_ms, 0)
    assert scores.score(GOOD, 0) == pytest.approx(500)


def test_measurements_are_forgotten_so_that_a_healed_relay_is_tried_again(scores):
    for _ in range(50):
        scores.failed(BAD, 0)
    fresh = scores.score(BAD, 0)
    later = [scores.score(BAD, HALF_LIFE_S * halves) for halves in range(12)]
    assert fresh < 30 and later == sorted(later)
    assert later[-1] > 490
    # and a few good measurements then outweigh many old failures
    for _ in range(3):
        scores.connected(BAD, 20, 5 * HALF_LIFE_S)
    assert scores.score(BAD, 5 * HALF_LIFE_S) > 600


def test_half_of_the_weight_is_left_after_a_half_life():
    scores = RelayScores(ScoreConfig(rank_weight=1.0, failure_weight=1.0))
    scores.ranks = lambda relay: 500.0
    scores.failed(BAD, 0)
    assert scores.score(BAD, 0) == pytest.approx(500 / 2)
    assert scores.score(BAD, HALF_LIFE_S) == pytest.approx(500 / 1.5)


def test_a_relay_that_was_never_measured_is_thought_to_be_like_the_others(scores):
    for _ in range(30):
        scores.connected(GOOD, 20, 0)
    assert scores.score(GOOD, 0) - 50 < scores.score(OTHER, 0) > 900
    # and one that was bad long ago, too: it has its turn again although the good one has always been good
    scores.failed(BAD, 0)
    assert scores.score(BAD, 0) < 300
    for minute in range(120):
        scores.connected(GOOD, 20, minute * 60)
    assert scores.score(BAD, 7200) > scores.score(GOOD, 7200) - CLOSE


def test_a_clock_set_back_is_no_harm(scores):
    scores.failed(BAD, 1000)
    assert scores.score(BAD, 0) == scores.score(BAD, 1000)


def test_without_measuring_nothing_is_measured():
    scores = RelayScores(ScoreConfig(measure=False))
    scores.failed(BAD, 0)
    scores.connected(GOOD, 1, 0)
    assert scores.score(BAD, 0) == scores.score(GOOD, 0) == 500


def test_memory_is_bounded_and_keeps_the_newest():
    scores = RelayScores(ScoreConfig(relays=3))
    scores.ranks = lambda relay: 500.0
    for relay in RELAYS:
        scores.failed(relay, 0)
        scores.failed(RELAYS[0], 0)
    assert [relay for relay in RELAYS if scores.score(relay, 0) != 500] == [RELAYS[0], *RELAYS[-2:]]
    scores.listed(RELAYS, 0)
    assert len(scores._places) == 3


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_signed_rank_is_the_prior(scores):
    scores.ranks = {GOOD: 900.0, BAD: 100.0, OTHER: 500.0}.__getitem__
    assert scores.score(GOOD, 0) == 900 and scores.score(BAD, 0) == 100


def test_ranks_that_have_expired_are_as_none(scores):
    """Neither do they stand in the way of what was measured, nor of discovery's hint; while they fade, less and less so."""
    plain = RelayScores()
    scores.ranks = {GOOD: 900.0, BAD: 900.0, OTHER: 100.0}.__getitem__
    for each in (scores, plain):
        each.listed([BAD, OTHER, GOOD], 0)
        each.connected(GOOD, 30, 0)
        each.failed(BAD, 0)
    by_freshness = []
    for freshness in (1.0, 0.75, 0.5, 0.25, 0.0):
        scores.freshness = lambda freshness=freshness: freshness
        by_freshness.append([scores.score(relay, 0) for relay in (GOOD, BAD, OTHER)])
    assert by_freshness[-1] == [plain.score(relay, 0) for relay in (GOOD, BAD, OTHER)]
    assert [bad for _, bad, _ in by_freshness] == sorted((bad for _, bad, _ in by_freshness), reverse=True)
    assert [other for *_, other in by_freshness] == sorted(other for *_, other in by_freshness)
    assert scores.best_first([GOOD, BAD], [BAD], lambda: 0.5, 0) == [GOOD, BAD]  # poor, so not the first to be dialled


def test_own_measurements_overrule_a_rank_that_lies(scores):
    """Told of the good one that it is the worst, and the other way round."""
    scores.ranks = {GOOD: 0.0, BAD: 1000.0}.__getitem__
    assert scores.score(GOOD, 0) < scores.score(BAD, 0)
    for _ in range(8):
        scores.connected(GOOD, 30, 0)
        scores.failed(BAD, 0)
    assert scores.score(GOOD, 0) > 500 > scores.score(BAD, 0)


def test_a_rank_is_worth_a_stated_number_of_measurements():
    config = ScoreConfig(rank_weight=4.0, failure_weight=1.0)
    scores = RelayScores(config)
    scores.ranks = lambda relay: 1000.0
    for _ in range(4):
        scores.failed(BAD, 0)
    assert scores.score(BAD, 0) == pytest.approx(500)


def test_places_in_discoverys_list_are_a_weak_hint(scores):
    scores.listed(RELAYS, 0)
    by_place = [scores.score(relay, 0) for relay in RELAYS]
    assert by_place == sorted(by_place, reverse=True)
    assert (by_place[0], by_place[-1]) == (650, 350)
    scores.connected(RELAYS[-1], 20, 0)
    scores.failed(RELAYS[0], 0)
    assert scores.score(RELAYS[-1], 0) > scores.score(RELAYS[0], 0)
    assert scores.score(RELAYS[0], HALF_LIFE_S * 50) == pytest.approx(500)
    scores.listed(RELAYS[4:5], 0)
    assert scores.score(RELAYS[4], 0) == scores.score(RELAYS[5], 0)
    scores.listed([], 0)
    scores.ranks = lambda relay: 600.0
    scores.listed(RELAYS[3:], 0)
    assert scores.score(RELAYS[3], 0) == 600  # a relay with a signed rank needs no hint


@given(st.floats(allow_nan=False), st.floats(0, 1e12))
def test_no_rank_makes_a_score_leave_its_range(told, now_s):
    scores = RelayScores()
    scores.ranks = lambda relay: told
    scores.failed(BAD, 0)
    for relay in (GOOD, BAD):
        assert 0 <= scores.score(relay, now_s) <= 1000


# --- what follows ----------------------------------------------------------------------------------------------------


def test_weights_are_those_of_discovery():
    for score in range(-100, 1200, 7):
        assert weight(score) == discovery_ranks.weight(score)


def test_a_draw_has_all_and_the_better_ones_first_more_often(scores):
    told = dict(zip(RELAYS, [1000, 0, 500, 500, 800, 250, 600, 400], strict=True))
    scores.ranks = told.__getitem__
    dice, draws = random.Random(1).random, 20_000
    firsts = Counter()
    for _ in range(draws):
        drawn = scores.draw(RELAYS, dice, 0)
        assert len(drawn) == len(RELAYS)
        firsts[drawn[0]] += 1
    total = sum(weight(score) for score in told.values())
    for relay, score in told.items():
        assert_share(firsts[relay], draws, weight(score) / total)


def test_the_worst_is_never_out_of_the_draw(scores):
    """The worst score that hints and measurements can give leaves a 64th of an equal chance."""
    scores.ranks = dict.fromkeys(RELAYS, 1000.0).__getitem__
    for _ in range(100):
        scores.failed(BAD, 0)
        scores.ranks = lambda relay: 0.0 if relay == BAD else 1000.0
    dice, draws = random.Random(2).random, 60_000
    firsts = sum(scores.draw(RELAYS, dice, 0)[0] == BAD for _ in range(draws))
    share = 1 / (1 + 64 * (len(RELAYS) - 1))
    assert share >= 1 / 64 / len(RELAYS)
    assert_share(firsts, draws, share)


def test_a_rank_is_weighed_once_also_in_a_network_with_better_ones(scores):
    told = dict.fromkeys(RELAYS, 500.0) | {BAD: 0.0}
    scores.ranks = told.__getitem__
    networks = {relay: max(1, at) for at, relay in enumerate(RELAYS)}  # the good and the bad one share one
    candidates = [Candidate(relay, HostPort(f"192.0.{at}.1", 80)) for relay, at in networks.items()]
    dice, draws = random.Random(4).random, 10_000
    firsts = Counter(
        spread(candidates, lambda keys: scores.draw(keys, dice, 0), lambda keys: scores.best(keys, 0))[0].public_key
        for _ in range(draws)
    )
    in_network = weight(0) / (weight(0) + weight(500))
    share = 1 / (len(RELAYS) - 1)
    assert_share(firsts[BAD], draws, share * in_network)
    assert_share(firsts[GOOD], draws, share * (1 - in_network))
    assert_share(firsts[OTHER], draws, share)


def test_the_best_is_dialled_first(scores):
    told = {GOOD: 900.0, BAD: 300.0, OTHER: 600.0}
    scores.ranks = told.__getitem__
    dice = random.Random(3).random
    for connected in ([], list(told)):
        for _ in range(50):
            assert scores.best_first(told, connected, dice, 0) == [GOOD, OTHER, BAD]


def test_connected_ones_are_dialled_first_unless_they_are_poor(scores):
    told = {GOOD: 900.0, BAD: 100.0, OTHER: 400.0}
    scores.ranks = told.__getitem__
    dice = random.Random(4).random
    assert scores.best_first(told, [OTHER], dice, 0) == [OTHER, GOOD, BAD]
    assert scores.best_first(told, [BAD], dice, 0) == [GOOD, OTHER, BAD]


def test_among_close_ones_chance_decides(scores):
    scores.ranks = {GOOD: 810.0, OTHER: 800.0}.__getitem__
    dice, draws = random.Random(5).random, 2000
    firsts = Counter(scores.best_first([GOOD, OTHER], [], dice, 0)[0] for _ in range(draws))
    # two uniform numbers 100 wide, one of them 10 ahead
    assert_share(firsts[OTHER], draws, 0.9**2 / 2)


@given(
    st.lists(st.sampled_from(RELAYS), unique=True),
    st.sets(st.sampled_from(RELAYS)),
    st.dictionaries(st.sampled_from(RELAYS), st.floats(allow_nan=False)),
    st.randoms(use_true_random=False),
)
def test_whatever_is_told_every_relay_has_its_turn(relays, connected, told, dice):
    scores = RelayScores()
    scores.ranks = lambda relay: told.get(relay, 500.0)
    scores.listed(relays, 0)
    for order in (scores.draw(relays, dice.random, 0), scores.best_first(relays, connected, dice.random, 0)):
        assert sorted(order) == sorted(relays)
