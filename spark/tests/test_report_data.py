"""What the report asks of the tables: right answers from small tables, bounded ones from large ones."""

from __future__ import annotations

import datetime
from typing import Any

import pandas as pd
import pytest
from event_rows import ACCOUNTS_SCHEMA, ALICE, BOB, CAROL, EVENTS_SCHEMA, OTHER_RELAY, RELAY, node_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dmsg_logs.report import ReportData, collect, gather, queries, render
from dmsg_logs.report.data import DAY_S, DAYS, FRAMES, HOUR_S, TOP_KEYS, TOP_RELAYS, bucket_s
from dmsg_logs.report.window import window
from dmsg_logs.tables.generations import TABLES

#: A Monday, 00:00 UTC.
DAY = 1_772_409_600
Rows = dict[str, list[dict[str, Any]]]


def moment(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).replace(tzinfo=None)


def date(at: float) -> datetime.date:
    return moment(at).date()


class Tables:
    """Tables held in memory; ``read`` gives them with all their columns, null where a row does not say."""

    def __init__(self, spark: SparkSession, rows: Rows) -> None:
        self._spark = spark
        self._rows = rows

    def read(self, name: str) -> DataFrame:
        schema = self._schema(name)
        rows = [tuple(row.get(field.name) for field in schema.fields) for row in self._rows.get(name, [])]
        unknown = {each for row in self._rows.get(name, []) for each in row} - set(schema.names)
        assert not unknown, (name, unknown)
        return self._spark.createDataFrame(rows, schema)

    @staticmethod
    def _schema(name: str) -> StructType:
        return {"events": EVENTS_SCHEMA, "accounts": ACCOUNTS_SCHEMA}.get(name) or TABLES[name].schema


def hour(relay: str, at: int, **figures: int) -> dict[str, Any]:
    counted = dict.fromkeys(
        (
            *("connections_opened", "connections_open_max", "handshakes_failed", "transports_opened", "bytes"),
            *("transports_failed", "refusals", "queue_bytes_max"),
        ),
        0,
    )
    protocol = "messaging" if relay == OTHER_RELAY else "dmsg"
    return {"relay": relay, "protocol": protocol, "hour": moment(at), "date": date(at), **counted, **figures}


def ways(federated: int) -> dict[str, int]:
    return {"ingested": 2, "local": 5, "stored": 1, "federated": federated, "refused": 1}


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "ts": at, "date": date(at), **fields}


