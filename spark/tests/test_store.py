"""The commits of the events: how many are read, and what is said of one that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dmsg_logs.ingest import store


def write_commits(tables: str, count: int) -> list[store.Commit]:
    """Commits of the batches 1 to ``count``, as a run writes them."""
    made = [store.Commit(batch, f"{batch:08d}-x", {"good": batch}, ["b"], []) for batch in range(1, count + 1)]
    for each in made:
        path = Path(store.commit_path(tables, each.batch))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(each.to_json())
    return made


def test_many_commits_are_read_at_any_path(spark: SparkSession, tmp_path: Path) -> None:
    tables = str(tmp_path / "t[a]{b,c}")
    made = write_commits(tables, 42)
    assert store.commits(spark, tables) == made
    assert store.commits(spark, tables, made[:40]) == made


@pytest.mark.parametrize("count", [3, 43])
def test_a_damaged_commit_is_named(spark: SparkSession, tmp_path: Path, count: int) -> None:
    """Whether few commits are read or many. Left out without a word, its batch would be missing from all tables."""
    tables = str(tmp_path)
    made = write_commits(tables, count)
    path = Path(store.commit_path(tables, 2))
    whole = path.read_bytes()
    damaged = (b"", b"x", whole[:40], b"[]", whole.replace(b'"batch":2', b'"batch":9'))
    for content in (*damaged, whole.replace(b'{"good":2}', b"[]"), b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: "):
            store.commits(spark, tables)
    path.write_bytes(whole)
    assert store.commits(spark, tables) == made
