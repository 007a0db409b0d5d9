"""Key files with any content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.keys import read_key_file
from fuzz.oracles import KEYS, scratch


def one_input(data: bytes) -> None:
    """The input is the file. Raises only ``KeyFileError``, which shows nothing of the file's content."""
    path = _file()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    try:
        key = read_key_file(path)
    except KeyFileError as error:
        assert error.path == path
        assert len(data) < 8 or data[:8].hex() not in str(error)
        assert len(str(error)) < len(path) + 200
        return
    assert bytes(key).hex().encode() == b"".join(data.lower().split())


@cache
def _file() -> str:
    return scratch("key")


def seeds() -> Iterator[bytes]:
    """A key with and without its line end, in capitals, cut, doubled, out of range, in other encodings."""
    digits = bytes(KEYS[0]).hex()
    for text in (digits + "\n", digits, digits.upper(), digits[:-1], digits * 2, "0" * 64, "f" * 64, "", " " + digits):
        yield text.encode()
    yield digits.encode("utf-16")
    yield bytes(KEYS[0])
    yield digits.encode() + b" " * 5_000
    yield "٠".encode() * 64
