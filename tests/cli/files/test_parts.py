"""What a part takes of the disk while it grows, and afterwards."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from pathlib import Path

import pytest

from dmsg.cli.files.disk import reserve
from dmsg.cli.files.part_file import RESERVE_BYTES, PartFile
from dmsg.cli.files.parts import KEPT_S, PARTS_PER_SENDER, PartStore, SmallFile

MIB = 1 << 20
SENDER = "02" * 33
#: What file systems round up to.
SLACK = 256 * 1024


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def begin(store: PartStore, size: int) -> tuple[PartFile, Path]:
    part = store.open(SENDER, "a")
    part.load(size)
    return part, store.path(SENDER, "a")


def test_space_is_set_aside_for_as_much_again_as_has_come(tmp_path):
    part, path = begin(PartStore(tmp_path), 200 * MIB)
    ahead = []
    for _ in range(80):
        part.append(bytes(MIB // 2))
        assert path.stat().st_size == part.offset
        ahead.append(taken(path) - part.offset)
        assert ahead[-1] <= min(part.offset, RESERVE_BYTES) + SLACK
    assert max(ahead) > RESERVE_BYTES // 2
    part.close()


def test_an_offer_alone_takes_nothing_and_no_more_than_the_file_is_set_aside(tmp_path):
    part, path = begin(PartStore(tmp_path), 5 * MIB)
    assert not taken(path)
    for _ in range(5):
        part.append(bytes(MIB))
        assert taken(path) <= 5 * MIB + SLACK
    part.publish(overwrite=False)
    part.close()
    assert (tmp_path / "a").stat().st_size == 5 * MIB


def test_what_was_set_aside_is_given_back_with_a_part_that_stays(tmp_path):
    store = PartStore(tmp_path)
    part, path = begin(store, 200 * MIB)
    for _ in range(17):
        part.append(bytes(MIB))
    assert taken(path) > 20 * MIB
    part.close()
    assert path.stat().st_size == 17 * MIB and taken(path) <= 17 * MIB + SLACK
    part, _ = begin(store, 200 * MIB)
    assert part.offset == 17 * MIB  # its hash is still known to be of it
    part.append(b"goes on")
    part.close()
    assert path.read_bytes()[17 * MIB :] == b"goes on"


def test_a_file_that_begins_anew_has_its_space_set_aside_anew(tmp_path):
    part, path = begin(PartStore(tmp_path), 200 * MIB)
    for _ in range(4):
        part.append(bytes(MIB))
    part.restart()
    assert not taken(path)
    for _ in range(3):
        part.append(b"2" * MIB)
    assert taken(path) > 3 * MIB + SLACK
    part.close()
    assert path.read_bytes() == b"2" * 3 * MIB


def test_a_file_system_that_sets_nothing_aside_is_asked_once(tmp_path):
    asked = []

    def refuse(descriptor: int, start: int, size: int) -> bool:
        asked.append((start, size))
        return False

    part, _ = begin(PartStore(tmp_path, reserve=refuse), 200 * MIB)
    for _ in range(6):
        part.append(b"3" * MIB)
    assert asked == [(MIB, MIB)]
    part.publish(overwrite=False)
    part.close()
    assert (tmp_path / "a").read_bytes() == b"3" * 6 * MIB


def test_a_write_that_the_system_cuts_short_goes_on_behind_what_was_written(tmp_path, monkeypatch):
    """As on a disk that is almost full, or of a process that gets a signal."""
    write, write_all = os.pwrite, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda descriptor, pieces, at: write_all(descriptor, [pieces[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:4], at))
    part, path = begin(PartStore(tmp_path), 100)
    part.append(b"0123456789")
    part.append(b"ab", b"", b"cdefghijklmno")
    assert path.read_bytes() == b"0123456789abcdefghijklmno"
    assert part.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and part.offset == 25
    part.close()


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(tmp_path, monkeypatch):
    """Its sender is told that it may delete it."""
    steps = []
    sync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def linked(source: Path, final: Path) -> None:
        steps.append("link")
        link(source, final)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    part, path = begin(PartStore(tmp_path), 5)
    part.append(b"whole")
    part.publish(overwrite=False)
    part.close()
    assert steps == [str(path), "link", str(tmp_path)]


def fail_for_directories(monkeypatch, code: int) -> None:
    """Have the system refuse to sync directories."""
    sync = os.fsync

    def synced(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)


def test_a_file_system_that_syncs_no_directories_will_do(tmp_path, monkeypatch):
    """Such as a folder that a virtual machine shares with its host."""
    fail_for_directories(monkeypatch, errno.EINVAL)
    part, _ = begin(PartStore(tmp_path), 5)
    part.append(b"whole")
    assert part.publish(overwrite=False) == "a"
    part.close()
    assert (tmp_path / "a").read_bytes() == b"whole"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV], ids=errno.errorcode.get)
def test_a_file_system_without_links_will_do(tmp_path, monkeypatch, code):
    """AFS has links, but none that lead from one directory to another: ``EXDEV``."""

    def link(path: Path, final: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "a").write_bytes(b"ours")
    part, _ = begin(PartStore(tmp_path), 5)
    part.append(b"whole")
    name = part.publish(overwrite=False)
    part.close()
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"a": b"ours", name: b"whole"}


def know_no_locks(monkeypatch) -> None:
    """Have the system refuse locks, as Lustre does by default."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_file_system_without_locks_is_not_called_busy(tmp_path, monkeypatch):
    know_no_locks(monkeypatch)
    with pytest.raises(OSError, match="not implemented"):
        begin(PartStore(tmp_path), 5)


