"""How much a receiver accepts: a quota for its directory, a share of it for each sender, and space that stays free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dmsg.cli.files.disk import plain_files
from dmsg.cli.files.wire import TransferFailed
from dmsg.cli.output import human_bytes

#: How many bytes the directory may grow by while the command runs: six files of the largest size.
QUOTA: Final = "64GiB"
#: How many bytes stay free on the file system, so that logs and other programs go on.
KEEP_FREE: Final = "1GiB"
#: A sender may use this fraction (1/2) of the quota within :data:`SHARE_PERIOD_S`, unless it is on a list.
SHARES: Final = 2
SHARE_PERIOD_S: Final = 86_400.0
#: Files the directory may gain: empty ones cost no bytes, but each costs an inode.
FILES_LIMIT: Final = 100_000
#: Files of one sender within :data:`SHARE_PERIOD_S`, unless it is on a list.
FILES_PER_SENDER: Final = 10_000
#: Senders whose share is remembered; above that, the one that came first is forgotten.
_SENDERS_LIMIT: Final = 65_536
#: The directory is measured again after this many seconds, so that files removed by its owner make room.
_MEASURED_FOR_S: Final = 10.0


@dataclass(slots=True)
class _Taken:
    bytes: int = 0
    files: int = 0


def measure(*directories: Path) -> tuple[int, int]:
    """Bytes and number of the files directly in ``directories``."""
    sizes = [status.st_size for directory in directories for _, status in plain_files(directory)]
    return sum(sizes), len(sizes)


def free_bytes(directory: Path) -> int:
    """How many bytes an ordinary user may still write on the file system of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class Quota:
    """Whether there is room for the files of a sender. Blocking; used in threads. ``clock`` gives seconds.

    Only received bytes count, not announced ones: otherwise strangers could reserve everything at no cost.
    """

    def __init__(
        self,
        directories: tuple[Path, ...],
        quota_bytes: int,
        keep_free_bytes: int,
        *,
        shared: bool,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._directories = directories
        self._quota_bytes = quota_bytes
        self._keep_free_bytes = keep_free_bytes
        self._shared = shared
        self._clock = clock
        self._free = free
        self._lock = threading.Lock()
        self._base = measure(*directories)
        self._grown = _Taken()
        self._measured_at = self._period_began = clock()
        self._senders: dict[str, _Taken] = {}

    def check(self, sender: str, more_bytes: int, *, quickly: bool = False) -> None:
        """Raise ``TransferFailed`` (``quota``, ``no_space``) unless there is room for ``more_bytes`` of ``sender``.

        With ``quickly`` the files are measured only if there seems to be no room: there may be 100,000 of them.
        """
        with self._lock:
            if not quickly or not self._has_room(sender, more_bytes):
                self._look_again()
                if not self._has_room(sender, more_bytes):
                    raise TransferFailed("quota")
        if self._free(self._directories[0]) - more_bytes < self._keep_free_bytes:
            raise TransferFailed("no_space", problem=f"{human_bytes(self._keep_free_bytes)} stay free")

    def add(self, sender: str, count_bytes: int, *, files: int = 0) -> None:
        """Count what ``sender`` has stored; negative if it was removed again."""
        with self._lock:
            taken = self._senders.setdefault(sender, _Taken())
            for one in (taken, self._grown):
                one.bytes = max(0, one.bytes + count_bytes)
                one.files += files
            if len(self._senders) > _SENDERS_LIMIT:
                del self._senders[next(iter(self._senders))]

    def _has_room(self, sender: str, more_bytes: int) -> bool:
        taken = self._senders.get(sender, _Taken())
        share = self._quota_bytes // SHARES
        if self._shared and (taken.bytes + more_bytes > share or taken.files >= FILES_PER_SENDER):
            return False
        return self._grown.bytes + more_bytes <= self._quota_bytes and self._grown.files < FILES_LIMIT

    def _look_again(self) -> None:
        now = self._clock()
        if now - self._period_began >= SHARE_PERIOD_S:
            self._period_began = now
            self._senders.clear()
        if now - self._measured_at >= _MEASURED_FOR_S:
            size, count = measure(*self._directories)
            self._measured_at = now
            self._grown = _Taken(max(0, size - self._base[0]), max(0, count - self._base[1]))