def small_fleet() -> Rows:
    """Two relays over two days, three clients, one of everything that can be counted."""
    next_day = DAY + DAY_S
    return {
        "accounts": [
            {
                "file": "a",
                "lines": 100,
                "good": 90,
                "dup": 8,
                "corrupt": 2,
                "missing": 1,
                "landed_at": next_day + 7200.0,
            },
            {"file": "b", "lines": 5, "good": 5, "dup": 0, "corrupt": 0, "missing": 0, "landed_at": DAY + 60.0},
            {"file": "b", "lines": 6, "good": 6, "dup": 0, "corrupt": 0, "missing": 0, "landed_at": DAY + 60.0},
        ],
        "relay_hourly": [
            hour(RELAY, DAY + HOUR_S, bytes=1000, connections_opened=2, connections_open_max=2, transports_opened=3),
            hour(RELAY, next_day, bytes=500, connections_opened=1, connections_open_max=3, transports_failed=1),
            hour(OTHER_RELAY, next_day, bytes=4000, connections_opened=5, connections_open_max=4, refusals=7),
            hour(OTHER_RELAY, next_day + 400 * DAY_S, bytes=9),  # a clock that is wrong
        ],
        "connections": [
            {
                **{"role": "server", "node": node_of(RELAY), "remote": remote, "opened_at": at, "date": date(at)},
                **{"handshake_ms": took, "state": "open"},
            }
            for remote, at, took in (
                (ALICE, DAY + 3700.0, 10.0),
                (BOB, DAY + 3800.0, 30.0),
                (ALICE, next_day + 1.0, 20.0),
            )
        ],
        "transports": [
            transport("server", RELAY, DAY + 3900.0, accept_ms=100.0, state="closed"),
            transport("server", RELAY, DAY + 3950.0, accept_ms=300.0, state="open"),
            {**transport("server", RELAY, None, state="refused"), "closed_at": DAY + 4000.0, "date": date(DAY)},
            transport("client", RELAY, DAY + 3900.0, accept_ms=9999.0, state="closed"),
        ],
        "relay_failures": [
            failure(RELAY, DAY + HOUR_S, "transport", "peer_unreachable", 4),
            failure(OTHER_RELAY, DAY + HOUR_S, "transport", "peer_unreachable", 1),
            failure(RELAY, next_day, "handshake", "timeout", 2),
        ],
        "pair_latency": [
            {"date": date(DAY), "dials": 8, "dials_ok": 6},
            {"date": date(next_day), "dials": 2, "dials_ok": 2},
        ],
        "events": [
            event("dial_finished", DAY + 3650.0, ok=True, elapsed_ms=50.0),
            event("dial_finished", DAY + 3660.0, ok=True, elapsed_ms=70.0),
            event("dial_finished", DAY + 3670.0, ok=False, elapsed_ms=9000.0),
            event("transport_resumed", DAY + 5.0, reason="reset", elapsed_ms=40.0),
            event("transport_resumed", next_day + 5.0, reason="reset", elapsed_ms=60.0),
            event("discovery_request", DAY + 9.0, method="GET", path="entry", status=200, elapsed_ms=1.0, count=7),
            event("discovery_request", DAY + 9.5, method="GET", path="entry", status=404, elapsed_ms=2.0),
            event("discovery_request", DAY + 9.6, method="GET", path="entry", status=503, elapsed_ms=6.0),
        ],
        "dial_failures": [
            {
                **{"date": date(at), "relay": RELAY, "protocol": "dmsg", "stage": "connect", "reason": "timeout"},
                **{"attempts": n, "clients": n},
            }
            for at, n in ((DAY, 3), (next_day, 4))
        ],
        "resumptions": [
            {"date": date(at), "server": server, "reason": "reset", "resumptions": 1, "transports": 1}
            for at, server in ((DAY, RELAY), (DAY, OTHER_RELAY), (next_day, RELAY))
        ],
        "abuse_candidates": [
            {
                **{
                    "date": date(at),
                    "key": key,
                    "relays": 1,
                    "refusals": 10,
                    "handshakes_failed": 0,
                    "abuse_closes": 0,
                },
                **{"dials": 5, "dial_failures": 1, "score": score, "flagged": score > 0.5, "why": why},
            }
            for at, key, score, why in ((DAY, CAROL, 0.9, "worst"), (next_day, CAROL, 0.2, ""), (DAY, BOB, 0.4, "mild"))
        ],
        "top_talkers": [
            {
                "date": date(at),
                "key": ALICE,
                "bytes_sent": 5,
                "bytes_received": 6,
                "bytes": 11,
                "transports": 2,
                "peers": n,
            }
            for at, n in ((DAY, 3), (next_day, 2))
        ],
        "capacity_forecast": [
            {
                **{"relay": relay, "metric": "bytes", "day": date(next_day + DAY_S), "value": value, "low": value - 1},
                **{"high": value + 2, "history_days": days, "method": "level"},
            }
            for relay, value, days in ((RELAY, 10.0, 2), (OTHER_RELAY, 20.0, 1))
        ],
        "envelopes_hourly": [
            {"relay": "r1", "hour": moment(at), "date": date(at), "received": 9, **ways(n)}
            for at, n in ((DAY, 3), (DAY + 60 * 60, 2), (next_day, 1))
        ],
        "twin_sessions": [
            {"role": role, "twin": twin, "opened_at": float(DAY), "date": date(DAY)}
            for role, twin in (("server", 7), ("server", 7), ("server", 8), ("client", 9))
        ],
        "rmb_failures": [
            {
                **{"relay": "r1", "hour": moment(DAY), "date": date(DAY), "what": "envelope", "other": ""},
                **{"reason": reason, "count": n, "twins": 1},
            }
            for reason, n in (("destination offline", 2), ("destination offline", 3), ("message wrong source", 1))
        ],
        "federation_hourly": [
            {
                **{"relay": "r1", "other": "r2", "hour": moment(at), "date": date(at), "attempts": n, "failed": failed},
                **{"elapsed_ms_p99": took, "failures_per_hour_max": rate},
            }
            for at, n, failed, took, rate in ((DAY, 10, 1, 4.0, 2.0), (next_day, 5, 3, 9.0, None))
        ],
        "calls_hourly": [
            {
                **{"hour": moment(DAY), "date": date(DAY), "ok": not reason, "reason": reason, "calls": n},
                **{"elapsed_ms_p50": 2.0, "elapsed_ms_p99": took},
            }
            for reason, n, took in (("", 8, 5.0), ("", 1, 7.0), ("timeout", 1, 5000.0))
        ],
        "discovery_hourly": [
            {
                "node": "d",
                "hour": moment(DAY),
                "path": path,
                "requests": n,
                "errors_4xx": 1,
                "errors_5xx": 0,
                "date": date(DAY),
            }
            for path, n in (("entry", 5), ("health", 6))
        ],
        "log_quality": [
            {
                **{
                    "role": "server",
                    "node": node_of(RELAY),
                    "key": RELAY,
                    "boot": boot,
                    "files": 1,
                    "lines": 50,
                    "gaps": gaps,
                },
                **{
                    "gap_lines": 3 * gaps,
                    "dup": 4,
                    "corrupt": 1,
                    "missing": 0,
                    "late_lines": 2,
                    "lateness_s_p99": late,
                },
                **{"events_dropped": 5, "ended": ended, "first_at": float(DAY), "last_at": float(DAY + 9)},
            }
            for boot, gaps, ended, late in (("b1", 1, True, 4.0), ("b2", 0, False, 9.0))
        ],
    }


