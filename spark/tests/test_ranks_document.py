"""The document of ranks: made of lines, signed, written at once, read back, and refused when it is spoiled."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from event_rows import events, node_of
from pyspark.sql import SparkSession
from rank_fleet import (
    ALICE,
    BOB,
    CLIENTS,
    FAILING,
    FLAPPING,
    GOOD,
    HOUR_S,
    NOW,
    SLOW,
    TWIN,
    Fleet,
    key,
    refusal,
    session,
    started,
)
from rank_vectors import OPERATOR, VECTORS

from dmsg_logs.ranks.document import (
    LIFETIME_S,
    RELAYS_LIMIT,
    WINDOW_S,
    Ranks,
    RanksError,
    compute_ranks,
    excluded_clients,
    ranks_document,
    verify_document,
    write_ranks,
)
from dmsg_logs.ranks.scoring import RelayScore, effective


def test_from_lines_to_a_document_that_is_replaced_at_once(spark: SparkSession, fleet: Fleet, tmp_path: Path) -> None:
    ranks = compute_ranks(fleet.events, now=NOW + 0.75)
    assert ranks.issued == NOW
    assert ranks.excluded_clients == 2
    assert ranks.relays[GOOD].score > ranks.relays[FLAPPING].score > ranks.relays[FAILING].score
    target = tmp_path / "new" / "relay_ranks.json"
    for target_uri in (str(target), target.as_uri()):
        target.unlink(missing_ok=True)
        write_ranks(spark, ranks, target_uri, OPERATOR)
        assert verify_document(target.read_bytes(), {OPERATOR.public_key}, NOW) == replace_issuer(ranks)
    write_ranks(None, Ranks(issued=int(NOW) + 1), str(target), OPERATOR)
    assert verify_document(target.read_text(), {OPERATOR.public_key}, NOW).relays == {}
    assert [one.name for one in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("with_spark", [True, False])
def test_other_ranks_of_the_same_second_are_issued_after_those_before(
    spark: SparkSession, tmp_path: Path, with_spark: bool
) -> None:
    """Readers refuse a document that differs from the one before and is no later."""
    target = tmp_path / "ranks.json"

    def issued(ranks: Ranks) -> float:
        write_ranks(spark if with_spark else None, ranks, str(target), OPERATOR)
        written = verify_document(target.read_bytes(), {OPERATOR.public_key}, NOW + 1000)
        assert written.relays == ranks.relays
        return written.issued - NOW

    score = RelayScore(900, 900, 900, 900, 900, 10, 5)
    some, more = (Ranks(int(NOW), relays=dict.fromkeys(relays, score)) for relays in ((GOOD,), (GOOD, SLOW)))
    assert issued(some) == 0
    document = target.read_bytes()
    assert issued(some) == 0
    assert target.read_bytes() == document
    assert [issued(each) for each in (more, more, some)] == [1, 1, 2]
    assert issued(replace(some, issued=int(NOW) + 2)) == 2
    assert issued(replace(more, issued=int(NOW) + 500)) == 500
    assert issued(replace(more, issued=int(NOW))) == 0, "an older document is what it says, and readers decide"
    target.write_bytes(document.replace(b"900", b"901"))
    assert issued(more) == 0, "that was none of ours"


def replace_issuer(ranks: Ranks) -> Ranks:
    return Ranks(
        **{**{name: getattr(ranks, name) for name in Ranks.__dataclass_fields__}, "issuer": OPERATOR.public_key}
    )


def test_no_events_make_an_empty_document(spark: SparkSession) -> None:
    assert compute_ranks(events(spark, []), now=NOW) == Ranks(issued=int(NOW))
    assert (WINDOW_S, LIFETIME_S) == (86_400, 172_800)


def test_the_document_of_the_vectors_is_read(tmp_path: Path) -> None:
    ranks = verify_document(VECTORS["document"], {VECTORS["issuer"]}, VECTORS["now"])
    assert verify_document(VECTORS["spaced"].encode(), {VECTORS["issuer"]}, VECTORS["now"]) == ranks
    unsigned = json.loads(VECTORS["unsigned"])
    assert {relay: asdict(score) for relay, score in ranks.relays.items()} == unsigned["relays"]
    assert {**ranks_document(ranks), "issuer": ranks.issuer} == unsigned
    write_ranks(None, ranks, str(tmp_path / "again.json"), OPERATOR)
    assert (tmp_path / "again.json").read_text() == VECTORS["document"]


@pytest.mark.parametrize("why", VECTORS["refused"])
def test_spoiled_documents_are_refused(why: str) -> None:
    with pytest.raises(RanksError):
        verify_document(VECTORS["refused"][why], {VECTORS["issuer"]}, VECTORS["now"])


def test_a_document_over_the_limits_is_neither_written_nor_read(tmp_path: Path) -> None:
    score = RelayScore(500, 500, 500, 500, 500, 0, 0)
    many = {f"02{number:064x}": score for number in range(RELAYS_LIMIT + 1)}
    with pytest.raises(RanksError, match="at most"):
        write_ranks(None, Ranks(issued=1, relays=many), str(tmp_path / "ranks.json"), OPERATOR)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RanksError, match="longer than"):
        verify_document(" " * (4 * 1024 * 1024 + 1), {OPERATOR.public_key}, NOW)
    with pytest.raises(RanksError, match="not JSON"):
        verify_document("[" * 100_000, {OPERATOR.public_key}, NOW)


def test_invented_relays_cannot_crowd_out_real_ones(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmsg_logs.ranks.document.RELAYS_LIMIT", 3)
    invented = [key("0bad", number) for number in range(4)]
    lines = [session(client, relay, 0.1) for client in (ALICE, BOB) for relay in invented]
    lines += [session(client, invented[3], 0.1) for client in CLIENTS[2:4]]
    ranks = compute_ranks(events(spark, [*started((GOOD, SLOW)), *lines]), now=NOW)
    assert set(ranks.relays) == {GOOD, SLOW, invented[3]}


def test_a_day_of_offences_counts_as_a_whole_where_the_window_begins_at_noon(spark: SparkSession) -> None:
    """Half of them in the morning and half in the evening: the limits are for a day, as in the table."""
    morning, evening = (
        [refusal(relay, ALICE, "request", "rate_limited", 40, ts) for relay in (GOOD, TWIN)]
        for ts in (NOW - 18 * HOUR_S, NOW - 6 * HOUR_S)
    )
    before = [refusal(relay, BOB, "request", "rate_limited", 900, NOW - 25 * HOUR_S) for relay in (GOOD, TWIN)]
    lines = events(spark, [*before, *morning, *evening])
    assert excluded_clients(lines, now=NOW + 12 * HOUR_S) == {node_of(ALICE)}


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_ranks(None, Ranks(issued=1), str(tmp_path / "taken"), OPERATOR)
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("case", VECTORS["effective"], ids=lambda case: f"{case['score']} after {case['age_s']} s")
def test_scores_fade_as_in_the_vectors(case: dict[str, float]) -> None:
    issued = VECTORS["now"]
    assert effective(int(case["score"]), issued, LIFETIME_S, issued + case["age_s"]) == case["effective"]
