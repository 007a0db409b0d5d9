"""Candidates for abuse: who is flagged, who is not, and on whose word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from event_rows import DAY, Event, events, node_of, rows_of
from pyspark.sql import SparkSession
from rank_fleet import RELAYS, abuse_close, accepted, dial, key, lines_frame, refusal, step

from dmsg_logs.schemas import LINE
from dmsg_logs.synthetic import generate
from dmsg_logs.tables.transforms.abuse import (
    ABUSE_CANDIDATES,
    ABUSE_ROOM,
    FLAGGED,
    FRUITLESS_ROOM,
    OFFENCE_ROOM,
    SCANNED_TARGETS,
    abuse_candidates,
    abuse_scores,
)

#: A noon: all of it is within one day.
NOW = DAY + 43_200
FIRST, SECOND = RELAYS[:2]
ABUSER, CLOSED, BUSY, LONELY, SCANNER, VICTIM, ACCUSED, LIAR, NEIGHBOUR, SHARING, OUTED, QUIET = (
    key("9999", number) for number in range(12)
)


def opened(relay: str, client: str, ts: float) -> Event:
    """A transport as the relay logs it."""
    fields = {**accepted(client, QUIET, relay, 20.0, ts)[1], "role": "server", "node": node_of(relay)}
    return "transport_opened", fields


def arrival(relay: str, client: str, address: str) -> Event:
    fields = {"role": "server", "node": node_of(relay), "remote": client, "address": address, "ts": NOW - 60}
    return "connection_opened", fields


def stumble(relay: str, address: str) -> Event:
    fields = {"role": "server", "node": node_of(relay), "address": address, "ts": NOW - 60, "reason": "timeout"}
    return "handshake_failed", fields


def told(relay: str, client: str, what: str, reason: str, count: int = 1, ts: float = NOW) -> Event:
    """A refusal of that day."""
    return refusal(relay, client, what, reason, count, ts)


def lines() -> list[Event]:
    """A day in which each key does one thing."""
    found: list[Event] = []
    for relay in (FIRST, SECOND):
        found += [told(relay, ABUSER, "request", "rate_limited", 4000), opened(relay, ABUSER, NOW)]
        found += [abuse_close(relay, CLOSED, NOW - at) for at in range(2)]
        # meets a limit 60 times, and is told 500 times that a peer is away, in 400 transports
        found += [
            told(relay, BUSY, "request", "rate_limited", 30),
            told(relay, BUSY, "request", "unknown_peer", 250),
        ]
        found += [opened(relay, BUSY, NOW - at) for at in range(200)]
        found += [told(relay, VICTIM, "request", "server_draining", 900)]
        # others fill its address and the target it dials
        found += [told(relay, VICTIM, "connection", "connections_per_address", 900)]
        found += [told(relay, VICTIM, "request", "requests_per_target", 900)]
        found += [stumble(relay, "10.0.0.1"), stumble(relay, "10.0.0.2"), stumble(relay, "10.0.0.3")]
    found += [dial(BUSY, QUIET, FIRST, [], NOW - at) for at in range(50)]
    # calls one friend who is away; cannot reach a relay; dials every key it can think of
    away = [step(FIRST, "accept", "unknown_peer")]
    found += [dial(LONELY, QUIET, "", away, NOW - at) for at in range(FRUITLESS_ROOM)]
    found += [dial(VICTIM, key("0000", at), "", [step(FIRST, "connect", "timeout")], NOW - at) for at in range(60)]
    found += [dial(SCANNER, key("0000", at % 100), "", away, NOW - at) for at in range(FRUITLESS_ROOM + 1)]
    # one relay's word, and a client's
    found += [told(FIRST, ACCUSED, "request", "malformed", 1000), abuse_close(FIRST, ACCUSED, NOW)]
    found += [("refused", {**told(FIRST, OUTED, "transport", "abuse", 9)[1], "role": "client", "node": node_of(LIAR)})]
    found += [("connection_closed", {**abuse_close(FIRST, OUTED, NOW)[1], "role": "client", "node": node_of(LIAR)})]
    # two keys at one address; one key at another
    found += [
        arrival(FIRST, SHARING, "10.0.0.1"),
        arrival(FIRST, QUIET, "10.0.0.1"),
        arrival(FIRST, NEIGHBOUR, "10.0.0.2"),
    ]
    # what makes no sense
    found += [
        told(FIRST, "198.51.100.7", "connection", "half_open_per_address", 99),
        told(FIRST, "", "frame", "abuse"),
    ]
    found += [told(FIRST, QUIET, "request", "rate_limited", -50)]
    return found


@pytest.fixture(scope="module")
def scores(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Rows by key; clients no relay has seen go by the first digits."""
    rows = rows_of(abuse_scores(lines_frame(spark, lines(), tmp_path_factory.mktemp("abuse") / "lines.jsonl")))
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"]: row for row in rows}


