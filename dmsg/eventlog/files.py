"""The sinks of the event log: a file descriptor, or a directory of files. Blocking; the log's thread only.

In a directory lines are packed: every write is one whole zstd frame. The file being written is a ``.part`` that only
the log touches. When it is full or old, or the hour has changed, it is fsynced and renamed, so that its name says how many
lines it holds, and then its folder is fsynced. So a published file (:mod:`dmsg.eventlog.names`) is complete and never changes
again, and a program that reads the directory needs neither locks nor guesses.

A sink keeps the bytes that it could not write: after an ``OSError`` the next ``tick`` goes on exactly where the last write
stopped, so that a full disk neither loses nor doubles a line, nor tears a frame.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from dmsg.eventlog.compress import Compressor
from dmsg.eventlog.names import LogFileName, check_boot, folder, safe_name
from dmsg.eventlog.tree import Discarded, claim, discard_oldest, make_folder, publish, publish_leftovers, sync_directory

#: Size at which a file is published: neither tiny nor huge for its readers. Packed, it holds eight times as much text.
ROTATE_BYTES: Final = 64 * 1024 * 1024
#: Age at which a file is published, full or not; bounds how far readers lag behind.
ROTATE_S: Final = 300.0
#: Limit for published files that have not been shipped.
LIMIT_BYTES: Final = 1024 * 1024 * 1024
#: Seconds for which lines are collected before they become a frame; a killed process loses no more than these.
FLUSH_S: Final = 1.0
#: Bytes of collected lines that become a frame at once.
FLUSH_BYTES: Final = 256 * 1024
_HOUR_S: Final = 3600.0


class Batch(NamedTuple):
    """Whole lines that are written together: their bytes, their number, and the hour (since 1970) of the first."""

    data: bytes
    lines: int
    hour: int


class Sink(Protocol):
    """Takes whole lines. ``now`` is monotonic seconds. Every method may raise ``OSError``, and be called again then."""

    #: For how long lines should be collected before they are written, in seconds.
    gather_s: float

    def open(self) -> None:
        """Get ready; called once, before anything is written."""

    def write(self, batch: Batch, now: float) -> None:
        """Take ``batch`` and write it, after the bytes left over by an earlier call. Never call it twice with one batch."""

    def tick(self, now: float) -> None:
        """Write the bytes left over by an earlier call, then do what is due."""

    def next_due(self) -> float | None:
        """When to call ``tick`` again, if nothing is written before."""

    def take_discarded(self) -> Discarded:
        """What was deleted to make room since the last call."""

    def close(self) -> None:
        """Publish the written lines and release everything."""


def _drain(descriptor: int, data: bytes) -> bytes:
    """Write as much of ``data`` as possible and return the rest. Raises ``OSError`` if nothing could be written."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except OSError:
            if len(view) == len(data):
                raise
            break
    return bytes(view)