def transport(role: str, server: str, at: float | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "server": server, "opened_at": at, "date": None if at is None else date(at), **fields}


def failure(relay: str, at: int, what: str, reason: str, count: int) -> dict[str, Any]:
    return {"relay": relay, "hour": moment(at), "date": date(at), "what": what, "reason": reason, "count": count}


@pytest.fixture(scope="module")
def data(spark: SparkSession) -> ReportData:
    """What is collected of the small fleet, from where the pipeline keeps its tables."""
    tables = Tables(spark, small_fleet())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmsg_logs.tables.generations.read_table", lambda session, where, name: tables.read(name))
        patch.setattr("dmsg_logs.ingest.store.read_events", lambda session, where: tables.read("events"))
        patch.setattr("dmsg_logs.ingest.store.read_accounts", lambda session, where: tables.read("accounts"))
        return collect(spark, "anywhere")


def one(data: ReportData, frame: str, **where: Any) -> dict[str, Any]:
    found = [row for row in data.rows(frame) if all(row[name] == value for name, value in where.items())]
    assert len(found) == 1, (frame, where, found)
    return found[0]


def test_the_time_ends_with_the_last_hour_that_can_be_true(data: ReportData) -> None:
    assert (data.since, data.until, data.bucket_s) == (DAY, DAY + DAY_S + HOUR_S, HOUR_S)
    assert len(data.buckets()) == 25


@pytest.mark.parametrize("landed_at", [0.0, 1.0, -1e9, 4_102_444_000.0])
def test_files_with_a_wrong_time_do_not_empty_the_report(spark: SparkSession, landed_at: float) -> None:
    fleet = small_fleet()
    accounts = [{**row, "landed_at": landed_at} for row in fleet["accounts"]]
    forged = hour(OTHER_RELAY, 4_102_441_200, bytes=9)  # the last hour of 2099, far beyond the clock here
    hours = [*fleet["relay_hourly"][:3], forged]

    read = Tables(spark, {**fleet, "accounts": accounts, "relay_hourly": hours}).read

    assert window(read, DAYS) == (DAY, DAY + DAY_S + HOUR_S)


