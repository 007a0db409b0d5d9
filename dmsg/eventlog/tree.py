"""The folders of the event log: making them, publishing files, tidying up after killed runs, and bounding their size.

Blocking; the log's thread only. A file being written is locked with ``flock``, and the lock ends with its process: a killed
run left behind each ``.part`` file that is not locked. Other processes may work in the same tree at the same time, and a
shipper may remove files and empty folders at any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from dmsg.eventlog.compress import look_through
from dmsg.eventlog.names import LogFileName

#: Least bytes that a file takes on a disk: without this a limit in bytes would not bound the number of small files.
BLOCK_BYTES: Final = 4096
#: What file systems answer that have no hard links, or none that lead to another folder, as AFS (``EXDEV``).
NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_LEVELS: Final = ("role=", "date=", "hour=")


class Discarded(NamedTuple):
    """What was deleted because of the limit."""

    files: int = 0
    lines: int = 0
    bytes: int = 0

    def plus(self, other: Discarded) -> Discarded:
        """Both together."""
        return Discarded(self.files + other.files, self.lines + other.lines, self.bytes + other.bytes)


# --- publishing ------------------------------------------------------------------------------------------------------


def make_folder(root: str, relative: str) -> str:
    """Make ``root`` and the folders ``relative`` below it so that they survive a loss of power; returns the path.

    Raises ``OSError`` if a folder below ``root`` is a symbolic link: the programs that search for files, to ship them or to
    enforce the limit, follow no links and would not see the files behind it.
    """
    os.makedirs(root, exist_ok=True)
    path = root
    for part in relative.split("/"):
        parent, path = path, os.path.join(path, part)
        try:
            os.mkdir(path)
        except FileExistsError:
            if os.path.islink(path):
                raise OSError(errno.ELOOP, "must be a folder, not a symbolic link", path) from None
            continue
        sync_directory(parent)
    return path


def publish(descriptor: int, part: str, name: LogFileName) -> str:
    """Give a complete file its name, never replacing another file; returns the path, "" if the file is gone.

    ``part`` is its path until now. If the name is taken, the next free number is used.
    """
    os.fsync(descriptor)
    folder = os.path.dirname(part)
    while os.path.lexists(final := os.path.join(folder, name.format())):
        name = name._replace(number=name.number + 1)
    with contextlib.suppress(FileNotFoundError):  # another process has removed it: nothing is left to publish
        os.rename(part, final)
        return final
    return ""


def sync_directory(directory: str) -> None:
    """Make the names in a directory survive a loss of power; silent if the directory is gone, or cannot be synced.

    Some file systems, such as the folders that a virtual machine shares with its host, sync files only.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # one that we may write to, and not list
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def claim(descriptor: int, path: str) -> bool:
    """Lock an open file for this process; ``False`` if another process holds it, or has renamed or removed it meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


# --- what killed runs left -------------------------------------------------------------------------------------------


def publish_leftovers(root: str) -> list[str]:
    """Publish every ``.part`` file that no living process holds, cut after its last whole frame; returns the new paths.

    A file without a whole line is removed. A file that cannot be read or renamed is left alone.
    """
    published = []
    for path, name in list(_files(root, LogFileName.parse_part)):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                final = _publish_leftover(descriptor, path, name) if claim(descriptor, path) else ""
            finally:
                os.close(descriptor)
            if final:
                published.append(final)
    for folder in sorted({os.path.dirname(path) for path in published}):
        with contextlib.suppress(OSError):
            sync_directory(folder)
    return published


def _publish_leftover(descriptor: int, path: str, name: LogFileName) -> str:
    found = look_through(descriptor)
    if not found.lines:
        os.unlink(path)
        return ""
    os.ftruncate(descriptor, found.end)
    return publish(descriptor, path, name._replace(lines=found.lines))


# --- the bound -------------------------------------------------------------------------------------------------------


def discard_oldest(root: str, limit_bytes: int) -> Discarded:
    """Delete the oldest published files until all of them together take at most ``limit_bytes``; returns what was deleted.

    Files that cannot be read or deleted stay and do not count as deleted.
    """
    files = []
    total = 0
    for path, name in _files(root, LogFileName.parse):
        with contextlib.suppress(OSError):  # shipped meanwhile
            status = os.lstat(path)
            files.append((status.st_mtime_ns, path, status.st_size, name.lines))
            total += _on_disk(status.st_size)
    if total <= limit_bytes:
        return Discarded()
    gone = Discarded()
    for _, path, size, lines in sorted(files):
        if total <= limit_bytes:
            break
        try:
            os.unlink(path)
        except FileNotFoundError:  # shipped, or deleted by another process that does the same
            total -= _on_disk(size)
        except OSError:
            continue
        else:
            total -= _on_disk(size)
            gone = gone.plus(Discarded(1, lines, size))
            _remove_empty(os.path.dirname(path))
    return gone


def _on_disk(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _remove_empty(folder: str) -> None:
    """Remove the folder of an hour, and that of its day, if they are empty."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
        os.rmdir(os.path.dirname(folder))


def _files(
    folder: str, parse: Callable[[str], LogFileName | None], depth: int = 0
) -> Iterator[tuple[str, LogFileName]]:
    """Every file whose name ``parse`` knows, in the order of the folders' names; unreadable folders are left out."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda one: one.name)
    except OSError:
        return
    for entry in entries:
        if depth == len(_LEVELS):
            name = parse(entry.name)
            if name is not None:
                yield entry.path, name
        elif entry.name.startswith(_LEVELS[depth]) and entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, parse, depth + 1)
