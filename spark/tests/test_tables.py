"""Generations of the tables: what is built, what readers see, and what a crash leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from event_rows import DAY, RELAY, accounts, events, keys_of, line_rows, random_fleet, rows_of
from landing_files import LandingZone, line, record_syncs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dmsg_logs.ingest import store
from dmsg_logs.ingest.batches import ingest
from dmsg_logs.runtime import lease
from dmsg_logs.tables import generations as tables
from dmsg_logs.tables import tabledef
from dmsg_logs.tables.generations import (
    TABLES,
    Manifest,
    NoTables,
    Progress,
    build_tables,
    read_manifest,
    read_table,
    write_table,
)


@dataclass
class Lines:
    """A source of lines that are already there."""

    frame: DataFrame
    files: DataFrame
    numbers: list[int] = field(default_factory=lambda: [1])

    def batches(self) -> list[int]:
        return self.numbers

    def events(self) -> DataFrame:
        return self.frame

    def keys(self) -> DataFrame:
        return keys_of(self.frame)

    def accounts(self) -> DataFrame:
        return self.files


class Crash(Exception):
    """Ends a build as SIGKILL would."""


#: Enough of them to see how generations follow each other.
FEW = {name: TABLES[name] for name in ("log_quality", "relay_failures")}


def _build(spark: SparkSession, directory: Path, source: Lines, progress: Progress | None = None) -> dict[str, int]:
    return build_tables(spark, str(directory), source=source, registry=FEW, progress=progress)


def _everything(spark: SparkSession, directory: Path) -> dict[str, Any]:
    return {name: rows_of(read_table(spark, str(directory), name)) for name in FEW}


def _versions(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.glob("*/v=*"))


# --- what is in the tables -------------------------------------------------------------------------------------------

FLEET = random_fleet(7, 500)


@pytest.fixture(scope="module")
def built(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tables of a random fleet."""
    directory = str(tmp_path_factory.mktemp("tables"))
    rows = build_tables(spark, directory, source=Lines(events(spark, FLEET), accounts(spark, [{"good": len(FLEET)}])))
    assert set(rows) == set(TABLES)
    assert read_manifest(spark, directory).rows == rows
    return directory


@pytest.fixture(scope="module")
def oracle(built: str) -> duckdb.DuckDBPyConnection:
    """DuckDB with the lines as ``lines``."""
    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'")
    frame = pd.DataFrame(line_rows(FLEET))  # noqa: F841  DuckDB reads it by its name
    connection.execute("create table lines as select * replace (date::date as date) from frame")
    return connection


def test_every_table_is_what_it_is_documented_to_be(spark: SparkSession, built: str) -> None:
    for table in TABLES.values():
        assert read_table(spark, built, table.name).dtypes == table.dtypes
        assert table.meaning and all(column.meaning for column in table.columns)
        assert len(set(table.names)) == len(table.columns)
        assert not table.partition or table.partition in table.names
        schema = {each.name: each.dataType for each in table.schema.fields}
        assert all(schema[column.name] is tabledef.TYPES[column.type] for column in table.columns)
    manifest = read_manifest(spark, built)
    assert manifest.violations == {}
    assert set(manifest.findings) == {"transports.unopened"}, "lines that were left out"


def test_transports_against_a_replay(spark: SparkSession, built: str) -> None:
    """The same pairs as by keeping a dictionary of what is open, line after line."""
    open_now: dict[tuple[Any, ...], float] = {}
    expected = []
    for row in line_rows(FLEET):
        key = tuple(row[name] for name in ("node", "conn", "transport_id", "initiator", "responder"))
        if row["event"] == "transport_opened":
            if key in open_now:
                expected.append((*key, "open", open_now[key], None))
            open_now[key] = row["ts"]
        elif row["event"] == "transport_closed":
            state = "closed" if key in open_now or row["duration_s"] > 0 else "refused"
            expected.append((*key, state, open_now.pop(key, None), row["ts"]))
    expected += [(*key, "open", opened_at, None) for key, opened_at in open_now.items()]
    found = read_table(spark, built, "transports").select(
        "node", "conn", "transport_id", "initiator", "responder", "state", "opened_at", "closed_at"
    )
    assert sorted(map(tuple, found.collect()), key=repr) == sorted(expected, key=repr)
    assert {row[5] for row in expected} == {"open", "closed", "refused"}


