"""Files on both ends of a transfer. Everything here blocks: it is called in threads, through :func:`in_thread`.

A file on its way is ``NAME.SENDER.part`` in the receiving directory: the sender's key is part of the name, so that
nobody can learn or spoil what another sender left there. It is locked while it is worked on, synced, and then given its
real name in one step.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from twisted.internet.threads import deferToThreadPool

from dmsg.cli.filewire import PART_SUFFIX, TransferFailed

T = TypeVar("T")

#: What is read, hashed and written at a time: large enough that going to a thread costs nothing beside it.
BLOCK_BYTES: Final = 1024 * 1024
_SENDER_DIGITS: Final = 16


async def in_thread(reactor: Any, work: Callable[[], T]) -> T:
    """``work()`` in a thread of the reactor's pool."""
    result: T = await deferToThreadPool(reactor, reactor.getThreadPool(), work)
    return result


class _Open:
    """A descriptor and the hash of what went through it.

    The lock makes closing wait for the block at hand: a transfer may be given up while a thread works for it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        #: How much of the file the hash covers, from its beginning.
        self.offset = 0

    @property
    def sha256(self) -> str:
        """Of the first ``offset`` bytes, in hex."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Let go of the file; work under way in a thread ends with ``ValueError``."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def hash_to(self, size: int) -> None:
        """Read on to offset ``size`` and hash; stops early where the file ends."""
        while self.offset < size and self.read_block(size):
            pass

    def read_block(self, size: int) -> bytes:
        """The next block before offset ``size``, hashed; empty at the end of the file."""
        with self._lock:
            block = os.pread(self._fd(), min(BLOCK_BYTES, size - self.offset), self.offset)
            self._hash.update(block)
            self.offset += len(block)
            return block

    def _fd(self) -> int:
        if self._descriptor < 0:
            raise ValueError("the file was closed")
        return self._descriptor


class SourceFile(_Open):
    """A file to be sent. Raises ``OSError`` when it cannot be opened, ``TransferFailed`` when it is no plain file."""

    def __init__(self, path: str, *, flags: int = 0) -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags))
        self.name = os.path.basename(path)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise TransferFailed("source", self.name)
        self.size = status.st_size

    def rewind(self) -> None:
        """Begin again from the start."""
        with self._lock:
            self._hash = hashlib.sha256()
            self.offset = 0


class PartFile(_Open):
    """A file that is being received into ``directory`` from ``sender`` (hex key), under ``name`` in the end."""

    def __init__(self, directory: Path, name: str, sender: str) -> None:
        self._path = directory / f"{name}.{sender[:_SENDER_DIGITS]}{PART_SUFFIX}"
        self._final = directory / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        super().__init__(os.open(self._path, flags, 0o666))
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise TransferFailed("busy", name) from None
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise TransferFailed("storage", name)

    def load(self, size: int) -> None:
        """Hash what is there of a file of ``size`` bytes. More than that cannot be of it and is thrown away."""
        with self._lock:
            if os.fstat(self._fd()).st_size > size:
                os.ftruncate(self._fd(), 0)
        self.hash_to(size)

    def restart(self) -> None:
        """Throw away what is there."""
        with self._lock:
            os.ftruncate(self._fd(), 0)
            self._hash = hashlib.sha256()
            self.offset = 0

    def append(self, data: bytes | bytearray) -> None:
        """Write ``data`` behind what is there."""
        with self._lock:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd(), view, self.offset)
                self._hash.update(view[:written])
                self.offset += written
                view = view[written:]

    def publish(self, *, overwrite: bool) -> None:
        """Make it last and give it its name; raises ``TransferFailed`` (``exists``) unless it may ``overwrite``."""
        with self._lock:
            os.ftruncate(self._fd(), self.offset)
            os.fsync(self._fd())
            if overwrite:
                os.replace(self._path, self._final)
            else:
                self._link()
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _link(self) -> None:
        # A rename would replace a file that came up meanwhile; a link does not.
        try:
            os.link(self._path, self._final)
        except FileExistsError:
            raise TransferFailed("exists", self._final.name) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if os.path.lexists(self._final):  # a file system without links: as good as it gets
                raise TransferFailed("exists", self._final.name) from None
            os.rename(self._path, self._final)
        else:
            os.unlink(self._path)

    def discard(self) -> None:
        """Remove it."""
        with self._lock:
            self._path.unlink(missing_ok=True)


def is_same_file(path: Path, size: int, sha256: str) -> bool:
    """Whether a plain file with this size and SHA-256 is at ``path``."""
    try:
        existing = SourceFile(str(path), flags=os.O_NOFOLLOW)
    except (OSError, TransferFailed):
        return False
    try:
        if existing.size != size:
            return False
        existing.hash_to(size)
        return existing.sha256 == sha256
    finally:
        existing.close()


def storage_failure(error: OSError, name: str) -> TransferFailed:
    """What the sender is told when the receiver's disk does not go along."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return TransferFailed("no_space" if full else "storage", name)