def test_who_is_flagged(scores: dict[str, dict[str, Any]]) -> None:
    flagged = {key_: row["why"] for key_, row in scores.items() if row["flagged"]}
    assert flagged == {
        ABUSER: "refusals",
        CLOSED: "closed for abuse",
        node_of(SCANNER): "fruitless dials",
        ACCUSED: "refusals",
    }
    assert all((row["score"] >= FLAGGED) == row["flagged"] and 0 <= row["score"] <= 1 for row in scores.values())


def test_one_relay_alone_silences_no_client(scores: dict[str, dict[str, Any]]) -> None:
    assert {key_ for key_, row in scores.items() if row["confirmed"]} == {ABUSER, CLOSED, node_of(SCANNER)}


def test_a_busy_honest_client_is_not_flagged(scores: dict[str, dict[str, Any]]) -> None:
    busy = scores[BUSY]
    assert (busy["refusals"], busy["relays"], busy["dials"], busy["flagged"]) == (560, 2, 50, False)
    assert busy["score"] == pytest.approx(60 / (60 + 400 + OFFENCE_ROOM))
    assert not scores[node_of(LONELY)]["flagged"]
    assert not scores[VICTIM]["flagged"]
    assert (scores[VICTIM]["dial_failures"], scores[VICTIM]["refusals"]) == (60, 5400)


def test_what_a_client_says_of_others_counts_for_nothing(scores: dict[str, dict[str, Any]]) -> None:
    assert not {OUTED, LIAR, node_of(OUTED), node_of(LIAR)} & set(scores)


def test_handshakes_are_told_of_keys_that_had_their_address_alone(scores: dict[str, dict[str, Any]]) -> None:
    assert scores[NEIGHBOUR]["handshakes_failed"] == 1
    assert scores[NEIGHBOUR]["score"] == 0
    assert SHARING not in scores


def test_lines_without_a_key_make_no_row(scores: dict[str, dict[str, Any]]) -> None:
    assert set(scores) == {ABUSER, CLOSED, BUSY, node_of(LONELY), node_of(SCANNER), VICTIM, ACCUSED, NEIGHBOUR}


def test_thresholds(spark: SparkSession, tmp_path: Path) -> None:
    """Each day on its own; at its threshold a reason gives exactly the score that flags."""
    day = 86_400.0
    found: list[Event] = []
    for at, extra in enumerate((-1, 0)):
        ts = NOW - 60 - day * at
        found += [told(FIRST, ABUSER, "request", "rate_limited", OFFENCE_ROOM + extra, ts)]
        found += [abuse_close(FIRST, CLOSED, ts - one) for one in range(ABUSE_ROOM + extra)]
        away = [step(FIRST, "accept", "unknown_peer")]
        targets = SCANNED_TARGETS + extra
        found += [dial(SCANNER, key("0000", one % targets), "", away, ts - one) for one in range(FRUITLESS_ROOM)]
    rows = rows_of(abuse_candidates(lines_frame(spark, found, tmp_path / "lines.jsonl")))
    assert list(rows[0]) == list(ABUSE_CANDIDATES.names)
    dates = sorted({row["date"] for row in rows})
    assert len(rows) == 6 and len(dates) == 2
    for row in rows:
        assert row["flagged"] == (row["date"] == dates[0])
        assert row["date"] == dates[1] or row["score"] == FLAGGED


def test_only_the_abusers_of_a_synthetic_fleet_are_flagged(spark: SparkSession, tmp_path: Path) -> None:
    truth = generate(tmp_path / "landing", events=8_000, days=2, seed=11, relays=3, clients=12, workers=1)
    landing = spark.read.schema(LINE).option("recursiveFileLookup", True).json(str(tmp_path / "landing" / "*"))
    flagged = rows_of(abuse_scores(landing.where("event is not null")).where("flagged"), "key", "confirmed")
    assert {row["key"] for row in flagged} == set(truth.planted["abusive_keys"])
    assert any(row["confirmed"] for row in flagged)
    assert not {row["key"] for row in flagged} & set(truth.planted["lying_keys"])


def test_the_frame_is_that_of_the_table(spark: SparkSession) -> None:
    frame = abuse_candidates(events(spark, []))
    assert [(each.name, each.dataType) for each in frame.schema] == [
        (each.name, each.dataType) for each in ABUSE_CANDIDATES.schema
    ]
