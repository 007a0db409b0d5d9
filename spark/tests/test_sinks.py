"""Where tasks put plain lines: files of their own, or Spark's."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from landing_files import START, LandingZone, line
from pyspark.sql import SparkSession
from test_plain import file

from dmsg_logs.ingest import plain, sinks, store
from dmsg_logs.ingest.batches import ingest


def _write(spark: SparkSession, sink: sinks.FileSink, *files: plain.File) -> list[Any]:
    """Run a sink in a task; the files it says it has written."""
    rows = [(uri, content.to_pybytes()) for uri, content in files]
    frame = spark.createDataFrame(rows, "uri string, content binary").coalesce(1)
    return frame.mapInArrow(sinks.Task(sinks.from_spark, sink), sinks.FILES).collect()


def test_each_line_is_in_the_directory_of_its_day(spark: SparkSession, tmp_path: Path) -> None:
    """More days than a task has files open."""
    texts = [line(seq=seq, ts=START + seq % 50 * 86_400) for seq in range(100)]
    sink = sinks.FileSink(plain.Told({"a.jsonl": "a"}, (), {}, ()), str(tmp_path))
    files = _write(spark, sink, file(*texts))
    assert sum(each["rows"] for each in files) == 100
    assert not list(tmp_path.rglob("state=*"))  # not to be seen yet
    sinks.publish(str(tmp_path), files)
    written = sorted(tmp_path.rglob("*"))
    assert len({each.parent for each in written if each.is_file()}) == 50
    assert {str(each.relative_to(tmp_path)) for each in written if each.is_file()} == {each["name"] for each in files}
    rows = pq.ParquetDataset(tmp_path).read().to_pylist()
    assert sorted(row["seq"] for row in rows) == list(range(100))
    for row in rows:
        assert (row["state"], row["date"]) == ("good", str(datetime.fromtimestamp(row["ts"], timezone.utc).date()))


def test_a_task_that_fails_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Files get their names together, at the end."""
    sink = sinks.FileSink(plain.Told({"a.jsonl": "a"}, (), {}, ()), str(tmp_path))
    with pytest.raises(Exception, match="KeyError"):  # Spark's, of what the task raised
        _write(spark, sink, file(line()), file(line(), uri="unknown.jsonl"))
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_tables_on_a_file_system_that_only_hadoop_knows(spark: SparkSession, tmp_path: Path) -> None:
    """Spark reads the files and writes the lines that tasks hand back; what comes out is the same."""
    zone = LandingZone(tmp_path / "there" / "landing")
    zone.file(lines=[*(line(seq=seq) for seq in range(50)), line(seq=3), "[]", line(v=2, seq=60)])
    zone.file(lines=[line(seq=seq, ts=START - 86_400) for seq in range(40, 55)])
    configuration: Any = spark.sparkContext._jsc  # type: ignore[attr-defined]
    configuration.hadoopConfiguration().set("fs.viewfs.mounttable.m.link./t", f"file://{tmp_path}/there")
    here, there = str(tmp_path / "here"), "viewfs://m/t/tables"
    summaries = [ingest(spark, str(zone.root), here), ingest(spark, "viewfs://m/t/landing", there)]
    assert [(each.lines_in, each.good, each.dup, each.corrupt) for each in summaries] == [(68, 56, 11, 1)] * 2
    columns = [each for each in store.read_events(spark, here).columns if each != "landed_at"]
    found = [sorted(map(repr, store.read_events(spark, each).select(columns).collect())) for each in (here, there)]
    assert found[0] == found[1]
    for state in ("dup", "corrupt"):
        assert store.read_state(spark, here, state).count() == store.read_state(spark, there, state).count()
