"""Ranks: what lines count for what, with one client among fifty that lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from event_rows import Event, events, node_of, rows_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from rank_fleet import (
    ABUSER,
    ALICE,
    BOB,
    CLIENTS,
    FAILING,
    FLAPPING,
    FLOODER,
    GOOD,
    HOUR_S,
    LIARS,
    LOST,
    NOW,
    RELAYS,
    SLOW,
    TWIN,
    Fleet,
    dial,
    down,
    honest,
    key,
    lines_frame,
    refusal,
    session,
    started,
    step,
)

from dmsg_logs.ranks.document import WINDOW_S, gather_voices
from dmsg_logs.ranks.scoring import SCALE, SHARE, STEP, VOICES, Scores, Voice, compare, score_relays
from dmsg_logs.tables.transforms.rank_evidence import AHEAD_S, HALF_LIFE_S, faded, relay_evidence

PARTS = ("score", "success", "latency", "capacity", "drops")
ONE_VOICE = SCALE / VOICES + STEP


def order(scores: Scores) -> dict[tuple[str, str], int]:
    """How each relay compares with each other one."""
    found = {relay: score.score for relay, score in scores.relays.items() if relay in RELAYS}
    return {(one, other): compare(found[one], found[other]) for one, other in permutations(RELAYS, 2)}


# --- the order of the relays -----------------------------------------------------------------------------------------


def test_relays_are_ordered_by_how_they_serve(fleet: Fleet) -> None:
    found = order(fleet.scores())
    assert found[GOOD, TWIN] == 0
    for good in (GOOD, TWIN):
        assert {found[good, other] for other in (SLOW, FLAPPING, FAILING)} == {1}
    assert found[SLOW, FAILING] == 1
    assert found[FLAPPING, FAILING] == 1


def test_each_part_tells_what_it_is_named_after(fleet: Fleet) -> None:
    relays = fleet.scores().relays
    assert set(relays) == set(RELAYS)
    worst = {part: min(RELAYS, key=lambda relay: getattr(relays[relay], part)) for part in PARTS[1:]}
    assert (worst["success"], worst["latency"], worst["drops"]) == (FAILING, SLOW, FLAPPING)
    assert {relay.clients for relay in relays.values()} == {len(CLIENTS)}
    assert all(relay.dials >= 4 * len(CLIENTS) for relay in relays.values())


@pytest.mark.parametrize("name", LIARS)
def test_one_liar_among_fifty_does_not_change_the_order_of_the_relays(fleet: Fleet, name: str) -> None:
    liar, _ = LIARS[name]
    without, with_, left_in = fleet.scores(), fleet.scores(liar), fleet.scores(liar, excluded=False)
    assert order(with_) == order(left_in) == order(without)
    for relay in RELAYS:
        for part in PARTS:
            was = getattr(without.relays[relay], part)
            assert abs(getattr(left_in.relays[relay], part) - was) <= ONE_VOICE
            assert abs(getattr(with_.relays[relay], part) - was) <= ONE_VOICE


@pytest.mark.parametrize("name", ["all others fail", "one relay is praised", "no name of its own"])
def test_the_liars_of_these_tests_are_heard(fleet: Fleet, name: str) -> None:
    liar, _ = LIARS[name]
    assert fleet.scores(liar, excluded=False).relays != fleet.scores().relays


def test_what_a_client_says_is_nothing_to_other_voices(spark: SparkSession, fleet: Fleet, tmp_path: Path) -> None:
    alone, _ = gather_voices(lines_frame(spark, honest(), tmp_path / "lines.jsonl"), now=NOW)
    assert {(one.relay, one.client): one for one in alone} == {(one.relay, one.client): one for one in fleet.honest}


def test_flagged_clients_are_left_out_and_counted(fleet: Fleet) -> None:
    assert fleet.excluded == {node_of(ABUSER), node_of(FLOODER)}
    scores = fleet.scores(ABUSER)
    assert scores.excluded_clients == 1
    assert scores.excluded_events >= 40
    assert scores.relays == fleet.scores().relays


def test_a_client_that_takes_no_requests_costs_its_relay_nothing(
    spark: SparkSession, fleet: Fleet, tmp_path: Path
) -> None:
    """One that reads too slowly lets a relay refuse the requests of all others to it, in their names."""
    busy = [refusal(GOOD, client, "request", "busy", 200, NOW - at) for client in CLIENTS for at in range(0, 3000, 500)]
    voices, _ = gather_voices(lines_frame(spark, honest() + busy, tmp_path / "lines.jsonl"), now=NOW)
    with_, without = (score_relays(said, relays=fleet.told).relays[GOOD] for said in (voices, fleet.honest))
    assert with_ == without


def test_a_relay_is_not_made_up_by_one_client(fleet: Fleet) -> None:
    assert {one.relay for one in fleet.others} <= set(RELAYS)


def test_a_key_with_the_end_of_a_line_behind_it_is_none(spark: SparkSession) -> None:
    """It would be in no document that anyone reads, and one client would have a voice for each end there is."""
    lines: list[Event] = []
    for end in ("\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"):
        (name, told) = started([GOOD])[0]
        lines.append((name, {**told, "public_key": GOOD + end}))
        lines += [session(client, SLOW + end, 0.1) for client in (ALICE, BOB)]
        (name, up) = session(ALICE, GOOD, 0.1)
        lines.append((name, {**up, "node": node_of(ALICE) + end}))
        lines.append(refusal(GOOD, BOB + end, "request", "busy"))
    lines.append(session(ALICE, GOOD, 0.1))
    lines.append(session(BOB, GOOD, 0.1))
    voices, told_keys = gather_voices(events(spark, lines), now=NOW)
    assert told_keys == []
    assert {(one.relay, one.client) for one in voices} == {(GOOD, node_of(ALICE)), (GOOD, node_of(BOB)), (GOOD, "")}


# --- any lines of one client -----------------------------------------------------------------------------------------

ODD = [key("abab", number) for number in range(12)]
moments = st.floats(NOW - WINDOW_S - 1000, NOW + 1000)
amounts = st.floats() | st.floats(0, 1e4)
counts = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5000)
relays = st.sampled_from([*RELAYS, *RELAYS, node_of(GOOD), "", "é", key("0101", 1)])
reasons = st.sampled_from(
    ["timeout", "connection refused", LOST, "too many connections", "busy", "closed", "", "other"]
)
leaves = st.builds(step, relays, st.sampled_from(["connect", "handshake", "request", "accept", "?"]), reasons)
attempts = st.lists(leaves, max_size=30).map(json.dumps) | st.sampled_from(["", "[]", "[[", "{}", "null", "[null,1]"])
keys = st.sampled_from([*CLIENTS[:5], *ODD, "", "x"])


@st.composite
def odd_lines(draw: st.DrawFn) -> Event:
    """A line one of the odd clients writes, or a relay writes about it, with anything in it."""
    client = draw(st.sampled_from(ODD))
    common: dict[str, Any] = {"ts": draw(moments), "role": "client", "node": node_of(client)}
    kind = draw(st.integers(0, 5))
    if kind == 0:
        text, ok = draw(attempts), draw(st.booleans() | st.none())
        return "dial_finished", {**common, "server": draw(relays), "ok": ok, "target": draw(keys), "attempts": text}
    if kind == 1:
        return "session_up", {**common, "server": draw(relays), "duration_s": draw(amounts | st.none())}
    if kind == 2:
        down_ = {"server": draw(relays), "duration_s": draw(amounts | st.none()), "reason": draw(reasons)}
        return "session_down", {**common, **down_}
    if kind == 3:
        ends = {"initiator": client, "responder": draw(keys), "server": draw(relays)}
        return "transport_opened", {**common, **ends, "accept_ms": draw(amounts)}
    relay = {**common, "role": "server", "node": node_of(draw(st.sampled_from(RELAYS))), "remote": client}
    if kind == 4:
        what = {"what": draw(st.sampled_from(["connection", "request", "frame"])), "reason": draw(reasons)}
        return "refused", {**relay, **what, "count": draw(counts)}
    return "connection_closed", {**relay, "reason": draw(st.sampled_from(["abuse", "closed by peer"]))}


def test_any_lines_of_a_client_move_scores_by_its_voice_at_most(spark: SparkSession, fleet: Fleet) -> None:
    """Twelve odd clients write anything; each is then the only one of them in an otherwise honest fleet."""
    without = fleet.scores().relays
    heard = []

    @settings(max_examples=2, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.lists(odd_lines(), min_size=140, max_size=190))
    def check(lines: list[Event]) -> None:
        voices, _ = gather_voices(events(spark, started() + lines), now=NOW)
        heard.extend(voices)
        assert {one.client for one in voices} <= {node_of(client) for client in ODD}
        for client in ODD:
            own = [one for one in voices if one.client == node_of(client)]
            with_ = score_relays(fleet.honest + own, relays=fleet.told).relays
            for relay in RELAYS:
                for part in PARTS:
                    assert abs(getattr(with_[relay], part) - getattr(without[relay], part)) <= ONE_VOICE

    check()
    assert len({one.client for one in heard}) == len(ODD)


# --- what counts for what --------------------------------------------------------------------------------------------


def seen(spark: SparkSession, lines: Sequence[Event], now: float = NOW) -> dict[tuple[str, str], dict[str, float]]:
    """Faded evidence by relay and client."""
    rows = rows_of(faded(relay_evidence(events(spark, lines), now=now, window_s=WINDOW_S), now=now, half_life_s=1e12))
    return {(row["relay"], row["client"]): row for row in rows}


def test_whose_fault_a_failure_is(spark: SparkSession) -> None:
    steps = {
        ("connect", "connection refused"): "failed",
        ("connect", "timeout"): "failed",
        ("connect", "given up"): "",
        ("handshake", "timeout"): "failed",
        ("handshake", "message 2 does not open"): "failed",
        ("handshake", "too many connections"): "refused",
        ("handshake", "server_draining"): "refused",
        ("handshake", "server under load"): "refused",
        ("handshake", "you are banned"): "",
        ("request", "server connection lost"): "failed",
        ("request", "downgrade"): "ok",
        ("accept", "server connection lost"): "failed",
        ("accept", "unknown_peer"): "ok",
        ("accept", "refused"): "ok",
        ("accept", "access_denied"): "ok",
        ("accept", "busy"): "ok",
        ("discovery", "server has no entry"): "",
    }
    sessions = {
        ("connection refused", 0.0): "failed",
        ("no OK in time", 0.0): "failed",
        ("too many connections", 0.0): "refused",
        ("server has no entry", 0.0): "",
        ("given up", 0.0): "",
        ("Connection was lost.", 5.0): "dropped",
        ("server_draining", 5.0): "dropped",
        ("closed", 5.0): "",
    }
    wanted, lines = {}, []
    for number, ((stage, reason), what) in enumerate(steps.items()):
        relay = key("5555", number)
        wanted[relay] = what
        # hours apart: everything in one bucket would look as if Alice were offline
        lines.append(dial(ALICE, BOB, "", [step(relay, stage, reason)], NOW - 400 * number))
    for number, ((reason, up_s), what) in enumerate(sessions.items(), len(steps)):
        relay = key("5555", number)
        wanted[relay] = what
        lines.append(down(ALICE, relay, reason, up_s, NOW - 400 * number))
    found = seen(spark, lines)
    kinds = ("ok", "failed", "refused", "dropped")
    said = {relay: "".join(kind for kind in kinds if row[kind] > 0.9) for (relay, _), row in found.items()}
    assert said == wanted


def test_lines_that_count_for_no_relay_or_for_another(spark: SparkSession) -> None:
    own, other = node_of(GOOD), node_of(TWIN)
    server = {"role": "server", "node": own, "ts": NOW - 60}
    lines: list[Event] = [
        # a relay that writes as clients do, about itself and about another
        ("session_up", {**session(ALICE, GOOD, 0.1)[1], **server}),
        ("session_down", {**down(ALICE, TWIN, "connection lost", 5.0)[1], **server}),
        ("dial_finished", {**dial(ALICE, BOB, GOOD)[1], **server}),
        # what it says against itself
        refusal(GOOD, ALICE, "connection", "too many connections", 3),
        refusal(GOOD, "198.51.100.7", "connection", "half_open", 4),
        ("events_dropped", {**server, "count": 1000}),
        # limits of one client are no lack of room
        refusal(TWIN, ALICE, "request", "rate_limited", 50),
        refusal(TWIN, "198.51.100.7", "connection", "half_open_per_address", 50),
        # nor is one of the client that was dialled
        refusal(TWIN, ALICE, "request", "busy", 50),
        # a client's own refusals are of peers
        ("refused", {**refusal(TWIN, BOB, "request", "busy")[1], "role": "client", "node": node_of(ALICE)}),
        # other times
        session(ALICE, SLOW, 0.1, NOW - WINDOW_S - 1),
        session(ALICE, SLOW, 0.1, NOW + AHEAD_S + 1),
    ]
    found = {names: row for names, row in seen(spark, lines).items() if row["pieces"]}
    assert set(found) == {(own, node_of(ALICE)), (own, ""), (own, "self")}
    assert round(found[own, node_of(ALICE)]["refused"]) == 3
    assert round(found[own, ""]["refused"]) == 4
    assert round(found[own, "self"]["dropped"]) == 1
    assert not any(row["ok"] for row in found.values())
    assert other not in {relay for relay, _ in found}


def test_a_client_without_a_network_blames_no_relay(spark: SparkSession) -> None:
    at = NOW - HOUR_S
    lines = [
        # Alice loses everything at once
        *[down(ALICE, relay, "Connection was lost.", 50.0, at) for relay in (GOOD, TWIN)],
        *[dial(ALICE, BOB, "", [step(relay, "connect", "timeout")], at) for relay in (GOOD, TWIN)],
        # Bob loses one of three
        *[session(BOB, relay, 0.1, at) for relay in (GOOD, SLOW)],
        down(BOB, TWIN, "Connection was lost.", 50.0, at),
    ]
    found = seen(spark, lines)
    assert [
        found[relay, node_of(ALICE)]["failed"] + found[relay, node_of(ALICE)]["dropped"] for relay in (GOOD, TWIN)
    ] == [
        0,
        0,
    ]
    assert round(found[TWIN, node_of(BOB)]["dropped"]) == 1


def test_a_relay_that_never_answers_does_not_excuse_another(spark: SparkSession) -> None:
    """A peer may name such a one in its entry, to hide that the other relay it names loses sessions."""
    at = NOW - HOUR_S
    dead, other = key("5555", 1), key("5555", 2)
    lines = [
        down(ALICE, GOOD, "Connection was lost.", 50.0, at),
        dial(ALICE, BOB, "", [step(dead, "connect", "timeout")], at),
        # nothing has worked for Bob yet: his network may be the reason
        *[dial(BOB, ALICE, "", [step(relay, "connect", "timeout")], at) for relay in (dead, other)],
    ]
    found = seen(spark, lines)
    assert round(found[GOOD, node_of(ALICE)]["dropped"]) == 1
    assert found[dead, node_of(BOB)]["failed"] + found[other, node_of(BOB)]["failed"] == 0


def test_a_relay_heals(spark: SparkSession) -> None:
    """What it did counts half after each half-life, so that the same relay, silent or serving well, comes back."""
    refused = [step(GOOD, "connect", "connection refused")]
    lines = [dial(ALICE, BOB, "", refused, NOW - at) for at in range(0, 250, 10)]
    lines += [session(ALICE, GOOD, 0.1, NOW + 12 * HOUR_S - at) for at in range(0, 250, 3)]
    evidence = relay_evidence(events(spark, lines), now=NOW + 12 * HOUR_S, window_s=WINDOW_S).cache()
    fresh, later = (
        rows_of(faded(evidence.where(f"bucket <= {NOW + ahead}"), now=NOW + ahead))[0] for ahead in (0.0, 12 * HOUR_S)
    )
    assert fresh["failed"] == pytest.approx(25, rel=0.05)
    assert later["failed"] == pytest.approx(fresh["failed"] * 2 ** (-12 * HOUR_S / HALF_LIFE_S), rel=0.05)

    def success(row: dict[str, Any]) -> int:
        said = [Voice(GOOD, str(at), ok=row["ok"], failed=row["failed"]) for at in range(50)]
        return score_relays(said).relays[GOOD].success

    assert success(fresh) < 100
    assert success({**fresh, **{name: fresh[name] / 1000 for name in ("ok", "failed")}}) > 450
    assert success(later) > 650


def test_trying_again_and_again_is_one_piece_of_evidence(spark: SparkSession) -> None:
    lines = [down(ALICE, relay, reason, 0.0, NOW - 1 - at) for at in range(200) for relay, reason in TRIED]
    lines += [session(ALICE, SLOW, 0.1, NOW - 100)]  # Alice is not offline
    found = seen(spark, lines)
    assert round(found[GOOD, node_of(ALICE)]["failed"]) == 1
    assert round(found[TWIN, node_of(ALICE)]["refused"]) == 1


TRIED = ((GOOD, "connection refused"), (TWIN, "too many connections"))


def test_the_stated_share() -> None:
    assert SHARE == 50 and ONE_VOICE == 30
