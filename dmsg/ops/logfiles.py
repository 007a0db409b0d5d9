"""Where lines of the event log end up: a file descriptor, or a directory of files. Blocking; the log's thread only.

A published file (``*.jsonl``) is complete and never changes again, so whatever reads the directory needs no lock and no
guess about torn lines. A file being written is called ``*.jsonl.part`` and held with ``flock``; it is fsynced, then
renamed, then the directory is fsynced. ``flock`` dies with its process, so a ``.part`` file nobody holds is what a
killed run left behind: it is cut after its last line end and published.

A sink keeps what it could not write: after an ``OSError`` the next ``write`` (also of nothing) goes on exactly where
the last one stopped, so that no line is lost or doubled by a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import Final, Protocol

PART_SUFFIX: Final = ".part"
FILE_SUFFIX: Final = ".jsonl"
#: A file of this size is published; a reader likes files neither tiny nor huge.
ROTATE_BYTES: Final = 64 * 1024 * 1024
#: A file this old is published, full or not; bounds how far readers are behind.
ROTATE_S: Final = 300.0
_SCAN_BYTES: Final = 64 * 1024
_UNSAFE_IN_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")


class Sink(Protocol):
    """Takes whole lines. ``now`` is monotonic seconds. Everything may raise ``OSError`` and be called again."""

    def open(self) -> None:
        """Get ready; called once, before anything is written."""

    def write(self, data: bytes, now: float) -> None:
        """Write ``data`` after whatever an earlier call could not."""

    def tick(self, now: float) -> None:
        """Do what has become due."""

    def next_due(self) -> float | None:
        """When ``tick`` should be called again, if nothing is written before."""

    def close(self) -> None:
        """Publish what was written and let go of everything."""


class _Buffered:
    """Remembers what a failed write left over."""

    _rest = b""

    def _drain(self, descriptor: int) -> int:
        """Write all of the rest and give its length; on ``OSError`` what was not written stays."""
        view, total = memoryview(self._rest), len(self._rest)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            self._rest = bytes(view)
        return total


class DescriptorSink(_Buffered):
    """Writes to a descriptor it owns, such as a duplicate of standard output."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def open(self) -> None:
        """Nothing to do: the descriptor was opened by whoever made this."""

    def write(self, data: bytes, now: float) -> None:
        """Write everything, or raise ``OSError`` and remember the rest."""
        self._rest += data
        self._drain(self._descriptor)

    def tick(self, now: float) -> None:
        """Nothing becomes due here."""

    def next_due(self) -> float | None:
        """Never."""
        return None

    def close(self) -> None:
        """Close the descriptor; what could not be written is given up."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DirectorySink(_Buffered):
    """Writes ``<stem>-<number>.jsonl`` files into ``directory``; sizes in bytes, ages in seconds."""

    def __init__(
        self, directory: str, stem: str, *, rotate_bytes: int = ROTATE_BYTES, rotate_s: float = ROTATE_S
    ) -> None:
        self._directory = directory
        self._stem = _UNSAFE_IN_NAME.sub("_", stem)
        self._rotate_bytes = rotate_bytes
        self._rotate_s = rotate_s
        self._number = 0
        self._descriptor = -1
        self._final = ""
        self._size = 0
        self._due = 0.0

    def open(self) -> None:
        """Make the directory if it is not there and publish what killed runs left in it."""
        os.makedirs(self._directory, exist_ok=True)
        publish_leftovers(self._directory)

    def write(self, data: bytes, now: float) -> None:
        """Append whole lines, opening a file if none is open and publishing it when it is full."""
        self._rest += data
        if self._rest:
            if self._descriptor < 0:
                self._create(now)
            self._size += self._drain(self._descriptor)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Publish the open file when it is full or old; never in the middle of a line."""
        if self._descriptor >= 0 and not self._rest and (self._size >= self._rotate_bytes or now >= self._due):
            self._publish()

    def next_due(self) -> float | None:
        """When the open file is old enough to be published."""
        return self._due if self._descriptor >= 0 else None

    def close(self) -> None:
        """Publish the open file. If a line is torn because the disk is full, it is left for the next run to cut."""
        if self._descriptor < 0:
            return
        if self._rest:
            os.close(self._descriptor)
            self._descriptor = -1
        else:
            self._publish()

    def _create(self, now: float) -> None:
        os.makedirs(self._directory, exist_ok=True)
        while True:
            final = os.path.join(self._directory, f"{self._stem}-{self._number:06d}{FILE_SUFFIX}")
            self._number += 1
            if os.path.exists(final):
                continue
            try:
                descriptor = os.open(
                    final + PART_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640
                )
            except FileExistsError:
                continue
            if _claim(descriptor, final + PART_SUFFIX):
                break
            os.close(descriptor)  # another process tidying up was quicker; it may have the name
        self._descriptor, self._final, self._size, self._due = descriptor, final, 0, now + self._rotate_s

    def _publish(self) -> None:
        os.fsync(self._descriptor)
        with contextlib.suppress(FileNotFoundError):  # someone removed it under us: nothing is left to publish
            os.rename(self._final + PART_SUFFIX, self._final)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        _sync_directory(self._directory)


def publish_leftovers(directory: str) -> list[str]:
    """Publish every ``.part`` file no living process holds, cut after its last line end; gives their new paths.

    A file without one whole line is removed. A file that cannot be read or renamed is left alone.
    """
    published = []
    for name in sorted(os.listdir(directory)):
        if not name.endswith(FILE_SUFFIX + PART_SUFFIX):
            continue
        path = os.path.join(directory, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _claim(descriptor, path):
                final = _publish_leftover(descriptor, path)
                if final:
                    published.append(final)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    if published:
        _sync_directory(directory)
    return published


def _publish_leftover(descriptor: int, path: str) -> str:
    """Cut, sync and rename a claimed leftover; "" if nothing of it was worth keeping."""
    end = _end_of_last_line(descriptor)
    if end == 0:
        os.unlink(path)
        return ""
    os.ftruncate(descriptor, end)
    os.fsync(descriptor)
    final = path.removesuffix(PART_SUFFIX)
    if os.path.exists(final):  # never over a file someone may have read already
        final = f"{final.removesuffix(FILE_SUFFIX)}-left-{os.fstat(descriptor).st_ino}{FILE_SUFFIX}"
    os.rename(path, final)
    return final


def _end_of_last_line(descriptor: int) -> int:
    """Offset after the last line end, 0 if there is none. Reads from the end, in pieces."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _SCAN_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _claim(descriptor: int, path: str) -> bool:
    """Lock an open file for this process; false if another holds it or has renamed or removed it meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
