"""Two protocols in one fleet: a client that speaks both and a relay's key that has served both are never mixed up."""

from __future__ import annotations

from typing import Any

import pytest
from event_rows import ALICE, BOB, BOOT, DAY, RELAY, accounts, events, keys_of, node_of, rows_of
from pyspark.sql import DataFrame, SparkSession

from dmsg_logs.tables.transforms.capacity_forecast import capacity_forecast
from dmsg_logs.tables.transforms.connections import connections
from dmsg_logs.tables.transforms.dial_failures import dial_failures
from dmsg_logs.tables.transforms.log_quality import log_quality
from dmsg_logs.tables.transforms.pair_latency import pair_latency
from dmsg_logs.tables.transforms.relay_failures import relay_failures
from dmsg_logs.tables.transforms.relay_hourly import relay_hourly
from dmsg_logs.tables.transforms.transports import transports

OTHER_BOOT, OLD_BOOT, SILENT_BOOT = ("b1" * 4, "b2" * 4, "b3" * 4)
#: Two programs with one key, side by side.
PROGRAMS = (({"boot": BOOT}, "dmsg"), ({"boot": OTHER_BOOT}, "messaging"))
ENDS = {"initiator": ALICE, "responder": BOB, "server": RELAY, "transport_id": 2}


def _relay_lines(run: dict[str, Any], protocol: str) -> Any:
    both = {**run, "conn": 1}
    yield "server_started", {**run, "ts": DAY + 1, "public_key": RELAY, "protocol": protocol}
    yield "connection_opened", {**both, "ts": DAY + 2, "remote": ALICE, "handshake_ms": 5.0}
    yield "transport_opened", {**both, **ENDS, "ts": DAY + 3, "accept_ms": 9.0, "protocol": protocol}
    closing = {"duration_s": 2.0, "code": 5, "reason": "busy", "bytes_in": 1, "bytes_out": 1, "queue_peak_bytes": 0}
    yield "transport_closed", {**both, **ENDS, **closing, "ts": DAY + 5, "protocol": protocol}


@pytest.fixture(scope="module")
def lines(spark: SparkSession) -> DataFrame:
    """Both relays, and a client in whose one run the same id is open in both protocols at once."""
    client = {"role": "client", "node": node_of(ALICE), "conn": 0, **ENDS}
    closing = {"code": 0, "reason": "normal", "bytes_in": 1, "bytes_out": 1}
    dial = {"target": BOB, "attempts": "[]", "elapsed_ms": 20.0}
    script = [
        *_relay_lines(*PROGRAMS[0]),
        *_relay_lines(*PROGRAMS[1]),
        ("transport_opened", {**client, "ts": DAY + 10, "protocol": "dmsg"}),
        ("transport_opened", {**client, "ts": DAY + 11, "protocol": "messaging"}),
        ("transport_closed", {**client, **closing, "ts": DAY + 13, "duration_s": 3.0, "protocol": "dmsg"}),
        ("transport_closed", {**client, **closing, "ts": DAY + 18, "duration_s": 7.0, "protocol": "messaging"}),
        ("dial_finished", {**dial, "ts": DAY + 20, "server": RELAY, "ok": True, "protocol": "messaging"}),
        ("dial_finished", {**dial, "ts": DAY + 21, "server": RELAY, "ok": True}),  # of an older program
    ]
    failed = {**dial, "server": "", "ok": False, "reason": "unavailable"}
    script += [("dial_finished", {**failed, "ts": DAY + 30, "protocol": each}) for each in ("dmsg", "messaging")]
    return events(spark, script)


@pytest.fixture(scope="module")
def runs(spark: SparkSession, lines: DataFrame) -> DataFrame:
    """The table ``log_quality``."""
    return log_quality(lines, keys_of(lines), accounts(spark, []))


def test_a_run_of_a_relay_has_its_protocol(runs: DataFrame) -> None:
    assert {(row["role"], row["boot"]): row["protocol"] for row in rows_of(runs)} == {
        ("server", BOOT): "dmsg",
        ("server", OTHER_BOOT): "messaging",
        ("client", BOOT): None,
    }