def test_offers_leave_nothing_behind_on_a_file_system_without_locks(tmp_path, monkeypatch):
    """Nothing would ever remove them there, because that takes the lock. What an earlier transfer has brought stays."""
    store, content = PartStore(tmp_path), b"x"
    part, _ = begin(store, 5)
    part.append(b"half")
    part.close()
    know_no_locks(monkeypatch)
    for name in "abc":
        with pytest.raises(OSError, match="not implemented"):
            store.open(SENDER, name)
        small = SmallFile(name, content, hashlib.sha256(content).hexdigest(), 0.0)
        names, problem = store.keep_small(SENDER, [small], overwrite=False, admit=lambda size: None)
        assert (names, type(problem)) == ([], OSError)
    assert [one.read_bytes() for one in store.folder.iterdir()] == [b"half"]


@pytest.mark.parametrize("failing", [["flock", "fstat"], ["fstat"]], ids="+".join)
def test_a_part_that_another_host_has_removed_keeps_no_descriptor(tmp_path, monkeypatch, failing):
    """As on NFS."""

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    store = PartStore(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        for name in failing:
            patch.setattr(fcntl if name == "flock" else os, name, stale)
        with pytest.raises(OSError, match="Stale"):
            store.open(SENDER, "a")
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("failing", ["lstat", "unlink"])
def test_a_part_that_cannot_be_looked_at_keeps_no_descriptor_and_no_lock(tmp_path, monkeypatch, failing):
    """As on NFS, and on a disk that may only be read since it failed."""

    def fails(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = PartStore(tmp_path)
    store.folder.mkdir(mode=0o700)
    path = store.path(SENDER, "a")
    path.write_bytes(b"half")
    os.link(path, tmp_path / "second name")  # so that the part is removed when it is opened
    before = set(os.listdir("/proc/self/fd"))
    lstat = Path.lstat
    with monkeypatch.context() as patch:
        if failing == "lstat":
            (tmp_path / "second name").unlink()
            patch.setattr(Path, "lstat", lambda one: fails(one) if one == path else lstat(one))
        else:
            patch.setattr(Path, "unlink", fails)
        with pytest.raises(OSError, match="Input/output"):
            store.open(SENDER, "a")
    assert set(os.listdir("/proc/self/fd")) == before
    store.open(SENDER, "a").close()


def test_small_files_that_cannot_be_removed_keep_no_descriptor(tmp_path, monkeypatch):
    """As on a disk that may only be read since it failed."""

    def fails(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    store = PartStore(tmp_path)
    files = [SmallFile(name, b"x", hashlib.sha256(b"x").hexdigest(), 0.0) for name in ("a", "b", "c")]
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fails)
        patch.setattr(Path, "unlink", fails)
        with pytest.raises(OSError, match="Read-only"):
            store.keep_small(SENDER, files, overwrite=False, admit=lambda size: None)
    assert set(os.listdir("/proc/self/fd")) == before


def test_old_parts_are_removed_where_only_what_may_be_written_to_can_be_locked(tmp_path, monkeypatch):
    """As on NFS and SMB: see flock(2)."""
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    clock = [1e9]
    store = PartStore(tmp_path, clock=lambda: clock[0])
    for number in range(PARTS_PER_SENDER + 3):
        part = store.open(SENDER, str(number))
        part.append(b"half")
        part.close()
    assert len(list(store.folder.iterdir())) == PARTS_PER_SENDER
    clock[0] = time.time() + KEPT_S + 1.0
    store.sweep()
    assert not store.folder.exists()


def test_parts_that_are_removed_leave_no_descriptor_and_no_folder(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    clock = [1e9]
    store = PartStore(tmp_path, clock=lambda: clock[0])
    for number in range(PARTS_PER_SENDER + 4):
        part = store.open(SENDER, f"{number}")
        part.load(10)
        part.append(b"begun")
        part.close()
        os.utime(store.path(SENDER, f"{number}"), (clock[0], clock[0]))
    assert len(list(store.folder.iterdir())) == PARTS_PER_SENDER
    assert set(os.listdir("/proc/self/fd")) == before
    clock[0] += KEPT_S + 1
    store.sweep()
    assert not store.folder.exists() and set(os.listdir("/proc/self/fd")) == before


def test_what_is_no_file_has_nothing_set_aside():
    reading, writing = os.pipe()
    assert not reserve(writing, 0, 4096)
    os.close(reading)
    os.close(writing)
    assert not reserve(writing, 0, 4096)