def test_hours_against_duckdb(built: str, oracle: duckdb.DuckDBPyConnection) -> None:
    """DuckDB makes the same of the lines, and reads what Spark has written."""
    per_hour = """
        select server_of.public_key as relay, 'dmsg' as protocol,
            time_bucket(interval 1 hour, make_timestamp((ts * 1e6)::bigint)) as hour,
            count_if(event = 'connection_opened'), count_if(event = 'connection_closed'),
            count_if(event = 'handshake_failed'), {handshake_ms}, count_if(event = 'transport_opened'),
            count_if(event = 'transport_closed' and duration_s > 0), count_if(event = 'transport_closed' and code > 0),
            coalesce(sum(count), 0),
            coalesce(sum(bytes_in + bytes_out) filter (event = 'transport_closed'), 0),
            {accept_ms}, {queue_peak_bytes}, max(queue_peak_bytes) filter (duration_s > 0)
        from lines join (select node, public_key from lines where event = 'server_started') as server_of using (node)
        where event <> 'server_started' group by all order by relay, hour
    """
    wanted = {"handshake_ms": "true", "accept_ms": "true", "queue_peak_bytes": "duration_s > 0"}
    percentiles = {
        name: ", ".join(f"quantile_cont({name}, {point}) filter ({condition})" for point in (0.5, 0.95, 0.99))
        for name, condition in wanted.items()
    }
    expected = oracle.execute(per_hour.format(**percentiles)).fetchall()
    table = f"read_parquet('{built}/relay_hourly/*/*/*.parquet', hive_partitioning = true)"
    columns = [name for name in TABLES["relay_hourly"].names if name not in ("connections_open_max", "date")]
    names = ", ".join("hour::timestamp" if name == "hour" else name for name in columns)
    found = oracle.execute(f"select {names} from {table} order by relay, hour").fetchall()
    assert len(found) > 80
    assert [tuple(map(_close, row)) for row in found] == [tuple(map(_close, row)) for row in expected]


