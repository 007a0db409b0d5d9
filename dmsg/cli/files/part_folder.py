"""The folder of files that are being received ("parts"): what is in it, and the hashes kept of it. All calls block.

It is ``.dmsg-parts`` below the receiving directory, and only its owner may enter it. A part is ``SENDER-DIGEST.part``: the
sender's key and a digest of the offered name. So no sender can learn or spoil what another one left there, and no name chosen
by a stranger reaches the disk before its file is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmsg.cli.files.disk import plain_files
from dmsg.cli.files.wire import PART_SUFFIX, TransferFailed

FOLDER: Final = ".dmsg-parts"
#: Hashes that are kept of parts that are not in use.
HASHES_LIMIT: Final = 1_024
_NAME_DIGITS: Final = 32


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


@dataclass(frozen=True, slots=True)
class Listed:
    """A part in the folder: its size in bytes, and when it was last written to, in Unix seconds."""

    path: Path
    size: int
    changed_at: float

    @property
    def sender(self) -> str:
        """The key of its sender, in hex."""
        return self.path.name.partition("-")[0]


class PartFolder:
    """The parts of the receiving directory ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / FOLDER
        self._hashed: dict[Path, _Hashed] = {}
        #: The content of the folder; ``None`` until it has been scanned.
        self._index: dict[Path, Listed] | None = None

    def path_of(self, sender: str, name: str) -> Path:
        """The path of the part of a file offered as ``name`` by ``sender`` (hex key)."""
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]
        return self.path / f"{sender}-{digest}{PART_SUFFIX}"

    def path_of_its_own(self, sender: str) -> Path:
        """A path for a part of ``sender`` that no other part has."""
        return self.path / f"{sender}-{os.urandom(_NAME_DIGITS // 2).hex()}{PART_SUFFIX}"

    def make(self, name: str) -> None:
        """Make the folder if it is not there. Raises ``TransferFailed`` for ``name`` if others may write to it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise TransferFailed(
                "storage", name, f"{FOLDER} must be a directory of this user to which others cannot write"
            )

    def tidy(self) -> None:
        """Remove the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    # --- what is in it -----------------------------------------------------------------------------------------------

    def listed(self) -> dict[Path, Listed]:
        """What is in the folder, by path; it is scanned the first time."""
        if self._index is None:
            self.scan()
        assert self._index is not None
        return self._index

    def scan(self) -> None:
        """Look what is in the folder."""
        self._index = {
            Path(path): Listed(Path(path), status.st_size, status.st_mtime)
            for path, status in plain_files(self.path)
            if path.endswith(PART_SUFFIX)
        }

    def opened(self, path: Path, now: float) -> None:
        """A part is in use; it may be new, ``now`` in Unix seconds."""
        self.listed().setdefault(path, Listed(path, 0, now))

    def closed(self, path: Path, status: os.stat_result, hashed: Any, offset: int) -> None:
        """A part is closed and stays. Its hash is kept, so that the next offer need not hash it again."""
        self.listed()[path] = Listed(path, status.st_size, status.st_mtime)
        self._hashed.pop(path, None)
        self._hashed[path] = _Hashed(hashed, offset, status.st_size, status.st_ino, status.st_mtime_ns)
        if len(self._hashed) > HASHES_LIMIT:
            del self._hashed[next(iter(self._hashed))]

    def gone(self, path: Path) -> None:
        """A part has been removed."""
        self.listed().pop(path, None)
        self.tidy()

    def recall(self, path: Path) -> _Hashed | None:
        """Take the kept hash of a part, and forget it here."""
        return self._hashed.pop(path, None)

    def remove(self, path: Path) -> bool:
        """Remove a part unless a transfer holds its lock; returns whether it is gone."""
        try:  # for writing, because NFS and SMB lock no other descriptor exclusively
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self.listed().pop(path, None)
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
        self.listed().pop(path, None)
        return True
