"""Ingest from outside: what is in the tables and accounts after each kind of failure."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from landing_files import START, LandingZone, event, line, record_syncs
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.ingest import lines as lines_module
from dmsg_logs.ingest import plain as plain_module
from dmsg_logs.ingest import store
from dmsg_logs.ingest.accounts import DAMAGED, TRUNCATED, UNPACKS_TOO_FAR, IngestSummary
from dmsg_logs.ingest.batches import ingest
from dmsg_logs.ingest.claims import each_line
from dmsg_logs.runtime import lease, paths
from dmsg_logs.schemas import LINE

Key = tuple[str, str, int]
_HERE = Path(__file__).parent


def keys(spark: SparkSession, tables: Any) -> list[Key]:
    """The keys of all good lines, sorted, with their repetitions if there are any."""
    return sorted(tuple(row) for row in store.read_events(spark, str(tables)).select("node", "boot", "seq").collect())


def accounts(spark: SparkSession, tables: Any) -> dict[str, tuple[int, int, int, int, int]]:
    """File -> lines, good, dup, corrupt, missing."""
    rows = store.read_accounts(spark, str(tables)).collect()
    return {row.file: (row.lines, row.good, row.dup, row.corrupt, row.missing) for row in rows}


def counts(summary: IngestSummary) -> tuple[int, int, int, int, int, int]:
    assert summary.lines_in == summary.good + summary.dup + summary.corrupt
    return (summary.files, summary.lines_in, summary.good, summary.dup, summary.corrupt, summary.missing)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory below a directory, with size and time of its last change."""
    found = {str(path): path.stat() for path in root.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def lines(*sequence: int, **fields: Any) -> list[str]:
    return [line(seq=seq, **fields) for seq in sequence]


def test_files_of_every_kind(spark: SparkSession, tmp_path: Path) -> None:
    """One batch with bad lines, duplicates within and across files, late lines, files cut, damaged and unreadable."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    first = zone.file(lines=[*lines(*range(100)), line(seq=98)[:70], "", "[]", "null", *lines(5)])
    overlap = zone.file(lines=[*lines(*range(90, 120)), line(seq=3, ts=START - 40 * 86400)])
    late = zone.file(boot="c" * 16, lines=lines(0, 1, boot="c" * 16, ts=START - 3 * 86400), started=START + 7200)
    newer = zone.file(
        boot="d" * 16,
        lines=[event(seq=seq, boot="d" * 16, **more) for seq, more in ((0, {"v": 2, "colour": "red"}), (1, {}))],
    )
    cut = zone.file(boot="e" * 16, lines=lines(*range(10), boot="e" * 16), recorded=25)
    frames = zone.file(boot="f" * 16, lines=lines(*range(40), boot="f" * 16), frames=4, cut_bytes=30)
    nothing = zone.file(boot="9" * 16, lines=[])
    emptied = zone.raw(f"role=server/n-{'5' * 16}-000000-7-0123456789abcdef.jsonl.zst", b"")
    garbage = zone.raw(f"role=server/n-{'8' * 16}-000001-12.jsonl.zst", b"this is no zstd frame at all")
    plain = zone.raw("plain [old] é.jsonl", lines(0, 1, boot="7" * 16, node="m"))
    packed = zone.raw("packed.jsonl.gz", lines(0, 1, boot="6" * 16))
    whole_gz = (zone.root / packed).read_bytes()
    broken_gz = zone.raw("broken.jsonl.gz", whole_gz[:-12])
    stages: list[str] = []
    summary = ingest(spark, str(zone.root), str(tables), progress=lambda stage, done, total: stages.append(stage))

    found = accounts(spark, tables)
    of_broken, of_frames = found.pop(broken_gz), found.pop(frames)
    assert found == {
        first: (105, 100, 1, 4, 0),
        overlap: (31, 20, 11, 0, 0),
        late: (2, 2, 0, 0, 0),
        newer: (2, 2, 0, 0, 0),
        cut: (10, 10, 0, 0, 15),
        nothing: (0, 0, 0, 0, 0),
        emptied: (0, 0, 0, 0, 7),
        garbage: (0, 0, 0, 0, 12),
        plain: (2, 2, 0, 0, 0),
        packed: (2, 2 - of_broken[1], of_broken[1], 0, 0),
    }
    assert of_frames == (of_frames[0], of_frames[0], 0, 0, 40 - of_frames[0])
    assert of_frames[0] in (0, 10, 20, 30)
    problems = {
        row.file: row.problem for row in store.read_accounts(spark, str(tables)).where("problem is not null").collect()
    }
    assert problems.pop(frames) in (TRUNCATED, DAMAGED)
    assert problems == {cut: TRUNCATED, emptied: TRUNCATED, garbage: DAMAGED, broken_gz: DAMAGED}
    assert sorted(summary.missing_files) == sorted([cut, emptied, garbage, broken_gz, frames])
    assert counts(summary) == (
        12,
        sum(each[0] for each in [*found.values(), of_broken, of_frames]),
        *(sum(each[column] for each in [*found.values(), of_broken, of_frames]) for column in range(1, 5)),
    )
    every = keys(spark, tables)
    assert len(every) == len(set(every)) == summary.good
    bad = store.read_quarantine(spark, str(tables)).collect()
    assert Counter((row.file, row.line, row.reason, row.batch) for row in bad) == Counter(
        [
            (first, line(seq=98)[:70], "torn", 1),
            (first, "", "blank", 1),
            (first, "[]", "not_an_object", 1),
            (first, "null", "not_an_object", 1),
        ]
    )
    events = store.read_events(spark, str(tables))
    assert events.columns == [*LINE.names, "raw", "date", "file", "batch", "landed_at"]
    [red] = events.where("raw is not null").collect()
    assert '"colour":"red"' in red.raw
    assert (red.file, red.batch, red.v) == (newer, 1, 2)
    [row] = events.where("file like 'plain%' and seq = 0").collect()
    assert (row.file, str(row.date), row.node) == (plain, "2026-03-01", "m")
    assert row.landed_at == pytest.approx((zone.root / plain).stat().st_mtime, abs=0.01)
    dates = {str(row.date): row["count"] for row in events.groupBy("date").count().collect()}
    assert dates == {"2026-02-26": 2, "2026-03-01": summary.good - 2}
    assert stages[:1] + stages[-2:] == ["list", "commit", "done"]


def test_batch_after_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Duplicates across batches, a whole file after a cut one, a file that grows, and runs with nothing to do; at a path
    that would mean others if it were a pattern."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "t[a]b{l,e}\\s?*"
    zone.file(lines=lines(*range(50)), recorded=60, number=0)
    zone.file(lines=lines(0, 1, boot="c" * 16), boot="c" * 16)
    plain = zone.raw("plain.jsonl", lines(200, 201))
    assert counts(ingest(spark, str(zone.root), str(tables))) == (3, 54, 54, 0, 0, 10)
    before = tree(tmp_path)
    assert counts(ingest(spark, str(zone.root), str(tables))) == (0, 0, 0, 0, 0, 0)
    assert tree(tmp_path) == before

    zone.file(lines=lines(*range(60)), number=0)
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 60, 10, 50, 0, 0)
    zone.raw("plain.jsonl", lines(200, 201, 202))
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 3, 1, 2, 0, 0)
    boots = {"b" * 16: [*range(60), 200, 201, 202], "c" * 16: [0, 1]}
    assert keys(spark, tables) == [("n" * 16, boot, seq) for boot, numbers in boots.items() for seq in numbers]
    assert store.last_batch(spark, str(tables)) == 3
    rows = store.read_accounts(spark, str(tables)).where("file = 'plain.jsonl'").orderBy("batch").collect()
    assert [(row.batch, row.lines, row.good, row.dup) for row in rows] == [(1, 2, 2, 0), (3, 3, 1, 2)]
    assert rows[0].file == plain


def test_a_file_that_was_cut_or_damaged_on_its_way_is_taken_again_under_its_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its name tells a digest, which is not that of what came at first."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    cut = zone.root / zone.file(lines=lines(*range(40)), frames=4)
    spoiled = zone.root / zone.file(lines=lines(0, 1, boot="c" * 16), boot="c" * 16)
    whole = {path: path.read_bytes() for path in (cut, spoiled)}
    cut.write_bytes(whole[cut][: len(whole[cut]) // 2])
    spoiled.write_bytes(bytes(len(whole[spoiled])))
    os.utime(spoiled, (START, START))
    first = ingest(spark, str(zone.root), str(tables))
    assert sorted(first.missing_files) == sorted(str(path.relative_to(zone.root)) for path in whole)
    before = tree(tmp_path)
    assert counts(ingest(spark, str(zone.root), str(tables))) == (0, 0, 0, 0, 0, 0)
    assert tree(tmp_path) == before, "what is as it was is not read again"

    for path, data in whole.items():
        path.write_bytes(data)
    again = ingest(spark, str(zone.root), str(tables))
    assert (again.files, again.lines_in, again.missing, again.missing_files) == (2, 42, 0, [])
    boots = {"b" * 16: range(40), "c" * 16: range(2)}
    assert keys(spark, tables) == [("n" * 16, boot, seq) for boot, numbers in boots.items() for seq in numbers]
    found = store.read_accounts(spark, str(tables)).collect()
    assert [(row.missing, row.problem) for row in found] == [(0, None)] * 4, "nor is it told of for ever"
    assert counts(ingest(spark, str(zone.root), str(tables))) == (0, 0, 0, 0, 0, 0)


def test_files_that_tasks_leave_alone_take_no_job_each(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one of 20 bytes a job would take as long as for thousands of lines."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    broken = {zone.raw(f"role=server/n-{number:016x}-000001-12.jsonl.zst", b"this is no frame") for number in range(20)}
    zone.raw("marked.jsonl", "\ufeff" + line(seq=0) + "\n")
    zone.raw("large.jsonl", [line(seq=seq) for seq in range(1, 101)])
    monkeypatch.setattr(plain_module, "MAX_FILE_BYTES", 1_000)
    strictly: list[str] = []
    read = lines_module.read_lines

    def noted(session: SparkSession, patterns: list[str], *, tolerant: bool) -> Any:
        strictly.extend(() if tolerant else patterns)
        return read(session, patterns, tolerant=tolerant)

    monkeypatch.setattr(lines_module, "read_lines", noted)
    assert counts(ingest(spark, str(zone.root), str(tables))) == (22, 101, 101, 0, 0, 240)
    assert [Path(each).name for each in strictly] == ["large.jsonl"]
    told = store.read_accounts(spark, str(tables)).where("problem is not null").collect()
    assert {(row.file, row.problem) for row in told} == {(name, DAMAGED) for name in broken}


def test_files_that_are_gone_from_the_landing_zone_take_no_memory(spark: SparkSession, tmp_path: Path) -> None:
    """A fleet of 500 relays lands 6,000 files an hour, and each stays in a commit for ever."""
    zone, tables = LandingZone(tmp_path / "landing"), str(tmp_path / "tables")
    name = zone.file(lines=lines(0), number=0)
    ingest(spark, str(zone.root), tables)
    [first] = store.commits(spark, tables)
    [taken] = first.files
    for batch in range(2, 50):
        files = [{**taken, "file": (gone := f"{batch}-{number}-{name}"), "identity": gone} for number in range(500)]
        text = store.Commit(batch, f"{batch:08d}-x", {"good": 0}, [], files).to_json()
        Path(store.commit_path(tables, batch)).write_text(text)
    tracemalloc.start()
    try:
        assert ingest(spark, str(zone.root), tables).files == 0
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10_000_000, "less than a third of what all these accounts take"


def test_lines_that_seem_to_have_the_keys_of_others(spark: SparkSession, tmp_path: Path) -> None:
    """What is not as our writer writes it is parsed before it claims a key, so one look at the batch is enough."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    torn = line(seq=5)[:-20] + "}"
    twice = line(seq=6).replace('"count":1', '"count":1,"seq":9')  # the last one counts: 9
    two = line(seq=7) + line(seq=8)
    stages: list[str] = []
    zone.file(lines=[torn, twice, *lines(0)], number=0)
    zone.file(lines=lines(5, 6, 9), number=1)
    zone.file(lines=[two, f"[{line(seq=10)},{line(seq=11)}]", *lines(7, 8)], number=2)
    summary = ingest(spark, str(zone.root), str(tables), progress=lambda stage, done, total: stages.append(stage))
    assert counts(summary) == (3, 10, 6, 1, 3, 0)
    assert [key[2] for key in keys(spark, tables)] == [0, 5, 6, 7, 8, 9]
    assert stages.count("scan") == 1


