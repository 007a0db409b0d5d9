"""Connections and transports: which opening goes with which closing."""

from __future__ import annotations

from typing import Any

import pytest
from event_rows import ALICE, BOB, BOOT, CAROL, DAY, OTHER_RELAY, RELAY, accounts, events, keys_of, node_of, rows_of
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.tables.transforms.connections import CONNECTIONS, connections
from dmsg_logs.tables.transforms.log_quality import LOG_QUALITY, log_quality
from dmsg_logs.tables.transforms.transports import TRANSPORTS, transports

LATER_BOOT = "b1" * 4


def _opened(conn: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "connection_opened", {
        "conn": conn, "remote": ALICE, "address": "10.0.0.1", "handshake_ms": 4.5, "extended": True, **fields
    }  # fmt: skip


def _closed(conn: int, duration_s: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "connection_closed", {
        "conn": conn, "remote": ALICE, "reason": "closed by peer", "duration_s": duration_s, "bytes_in": 10,
        "bytes_out": 20, "frames_in": 1, "frames_out": 2, "transports": 0, **fields
    }  # fmt: skip


def test_connections(spark: SparkSession) -> None:
    lines = events(
        spark,
        [
            _opened(1, ts=DAY + 10),
            _closed(1, 90_000.0, ts=DAY + 90_010),
            _opened(1, ts=DAY + 20, remote=BOB),  # the number is used again
            _closed(7, 100.0, ts=DAY + 25),  # its opening line is lost
            _closed(1, 9.0, ts=DAY + 29, remote=BOB, reason="abuse"),
            _opened(2, ts=DAY + 30),  # cut off: the run is killed
            _opened(2, ts=DAY + 90_020, boot=LATER_BOOT),  # the same number in another run, still open
        ],
    )
    runs = log_quality(lines, keys_of(lines), accounts(spark, []))
    found = connections(lines, runs)
    assert found.dtypes == CONNECTIONS.dtypes
    rows = rows_of(
        found, "conn", "boot", "state", "opened_at", "closed_at", "duration_s", "remote", "reason", "run_over"
    )
    expected = [
        (1, BOOT, "closed", DAY + 10, DAY + 90_010, 90_000.0, ALICE, "closed by peer", False),
        (1, BOOT, "closed", DAY + 20, DAY + 29, 9.0, BOB, "abuse", False),
        (2, BOOT, "open", DAY + 30, None, None, ALICE, None, True),
        (2, LATER_BOOT, "open", DAY + 90_020, None, None, ALICE, None, False),
        (7, BOOT, "unopened", None, DAY + 25, 100.0, ALICE, "closed by peer", False),
    ]
    assert [tuple(row.values()) for row in rows] == expected
    whole, unopened = rows_of(found.where("conn = 7 or opened_at = %f" % (DAY + 10)))
    assert unopened["address"] is unopened["handshake_ms"] is unopened["extended"] is None
    assert (whole["address"], whole["handshake_ms"], whole["extended"]) == ("10.0.0.1", 4.5, True)
    assert str(whole["date"]) == "2026-03-02", "a connection belongs to the day it was opened on"
    amounts = ("bytes_in", "bytes_out", "frames_in", "frames_out", "transports")
    assert [whole[name] for name in amounts] == [unopened[name] for name in amounts] == [10, 20, 1, 2, 0]


ENDS = {"initiator": ALICE, "responder": BOB, "server": RELAY}


def _up(transport_id: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    fields = {"conn": 1, "accept_ms": 12.0, "security": "unknown", **ENDS, **fields}
    return "transport_opened", {"transport_id": transport_id, **fields}


def _down(transport_id: int, duration_s: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "transport_closed", {
        "transport_id": transport_id, "conn": 1, "reason": "normal", "code": 0, "by": "initiator",
        "duration_s": duration_s, "bytes_in": 100, "bytes_out": 200, "queue_peak_bytes": 50, "security": "unknown",
        **ENDS, **fields
    }  # fmt: skip


COLUMNS = ("transport_id", "state", "opened_at", "closed_at", "duration_s", "reason", "run_over")


def test_ids_that_are_used_again(spark: SparkSession) -> None:
    lines = events(
        spark,
        [
            _up(4, ts=DAY + 1),
            _up(4, ts=DAY + 2, conn=2),  # another connection's id 4
            _down(4, 2.0, ts=DAY + 3),
            _down(4, 0.0, ts=DAY + 4, reason="refused", code=1, by="responder"),  # a refused request
            _up(4, ts=DAY + 5),
            _down(4, 1.0, ts=DAY + 6),
            _up(4, ts=DAY + 7),  # its closing line is lost ...
            _up(4, ts=DAY + 8),  # ... which must not shift the next pair
            _down(4, 1.5, ts=DAY + 9.5),
            _down(4, 30.0, ts=DAY + 40),  # its opening line is lost
            _down(4, 0.0, ts=DAY + 41, responder=CAROL, reason="refused", code=1),
            _up(4, ts=DAY + 50, boot=LATER_BOOT),
        ],
    )
    runs = log_quality(lines, keys_of(lines), accounts(spark, []))
    found = transports(lines, runs)
    assert found.dtypes == TRANSPORTS.dtypes
    mine = [tuple(row.values()) for row in rows_of(found.where("conn = 1"), *COLUMNS)]
    assert mine == [
        (4, "closed", DAY + 1, DAY + 3, 2.0, "normal", False),
        (4, "closed", DAY + 5, DAY + 6, 1.0, "normal", False),
        (4, "closed", DAY + 8, DAY + 9.5, 1.5, "normal", False),
        (4, "closed", None, DAY + 40, 30.0, "normal", False),
        (4, "open", DAY + 7, None, None, None, True),
        (4, "open", DAY + 50, None, None, None, False),
        (4, "refused", None, DAY + 4, 0.0, "refused", False),
        (4, "refused", None, DAY + 41, 0.0, "refused", False),
    ]
    assert rows_of(found.where("conn = 2"), "state", "opened_at") == [{"state": "open", "opened_at": DAY + 2}]


def test_the_order_of_delivery_does_not_matter(spark: SparkSession) -> None:
    script = [_up(2, ts=DAY + 1), _down(2, 1.0, ts=DAY + 2), _up(2, ts=DAY + 3), _down(2, 1.0, ts=DAY + 4)]
    numbered = [(name, {**fields, "seq": seq}) for seq, (name, fields) in enumerate(script)]
    lines = events(spark, numbered[::-1])
    found = rows_of(
        transports(lines, log_quality(lines, keys_of(lines), accounts(spark, []))), "opened_at", "closed_at"
    )
    assert found == [
        {"opened_at": DAY + 1, "closed_at": DAY + 2},
        {"opened_at": DAY + 3, "closed_at": DAY + 4},
    ]


def test_a_client_has_the_same_id_on_several_servers_and_resumes(spark: SparkSession) -> None:
    mine = {"role": "client", "conn": 0, "node": node_of(ALICE), "security": "e2e"}
    lines = events(
        spark,
        [
            _up(6, ts=DAY + 1, **mine),
            _up(6, ts=DAY + 2, **{**mine, "server": OTHER_RELAY}),
            _down(6, 4.0, ts=DAY + 5, **{**mine, "server": RELAY}),
            _down(6, 7.0, ts=DAY + 9, **{**mine, "server": OTHER_RELAY}),
            # goes on over another relay, under another id, and ends there
            _up(8, ts=DAY + 20, **mine),
            (
                "transport_resumed",
                {"ts": DAY + 25, "transport_id": 6, **ENDS, "server": OTHER_RELAY, "elapsed_ms": 3.0},
            ),
            _down(6, 20.0, ts=DAY + 40, **{**mine, "server": OTHER_RELAY}, opened_id=8, opened_server=RELAY),
            # a line of version 1 does not tell what it began as
            _up(12, ts=DAY + 60, **mine),
            _down(14, 25.0, ts=DAY + 80, **{**mine, "server": OTHER_RELAY}),
        ],
    )
    found = transports(lines, log_quality(lines, keys_of(lines), accounts(spark, [])))
    columns = ("transport_id", "server", "state", "opened_at", "closed_at")
    assert [tuple(row.values()) for row in rows_of(found, *columns)] == [
        (12, RELAY, "open", DAY + 60, None),
        (14, OTHER_RELAY, "closed", None, DAY + 80),
        (6, RELAY, "closed", DAY + 1, DAY + 5),
        (6, OTHER_RELAY, "closed", DAY + 2, DAY + 9),
        (8, RELAY, "closed", DAY + 20, DAY + 40),
    ]


def test_log_quality(spark: SparkSession) -> None:
    started = ("server_started", {"public_key": RELAY, "seq": 1, "ts": DAY})
    lines = events(
        spark,
        [
            started,  # 0 is missing
            _up(2, seq=2, ts=DAY + 1),
            ("events_dropped", {"seq": 63, "count": 7, "ts": DAY + 2}),  # 3 to 62 are missing
            ("events_dropped", {"seq": 64, "count": 2, "ts": DAY + 3, "landed_at": DAY + 3 + 100_000}),
            ("server_stopped", {"seq": 200, "ts": DAY + 4}),  # whole words of numbers are missing
            ("connection_closed", {"boot": LATER_BOOT, "seq": 0, "ts": DAY + 60}),
            ("session_up", {"ts": DAY + 5}),
            _up(8, role="client", node="laptop", ts=DAY + 6),  # a given name
        ],
    )
    relay = {"role": "server", "node": node_of(RELAY)}
    files = accounts(
        spark,
        [
            {**relay, "boot": BOOT, "file": "a", "lines": 7, "good": 5, "dup": 1, "corrupt": 1, "missing": 2},
            {**relay, "boot": BOOT, "file": "b", "lines": 1, "dup": 1},
            {**relay, "boot": BOOT, "file": "b", "lines": 1, "dup": 1, "batch": 2},  # taken in again
            {**relay, "boot": "dead", "file": "c", "lines": 1, "corrupt": 1},
            {"file": "strange name.jsonl", "lines": 3, "good": 3},
        ],
    )
    found = log_quality(lines, keys_of(lines), files)
    assert found.dtypes == LOG_QUALITY.dtypes
    rows = {(row["node"], row["boot"]): row for row in rows_of(found)}
    assert len(rows) == 6
    first = rows[relay["node"], BOOT]
    assert first == {
        **relay, "boot": BOOT, "files": 2, "lines": 5, "first_seq": 1, "last_seq": 200, "gaps": 3,
        "gap_lines": 1 + 60 + 135, "dup": 3, "corrupt": 1, "missing": 2, "late_lines": 1, "lateness_s_p50": 60.0,
        "lateness_s_p99": pytest.approx(60 + 0.96 * 99_960), "lateness_s_max": 100_020.0, "events_dropped": 9, "ended": True,
        "first_at": DAY, "last_at": DAY + 4, "key": RELAY, "run_over": True, "protocol": "dmsg"
    }  # fmt: skip
    second = rows[relay["node"], LATER_BOOT]
    assert (second["key"], second["gaps"], second["gap_lines"]) == (RELAY, 0, 0), "the key is that of the node"
    assert (second["files"], second["ended"], second["run_over"]) == (0, False, False)
    only_a_file = rows[relay["node"], "dead"]
    assert (only_a_file["role"], only_a_file["lines"], only_a_file["corrupt"]) == ("server", 0, 1)
    assert only_a_file["first_seq"] is only_a_file["lateness_s_p50"] is None
    assert rows["", ""]["files"] == 1
    client = rows[node_of(ALICE), BOOT]
    assert (client["key"], client["ended"], client["run_over"]) == (node_of(ALICE), None, False)
    assert rows["laptop", BOOT]["key"] == ALICE


def test_a_run_with_lines_of_two_roles_is_counted_once(spark: SparkSession) -> None:
    """Numbers count up within a run whatever the role, so they and its files say something of the run only."""
    run = {"node": "twofold", "boot": BOOT}
    lines = events(
        spark,
        [
            ("events_dropped", {**run, "role": "server", "seq": 0, "count": 1}),
            ("events_dropped", {**run, "role": "client", "seq": 2, "count": 10}),  # 1 is missing
            ("events_dropped", {**run, "role": "client", "seq": 3, "count": 10}),
            ("events_dropped", {**run, "role": "shipper", "seq": 6, "count": 100}),  # 4 and 5 are missing
            ("events_dropped", {**run, "role": "server", "boot": LATER_BOOT, "seq": 0, "count": 1}),
        ],
    )
    file = {**run, "role": "server", "file": "a", "lines": 9, "good": 4, "dup": 2, "corrupt": 3, "missing": 5}
    of_run = ("files", "gaps", "gap_lines", "dup", "corrupt", "missing")

    rows = rows_of(log_quality(lines, keys_of(lines), accounts(spark, [file])).where(F.col("boot") == BOOT))

    assert {row["role"]: tuple(row[name] for name in of_run) for row in rows} == {
        "client": (1, 2, 3, 2, 3, 5),
        "server": (0, 0, 0, 0, 0, 0),
        "shipper": (0, 0, 0, 0, 0, 0),
    }
    of_role = {row["role"]: (row["lines"], row["first_seq"], row["last_seq"], row["events_dropped"]) for row in rows}
    assert of_role == {"client": (2, 2, 3, 20), "server": (1, 0, 0, 1), "shipper": (1, 6, 6, 100)}
