"""The shipper's side of an event directory: what is found, what is damaged, what may be removed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmsg.shipping.errors import ShippingError
from dmsg.shipping.scan import EMPTY_FOLDER_S, examine, release, scan

NOW = 2_000_000_000.0


def relative(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory))


def test_only_finished_files_are_found(tmp_path: Path, event_file: Any) -> None:
    good = [event_file(tmp_path, number) for number in range(2)]
    folder = good[0].parent
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    target = event_file(elsewhere, 7)
    hidden = [f".{good[0].name}", f"_{good[0].name}", "02c6-9f2c0011aabbccdd-000009.jsonl.zst.part"]
    foreign = ["notes.txt", "02c6-9f2c0011aabbccdd-000009.jsonl.zst", f"a b {good[0].name}"]
    for name in (*hidden, *foreign):
        (folder / name).write_bytes(b"x")
    (folder / "02c6-9f2c0011aabbccdd-000008-3.jsonl.zst").symlink_to(target)
    (folder / os.fsdecode(b"\xff\xfe-9f2c0011aabbccdd-000008-3.jsonl.zst")).write_bytes(b"x")
    (tmp_path / "role=server" / "linked").symlink_to(elsewhere)
    (tmp_path / good[0].name).write_bytes(b"x")
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging" / good[0].name).write_bytes(b"x")
    found = scan(str(tmp_path), NOW)
    assert {one.path for one in found.files} == {relative(path, tmp_path) for path in good}
    assert {one.size_bytes for one in found.files} == {path.stat().st_size for path in good}
    assert found.foreign == len(foreign) + 4 and found.damaged == 0


def test_folders_that_are_none_of_a_log_are_left_as_they_are(tmp_path: Path, event_file: Any) -> None:
    good = event_file(tmp_path)
    now = time.time()
    others = [tmp_path / "backup" / "a" / "b", good.parent / "deeper", good.parents[1] / "minute=1"]
    for each in others:
        each.mkdir(parents=True)
        os.utime(each, (now, now - EMPTY_FOLDER_S - 1))
    event_file(tmp_path / "backup")
    found = scan(str(tmp_path), now)
    assert [one.path for one in found.files] == [relative(good, tmp_path)]
    assert found.foreign == len(others) and all(each.is_dir() for each in others)


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        scan(str(tmp_path / "nowhere"), NOW)


def test_empty_folders_of_past_hours_are_removed_and_no_others(tmp_path: Path, event_file: Any) -> None:
    old, fresh, used = (event_file(tmp_path, 0, hour=hour) for hour in (1, 2, 3))
    (used.parent / "02c6-9f2c0011aabbccdd-000009.jsonl.zst.part").touch()
    for path in (old, fresh, used):
        path.unlink()
    now = time.time()
    for path in (old, used):
        os.utime(path.parent, (now, now - EMPTY_FOLDER_S - 1))
    scan(str(tmp_path), now)
    assert not old.parent.exists() and fresh.parent.exists() and used.parent.exists()
    assert not used.is_symlink()


def test_a_whole_file_is_what_its_name_says(tmp_path: Path, event_file: Any) -> None:
    path = event_file(tmp_path, lines=50, pad=3000)
    content = examine(str(tmp_path), relative(path, tmp_path))
    data = path.read_bytes()
    assert (content.lines, content.size_bytes) == (50, len(data))
    assert content.sha256 == hashlib.sha256(data).hexdigest()
    with content.open() as file:
        assert file.read() == data


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-5],
    "a frame is missing": lambda data: data[: data.rindex(b"\x28\xb5\x2f\xfd")],
    "a flipped bit": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "something behind it": lambda data: data + b"more",
    "nothing in it": lambda data: b"",
    "zeros, as after a loss of power": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_moved_aside_whole(tmp_path: Path, event_file: Any, damage: str) -> None:
    path = event_file(tmp_path, lines=3)
    data = DAMAGES[damage](path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(ShippingError) as caught:
        examine(str(tmp_path), relative(path, tmp_path))
    assert caught.value.reason == "damaged" and str(path.parent.relative_to(tmp_path)) in caught.value.detail
    assert not path.exists()
    [kept] = [one for one in (tmp_path / ".damaged").rglob("*") if one.is_file()]
    assert kept.read_bytes() == data
    assert kept.relative_to(tmp_path / ".damaged").parent == path.parent.relative_to(tmp_path)
    found = scan(str(tmp_path), NOW)
    assert found.files == () and (found.foreign, found.damaged) == (0, 1)


@pytest.mark.parametrize("says", [2, 4, 0])
def test_a_file_with_other_lines_than_its_name_says_is_damaged(tmp_path: Path, event_file: Any, says: int) -> None:
    path = event_file(tmp_path, lines=3, says=says)
    with pytest.raises(ShippingError, match=f"not the {says} its name tells of"):
        examine(str(tmp_path), relative(path, tmp_path))


def test_the_same_name_damaged_twice_is_kept_twice(tmp_path: Path, event_file: Any) -> None:
    for end in (b"a", b"b", b"b"):
        path = event_file(tmp_path)
        path.write_bytes(b"no frames " + end)
        with pytest.raises(ShippingError):
            examine(str(tmp_path), relative(path, tmp_path))
    assert scan(str(tmp_path), NOW).damaged == 2


def test_a_digest_in_the_name_has_to_be_right(tmp_path: Path, event_file: Any) -> None:
    path = event_file(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    right = path.with_name(path.name.replace(".jsonl", f"-{digest}.jsonl"))
    path.rename(right)
    assert examine(str(tmp_path), relative(right, tmp_path)).sha256.startswith(digest)
    wrong = path.with_name(path.name.replace(".jsonl", f"-{'0' * 16}.jsonl"))
    right.rename(wrong)
    with pytest.raises(ShippingError, match="not the one its name tells of"):
        examine(str(tmp_path), relative(wrong, tmp_path))


def test_what_is_no_file_is_not_read(tmp_path: Path, event_file: Any) -> None:
    path = event_file(tmp_path)
    path.unlink()
    name = relative(path, tmp_path)
    with pytest.raises(FileNotFoundError):
        examine(str(tmp_path), name)
    os.mkfifo(path)
    with pytest.raises(ShippingError, match="unreadable"):
        examine(str(tmp_path), name)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(ShippingError, match="unreadable"):
        examine(str(tmp_path), name)


def test_only_the_file_that_was_looked_through_is_removed(tmp_path: Path, event_file: Any) -> None:
    path = event_file(tmp_path)
    name = relative(path, tmp_path)
    content = examine(str(tmp_path), name)
    path.unlink()
    event_file(tmp_path, lines=3, pad=10)
    with pytest.raises(ShippingError, match="changed meanwhile"):
        release(str(tmp_path), name, content, keep=False)
    with pytest.raises(ShippingError, match="changed meanwhile"):
        content.open()
    assert path.exists()
    content = examine(str(tmp_path), name)
    release(str(tmp_path), name, content, keep=False)
    assert not path.exists()
    release(str(tmp_path), name, content, keep=False)


def test_what_is_kept_is_moved_aside(tmp_path: Path, event_file: Any, landed: Any) -> None:
    path = event_file(tmp_path)
    name = relative(path, tmp_path)
    release(str(tmp_path), name, examine(str(tmp_path), name), keep=True)
    assert not path.exists() and list(landed(tmp_path / ".shipped").values()) == [[0, 1, 2]]
    assert scan(str(tmp_path), NOW) == ((), 0, 0)
