"""The shipper's side of the event directory: finding finished files, checking them, removing them. Blocking.

A file is checked before it is shipped: it must consist of whole zstd frames with as many lines as its name says. A damaged
file is moved into ``.damaged`` below the event directory, where it stays, whole, until a person has looked at it. If it were
shipped, its readers would silently drop what they cannot decode; if it stayed in its place, it would be tried for ever. Files
are shipped exactly as they are, never packed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

from dmsg.eventlog.compress import FrameReader
from dmsg.eventlog.names import PART_SUFFIX
from dmsg.eventlog.tree import sync_directory
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.plan import Waiting, landing_path, recognise

#: Folders below the event directory: for damaged files, and for shipped files that are to be kept.
DAMAGED_FOLDER: Final = ".damaged"
SHIPPED_FOLDER: Final = ".shipped"
#: An empty folder of an hour or a day is removed when it has not been changed for this long: no writer wants it then.
EMPTY_FOLDER_S: Final = 2 * 3600.0
_READ_BYTES: Final = 64 * 1024
_DEPTH: Final = 3
_FOLDER_BEGINNINGS: Final = ("role=", "date=", "hour=")


class Found(NamedTuple):
    """The content of an event directory: finished files; how many other files there are; how many are set aside as damaged."""

    files: tuple[Waiting, ...]
    foreign: int
    damaged: int


@dataclass(frozen=True, slots=True)
class Content:
    """A file that was checked: its path here, its content, and which file on the disk it was."""

    path: str
    size_bytes: int
    lines: int
    sha256: str
    md5: str
    status: os.stat_result

    def open(self) -> BinaryIO:
        """The file, opened for reading; raises ``ShippingError`` if that fails, or another file has its path now."""
        try:
            file = _open(self.path)
        except OSError as error:
            raise ShippingError("unreadable", f"{self.path}: {error.strerror}") from None
        if _changed(os.fstat(file.fileno()), self.status):
            file.close()
            raise ShippingError("unreadable", f"{self.path} was changed meanwhile")
        return file


def scan(directory: str, now: float) -> Found:
    """Everything in an event directory at ``now`` (Unix seconds); removes empty folders of old hours and days.

    Raises ``OSError`` if the directory cannot be read. A folder in it that cannot be read is foreign.
    """
    files: list[Waiting] = []
    foreign = 0
    for entry in _walk(directory, now):
        path = os.path.relpath(entry.path, directory)
        if entry.is_file(follow_symlinks=False) and recognise(path) is not None:
            with contextlib.suppress(FileNotFoundError):  # another shipper has shipped it
                status = entry.stat(follow_symlinks=False)
                files.append(Waiting(path, status.st_size, status.st_mtime))
        else:
            foreign += 1
    damaged = sum(len(names) for _, _, names in os.walk(os.path.join(directory, DAMAGED_FOLDER)))
    return Found(tuple(files), foreign, damaged)


def examine(directory: str, path: str) -> Content:
    """Check a file; raises ``FileNotFoundError``, or ``ShippingError`` if it cannot be read or is damaged.

    A damaged file has been moved aside by then.
    """
    name = recognise(path)
    if name is None:
        raise ValueError(f"{path!r} is no finished file of an event log")
    full = os.path.join(directory, path)
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    try:
        with _open(full) as file:
            status = os.fstat(file.fileno())
            frames = FrameReader(status.st_size)
            while piece := file.read(_READ_BYTES):
                sha256.update(piece)
                md5.update(piece)
                for _ in frames.feed(piece) if frames.lines <= name.lines and not frames.problem else ():
                    pass
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ShippingError("unreadable", f"{path}: {error.strerror}") from None
    digest = sha256.hexdigest()
    problem = frames.finish()
    if not problem and frames.lines != name.lines:
        problem = f"its lines are not the {name.lines} its name tells of"
    if not problem and name.digest and not digest.startswith(name.digest):
        problem = "its content is not the one its name tells of"
    if problem:
        place = set_aside(directory, path, digest, DAMAGED_FOLDER)
        raise ShippingError("damaged", f"{path}: {problem}; it is kept as {place}")
    return Content(full, status.st_size, frames.lines, digest, md5.hexdigest(), status)


def release(directory: str, path: str, content: Content, *, keep: bool) -> None:
    """Remove a file whose content is safe elsewhere, or move it into ``.shipped`` if it is to be kept.

    Raises ``ShippingError`` if another file has taken its place, or if it cannot be removed.
    """
    try:
        if _changed(os.stat(content.path, follow_symlinks=False), content.status):
            raise ShippingError("unreadable", f"{path} was changed meanwhile")
        if keep:
            set_aside(directory, path, content.sha256, SHIPPED_FOLDER)
        else:
            os.unlink(content.path)
    except FileNotFoundError:  # another shipper was quicker; the target has it
        return
    except OSError as error:
        raise ShippingError("unreadable", f"{path} was shipped and cannot be removed: {error.strerror}") from None


def set_aside(directory: str, path: str, sha256: str, folder: str) -> str:
    """Move a file into one of the hidden folders, under the name it would have at the target; gives its new path."""
    relative = os.path.join(folder, landing_path(path, sha256))
    target = os.path.join(directory, relative)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(os.path.join(directory, path), target)
        sync_directory(os.path.dirname(target))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ShippingError("unreadable", f"{path} cannot be moved to {relative}: {error.strerror}") from None
    return relative


def _open(path: str) -> BinaryIO:
    """Open a regular file, but nothing else that the name may stand for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "is no file")
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _changed(now: os.stat_result, then: os.stat_result) -> bool:
    return not os.path.samestat(now, then) or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns)


def _walk(directory: str, now: float, depth: int = 0) -> Iterator[os.DirEntry[str]]:
    """All entries that are not hidden and not being written, three folders deep."""
    with os.scandir(directory) as entries:
        listed = [one for one in entries if not one.name.startswith((".", "_"))]
    for entry in listed:
        if not entry.is_dir(follow_symlinks=False):
            if not entry.name.endswith(PART_SUFFIX):
                yield entry
        elif depth == _DEPTH or not entry.name.startswith(_FOLDER_BEGINNINGS[depth]):
            yield entry
        else:
            try:
                yield from _walk(entry.path, now, depth + 1)
            except FileNotFoundError:  # it was empty, and another shipper has removed it
                continue
            except OSError:
                yield entry
    if not listed and depth > 1:
        _remove_if_old(directory, now)


def _remove_if_old(directory: str, now: float) -> None:
    with contextlib.suppress(OSError):  # not empty after all, or not ours to remove
        if now - os.stat(directory).st_mtime > EMPTY_FOLDER_S:
            os.rmdir(directory)