def test_totals(data: ReportData) -> None:
    expected = {
        **{"files": 2, "lines_in": 111, "good": 101, "dup": 8, "corrupt": 2, "missing": 1},
        **{"relays": 2, "clients": 2, "connections": 8, "transports": 3, "transports_failed": 1, "bytes": 5500},
        **{"refusals": 7, "dials": 10, "dials_ok": 8, "resumptions": 3, "abuse_keys": 2, "abuse_flagged": 1},
        **{"nodes": 1, "gaps": 1, "gap_lines": 3, "late_lines": 4, "events_dropped": 10, "unended": 1},
    }
    assert {name: data.totals[name] for name in expected} == expected


def test_clients_that_have_been_connected_for_long_are_counted(spark: SparkSession) -> None:
    """They came before the days that are looked at, and are there still, or were until one of these days."""
    old, within = DAY - (DAYS + 5) * DAY_S, DAY + 7200.0
    ends = {
        "there": {"state": "open"},
        "gone within": {"state": "closed", "closed_at": within},
        "gone before": {"state": "closed", "closed_at": old + 60.0},
        "cut off within": {"state": "open", "run_over": True, "boot": "b2"},
        "cut off before": {"state": "open", "run_over": True, "boot": "b1"},
        "of a relay that is gone for good": {"state": "open", "boot": "b0"},
        "of a client's log": {"state": "open", "role": "client"},
    }
    opened = {"role": "server", "node": "n", "boot": "b3", "opened_at": float(old), "date": date(old)}
    runs = (("b0", False, old + 60.0), ("b1", True, old + 60.0), ("b2", True, within), ("b3", False, within))
    fleet: Rows = {
        "relay_hourly": [hour(RELAY, DAY + HOUR_S, bytes=1)],
        "connections": [{**opened, "remote": name, **end} for name, end in ends.items()],
        "twin_sessions": [{**opened, "twin": twin, **end} for twin, end in enumerate(ends.values())],
        "log_quality": [
            {"role": "server", "node": "n", "boot": boot, "run_over": over, "last_at": last_at}
            for boot, over, last_at in runs
        ],
    }

    totals = queries.totals(Tables(spark, fleet).read, DAY, DAY + DAY_S)

    assert (totals["clients"], totals["twins"]) == (3, 3)


def test_frames_have_their_columns(data: ReportData) -> None:
    assert {name: tuple(frame.columns) for name, frame in data.frames.items()} == dict(FRAMES)


def test_load(data: ReportData) -> None:
    relays = [(row["relay"], row["protocol"]) for row in data.rows("relays")]
    assert relays == [(OTHER_RELAY, "messaging"), (RELAY, "dmsg")]
    assert one(data, "load", relay=RELAY, at=DAY + HOUR_S)["bytes"] == 1000
    assert one(data, "fleet", at=DAY + DAY_S) == {
        **{"at": DAY + DAY_S, "bytes": 4500, "connections": 7, "transports": 0, "failed": 1, "relays": 2}
    }


def test_relays_have_their_own_percentiles(data: ReportData) -> None:
    relay = one(data, "relays", relay=RELAY)

    assert (relay["handshake_p50"], relay["accept_p50"], relay["accept_p99"]) == (20.0, 200.0, 298.0)
    assert (relay["transports"], relay["refused"], relay["failed"]) == (3, 1, 1)
    assert pd.isna(one(data, "relays", relay=OTHER_RELAY)["accept_p50"])


