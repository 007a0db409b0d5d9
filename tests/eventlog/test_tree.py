"""What killed runs left behind, and the bound on what is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.logger import formatEvent, globalLogPublisher

from dmsg.eventlog import tree as logtree
from dmsg.eventlog.compress import Compressor, read_lines
from dmsg.eventlog.files import Batch, DirectorySink
from dmsg.eventlog.log import EventLog
from dmsg.eventlog.schema import Drained
from dmsg.eventlog.tree import BLOCK_BYTES, Discarded, discard_oldest, make_folder, publish_leftovers, sync_directory

PLACE = "role=server/date=2023-11-14/hour=22"
HOUR = 472_222
BOOT = "00112233aabbccdd"
PART = f"n1-{BOOT}-000000.jsonl.zst.part"


def folder_in(directory: Path, place: str = PLACE) -> Path:
    path = directory / place
    path.mkdir(parents=True, exist_ok=True)
    return path


def frame(*lines: bytes) -> bytes:
    return Compressor().frame(b"".join(line + b"\n" for line in lines))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- leftovers -------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=9).map(bytes.hex).map(str.encode), min_size=1), max_size=4), st.data())
def test_a_leftover_is_cut_after_its_last_whole_frame_and_counted(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[bytes]], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("left")
    folder = folder_in(directory)
    frames = [frame(*lines) for lines in pieces]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    garbage = data.draw(st.binary(max_size=30)) if cut == len(whole) else b""
    (folder / PART).write_bytes(whole[:cut] + garbage)
    kept: list[bytes] = []
    for lines, end in zip(pieces, ends(frames), strict=True):
        kept += lines if end <= cut else []
    published = publish_leftovers(str(directory))
    if kept:
        final = folder / f"n1-{BOOT}-000000-{len(kept)}.jsonl.zst"
        assert published == [str(final)] and names(folder) == [final.name]
        assert list(read_lines(final)) == kept
    else:
        assert (published, names(folder)) == ([], [])


def ends(frames: list[bytes]) -> list[int]:
    return [sum(map(len, frames[: number + 1])) for number in range(len(frames))]


def test_a_leftover_never_replaces_a_published_file(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    for number in (0, 1):
        (folder / f"n1-{BOOT}-00000{number}-1.jsonl.zst").write_bytes(b"seen")
    (folder / PART).write_bytes(frame(b"left"))
    [path] = publish_leftovers(str(tmp_path))
    assert Path(path).name == f"n1-{BOOT}-000002-1.jsonl.zst"
    assert list(read_lines(path)) == [b"left"]
    assert [(folder / f"n1-{BOOT}-00000{number}-1.jsonl.zst").read_bytes() for number in (0, 1)] == [b"seen"] * 2


def test_leftovers_of_every_role_and_hour_are_found(tmp_path: Path) -> None:
    places = [PLACE, "role=client/date=2023-11-14/hour=22", "role=server/date=2024-01-01/hour=00"]
    for place in places:
        (folder_in(tmp_path, place) / PART).write_bytes(frame(b"left"))
    assert sorted(os.path.relpath(path, tmp_path) for path in publish_leftovers(str(tmp_path))) == sorted(
        f"{place}/n1-{BOOT}-000000-1.jsonl.zst" for place in places
    )


def test_a_living_writers_file_is_left_alone(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), role="server", node="n1", boot=BOOT)
    sink.write(Batch(b"1\n", 1, HOUR), 0.0)
    assert publish_leftovers(str(tmp_path)) == []
    sink.write(Batch(b"2\n", 1, HOUR), 0.0)
    sink.close()
    [path] = (tmp_path / PLACE).iterdir()
    assert list(read_lines(path)) == [b"1", b"2"]


def test_links_and_other_files_are_not_leftovers(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    target = tmp_path / "target"
    target.write_bytes(frame(b"1") + b"torn")
    (folder / PART).symlink_to(target)
    others = [
        folder / "mine.part",
        folder / f".n1-{BOOT}-000000.jsonl.zst.part",
        tmp_path / PART,
        folder_in(tmp_path, "role=server/date=2023-11-14/hour=22/more") / PART,
        folder_in(tmp_path, ".damaged/date=2023-11-14/hour=22") / PART,
    ]
    for path in others:
        path.write_bytes(target.read_bytes())
    assert publish_leftovers(str(tmp_path)) == []
    assert {path.read_bytes() for path in others} == {target.read_bytes()}


def test_a_leftover_that_cannot_be_published_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    for number in (0, 1):
        (folder / PART.replace("000000", f"00000{number}")).write_bytes(frame(b"left"))
    real = logtree.publish

    def failing(descriptor: int, part: str, name: logtree.LogFileName) -> str:
        if name.number == 0:
            raise OSError("no")
        return real(descriptor, part, name)

    monkeypatch.setattr(logtree, "publish", failing)
    assert [Path(path).name for path in publish_leftovers(str(tmp_path))] == [f"n1-{BOOT}-000001-1.jsonl.zst"]
    assert (folder / PART).exists()


# --- the limit -------------------------------------------------------------------------------------------------------


def make_files(directory: Path, count: int, place: str = PLACE) -> list[Path]:
    """Published files of 100 bytes, the first the oldest, of 1, 2, 3 … lines."""
    made = []
    for number in range(count):
        path = folder_in(directory, place) / f"n1-{BOOT}-{number:06d}-{number + 1}.jsonl.zst"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 + number, 1000 + number))
        made.append(path)
    return made


def test_the_oldest_files_go_until_the_rest_fits(tmp_path: Path) -> None:
    made = make_files(tmp_path, 5)
    assert discard_oldest(str(tmp_path), 5 * BLOCK_BYTES) == Discarded()
    assert discard_oldest(str(tmp_path), 3 * BLOCK_BYTES + 1) == Discarded(2, 1 + 2, 200)
    assert [path.exists() for path in made] == [False, False, True, True, True]


def test_age_decides_not_the_name_and_empty_folders_go_too(tmp_path: Path) -> None:
    old = make_files(tmp_path, 1, "role=server/date=2024-01-01/hour=00")[0]
    new = make_files(tmp_path, 1)[0]
    os.utime(new, (5000, 5000))
    assert discard_oldest(str(tmp_path), BLOCK_BYTES).files == 1
    assert new.exists()
    assert not old.exists() and not old.parents[1].exists() and old.parents[2].exists()


def test_only_published_files_count_and_go(tmp_path: Path) -> None:
    made = make_files(tmp_path, 2)
    others = [made[0].parent / PART, made[0].parent / "mine.txt", tmp_path / made[0].name]
    for path in others:
        path.write_bytes(b"x" * 100_000)
        os.utime(path, (1, 1))
    assert discard_oldest(str(tmp_path), 2 * BLOCK_BYTES) == Discarded()
    assert discard_oldest(str(tmp_path), 0).files == 2
    assert all(path.exists() for path in others)


def test_files_that_a_shipper_takes_meanwhile_make_room_without_being_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_files(tmp_path, 3)

    class Busy:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def unlink(self, path: str) -> None:
            if path == str(made[0]):
                os.unlink(path)
            os.unlink(path)

    monkeypatch.setattr(logtree, "os", Busy())
    assert discard_oldest(str(tmp_path), BLOCK_BYTES) == Discarded(1, 2, 100)
    assert [path.exists() for path in made] == [False, False, True]


def test_what_cannot_be_deleted_or_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_files(tmp_path, 2)

    class Stuck:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def unlink(self, path: str) -> None:
            raise PermissionError(path)

    monkeypatch.setattr(logtree, "os", Stuck())
    assert discard_oldest(str(tmp_path), 0) == Discarded()
    assert all(path.exists() for path in made)
    assert discard_oldest(str(tmp_path / "missing"), 0) == Discarded()


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folders_are_made_as_far_as_they_are_missing(tmp_path: Path) -> None:
    for _ in range(2):
        assert make_folder(str(tmp_path / "events"), PLACE) == str(tmp_path / "events" / PLACE)
    assert (tmp_path / "events" / PLACE).is_dir()
    sync_directory(str(tmp_path / "gone"))


def test_a_file_system_that_syncs_no_directories_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a folder that a virtual machine shares with its host. What a disk says is told."""
    codes = [errno.EINVAL, errno.EIO]

    def fsync(descriptor: int) -> None:
        code = codes.pop(0)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    sync_directory(str(tmp_path))
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(str(tmp_path))