def test_a_bad_line_beside_a_good_one_with_its_key(spark: SparkSession, tmp_path: Path) -> None:
    """A line of a wrong type claims no key."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    zone.file(lines=[line(seq=5).replace('"count":1', '"count":"many"'), *lines(4, 5)], number=0)
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 3, 2, 0, 1, 0)
    assert [key[2] for key in keys(spark, tables)] == [4, 5]


def test_a_line_as_deep_as_a_parser_may_go_is_corrupt_and_holds_up_no_other(
    spark: SparkSession, tmp_path: Path
) -> None:
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    deep = [line(seq=9, new="QQ").replace('"QQ"', "[" * 100_000), '{"a":' * 100_000]
    mixed = zone.raw("mixed.jsonl", [*lines(0, 1), *deep, *lines(2)])
    ingest(spark, str(zone.root), str(tables))
    assert accounts(spark, tables) == {mixed: (5, 3, 0, 2, 0)}


def test_one_line_any_number_of_times_takes_no_more_memory(spark: SparkSession) -> None:
    """Of 8 GiB of blank lines, which a file of 34 MB may hold, the first are there before the last are made."""
    blank = spark.createDataFrame([("", 2**33)], "value string, n long")
    assert each_line(blank).limit(3).collect() == [("",)] * 3
    few = spark.createDataFrame([("a", 250_001), ("b", 100_000), ("c", 1)], "value string, n long")
    found = each_line(few).groupBy("value").count().collect()
    assert dict(map(tuple, found)) == {"a": 250_001, "b": 100_000, "c": 1}


def test_files_are_those_of_the_run_their_lines_name(spark: SparkSession, tmp_path: Path) -> None:
    """A given name is in the name of a file without what means something to a shell, and cut off if it is long."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    node = "Frankfurt am Main: " + "x" * 200
    named = node.replace(" ", "_").replace(":", "_")[:128]
    zone.file(node=named, lines=[*lines(0, 1, node=node), "torn"])
    ingest(spark, str(zone.root), str(tables))
    zone.file(node=named, lines=lines(1, node=node))
    zone.file(node=named, lines=["torn"])
    ingest(spark, str(zone.root), str(tables))
    rows = store.read_accounts(spark, str(tables)).orderBy("number").collect()
    assert [(row.node, row.boot, row.good, row.dup) for row in rows] == [
        (node, "b" * 16, 2, 0),
        (node, "b" * 16, 0, 1),
        (named, "b" * 16, 0, 0),
    ]