def test_relays_with_given_names_have_percentiles_too_however_alike_they_are(spark: SparkSession) -> None:
    east, west, silent = (f"relay-production-{name}" for name in ("east", "west", "silent"))
    opened = {"role": "server", "opened_at": DAY + 1.0, "date": date(DAY), "state": "open"}
    rows = {"connections": [{**opened, "node": name, "handshake_ms": ms} for name, ms in ((east, 10.0), (west, 30.0))]}

    found = queries.handshakes(Tables(spark, rows).read, DAY, DAY + DAY_S, [west, silent, east])

    assert list(found["relay"]) == [west, silent, east]
    assert list(found["handshake_p50"].fillna(-1.0)) == [30.0, -1.0, 10.0]


def test_percentiles_are_those_of_all_measurements_of_a_bucket(data: ReportData) -> None:
    assert one(data, "latency", metric="handshake", at=DAY + HOUR_S)["p50"] == 20.0
    assert one(data, "latency", metric="accept", at=DAY + HOUR_S)["count"] == 2
    assert one(data, "latency", metric="dial", at=DAY + HOUR_S)["p50"] == 60.0
    assert [(row["metric"], row["count"], row["p50"]) for row in data.rows("latency_total")] == [
        ("accept", 2, 200.0),
        ("dial", 2, 60.0),
        ("handshake", 3, 20.0),
    ]


def test_failures(data: ReportData) -> None:
    assert one(data, "failures", reason="peer_unreachable")["count"] == 5
    dial = one(data, "dial_failures", relay=RELAY)
    assert (dial["attempts"], dial["clients"]) == (7, 4)


def test_resumptions(data: ReportData) -> None:
    assert [row["resumptions"] for row in sorted(data.rows("resumptions"), key=lambda row: row["date"])] == [2, 1]
    times = one(data, "resumption_times", reason="reset")
    assert (times["count"], times["p50"], times["max"]) == (2, 50.0, 60.0)


def test_keys(data: ReportData) -> None:
    worst = one(data, "abuse", key=CAROL)
    assert (worst["days"], worst["score"], worst["why"], worst["refusals"]) == (2, 0.9, "worst", 20)
    assert bool(worst["flagged"])
    talker = one(data, "talkers", key=ALICE)
    assert (talker["sent"], talker["bytes"], talker["peers"], talker["days"]) == (10, 22, 3, 2)


def test_the_forecast_of_the_fleet_is_the_sum_of_the_relays(data: ReportData) -> None:
    fleet = one(data, "forecast", relay="")
    assert (fleet["value"], fleet["low"], fleet["high"], fleet["history_days"]) == (30.0, 28.0, 34.0, 1)
    assert fleet["day"] == date(DAY + 2 * DAY_S).isoformat()
    assert one(data, "history", relay="", date=date(DAY + DAY_S).isoformat())["connections"] == 6


def test_discovery(data: ReportData) -> None:
    assert one(data, "discovery", at=DAY) == {"at": DAY, "requests": 11, "errors_4xx": 2, "errors_5xx": 0}
    path = one(data, "paths", path="entry")
    assert (path["requests"], path["errors_4xx"], path["errors_5xx"], path["p50"], path["max"]) == (9, 1, 1, 1.0, 6.0)


def test_the_bus(data: ReportData) -> None:
    ways = {(row["at"], row["way"]): row["count"] for row in data.rows("bus")}
    assert ways[DAY, "federated"] == 3 and ways[DAY + HOUR_S, "local"] == 5 and ways[DAY + DAY_S, "refused"] == 1
    assert (data.totals["bus_relays"], data.totals["twins"]) == (1, 2)
    assert [tuple(row.values()) for row in data.rows("bus_failures")] == [
        ("envelope", "destination offline", 5),
        ("envelope", "message wrong source", 1),
    ]
    assert [tuple(row.values()) for row in data.rows("federation")] == [("r1", "r2", 15, 4, 9.0, 2.0)]
    assert [tuple(row.values()) for row in data.rows("calls")] == [("", 9, 2.0, 7.0), ("timeout", 1, 2.0, 5000.0)]


