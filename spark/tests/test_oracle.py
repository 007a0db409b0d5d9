"""The pipeline over a generated landing zone with every flaw there is, held against the truth and against DuckDB."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from landing_zone import Zone
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.ingest import store
from dmsg_logs.ingest.accounts import IngestSummary
from dmsg_logs.ingest.batches import ingest
from dmsg_logs.schemas import LINE
from dmsg_logs.synthetic import generate
from dmsg_logs.synthetic.bus import WAYS
from dmsg_logs.tables.generations import build_tables, read_table
from dmsg_logs.tables.transforms.log_quality import LATE_S

_MODULUS = 2**61 - 1
#: Forms of corruption that leave no doubt what to call them.
_CLEAR = ("blank", "wrong_type", "no_key", "bad_time")


@dataclass
class Oracle:
    """A landing zone, what it holds, and what the pipeline made of it."""

    zone: Zone
    tables: str
    summary: IngestSummary
    rows: dict[str, int]


@pytest.fixture(scope="module")
def oracle(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Ten thousand lines through everything."""
    out, tables = tmp_path_factory.mktemp("landing"), str(tmp_path_factory.mktemp("tables"))
    shares: dict[str, Any] = {"corrupt": 0.01, "duplicates": 0.03, "late": 0.02, "missing": 0.005, "newer": 0.005}
    truth = generate(out, events=10_000, seed=23, days=2, relays=4, clients=6, workers=1, **shares)
    summary = ingest(spark, str(out), tables)
    return Oracle(Zone(truth, out).read(), tables, summary, build_tables(spark, tables))


@pytest.fixture(scope="module")
def good(oracle: Oracle) -> duckdb.DuckDBPyConnection:
    """The good lines in DuckDB, as ``events``."""
    frame = pd.DataFrame(list(oracle.zone.good.values()), columns=list(LINE.names), dtype=object)
    connection = duckdb.connect()
    connection.register("objects", frame)
    types = {"string": "varchar", "bigint": "bigint", "double": "double", "boolean": "boolean"}
    columns = ", ".join(
        f'cast("{field.name}" as {types[field.dataType.simpleString()]}) as "{field.name}"' for field in LINE
    )
    connection.execute(f"create table events as select {columns} from objects")
    return connection


def test_summary_is_the_truth(oracle: Oracle) -> None:
    """in = good + dup + corrupt, each exact; what is missing is named."""
    truth, summary = oracle.zone.truth, oracle.summary
    found = (summary.files, summary.lines_in, summary.good, summary.dup, summary.corrupt, summary.missing)
    assert found == (truth.files, truth.lines, truth.good, truth.dup, truth.corrupt, truth.missing)
    assert summary.lines_in == summary.good + summary.dup + summary.corrupt
    assert sorted(summary.missing_files) == truth.missing_files != []


def test_every_good_line_is_there_once(spark: SparkSession, oracle: Oracle) -> None:
    """Keys by run, every value of every line, and the whole text of those of a later version."""
    truth = oracle.zone.truth
    events = store.read_events(spark, oracle.tables)
    square = (F.col("seq") * F.col("seq")).cast("decimal(38,0)")
    runs = events.groupBy("node", "boot").agg(F.count("*"), F.sum("seq"), F.sum(square) % _MODULUS)
    found = {(row[0], row[1]): (row[2], row[3], int(row[4])) for row in runs.collect()}
    assert found == {
        (run["node"], run["boot"]): (run["lines"], run["seq_sum"], run["seq_square_sum"]) for run in truth.runs
    }
    for row in events.collect():
        value = oracle.zone.good[row["node"], row["boot"], row["seq"]]
        assert {name: row[name] for name in LINE.names if row[name] is not None} == {
            name: value[name] for name in LINE.names if name in value
        }
        raw = oracle.zone.raw[row["node"], row["boot"], row["seq"]].decode().rstrip("\n")
        assert row["raw"] == (raw if oracle.zone.is_newer(value) else None)
        assert row["file"] in oracle.zone.files[row["node"], row["boot"], row["seq"]]


