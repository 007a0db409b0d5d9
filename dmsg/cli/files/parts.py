"""Files that are being received ("parts"): where they are, how many there may be, and for how long. All calls block, except
closing.

They are in ``.dmsg-parts`` below the receiving directory, which only its owner may enter, as ``SENDER-DIGEST.part``: the
sender's key and a digest of the offered name. So no sender can learn or spoil what another one left there, and no name chosen
by a stranger reaches the disk before its file is whole. A part is locked while it is in use, synced, and then gets its real
name in one step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmsg.cli.files.disk import flush_soon, reserve
from dmsg.cli.files.names import local_name, second_name
from dmsg.cli.files.store import HashedFile
from dmsg.cli.files.wire import PART_SUFFIX, TransferFailed

FOLDER: Final = ".dmsg-parts"
#: A part is removed when nothing was written to it for this many seconds: three days, so that a weekend costs no transfer.
KEPT_S: Final = 3 * 86_400.0
#: Parts of one sender. Above that, the one that has not been touched for longest is removed: a sender sends one file at a time.
PARTS_PER_SENDER: Final = 16
#: Parts of all senders. Above that, the smallest is removed, so that strangers can push out a part only with larger ones.
PARTS_LIMIT: Final = 1_024
_NAME_DIGITS: Final = 32
#: Files synced to the disk at a time.
_SYNCS: Final = 8
#: Pieces written at once: as many as all systems take.
PIECES_LIMIT: Final = 1_000
#: Writing to the disk begins after each so many bytes, while more come, so that little is left to wait for in the end.
_FLUSH_BYTES: Final = 8 * 1024 * 1024
#: The most space reserved on the disk ahead of the data; and never more than has come, so that offers alone reserve none.
RESERVE_BYTES: Final = 16 * 1024 * 1024
#: Attempts: the directory may be removed, because it is empty, between making it and making a file in it.
_TRIES: Final = 5


class _Hashed(NamedTuple):
    """A hash of the first ``offset`` bytes of a file, and the state of the file at that time."""

    hash: Any
    offset: int
    size: int
    inode: int
    changed_ns: int

    def is_of(self, status: os.stat_result) -> bool:
        """Whether the file has not been changed since."""
        return (self.size, self.inode, self.changed_ns) == (status.st_size, status.st_ino, status.st_mtime_ns)


class SmallFile(NamedTuple):
    """A file that has come whole: its offered name, its content, the SHA-256 (hex) it should have, when it came (seconds), and
    whether its sender may have sent it before.
    """

    name: str
    data: bytes
    sha256: str
    came_at: float
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Listed:
    path: Path
    size: int
    changed_at: float

    @property
    def sender(self) -> str:
        return self.path.name.partition("-")[0]


class PartStore:
    """The parts in ``directory``. ``clock`` gives Unix seconds, as the file system does."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = time.time,
        reserve: Callable[[int, int, int], bool] = reserve,
    ) -> None:
        self.directory = directory
        self.folder = directory / FOLDER
        #: Reserves space for a part: see :func:`~dmsg.cli.files.disk.reserve`.
        self.reserve = reserve
        self._clock = clock
        self._lock = threading.Lock()
        self._hashed: dict[Path, _Hashed] = {}
        #: The content of the folder; ``None`` until it has been scanned. The hourly sweep scans again.
        self._index: dict[Path, _Listed] | None = None

    def path(self, sender: str, name: str) -> Path:
        """The path of the part of a file offered as ``name`` by ``sender`` (hex key)."""
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]
        return self.folder / f"{sender}-{digest}{PART_SUFFIX}"

    def open(self, sender: str, name: str) -> PartFile:
        """The part for a file, new or from before. Raises ``OSError``, or ``TransferFailed`` (``busy``, ``storage``)."""
        path = self.path(sender, name)
        with self._lock:
            if not path.exists():
                self._make_room(sender)
            part = self._open(path, name)
            self._listed().setdefault(path, _Listed(path, 0, self._clock()))
            return part

    def keep_small(
        self, sender: str, files: Sequence[SmallFile], *, overwrite: bool, admit: Callable[[int], None]
    ) -> tuple[list[str], OSError | TransferFailed | None]:
        """Store small files together, so that one wait for the disk serves them all.

        Gives the names of the stored files, in order, and the error of the first one that could not be stored, if any.
        ``admit`` is called with the size of each, and raises ``TransferFailed`` when there is no room for it.
        """
        parts: list[PartFile] = []
        names: list[str] = []
        complete = 0
        problem: OSError | TransferFailed | None = None
        try:
            try:
                for file in files:
                    admit(len(file.data))
                    # None of these is ever continued, so each has a name of its own; after a crash the sweep removes them.
                    path = self.folder / f"{sender}-{os.urandom(_NAME_DIGITS // 2).hex()}{PART_SUFFIX}"
                    with self._lock:
                        part = self._open(path, file.name)
                    parts.append(part)
                    part.append(file.data)
                    if part.sha256 != file.sha256:
                        raise TransferFailed("mismatch")
                    complete += 1
            except (OSError, TransferFailed) as error:
                problem = error
            publish(self.directory, parts[:complete], names, overwrite=overwrite)
            return names, problem
        except OSError as error:
            return names, error
        finally:
            for part in parts:
                part.discard()
                part.close()

    def _open(self, path: Path, name: str) -> PartFile:
        for left in reversed(range(_TRIES)):
            self._make_folder(name)
            try:
                return PartFile(self, path, name)
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError("the loop returns or raises")

    def sweep(self) -> None:
        """Remove the parts that are too old."""
        with self._lock:
            oldest = self._clock() - KEPT_S
            self._index = None
            for each in list(self._listed().values()):
                if each.changed_at < oldest:
                    self._remove(each.path)
            self.tidy()

    def tidy(self) -> None:
        """Remove the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def closed(self, path: Path, status: os.stat_result, hashed: Any, offset: int) -> None:
        """A part is closed and stays. Its hash is kept, so that the next offer need not hash it again."""
        self._listed()[path] = _Listed(path, status.st_size, status.st_mtime)
        self._hashed.pop(path, None)
        self._hashed[path] = _Hashed(hashed, offset, status.st_size, status.st_ino, status.st_mtime_ns)
        if len(self._hashed) > PARTS_LIMIT:
            del self._hashed[next(iter(self._hashed))]

    def gone(self, path: Path) -> None:
        """A part has been removed."""
        self._listed().pop(path, None)
        self.tidy()

    def recall(self, path: Path) -> _Hashed | None:
        """Take the kept hash of a part, and forget it here."""
        return self._hashed.pop(path, None)

    def _make_folder(self, name: str) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise TransferFailed("storage", name)

    def _make_room(self, sender: str) -> None:
        listed = self._listed()
        own = sorted((one for one in listed.values() if one.sender == sender), key=lambda one: one.changed_at)
        for each in own[: max(0, len(own) + 1 - PARTS_PER_SENDER)]:
            self._remove(each.path)
        if len(listed) >= PARTS_LIMIT:
            for each in sorted(listed.values(), key=lambda one: (one.size, one.changed_at)):
                if self._remove(each.path):
                    break

    def _listed(self) -> dict[Path, _Listed]:
        if self._index is None:
            found: dict[Path, _Listed] = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.name.endswith(PART_SUFFIX) and entry.is_file(follow_symlinks=False):
                            status, path = entry.stat(follow_symlinks=False), Path(entry.path)
                            found[path] = _Listed(path, status.st_size, status.st_mtime)
            self._index = found
        return self._index

    def _remove(self, path: Path) -> bool:
        """Remove a part unless a transfer holds its lock."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self._listed().pop(path, None)
            return True
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self._hashed.pop(path, None)
        self._listed().pop(path, None)
        return True


