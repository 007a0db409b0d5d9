"""Scores from voices: what they mean, and what a single client cannot do to them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg_logs.ranks import scoring
from dmsg_logs.ranks.scoring import (
    EVIDENCE,
    ITSELF,
    SCALE,
    SHARE,
    STEP,
    STRANGERS,
    TARGETS,
    USELESS_SHARE,
    VOICES,
    WEIGHTS,
    RelayScore,
    Voice,
    compare,
    effective,
    score_relays,
)
from dmsg_logs.tables.transforms import rank_evidence

RELAY = "02" + "aa" * 32
PARTS = ("score", "success", "latency", "capacity", "drops")
Vote = tuple[float, float, float]
#: What one voice can move anything by, the step included.
ONE_VOICE = SCALE / VOICES + STEP


def voices(count: int, **evidence: float) -> list[Voice]:
    return [Voice(RELAY, f"client {number}", **evidence) for number in range(count)]  # type: ignore[arg-type]


def score(said: list[Voice]) -> RelayScore:
    return score_relays(said, relays=[RELAY]).relays[RELAY]


# --- what scores mean ------------------------------------------------------------------------------------------------


def test_the_weights_add_up_and_the_share_is_what_it_is_made_of() -> None:
    assert math.isclose(sum(WEIGHTS.values()), 1.0)
    assert SHARE == 50
    assert math.isclose(SHARE, SCALE / VOICES + SCALE * WEIGHTS["accept"] * 2 / TARGETS + STEP)


def test_a_relay_without_reports_is_neutral() -> None:
    assert score([]) == RelayScore(500, 500, 500, 500, 500, 0, 0)


def test_many_voices_without_a_complaint_make_a_good_relay() -> None:
    best = score(voices(100, ok=1e9, session=1.0, session_evidence=1e9, accept_sum=1e9, accept_targets=1e9))
    assert (best.score, best.success, best.latency, best.capacity, best.drops) == (1000, 1000, 1000, 1000, 1000)
    worst = score(voices(100, failed=1e9, session=0.0, session_evidence=1e9, accept_targets=1e9))
    assert (worst.success, worst.latency) == (0, 0)


def test_a_voice_grows_with_its_evidence() -> None:
    shares = [score(voices(100, ok=ok)).success for ok in (0, 1, EVIDENCE, 20, 1e6)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (500, 1000)
    # half a voice each: a hundred clients are fifty voices, all of one opinion
    assert shares[2] == 1000
    assert score(voices(VOICES, ok=EVIDENCE)).success == 750


def test_few_clients_leave_a_score_near_neutral() -> None:
    few, half, all_ = (score(voices(count, ok=1e9)).success for count in (2, VOICES // 2, VOICES))
    assert (few, half, all_) == (525, 750, 1000)


@pytest.mark.parametrize(("failed", "success"), [(0.0, 1000), (USELESS_SHARE / 2, 500), (USELESS_SHARE, 0), (0.9, 0)])
def test_a_relay_that_fails_often_enough_is_useless(failed: float, success: int) -> None:
    assert score(voices(VOICES, ok=(1 - failed) * 1e9, failed=failed * 1e9)).success == success


def test_parts_do_not_mix() -> None:
    refused = score(voices(VOICES, ok=1e9, refused=1e9))
    dropped = score(voices(VOICES, ok=1e9, dropped=1e9))
    assert (refused.success, refused.capacity, refused.drops) == (1000, 0, 1000)
    assert (dropped.success, dropped.capacity, dropped.drops) == (1000, 1000, 0)


def test_who_loses_the_least_by_comparison_is_the_fastest() -> None:
    fast = score(voices(VOICES, ok=1e9, session=0.75, session_evidence=1e9, accept_sum=30.0, accept_targets=40.0))
    assert fast.latency == 750
    few_targets = score(voices(VOICES, ok=1e9, accept_sum=TARGETS / 2, accept_targets=TARGETS / 2))
    assert few_targets.latency == 500 + 500 * 0.5 * WEIGHTS["accept"] / (WEIGHTS["accept"] + WEIGHTS["session"])


def test_the_voices_that_are_no_clients_are_not_counted_as_such() -> None:
    said = [Voice(RELAY, STRANGERS, refused=1e9), Voice(RELAY, ITSELF, dropped=1e9)]
    both = score(said)
    assert (both.clients, both.success, both.latency) == (0, 500, 500)
    assert both.capacity == both.drops == 490
    assert score([*said, Voice(RELAY, "client", ok=5)]).clients == 1


def test_what_is_left_out_is_counted() -> None:
    said = [replace(one, pieces=7, dials=3) for one in voices(10, ok=5)]
    scores = score_relays(said, excluded={"client 1", "client 4", "unknown"})
    assert (scores.excluded_clients, scores.excluded_events) == (2, 14)
    assert (scores.relays[RELAY].clients, scores.relays[RELAY].dials) == (8, 24)
    rest = [one for one in said if one.client not in ("client 1", "client 4")]
    assert scores.relays == score_relays(rest).relays


def test_age_fades_a_score_to_neutral() -> None:
    ages = (-300, 0, 50, 75, 100, 1000)
    assert [effective(900, 0, 100, age) for age in ages] == [900, 900, 900, 700, 500, 500]
    assert [effective(100, 0, 100, age) for age in ages] == [100, 100, 100, 300, 500, 500]


def test_scores_that_differ_by_no_more_than_one_client_can_do_are_equal() -> None:
    assert [compare(500, 500 + by) for by in (0, SHARE, -SHARE, SHARE + 1, -SHARE - 1)] == [0, 0, 0, -1, 1]


# --- what one client can do ------------------------------------------------------------------------------------------

anything = st.floats() | st.integers(-5, 50).map(float) | st.sampled_from([0.0, 1.0, 1e308, -1e308, math.inf, math.nan])
numbers = st.builds(
    dict,
    ok=anything,
    failed=anything,
    refused=anything,
    dropped=anything,
    session=anything,
    session_evidence=anything,
    accept_sum=anything,
    accept_targets=anything,
    dials=st.integers(-(2**70), 2**70),
)
vote = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(-0.5, 0.5))
some = st.floats(0, 30)
honest_voice = st.builds(
    dict,
    ok=some,
    failed=st.sampled_from([0.0, 0.0, 1.0, 20.0]),
    refused=st.sampled_from([0.0, 0.0, 3.0]),
    dropped=st.sampled_from([0.0, 0.0, 5.0]),
    session=st.floats(0, 1),
    session_evidence=some,
    accept_targets=st.floats(0, 25),
    accept_share=st.floats(0, 1),
)


def honest(evidence: dict[str, float], name: str) -> Voice:
    rest = {key: value for key, value in evidence.items() if key != "accept_share"}
    return Voice(RELAY, name, **rest, accept_sum=evidence["accept_share"] * rest["accept_targets"])  # type: ignore[arg-type]


def crowd_of(drawn: list[dict[str, float]], times: int) -> list[Voice]:
    """Several clients of each kind: fleets of up to 120 from few draws."""
    return [honest(one, f"{number}-{at}") for number, one in enumerate(drawn) for at in range(times)]


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(honest_voice, max_size=8), st.integers(1, 15), st.none() | numbers, st.none() | numbers)
def test_a_client_moves_a_score_by_no_more_than_its_voice(
    drawn: list[dict[str, float]], times: int, before: dict[str, float] | None, after: dict[str, float] | None
) -> None:
    """Any evidence of one client, added, taken away or changed to any other."""
    others = crowd_of(drawn, times)
    was, is_ = (
        score(others + ([Voice(RELAY, "liar", **said)] if said is not None else []))  # type: ignore[arg-type]
        for said in (before, after)
    )
    for part in PARTS:
        assert 0 <= getattr(was, part) <= SCALE
        assert abs(getattr(was, part) - getattr(is_, part)) <= ONE_VOICE


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(st.tuples(honest_voice, *[st.none() | vote] * 2), max_size=8),
    st.integers(1, 15),
    st.none() | numbers,
    st.none() | numbers,
)
def test_nor_by_how_it_answers_those_who_dial_it(
    drawn: list[tuple[dict[str, float], Vote | None, Vote | None]],
    times: int,
    before: dict[str, float] | None,
    after: dict[str, float] | None,
) -> None:
    """The same client is also the target of all others, and answers each of them as it likes. One target's vote of each of
    them is its to decide, and where it puts itself in the order decides about one place of the others."""

    def fleet(which: int, liar: dict[str, float] | None) -> RelayScore:
        said = []
        for number, (evidence, *votes) in enumerate(drawn):
            voice = honest(evidence, "")
            vote = votes[which]
            if vote is not None:
                weight, value, shift = vote
                place = voice.accept_sum + weight * shift * min(1.0, voice.accept_targets)
                voice.accept_sum = min(max(place, 0.0), voice.accept_targets) + weight * value
                voice.accept_targets += weight
            said += [replace(voice, client=f"{number}-{at}") for at in range(times)]
        if liar is not None:
            said.append(Voice(RELAY, "liar", **liar))  # type: ignore[arg-type]
        return score(said)

    assert abs(fleet(0, before).score - fleet(1, after).score) <= SHARE


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.integers(0, SCALE), min_size=2, max_size=6), st.data())
def test_no_relay_can_be_put_behind_a_worse_one(scores: list[int], data: st.DataObject) -> None:
    moved = [data.draw(st.integers(max(0, one - SHARE), min(SCALE, one + SHARE))) for one in scores]
    for one, other in combinations(range(len(scores)), 2):
        assert {compare(scores[one], scores[other]), compare(moved[one], moved[other])} != {1, -1}


# --- what the page says ----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "ranks.rst"


def test_the_page_on_ranks_names_these_numbers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = dict(re.findall(r"^``([A-Z_]+)`` +(\d+) ", text, re.MULTILINE))
    ours = {name: getattr(scoring, name) for name in ("SHARE", "VOICES", "TARGETS", "EVIDENCE", "STEP")}
    ours |= {name: getattr(rank_evidence, name) for name in ("WITNESSES", "HALF_LIFE_S")}
    assert {name: float(value) for name, value in told.items()} == ours
    parts = {name: int(percent) / 100 for name, percent in re.findall(r"^``([a-z]+)`` +(\d+) %", text, re.MULTILINE)}
    latency = WEIGHTS["session"] + WEIGHTS["accept"]
    assert parts == {**{name: WEIGHTS[name] for name in ("success", "capacity", "drops")}, "latency": latency}
    assert WEIGHTS["session"] == WEIGHTS["accept"]