def test_files_put_together_by_hand(spark: SparkSession, tmp_path: Path) -> None:
    """Whose runs they have is not listed, for there may be as many as lines; duplicates are found all the same."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    every = [f"{number:016x}" for number in range(300)]
    zone.raw("together.jsonl", [line(seq=0, boot=boot) for boot in every])
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 300, 300, 0, 0, 0)
    zone.file(boot=every[7], lines=lines(0, 1, boot=every[7]))
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 2, 1, 1, 0, 0)
    zone.raw("again.jsonl", [line(seq=1, boot=boot) for boot in every[:10]])
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 10, 9, 1, 0, 0)
    assert [each.boots for each in store.commits(spark, str(tables))] == [None, [every[7]], None]
    assert len(keys(spark, tables)) == len(set(keys(spark, tables))) == 310


def test_what_a_packed_file_becomes_is_bounded_and_what_is_left_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that unpacks to 100 MiB, one to 3 MB as gzip behind a byte order mark, and one too large to be one of ours."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    fine = zone.file(lines=lines(*range(10)), number=0)
    bomb = zone.file(lines=["{}" + " " * 1000] * 100_000, boot="c" * 16, number=0)
    assert (zone.root / bomb).stat().st_size < 32_000
    marked = zone.raw("marked.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + b"{}\n" * 10**6))
    monkeypatch.setattr(plain_module, "MAX_FILE_BYTES", 100_000)
    noise = random.Random(1).randbytes(100_000).hex()
    large = zone.file(lines=[*lines(0, 1, boot="d" * 16), noise], boot="d" * 16, number=0)
    unpacked = zone.raw("large.jsonl", [*lines(0, 1, boot="e" * 16), noise])
    summary = ingest(spark, str(zone.root), str(tables))

    found = accounts(spark, tables)
    assert found[fine] == (10, 10, 0, 0, 0)
    assert found[large] == (1, 0, 0, 1, 2)
    assert found[unpacked] == (3, 2, 0, 1, 0)
    for name, line_bytes in ((bomb, 1003), (marked, 3)):
        size = (zone.root / name).stat().st_size
        count, good, dup, corrupt, missing = found[name]
        assert (good, dup, corrupt) == (0, 0, count) and count <= size * plain_module.MAX_RATIO // line_bytes + 2
        assert missing == (100_000 - count if name == bomb else 0)
    assert sorted(summary.missing_files) == sorted([bomb, marked, large])
    problems = {row.file: row.problem for row in store.read_accounts(spark, str(tables)).collect() if row.problem}
    assert problems == dict.fromkeys((bomb, marked, large), UNPACKS_TOO_FAR)
    left = store.read_quarantine(spark, str(tables)).where("reason = 'unpacks_too_far'").collect()
    assert sorted((row.file, row.line) for row in left) == sorted(
        (name, lines_module.REST_LEFT) for name in (bomb, marked, large)
    )
    assert counts(ingest(spark, str(zone.root), str(tables))) == (0, 0, 0, 0, 0, 0)


def test_a_line_as_long_as_memory_beside_keys_that_come_twice(spark: SparkSession, tmp_path: Path) -> None:
    """Below a path that is not ASCII: each line counts once, and no more than the limit of one is held."""
    zone, tables = LandingZone(tmp_path / "Länder ✓"), tmp_path / "tables"
    endless = random.Random(1).randbytes(lines_module.MAX_READ_BYTES // 2 + 1).hex()  # which packs to a half
    mixed = zone.file(lines=[*lines(*range(10)), endless, line(seq=3, new=1), line(seq=4) + endless])
    plain = zone.raw("plain.jsonl", [*lines(0, boot="c" * 16), endless, line(seq=1, boot="c" * 16, new=1)])
    summary = ingest(spark, str(zone.root), str(tables))
    assert accounts(spark, tables) == {mixed: (13, 10, 1, 2, 0), plain: (3, 2, 0, 1, 0)}
    assert counts(summary) == (2, 16, 12, 1, 3, 0)
    faults = store.read_quarantine(spark, str(tables)).select("reason", F.length("line")).collect()
    assert {tuple(row) for row in faults} == {("too_long", lines_module.KEPT_CHARS)}


def test_any_mix_over_any_batches(spark: SparkSession, tmp_path: Path) -> None:
    """in = good + dup + corrupt, and good are the distinct keys of whole lines, however they are spread."""
    rng = random.Random(1)
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    expected: set[Key] = set()
    total = Counter[str]()
    for _ in range(3):
        batch = Counter[str]()
        for _ in range(rng.randrange(1, 6)):
            node, boot, start = rng.choice("mn") * 16, rng.choice("ab") * 16, rng.randrange(0, 270)
            texts = []
            for seq in range(start, start + rng.randrange(90)):
                text = line(seq=seq, node=node, boot=boot, ts=START + rng.choice((0, 0, 0, -86400)))
                kind = rng.random()
                if kind < 0.05:
                    text = rng.choice((text[: rng.randrange(len(text))], "[]", "", text + text, f"[{text}]", "null"))
                    batch["corrupt"] += 1
                else:
                    if kind < 0.15:
                        text = text.replace(",", ", ").replace('":', '": ')
                    batch["whole"] += 1
                    expected.add((node, boot, seq))
                texts.append(text)
                if kind > 0.97:
                    texts.append(text)
                    batch["whole"] += 1
            batch["files"] += 1
            zone.file(lines=texts, node=node, boot=boot)
        before = len(keys(spark, tables))
        summary = ingest(spark, str(zone.root), str(tables))
        good = len(expected) - before
        lines_in = batch["whole"] + batch["corrupt"]
        assert counts(summary) == (batch["files"], lines_in, good, batch["whole"] - good, batch["corrupt"], 0)
        assert keys(spark, tables) == sorted(expected)
        total += batch
    assert store.read_quarantine(spark, str(tables)).count() == total["corrupt"]
    assert sum(each[0] for each in accounts(spark, tables).values()) == total["whole"] + total["corrupt"]


class Stopped(BaseException):
    """Ends a run as if it had been killed: nothing of it is cleaned up."""


def test_stopped_at_any_stage(spark: SparkSession, tmp_path: Path) -> None:
    """Runs that end at any stage have changed nothing; the next one does it all and sweeps."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    zone.file(lines=lines(0, 1, 1))
    for number, stage in enumerate(("scan", "write", "check", "commit"), 1):

        def stop(at: str, done: int, total: int, last: str = stage) -> None:
            if at == last:
                raise Stopped

        with pytest.raises(Stopped):
            ingest(spark, str(zone.root), str(tables), progress=stop)
        assert store.last_batch(spark, str(tables)) == 0
        assert len(list((tables / "events" / "attempts").iterdir())) == number
    assert keys(spark, tables) == []
    assert counts(ingest(spark, str(zone.root), str(tables))) == (1, 3, 2, 1, 0, 0)
    assert [key[2] for key in keys(spark, tables)] == [0, 1]
    assert list((tables / "events" / "attempts").iterdir()) == []
    [commit] = store.commits(spark, str(tables))
    for each in ("data", "keys"):
        assert [path.name for path in (tables / "events" / each).iterdir()] == [f"run={commit.run}"]


