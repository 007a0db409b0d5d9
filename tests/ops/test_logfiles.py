"""Files of the event log: complete when published, cut when torn, never taken from a living writer."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.ops import logfiles
from dmsg.ops.logfiles import DescriptorSink, DirectorySink, publish_leftovers


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_published_when_it_is_full(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), "log", rotate_bytes=10, rotate_s=100)
    sink.open()
    assert names(tmp_path) == []
    sink.write(b"1234\n", 0.0)
    assert names(tmp_path) == ["log-000000.jsonl.part"]
    sink.write(b"5678\n", 1.0)
    assert names(tmp_path) == ["log-000000.jsonl"]
    sink.write(b"9\n", 2.0)
    sink.close()
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {
        "log-000000.jsonl": b"1234\n5678\n",
        "log-000001.jsonl": b"9\n",
    }


def test_a_file_is_published_when_it_is_old(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), "log", rotate_bytes=1000, rotate_s=60)
    sink.open()
    assert sink.next_due() is None
    sink.write(b"1\n", 10.0)
    assert sink.next_due() == 70.0
    sink.tick(69.9)
    assert names(tmp_path) == ["log-000000.jsonl.part"]
    sink.tick(70.0)
    assert names(tmp_path) == ["log-000000.jsonl"]
    assert sink.next_due() is None
    sink.close()


def test_names_hold_nothing_that_means_something_to_a_shell_or_a_path(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), "../a b$(c)", rotate_bytes=1)
    sink.write(b"1\n", 0.0)
    [name] = names(tmp_path)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name) and (tmp_path / name).parent == tmp_path


def test_a_name_that_is_taken_is_stepped_over(tmp_path: Path) -> None:
    (tmp_path / "log-000000.jsonl").write_bytes(b"old\n")
    (tmp_path / "log-000001.jsonl.part").write_bytes(b"other\n")
    sink = DirectorySink(str(tmp_path), "log")
    sink.write(b"new\n", 0.0)
    sink.close()
    assert (tmp_path / "log-000000.jsonl").read_bytes() == b"old\n"
    assert (tmp_path / "log-000001.jsonl.part").read_bytes() == b"other\n"
    assert (tmp_path / "log-000002.jsonl").read_bytes() == b"new\n"


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    sink = DirectorySink(str(directory), "log", rotate_bytes=1)
    sink.open()
    directory.rmdir()
    sink.write(b"1\n", 0.0)
    assert names(directory) == ["log-000000.jsonl"]


@given(st.binary(max_size=300), st.sampled_from([1, 7, 64, 1 << 16]))
def test_a_leftover_is_cut_after_its_last_line_end(tmp_path_factory: Any, content: bytes, scan: int) -> None:
    directory = tmp_path_factory.mktemp("left")
    (directory / "log-000000.jsonl.part").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfiles, "_SCAN_BYTES", scan)
        published = publish_leftovers(str(directory))
    whole = content[: content.rfind(b"\n") + 1]
    if whole:
        assert published == [str(directory / "log-000000.jsonl")]
        assert (directory / "log-000000.jsonl").read_bytes() == whole
    else:
        assert (published, names(directory)) == ([], [])


def test_a_leftover_never_replaces_a_published_file(tmp_path: Path) -> None:
    (tmp_path / "log-000000.jsonl").write_bytes(b"seen\n")
    (tmp_path / "log-000000.jsonl.part").write_bytes(b"left\n")
    [path] = publish_leftovers(str(tmp_path))
    assert Path(path).read_bytes() == b"left\n"
    assert (tmp_path / "log-000000.jsonl").read_bytes() == b"seen\n"
    assert len(names(tmp_path)) == 2


def test_a_living_writers_file_is_left_alone(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), "log")
    sink.write(b"whole\nto", 0.0)
    assert publish_leftovers(str(tmp_path)) == []
    sink.write(b"rn\n", 0.0)
    sink.close()
    assert (tmp_path / "log-000000.jsonl").read_bytes() == b"whole\ntorn\n"


def test_links_and_other_files_are_not_leftovers(tmp_path: Path) -> None:
    (tmp_path / "mine.txt.part").write_bytes(b"1\n2")
    target = tmp_path / "target"
    target.write_bytes(b"1\n2")
    (tmp_path / "log-000000.jsonl.part").symlink_to(target)
    assert publish_leftovers(str(tmp_path)) == []
    assert target.read_bytes() == b"1\n2"


class ShortOs:
    """Stands for ``os``: writes at most ``room`` bytes in all, then says the disk is full."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(descriptor, bytes(data)[: min(3, self.room)])
        self.room -= written
        return written


@given(st.lists(st.text("ab", max_size=6), min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=6))
def test_a_full_disk_costs_no_line_and_doubles_none(tmp_path_factory: Any, lines: list[str], rooms: list[int]) -> None:
    directory = tmp_path_factory.mktemp("full")
    sink = DirectorySink(str(directory), "log", rotate_bytes=8)
    data = [line.encode() + b"\n" for line in lines]
    disk = ShortOs(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfiles, "os", disk)
        for room, piece in zip([*rooms, *[10_000] * len(data)], [*data, *[b""] * len(rooms)], strict=False):
            disk.room = room
            try:
                sink.write(piece, 0.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        disk.room = 10_000
        sink.write(b"", 0.0)
    sink.close()
    files = [(directory / name).read_bytes() for name in names(directory)]
    assert b"".join(files) == b"".join(data)
    assert all(name.endswith(".jsonl") for name in names(directory))
    assert all(content.endswith(b"\n") for content in files)


def test_a_line_torn_when_closing_is_left_for_the_next_run_to_cut(tmp_path: Path) -> None:
    sink = DirectorySink(str(tmp_path), "log")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(logfiles, "os", ShortOs(8))
        sink.write(b"whole\ntorn\n", 0.0)
    sink.close()
    assert names(tmp_path) == ["log-000000.jsonl.part"]
    publish_leftovers(str(tmp_path))
    assert (tmp_path / "log-000000.jsonl").read_bytes() == b"whole\n"


def test_a_descriptor_is_written_to_and_closed_once() -> None:
    reader, writer = os.pipe()
    sink = DescriptorSink(writer)
    sink.write(b"1\n", 0.0)
    sink.close()
    sink.close()
    assert os.read(reader, 100) == b"1\n"
    assert os.read(reader, 100) == b""
    os.close(reader)