def test_quarantine_has_what_was_spoiled(spark: SparkSession, oracle: Oracle) -> None:
    """As many lines as were spoiled, each with its file and a reason."""
    truth = oracle.zone.truth
    rows = store.read_quarantine(spark, oracle.tables).collect()
    reasons = Counter(row["reason"] for row in rows)
    assert len(rows) == truth.corrupt
    assert {name: reasons[name] for name in _CLEAR} == {name: truth.corrupt_forms[name] for name in _CLEAR}
    by_file = Counter(row["file"] for row in rows)
    assert by_file == Counter({file["name"]: file["corrupt"] for file in truth.file_list if file["corrupt"]})


def test_accounts_of_files_are_the_truth(spark: SparkSession, oracle: Oracle) -> None:
    """Each file: lines it has, lines its name says, corrupt and missing ones; copies add up."""
    found = {row["file"]: row for row in store.read_accounts(spark, oracle.tables).collect()}
    assert len(found) == oracle.zone.truth.files
    for file in oracle.zone.truth.file_list:
        row = found[file["name"]]
        assert (row["recorded"], row["lines"], row["corrupt"]) == (file["recorded"], file["lines"], file["corrupt"])
        assert row["good"] + row["dup"] == file["good"]
        assert row["missing"] == file["recorded"] - file["lines"]
        assert row["landed_at"] == pytest.approx(file["landed_at"], abs=0.01)


def test_again_changes_nothing(spark: SparkSession, oracle: Oracle) -> None:
    """No new file, no new batch, no new generation of the tables."""
    before = {path: path.stat().st_mtime_ns for path in Path(oracle.tables).rglob("*.parquet")}
    summary = ingest(spark, str(oracle.zone.out), oracle.tables)
    assert (summary.files, summary.lines_in, summary.batches) == (0, 0, 0)
    assert build_tables(spark, oracle.tables) == oracle.rows
    assert {path: path.stat().st_mtime_ns for path in Path(oracle.tables).rglob("*.parquet")} == before


def test_log_quality_is_the_truth(spark: SparkSession, oracle: Oracle) -> None:
    """Each run: lines, gaps, copies, what was spoiled, lost or dropped, and whether it said that it stopped."""
    found = {(row["node"], row["boot"]): row for row in read_table(spark, oracle.tables, "log_quality").collect()}
    assert len(found) == len(oracle.zone.truth.runs)
    for run in oracle.zone.truth.runs:
        row = found[run["node"], run["boot"]]
        same = ("role", "files", "lines", "first_seq", "last_seq", "dup", "corrupt", "missing", "events_dropped")
        assert {name: row[name] for name in same} == {name: run[name] for name in same}
        assert row["gaps"] == run["gaps"] + (run["first_seq"] > 0)
        assert row["gap_lines"] == run["gap_lines"] + run["first_seq"]
        assert row["ended"] == (None if run["role"] == "client" else run["ended"])
    fewest = most = 0
    landed_at = {file["name"]: file["landed_at"] for file in oracle.zone.truth.file_list}
    for key, value in oracle.zone.good.items():  # of a line that came twice either file may have been taken
        late = [landed_at[name] - value["ts"] > LATE_S for name in oracle.zone.files[key]]
        fewest, most = fewest + all(late), most + any(late)
    assert fewest <= sum(row["late_lines"] for row in found.values()) <= most


def test_relays_did_what_the_truth_says(spark: SparkSession, oracle: Oracle) -> None:
    """The hours of each relay add up."""
    names = ("connections_opened", "connections_closed", "handshakes_failed", "transports_opened", "transports_closed")
    names = (*names, "refusals", "bytes")
    hourly = read_table(spark, oracle.tables, "relay_hourly").groupBy("relay").agg(*[F.sum(name) for name in names])
    found = {row[0]: tuple(row[1:]) for row in hourly.collect()}
    assert found == {key: tuple(counts[name] for name in names) for key, counts in oracle.zone.truth.relays.items()}


