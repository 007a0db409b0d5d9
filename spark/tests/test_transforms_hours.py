"""Tables by hour and day: what relays, discovery and clients did."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import pytest
from event_rows import ALICE, BOB, BOOT, CAROL, DAY, OTHER_RELAY, RELAY, accounts, events, keys_of, node_of, rows_of
from pyspark.sql import DataFrame, SparkSession

from dmsg_logs.tables.transforms.connections import connections
from dmsg_logs.tables.transforms.dial_failures import DIAL_FAILURES, dial_failures
from dmsg_logs.tables.transforms.discovery_hourly import DISCOVERY_HOURLY, discovery_hourly
from dmsg_logs.tables.transforms.log_quality import log_quality
from dmsg_logs.tables.transforms.pair_latency import PAIR_LATENCY, pair_latency
from dmsg_logs.tables.transforms.relay_failures import RELAY_FAILURES, relay_failures
from dmsg_logs.tables.transforms.relay_hourly import RELAY_HOURLY, relay_hourly
from dmsg_logs.tables.transforms.resumptions import RESUMPTIONS, resumptions
from dmsg_logs.tables.transforms.top_talkers import TOP_TALKERS, top_talkers
from dmsg_logs.tables.transforms.transports import transports

HOUR = 3600
LATER_BOOT = "b1" * 4
TODAY = datetime.date(2026, 3, 2)


def _connection(conn: int, opened: float, closed: float | None, reason: str = "closed by peer", **both: Any) -> Any:
    opening = {"ts": DAY + opened, "conn": conn, "remote": ALICE, "handshake_ms": 10.0 * conn, **both}
    yield "connection_opened", opening
    if closed is not None:
        closing = {"ts": DAY + closed, "conn": conn, "remote": ALICE, "duration_s": closed - opened, "reason": reason}
        yield "connection_closed", {**closing, **both}


def _transport(number: int, opened: float, closed: float, code: int = 0, **both: Any) -> Any:
    both = {"conn": 1, "transport_id": number, "initiator": ALICE, "responder": BOB, "server": RELAY, **both}
    if opened < closed:
        yield "transport_opened", {"ts": DAY + opened, "accept_ms": float(number), **both}
    closing = {"duration_s": closed - opened, "bytes_in": 10 * number, "bytes_out": number, "queue_peak_bytes": number}
    yield "transport_closed", {"ts": DAY + closed, "code": code, "reason": f"code {code}", **closing, **both}


@pytest.fixture(scope="module")
def relay_lines(spark: SparkSession) -> DataFrame:
    """A relay that is killed while two connections are open, and its next run; and what clients say, which is not
    counted."""
    next_run = {"boot": LATER_BOOT}
    client = {"role": "client", "node": node_of(ALICE), "conn": 0}
    script = [
        ("server_started", {"ts": DAY + 1, "public_key": RELAY}),
        *_connection(1, 10, 50),
        *_connection(2, 20, 4000, "abuse"),
        *_connection(3, 60, None),
        *_connection(4, 70, None),
        ("handshake_failed", {"ts": DAY + 80, "reason": "timeout"}),  # of an older program: without a count
        ("handshake_failed", {"ts": DAY + 81, "reason": "timeout", "address": "", "count": 40}),
        ("refused", {"ts": DAY + 90, "what": "request", "reason": "busy", "count": 5}),
        ("refused", {"ts": DAY + 91, "what": "request", "reason": "busy", "count": 2}),
        ("connection_closed", {"ts": DAY + 95, "conn": 9, "duration_s": 90.0, "reason": "server_draining"}),
        *_transport(2, 100, 200),
        *_transport(4, 100, 4000, code=5),
        *_transport(6, 300, 300, code=1),
        *_transport(8, 300, 300),  # given up by who asked
        *_transport(100, 100, 200, **client),
        ("refused", {"ts": DAY + 99, "role": "client", "what": "transport", "reason": "busy", "count": 9}),
        *_connection(1, 3 * HOUR, 3 * HOUR + 5, **next_run),
    ]
    numbered: dict[str, int] = {}
    lines = []
    for name, fields in sorted(script, key=lambda one: one[1]["ts"]):
        run = fields.get("boot", BOOT) + fields.get("role", "")
        numbered[run] = numbered.get(run, -1) + 1
        lines.append((name, {**fields, "seq": numbered[run]}))
    return events(spark, lines)


def test_relay_hourly(spark: SparkSession, relay_lines: DataFrame) -> None:
    runs = log_quality(relay_lines, keys_of(relay_lines), accounts(spark, []))
    found = relay_hourly(relay_lines, connections(relay_lines, runs), transports(relay_lines, runs), runs)
    assert found.dtypes == RELAY_HOURLY.dtypes
    rows = rows_of(found.orderBy("hour"))
    assert [(row["relay"], row["hour"].hour, row["date"]) for row in rows] == [
        (RELAY, hour, TODAY) for hour in (0, 1, 3)
    ]
    first, second, third = rows
    assert first == {
        "relay": RELAY, "protocol": "dmsg", "hour": first["hour"], "connections_opened": 4, "connections_closed": 2,
        "connections_open_max": 4, "handshakes_failed": 41, "handshake_ms_p50": 25.0, "handshake_ms_p95": 38.5,
        "handshake_ms_p99": pytest.approx(39.7), "transports_opened": 2, "transports_closed": 1, "transports_failed": 1,
        "refusals": 7, "bytes": 22, "accept_ms_p50": 3.0, "accept_ms_p95": pytest.approx(3.9),
        "accept_ms_p99": pytest.approx(3.98), "queue_bytes_p50": 2.0, "queue_bytes_p95": 2.0, "queue_bytes_p99": 2.0,
        "queue_bytes_max": 2, "date": TODAY
    }  # fmt: skip
    assert (second["connections_opened"], second["connections_closed"], second["transports_failed"]) == (0, 1, 1)
    assert second["connections_open_max"] == 3, "2, 3 and 4 are still open when the hour begins"
    assert second["handshake_ms_p50"] is None
    assert third["connections_open_max"] == 1, "what a killed run left open ended with it"


def test_a_clock_that_is_set_back_leaves_no_fewer_than_no_connection_open(spark: SparkSession) -> None:
    """One ends two hours before it begins, others were open for less than no time or tell none, and a run ends with its
    opening."""
    lines = events(
        spark,
        [
            ("server_started", {"ts": DAY + 1, "public_key": RELAY}),
            *_connection(1, 2 * HOUR + 10, None),
            ("connection_closed", {"ts": DAY + 20, "conn": 1, "remote": ALICE, "duration_s": 50.0}),
            ("connection_closed", {"ts": DAY + 21, "conn": 2, "remote": ALICE, "duration_s": -2.0 * HOUR}),
            ("connection_closed", {"ts": DAY + 22, "conn": 5, "remote": ALICE}),
            *[("refused", {"ts": DAY + hour * HOUR + 30, "reason": "busy", "count": 1}) for hour in range(4)],
            *_connection(3, 5 * HOUR, None, boot=LATER_BOOT),
            ("refused", {"ts": DAY + 3 * HOUR, "reason": "busy", "count": 1, "boot": LATER_BOOT}),
            *_connection(4, 6 * HOUR, 6 * HOUR + 1, boot="b2" * 4),
        ],
    )
    runs = log_quality(lines, keys_of(lines), accounts(spark, []))
    found = relay_hourly(lines, connections(lines, runs), transports(lines, runs), runs)
    rows = rows_of(found.selectExpr("hour(hour)", "connections_open_max"))
    assert [tuple(row.values()) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 0), (5, 0), (6, 1)]


def test_relay_failures(spark: SparkSession, relay_lines: DataFrame) -> None:
    found = relay_failures(relay_lines, log_quality(relay_lines, keys_of(relay_lines), accounts(spark, [])))
    assert found.dtypes == RELAY_FAILURES.dtypes
    assert [tuple(row.values()) for row in rows_of(found.selectExpr("hour(hour)", "what", "reason", "count"))] == [
        (0, "handshake", "timeout", 41),
        (0, "refused", "busy", 7),
        (0, "transport", "code 1", 1),
        (1, "connection", "abuse", 1),
        (1, "transport", "code 5", 1),
    ]


def test_pairs_and_talkers(spark: SparkSession) -> None:
    tree = json.dumps([{"stage": "accept", "server": RELAY, "elapsed_ms": 20.0, "reason": "refused", "detail": ""}])
    lines = events(
        spark,
        [
            *_transport(2, 1, 5, seq=None),
            *_transport(4, 6, 7, responder=ALICE, initiator=CAROL),
            *_transport(6, 8, 9, server=OTHER_RELAY, node=node_of(OTHER_RELAY)),
            *_transport(8, 86_390, 86_500),
            *_transport(10, 1, 5, role="client", conn=0),
            (
                "dial_finished",
                {"target": BOB, "server": RELAY, "ok": True, "elapsed_ms": 30.0, "attempts": "[]", "ts": DAY},
            ),
            (
                "dial_finished",
                {"target": BOB, "server": RELAY, "ok": True, "elapsed_ms": 50.0, "attempts": tree, "ts": DAY},
            ),
            ("dial_finished", {"target": BOB, "server": "", "ok": False, "elapsed_ms": 70.0, "reason": "x", "ts": DAY}),
            ("dial_finished", {"target": BOB, "server": "", "ok": False, "initiator": CAROL, "node": "c", "ts": DAY}),
            ("dial_finished", {"target": BOB, "server": "", "ok": False, "node": "stranger", "ts": DAY}),
        ],
    )
    runs = log_quality(lines, keys_of(lines), accounts(spark, []))
    sessions = transports(lines, runs)
    pairs = pair_latency(lines, sessions, runs)
    assert pairs.dtypes == PAIR_LATENCY.dtypes
    columns = ("initiator", "responder", "server", "transports", "accept_ms_p50", "dials", "dials_ok", "dial_ms_p50")
    assert [tuple(row.values()) for row in rows_of(pairs, *columns)] == sorted(
        [
            (ALICE, BOB, RELAY, 2, 5.0, 2, 2, 40.0),
            (CAROL, ALICE, RELAY, 1, 4.0, 0, 0, None),
            (ALICE, BOB, OTHER_RELAY, 1, 6.0, 0, 0, None),
            (ALICE, BOB, "", 0, None, 1, 0, 70.0),
            (CAROL, BOB, "", 0, None, 1, 0, None),
            ("stranger", BOB, "", 0, None, 1, 0, None),
        ],
        key=repr,
    )
    talkers = top_talkers(sessions)
    assert talkers.dtypes == TOP_TALKERS.dtypes
    day, next_day = TODAY, TODAY + datetime.timedelta(days=1)
    assert [tuple(row.values()) for row in rows_of(talkers.orderBy("date", "position"))] == [
        (day, ALICE, 2 + 40 + 6, 20 + 4 + 60, 48 + 84, 3, 2, 1),
        (day, CAROL, 4, 40, 44, 1, 1, 3),
        (day, BOB, 20 + 60, 2 + 6, 88, 2, 1, 2),
        (next_day, ALICE, 8, 80, 88, 1, 1, 1),
        (next_day, BOB, 80, 8, 88, 1, 1, 2),
    ]


def test_discovery_dials_and_resumptions(spark: SparkSession) -> None:
    def leaf(stage: str, server: str, reason: str, elapsed_ms: float = 10.0) -> dict[str, Any]:
        return {"stage": stage, "server": server, "elapsed_ms": elapsed_ms, "reason": reason, "detail": "text"}

    def dial(ok: bool, attempts: Any, **fields: Any) -> Any:
        text = attempts if isinstance(attempts, str) else json.dumps(attempts)
        fields = {
            "target": BOB,
            "ok": ok,
            "attempts": text,
            "elapsed_ms": 77.0,
            "reason": "" if ok else "gone",
            **fields,
        }
        return "dial_finished", {**fields, "ts": DAY}

    asked = {"method": "GET", "path": "entry", "ts": DAY + HOUR + 1}
    resumed = {"server": RELAY, "reason": "peer_gone", "initiator": ALICE, "responder": BOB, "ts": DAY}
    lines = events(
        spark,
        [
            dial(False, [leaf("connect", RELAY, "timeout"), leaf("accept", OTHER_RELAY, "refused", 30.0)]),
            dial(False, [leaf("connect", RELAY, "timeout", 20.0), leaf("connect", RELAY, "timeout", 40.0)]),
            dial(True, [leaf("connect", RELAY, "timeout", 90.0)], node="other"),
            dial(True, []),
            dial(False, [leaf("discovery", "", "no entry")]),
            # a program that lies: its line is in range, what stands in the text may be anything
            dial(False, [leaf("request", RELAY, "gone", wrong) for wrong in (1e300, -1.0, math.inf, math.nan)]),
            dial(False, [leaf("request", RELAY, "gone", 50.0)]),
            dial(False, []),
            dial(False, '[{"stage":"connect","serv', node="other"),
            dial(True, "nonsense"),
            *[
                ("discovery_request", {**asked, "status": status, "elapsed_ms": status / 100})
                for status in (200, 404, 503)
            ],
            ("discovery_request", {**asked, "method": "POST", "status": 200, "elapsed_ms": 9.0, "count": 1}),
            ("discovery_request", {**asked, "method": "POST", "status": 429, "elapsed_ms": 1.0, "count": 900}),
            *[
                ("transport_resumed", {**resumed, "transport_id": id_, "elapsed_ms": ms})
                for id_, ms in ((2, 5.0), (2, 7.0))
            ],
            ("transport_resumed", {**resumed, "transport_id": 4, "elapsed_ms": 30.0}),
        ],
    )
    failures = dial_failures(lines)
    assert failures.dtypes == DIAL_FAILURES.dtypes
    assert [tuple(row.values())[1:] for row in rows_of(failures.drop("protocol"))] == [
        ("", "discovery", "no entry", 1, 1, 1, 10.0, 10.0),
        ("", "unknown", "gone", 2, 2, 2, 77.0, 77.0),
        (RELAY, "connect", "timeout", 4, 3, 2, 30.0, pytest.approx(88.5)),
        (RELAY, "request", "gone", 5, 2, 1, 50.0, 50.0),
        (OTHER_RELAY, "accept", "refused", 1, 1, 1, 30.0, 30.0),
    ]
    requests = discovery_hourly(lines)
    assert requests.dtypes == DISCOVERY_HOURLY.dtypes
    columns = ("node", "method", "requests", "errors_4xx", "errors_5xx", "elapsed_ms_p50", "elapsed_ms_max", "date")
    assert [tuple(row.values()) for row in rows_of(requests, *columns)] == [
        ("discovery", "GET", 3, 1, 1, 4.04, 5.03, TODAY),
        ("discovery", "POST", 901, 900, 0, 1.0, 9.0, TODAY),
    ]
    went_on = resumptions(lines)
    assert went_on.dtypes == RESUMPTIONS.dtypes
    assert [tuple(row.values()) for row in rows_of(went_on)] == [
        (TODAY, RELAY, "peer_gone", 3, 2, 7.0, pytest.approx(27.7), pytest.approx(29.54), 30.0)
    ]