class DescriptorSink:
    """Writes to a descriptor it owns, such as a duplicate of standard output."""

    gather_s = 0.0

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def open(self) -> None:
        """Nothing to do: the descriptor was opened by the caller."""

    def write(self, batch: Batch, now: float) -> None:
        """Write everything, or raise ``OSError`` and remember the rest."""
        self._rest += batch.data
        self.tick(now)

    def tick(self, now: float) -> None:
        """Write the rest."""
        while self._rest:
            self._rest = _drain(self._descriptor, self._rest)

    def next_due(self) -> float | None:
        """Never."""
        return None

    def take_discarded(self) -> Discarded:
        """Nothing, ever."""
        return Discarded()

    def close(self) -> None:
        """Close the descriptor and give up the bytes that could not be written."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(slots=True)
class _OpenFile:
    """The file being written. ``size`` and ``lines`` are those of its whole frames; ``due`` is monotonic seconds."""

    descriptor: int
    part: str
    name: LogFileName
    hour: int
    due: float
    size: int = 0


class DirectorySink:
    """Writes files for ``role``, ``node`` and ``boot`` below ``directory``; sizes in bytes, packed; ages in seconds.

    ``limit_bytes`` bounds the size of the published files of all writers there; 0 means no bound. A ``boot`` that is
    not 8 to 32 hex digits is a ``ValueError``.
    """

    gather_s = FLUSH_S

    def __init__(
        self,
        directory: str,
        *,
        role: str,
        node: str,
        boot: str,
        rotate_bytes: int = ROTATE_BYTES,
        rotate_s: float = ROTATE_S,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._directory = directory
        self._role = role
        self._next_name = LogFileName(safe_name(node), check_boot(boot), 0, 0)
        self._rotate_bytes = rotate_bytes
        self._rotate_s = rotate_s
        self._limit_bytes = limit_bytes
        self._compressor = Compressor()
        self._file: _OpenFile | None = None
        self._pending: deque[Batch] = deque()
        # of the first one pending, once it has been begun: its frame, and what of that is not written yet
        self._frame = b""
        self._rest = b""
        self._discarded = Discarded()

    def open(self) -> None:
        """Make the directory if it is missing, publish the files that killed runs left in it, and enforce the limit."""
        os.makedirs(self._directory, exist_ok=True)
        publish_leftovers(self._directory)
        self._discard()

    def write(self, batch: Batch, now: float) -> None:
        """Append a frame, opening a file if none is open and publishing it when it is full."""
        self._pending.append(batch)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Write pending bytes; publish the open file when it is full or old, but never in the middle of a frame."""
        while self._pending:
            batch = self._pending[0]
            file = self._file
            if file is not None and not self._rest and (batch.hour > file.hour or self._is_due(file, now)):
                self._publish(file)
                self._discard()
                file = None
            if file is None:
                file = self._file = self._create(batch.hour, now)
            if not self._rest:
                self._frame = self._rest = self._compressor.frame(batch.data)
            while self._rest:
                self._rest = _drain(file.descriptor, self._rest)
            self._pending.popleft()
            file.size += len(self._frame)
            file.name = file.name._replace(lines=file.name.lines + batch.lines)
        if self._file is not None and self._is_due(self._file, now):
            self._publish(self._file)
            self._discard()

    def next_due(self) -> float | None:
        """When the open file is old enough to be published."""
        return self._file.due if self._file is not None else None

    def take_discarded(self) -> Discarded:
        """What was deleted because of the limit since the last call."""
        discarded, self._discarded = self._discarded, Discarded()
        return discarded

    def close(self) -> None:
        """Publish the open file. Bytes that could not be written because the disk is full are given up and cut off."""
        file = self._file
        if file is None:
            return
        try:
            if self._rest:
                os.ftruncate(file.descriptor, file.size)
            if file.name.lines:
                self._publish(file)
            else:
                os.unlink(file.part)
        finally:
            if self._file is not None:  # the next run finds the file and publishes it
                os.close(file.descriptor)
                self._file = None
            self._rest = b""
            self._pending.clear()

    def _is_due(self, file: _OpenFile, now: float) -> bool:
        return file.size >= self._rotate_bytes or now >= file.due

    def _create(self, hour: int, now: float) -> _OpenFile:
        relative = folder(self._role, hour * _HOUR_S)
        while True:
            name = self._next_name
            part = os.path.join(make_folder(self._directory, relative), name.format_part())
            try:
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
            except FileNotFoundError:  # another process has removed the empty folder
                continue
            except FileExistsError:
                self._next_name = name._replace(number=name.number + 1)
                continue
            self._next_name = name._replace(number=name.number + 1)
            try:
                if claim(descriptor, part):
                    return _OpenFile(descriptor, part, name, hour, now + self._rotate_s)
            except OSError:  # a file system that knows no locks
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
            os.close(descriptor)  # another process that tidies up was quicker and may have the name

    def _publish(self, file: _OpenFile) -> None:
        name = LogFileName.parse(os.path.basename(publish(file.descriptor, file.part, file.name)))
        if name is not None:  # the file may have got a later number, which is not free any more then
            self._next_name = self._next_name._replace(number=max(self._next_name.number, name.number + 1))
        self._file = None
        os.close(file.descriptor)
        if name is None:  # the next call goes on in a new file
            lines = f"the file being written was removed or moved away, with {file.name.lines} lines"
            raise FileNotFoundError(errno.ENOENT, lines, file.part)
        sync_directory(os.path.dirname(file.part))

    def _discard(self) -> None:
        if self._limit_bytes > 0:
            self._discarded = self._discarded.plus(discard_oldest(self._directory, self._limit_bytes))
