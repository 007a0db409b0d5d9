"""Files that are being received ("parts"): how many there may be, and for how long. All calls block.

:mod:`dmsg.cli.files.part_folder` says where they are, :mod:`dmsg.cli.files.part_file` is one of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dmsg.cli.files.disk import reserve
from dmsg.cli.files.part_file import PartFile, publish
from dmsg.cli.files.part_folder import PartFolder
from dmsg.cli.files.wire import TransferFailed

#: A part is removed when nothing was written to it for this many seconds: three days, so that a weekend costs no transfer.
KEPT_S: Final = 3 * 86_400.0
#: Parts of one sender. Above that, the one that has not been touched for longest is removed: a sender sends one file at a time.
PARTS_PER_SENDER: Final = 16
#: Parts of all senders. Above that, the smallest is removed, so that strangers can push out a part only with larger ones.
PARTS_LIMIT: Final = 1_024
#: Attempts: the directory may be removed, because it is empty, between making it and making a file in it.
_TRIES: Final = 5


class SmallFile(NamedTuple):
    """A file that has come whole: its offered name, its content, the SHA-256 (hex) it should have, when it came (seconds), and
    whether its sender may have sent it before.
    """

    name: str
    data: bytes
    sha256: str
    came_at: float
    again: bool = False


class PartStore:
    """The parts in ``directory``. ``clock`` gives Unix seconds, as the file system does."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = time.time,
        reserve: Callable[[int, int, int], bool] = reserve,
    ) -> None:
        self._folder = PartFolder(directory)
        #: Where the parts are.
        self.folder = self._folder.path
        #: Reserves space for a part: see :func:`~dmsg.cli.files.disk.reserve`.
        self._reserve = reserve
        self._clock = clock
        self._lock = threading.Lock()

    def path(self, sender: str, name: str) -> Path:
        """The path of the part of a file offered as ``name`` by ``sender`` (hex key)."""
        return self._folder.path_of(sender, name)

    def open(self, sender: str, name: str) -> PartFile:
        """The part for a file, new or from before. Raises ``OSError``, or ``TransferFailed`` (``busy``, ``storage``)."""
        path = self.path(sender, name)
        with self._lock:
            if not path.exists():
                self._make_room(sender)
            part = self._open(path, name)
            self._folder.opened(path, self._clock())
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
                    path = self._folder.path_of_its_own(sender)
                    with self._lock:
                        part = self._open(path, file.name)
                    parts.append(part)
                    part.append(file.data)
                    if part.sha256 != file.sha256:
                        raise TransferFailed("mismatch")
                    complete += 1
            except (OSError, TransferFailed) as error:
                problem = error
            publish(self._folder.directory, parts[:complete], names, overwrite=overwrite)
            return names, problem
        except OSError as error:
            return names, error
        finally:
            with contextlib.ExitStack() as stack:  # closes all, also where one cannot be removed
                for part in parts:
                    stack.callback(part.close)
                    stack.callback(part.discard)

    def _open(self, path: Path, name: str) -> PartFile:
        for left in reversed(range(_TRIES)):
            self._folder.make(name)
            try:
                return PartFile(self._folder, path, name, self._reserve)
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError("the loop returns or raises")

    def sweep(self) -> None:
        """Remove the parts that are too old. The hourly sweep also looks anew what is in the folder."""
        with self._lock:
            oldest = self._clock() - KEPT_S
            self._folder.scan()
            for each in list(self._folder.listed().values()):
                if each.changed_at < oldest:
                    self._folder.remove(each.path)
            self._folder.tidy()

    def _make_room(self, sender: str) -> None:
        listed = self._folder.listed()
        # A copy, because a thread that stores small files may take one of them out of the list meanwhile.
        own = sorted((one for one in list(listed.values()) if one.sender == sender), key=lambda one: one.changed_at)
        for each in own[: max(0, len(own) + 1 - PARTS_PER_SENDER)]:
            self._folder.remove(each.path)
        if len(listed) >= PARTS_LIMIT:
            for each in sorted(listed.values(), key=lambda one: (one.size, one.changed_at)):
                if self._folder.remove(each.path):
                    break