def test_a_run_that_does_not_tell_speaks_what_its_node_does_and_one_of_before_dmsg(spark: SparkSession) -> None:
    silent = [("refused", {"boot": SILENT_BOOT, "count": 1, "ts": DAY + 50})]
    old = [("server_started", {"boot": OLD_BOOT, "public_key": RELAY, "v": 1, "ts": DAY - 50})]

    def protocols(script: list[Any]) -> dict[str, str]:
        frame = events(spark, script)
        return {
            row["boot"]: row["protocol"] for row in rows_of(log_quality(frame, keys_of(frame), accounts(spark, [])))
        }

    new = list(_relay_lines(*PROGRAMS[1]))
    assert protocols(old + new + silent) == {OLD_BOOT: "dmsg", OTHER_BOOT: "messaging", SILENT_BOOT: "messaging"}
    assert protocols(silent) == {SILENT_BOOT: "dmsg"}


def test_ids_of_channels_do_not_tell_whose_run_it_is(spark: SparkSession) -> None:
    """With a given name: those of transports of dmsg do."""

    def key(transport_id: int, protocol: str) -> str:
        ids = {"role": "client", "node": "laptop", **ENDS, "transport_id": transport_id, "protocol": protocol}
        frame = events(spark, [("transport_opened", ids)])
        [row] = rows_of(log_quality(frame, keys_of(frame), accounts(spark, [])), "key")
        return str(row["key"])

    assert (key(2, "dmsg"), key(3, "dmsg"), key(3, "messaging")) == (ALICE, BOB, "laptop")


def test_connections_have_the_protocol_of_their_relay(lines: DataFrame, runs: DataFrame) -> None:
    found = rows_of(connections(lines, runs), "boot", "conn", "protocol")
    assert [tuple(row.values()) for row in found] == [(BOOT, 1, "dmsg"), (OTHER_BOOT, 1, "messaging")]


def test_transports_of_one_id_are_told_apart(lines: DataFrame, runs: DataFrame) -> None:
    found = transports(lines, runs)
    mine = rows_of(found.where("role = 'client'"), "protocol", "state", "duration_s")
    assert [tuple(row.values()) for row in mine] == [("dmsg", "closed", 3.0), ("messaging", "closed", 7.0)]
    relayed = rows_of(found.where("role = 'server'"), "protocol", "boot")
    assert [tuple(row.values()) for row in relayed] == [("dmsg", BOOT), ("messaging", OTHER_BOOT)]


def test_hours_failures_and_forecasts_of_a_key_are_told_apart(lines: DataFrame, runs: DataFrame) -> None:
    hours = relay_hourly(lines, connections(lines, runs), transports(lines, runs), runs)
    columns = ("relay", "protocol", "connections_open_max", "transports_opened", "transports_failed")
    expected = [(RELAY, "dmsg", 1, 1, 1), (RELAY, "messaging", 1, 1, 1)]
    assert [tuple(row.values()) for row in rows_of(hours, *columns)] == expected
    failures = rows_of(relay_failures(lines, runs), "relay", "protocol", "reason", "count")
    assert [tuple(row.values()) for row in failures] == [(RELAY, each, "busy", 1) for each in ("dmsg", "messaging")]
    ahead = rows_of(capacity_forecast(hours, runs).select("relay", "protocol").distinct())
    assert [row["protocol"] for row in ahead] == ["dmsg", "messaging"]


def test_dials_are_told_apart(lines: DataFrame, runs: DataFrame) -> None:
    failed = rows_of(dial_failures(lines), "relay", "protocol", "reason", "attempts")
    assert [tuple(row.values()) for row in failed] == [("", each, "unavailable", 1) for each in ("dmsg", "messaging")]
    pairs = rows_of(pair_latency(lines, transports(lines, runs), runs), "server", "protocol", "transports", "dials_ok")
    assert [tuple(row.values()) for row in pairs] == [
        ("", "dmsg", 0, 0),
        ("", "messaging", 0, 0),
        (RELAY, "dmsg", 1, 1),
        (RELAY, "messaging", 1, 1),
    ]
