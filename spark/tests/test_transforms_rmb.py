"""Tables of the Reliable Message Bus: sessions of twins, what relays do with envelopes, federation, calls."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Any

import pytest
from event_rows import BOOT, DAY, accounts, events, keys_of, rows_of
from pyspark.sql import DataFrame, SparkSession

from dmsg_logs.tables.quality import check
from dmsg_logs.tables.transforms.calls_hourly import calls_hourly
from dmsg_logs.tables.transforms.envelopes_hourly import envelopes_hourly
from dmsg_logs.tables.transforms.federation_hourly import federation_hourly
from dmsg_logs.tables.transforms.log_quality import log_quality
from dmsg_logs.tables.transforms.relay_failures import relay_failures
from dmsg_logs.tables.transforms.relay_hourly import relay_hourly
from dmsg_logs.tables.transforms.rmb_failures import rmb_failures
from dmsg_logs.tables.transforms.twin_sessions import twin_sessions

R1, R2 = "r1.example", "r2.example"
LATER_BOOT = "b1" * 4
DATE = date.fromtimestamp(DAY)


def _hour(number: int) -> datetime:
    return datetime.fromtimestamp(DAY + 3600 * number, timezone.utc).replace(tzinfo=None)


def _routed(ts: float, node: str, *amounts: int) -> tuple[str, dict[str, Any]]:
    names = ("received", "ingested", "local", "stored", "fetched", "federated", "expired", "refused", "bytes")
    return "envelopes_routed", {"node": node, "ts": DAY + ts, **dict(zip(names, amounts, strict=True))}


def _attempt(ts: float, other: str, elapsed_ms: float, reason: str = "", count: int | None = 1) -> Any:
    fields = {"relay": other, "ok": not reason, "reason": reason, "elapsed_ms": elapsed_ms, "count": count}
    return "federation_attempted", {"node": R1, "ts": DAY + ts, **fields}


def _sessions() -> list[Any]:
    relay, client = {"node": R1}, {"node": "peer-7", "role": "client"}
    closing = {"duration_s": 50.0, "envelopes_in": 3, "envelopes_out": 4, "bytes_in": 300, "bytes_out": 400}
    never = {"duration_s": 0.0, "envelopes_in": 0, "envelopes_out": 0, "bytes_in": 0, "bytes_out": 0}
    first = {"conn": 1, "twin": 7, "connection": ""}
    return [
        ("server_started", {**relay, "ts": DAY, "public_key": "", "protocol": "rmb"}),
        ("twin_session_opened", {**relay, **first, "ts": DAY + 10, "address": "192.0.2.1:5", "handshake_ms": 9.0}),
        ("twin_session_opened", {**relay, "conn": 2, "twin": 7, "connection": "ab" * 8, "ts": DAY + 20}),
        ("twin_session_closed", {**relay, **first, **closing, "ts": DAY + 60, "reason": "replaced"}),
        ("twin_session_closed", {**relay, "conn": 9, "twin": 8, **closing, "ts": DAY + 70, "reason": "evicted"}),
        ("twin_session_opened", {**client, **first, "ts": DAY + 10, "address": R1, "handshake_ms": 11.0}),
        ("twin_session_closed", {**client, **first, **closing, "ts": DAY + 60, "reason": "closed by server"}),
        ("twin_session_closed", {**client, "conn": 2, "twin": 7, **never, "ts": DAY + 61, "reason": "timeout"}),
        ("server_started", {**relay, "boot": LATER_BOOT, "ts": DAY + 7200, "public_key": "", "protocol": "rmb"}),
    ]


@pytest.fixture(scope="module")
def lines(spark: SparkSession) -> DataFrame:
    """A relay that is killed within the second hour, and a twin."""
    script = [
        *_sessions(),
        _routed(100, R1, 10, 2, 6, 3, 0, 2, 0, 1, 1000),
        _routed(110, R1, 1, 0, 1, 0, 1, 0, 0, 0, 100),
        _routed(3700, R1, 5, 0, 0, 0, 0, 4, 1, 0, 500),
        ("rate_limited", {"node": R1, "ts": DAY + 120, "twin": 7, "count": 30}),
        ("rate_limited", {"node": R1, "ts": DAY + 130, "twin": 0, "count": None}),
        ("envelope_failed", {"node": R1, "ts": DAY + 140, "twin": 7, "reason": "destination offline", "count": 2}),
        ("envelope_failed", {"node": R1, "ts": DAY + 141, "twin": 8, "reason": "destination offline", "count": 1}),
        ("envelope_failed", {"node": R1, "ts": DAY + 142, "twin": 0, "reason": "destination offline", "count": 5}),
        _attempt(150, R2, 10.0),
        _attempt(151, R2, 40.0, count=3),
        _attempt(152, R2, 3000.0, "timeout", 2),
        _attempt(153, "", 1.0, "other", 4),
        ("relay_rank_changed", {"node": R1, "ts": DAY + 152, "relay": R2, "failures_per_hour": 1.0}),
        ("relay_rank_changed", {"node": R1, "ts": DAY + 153, "relay": R2, "failures_per_hour": 2.0}),
        ("relay_rank_changed", {"node": R1, "ts": DAY + 3800, "relay": R2, "failures_per_hour": 0.0}),
    ]
    call = {"role": "client", "node": "peer-7", "twin": 9, "ok": True, "reason": "", "count": 1}
    script += [
        ("call_finished", {**call, "ts": DAY + 200, "elapsed_ms": 4.0}),
        ("call_finished", {**call, "node": "peer-8", "ts": DAY + 201, "elapsed_ms": 8.0, "count": 3}),
        ("call_finished", {**call, "ts": DAY + 202, "elapsed_ms": 5000.0, "ok": False, "reason": "timeout"}),
    ]
    return events(spark, script)


@pytest.fixture(scope="module")
def runs(spark: SparkSession, lines: DataFrame) -> DataFrame:
    """The table ``log_quality``."""
    return log_quality(lines, keys_of(lines), accounts(spark, []))


def test_a_relay_without_a_key_goes_by_its_name(runs: DataFrame) -> None:
    found = rows_of(runs.where("role = 'server'"), "boot", "key", "protocol", "run_over")
    assert [tuple(row.values()) for row in found] == [(BOOT, R1, "rmb", True), (LATER_BOOT, R1, "rmb", False)]


def test_processes_of_one_relay_run_side_by_side(spark: SparkSession) -> None:
    """Several processes behind one name: which of them was started last says nothing of the others."""
    first, second, third = ("a0" * 4, "a1" * 4, "a2" * 4)

    def begins(boot: str, ts: float) -> list[Any]:
        of = {"node": R1, "boot": boot}
        return [
            ("server_started", {**of, "ts": DAY + ts, "public_key": "", "protocol": "rmb"}),
            ("twin_session_opened", {**of, "conn": 1, "twin": 7, "connection": "", "ts": DAY + ts + 1}),
        ]

    routed = [(name, {**line, "boot": first}) for name, line in (_routed(ts, R1, *([1] * 9)) for ts in (40.0, 80.0))]
    together = events(spark, [*begins(first, 0), *begins(second, 30), *routed])
    restarted = events(spark, [*begins(first, 0), *begins(second, 30), *routed, *begins(third, 60)])

    for script, over in ((together, {first: False, second: False}), (restarted, {first: False, second: True})):
        runs = log_quality(script, keys_of(script), accounts(spark, []))
        sessions = {row["boot"]: row["run_over"] for row in rows_of(twin_sessions(script, runs))}
        assert {boot: sessions[boot] for boot in over} == over


def test_sessions_are_joined_on_either_side(lines: DataFrame, runs: DataFrame) -> None:
    found = twin_sessions(lines, runs)
    columns = ("role", "conn", "twin", "connection", "state", "reason", "duration_s", "envelopes_out", "run_over")
    assert sorted((tuple(row.values()) for row in rows_of(found, *columns)), key=repr) == [
        ("client", 1, 7, "", "closed", "closed by server", 50.0, 4, False),
        ("client", 2, 7, None, "failed", "timeout", 0.0, 0, False),
        ("server", 1, 7, "", "closed", "replaced", 50.0, 4, False),
        ("server", 2, 7, "ab" * 8, "open", None, None, None, True),
        ("server", 9, 8, None, "unopened", "evicted", 50.0, 4, False),
    ]
    assert {row["date"] for row in rows_of(found)} == {DATE}


def test_envelopes_are_added_up_by_hour(lines: DataFrame, runs: DataFrame) -> None:
    columns = ("relay", "hour", "sessions_opened", "sessions_closed", "received", "local", "federated", "expired")
    found = rows_of(envelopes_hourly(lines, runs), *columns, "refused", "bytes", "rate_limited")
    assert [tuple(row.values()) for row in found] == [
        (R1, _hour(0), 2, 2, 11, 7, 2, 0, 1, 1100, 31),
        (R1, _hour(1), 0, 0, 5, 0, 4, 1, 0, 500, 0),
    ]


def test_federation_by_pair_counts_every_attempt_a_line_stands_for(lines: DataFrame, runs: DataFrame) -> None:
    found = rows_of(federation_hourly(lines, runs))
    assert [(row["other"], row["hour"], row["attempts"], row["failed"]) for row in found] == [
        ("", _hour(0), 4, 4),
        (R2, _hour(0), 6, 2),
        (R2, _hour(1), 0, 0),
    ]
    assert [(row["elapsed_ms_p50"], row["failures_per_hour_max"]) for row in found] == [
        (None, None),
        (40.0, 2.0),
        (None, 0.0),
    ]


def test_failures_have_reasons_and_the_twins_that_are_named(lines: DataFrame, runs: DataFrame) -> None:
    found = rows_of(rmb_failures(lines, runs), "what", "other", "reason", "count", "twins")
    assert sorted(tuple(row.values()) for row in found) == [
        ("envelope", "", "destination offline", 8, 2),
        ("federation", "", "other", 4, 0),
        ("federation", R2, "timeout", 2, 0),
        ("session", "", "evicted", 1, 1),
    ]


def test_calls_by_their_end(lines: DataFrame) -> None:
    found = rows_of(calls_hourly(lines), "ok", "reason", "calls", "callers", "elapsed_ms_p50")
    assert [tuple(row.values()) for row in found] == [(False, "timeout", 1, 1, 5000.0), (True, "", 4, 2, 8.0)]


def test_the_rules_hold_where_lines_are_whole_and_tell_where_not(lines: DataFrame, runs: DataFrame) -> None:
    tables = {
        "twin_sessions": twin_sessions(lines, runs),
        "envelopes_hourly": envelopes_hourly(lines, runs),
        "federation_hourly": federation_hourly(lines, runs),
        "rmb_failures": rmb_failures(lines, runs),
        "calls_hourly": calls_hourly(lines),
    }
    broken = {result.rule: result.violations for result in check(tables).results if result.violations}
    assert broken == {"unopened": 1, "cut_off": 1}


def test_tables_of_the_other_protocols_are_not_touched(lines: DataFrame, runs: DataFrame, spark: SparkSession) -> None:
    empty = spark.createDataFrame([], "role string, node string, boot string")
    nothing = empty.selectExpr(
        "*", "cast(null as double) opened_at", "cast(null as double) closed_at", "0D handshake_ms", "0D accept_ms",
        "0D duration_s", "'' state", "0L code", "0L bytes_in", "0L bytes_out", "0L queue_peak_bytes", "'' protocol",
    )  # fmt: skip
    assert rows_of(relay_hourly(lines, nothing, nothing, runs)) == []
    assert rows_of(relay_failures(lines, runs)) == []
