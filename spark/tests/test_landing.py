"""What names say, how files are put into batches, and landing zones that Hadoop cannot read."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from landing_files import START, LandingZone, line
from pyspark.sql import SparkSession

from dmsg_logs.ingest import landing as landings
from dmsg_logs.ingest.accounts import DAMAGED, TRUNCATED, AccountsError, IngestSummary, Written, make_accounts
from dmsg_logs.ingest.batches import ingest
from dmsg_logs.ingest.landing import FileName, LandingFile, MirroredLanding, batches, open_landing, parse_name, shares
from dmsg_logs.ingest.store import read_events

_DIGEST = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            f"role=server/date=2026-03-01/hour=00/a-b-0123abcd-000007-12-{_DIGEST}.jsonl.zst",
            FileName("server", "a-b", "0123abcd", 7, 12, _DIGEST),
        ),
        ("x/n-0123abcd-000007-12.jsonl.zst", FileName(None, "n", "0123abcd", 7, 12, None)),
        ("n-0123abcd-000007.jsonl", FileName(None, "n", "0123abcd", 7, None, None)),
        ("n-0123abcd-000007-5.jsonl.gz", FileName(None, "n", "0123abcd", 7, 5, None)),
        ("role=client/events.jsonl", FileName("client", None, None, None, None, None)),
    ],
)
def test_what_a_name_says(name: str, expected: FileName) -> None:
    assert parse_name(name) == expected


def test_batches_are_bounded_and_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(day: int, hour: int, node: str) -> str:
        return f"role=server/date=2026-03-{day:02d}/hour={hour:02d}/{node}.jsonl"

    files = [LandingFile(name(day, hour, node), 10, 0.0) for day in (2, 1) for hour in (1, 0) for node in "ba"]
    monkeypatch.setattr(landings, "MAX_BATCH_BYTES", 35)
    found = [[each.name for each in batch] for batch in batches(files)]
    assert [len(each) for each in found] == [3, 3, 2]
    assert [name for batch in found for name in batch] == sorted(each.name for each in files)
    assert [len(each) for each in batches([LandingFile("huge.jsonl", 10**6, 0.0), *files])] == [1, 3, 3, 2]
    assert batches([]) == []


def test_shares_are_files_in_order_and_about_equal() -> None:
    files = [LandingFile(f"{number}", size, START) for number, size in enumerate((5, 1, 0, 4, 9, 0, 0, 1))]
    assert [[each.size for each in share] for share in shares(files, 2)] == [[5, 1, 0, 4], [9, 0, 0, 1]]
    assert [each for share in shares(files, 5) for each in share] == files and len(shares(files, 5)) <= 5
    assert shares(files, 1) == [files]
    empty = [LandingFile(f"{number}", 0, START) for number in range(3)]
    assert shares(empty, 4) == [empty]


def test_names_that_are_not_utf8_are_not_read(spark: SparkSession, tmp_path: Path) -> None:
    zone = LandingZone(tmp_path)
    name = zone.raw("däy/plain.jsonl", [line()])
    (tmp_path / "d\udcff.jsonl").write_text(line())
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert [each.name for each in open_landing(spark, str(tmp_path)).files()] == [name]


def _names(spark: SparkSession, root: Path) -> list[str]:
    return sorted(each.name for each in open_landing(spark, str(root)).files())


def test_only_plain_files_are_listed(spark: SparkSession, tmp_path: Path) -> None:
    zone = LandingZone(tmp_path)
    name = zone.raw("plain.jsonl", [line()])
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "directory.jsonl").mkdir()
    assert _names(spark, tmp_path) == [name]


def test_links_are_followed_but_never_to_the_same_directory_twice(spark: SparkSession, tmp_path: Path) -> None:
    zone, other = LandingZone(tmp_path / "zone"), LandingZone(tmp_path / "other")
    zone.raw("here.jsonl", [line()])
    zone.raw("a/b/here.jsonl", [line()])
    zone.raw(".hidden/there.jsonl", [line()])
    other.raw("c/there.jsonl", [line()])
    for link, target in (
        *(("loop", "."), ("a/b/up", "../.."), ("again", "a"), ("seen", ".hidden"), ("broken", "nowhere")),
        *(("x", other.root), ("d", other.root / "c"), ("y", other.root), ("x.jsonl", "here.jsonl")),
    ):
        (zone.root / link).symlink_to(target)
    (other.root / "back").symlink_to(zone.root)
    (tmp_path / "named").symlink_to(zone.root)
    expected = ["a/b/here.jsonl", "d/there.jsonl", "here.jsonl", "seen/there.jsonl", "x.jsonl"]
    assert _names(spark, zone.root) == _names(spark, tmp_path / "named") == expected


def test_links_that_lead_nowhere_hold_up_no_run(spark: SparkSession, tmp_path: Path) -> None:
    """Who may put a file into the landing zone may put a link there, to itself or to what only others may read."""
    zone = LandingZone(tmp_path / "zone")
    name = zone.raw("here.jsonl", [line()])
    secret = tmp_path / "secret"
    (secret / "below").mkdir(parents=True)
    (secret / "below" / "there.jsonl").write_text(line())
    links = [("round.jsonl", "round.jsonl"), ("inside.jsonl", "here.jsonl/x"), ("round", "round")]
    if os.geteuid() != 0:  # root may read everything
        links += [("closed.jsonl", str(secret / "below" / "there.jsonl")), ("closed", str(secret))]
    for link, target in links:
        (zone.root / link).symlink_to(target)
    (secret / "below" / "there.jsonl").chmod(0)
    (secret / "below").chmod(0)
    try:
        assert _names(spark, zone.root) == [name]
    finally:
        (secret / "below").chmod(0o700)


def test_what_is_listed(spark: SparkSession, tmp_path: Path) -> None:
    zone = LandingZone(tmp_path)
    names = ("a.jsonl", "b/c.jsonl.gz", "d [x]{y} é%20?.jsonl", "role=s/e.jsonl.zst", "12:00/f.jsonl")
    for name in names:
        zone.raw(name, [line()])
    for name in ("_a.jsonl", ".b.jsonl", ".staging/c.jsonl", "_x/y.jsonl", "d.jsonl.part", "e.json", "f.jsonl.zst.tmp"):
        zone.raw(name, [line()])
    for name in ("a:b.jsonl", "role=s/12:00.jsonl.zst", "g.jsonl\n"):
        zone.raw(name, [line()])
    found = {each.name: each.size for each in open_landing(spark, str(tmp_path)).files()}
    assert found == {name: (tmp_path / name).stat().st_size for name in names}
    with pytest.raises(FileNotFoundError):
        open_landing(spark, f"{tmp_path}/nothing")


def test_a_zone_only_fsspec_can_read(spark: SparkSession, tmp_path: Path) -> None:
    zone = LandingZone(tmp_path / "staging")
    names = [zone.file(lines=[line(seq=seq)], number=seq) for seq in range(2)]
    root = f"/landing-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    for name in names:
        memory.pipe(f"{root}/{name}", (zone.root / name).read_bytes())
    memory.pipe(f"{root}/_staging/{names[0]}", b"not to be read")
    tables = str(tmp_path / "tables")
    assert isinstance(open_landing(spark, f"memory:/{root}"), MirroredLanding)
    summary = ingest(spark, f"memory:/{root}", tables)
    assert (summary.files, summary.good) == (2, 2)
    rows = read_events(spark, tables).select("file", "landed_at").collect()
    assert sorted(row.file for row in rows) == sorted(names)
    assert all(row.landed_at > START for row in rows)
    assert ingest(spark, f"memory:/{root}", tables).files == 0


def test_objects_whose_names_no_directory_holds_are_not_listed(spark: SparkSession) -> None:
    """One below another, two that would become one file, and one with a name that is too long."""
    root = f"/landing-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    names = ("a.jsonl/b.jsonl", "a.jsonl", "x/a.jsonl", "x//a.jsonl", f"{'é' * 125}.jsonl", f"{'é' * 124}.jsonl")
    for name in names:
        memory.pipe(f"{root}/{name}", b"")
    listed = open_landing(spark, f"memory:/{root}").files()
    assert sorted(each.name for each in listed) == sorted((names[1], names[2], names[5]))


def test_a_zone_that_is_not_there(spark: SparkSession, tmp_path: Path) -> None:
    """Through fsspec, for which there is no directory where it finds no file."""
    (tmp_path / "empty").mkdir()
    assert open_landing(spark, f"local://{tmp_path}/empty").files() == []
    for landing in (f"local://{tmp_path}/nothing", f"memory://landing-{uuid.uuid4().hex}"):
        with pytest.raises(FileNotFoundError, match=landing):
            open_landing(spark, landing).files()


def test_a_bucket_without_objects_is_an_empty_zone(spark: SparkSession) -> None:
    fsspec.register_implementation("b2", MemoryFileSystem, clobber=True)
    assert open_landing(spark, f"b2://landing-{uuid.uuid4().hex}/x").files() == []


def test_accounts_balance_or_are_refused() -> None:
    name = f"n-0123abcd-000001-5-{_DIGEST}.jsonl.zst"
    files = [LandingFile(name, 10, 1.0), LandingFile("plain.jsonl", 3, 2.0), LandingFile("bad.jsonl.gz", 3, 3.0)]
    written = {name: Written(good=2, corrupt=1), "plain.jsonl": Written(good=1, dup=1, node="m", boot="b")}
    lines = {name: 3, "plain.jsonl": 2}
    accounts = make_accounts(files, lines, written, ["bad.jsonl.gz"], 4)
    fields = ("node", "boot", "number", "recorded", "lines", "missing", "problem")
    assert [tuple(each[field] for field in fields) for each in accounts] == [
        ("n", "0123abcd", 1, 5, 3, 2, TRUNCATED),
        ("m", "b", None, None, 2, 0, None),
        (None, None, None, None, 0, 0, DAMAGED),
    ]
    summary = IngestSummary()
    summary.add(accounts)
    assert summary.as_dict() == {
        "files": 3,
        "in": 5,
        "good": 3,
        "dup": 1,
        "corrupt": 1,
        "missing": 2,
        "batches": 1,
        "missing_files": [name, "bad.jsonl.gz"],
        "seconds": 0.0,
    }
    with pytest.raises(AccountsError, match="4 lines were read, but 3 written"):
        make_accounts(files, {**lines, name: 4}, written, [], 4)
    with pytest.raises(AccountsError, match="not in the batch"):
        make_accounts(files, {**lines, "stranger": 1}, {**written, "stranger": Written(good=1)}, [], 4)
