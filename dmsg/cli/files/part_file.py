"""One file that is being received (a "part"): written and hashed as it comes, synced, and then given its real name in one
step. All calls block, except closing.

A part is locked while it is in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dmsg.cli.files.disk import flush_soon
from dmsg.cli.files.names import local_name, second_name
from dmsg.cli.files.part_folder import PartFolder
from dmsg.cli.files.store import HashedFile
from dmsg.cli.files.wire import TransferFailed
from dmsg.eventlog.tree import NO_LINKS, sync_directory

#: Files synced to the disk at a time.
_SYNCS: Final = 8
#: Pieces written at once: as many as all systems take.
PIECES_LIMIT: Final = 1_000
#: Writing to the disk begins after each so many bytes, while more come, so that little is left to wait for in the end.
_FLUSH_BYTES: Final = 8 * 1024 * 1024
#: The most space reserved on the disk ahead of the data; and never more than has come, so that offers alone reserve none.
RESERVE_BYTES: Final = 16 * 1024 * 1024


class PartFile(HashedFile):
    """A file offered as ``name`` that is being received at ``path`` in ``folder``. ``reserve`` sets space aside for it.

    Raises ``TransferFailed`` (``busy``, ``storage``), ``OSError``, and ``FileNotFoundError`` if it has gone meanwhile.
    """

    def __init__(self, folder: PartFolder, path: Path, name: str, reserve: Callable[[int, int, int], bool]) -> None:
        self._folder = folder
        self._path = path
        self._reserve = reserve
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
            status = os.fstat(self._descriptor)
        except BlockingIOError:
            self.close()
            raise TransferFailed("busy", name) from None
        except OSError:  # a file system that knows no locks, or a file that another host has removed
            with contextlib.suppress(OSError):
                is_empty = not os.fstat(self._descriptor).st_size
                if is_empty:  # it would stay, because removing a part later takes its lock
                    path.unlink(missing_ok=True)
                    folder.gone(path)
            with contextlib.suppress(OSError):
                self.close()
            raise
        try:
            self._check(status, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.close()
            raise
        self._is_kept = self._is_ours = True

    def _check(self, status: os.stat_result, name: str) -> None:
        """Raise an error unless the file with this ``status``, which is locked, is a part that can be written to."""
        if not stat.S_ISREG(status.st_mode):
            raise TransferFailed("storage", name)
        if status.st_nlink > 1:
            # A receiver was killed while it gave the file its name, and a file with its name is not written to again.
            self._path.unlink(missing_ok=True)
        if status.st_nlink != 1 or not _is_at(self._path, status):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))

    def load(self, size: int) -> None:
        """Hash the bytes that are there of a file of ``size`` bytes, unless their hash was kept.

        If there are more than ``size`` bytes, they are of another file and are thrown away.
        """
        with self._lock:
            status = os.fstat(self._fd())
            kept = self._folder.recall(self._path)
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
            self._may_reserve = self._reserve(self._fd(), self.offset, size)
            self._reserved = self.offset + size

    def publish(self, *, overwrite: bool) -> str:
        """Sync it and give it its name, which is returned. Closing does not wait for this, and ends it."""
        names: list[str] = []
        publish(self._folder.directory, (self,), names, overwrite=overwrite)
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
        final = self._folder.directory / self._local
        if overwrite and (not os.path.lexists(final) or _is_plain_file(final)):
            self._leave(lambda: os.replace(self._path, final))
            return self._local
        return self._local if self._link(final) else self._link_otherwise()

    def _link_otherwise(self) -> str:
        """Give it a name other than its local one, which is taken."""
        self.hash_to(self.offset)
        name = second_name(self._local, self.sha256)
        final = self._folder.directory / name
        if self._link(final):
            return name
        if _is_same_file(final, self.offset, self.sha256):
            self._leave(lambda: os.unlink(self._path))  # sent again: it is there already
            return name
        # That name is taken, too: a sender may have known which file was coming.
        name = second_name(self._local, os.urandom(16).hex())
        if not self._link(self._folder.directory / name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return name

    def _link(self, final: Path) -> bool:
        """Give it a name unless that is taken. A rename would replace a file that was made meanwhile; a link does not."""

        def link() -> None:
            try:
                os.link(self._path, final)
            except OSError as error:
                if error.errno not in NO_LINKS:
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
            self._folder.closed(self._path, status, self._hash, self.hashed)
        else:
            if self._is_kept:
                self._path.unlink(missing_ok=True)  # an offer alone leaves nothing behind
            if self._is_ours:
                self._folder.gone(self._path)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # otherwise the copy of it that is used for syncing keeps the lock


def publish(directory: Path, parts: Sequence[PartFile], names: list[str], *, overwrite: bool) -> None:
    """Sync all parts and give them their names in ``directory``, which are added to ``names``. Raises ``OSError``, and
    ``names`` are then of those that are on the disk."""
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
        try:
            sync_directory(str(directory))
        except OSError:
            names.clear()  # they may not survive a loss of power
            raise


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
