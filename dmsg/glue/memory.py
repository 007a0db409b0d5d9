"""The freed memory of the process: how much is kept, and how much goes back to the system."""

from __future__ import annotations

import ctypes
from typing import Any, Final

#: More than the 1.3 MiB that the handling of one read of a transfer takes.
_LARGEST_BLOCK_BYTES: Final = 2 * 1024 * 1024


def _find() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


_trim = _find()


def give_memory_back() -> None:
    """Have the C library return its free memory; takes milliseconds. Does nothing where that is impossible (not glibc).

    By itself glibc returns only large pieces, and free memory at the end of its heap.
    """
    if _trim is not None:
        _trim(0)


def keep_freed_memory() -> None:
    """Have the C library keep the memory that a transfer frees and needs again with the next read.

    glibc returns the end of its heap once 128 KiB of it are free, and the system makes each page anew when it is needed
    again: that doubles the CPU time of a relay. glibc keeps twice the largest block that was ever freed: 4 MiB from now on.
    Other libraries are not affected.
    """
    bytearray(_LARGEST_BLOCK_BYTES)
