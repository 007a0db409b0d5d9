"""Memory that is free within the process, given back to the system."""

from __future__ import annotations

import ctypes
from typing import Any


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