@pytest.mark.parametrize("part", ["role=server", "role=server/date=2023-11-14", PLACE])
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, part: str, there: bool) -> None:
    other = tmp_path / "other disk"
    if there:
        other.mkdir()
    link = tmp_path / "events" / part
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    with pytest.raises(OSError, match="must be a folder, not a symbolic link") as caught:
        make_folder(str(tmp_path / "events"), PLACE)
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(link))
    assert not list(tmp_path.glob("other disk/*"))


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "other disk").mkdir()
    (tmp_path / "events").symlink_to(tmp_path / "other disk")
    assert os.path.isdir(make_folder(str(tmp_path / "events"), PLACE))
    assert (tmp_path / "other disk" / PLACE).is_dir()


def test_an_event_log_says_that_it_cannot_be_written_behind_a_link(tmp_path: Path, logged_errors: Any) -> None:
    """What it would write there would never be shipped, nor be counted for the limit."""
    (tmp_path / "other disk").mkdir()
    (tmp_path / "role=server").symlink_to(tmp_path / "other disk")
    texts: list[str] = []
    observe = lambda event: texts.append(formatEvent(event))  # noqa: E731
    globalLogPublisher.addObserver(observe)
    try:
        log = EventLog.to_directory(tmp_path, role="server", node="n1", boot=BOOT)
        log.emit(Drained(1.0, 0))
        assert not log.close(), "the line is lost, and it says so"
    finally:
        globalLogPublisher.removeObserver(observe)
    logged_errors.flush()
    [text] = [text for text in texts if "the event log cannot be written" in text]
    assert "must be a folder, not a symbolic link" in text and str(tmp_path / "role=server") in text
    assert not list((tmp_path / "other disk").iterdir())
