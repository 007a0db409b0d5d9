"""Files on both ends of a transfer. All calls block, and are made in threads, through :func:`in_thread`."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from dmsg.cli.files.wire import PREFIX, TransferFailed

T = TypeVar("T")

#: Bytes read, hashed and written at a time: enough to make the cost of a thread negligible. With its prefix a block fills 16
#: sealed frames: one byte more would need a frame of its own, which costs as much as a full one.
BLOCK_BYTES: Final = 16 * 65_492 - PREFIX.size
#: The system's cache takes or gives a block in some 0.3 ms. A thread would cost as much again, beside a busy reactor. A block
#: that takes longer than this many seconds waits for a disk.
QUICK_S: Final = 0.003


async def in_thread(reactor: Any, work: Callable[[], T]) -> T:
    """``work()`` in a thread of the reactor's pool."""
    return await start_in_thread(reactor, work)


def start_in_thread(reactor: Any, work: Callable[[], T]) -> Deferred[T]:
    """The same as a Deferred, for a caller that goes on meanwhile. Cancelling does not stop the work."""
    return deferToThreadPool(reactor, reactor.getThreadPool(), work)


class WriteBehind:
    """Data on its way to ``write``, which a thread calls with one block after the other while the next ones come.

    A block is a list of pieces. With ``quick``, ``write`` only hands them to the system: then it is called in this thread, as
    long as that takes less than :data:`QUICK_S`.
    """

    def __init__(self, reactor: Any, write: Callable[[list[bytes]], None], *, quick: bool = False) -> None:
        self._reactor = reactor
        self._write = write
        self._may_be_quick = self._is_quick = quick
        self._waiting: deque[list[bytes]] = deque()
        self._lock = threading.Lock()
        self._failed = False
        self._running: Deferred[None] | None = None

    async def put(self, pieces: list[bytes]) -> None:
        """Have ``pieces`` written; waits until all earlier pieces are. Raises the error of a write."""
        self._waiting.append(pieces)
        await self.done()
        if self._is_quick:
            self._write_waiting()
        elif self._waiting:
            self._running = start_in_thread(self._reactor, self._write_waiting)

    async def done(self) -> None:
        """Wait until everything is written. Raises the error of a write."""
        running, self._running = self._running, None
        if running is not None:
            await running

    def finish(self, data: bytes) -> None:
        """Write what waits, and ``data``, now and in this thread. Raises the error of a write."""
        self._waiting.append([data])
        self._write_waiting()

    def stop(self) -> None:
        """Write nothing more, and ignore the result of the block that is being written."""
        self._waiting.clear()
        if self._running is not None:
            self._running.addErrback(lambda _: None)

    def _write_waiting(self) -> None:
        with self._lock:
            while self._waiting and not self._failed:  # data after a gap is of no use
                self._failed = True
                began = self._reactor.seconds()
                self._write(self._waiting.popleft())
                self._is_quick = self._may_be_quick and self._reactor.seconds() - began < QUICK_S
                self._failed = False


