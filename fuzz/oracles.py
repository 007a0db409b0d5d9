"""Helpers of targets that check whether a promise was kept."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from dmsg.crypto.keys import SecretKey

#: Keys of fixed parties: inputs hold no keys that a search could not guess.
KEYS = tuple(SecretKey(bytes((number,)) * 32) for number in range(1, 9))


def outcome(call: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...]) -> tuple[str, Any]:
    """The result of ``call()``, or the type of the allowed error it raised; any other error propagates as a finding."""
    try:
        return "value", call()
    except errors as error:
        return "error", type(error)


def built_bytes(value: Any) -> int:
    """The bytes of memory of ``value`` and everything in it; an object that occurs twice counts once."""
    seen: set[int] = set()
    waiting, total = [value], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif hasattr(type(one), "__slots__"):
            waiting += [getattr(one, name) for name in type(one).__slots__ if hasattr(one, name)]
    return total


def check_memory(value: Any, size: int, *, times: int = 64, base: int = 4_096) -> None:
    """Fail if ``value``, made from ``size`` bytes, is larger than ``base`` plus ``times`` as much."""
    built = built_bytes(value)
    assert built <= base + times * size, f"{built} bytes were made of {size}"


class PlainRecords:
    """Records that are not sealed, in place of a :class:`~dmsg.mux.core.record.RecordLayer`: inputs then are the frames."""

    near_exhaustion = False

    def open(self, data: bytes) -> list[bytes]:
        """The received data, as one record."""
        return [data] if data else []

    def seal(self, plaintext: bytes, limit: int = 0) -> bytes:
        """``plaintext`` as it is, in one record; ignores ``limit``."""
        return plaintext


def as_text(data: bytes) -> str:
    """``data`` as an arbitrary text, which may include half surrogate pairs."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def scratch(name: str) -> str:
    """The path of a file for data that can only be read from one; it is removed when the process ends."""
    directory = tempfile.mkdtemp(prefix="dmsg-fuzz-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return os.path.join(directory, name)
