"""Small files on Hadoop file systems: what is atomic, what is told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dmsg_logs.runtime import paths


def test_texts_are_created_once_and_replaced_whole(spark: SparkSession, tmp_path: Path) -> None:
    path = f"{tmp_path}/a/b c.json"
    assert paths.create_text(spark, path, "eins ü")
    assert not paths.create_text(spark, path, "zwei")
    assert paths.read_text(spark, path) == "eins ü"
    paths.write_text(spark, path, "drei")
    assert paths.read_text(spark, path) == "drei"
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b c.json"]  # nothing temporary, no checksum


def test_of_many_creators_one_is_told_that_it_did(spark: SparkSession, tmp_path: Path) -> None:
    path = f"{tmp_path}/commit.json"
    told: dict[int, bool] = {}
    start = threading.Barrier(6)

    def create(number: int) -> None:
        start.wait()
        told[number] = paths.create_text(spark, path, f"text {number}" * 1000)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    [winner] = [number for number, created in told.items() if created]
    assert paths.read_text(spark, path) == f"text {winner}" * 1000


def test_names_existence_renaming_and_deletion(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("z=2", "a.json"):
        paths.write_text(spark, paths.join(str(tmp_path), "d", name), "x")
    folder = f"{tmp_path}/d"
    assert paths.names(spark, folder) == ["a.json", "z=2"]
    assert paths.names(spark, f"{tmp_path}/nothing") == []
    assert not paths.rename(spark, f"{folder}/a.json", f"{folder}/z=2")
    assert not paths.rename(spark, f"{folder}/none", f"{folder}/other")
    assert paths.rename(spark, f"{folder}/a.json", f"{tmp_path}/e/b.json")
    assert paths.exists(spark, f"{tmp_path}/e/b.json")
    assert paths.delete(spark, folder)
    assert not paths.delete(spark, folder)
    with pytest.raises(FileNotFoundError):
        paths.read_text(spark, f"{folder}/z=2")


def test_what_a_path_is_called(spark: SparkSession) -> None:
    assert paths.join("s3a://b/x/", "/y/", "z") == "s3a://b/x/y/z"
    assert paths.join("/", "y") == "/y"
    with pytest.raises(ValueError, match="empty"):
        paths.join("", "y")
    assert paths.qualified(spark, "/data/landing") == "file:/data/landing"
    assert paths.spark_uri(spark, "file:/a b/%") == "file:///a%20b/%25"


def test_which_schemes_hadoop_knows(spark: SparkSession) -> None:
    known = {each: paths.known(spark, each) for each in ("/x", "file:///x", "hdfs://h/x", "s3://b/x", "memory://x")}
    assert known == {"/x": True, "file:///x": True, "hdfs://h/x": True, "s3://b/x": False, "memory://x": False}


def test_a_text_that_cannot_be_written_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """As on a full disk."""
    for write in (paths.create_text, paths.write_text):
        with pytest.raises(UnicodeEncodeError):
            write(spark, f"{tmp_path}/text", "\ud800")
    assert list(tmp_path.iterdir()) == []
