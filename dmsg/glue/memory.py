"""Memory that is free within the process: what is kept of it, and what is given back to the system."""

from __future__ import annotations

import ctypes
from typing import Any, Final

#: What one read of a transfer leads to takes 1.3 MiB, for as long as it is handled.
_LARGEST_BLOCK_BYTES: Final = 2 * 1024 * 1024


def _find() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


_trim = _find()


def give_memory_back() -> None:
    """Have the C library return what it holds free; takes milliseconds. Nothing happens where it cannot (not glibc).

    glibc does so by itself only for large pieces, and for what is free at the end of its heap.
    """
    if _trim is not None:
        _trim(0)


def keep_freed_memory() -> None:
    """Have the C library keep what a transfer frees and needs again with the next read.

    glibc gives the end of its heap back once 128 KiB of it are free, and each page of it is made anew when it is needed
    again: a relay's CPU doubles. What it keeps is twice the largest block that it has ever been given back, 4 MiB from now
    on. Other libraries do not care.
    """
    bytearray(_LARGEST_BLOCK_BYTES)
