"""Files of the event log: packed, complete when published, named after what they hold, also on a failing disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.eventlog import files as logfiles
from dmsg.eventlog import tree as logtree
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.files import Batch, DescriptorSink, DirectorySink
from dmsg.eventlog.names import LogFileName
from dmsg.eventlog.tree import BLOCK_BYTES, Discarded, publish_leftovers

HOUR = 472_222  # 2023-11-14, 22 h UTC
PLACE = "role=server/date=2023-11-14/hour=22"
BOOT = "00112233aabbccdd"


def sink_in(directory: Path, **options: Any) -> DirectorySink:
    return DirectorySink(str(directory), role="server", node="n1", boot=BOOT, **options)


def batch(*lines: str, hour: int = HOUR) -> Batch:
    data = "".join(line + "\n" for line in lines).encode()
    return Batch(data, len(lines), hour)


def files(directory: Path) -> dict[str, list[str]]:
    """Path below the directory -> lines, of published files; a part has its name only."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): (
            [line.decode() for line in read_lines(path)] if path.suffix == ".zst" else ["…"]
        )
        for path in found
    }


# --- rotation --------------------------------------------------------------------------------------------------------


def test_a_file_is_published_when_it_is_full_and_says_how_many_lines_it_has(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_bytes=30, rotate_s=100)
    sink.open()
    assert files(tmp_path) == {}
    sink.write(batch("1", "2"), 0.0)
    assert files(tmp_path) == {f"{PLACE}/n1-{BOOT}-000000.jsonl.zst.part": ["…"]}
    sink.write(batch("3"), 1.0)
    assert files(tmp_path) == {f"{PLACE}/n1-{BOOT}-000000-3.jsonl.zst": ["1", "2", "3"]}
    sink.write(batch("4"), 2.0)
    sink.close()
    assert files(tmp_path) == {
        f"{PLACE}/n1-{BOOT}-000000-3.jsonl.zst": ["1", "2", "3"],
        f"{PLACE}/n1-{BOOT}-000001-1.jsonl.zst": ["4"],
    }


def test_the_size_that_counts_is_the_packed_one(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_bytes=2_000)
    for _ in range(5):
        sink.write(batch(*["the same"] * 1_000), 0.0)
    assert list(files(tmp_path).values()) == [["…"]]
    sink.close()


def test_a_file_is_published_when_it_is_old(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_s=60)
    sink.open()
    assert sink.next_due() is None
    sink.write(batch("1"), 10.0)
    assert sink.next_due() == 70.0
    sink.tick(69.9)
    assert list(files(tmp_path)) == [f"{PLACE}/n1-{BOOT}-000000.jsonl.zst.part"]
    sink.tick(70.0)
    assert list(files(tmp_path)) == [f"{PLACE}/n1-{BOOT}-000000-1.jsonl.zst"]
    assert sink.next_due() is None
    sink.close()


def test_an_hour_has_files_of_its_own_but_a_clock_set_back_makes_none(tmp_path: Path) -> None:
    sink = sink_in(tmp_path)
    for line, hour in (("1", HOUR), ("2", HOUR + 1), ("3", HOUR + 2), ("4", HOUR), ("5", HOUR + 2)):
        sink.write(batch(line, hour=hour), 0.0)
    sink.close()
    assert files(tmp_path) == {
        f"{PLACE}/n1-{BOOT}-000000-1.jsonl.zst": ["1"],
        f"role=server/date=2023-11-14/hour=23/n1-{BOOT}-000001-1.jsonl.zst": ["2"],
        f"role=server/date=2023-11-15/hour=00/n1-{BOOT}-000002-3.jsonl.zst": ["3", "4", "5"],
    }


def test_names_hold_nothing_that_means_something_to_a_shell_or_a_path(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), role="../r", node="../a b$(c)", boot=BOOT, rotate_bytes=1)
    sink.write(batch("1"), 0.0)
    assert list(files(tmp_path)) == [
        f"role=x.._r/date=2023-11-14/hour=22/x.._a_b__c_-{BOOT}-000000-1.jsonl.zst",
    ]


def test_a_boot_that_no_name_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boot id"):
        DirectorySink(str(tmp_path), role="server", node="n", boot="b1")