def test_the_bus_did_what_the_truth_says(spark: SparkSession, oracle: Oracle) -> None:
    """Sessions, envelopes, failures, posts to other relays and calls add up."""

    def sums(table: str, keys: list[str], *names: str, where: str = "true") -> dict[str, tuple[int, ...]]:
        summed = (
            read_table(spark, oracle.tables, table).where(where).groupBy(*keys).agg(*[F.sum(name) for name in names])
        )
        rows = {" ".join(row[: len(keys)]): tuple(row[len(keys) :]) for row in summed.collect()}
        return {key: values for key, values in rows.items() if any(values)}

    truth = oracle.zone.truth.bus
    hourly = sums("envelopes_hourly", ["relay"], "sessions_opened", "rate_limited", *WAYS)
    assert hourly == {
        relay: (
            truth["sessions"][relay],
            truth["limits"].get(relay, 0),
            *(truth["envelopes"][f"{relay} {way}"] for way in WAYS),
        )
        for relay in oracle.zone.truth.planted["bus_relays"]
    }
    sessions = read_table(spark, oracle.tables, "twin_sessions").where("opened_at is not null and role = 'server'")
    assert sessions.count() == sum(truth["sessions"].values())
    attempts = sums("federation_hourly", ["relay", "other"], "attempts", "failed")
    assert attempts == {pair: (count, truth["failed"][pair]) for pair, count in truth["attempts"].items()}
    failures = sums("rmb_failures", ["relay"], "count", where="what = 'envelope'")
    assert failures == {relay: (count,) for relay, count in truth["failures"].items()}
    assert sums("calls_hourly", ["reason"], "calls") == {reason: (count,) for reason, count in truth["calls"].items()}


def test_hours_of_relays_are_those_of_duckdb(
    spark: SparkSession, oracle: Oracle, good: duckdb.DuckDBPyConnection
) -> None:
    """Percentiles of each hour, from the lines themselves."""
    wanted = good.execute(
        """
        select server, floor(ts / 3600) * 3600, quantile_cont(accept_ms, [0.5, 0.95, 0.99])
        from events where role = 'server' and event = 'transport_opened' group by all
        """
    ).fetchall()
    rows = read_table(spark, oracle.tables, "relay_hourly").where("transports_opened > 0").collect()
    found = {
        (row["relay"], row["hour"].timestamp()): [row[f"accept_ms_p{point}"] for point in (50, 95, 99)] for row in rows
    }
    assert len(found) == len(wanted) > 100
    for relay, hour, points in wanted:
        assert found[relay, hour] == pytest.approx(points)


def test_transports_of_relays_are_those_of_duckdb(
    spark: SparkSession, oracle: Oracle, good: duckdb.DuckDBPyConnection
) -> None:
    """Opening and closing joined in the order of the run, by another engine."""
    wanted = good.execute(
        """
        select state, count(*), count(opened_at), coalesce(sum(bytes_in + bytes_out), 0), round(sum(closed_at - opened_at), 3)
        from (
            select case when opening and closed_at is null then 'open'
                        when opening or duration_s > 0 then 'closed' else 'refused' end as state, *
            from (
                select event = 'transport_opened' as opening,
                    coalesce(lag(event) over pair = 'transport_opened', false) as follows,
                    lead(event) over pair = 'transport_closed' as ends,
                    case when opening then ts end as opened_at,
                    case when not opening then ts when ends then lead(ts) over pair end as closed_at,
                    case when not opening then bytes_in when ends then lead(bytes_in) over pair end as bytes_in,
                    case when not opening then bytes_out when ends then lead(bytes_out) over pair end as bytes_out,
                    duration_s
                from events where role = 'server' and event in ('transport_opened', 'transport_closed')
                window pair as (partition by node, boot, conn, transport_id order by seq)
            ) where opening or not follows
        ) group by state
        """
    ).fetchall()
    rows = read_table(spark, oracle.tables, "transports").where("role = 'server'").groupBy("state")
    found = rows.agg(
        F.count("*"),
        F.count("opened_at"),
        F.coalesce(F.sum(F.col("bytes_in") + F.col("bytes_out")), F.lit(0)),
        F.round(F.sum(F.col("closed_at") - F.col("opened_at")), 3),
    ).collect()
    assert sorted(map(tuple, found)) == sorted(wanted)
    assert {row[0] for row in wanted} == {"open", "closed", "refused"}


