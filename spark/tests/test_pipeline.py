"""The stages: what they ask of each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from event_rows import ALICE, OTHER_RELAY, RELAY, node_of
from landing_files import START, LandingZone, line
from pyspark.sql import SparkSession

from dmsg_logs.ingest.batches import ingest
from dmsg_logs.pipeline import ranks_stage, report_stage
from dmsg_logs.ranks.document import RanksError
from dmsg_logs.ranks.signing import SecretKey
from dmsg_logs.report import ReportData

HOUR_S = 3600.0


def test_a_window_of_ranks_ends_where_two_logs_of_the_operator_s_end(spark: SparkSession, tmp_path: Path) -> None:
    """One of two relays has been down for half a day; a client's clock, and a single forged line, are far ahead."""
    zone, tables, target = LandingZone(tmp_path / "landing"), tmp_path / "tables", tmp_path / "ranks.json"

    def issued() -> int:
        ingest(spark, str(zone.root), str(tables))
        ranks_stage(spark, str(tables), str(target), SecretKey(b"\1" * 32))
        return int(json.loads(target.read_text())["issued"])

    def log(node: str, *hours: float, role: str = "server") -> None:
        texts = [line(node=node, role=role, seq=seq, ts=START + HOUR_S * hour) for seq, hour in enumerate(hours)]
        zone.file(node=node, role=role, lines=texts)

    log(node_of(RELAY), 0, 1)
    log(node_of(ALICE), 1000, role="client")
    log(node_of(OTHER_RELAY), 0, 13)
    log("discovery", 12, role="discovery")
    assert issued() == START + 12 * HOUR_S
    log("forged", 2000)
    assert issued() == START + 13 * HOUR_S


def test_a_relay_that_is_gone_for_good_does_not_hold_up_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    """Two relays write a log, and one of them has written none for days: the other's goes on alone. An old log that lands
    late does not set it back."""
    zone, target = LandingZone(tmp_path / "landing"), tmp_path / "ranks.json"

    def log(node: str, hour: float, landed_h: float) -> None:
        name = zone.file(node=node, lines=[line(node=node, ts=START + HOUR_S * hour)])
        os.utime(zone.root / name, (START + HOUR_S * landed_h,) * 2)

    def issued(tables: str) -> int:
        ingest(spark, str(zone.root), tables)
        ranks_stage(spark, tables, str(target), SecretKey(b"\1" * 32))
        return int(json.loads(target.read_text())["issued"])

    log(node_of(OTHER_RELAY), 10, landed_h=10.1)
    log(node_of(RELAY), 100, landed_h=100.1)
    log("late", 50, landed_h=100.1)
    assert issued(f"{tmp_path}/gone") == START + 100 * HOUR_S
    log("down", 77, landed_h=77.1)
    assert issued(f"{tmp_path}/down") == START + 77 * HOUR_S


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("\udcff", "'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not an object"),
        ('{"relays": 5}', "this is not version 1 of dmsg-relay-ranks"),
        (line(), "this is not version 1 of dmsg-relay-ranks"),
    ],
)
def test_a_report_shows_the_scores_of_a_document_of_ranks_only(
    spark: SparkSession, tmp_path: Path, text: str, problem: str
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RanksError, match=f"^{other}: {problem}"):
        report_stage(spark, ReportData(), {}, f"{tmp_path}/report", None, str(other))
    assert not (tmp_path / "report").exists()