def test_names_that_are_taken_are_stepped_over(tmp_path: Path) -> None:
    folder = tmp_path / PLACE
    folder.mkdir(parents=True)
    taken = [folder / f"n1-{BOOT}-000000.jsonl.zst.part", folder / f"n1-{BOOT}-000001-1.jsonl.zst"]
    for path in taken:
        path.write_bytes(b"other")
    sink = sink_in(tmp_path)
    sink.write(batch("1"), 0.0)
    sink.close()
    sink.write(batch("2"), 0.0)
    sink.close()
    assert all(path.read_bytes() == b"other" for path in taken)
    mine = sorted(set(folder.iterdir()) - set(taken))
    assert [(path.name, list(read_lines(path))) for path in mine] == [
        (f"n1-{BOOT}-000002-1.jsonl.zst", [b"1"]),
        (f"n1-{BOOT}-000003-1.jsonl.zst", [b"2"]),
    ]


def test_folders_that_were_removed_are_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    sink = sink_in(directory, rotate_bytes=1)
    sink.open()
    directory.rmdir()
    sink.write(batch("1"), 0.0)
    [first] = files(directory)
    (directory / first).unlink()
    (directory / first).parent.rmdir()  # as a shipper may do
    sink.write(batch("2"), 0.0)
    assert files(directory) == {f"{PLACE}/n1-{BOOT}-000001-1.jsonl.zst": ["2"]}


def test_a_file_that_was_moved_away_while_it_was_written_is_told_once_and_the_log_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    sink = sink_in(directory, rotate_s=10)
    sink.write(batch("1", "2"), 0.0)
    directory.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="removed or moved away, with 2 lines") as caught:
        sink.write(batch("3"), 10.0)
    assert caught.value.filename == str(directory / PLACE / f"n1-{BOOT}-000000.jsonl.zst.part")
    sink.tick(11.0)
    sink.close()
    assert files(directory) == {f"{PLACE}/n1-{BOOT}-000001-1.jsonl.zst": ["3"]}
    publish_leftovers(str(tmp_path / "moved"))
    assert files(tmp_path / "moved") == {f"{PLACE}/n1-{BOOT}-000000-2.jsonl.zst": ["1", "2"]}


class Os:
    """Stands for ``os``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class FolderEater(Os):
    """Removes the empty folder the first time a file is to be made in it."""

    def __init__(self) -> None:
        self.eaten = ""

    def open(self, path: str, *arguments: Any) -> int:
        if not self.eaten:
            self.eaten = os.path.dirname(path)
            os.rmdir(self.eaten)
        return os.open(path, *arguments)


def test_a_folder_may_be_removed_at_the_very_moment_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eater = FolderEater()
    monkeypatch.setattr(logfiles, "os", eater)
    sink = sink_in(tmp_path, rotate_bytes=1)
    sink.write(batch("1"), 0.0)
    assert eater.eaten == str(tmp_path / PLACE)
    assert list(files(tmp_path).values()) == [["1"]]


# --- a disk that is full ---------------------------------------------------------------------------------------------


class ShortOs(Os):
    """Writes at most ``room`` bytes in all, then says the disk is full."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(descriptor, bytes(data)[: min(7, self.room)])
        self.room -= written
        return written


