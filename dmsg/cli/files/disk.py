"""What is in a directory; and advice to the system about a file that is being written, without which the file is the same."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_KEEP_SIZE: Final = 1


def _find() -> Any:
    if sys.platform != "linux" or sys.maxsize < 2**32:  # the calls below use sizes of 64 bits
        return None
    try:
        call = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call


_fallocate = _find()


def plain_files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The path and status of each plain file directly in ``directory``; nothing of what is gone by then."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)


def reserve(descriptor: int, start: int, size: int) -> bool:
    """Reserve space for ``size`` bytes at ``start``; the length of the file does not change. Linux only.

    ``False`` when that fails, for whatever reason: the write will report what is wrong with the disk. A file system that is
    asked once for many pages writes them with a third less work than when it allocates one after the other.
    """
    return _fallocate is not None and _fallocate(descriptor, _KEEP_SIZE, start, size) == 0


def flush_soon(descriptor: int, start: int, end: int) -> None:
    """Have the system begin to write the bytes from ``start`` to ``end`` to the disk, without waiting. Linux only.

    The advice that pages are not needed any more does this for pages not written yet, and does not drop them.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