class HashedFile:
    """A descriptor, and a hash of the beginning of the file.

    The lock makes closing wait for the current block: a transfer may be given up while a thread works for it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        #: How much of the file the hash covers, from its beginning.
        self.hashed = 0
        #: How far the file was read or written; the hash may cover less.
        self.offset = 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of the first ``hashed`` bytes, in hex."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file; work under way in a thread ends with ``ValueError``."""
        with self._lock:
            if self._descriptor >= 0:
                try:
                    self._closing()
                finally:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def _closing(self) -> None:
        """Called before the descriptor is closed."""

    def hash_to(self, size: int) -> None:
        """Have the hash cover ``size`` bytes, and move the offset at least there; stops early at the end of the file."""
        more = True
        while more and self.hashed < size:
            with self._lock:
                more = self._hash_more(size)

    def _hash_more(self, size: int) -> bool:
        """One block; ``False`` at the end of the file."""
        block = os.pread(self._fd(), min(BLOCK_BYTES, size - self.hashed), self.hashed)
        self._hash.update(block)
        self.hashed += len(block)
        self.offset = max(self.offset, self.hashed)
        return bool(block)

    def _begin_again(self) -> None:
        self._hash = hashlib.sha256()
        self.hashed = self.offset = 0

    def _fd(self) -> int:
        if self._descriptor < 0:
            raise ValueError("the file was closed")
        return self._descriptor


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is to be sent: where it is, what it is called, and its size in bytes."""

    path: str
    name: str
    size: int

    def open(self) -> SourceFile:
        """Open it to send it. Raises ``OSError``."""
        return SourceFile(_open_source(self.path), self.size)

    def read(self) -> bytes:
        """All bytes of a small file. Raises ``OSError``; gives fewer when the file has become shorter."""
        descriptor = _open_source(self.path)
        try:
            return os.read(descriptor, self.size)
        finally:
            os.close(descriptor)


def find_source(path: str) -> Source:
    """The file at ``path``. Raises ``OSError`` when it cannot be opened, ``TransferFailed`` when it is no plain file or cannot
    be read."""
    descriptor, name = _open_source(path), os.path.basename(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TransferFailed("source", name, "it is no plain file")
        if not status.st_size and os.read(descriptor, 1) and not os.fstat(descriptor).st_size:
            raise TransferFailed("source", name, "its size is not known beforehand")  # a file in /proc, for example
    except OSError as error:
        raise TransferFailed("source", name, error.strerror or "") from None
    finally:
        os.close(descriptor)
    return Source(path, name, status.st_size)


def _open_source(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


class SourceFile(HashedFile):
    """A file that is being sent, with the length that it had when it was found."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor)
        self.size = size

    def rewind(self) -> None:
        """Begin again from the start."""
        with self._lock:
            self._begin_again()

    def read_block(self, limit_bytes: int = BLOCK_BYTES, *, hashed: bool) -> bytes:
        """The next block; empty at the end of the file. A ``hashed`` block may only follow hashed ones."""
        with self._lock:
            block = os.pread(self._fd(), min(limit_bytes, self.size - self.offset), self.offset)
            if hashed:
                self._hash.update(block)
                self.hashed += len(block)
            self.offset += len(block)
            return block


class ReadAhead:
    """The blocks of ``source`` from its offset on; a thread reads and hashes the next block while one is sent.

    Unhashed blocks are read in this thread, as long as that takes less than :data:`QUICK_S`. The first block has at most
    ``first_bytes``, the others have ``block_bytes``.
    """

    def __init__(
        self,
        reactor: Any,
        source: SourceFile,
        first_bytes: int = BLOCK_BYTES,
        *,
        hashed: bool,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._reactor = reactor
        self._source = source
        self._hashed = hashed
        self._limit_bytes = min(first_bytes, block_bytes)
        self._block_bytes = block_bytes
        self._is_quick = not hashed
        self._reading: Deferred[bytes] | None = None

    async def next(self) -> bytes:
        """One block; empty at the end of the file. Raises ``OSError``."""
        if self._reading is None and self._is_quick:
            return self._read()
        reading = self._reading or self._begin()
        self._reading = None
        block = await reading
        if block and not self._is_quick:
            self._reading = self._begin()
        return block

    async def stop(self) -> None:
        """Wait for the thread; after that the source may be used for something else."""
        reading, self._reading = self._reading, None
        if reading is not None:
            with contextlib.suppress(OSError, ValueError):  # of the read; a command that is cancelled here ends
                await reading

    def _begin(self) -> Deferred[bytes]:
        return start_in_thread(self._reactor, self._read)

    def _read(self) -> bytes:
        began = self._reactor.seconds()
        block = self._source.read_block(self._limit_bytes, hashed=self._hashed)
        self._limit_bytes = self._block_bytes
        self._is_quick = not self._hashed and self._reactor.seconds() - began < QUICK_S
        return block


def storage_failure(error: OSError, name: str) -> TransferFailed:
    """The failure that the sender is told for an error of the receiver's disk; only the receiver learns the reason."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return TransferFailed("no_space" if full else "storage", name, error.strerror or "")
