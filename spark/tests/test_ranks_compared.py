"""How fast relays are beside each other, as one client sees them: what its sessions and its dials' answers are worth."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from event_rows import Event, events, node_of, rows_of
from pyspark.sql import SparkSession
from rank_fleet import ALICE, BOB, CLIENTS, FAILING, GOOD, NOW, RELAYS, SLOW, TWIN, accepted, dial, session, step

from dmsg_logs.ranks.document import WINDOW_S
from dmsg_logs.tables.transforms.rank_evidence import relay_latency


def compared(spark: SparkSession, lines: Sequence[Event]) -> dict[tuple[str, str], dict[str, float]]:
    rows = rows_of(relay_latency(events(spark, lines), now=NOW, window_s=WINDOW_S))
    return {(row["relay"], row["client"]): row for row in rows}


def test_how_relays_compare_in_getting_a_session_up(spark: SparkSession) -> None:
    """Alice is far away; Bob knows one relay only, and has nothing to compare it with."""
    lines = [session(ALICE, relay, s) for relay, s in ((GOOD, 2.0), (TWIN, 2.0), (SLOW, 4.0))]
    lines += [session(BOB, SLOW, 9.0)]
    found = compared(spark, lines)
    good, twin, slow = (found[relay, node_of(ALICE)] for relay in (GOOD, TWIN, SLOW))
    assert good["session"] == twin["session"] == pytest.approx(0.5 + 1 / 6)
    assert slow["session"] == pytest.approx(0.5 - 1 / 3)
    assert found[SLOW, node_of(BOB)]["session_evidence"] == 0
    assert found[SLOW, node_of(BOB)]["session"] == 0.5


def test_how_relays_compare_in_answers(spark: SparkSession) -> None:
    """Only the order counts, each target has one vote, and what is as good as equal shares a place."""
    fast, usual, slow, often = CLIENTS[2:6]
    lines = [accepted(ALICE, fast, GOOD, 10), accepted(ALICE, usual, TWIN, 100), accepted(ALICE, slow, SLOW, 9_999)]
    lines += [accepted(ALICE, often, TWIN, 103, NOW - 60 - at) for at in range(30)]
    # what a client accepted says nothing of its own dials
    lines += [("transport_opened", {**accepted(ALICE, BOB, GOOD, 1)[1], "node": node_of(BOB)})]
    found = compared(spark, lines)
    assert {client for _, client in found} == {node_of(ALICE)}
    good, twin, last = (found[relay, node_of(ALICE)] for relay in (GOOD, TWIN, SLOW))
    votes = good["accept_targets"], twin["accept_targets"], last["accept_targets"]
    assert votes == (pytest.approx(0.5, rel=0.01), pytest.approx(0.5 + 30 / 31, rel=0.01), pytest.approx(0.5, rel=0.01))
    places = [each["accept_sum"] / each["accept_targets"] for each in (good, twin, last)]
    everything = sum(votes)
    assert places == pytest.approx([1 - votes[0] / 2 / everything, 0.5, votes[2] / 2 / everything])


def test_a_target_has_one_vote_however_many_relays_it_is_on(spark: SparkSession) -> None:
    lines = [accepted(ALICE, CLIENTS[2], relay, 10, NOW - at) for relay in RELAYS for at in range(50)]
    votes = [row["accept_targets"] for row in compared(spark, lines).values()]
    assert len(votes) == len(RELAYS) and sum(votes) == pytest.approx(50 / 51, rel=0.01)


def test_a_target_moves_its_vote_and_one_place(spark: SparkSession) -> None:
    """However it answers, through whichever relays: what it changes in the sum of each relay is at most two votes."""
    target, *rest = CLIENTS[2:12]
    usual = [accepted(ALICE, one, relay, 100 + 40 * at) for at, one in enumerate(rest) for relay in RELAYS]
    answers = (
        [],
        [accepted(ALICE, target, relay, 1, NOW - at) for relay in RELAYS for at in range(9)],
        [accepted(ALICE, target, GOOD, 9_999, NOW - at) for at in range(99)],
        [accepted(ALICE, target, GOOD, 1, NOW - at) for at in range(99)],
        [accepted(ALICE, target, GOOD, 1), accepted(ALICE, target, TWIN, 9_999), accepted(ALICE, target, SLOW, 250)],
    )
    found = [compared(spark, usual + own) for own in answers]
    for relay in RELAYS:
        sums = [each[relay, node_of(ALICE)]["accept_sum"] for each in found]
        votes = [each[relay, node_of(ALICE)]["accept_targets"] for each in found]
        assert max(sums) - min(sums) <= 2
        assert max(votes) - min(votes) <= 1
    goods = [each[GOOD, node_of(ALICE)]["accept_sum"] for each in found]
    assert goods[3] - goods[2] > 0.5  # it is heard


def test_relays_are_compared_with_those_of_their_protocol_only(spark: SparkSession) -> None:
    """Alice speaks two protocols with one key. Sessions and answers of one of them take three times as long."""
    old, new = {"protocol": "messaging"}, {"protocol": "dmsg"}
    relays = [(GOOD, 1.0, new), (TWIN, 1.0, {}), (SLOW, 3.0, old), (FAILING, 3.0, old)]  # {}: of a program of before
    lines = [(name, {**line, **more}) for relay, s, more in relays for name, line in [session(ALICE, relay, s)]]
    for target, (relay, s, more) in zip(CLIENTS[2:6], relays, strict=True):
        name, line = accepted(ALICE, target, relay, 100 * s)
        lines.append((name, {**line, **more}))
    found = compared(spark, lines)
    assert len(found) == len(relays)
    for row in found.values():
        assert row["session"] == row["accept_sum"] / row["accept_targets"] == pytest.approx(0.5)


def test_a_target_has_one_vote_however_many_protocols_it_answers_in(spark: SparkSession) -> None:
    lines = [accepted(ALICE, CLIENTS[2], GOOD, 10, NOW - at) for at in range(50)]
    lines += [(name, {**line, "protocol": "messaging"}) for name, line in lines]
    [row] = compared(spark, lines).values()
    assert row["accept_targets"] == pytest.approx(50 / 51, rel=0.01)


@pytest.mark.parametrize("reason", ["timeout", "handshake_timeout", "busy"])
def test_an_answer_that_does_not_come_is_the_slowest(spark: SparkSession, reason: str) -> None:
    """A dial that has waited for an answer until its time was up writes "timeout"."""
    target = CLIENTS[2]
    lines = [accepted(ALICE, target, GOOD, 5_000), dial(ALICE, target, GOOD, [step(TWIN, "accept", reason)])]
    lines += [dial(ALICE, target, GOOD, [step(SLOW, "accept", "unknown_peer")])]
    found = compared(spark, lines)
    places = {relay: row["accept_sum"] / row["accept_targets"] for (relay, _), row in found.items()}
    assert places == {GOOD: pytest.approx(0.75), TWIN: pytest.approx(0.25)}