def test_transports_of_clients_have_one_end_each(spark: SparkSession, oracle: Oracle) -> None:
    """Each closing line of a client belongs to one transport, also where that went on over another relay."""
    closings = Counter(
        (value["node"], value["boot"], value["server"], value["transport_id"], value["ts"])
        for value in oracle.zone.good.values()
        if value["role"] == "client" and value["event"] == "transport_closed"
    )
    rows = read_table(spark, oracle.tables, "transports").where("role = 'client'").collect()
    assert sum(row["closed_at"] is not None for row in rows) == sum(closings.values())
    assert {row["state"] for row in rows} == {"open", "closed"}
    openings = sum(
        value["role"] == "client" and value["event"] == "transport_opened" for value in oracle.zone.good.values()
    )
    assert sum(row["opened_at"] is not None for row in rows) == openings
    # only lines that were lost leave a closing without its opening
    unopened = sum(row["opened_at"] is None for row in rows)
    lost = oracle.zone.truth.missing + oracle.zone.truth.corrupt
    assert unopened <= lost
    for row in rows:
        if row["opened_at"] is not None and row["closed_at"] is not None:
            assert row["closed_at"] - row["opened_at"] == pytest.approx(row["duration_s"], abs=0.2)


def test_dials_and_resumptions_are_the_truth(spark: SparkSession, oracle: Oracle) -> None:
    """Leaves of failed dials by relay and reason, dials that ended, transports that went on."""
    truth = oracle.zone.truth
    failures: dict[str, dict[str, int]] = {}
    grouped = read_table(spark, oracle.tables, "dial_failures").groupBy("relay", "stage", "reason")
    for relay, stage, reason, attempts in grouped.agg(F.sum("attempts")).collect():
        failures.setdefault(relay, {})[f"{stage}/{reason}"] = attempts
    assert failures == truth.dial_failures
    dials = read_table(spark, oracle.tables, "pair_latency").agg(F.sum("dials"), F.sum("dials_ok")).collect()[0]
    assert tuple(dials) == (truth.dials["all"], truth.dials["ok"])
    resumed = read_table(spark, oracle.tables, "resumptions").groupBy("server", "reason").agg(F.sum("resumptions"))
    assert {f"{row[0]} {row[1]}": row[2] for row in resumed.collect()} == truth.resumptions != {}


def test_discovery_and_talkers_are_those_of_duckdb(
    spark: SparkSession, oracle: Oracle, good: duckdb.DuckDBPyConnection
) -> None:
    """Requests by hour and kind; data of each client on each day."""
    wanted = good.execute(
        """
        select floor(ts / 3600) * 3600, method, path, count(*), count(*) filter (status between 400 and 499),
            count(*) filter (status >= 500), quantile_cont(elapsed_ms, 0.95)
        from events where event = 'discovery_request' group by all order by all
        """
    ).fetchall()
    rows = read_table(spark, oracle.tables, "discovery_hourly").orderBy("hour", "method", "path").collect()
    found = [
        (row["hour"].timestamp(), row["method"], row["path"], row["requests"], row["errors_4xx"], row["errors_5xx"])
        for row in rows
    ]
    assert found == [row[:6] for row in wanted]
    assert [row["elapsed_ms_p95"] for row in rows] == pytest.approx([row[6] for row in wanted])
    talk = good.execute(
        """
        select cast(make_timestamp(cast(ts * 1e6 as bigint)) as date) as day, key, sum(sent), sum(received) from (
            select ts, initiator as key, bytes_out as sent, bytes_in as received
            from events where role = 'server' and event = 'transport_closed' and duration_s > 0
            union all
            select ts, responder, bytes_in, bytes_out
            from events where role = 'server' and event = 'transport_closed' and duration_s > 0
        ) group by all
        """
    ).fetchall()
    talkers = read_table(spark, oracle.tables, "top_talkers").collect()
    found_talk = {(row["date"], row["key"]): (row["bytes_sent"], row["bytes_received"]) for row in talkers}
    assert found_talk == {(day, key): (int(sent), int(received)) for day, key, sent, received in talk}


def test_planted_abusers_are_flagged(spark: SparkSession, oracle: Oracle) -> None:
    """All clients that abuse relays, and no others."""
    flagged = read_table(spark, oracle.tables, "abuse_candidates").where("flagged").select("key").distinct().collect()
    planted = {key[:16] for key in oracle.zone.truth.planted["abusive_keys"]}
    assert planted <= {row[0][:16] for row in flagged}
    liars = {key[:16] for key in oracle.zone.truth.planted["lying_keys"]}
    assert {row[0][:16] for row in flagged} <= planted | liars