class PartFile(HashedFile):
    """A file that is being received; :meth:`PartStore.open` makes it."""

    def __init__(self, store: PartStore, path: Path, name: str) -> None:
        self._store = store
        self._path = path
        self._local = local_name(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        super().__init__(os.open(path, flags, 0o666))
        self._is_kept = self._is_ours = False
        self._flushed = 0  # up to where the system was told to write to the disk
        self._size = 0  # of the whole file
        self._reserved = 0  # up to where space is reserved
        self._may_reserve = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise TransferFailed("busy", name) from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise TransferFailed("storage", name)
        if status.st_nlink > 1:
            # A receiver was killed while it gave the file its name, and a file with its name is not written to again.
            path.unlink(missing_ok=True)
        if status.st_nlink != 1 or not _is_at(path, status):
            self.close()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._is_kept = self._is_ours = True

    def load(self, size: int) -> None:
        """Hash the bytes that are there of a file of ``size`` bytes, unless their hash was kept.

        If there are more than ``size`` bytes, they are of another file and are thrown away.
        """
        with self._lock:
            status = os.fstat(self._fd())
            kept = self._store.recall(self._path)
            if status.st_size > size:
                os.ftruncate(self._fd(), 0)
            elif kept is not None and kept.is_of(status):
                self._hash, self.offset = kept.hash, kept.offset
                self.hashed = self.offset
        self.hash_to(size)
        self._size = size
        self._flushed = self._reserved = self.offset

    def restart(self) -> None:
        """Throw away the bytes that are there."""
        with self._lock:
            os.ftruncate(self._fd(), 0)
            self._begin_again()
            self._flushed = self._reserved = 0

    def append(self, *pieces: bytes, hashed: bool = True) -> None:
        """Append ``pieces`` (at most :data:`PIECES_LIMIT`), without joining them, which would be a copy.

        ``hashed`` pieces may only follow hashed ones.
        """
        with self._lock:
            size = sum(map(len, pieces))
            if self._may_reserve and self.offset + size > self._reserved:
                self._reserve_ahead()
            written = os.pwritev(self._fd(), pieces, self.offset)
            if written < size:  # the disk is full, most likely, and the next write fails
                rest = memoryview(b"".join(pieces))
                while written < size:
                    written += os.pwrite(self._fd(), rest[written:], self.offset + written)
            if hashed:
                for piece in pieces:
                    self._hash.update(piece)
                self.hashed += size
            self.offset += size
            if self.offset - self._flushed >= _FLUSH_BYTES:
                flush_soon(self._fd(), self._flushed, self.offset)
                self._flushed = self.offset

    def _reserve_ahead(self) -> None:
        size = min(self.offset, RESERVE_BYTES, self._size - self.offset)
        if size > 0:
            self._may_reserve = self._store.reserve(self._fd(), self.offset, size)
            self._reserved = self.offset + size

    def publish(self, *, overwrite: bool) -> str:
        """Sync it and give it its name, which is returned. Closing does not wait for this, and ends it."""
        names: list[str] = []
        publish(self._store.directory, (self,), names, overwrite=overwrite)
        return names[0]

    def begin_to_sync(self) -> None:
        """Have the system begin to write it to the disk."""
        flush_soon(self._fd(), self._flushed, self.offset)

    def sync(self) -> None:
        """Wait until the disk has the whole file; does nothing else."""
        with self._lock:
            os.ftruncate(self._fd(), self.offset)
            descriptor = os.dup(self._fd())
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def give_name(self, *, overwrite: bool) -> str:
        """Give it its name, which is returned.

        If its local name is taken, it replaces that file with ``overwrite``; otherwise it gets
        :func:`~dmsg.cli.files.names.second_name`. So no sender learns which files are there.
        """
        final = self._store.directory / self._local
        if overwrite and (not os.path.lexists(final) or _is_plain_file(final)):
            self._leave(lambda: os.replace(self._path, final))
            return self._local
        return self._local if self._link(final) else self._link_otherwise()

    def _link_otherwise(self) -> str:
        """Give it a name other than its local one, which is taken."""
        self.hash_to(self.offset)
        name = second_name(self._local, self.sha256)
        final = self._store.directory / name
        if self._link(final):
            return name
        if _is_same_file(final, self.offset, self.sha256):
            self._leave(lambda: os.unlink(self._path))  # sent again: it is there already
            return name
        # That name is taken, too: a sender may have known which file was coming.
        name = second_name(self._local, os.urandom(16).hex())
        if not self._link(self._store.directory / name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return name

    def _link(self, final: Path) -> bool:
        """Give it a name unless that is taken. A rename would replace a file that was made meanwhile; a link does not."""

        def link() -> None:
            try:
                os.link(self._path, final)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                if os.path.lexists(final):  # a file system without links: as good as it gets
                    raise FileExistsError from None
                os.rename(self._path, final)
            else:
                os.unlink(self._path)

        try:
            self._leave(link)
        except FileExistsError:
            return False
        return True

    def _leave(self, step: Callable[[], None]) -> None:
        """Do ``step``, after which it is no part any more. Raises ``ValueError`` when it was closed meanwhile."""
        with self._lock:
            self._fd()
            step()
            self._is_kept = False

    def discard(self) -> None:
        """Remove it, unless it has its name."""
        with self._lock:
            if self._is_kept:
                self._path.unlink(missing_ok=True)
                self._is_kept = False

    def _closing(self) -> None:
        if self._is_kept and self._reserved > self.offset:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size)  # frees the reserved space
        status = os.fstat(self._descriptor)
        if self._is_kept and status.st_size:
            self._store.closed(self._path, status, self._hash, self.hashed)
        else:
            if self._is_kept:
                self._path.unlink(missing_ok=True)  # an offer alone leaves nothing behind
            if self._is_ours:
                self._store.gone(self._path)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # otherwise the copy of it that is used for syncing keeps the lock


def publish(directory: Path, parts: Sequence[PartFile], names: list[str], *, overwrite: bool) -> None:
    """Sync all parts and give them their names in ``directory``, which are added to ``names``. Raises ``OSError``."""
    if len(parts) > 1:
        for part in parts:
            part.begin_to_sync()
        with ThreadPoolExecutor(_SYNCS) as pool:  # side by side, the disk syncs a few times as many
            list(pool.map(PartFile.sync, parts))
    else:
        for part in parts:
            part.sync()
    try:
        for part in parts:
            names.append(part.give_name(overwrite=overwrite))
    finally:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether the file with this ``status`` is the one at ``path``."""
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def _is_same_file(path: Path, size: int, sha256: str) -> bool:
    """Whether a plain file with this size and SHA-256 is at ``path``."""
    try:
        existing = HashedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return False
    try:
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        existing.hash_to(size)
        return existing.sha256 == sha256
    finally:
        existing.close()


def _is_plain_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