@given(
    st.lists(st.lists(st.text("ab", max_size=6), min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(st.integers(0, 60), max_size=6),
    st.data(),
)
def test_a_full_disk_costs_no_line_doubles_none_and_tears_no_frame(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[str]], rooms: list[int], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("full")
    sink = sink_in(directory, rotate_bytes=60)
    disk = ShortOs(0)
    hour = HOUR
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfiles, "os", disk)
        left: Iterator[int] = iter(rooms)
        for lines in pieces:
            hour += data.draw(st.sampled_from([0, 0, 0, 1, -1]))
            disk.room = next(left, 10_000)
            try:
                sink.write(batch(*lines, hour=hour), 0.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        for disk.room in (*left, 10_000):
            try:
                sink.tick(0.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        sink.close()
    found = {LogFileName.parse(Path(path).name): lines for path, lines in files(directory).items()}
    named = {name.number: lines for name, lines in found.items() if name is not None and name.lines == len(lines)}
    assert len(named) == len(found)
    assert [line for _, lines in sorted(named.items()) for line in lines] == [line for one in pieces for line in one]


def test_a_file_that_grows_old_while_the_disk_is_full_is_published_whole(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_s=60)
    sink.write(batch("whole"), 0.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(logfiles, "os", ShortOs(8))
        sink.write(batch("in two pieces"), 59.0)
    sink.tick(61.0)
    assert files(tmp_path) == {f"{PLACE}/n1-{BOOT}-000000-2.jsonl.zst": ["whole", "in two pieces"]}
    sink.close()


def test_what_the_disk_did_not_take_until_the_end_is_cut_off(tmp_path: Path) -> None:
    sink = sink_in(tmp_path)
    sink.write(batch("whole"), 0.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(logfiles, "os", ShortOs(8))
        sink.write(batch("torn"), 0.0)
    sink.close()
    assert files(tmp_path) == {f"{PLACE}/n1-{BOOT}-000000-1.jsonl.zst": ["whole"]}


def test_a_file_that_never_got_a_whole_frame_is_none(tmp_path: Path) -> None:
    sink = sink_in(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(logfiles, "os", ShortOs(8))
        sink.write(batch("torn"), 0.0)
    sink.close()
    assert files(tmp_path) == {}


def test_publishing_that_fails_is_done_again(tmp_path: Path) -> None:
    class Unsynced(Os):
        def fsync(self, descriptor: int) -> None:
            raise OSError(errno.EDQUOT, "quota")

    sink = sink_in(tmp_path, rotate_bytes=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="quota"):
        sink.write(batch("0"), 0.0)
        patch.setattr(logtree, "os", Unsynced())
        sink.write(batch("1"), 0.0)
    assert len(list(tmp_path.rglob("*.part"))) == 1
    sink.tick(0.0)
    assert list(files(tmp_path).values()) == [["0"], ["1"]]


def test_a_file_system_without_locks_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    class Lockless:
        LOCK_EX = LOCK_NB = 0

        def flock(self, descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

    sink = sink_in(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="locks"):
        patch.setattr(logtree, "fcntl", Lockless())
        sink.write(batch("1"), 0.0)
    assert files(tmp_path) == {}
    sink.tick(0.0)
    sink.close()
    assert list(files(tmp_path).values()) == [["1"]]


# --- the limit -------------------------------------------------------------------------------------------------------


def test_the_oldest_files_make_room_and_are_told(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_bytes=1, limit_bytes=3 * BLOCK_BYTES)
    for number in range(3):
        sink.write(batch(str(number), "more"), 0.0)
        age(tmp_path)
    assert sink.take_discarded() == Discarded()
    size = min(path.stat().st_size for path in tmp_path.rglob("*.zst"))
    for number in range(3, 5):
        sink.write(batch(str(number), "more"), 0.0)
        age(tmp_path)
    assert sink.take_discarded() == Discarded(2, 4, 2 * size)
    assert sink.take_discarded() == Discarded()
    assert sorted(files(tmp_path).values()) == [["2", "more"], ["3", "more"], ["4", "more"]]
    sink.close()


def age(directory: Path) -> None:
    """Make everything there a second older."""
    for path in directory.rglob("*.zst"):
        told = path.stat()
        os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns - 10**9))


def test_the_limit_is_kept_to_when_a_log_is_opened(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, rotate_bytes=1, limit_bytes=0)
    for number in range(3):
        sink.write(batch(str(number)), 0.0)
        age(tmp_path)
    assert sink.take_discarded() == Discarded()
    another = DirectorySink(str(tmp_path), role="client", node="n2", boot=BOOT, limit_bytes=BLOCK_BYTES)
    another.open()
    assert another.take_discarded().lines == 2
    assert list(files(tmp_path).values()) == [["2"]]


# --- descriptors -----------------------------------------------------------------------------------------------------


def test_a_descriptor_gets_plain_lines_and_is_closed_once() -> None:
    reader, writer = os.pipe()
    sink = DescriptorSink(writer)
    sink.write(batch("1"), 0.0)
    sink.close()
    sink.close()
    assert os.read(reader, 100) == b"1\n"
    assert os.read(reader, 100) == b""
    os.close(reader)
    assert sink.take_discarded() == Discarded() and sink.next_due() is None


@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_descriptor_that_fails_loses_and_doubles_nothing(rooms: list[int]) -> None:
    reader, writer = os.pipe()
    sink = DescriptorSink(writer)
    disk = ShortOs(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfiles, "os", disk)
        for number, disk.room in enumerate(rooms):
            try:
                sink.write(batch(f"line {number}"), 0.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        disk.room = 1000
        sink.tick(0.0)
    sink.close()
    with os.fdopen(reader, "rb") as stream:
        assert stream.read().decode().splitlines() == [f"line {number}" for number in range(len(rooms))]