def test_quality(data: ReportData) -> None:
    node = one(data, "quality", node=node_of(RELAY))
    assert (node["key"], node["runs"], node["unended"], node["lines"], node["dropped"]) == (RELAY, 2, 1, 100, 10)
    assert (node["gap_lines"], node["corrupt"], node["late"], node["lateness_p99"]) == (3, 2, 4, 9.0)


def test_what_is_gathered_can_be_rendered(data: ReportData) -> None:
    page = render(data)
    assert RELAY in page
    assert "No data." not in page


def test_empty_tables_give_a_page_that_says_so(spark: SparkSession) -> None:
    data = gather(Tables(spark, {}).read)

    assert data.until == 0
    assert "There is no data yet" in render(data)


def test_lines_of_discovery_alone_give_a_page(spark: SparkSession) -> None:
    fleet = small_fleet()
    read = Tables(spark, {name: fleet[name] for name in ("accounts", "discovery_hourly")}).read

    page = render(gather(read))

    assert "Discovery answered 11 requests" in page
    assert "No relay has written anything yet." in page


def test_lines_of_the_bus_alone_give_a_page(spark: SparkSession) -> None:
    fleet = small_fleet()
    names = ("accounts", "envelopes_hourly", "twin_sessions", "federation_hourly", "rmb_failures", "calls_hourly")
    page = render(gather(Tables(spark, {name: fleet[name] for name in names}).read))

    assert "1 relay of it took 33 envelopes for 2 twins" in page
    assert "No relay has written anything yet." in page


def test_lines_of_clients_alone_give_a_page(spark: SparkSession) -> None:
    """Relays and discovery are others'."""
    fleet = small_fleet()
    rows: Rows = {name: fleet[name] for name in ("accounts", "pair_latency", "dial_failures", "events")}
    ended = float(DAY + DAY_S + 3 * HOUR_S + 5)
    rows["log_quality"] = [{"role": "client", "node": node_of(ALICE), "first_at": float(DAY), "last_at": ended}]
    rows["accounts"] = [{**each, "landed_at": ended + 60.0} for each in rows["accounts"]]

    data = gather(Tables(spark, rows).read)
    page = render(data)

    assert (data.since, data.until) == (DAY, DAY + DAY_S + 4 * HOUR_S)
    assert "Of 10 dials" in page and "7 attempts" in page
    assert "has written anything in the time" not in page
    assert "No relay has written anything yet." in page


def test_a_large_fleet_is_cut_to_what_a_person_reads(spark: SparkSession) -> None:
    relays = [f"02{index:064x}" for index in range(TOP_RELAYS + 30)]
    keys = [f"03{index:064x}" for index in range(TOP_KEYS + 30)]
    rows = small_fleet()
    rows["relay_hourly"] = [hour(relay, DAY, bytes=index) for index, relay in enumerate(relays)]
    rows["top_talkers"] = [{"date": date(DAY), "key": key, "bytes": index} for index, key in enumerate(keys)]
    rows["relay_failures"] = [failure(RELAY, DAY, "transport", f"reason {index}", 1 + index) for index in range(90)]

    read, until = Tables(spark, rows).read, DAY + HOUR_S

    found = queries.relays(read, DAY, until)
    load = queries.load(read, DAY, until, HOUR_S, list(found["relay"]))
    failures = queries.failures(read, DAY, until, HOUR_S)
    talkers = queries.talkers(read, DAY, until)

    assert list(found["relay"]) == relays[: -TOP_RELAYS - 1 : -1]
    assert set(load["relay"]) == set(relays[-TOP_RELAYS:])
    assert list(talkers["key"]) == keys[: -TOP_KEYS - 1 : -1]
    assert len(failures) == 41
    assert failures["count"].sum() == sum(range(1, 91))


@pytest.mark.parametrize(("days", "hours"), [(1, 1), (4, 1), (5, 2), (14, 3), (28, 6)])
def test_buckets_are_as_short_as_a_chart_has_room_for(days: int, hours: int) -> None:
    assert bucket_s(DAY, DAY + days * DAY_S) == hours * HOUR_S