def test_what_a_commit_names_is_on_the_disk_before_it_and_then_the_commit_is(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are not read again once a commit names them, so a power cut must not leave the commit without the lines."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    zone.file(lines=[*lines(0, 1, 1), "torn"])
    before, after = record_syncs(monkeypatch, Path(store.commit_path(str(tables), 1)))
    ingest(spark, str(zone.root), str(tables))
    named = [path for each in ("data", "keys") for path in (tables / "events" / each).rglob("*")]
    assert len([path for path in named if path.suffix == ".parquet"]) == 4  # good, dup, corrupt; keys
    assert before >= {
        *named,
        tables / "events" / "data",
        tables / "events" / "keys",
        tables / "events",
        tables,
        tmp_path,
    }
    assert tables / "events" / "commits" in after


def test_two_at_once(spark: SparkSession, tmp_path: Path) -> None:
    """The note keeps a second run out; if it fails to, only one of two commits, and the other goes on with the rest."""
    zone, tables = LandingZone(tmp_path / "landing"), str(tmp_path / "tables")
    zone.file(lines=lines(*range(5)), number=0)
    inner: list[IngestSummary] = []

    def meanwhile(stage: str, done: int, total: int) -> None:
        if stage == "commit" and not inner:
            with pytest.raises(lease.BusyError):
                ingest(spark, str(zone.root), tables)
            paths.delete(spark, store.lease_path(tables))
            zone.file(lines=lines(*range(3, 9)), number=1)
            inner.append(ingest(spark, str(zone.root), tables))

    assert counts(ingest(spark, str(zone.root), tables, progress=meanwhile)) == (0, 0, 0, 0, 0, 0)
    assert counts(inner[0]) == (2, 11, 9, 2, 0, 0)
    assert [key[2] for key in keys(spark, tables)] == list(range(9))
    assert paths.names(spark, store.data_path(tables)) == [f"run={store.commits(spark, tables)[0].run}"]
    assert not paths.exists(spark, store.lease_path(tables))


@pytest.mark.process
def test_killed(spark: SparkSession, tmp_path: Path) -> None:
    """SIGKILL of Python before the commit, then of the JVM in the middle of writing; notes of the dead are void."""
    zone, tables = LandingZone(tmp_path / "landing"), tmp_path / "tables"
    for number in range(4):
        zone.file(lines=lines(*range(number * 90, number * 90 + 100)), number=number)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_HERE), str(_HERE.parent)])}
    script = [sys.executable, str(_HERE / "killed_ingest.py"), str(zone.root), str(tables)]
    for number, (victim, code) in enumerate((("python", -9), ("jvm", 1)), 1):
        run = subprocess.run([*script, victim], env=environment, capture_output=True, timeout=180, check=False)
        assert run.returncode == code, run.stderr[-3000:]
        assert (tables / "events" / "running.json").exists()
        assert len(list((tables / "events" / "data").iterdir())) == number
        assert keys(spark, tables) == []
    assert counts(ingest(spark, str(zone.root), str(tables))) == (4, 400, 370, 30, 0, 0)
    assert [key[2] for key in keys(spark, tables)] == list(range(370))
    assert len(list((tables / "events" / "data").iterdir())) == 1
    assert not (tables / "events" / "running.json").exists()