def test_most_connections_against_a_replay(spark: SparkSession, built: str) -> None:
    """The number that are open after each line, the largest of each hour; an hour begins with those of before."""
    steps = sorted(
        (row["node"], row["ts"], 1 if row["event"] == "connection_opened" else -1)
        for row in line_rows(FLEET)
        if row["event"] in ("connection_opened", "connection_closed")
    )
    level: dict[str, int] = {}
    most: dict[tuple[str, int], int] = {}
    for node, ts, step in steps:
        hour = node, int(ts // 3600)
        most.setdefault(hour, level.get(node, 0))
        level[node] = level.get(node, 0) + step
        most[hour] = max(most[hour], level[node])
    found = read_table(spark, built, "relay_hourly").where("connections_opened + connections_closed > 0")
    rows = found.selectExpr("substr(relay, 1, 16)", "unix_timestamp(hour) div 3600", "connections_open_max").collect()
    assert {(node, hour): open_max for node, hour, open_max in rows} == most
    assert max(most.values()) > 3


def _close(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


# --- generations -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few(spark: SparkSession) -> Lines:
    """A source of a few lines."""
    started = ("server_started", {"public_key": RELAY, "ts": DAY})
    return Lines(events(spark, [started, ("refused", {"count": 2, "ts": DAY + 5})]), accounts(spark, [{"good": 2}]))


def test_generations_follow_each_other(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    tmp_path = tmp_path / "t[a]{b,c}\\"  # which are not patterns here
    directory = str(tmp_path)
    with pytest.raises(NoTables):
        read_table(spark, directory, "relay_failures")
    rows = _build(spark, tmp_path, few)
    first, steps = read_manifest(spark, directory), []
    assert (first.generation, first.batches, first.rows) == (1, [1], rows)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert build_tables(spark, directory, source=few, progress=lambda *step: steps.append(step)) == rows
    assert steps == [] and {path: path.stat().st_mtime_ns for path in before} == before, "nothing has changed"

    reader = read_table(spark, directory, "relay_failures")
    few.numbers = [1, 2]
    few.frame = few.frame.withColumn("count", F.col("count") * 10)
    _build(spark, tmp_path, few, lambda *step: steps.append(step))
    assert [step[0] for step in steps] == [*FEW, "checks", "manifest", "sweep", "done"]
    assert [step[1:] for step in steps] == [(done, len(steps) - 1) for done in range(len(steps))]
    assert rows_of(reader, "count") == [{"count": 2}], "who was reading the old one goes on with it"
    assert rows_of(read_table(spark, directory, "relay_failures"), "count") == [{"count": 20}]
    second = read_manifest(spark, directory)
    assert _versions(tmp_path) == sorted([*first.tables.values(), *second.tables.values()])

    few.numbers = [1, 2, 3]
    _build(spark, tmp_path, few)
    third = read_manifest(spark, directory)
    assert _versions(tmp_path) == sorted([*second.tables.values(), *third.tables.values()]), "the first one is gone"
    with pytest.raises(NoTables):
        read_table(spark, directory, "no such table")


def test_a_batch_that_comes_while_tables_are_made_is_in_none_of_them(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone, directory = LandingZone(tmp_path / "landing"), str(tmp_path / "tables")
    zone.file(lines=[line(seq=seq) for seq in range(3)])
    ingest(spark, str(zone.root), directory)
    read = store.read_events

    def and_a_batch_comes(*arguments: Any) -> DataFrame:
        frame = read(*arguments)
        zone.file(lines=[line(seq=seq) for seq in range(3, 7)])
        ingest(spark, str(zone.root), directory)
        return frame

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_events", and_a_batch_comes)
        build_tables(spark, directory, registry=FEW)
    manifest = read_manifest(spark, directory)
    assert (manifest.batches, manifest.violations, manifest.findings) == ([1], {}, {})
    [run] = rows_of(read_table(spark, directory, "log_quality"), "files", "lines", "gaps", "gap_lines")
    assert run == {"files": 1, "lines": 3, "gaps": 0, "gap_lines": 0}
    build_tables(spark, directory, registry=FEW)
    manifest = read_manifest(spark, directory)
    assert (manifest.batches, manifest.violations) == ([1, 2], {})
    assert rows_of(read_table(spark, directory, "log_quality"), "files", "lines") == [{"files": 2, "lines": 7}]


def test_another_version_of_the_code_builds_anew(
    spark: SparkSession, few: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(tmp_path)
    text = tmp_path / tables.MANIFEST
    few.frame = few.frame.limit(0)
    rows = _build(spark, tmp_path, few)
    assert set(rows.values()) == {0, 1} and rows["log_quality"] == 1, "without lines there are empty tables, and a file"
    assert rows_of(read_table(spark, directory, "relay_failures")) == []
    text.write_text(text.read_text().replace(tables.code_version(), "0" * 16))
    steps: list[Any] = []
    with pytest.raises(Crash):
        _build(spark, tmp_path, few, _crash_at(0, steps))
    text.write_text(text.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="not one of"):
        _build(spark, tmp_path, few)


def _crash_at(step: int, steps: list[Any]) -> Any:
    def progress(name: str, done: int, total: int) -> None:
        steps.append((name, done, total))
        if done == step:
            raise Crash

    return progress


def test_a_crash_at_any_step_changes_nothing(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    directory = str(tmp_path)
    _build(spark, tmp_path, few)
    before = _everything(spark, tmp_path)
    few.numbers = [1, 2]
    few.frame = few.frame.withColumn("count", F.col("count") + 1)
    total = len(FEW) + 3
    for step in range(1, total - 1):
        with pytest.raises(Crash):
            _build(spark, tmp_path, few, _crash_at(step, []))
        assert read_manifest(spark, directory).generation == 1
        assert len(_versions(tmp_path)) == len(FEW), "what was half made is gone: a full disk would stay full of it"
    assert _everything(spark, tmp_path) == before
    with pytest.raises(Crash):  # after the manifest was replaced
        _build(spark, tmp_path, few, _crash_at(total - 1, []))
    after = _everything(spark, tmp_path)
    assert after != before and read_manifest(spark, directory).generation == 2
    assert len(_versions(tmp_path)) == 2 * len(FEW)
    few.numbers = [1, 2, 3]
    _build(spark, tmp_path, few)
    assert _everything(spark, tmp_path) == after
    assert len(_versions(tmp_path)) == 2 * len(FEW)


def test_tables_are_on_the_disk_before_the_manifest_that_names_them(
    spark: SparkSession, few: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave a manifest without its tables: they are not made again until more lines come."""
    _build(spark, tmp_path, few)
    few.numbers = [1, 2]
    before, after = record_syncs(monkeypatch, tmp_path / tables.MANIFEST)
    _build(spark, tmp_path, few)
    versions = [tmp_path / path for path in read_manifest(spark, str(tmp_path)).tables.values()]
    files = [path for each in versions for path in each.rglob("*")]
    assert len(files) > len(FEW)
    assert before >= {*files, *versions, *(each.parent for each in versions)}
    assert tmp_path in after


def test_what_a_killed_run_left_takes_no_room_from_the_next(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    """It is gone before the first table is made, also where there is no generation yet."""
    found = []

    def look(step: str, done: int, total: int) -> None:
        if done == 0:
            found.append(left.exists())

    for numbers in ([1], [1, 2]):
        left = tmp_path / "relay_failures" / "v=00000007-deadbeef"
        left.mkdir(parents=True)
        few.numbers = numbers
        _build(spark, tmp_path, few, look)
    assert found == [False, False]


def test_a_run_that_fails_takes_nothing_from_another_one(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    """A run that had been taken for dead goes on and fails, while the one that took its place is at work."""
    other = tmp_path / "relay_failures" / "v=00000001-deadbeef"

    def and_fail(step: str, done: int, total: int) -> None:
        if step == "checks":
            other.mkdir()
            raise Crash

    with pytest.raises(Crash):
        _build(spark, tmp_path, few, and_fail)
    assert [*tmp_path.glob("*/v=*")] == [other]


def test_two_at_once(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    """While one builds, another is turned away and takes nothing from it; a note of the dead is void."""

    def meanwhile(step: str, done: int, total: int) -> None:
        if step == "checks":
            with pytest.raises(lease.BusyError, match=f"is at work on the tables of {tmp_path}"):
                _build(spark, tmp_path, few)

    _build(spark, tmp_path, few, meanwhile)
    assert read_manifest(spark, str(tmp_path)).generation == 1
    note = tmp_path / tables.BUILDING
    assert not note.exists()
    note.write_text(lease.Owner("another machine", 1, "1", "a token", time.time() - 2 * lease.LEASE_S).to_json())
    few.numbers = [1, 2]
    _build(spark, tmp_path, few)
    assert read_manifest(spark, str(tmp_path)).generation == 2
    assert not note.exists()


def test_a_note_with_a_wrong_time_or_damage_is_void(spark: SparkSession, tmp_path: Path) -> None:
    """A machine whose clock is years ahead, and is killed, must not stop all others for years."""
    note = tmp_path / "note.json"
    ahead = lease.Owner("another machine", 1, "1", "a token", time.time() + 100 * lease.LEASE_S).to_json()
    fields = json.loads(ahead)
    damaged = [
        json.dumps({**fields, name: value})
        for name, value in (("at", None), ("at", "1"), ("at", math.inf), ("pid", ""))
    ]
    for text in (ahead, *damaged, "", "[]", "[" * 100_000):
        note.write_text(text)
        with lease.hold(spark, str(note), "work"):
            assert lease.Owner.from_json(note.read_text()).pid == os.getpid()
    a_little = lease.Owner("another machine", 1, "1", "a token", time.time() + lease.LEASE_S / 2).to_json()
    note.write_text(a_little)
    with pytest.raises(lease.BusyError), lease.hold(spark, str(note), "work"):
        pass


_KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from conftest import _FAST
from test_tables import FEW, Lines
from event_rows import accounts, events
from dmsg_logs.runtime.session import build_session
from dmsg_logs.tables.generations import build_tables

spark = build_session("killed", _FAST)
def progress(step, done, total):
    if step == "relay_failures":
        os.kill(os.getpid(), signal.SIGKILL)
lines = events(spark, [("refused", {{"count": 7, "ts": 1772409605.0}})])
build_tables(spark, {directory!r}, source=Lines(lines, accounts(spark, []), [9]), registry=FEW, progress=progress)
"""


@pytest.mark.process
def test_a_killed_process_changes_nothing(spark: SparkSession, few: Lines, tmp_path: Path) -> None:
    directory = str(tmp_path)
    _build(spark, tmp_path, few)
    before = _everything(spark, tmp_path)
    code = _KILLED.format(tests=str(Path(__file__).parent), directory=directory)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert _everything(spark, tmp_path) == before
    assert len(_versions(tmp_path)) == len(FEW) + 1
    few.numbers = [2]
    _build(spark, tmp_path, few)
    assert _everything(spark, tmp_path) == before
    assert len(_versions(tmp_path)) == 2 * len(FEW)


def test_a_frame_with_other_columns_is_not_written(spark: SparkSession, tmp_path: Path) -> None:
    wrong = spark.createDataFrame([(1,)], "date int")
    with pytest.raises(TypeError, match="resumptions has the columns"):
        write_table(wrong, TABLES["resumptions"], os.fspath(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_the_manifest_reads_what_it_writes() -> None:
    manifest = Manifest(3, "c0de", [1, 2], 5.0, {"a": "a/v=1"}, {"a": 7}, {}, [])
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_damaged_manifest_is_named(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / tables.MANIFEST
    whole = Manifest(3, "c0de", [1, 2], 5.0, {"a": "a/v=1"}, {"a": 7}).to_json().encode()
    damaged = (b"", b"x", whole[:60], b"\xff", b"null", b"[]", whole.replace(b'"code"', b'"cod"'), b"[" * 100_000)
    for content in (*damaged, whole.replace(b'"version": 1', b'"version": 2')):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: "):
            read_manifest(spark, str(tmp_path))
    path.write_bytes(whole)
    assert read_manifest(spark, str(tmp_path)).generation == 3
